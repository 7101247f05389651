"""Statistics that add up, and the scores made from them."""

from graticule.evaluate.climatology import Climatology
from graticule.evaluate.depths import Column
from graticule.evaluate.ensemble import SpreadSkill, crps, spread_skill
from graticule.evaluate.ensemble_file import load_ensemble
from graticule.evaluate.ensemble_scores import EnsembleScores
from graticule.evaluate.ensemble_sums import EnsembleSums
from graticule.evaluate.evaluate import evaluate
from graticule.evaluate.ocean import OceanScores
from graticule.evaluate.ocean_file import load_ocean
from graticule.evaluate.ocean_sums import OceanSums
from graticule.evaluate.scores import Scores
from graticule.evaluate.spectra import Spectra
from graticule.evaluate.stretches import Stretches
from graticule.evaluate.sums import Sums, pair_sums

__all__ = [
    "Climatology", "Column", "EnsembleScores", "EnsembleSums", "OceanScores", "OceanSums",
    "Scores", "Spectra", "SpreadSkill", "Stretches", "Sums", "crps", "evaluate", "load_ensemble",
    "load_ocean", "pair_sums", "spread_skill",
]  # fmt: skip
