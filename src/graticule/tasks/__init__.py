"""What a command does with a run's folder: forecast from it, score its forecast, report on it."""

from graticule.tasks.report import report_run
from graticule.tasks.runs import (
    evaluate_forecast,
    forecast_from_run,
    forecast_of,
    is_trained,
    trained_run,
    validate_run,
)
from graticule.tasks.scores import ensemble_of, ocean_of, save_scores, scores_of
from graticule.tasks.stages import Bar, Progress, no_bar, record_stage

__all__ = [
    "Bar",
    "Progress",
    "ensemble_of",
    "evaluate_forecast",
    "forecast_from_run",
    "forecast_of",
    "is_trained",
    "no_bar",
    "ocean_of",
    "record_stage",
    "report_run",
    "save_scores",
    "scores_of",
    "trained_run",
    "validate_run",
]
