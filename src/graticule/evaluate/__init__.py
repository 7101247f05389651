"""Statistics that add up, and the scores made from them."""

from graticule.evaluate.climatology import Climatology
from graticule.evaluate.ensemble import SpreadSkill, crps, spread_skill
from graticule.evaluate.evaluate import evaluate
from graticule.evaluate.scores import Scores
from graticule.evaluate.spectra import Spectra
from graticule.evaluate.stretches import Stretches
from graticule.evaluate.sums import Sums, pair_sums

__all__ = [
    "Climatology", "Scores", "Spectra", "SpreadSkill", "Stretches", "Sums", "crps", "evaluate",
    "pair_sums", "spread_skill",
]  # fmt: skip
