"""Published weights: a network that is put together as those files name it, and what a file lacks.

`Published` has the parameter names of such a file and the order of its operations, in torch's own
layers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from graticule.assemble import build_model, shapes_of
from graticule.cli import main
from graticule.config import Config, DataConfig, TrainConfig, UNetConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.train.checkpoint import load_weights
from graticule.train.published import load_published, read_weights
from small_store import write_store
from test_unet import SHAPES

GRID = (9, 16)
MODEL = UNetConfig(widths=(4, 6), dilations=(1, 2, 2, 2, 1))


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cap", torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x).clamp(max=self.cap)  # type: ignore[arg-type]


class PublishedBlock(nn.Module):
    def __init__(self, a: int, b: int, dilation: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.d, h = dilation, 2 * a
        if a != b:
            self.skip_module = nn.Conv2d(a, b, 1)
        self.convblock = nn.Sequential(
            nn.Conv2d(a, h, 3, dilation=dilation), norm(h), Limited(),
            nn.Conv2d(h, h, 3, dilation=dilation), norm(h), Limited(), nn.Conv2d(h, b, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for n, layer in enumerate(self.convblock):
            if n in (0, 3):
                y = F.pad(F.pad(y, (self.d, self.d, 0, 0), mode="circular"), (0, 0, self.d, self.d))
            y = layer(y)
        return y + (self.skip_module(x) if hasattr(self, "skip_module") else x)


class Published(nn.Module):
    """Of two levels."""

    def __init__(self, channels: int, out: int, *, first: bool, positions: int, norm: Any) -> None:
        super().__init__()
        self.first = first
        if positions:
            self.positional_params = nn.Parameter(torch.randn(positions, *GRID))
        pairs = (channels + positions, 4), (4, 6), (6, 6), (6, 4), (4, 4)
        blocks = [
            PublishedBlock(a, b, d, norm) for (a, b), d in zip(pairs, MODEL.dilations, strict=True)
        ]
        layers: list[nn.Module] = []
        for number, block in enumerate(blocks):
            layers += [block, nn.AvgPool2d(2) if number < 2 else nn.Identity()]
        decoder = nn.Conv2d(4, out, 3)
        if first:
            self.layers = nn.ModuleList([*layers[:-1], decoder])
        else:
            self.unet = nn.Module()
            self.unet.layers = nn.ModuleList(layers[:-1])
            self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers if self.first else self.unet.layers
        decoder = layers[-1] if self.first else self.decoder  # type: ignore[index]
        if hasattr(self, "positional_params"):
            x = torch.cat([x, self.positional_params.expand(len(x), -1, -1, -1)], 1)
        skips = []
        for n in (0, 2):
            skips.append(layers[n](x))  # type: ignore[index]
            x = layers[n + 1](skips[-1])  # type: ignore[index]
        x = layers[4](x)  # type: ignore[index]
        for n in (6, 8):
            if self.first:
                x = F.interpolate(x, scale_factor=2, mode="bilinear")
            else:
                wide = F.pad(x, (1, 1, 0, 0), mode="circular")
                x = F.interpolate(wide, scale_factor=2, mode="bilinear")[..., 2:-2]
            skip = skips.pop()
            x = F.pad(x, (0, 0, 0, skip.shape[2] - x.shape[2])) + skip
            x = layers[n](x)  # type: ignore[index]
        return decoder(F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1)))  # type: ignore[operator]


def published(first: bool = False, norm: str = "batch", positions: int = 0) -> Published:
    torch.manual_seed(3)
    kind: Any = {"batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d}[norm]
    model = Published(6, 4, first=first, positions=positions, norm=kind)
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.copy_(torch.rand(value.shape) + 0.5)
        elif value.is_floating_point() and not name.endswith(".cap"):
            value.add_(0.1 * torch.randn(value.shape))
    return model.eval()


def ours(first: bool = False, norm: str = "batch", positions: int = 0, **changed: Any) -> Any:
    settings: dict[str, Any] = {"norm": norm, "position_features": positions, **changed}
    if first:
        settings["upsampling"] = "plain"
    fields = {name: getattr(MODEL, name) for name in ("widths", "dilations")}
    return build_model(Config(model=UNetConfig(**{**fields, **settings})), SHAPES).eval()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("norm", "positions"), [("batch", 0), ("instance", 2), ("batch", 3)])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_published_weights_give_the_published_numbers(
    tmp_path: Path, kind: str, norm: str, positions: int, first: bool
) -> None:
    theirs, model = published(first, norm, positions), ours(first, norm, positions)
    path = tmp_path / f"weights.{kind}"
    state = dict(theirs.state_dict())
    if kind == "pt":  # as a training run of several processes leaves it
        wrapped = {f"module.{name}": value for name, value in state.items()}
        torch.save({"epoch": 3, "model": wrapped, "scheduler": {"last": 1.0}}, path)
    else:
        save_file(state, path)
    load_published(model, read_weights(path), str(path))
    x = torch.randn(2, 6, *GRID)
    with torch.no_grad():
        assert torch.allclose(model(x), theirs(x), rtol=1e-4, atol=1e-5)
        assert theirs(x).std() > 0.1


def refusal(model: nn.Module, weights: dict[str, Tensor]) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="is another model") as error:
        load_published(model, weights, "ckpt.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def test_what_is_missing_of_another_shape_or_has_no_place_is_named() -> None:
    weights = dict(published().state_dict())
    del weights["unet.layers.4.convblock.3.bias"]
    weights["decoder.weight"] = torch.zeros(5, 4, 3, 3)
    weights["encoder.weight"] = torch.zeros(2)
    weights["unet.layers.0.convblock.2.cap"] = torch.tensor(6.0)
    told = refusal(ours(), weights)
    assert told.startswith("ckpt.pt is another model (4 of ")
    for line in (
        "unet.layers.4.convblock.3.bias: none in the file, (12,) here (bottom.conv2.bias)",
        "decoder.weight: (5, 4, 3, 3) in the file, (4, 4, 3, 3) here (last.conv.weight)",
        "encoder.weight: (2,) in the file, no place here",
        "activations are limited to [6.0, 10.0] there and to 10 here",
    ):
        assert f"\n  {line}" in told


def test_another_norm_or_width_is_another_model() -> None:
    weights = dict(published().state_dict())
    assert "unet.layers.0.convblock.1.weight: (12,) in the file, no place" in refusal(
        ours(norm="instance"), weights
    )
    assert "(12, 6, 3, 3) in the file, (18, 6, 3, 3) here" in refusal(ours(factor=3), weights)


def test_weights_of_a_unet_are_refused_by_a_swin_model() -> None:
    swin = build_model(Config(), replace(SHAPES, grid=(64, 128)))
    assert isinstance(swin, Swin)
    with pytest.raises(ValueError, match="are of a U-Net; take recipe samudra"):
        load_published(swin, {}, "ckpt.pt")


class Trap:
    """What a pickle may run."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"a": torch.zeros(1)}, "config": Trap()}, "holds no plain tensors: "),
        ({"epoch": 3}, "holds no weights, neither by their names nor under model, "),
        (b"no archive", "holds no plain tensors: "),
        (None, "cannot be read: "),
    ],
)
def test_a_file_without_plain_tensors_is_refused(
    tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ckpt.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        read_weights(path)
    assert "run" not in capsys.readouterr().out


def test_adopted_weights_are_a_run_that_forecasts(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "store"
    store = write_store(path)
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    config = Config(
        name="tiny",
        data=DataConfig(store=str(path)),
        model=UNetConfig(widths=(4, 6), dilations=(1, 2, 2, 2, 1)),
        train=TrainConfig(ema_decay=0.9),
    )
    (tmp_path / "tiny.json").write_text(json.dumps(config.to_dict()))
    source = SampleSource(Store(path), config.data)
    channels = len(source.prognostic) + len(source.forcing)
    torch.manual_seed(1)
    theirs = Published(
        channels, len(source.predicted), first=False, positions=0, norm=nn.BatchNorm2d
    )
    theirs.unet.layers[4].convblock[1].running_var.fill_(3.0)  # type: ignore[union-attr, index, operator]
    torch.save(theirs.state_dict(), tmp_path / "ckpt.pt")
    out = tmp_path / "run"
    arguments = ["adopt", str(tmp_path / "tiny.json"), str(tmp_path / "ckpt.pt"), "--out", str(out)]
    assert main(arguments) == 0
    assert "a run at step 0 with the weights of" in capsys.readouterr().out
    model = build_model(config, shapes_of(source))
    loaded = load_weights(out, model, source.channel_names)
    assert loaded.averaged
    assert isinstance(model, UNet)
    assert float(model.bottom.norm1.running_var.mean()) == 3.0  # type: ignore[union-attr, operator]
    assert main(["forecast", str(out), "--set", "forecast.leads=2"]) == 0
    assert (out / "forecast.zarr").is_dir()
    assert main(arguments) == 2
    assert "is not overwritten" in capsys.readouterr().err
