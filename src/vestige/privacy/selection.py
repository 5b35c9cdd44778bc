"""Private selection: the best of several trials, where the number of trials is itself random.

Taking the best of a known number of trials reveals more than one trial does. If the number K of
trials is secret and follows a truncated negative binomial law, the best of them costs little more
than one (Papernot, Steinke 2022, arXiv 2110.03620). For k = 1, 2, ... and gamma in (0, 1):

    eta != 0   P(K = k) = (1 - gamma)^k / (gamma^-eta - 1) prod_(l < k) (l + eta) / (l + 1)
    eta = 0    P(K = k) = (1 - gamma)^k / (k log(1 / gamma))        (the logarithmic law)

with eta = 1 the geometric law. No torch and no data here: laws and bounds are public numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vestige.checks import is_number
from vestige.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Release = tuple[float, float, int]  # sampling rate, effective noise multiplier, how often
_LEAST_GAMMA = 1e-4  # below it a search may need more trials than anybody waits for
_LARGEST_ETA = 10  # the cost grows with it, and nothing is won
_LEFT_OUT = -80.0  # log of the chance below which numbers of trials are not drawn


@dataclass(frozen=True, order=True)
class Law:
    """The truncated negative binomial law of the number of trials; it is never 0."""

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not is_number(self.eta) or not self.eta > -1:
            raise ConfigError(
                f"eta {self.eta!r} is not a number above -1: 0 is the logarithmic law of the "
                "number of trials, 1 the geometric one."
            )
        if not is_number(self.gamma) or not 0 < self.gamma < 1:
            raise ConfigError(f"gamma {self.gamma!r} is not strictly between 0 and 1.")

    @classmethod
    def with_mean(cls, mean: float, eta: float) -> Law:
        """The law with this eta and this mean number of trials, which must be above 1."""
        from scipy.optimize import brentq

        if is_number(eta) and eta > _LARGEST_ETA:
            raise ConfigError(f"eta {eta:g} is above {_LARGEST_ETA}: give one from -1 to there.")
        cls(eta, 0.5)  # refuses a bad eta
        least, most = math.log(_LEAST_GAMMA), math.log1p(-1e-9)
        largest = cls(eta, _LEAST_GAMMA).mean
        if not is_number(mean) or not cls(eta, 1 - 1e-9).mean < mean <= largest:
            raise ConfigError(
                f"trials {mean!r} is not a number above 1 and at most {largest:.4g}: give the mean "
                f"number of trials, under eta {eta:g}."
            )

        def excess(log_gamma: float) -> float:
            return cls(eta, math.exp(log_gamma)).mean - mean

        return cls(eta, math.exp(brentq(excess, least, most, xtol=1e-14)))

    @property
    def mean(self) -> float:
        """The mean number of trials."""
        log_gamma = math.log(self.gamma)
        # eta / (1 - gamma^eta), with its limit at 0
        share = self.eta / -math.expm1(self.eta * log_gamma) if self.eta else -1 / log_gamma
        return (1 - self.gamma) / self.gamma * share

    @cached_property
    def chances(self) -> NDArray[np.float64]:
        """P(K = 1), P(K = 2), ... up to where they add less than 1e-30."""
        import numpy as np

        log_gamma = math.log(self.gamma)
        first = self.eta / math.expm1(-self.eta * log_gamma) if self.eta else -1 / log_gamma
        k = np.arange(1, 2 + math.ceil((10 * (1 + abs(self.eta)) - _LEFT_OUT) / self.gamma))
        steps = np.log1p(-self.gamma) + np.log((k + self.eta) / (k + 1))
        logs = math.log((1 - self.gamma) * first) + np.concatenate(([0.0], np.cumsum(steps)))
        last = int(np.flatnonzero(logs > _LEFT_OUT)[-1])
        return np.exp(logs[: last + 1])

    def draw(self, uniform: Callable[[int], float]) -> int:
        """A number of trials; `uniform(k)` are independent numbers in (0, 1].

        It stops at k with the chance P(K = k | K >= k), so that large numbers, whose chances are
        small, come out as often as they should, and not as often as one rounded number allows.
        """
        left = self.chances[::-1].cumsum()[::-1]  # from the smallest on: nothing cancels
        stops = self.chances / left
        return next(k for k, chance in enumerate(stops, 1) if uniform(k) <= chance)

    def most(self, share: float) -> int:
        """The number of trials that so large a share of all searches does not exceed."""
        import numpy as np

        return 1 + int(np.searchsorted(np.cumsum(self.chances), share))

    def renyi(self, orders: NDArray[np.float64], curve: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rényi DP of the best of K trials, at every order, from that of one trial.

        Guarantee: theorem 2 of the paper. If one trial is (lambda, eps)- and (other, eps')-RDP, the
        best of K is (lambda, e)-RDP with

            e = eps + (1 + eta) ((1 - 1/other) eps' + log(1/gamma) / other)
                + log(mean) / (lambda - 1),

        for the `other` order in [1, infinity) that is best. It holds for whatever a trial hands
        out, as long as the trials are independent draws of one mechanism that reveals no more than
        the curve says, and the best is found by what they hand out alone.
        """
        import numpy as np

        far = -math.log(self.gamma)
        aside = min(far, float(np.min((1 - 1 / orders) * curve + far / orders)))
        bound: NDArray[np.float64] = (
            curve + (1 + self.eta) * aside + math.log(self.mean) / (orders - 1)
        )
        return bound


@dataclass(frozen=True, order=True)
class Selection:
    """A whole search: the law of its number of trials, and what one trial may release.

    `trials` has the releases of each kind of candidate; a trial costs the largest of their Rényi
    curves, order by order.
    """

    law: Law
    trials: tuple[tuple[Release, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """The search as strict JSON types."""
        trials = [
            [[r, z if z < math.inf else "inf", n] for r, z, n in kind] for kind in self.trials
        ]
        return {"eta": self.law.eta, "gamma": self.law.gamma, "trials": trials}

    @classmethod
    def from_json(cls, row: Any) -> Selection:
        """The search that `as_json` gave; ConfigError for anything else."""
        try:
            if not isinstance(row, Mapping) or set(row) != {"eta", "gamma", "trials"}:
                raise ValueError
            trials = tuple(
                tuple((r, math.inf if z == "inf" else z, n) for r, z, n in kind)
                for kind in row["trials"]
            )
            if not trials or not all(trials):
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(
                f"selection {row!r} is not a mapping with exactly 'eta', 'gamma' and 'trials': "
                "pass what Selection.as_json() returned"
            ) from None
        return cls(Law(row["eta"], row["gamma"]), trials)
