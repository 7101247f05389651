"""Loss, step, optimizer, checkpoints, metrics and the run that puts them together."""

from graticule.train.checkpoint import Loaded, load_weights
from graticule.train.trainer import Stopped, train

__all__ = ["Loaded", "Stopped", "load_weights", "train"]
