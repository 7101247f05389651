"""Models in plain single-device PyTorch. What reads other grid points is in four files: pad,
windows, resample, norms."""
