"""Train, fine-tune, run and score high-resolution AI Earth models on the devices you have."""

__version__ = "0.1.0"
