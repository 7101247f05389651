"""Pictures of runs and forecasts, and the page that they stand on."""
