"""Variables of a store and the channels they make: one channel per variable and level."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Role = Literal["prognostic", "forcing", "static", "diagnostic"]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One plane (lat, lon) of a sample.

    `name` is `variable` or `variable@level`. `low` and `high` are physical bounds in `units`
    (none: unbounded) that `graticule data check` holds values to.
    """

    variable: str
    units: str
    role: Role
    level: float | None = None
    level_units: str = ""
    long_name: str = ""
    standard_name: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        return self.variable if self.level is None else f"{self.variable}@{self.level:g}"


class Channels(Sequence[Channel]):
    """Channels in store order, found by name and never by position alone."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = tuple(channels)
        self.names = tuple(channel.name for channel in self._channels)
        seen: set[str] = set()
        for name in self.names:
            if name in seen:
                raise ValueError(f"channel {name} occurs twice")
            seen.add(name)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return Channels(self._channels[item])
        return self._channels[item]

    def __len__(self) -> int:
        return len(self._channels)

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._channels)

    def __contains__(self, item: object) -> bool:
        """Whether there is a channel of this name (or this channel)."""
        return item in self.names or item in self._channels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channels) and self._channels == other._channels

    def __hash__(self) -> int:
        return hash(self._channels)

    def __repr__(self) -> str:
        return f"Channels({', '.join(self.names)})"

    def index(self, name: Any, start: int = 0, stop: int | None = None) -> int:
        """Position of the channel called `name`; ValueError lists what there is."""
        if name not in self.names:
            raise ValueError(f"no channel {name}; there are {', '.join(self.names) or 'none'}")
        return self.names.index(name)

    def pick(self, names: Sequence[str]) -> list[int]:
        """Positions, in the order asked for. `variable` stands for all its levels."""
        picked: list[int] = []
        for name in names:
            levels = [i for i, channel in enumerate(self) if channel.variable == name]
            picked += levels if levels and name not in self.names else [self.index(name)]
        if len(set(picked)) < len(picked):
            raise ValueError(f"{', '.join(names)} names a channel twice")
        return picked

    def with_role(self, role: Role) -> list[int]:
        """Positions of all channels with this role, in store order."""
        return [i for i, channel in enumerate(self) if channel.role == role]

    def subset(self, positions: Sequence[int]) -> "Channels":
        return Channels([self._channels[i] for i in positions])

    def to_list(self) -> list[dict[str, Any]]:
        """Plain values for a file's metadata."""
        return [asdict(channel) for channel in self]

    @classmethod
    def from_list(cls, values: Sequence[dict[str, Any]]) -> "Channels":
        return cls([Channel(**value) for value in values])
