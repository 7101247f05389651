"""Configuration: frozen, typed sections. What a run is, in one value.

A recipe is a function that returns a whole `Config`; a variant of it is
`dataclasses.replace(...)`, or `--set section.key=value` on the command line.
Unknown keys are refused with the nearest name, and no field changes another.
"""

import dataclasses
import difflib
import hashlib
import json
import re
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

_FORBID = ConfigDict(extra="forbid", allow_inf_nan=False)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which fields a sample holds, and which times belong to which split."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

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
    """Times of the forcing given with one model step, in strides from its initial time."""
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
            _require(value >= 1, f"data.{name}={value} must be at least 1")
        for role in ("prognostic", "forcing", "diagnostic", "static"):
            both = [name for name in getattr(self, role) if name in self.without]
            _require(
                not both,
                f"data.without and data.{role} both name {', '.join(both)}; name it in one of them",
            )
        _require(
            bool(self.input_offsets) and max(self.input_offsets) == 0,
            f"data.input_offsets={self.input_offsets}: the last input is the initial time,"
            " offset 0",
        )
        outputs = self.output_offsets
        _require(
            bool(outputs) and outputs == tuple(range(1, len(outputs) + 1)),
            f"data.output_offsets={outputs} must be 1, 2, ... without a gap; a longer step is"
            " data.stride",
        )
        inputs = self.input_offsets
        _require(
            inputs == tuple(range(1 - len(inputs), 1)),
            f"data.input_offsets={inputs} must be ..., -1, 0 without a gap; a longer step is"
            " data.stride",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hierarchical Swin model (TERRA, section II and Table V)."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    family: Literal["swin"] = "swin"
    patch: int = 4
    """Grid points per token, each way."""
    sampling: int = 2
    """Stride of the down- and up-sampling modules (alpha); 1: no such modules."""
    width: int = 256
    """Features of a token (d)."""
    depth: int = 4
    """Swin blocks (L); odd ones attend in shifted windows."""
    heads: int = 8
    window: int | tuple[int, int] = 8
    """Tokens of an attention window, (lat, lon) or one number for both."""
    mlp_ratio: int = 4
    norm_groups: int = 32
    """Groups of the group norms in the sampling modules."""
    bias_table: bool = True
    """Learned relative position bias."""
    boundary: Literal["globe", "paper"] = "globe"
    """`globe`: longitude is periodic, poles are walls, padding does not exist for the model.
    `paper`: zero padding on all sides, four walls, padding counts in norms (as published)."""
    padded_shape: tuple[int, int] | None = None
    """(lat, lon) of the padded field; none: the smallest legal one."""

    def __post_init__(self) -> None:
        for name in ("patch", "sampling", "width", "depth", "heads", "mlp_ratio", "norm_groups"):
            value = getattr(self, name)
            _require(value >= 1, f"model.{name}={value} must be at least 1")
        _require(
            min(self.window_shape) >= 1, f"model.window={self.window} must be at least 1 each way"
        )
        _require(
            self.width % self.heads == 0,
            f"model.width={self.width} is not a multiple of model.heads={self.heads}",
        )
        _require(
            self.sampling == 1 or self.width % self.norm_groups == 0,
            f"model.width={self.width} is not a multiple of model.norm_groups={self.norm_groups}",
        )

    @property
    def window_shape(self) -> tuple[int, int]:
        """Tokens of a window, (lat, lon)."""
        return (self.window, self.window) if isinstance(self.window, int) else self.window


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many processes share the work, by axis, and how.

    data x member x window x sequence x tensor is the number of processes. One sample is spread
    over window x sequence x tensor of them, each of which reads and keeps a stripe of its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    data: int = 0
    """Samples side by side; 0: what the other axes leave of the processes that were started."""
    member: int = 1
    window: int = 1
    """Ranks that share a sample's attention windows."""
    sequence: int = 1
    """Ranks that share each window's tokens; 0: the split of mesh.window ranks into window x
    sequence that is fastest, found out before training (TERRA, Algorithm 1)."""
    tensor: int = 1
    """Ranks that share the weights of attention and MLP."""
    stripe_dim: Literal["lat", "lon"] = "lat"
    """Stripes of rows or of columns."""
    fixed_windows: tuple[int, int] | None = None
    """(m, n) with m x n = mesh.window: windows in round robin over m x n ranks, the grid of windows
    filled up with empty ones (AERIS). None: ragged row-major ranges (TERRA, Eq. 4)."""
    weights: Literal["replicated", "sharded"] = "replicated"
    """Whether each rank keeps all weights, gradients and optimizer state, or its shard (FSDP)."""
    shard_unit: Literal["block", "model"] = "block"
    """What sharded weights are gathered for at a time."""
    reshard: bool = True
    """Free gathered weights after the forward pass and gather them again for the backward pass."""
    gather: Literal["compute", "fp32"] = "compute"
    """Type in which sharded weights travel: the one they are computed in, or float32, which adds
    up the gradients of several leads in float32 too."""
    exchange: Literal["all_to_all", "p2p"] = "all_to_all"
    """How halos and tokens travel: one collective, or a message for each pair of ranks."""

    def __post_init__(self) -> None:
        for axis in ("data", "member", "window", "sequence", "tensor"):
            size, least = getattr(self, axis), int(axis in ("member", "window", "tensor"))
            _require(size >= least, f"mesh.{axis}={size} must be at least {least}")
        _require(
            self.member == 1,
            f"mesh.member={self.member}: there are no ensembles to share yet; leave it at 1",
        )
        fixed = self.fixed_windows
        if fixed is not None:
            _require(
                min(fixed) >= 1 and fixed[0] * fixed[1] == self.window,
                f"mesh.fixed_windows={fixed} must be two numbers whose product is"
                f" mesh.window={self.window}",
            )
            _require(
                self.sequence > 0,
                "mesh.sequence=0 looks among ragged windows; set mesh.fixed_windows=none, or say"
                " mesh.sequence",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: pretraining with one lead, fine-tuning with several."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    steps: int = 1000
    """Optimizer steps in all."""
    batch: int = 8
    """Samples per micro-batch."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    leads: int = 1
    """Autoregressive steps whose losses are summed (K)."""
    rollout_gradient: Literal["full", "detached"] = "full"
    """`full`: through the whole rollout. `detached`: each lead's input is a constant."""
    loss: Literal["mae", "mse"] = "mae"
    area_weighted: bool = True
    """Weigh each cell by its area on the sphere; else all wet cells alike."""
    learning_rate: float = 2e-4
    final_learning_rate: float = 1e-6
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to the final rate, or constant (fine-tuning)."""
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices and kernels only: not on biases, norms and bias tables."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    ema_decay: float = 0.0
    """Exponential moving average of the weights; 0: none. Step n uses at most
    (1 + n) / (10 + n), so that a short run forgets its random start."""
    precision: Literal["fp32", "bf16", "fp16", "paper"] = "fp32"
    """Of activations and of the weights they meet; master weights stay in float32. `paper`: as
    TERRA was trained, fp16 with a float32 residual stream between float16 fields."""
    roll_longitude: bool = False
    """Turn each sample by a random number of grid points in longitude. Only right where
    nothing but the fields tells longitudes apart: no land, no statics."""
    seed: int = 0
    start_from: str = ""
    """A run whose weights (its average, if it has one) this one starts with: fine-tuning."""
    checkpoint_every: int = 500
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    save_in_background: bool = False
    """Write checkpoints from a copy in host memory while training goes on."""
    validate_every: int = 0
    """Steps between losses on the validation split; 0: only at the end."""
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "accumulation",
            "leads",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name}={value} must be at least 1")
        for name in (
            "learning_rate",
            "final_learning_rate",
            "weight_decay",
            "clip_norm",
            "warmup_steps",
            "validate_every",
        ):
            value = getattr(self, name)
            _require(value >= 0, f"train.{name}={value} must not be negative")
        _require(
            0 <= self.ema_decay < 1,
            f"train.ema_decay={self.ema_decay} must be at least 0 and less than 1",
        )
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"train.betas={self.betas} must each be at least 0 and less than 1",
        )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The memory budget of a device."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    budget: str = ""
    """What a step may hold on the device, such as `40GiB`; empty: no limit. A run that cannot
    keep to it is refused before it starts."""
    mode: Literal["best", "paper", "full", "none"] = "best"
    """Which plan: `best` the cheapest in predicted time that meets the budget (without one,
    everything is kept); `paper` as published for TERRA (Eq. 5, Algorithm 2); `full` each unit of
    the model recomputed by itself; `none` everything kept."""
    offload: bool = True
    """Whether boundaries of recomputed units may wait on the host."""
    folder: str = ""
    """On a local disk, where they wait then; empty: in host memory."""

    def __post_init__(self) -> None:
        if self.budget:
            bytes_of(self.budget, "memory.budget")

    @property
    def budget_bytes(self) -> int | None:
        return bytes_of(self.budget, "memory.budget") if self.budget else None


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """What `graticule forecast` makes when the command line does not say otherwise."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    leads: int = 10
    """Model steps of a forecast."""
    every: int = 1
    """Start at every n-th initial time of the split."""
    split: Literal["train", "validation", "test"] = "test"
    weights: Literal["average", "last"] = "average"
    """`average`: the moving average where the run has one, else the last weights."""

    def __post_init__(self) -> None:
        _require(self.leads >= 1, f"forecast.leads={self.leads} must be at least 1")
        _require(self.every >= 1, f"forecast.every={self.every} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How forecasts are scored."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    climatology: Literal["all", "month", "month-day"] = "month-day"
    """Mean over the training times of the same month and day, of the same month, or of all
    (a planet without seasons)."""
    region: tuple[float, float, float, float] | None = None
    """(west, east, south, north) in degrees; west > east crosses the origin of longitude."""

    def __post_init__(self) -> None:
        _require(
            self.region is None or -90 <= self.region[2] <= self.region[3] <= 90,
            f"evaluate.region={self.region}: south and north, the last two, must ascend within"
            " -90 to 90",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    name: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any value of any section."""
        # Through the checked types: `clip_norm=1` and `clip_norm=1.0` are one configuration.
        return fingerprint(from_dict(self.to_dict()).to_dict())


def bytes_of(text: str, name: str) -> int:
    """`40GiB`, `800 MiB`, `85.9GB` or a plain number of bytes. name: whose value it is."""
    units = {"": 1, "B": 1} | {
        f"{letter}{kind}": base**power
        for power, letter in enumerate("KMGT", 1)
        for kind, base in (("iB", 1024), ("B", 1000))
    }
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2] not in units or float(found[1]) <= 0:
        raise ValueError(f"{name}={text}: write a size above 0, such as 40GiB, 800MiB or 85GB")
    return int(float(found[1]) * units[found[2]])


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_dict(values: dict[str, Any]) -> Config:
    """A checked `Config` from plain values; ValueError names the key, the value and the rule."""
    if not isinstance(values, dict):
        raise ValueError(f"a configuration is a table of sections, not {values!r}")
    _refuse_unknown(values, Config, "")
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # One number or a pair: a list was meant as the pair, which is the later alternative.
        first = errors[-1 if isinstance(errors[0]["input"], list) else 0]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ValueError(message) from None
        # pydantic's location also names the member of a union that failed: keep our own keys.
        section, *rest = (str(part) for part in first["loc"][:2])
        key, hint = section, _fields(Config)[section]
        if rest:
            key, hint = f"{section}.{rest[0]}", _fields(hint)[rest[0]]
        kind = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise ValueError(
            f"{key}={first['input']!r}: {message} (it holds {kind.removeprefix('typing.')})"
        ) from None


def override(config: Config, settings: list[str]) -> Config:
    """`config` with `section.key=value` settings applied, in order.

    A value is JSON where it parses as JSON, else text; `a,b` is a list. One item is enough for
    a key that holds a list. Keys that hold text take it as it is written: 2003 is a date.
    """
    values = config.to_dict()
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write section.key=value")
        section, dot, key = path.partition(".")
        if path == "name":
            values["name"] = text
            continue
        _refuse_unknown({section: {}}, Config, "")
        if not dot or section == "name":
            raise ValueError(f"--set {setting}: write section.key=value")
        section_type = _fields(Config)[section]
        _refuse_unknown({key: None}, section_type, section + ".")
        hint = _fields(section_type)[key]
        holds_list = "tuple" in str(hint)
        takes_one = "int |" in str(hint)
        # Of a choice of words each is meant as it stands, `none` too.
        as_it_stands = hint is str or text in typing.get_args(hint)
        value = text if as_it_stands else _parse(text, as_text="str" in str(hint))
        if value is None and "str" in str(hint) and "None" not in str(hint):
            value = []  # none of the names or dates
        elif holds_list and not isinstance(value, list | None) and not takes_one:
            value = [value] if text else []
        values[section][key] = value
    return from_dict(values)


@cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)  # 10 ms to build


def _parse(text: str, as_text: bool = False) -> Any:
    """as_text: numbers stay text, such as years (JSON lists are read all the same)."""
    try:
        # JSON knows no 01; without parse_int a year inside a list would become a number.
        value = json.loads(text, parse_int=str if as_text else int)
        if not as_text or isinstance(value, list) or value is None:
            return value
        return text
    except json.JSONDecodeError:
        named = {"True": True, "False": False, "None": None, "none": None}
        if text in named:
            return named[text]
        if "," not in text:
            return text
        # A comma at the end makes a list of one, as in Python.
        return [_parse(part.strip(), as_text) for part in text.removesuffix(",").split(",")]


def _fields(section: type) -> dict[str, Any]:
    hints = typing.get_type_hints(section)
    return {f.name: hints[f.name] for f in dataclasses.fields(section)}


def _refuse_unknown(values: dict[str, Any], section: type, prefix: str) -> None:
    known = _fields(section)
    for key, value in values.items():
        if key not in known:
            near = _nearest(str(key), known, prefix)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"unknown key {prefix}{key}{hint} (keys here: {', '.join(known)})")
        if dataclasses.is_dataclass(known[key]) and isinstance(value, dict):
            _refuse_unknown(value, typing.cast(type, known[key]), f"{prefix}{key}.")


def _nearest(key: str, known: dict[str, Any], prefix: str) -> list[str]:
    """What an unknown key may have meant: the same key elsewhere, else the nearest name."""
    homes: dict[str, list[str]] = {}
    for name, section in _fields(Config).items():
        for other in _fields(section) if name != "name" else ():
            homes.setdefault(other, []).append(f"{name}.{other}")
    names = {**homes, **{name: [prefix + name] for name in known}}
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return names[near[0]] if near else []
