"""A whole configuration: from plain values, from settings on the command line, and back."""

import dataclasses
import difflib
import hashlib
import json
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from graticule.config.bayes import BayesConfig
from graticule.config.data import DataConfig, EvaluateConfig, ForecastConfig
from graticule.config.devices import MemoryConfig, MeshConfig
from graticule.config.model import FAMILIES, ModelConfig, SwinConfig
from graticule.config.train import TrainConfig
from graticule.config.values import FORBID


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    name: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    model: Annotated[ModelConfig, Field(discriminator="family")] = field(default_factory=SwinConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    bayes: BayesConfig = field(default_factory=BayesConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        members, ranks = self.bayes.members, self.mesh.member
        if members % ranks:
            fit = ", ".join(str(n) for n in range(1, members + 1) if members % n == 0)
            raise ValueError(
                f"bayes.members={members} cannot be shared evenly by mesh.member={ranks} ranks:"
                f" take mesh.member={fit}, or bayes.members={-(-members // ranks) * ranks}"
            )
        if self.bayes.likelihood == "none":
            return
        for key, none in (("gradient_loss", 0.0), ("dynamic_scale", "none")):
            value = getattr(self.train, key)
            if value != none:
                raise ValueError(
                    f"train.{key}={value} is of a model without members, whose errors are never"
                    f" negative: with bayes.likelihood={self.bayes.likelihood} set train.{key}="
                    f"{none}"
                )

    @property
    def swin(self) -> SwinConfig:
        """`model`, for what only a model with attention windows has. ValueError for another."""
        if not isinstance(self.model, SwinConfig):
            raise ValueError(
                f"{self.name or 'the model'} is of the family {self.model.family}; what was asked"
                " for is of attention windows and heads of the family swin alone"
            )
        return self.model

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any value of any section."""
        # Through the checked types: `clip_norm=1` and `clip_norm=1.0` are one configuration.
        return fingerprint(from_dict(self.to_dict()).to_dict())


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_dict(values: dict[str, Any]) -> Config:
    """A checked `Config` from plain values; ValueError names the key, the value and the rule."""
    if not isinstance(values, dict):
        raise ValueError(f"a configuration is a table of sections, not {values!r}")
    sections = _sections(values.get("model"))
    _refuse_unknown(values, sections, "")
    if isinstance(model := values.get("model"), dict):
        values = {**values, "model": {"family": "swin", **model}}
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
        section, *rest = (str(part) for part in first["loc"] if part not in FAMILIES)
        key, hint = section, sections[section]
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
        sections = _sections(values["model"])
        _refuse_unknown({section: {}}, sections, "")
        if not dot or section == "name":
            raise ValueError(f"--set {setting}: write section.key=value")
        section_type = sections[section]
        _refuse_unknown({key: None}, _fields(section_type), section + ".")
        if path == "model.family" and text != config.model.family:
            raise ValueError(
                f"--set {setting}: the recipe's model is of the family {config.model.family}, whose"
                " keys another family has not; choose a recipe of that family"
            )
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


def _sections(model: Any) -> dict[str, Any]:
    """The keys of a whole configuration, and of which type each is. model: plain values of that
    section, whose family decides."""
    family = model.get("family", "swin") if isinstance(model, dict) else "swin"
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model.family={family!r}: there are {' and '.join(FAMILIES)}")
    return _fields(Config) | {"model": FAMILIES[family]}


def _refuse_unknown(values: dict[str, Any], known: dict[str, Any], prefix: str) -> None:
    for key, value in values.items():
        if key not in known:
            near = _nearest(str(key), known, prefix)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            told = f"unknown key {prefix}{key}"
            if prefix == "model." and (others := _families_with(str(key))):
                ours = next(name for name, of in FAMILIES.items() if _fields(of) == known)
                told += f": it is one of the family {' and '.join(others)}, and this is of {ours}"
                hint = ""
            raise ValueError(f"{told}{hint} (keys here: {', '.join(known)})")
        if dataclasses.is_dataclass(known[key]) and isinstance(value, dict):
            inner = _fields(typing.cast(type, known[key]))
            _refuse_unknown(value, inner, f"{prefix}{key}.")


def _families_with(key: str) -> list[str]:
    """The families of models that have a key."""
    return [name for name, section in FAMILIES.items() if key in _fields(section)]


def _nearest(key: str, known: dict[str, Any], prefix: str) -> list[str]:
    """What an unknown key may have meant: the same key elsewhere, else the nearest name."""
    homes: dict[str, list[str]] = {}
    sections = {name: [hint] for name, hint in _fields(Config).items() if name != "name"}
    sections["model"] = list(FAMILIES.values())
    for name, types in sections.items():
        for other in dict.fromkeys(key for one in types for key in _fields(one)):
            homes.setdefault(other, []).append(f"{name}.{other}")
    names = {**homes, **{name: [prefix + name] for name in known}}
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return names[near[0]] if near else []
