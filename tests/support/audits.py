"""Audits in small, for tests: methods by name, and canaries under attack."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scipy.stats import binom

from vestige.audit.attack.canaries import Canaries
from vestige.audit.attack.training import attack, coins
from vestige.audit.options import AuditOptions
from vestige.methods import (
    DPFTRL,
    DPSAM,
    DPSGD,
    METHODS,
    BandedInverse,
    Disk,
    FractionalNoise,
    Kalman,
    resolve,
)
from vestige.sampling.loader import Poisson

ALPHA = 0.05

RARE = 1e-6

PRIVATE = [name for name, method in METHODS.items() if method.private]

PUBLISHED = [name for name, method in METHODS.items() if not method.private]

VARIANTS = {
    "dp-sam, fresh": DPSAM(sample="fresh"),
    "disk, ahead": Disk(ahead=0.5),
    "kalman, beta": Kalman(beta=0.7),
    "dp-ftrl, restarts": DPFTRL(restart=1),
    "dp-ftrl, plain tree": DPFTRL(honaker=False),
    "fractional-noise, 3 bands": FractionalNoise(bands=3),
    "banded-inverse, restarts": BandedInverse(restart=1),
}

PLAIN = {
    **{name: resolve(name) for name in PRIVATE if not name.startswith("geodp")},
    **VARIANTS,
}

CORRELATED = [key for key, method in PLAIN.items() if method.info.noise == "correlated"]


def often(failures, simulations):
    """Whether a bound at 95 % fails more often than chance explains."""
    return failures > binom.ppf(1 - RARE, simulations, ALPHA)


def standard(values):
    """Whether mean and variance are within 5 standard deviations of 0 and 1."""
    n = len(values)
    return abs(values.mean()) * n**0.5 < 5 and abs(values.var() - 1) * (n / 2) ** 0.5 < 5


def observed(method, noise, trials=300, steps=12, clipping=None):
    """The options, the canaries and the run of an attack."""
    options = AuditOptions(
        method=method,
        noise_multiplier=noise,
        trials=trials,
        steps=steps,
        seed=11,
        clipping=clipping,
    )
    canaries = Canaries.tossed(trials, coins(options), options.zeroed)
    return options, canaries, attack(options, canaries.target(options), noise)


@dataclass(frozen=True)
class Repeating(DPSGD):
    """Every lot is used `times` times in a row, or all lots come again after `period`."""

    info = replace(DPSGD.info, name="repeating")

    times: int = 1
    period: int = 10**6

    def lots(self, context):
        poisson = Poisson(context.randomness, context.records, context.plan.sample_rate)
        times, period = self.times, self.period

        class Repeated:
            def lot(self, number):
                return poisson.lot((number - number % times) % period)

        return Repeated()
