"""Run a model over leads and keep what it says."""
