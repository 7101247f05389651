"""Weights as distributions, and ensembles that are trained as such."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require


@dataclass(frozen=True, kw_only=True)
class BayesConfig:
    """Which weights are distributions, and how a step's members are scored.

    Of N training samples with D output values each, a step over B samples minimises
    sum(NLL) / (B D) + cold / (N D) x KL of weights and prior.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    weights: bool = False
    """Weights have a mean and a deviation each; a forward pass draws them (`model/bayes`). Norms
    and what conditions them keep numbers."""
    prior: Literal["standard", "scaled", "start", "mixture"] = "standard"
    """`standard`: N(0, prior_sigma^2). `scaled`: N(0, prior_sigma^2 / (3 n)), n products that an
    output adds up. `start`: N(w, prior_sigma^2) around the weights w that training starts with.
    `mixture`: N(0, prior_sigma^2) with the probability `mixture_share`, else N(0, narrow_sigma^2):
    its KL has no closed form, and is the mean over the draws of the step's members."""
    prior_sigma: float = 1.0
    narrow_sigma: float = 0.1
    """Of `mixture`, below `prior_sigma`."""
    mixture_share: float = 0.5
    """Of `mixture`, that of the wide Gaussian."""
    cold: float = 1.0
    """Factor of the KL (lambda); below 1 the posterior is a cold one."""
    sigma_map: Literal["softplus", "exp"] = "softplus"
    """From the parameter rho to a deviation."""
    initial_sigma: float = 0.05
    """Of each deviation, in 1 / sqrt(3 n): relative to the usual initial weights."""
    members: int = 1
    """Forward passes of each sample in a step, each with its own weights and noise."""
    likelihood: Literal["none", "moments", "gaussian", "crps"] = "none"
    """`none`: `train.loss` of the one member. `moments`: of a Gaussian with the members' mean and
    variance. `gaussian`: the mean over members of that around each, of deviation `floor`. `crps`:
    continuous ranked probability score."""
    floor: float = 0.01
    """Deviation, in normalised units, that no member knows of: its square is added to the variance
    of `moments`, and is that of `gaussian`."""
    alpha: float = 0.95
    """Of `crps`: 1: fair, as an infinite ensemble of such members; 0: of the members as they are;
    between: almost fair, without the fair score's freedom for one member when all others hit."""

    def __post_init__(self) -> None:
        require(self.members >= 1, f"bayes.members={self.members} must be at least 1")
        for name in ("prior_sigma", "narrow_sigma", "initial_sigma", "floor"):
            value = getattr(self, name)
            require(value > 0, f"bayes.{name}={value} must be above 0")
        require(
            0 < self.mixture_share < 1,
            f"bayes.mixture_share={self.mixture_share} must lie between 0 and 1",
        )
        require(
            self.prior != "mixture" or self.narrow_sigma < self.prior_sigma,
            f"bayes.narrow_sigma={self.narrow_sigma} is not below"
            f" bayes.prior_sigma={self.prior_sigma}: take a narrower one, or bayes.prior=standard,"
            " whose KL is exact",
        )
        require(self.cold >= 0, f"bayes.cold={self.cold} must not be negative")
        require(0 <= self.alpha <= 1, f"bayes.alpha={self.alpha} must be 0 to 1")
        require(
            self.likelihood != "moments" or self.members >= 2,
            f"bayes.likelihood=moments takes the variance of the members, and"
            f" bayes.members={self.members} has none: take bayes.members=2 or more, or"
            " bayes.likelihood=gaussian",
        )
        require(
            self.likelihood != "crps" or self.members >= 2 or self.alpha == 0,
            f"bayes.likelihood=crps with bayes.alpha={self.alpha:g} corrects for the number of"
            f" members, which takes two, and bayes.members={self.members}: take bayes.members=2"
            " or more, or bayes.alpha=0 (of one member, the absolute error)",
        )
        require(
            self.likelihood != "none" or self.members == 1,
            f"bayes.members={self.members} are scored together: choose bayes.likelihood=moments,"
            " gaussian or crps, or bayes.members=1",
        )
        require(
            self.likelihood != "none" or not self.weights,
            "bayes.weights=true needs bayes.likelihood=moments, gaussian or crps: of train.loss"
            " alone the prior has no weight",
        )

    @property
    def draws(self) -> bool:
        """Whether there is anything to draw, or more than one member."""
        return self.weights or self.members > 1 or self.likelihood != "none"
