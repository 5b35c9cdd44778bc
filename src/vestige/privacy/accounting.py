"""From the ledger's events to epsilon, and from a target epsilon back to noise.

Every release of Vestige is a Poisson-subsampled Gaussian with a known effective multiplier.
composition.py says how the three accountants compose them: each gives an upper bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.checks import round_up
from vestige.errors import ConfigError
from vestige.plan import Table, at
from vestige.privacy.composition import composed_epsilon
from vestige.privacy.events import Event, counts

ACCOUNTANTS = ("pld", "rdp", "rdp_classic")

GUARANTEE = "(epsilon, delta)-DP, add or remove one record"
MARGINAL_NOTE = "diagnostic, not a guarantee"

# Calibration: searched range of the accounted multiplier, and relative width of the answer.
_NOISE_RANGE = (1e-3, 1e6)
_NOISE_TOLERANCE = 1e-4
# The target is undercut by this fraction, so that a caller who recomputes the multiplier with
# another order of floating-point operations still stays below it.
_TARGET_MARGIN = 1e-6
# PLD compositions on the way through one run: each takes a few hundredths of a second.
_ON_THE_WAY = 32
# Where less than this share of the target is left, no noise makes a run that learns anything.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True)
class Calibration:
    """Noise that reaches a target, and the epsilon that it reaches under the same accountant.

    `noise_multiplier` is the joint multiplier that `make_private` takes. Beta is not folded into
    it: the releases are accounted at noise_multiplier / beta.
    """

    noise_multiplier: float
    epsilon: float
    target_epsilon: float
    delta: float
    sample_rate: Table
    steps: int
    accountant: str
    beta: Table


def accountant_name(name: str) -> str:
    """The accountant that answers for `name`: one of ACCOUNTANTS; "prv" is answered by "pld"."""
    if name == "prv":
        return "pld"
    if name not in ACCOUNTANTS:
        raise ConfigError(
            f"accountant {name!r} is unknown: choose one of {', '.join(ACCOUNTANTS)} "
            "(prv is accepted and answered by pld)"
        )
    return name


def epsilon(events: Sequence[Event], delta: float, accountant: str = "pld") -> float:
    """An upper bound on epsilon at `delta` for the composition of `events`.

    Guarantee: the composition is (epsilon, delta)-DP for adding or removing one record, also when
    each release is chosen adaptively from the earlier ones, as long as the multipliers and rates
    themselves were fixed in advance. Never negative and never NaN; 0.0 without events; infinity as
    soon as one release had no noise.

    "pld" is tight to better than 1e-3 in ordinary settings and never above "rdp": where its grid
    cannot resolve the losses (hundreds of millions of releases, a delta below 1e-10, an epsilon
    beyond 700) the Rényi bound is the better answer and is returned.

    Answers are cached by the merged events, so asking twice costs nothing.
    """
    return composed_epsilon(events, check_delta(delta), accountant_name(accountant))


def computed_every(periods: int, events: Sequence[Event]) -> int:
    """How many of so many equal periods of a run (epochs) lie between two compositions.

    `events` are those of the whole run: each distinct one is a composition of its own.
    """
    return max(1, math.ceil(periods / max(1, _ON_THE_WAY // max(1, len(counts(events))))))


def epsilon_on_the_way(
    spent: Sequence[Event], point: Sequence[Event], delta: float, accountant: str = "pld"
) -> float:
    """Epsilon of `spent`, by the value at the next computed `point`, which contains it.

    Guarantee: an upper bound. More releases cost no less, so the value at the next point bounds
    all before it; a chord between two points need not, since epsilon may be concave there. Where
    the Rényi bound of `spent` itself is smaller, it is that: it costs next to nothing.
    """
    name = accountant_name(accountant)
    if name != "pld":
        return epsilon(spent, delta, name)
    return min(epsilon(spent, delta, "rdp"), epsilon(point, delta, name))


def guarantee(epsilon: float, adjacency: str) -> str:
    """The guarantee in words; "none" where epsilon is infinite."""
    return f"(epsilon, delta)-DP, {adjacency}" if math.isfinite(epsilon) else "none"


@dataclass(frozen=True)
class Charge:
    """An event whose multiplier z follows the noise sigma:  1/z^2 = (weight/sigma)^2 + beside^2.

    `weight` is beta for one look at the lot, sqrt(2) beta for two looks at the same lot; `beside`
    is the inverse multiplier of what is released along with the sum at a noise of its own, such as
    the count of quantile clipping. Gaussian releases of one lot, each chosen after the one before,
    are together one Gaussian release with this multiplier under one Poisson draw.
    """

    sample_rate: float
    weight: float = 1.0
    beside: float = 0.0

    def event(self, noise: float, count: int = 1) -> Event:
        """The event at this noise; without noise nothing is hidden."""
        if not self.weight:
            return Event(self.sample_rate, 1 / self.beside if self.beside else math.inf, count)
        multiplier = noise / self.weight
        if multiplier and self.beside:
            multiplier = 1 / math.hypot(1 / multiplier, self.beside)
        return Event(self.sample_rate, multiplier, count)


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: Table,
    steps: int,
    accountant: str = "pld",
    beta: Table = 1.0,
) -> Calibration:
    """The smallest noise whose epsilon stays within `target_epsilon` after `steps` releases.

    Guarantee: `epsilon` at the returned noise_multiplier / beta, under the same accountant, was
    evaluated and is at most `target_epsilon`. The noise is within 0.1 % of the smallest such
    value under that accountant (targets so large that an accounted multiplier of 0.001 suffices
    get that). Beta is never folded into the returned multiplier. Sampling rate and beta may be
    tables with one number per step; the steps are then accounted one by one (many different ones
    are rounded to about 64, pessimistically, which can cost a few per cent of noise; PLD then takes
    up to a minute, RDP does not).
    """
    charges = step_charges(sample_rate, beta, steps)
    noise, reached = noise_for(target_epsilon, delta, charges, accountant)
    target, name = float(target_epsilon), accountant_name(accountant)
    return Calibration(noise, reached, target, float(delta), sample_rate, steps, name, beta)


def noise_for(
    target_epsilon: float,
    delta: float,
    charges: Mapping[Charge, int],
    accountant: str = "pld",
    earlier: Sequence[Event] = (),
) -> tuple[float, float]:
    """The smallest noise at which these charges stay within `target_epsilon`, and its epsilon.

    `earlier` was spent on the same data before, and composes with them; ConfigError at once where
    that leaves next to nothing of the target.
    """
    name = accountant_name(accountant)
    rule = "a finite number above 0: give a finite epsilon above 0"
    target = checked("target_epsilon", target_epsilon, lambda e: 0 < e < math.inf, rule)
    delta = check_delta(delta)
    largest = max(charge.weight for charge in charges)

    def spent(noise: float, by: str = name, first: Sequence[Event] = earlier) -> float:
        return epsilon([*first, *events_of(charges, noise)], delta, by)

    before = epsilon(earlier, delta, name)
    left = 1 - before / target
    if left < _LEAST_LEFT:
        raise ConfigError(
            f"target_epsilon {target} is used up by the ledger: the {counts(earlier).total()} "
            f"releases on it have epsilon {round_up(before, 4)} (accountant {name}) and leave no "
            "room for a run. Raise the target, or take a ledger of other data; a run that is on "
            "the ledger goes on by resume."
        )
    start = largest
    if name == "pld":
        # The Rényi curve is cheap at any noise and close: a rough answer starts the search well.
        # Squares of privacy losses add up, so beside what was spent it takes that much more noise.
        rough = _search(lambda noise: spent(noise, "rdp", ()), target, start, largest, 0.1)
        start = start if rough is None else rough / math.sqrt(1 - (1 - left) ** 2)
    noise = _search(spent, target, start, largest, _NOISE_TOLERANCE)
    if noise is None:
        floor = spent(_NOISE_RANGE[1] * largest)
        aside = any(charge.beside for charge in charges)
        raise ConfigError(
            f"target_epsilon {target} cannot be reached with a noise multiplier up to "
            f"{_NOISE_RANGE[1]:g} (epsilon {floor:.3g} there, accountant {name}): raise epsilon or "
            "delta, lower the sampling rate or the number of steps, or use accountant pld"
            + (", or raise the noise of what is released beside the sum" if aside else "")
            + (" (other runs on the ledger count too)" if earlier else "")
        )
    return noise, spent(noise)


def step_charges(
    sample_rate: Table, beta: Table, steps: int, looks: int = 1, beside: float = 0.0
) -> Counter[Charge]:
    """The charges of `steps` releases, one for each lot, under schedules of rate and beta.

    `looks` is how often a step looks at its lot, `beside` as in `Charge`.
    """
    steps = Event(1.0, 1.0, steps).count

    def charge(t: int) -> Charge:
        rate = Event(at(sample_rate, t), 1.0).sample_rate
        return Charge(rate, math.sqrt(looks) * check_beta(at(beta, t)), beside)

    if not isinstance(sample_rate, tuple) and not isinstance(beta, tuple):
        return Counter({charge(0): steps})
    return Counter(charge(t) for t in range(steps))


def events_of(charges: Mapping[Charge, int], noise: float) -> list[Event]:
    """The events of these charges at a noise multiplier."""
    return [charge.event(noise, count) for charge, count in charges.items()]


def _search(
    spent: Callable[[float], float], target: float, start: float, beta: float, tolerance: float
) -> float | None:
    """The smallest noise with spent(noise) <= target, to `tolerance`; None when out of range.

    Epsilon falls with noise almost as a power, so the search runs on logarithms of both.
    """
    from scipy.optimize import brentq

    lowest, highest = (math.log(bound * beta) for bound in _NOISE_RANGE)
    allowed = target * (1 - _TARGET_MARGIN)

    def excess(log_noise: float) -> float:
        ratio = spent(math.exp(log_noise)) / allowed
        # Bounded, so that epsilons of 0 and infinity do not derail the interpolation.
        return math.log(min(max(ratio, 1e-9), 1e9))

    def toward(point: float, value: float, least: float) -> float:
        # Epsilon is near 1/noise, so this step about reaches the target; then a bit further.
        step = min(max(abs(value), least), 2.0) * 1.2
        return min(max(point + math.copysign(step, value), lowest), highest)

    low = high = min(max(math.log(start), lowest), highest)
    low_value = high_value = excess(low)
    least = tolerance  # grows: beside what was spent before, noise moves epsilon by very little
    while high_value > 0:
        if high == highest:
            return None
        low, low_value = high, high_value
        high = toward(high, high_value, least)
        high_value, least = excess(high), 2 * least
    least = tolerance
    while low_value <= 0:
        if low == lowest:
            return math.exp(low)
        high, high_value = low, low_value
        low = toward(low, min(low_value, -tolerance), least)
        low_value, least = excess(low), 2 * least

    root = brentq(excess, low, high, xtol=tolerance, disp=False)
    # The root is within the tolerance of the crossing: return a point that was seen to be below.
    point, step = root, tolerance
    while excess(point) > 0:
        point, step = min(point + step, high), 2 * step
    return math.exp(point)


def checked(name: str, value: Any, holds: Callable[[Any], bool], rule: str) -> float:
    """The number, where the rule holds; ConfigError with the value and the rule otherwise."""
    if value is None or isinstance(value, bool | str) or not holds(value):
        raise ConfigError(f"{name} {value!r} is not {rule}")
    return float(value)


def check_delta(delta: float) -> float:
    """A delta strictly between 0 and 1."""
    rule = (
        "strictly between 0 and 1: give the probability that may escape the bound, well below "
        "1 / dataset size"
    )
    return checked("delta", delta, lambda value: 0 < value < 1, rule)


def check_beta(beta: float) -> float:
    """A beta in (0, 1]."""
    rule = "in (0, 1]: give the share of the new clipped sum in the release (1 is plain DP-SGD)"
    return checked("beta", beta, lambda value: 0 < value <= 1, rule)
