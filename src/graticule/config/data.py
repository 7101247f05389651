"""Which data a run sees, what it forecasts from them, and how it is scored."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require

_THRESHOLD = re.compile(r"(?P<name>[^<>]*[^<>\s][^<>]*)(?P<sign>[<>])(?P<value>[^<>=]+)")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which fields a sample holds, and which times belong to which split."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    store: str = ""
    """Path of the store (a Zarr folder written by `graticule data ingest` or `data demo`)."""
    prognostic: tuple[str, ...] = ()
    """Predicted and fed back: `name` (all its levels) or `name@level`. Empty: all the store's."""
    forcing: tuple[str, ...] = ()
    """Given at every lead, also from the future. Never predicted."""
    diagnostic: tuple[str, ...] = ()
    """Predicted only: a label at every lead, never an input."""
    static: tuple[str, ...] = ()
    """Fields without time that are given with every input."""
    without: tuple[str, ...] = ()
    """Channels and statics of the store that are left out, as if it had none of them: a model
    without its forcing is `data.without=hfds,wfo`."""
    grid: tuple[int, int] | None = None
    """(lat, lon) points. Needed where no store is at hand (`graticule info`), else checked."""
    input_offsets: tuple[int, ...] = (0,)
    """Input states, in strides from the initial time: (0,) Wenhai, (-1, 0) with history."""
    output_offsets: tuple[int, ...] = (1,)
    """States predicted in one model step, in strides from the initial time."""
    forcing_offsets: tuple[int, ...] = (0,)
    """Times of the forcing given with one model step, in strides from its initial time. Over the
    window of the input states, as Samudra was trained: `input_offsets` itself, (-1, 0). Over the
    window of the labels, the forcing under which the predicted states came about: `output_offsets`
    itself, (1, 2). A rollout moves both on by the output times of a step, lead by lead."""
    stride: int = 1
    """Store steps per offset: 12 for a twelve-hour model on hourly data."""
    train: tuple[str, ...] = ()
    """`first/last` dates, both included, each as precise as wanted (`1982-01/1990-12`).
    Empty: the split that the store declares."""
    validation: tuple[str, ...] = ()
    """As `train`."""
    test: tuple[str, ...] = ()
    """As `train`."""
    holes: Literal["error", "drop-window"] = "error"
    """What to do with a sample that has missing values at sea."""
    read_threads: int = 1
    """Threads of each process that read and decompress while the model computes."""
    read_waves: int = 1
    """Turns in which the processes begin to read, for a parallel file system that suffers when
    all do at once (BEAST: waves of 128 ranks): process r of n waves waits r mod n turns. 1: none
    waits. The numbers do not depend on it."""

    def __post_init__(self) -> None:
        for name in ("read_threads", "read_waves", "stride"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name}={value} must be at least 1")
        for role in ("prognostic", "forcing", "diagnostic", "static"):
            both = [name for name in getattr(self, role) if name in self.without]
            require(
                not both,
                f"data.without and data.{role} both name {', '.join(both)}; name it in one of them",
            )
        require(
            bool(self.input_offsets) and max(self.input_offsets) == 0,
            f"data.input_offsets={self.input_offsets}: the last input is the initial time,"
            " offset 0",
        )
        outputs = self.output_offsets
        require(
            bool(outputs) and outputs == tuple(range(1, len(outputs) + 1)),
            f"data.output_offsets={outputs} must be 1, 2, ... without a gap; a longer step is"
            " data.stride",
        )
        inputs = self.input_offsets
        require(
            inputs == tuple(range(1 - len(inputs), 1)),
            f"data.input_offsets={inputs} must be ..., -1, 0 without a gap; a longer step is"
            " data.stride",
        )


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """What `graticule forecast` makes when the command line does not say otherwise."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    leads: int = 10
    """Model steps of a forecast."""
    every: int = 1
    """Start at every n-th initial time of the split."""
    split: Literal["train", "validation", "test"] = "test"
    weights: Literal["average", "last"] = "average"
    """`average`: the moving average where the run has one, else the last weights."""
    log_every: int = 10
    """Log mean, least and greatest value of each channel beside the forecast after every n-th
    model step and the last; 0: never. What that costs is told at the end."""
    restart_every: int = 10
    """Keep what a stopped forecast goes on with after every n-th model step; 0: never. Each time
    costs about what a lead does to write."""

    def __post_init__(self) -> None:
        for name in ("leads", "every"):
            value = getattr(self, name)
            require(value >= 1, f"forecast.{name}={value} must be at least 1")
        for name in ("log_every", "restart_every"):
            value = getattr(self, name)
            require(value >= 0, f"forecast.{name}={value} must be at least 0 (0: never)")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How forecasts are scored."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    climatology: Literal["all", "month", "month-day"] = "month-day"
    """Mean over the training times of the same month and day, of the same month, or of all
    (a planet without seasons)."""
    region: tuple[float, float, float, float] | None = None
    """(west, east, south, north) in degrees; west > east crosses the origin of longitude."""
    thresholds: tuple[str, ...] = ()
    """Events that ensembles give a probability, such as `u@850>20` or `zos<-0.5`, in the channel's
    units: Brier score and reliability of each."""
    point: tuple[float, float] | None = None
    """(lat, lon) in degrees, near which each member is followed over the leads; none: in the
    middle of the region, or at 45 N, 0 E."""

    def __post_init__(self) -> None:
        for text in self.thresholds:
            threshold_parts(text)
        require(
            self.point is None or -90 <= self.point[0] <= 90,
            f"evaluate.point={self.point}: the first number is a latitude, within -90 to 90",
        )
        require(
            self.region is None or -90 <= self.region[2] <= self.region[3] <= 90,
            f"evaluate.region={self.region}: south and north, the last two, must ascend within"
            " -90 to 90",
        )


def threshold_parts(text: str) -> tuple[str, bool, float]:
    """(channel, whether values above are the event, value) of `u@850>20` or `zos<-0.5`."""
    found = _THRESHOLD.fullmatch(text)
    try:
        number = float(found["value"]) if found else math.inf
    except ValueError:
        number = math.inf
    require(
        math.isfinite(number),
        f"evaluate.thresholds: {text!r} is no threshold; write a channel, > or <, and a number in"
        " its units, such as u@850>20",
    )
    assert found
    return found["name"].strip(), found["sign"] == ">", number
