"""A configuration's model on one process: which family, of which shapes, in which types."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graticule.config import BeastConfig, Config, UNetConfig
from graticule.data.samples import SampleSource
from graticule.data.store import Store
from graticule.keyed import keyed_seed
from graticule.mesh import Planes
from graticule.model.bayes import Prior, make_bayesian
from graticule.model.beast import Beast
from graticule.model.family import Model
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.parallel.materialise import materialise


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What `train.precision` says of dtypes; master weights are float32 in all.

    compute: of activations, and of the weights that meet them. stream: of the residual stream.
    fields: of states, forcing and labels.
    """

    compute: torch.dtype
    stream: torch.dtype
    fields: torch.dtype = torch.float32


PRECISIONS = {
    "fp32": Precision(compute=torch.float32, stream=torch.float32),
    "bf16": Precision(compute=torch.bfloat16, stream=torch.bfloat16),
    "fp16": Precision(compute=torch.float16, stream=torch.float16),
    "paper": Precision(compute=torch.float16, stream=torch.float32, fields=torch.float16),
}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What a model must know of its data: (lat, lon) points, channels and times of a sample."""

    grid: tuple[int, int]
    num_prognostic: int
    num_predicted: int
    num_forcing: int
    num_static: int
    num_inputs: int
    num_outputs: int
    num_forcings: int

    @property
    def in_channels(self) -> int:
        states = self.num_inputs * self.num_prognostic
        return states + self.num_forcings * self.num_forcing + self.num_static

    @property
    def out_channels(self) -> int:
        return self.num_outputs * self.num_predicted

    def planes(self, ranks: int, index: int) -> Planes:
        """How so many ranks share the channels."""
        return Planes.of(
            prognostic=self.num_prognostic,
            diagnostic=self.num_predicted - self.num_prognostic,
            forcing=self.num_forcing,
            static=self.num_static,
            inputs=self.num_inputs,
            outputs=self.num_outputs,
            forcings=self.num_forcings,
            ranks=ranks,
            index=index,
        )

    def on(self, planes: Planes) -> "Shapes":
        """The same with the channels of a rank."""
        index = planes.index
        return replace(
            self,
            num_prognostic=planes.prognostic.length(index),
            num_predicted=planes.prognostic.length(index) + planes.diagnostic.length(index),
            num_forcing=planes.forcing.length(index),
            num_static=planes.static.length(index),
        )


def shapes_of(source: SampleSource) -> Shapes:
    """The shapes of a store's samples."""
    spec = source.spec
    return Shapes(
        grid=source.store.grid.shape,
        num_prognostic=len(source.prognostic),
        num_predicted=len(source.predicted),
        num_forcing=len(source.forcing),
        num_static=len(source.statics),
        num_inputs=len(spec.inputs),
        num_outputs=len(spec.outputs),
        num_forcings=len(spec.forcings),
    )


def shapes_of_config(config: Config) -> Shapes:
    """The same from the store that the configuration names, if it is there already, else from
    the configuration alone."""
    data = config.data
    enough = data.grid is not None and data.prognostic
    if data.store and (Path(data.store).exists() or not enough):
        # Its roles fill what the configuration leaves open, as they do in training.
        return shapes_of(SampleSource(Store(data.store), data))
    if data.grid is None or not data.prognostic:
        raise ValueError(
            "the grid and the channels are not known: set data.store=PATH, or data.grid=LAT,LON"
            " and data.prognostic=NAME,NAME,..."
        )
    return Shapes(
        grid=data.grid,
        num_prognostic=len(data.prognostic),
        num_predicted=len(data.prognostic) + len(data.diagnostic),
        num_forcing=len(data.forcing),
        num_static=len(data.static),
        num_inputs=len(data.input_offsets),
        num_outputs=len(data.output_offsets),
        num_forcings=len(data.forcing_offsets),
    )


def build_model(
    config: Config,
    shapes: Shapes,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The configured model of one process with its initial weights, or, on `meta`, without any.

    dtype: of the master weights. Each parameter is drawn from a key of the seed and its name, so
    that its first value depends on nothing else.
    """
    model = unplaced(config, shapes, dtype)
    if torch.device(device).type == "meta":
        return model.to("meta")
    materialise(model, config.train.seed, device)
    return model


def unplaced(config: Config, shapes: Shapes, dtype: torch.dtype) -> Model:
    """The configured model with its parameters on `meta` and its buffers in memory."""
    model, bayes, seed = _of_family(config, shapes, dtype), config.bayes, config.train.seed
    if bayes.weights:

        def key(name: str) -> int:
            return keyed_seed(seed, "sample", int.from_bytes(name.encode(), "little"))

        make_bayesian(
            model,
            key=key,
            prior=Prior(
                kind=bayes.prior,
                sigma=bayes.prior_sigma,
                narrow=bayes.narrow_sigma,
                share=bayes.mixture_share,
            ),
            sigma_map=bayes.sigma_map,
            initial_sigma=bayes.initial_sigma,
        )
    return model


def _of_family(config: Config, shapes: Shapes, dtype: torch.dtype) -> Model:
    """The same before its weights become distributions."""
    model = config.model
    newest = (shapes.num_inputs - 1) * shapes.num_prognostic
    if isinstance(model, UNetConfig) and config.train.precision == "paper":
        raise ValueError(
            "train.precision=paper is how TERRA was trained, which is of the family swin; a U-Net"
            " computes its last convolution in float32 with bf16 or fp16 too"
        )
    if isinstance(model, BeastConfig) and config.train.precision == "paper":
        raise ValueError(
            "train.precision=paper is how TERRA was trained, which is of the family swin; BEAST is"
            " trained in bf16"
        )
    precision = PRECISIONS[config.train.precision]
    if dtype is not torch.float32:
        precision = Precision(compute=dtype, stream=dtype, fields=dtype)
    told: dict[str, Any] = {
        "grid": shapes.grid,
        "in_channels": shapes.in_channels,
        "out_channels": shapes.out_channels,
        "states": (newest, newest + shapes.num_prognostic),
        "num_outputs": shapes.num_outputs,
        "compute_dtype": precision.compute,
    }
    with torch.device("meta"):
        if isinstance(model, UNetConfig):
            return UNet(
                **told,
                widths=model.widths,
                factor=model.factor,
                dilations=model.dilations,
                norm=model.norm,
                norm_groups=model.norm_groups,
                most=model.activation_max,
                upsampling=model.upsampling,
                position_features=model.position_features,
            ).to(dtype=dtype)
        if isinstance(model, BeastConfig):
            return Beast(
                **told,
                patch=model.patch,
                width=model.width,
                depth=model.depth,
                inner_depth=model.inner_depth,
                heads=model.heads,
                inner_heads=model.inner_heads,
                window=model.window_shape,
                inner_window=model.inner_window_shape,
                mlp_ratio=model.mlp_ratio,
                norm_groups=model.norm_groups,
                num_noise=model.nice_noise,
                nice_hidden=model.nice_hidden,
                gated=model.nice_gate,
                noise_key=keyed_seed(config.train.seed, "nice"),
            ).to(dtype=dtype)
        return Swin(
            **told,
            patch=model.patch,
            sampling=model.sampling,
            width=model.width,
            depth=model.depth,
            heads=model.heads,
            window=model.window_shape,
            mlp_ratio=model.mlp_ratio,
            norm_groups=model.norm_groups,
            bias_table=model.bias_table,
            boundary=model.boundary,
            padded_shape=model.padded_shape,
            stream_dtype=precision.stream,
        ).to(dtype=dtype)
