"""Configuration: frozen, typed sections. What a run is, in one value.

A recipe is a function that returns a whole `Config`; a variant of it is
`dataclasses.replace(...)`, or `--set section.key=value` on the command line.
Unknown keys are refused with the nearest name, and no field changes another.
"""

from graticule.config.bayes import BayesConfig
from graticule.config.data import DataConfig, EvaluateConfig, ForecastConfig
from graticule.config.devices import MemoryConfig, MeshConfig
from graticule.config.model import BeastConfig, ModelConfig, SwinConfig, UNetConfig
from graticule.config.settings import Config, fingerprint, from_dict, override
from graticule.config.train import TrainConfig
from graticule.config.values import bytes_of

__all__ = [
    "BayesConfig", "BeastConfig", "Config", "DataConfig", "EvaluateConfig", "ForecastConfig",
    "MemoryConfig", "MeshConfig", "ModelConfig", "SwinConfig", "TrainConfig", "UNetConfig",
    "bytes_of", "fingerprint", "from_dict", "override",
]  # fmt: skip
