"""Statistics as the papers state them, and the test that they leave out.

Mean, sample standard deviation and the two-sided 95 % Student-t interval over seeds; a paired t
test against a reference, seed by seed, with Holm's correction for the number of comparisons, the
interval of the difference and the size that the test could have seen; and how soon, in epochs and
in epsilon, a target accuracy is reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vestige.errors import ConfigError

CONFIDENCE = 0.95
POWER = 0.8  # with which a detectable difference is found


@dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation and interval of a few numbers.

    One number alone has neither a deviation nor an interval: they are None.
    """

    count: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


def summarise(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation, and the two-sided 95 % Student-t interval."""
    count = len(values)
    if not count:
        raise ConfigError("there is no value to summarise: give at least one.")
    mean = math.fsum(values) / count
    if count == 1:
        return Summary(1, mean, None, None, None)
    std = sample_std(values)
    half = interval_half_width(std, count)
    return Summary(count, mean, std, mean - half, mean + half)


def sample_std(values: Sequence[float]) -> float:
    """The standard deviation with n - 1 in the denominator."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def interval_half_width(std: float, count: int, confidence: float = CONFIDENCE) -> float:
    """t_(1 - (1 - confidence)/2, n - 1) * std / sqrt(n): half of the Student-t interval."""
    from scipy.stats import t

    if count < 2:
        raise ConfigError(f"an interval needs at least 2 values, not {count}: run more seeds.")
    return float(t.ppf(0.5 + confidence / 2, count - 1)) * std / math.sqrt(count)


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t test: mean difference to the reference over `count` common seeds.

    `p` is None where the test is undefined: fewer than two pairs, or differences that are all the
    same and not zero. `low` and `high` are the two-sided 95 % interval of the difference, without
    any correction, and `std` its sample standard deviation over the pairs: None where they are all
    the same. `p_holm` is p after Holm's correction for `comparisons` tests, and `detectable` the
    smallest true difference that such a test finds with power 0.8 at the strictest level that the
    correction asks for, 0.05 / comparisons.
    """

    count: int
    difference: float
    p: float | None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    p_holm: float | None = None
    comparisons: int = 1
    detectable: float | None = None


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided paired t tests: is the mean difference within +-margin (Schuirmann 1987)?

    `low` and `high` are the 90 % interval of the difference: it lies within the margin if and only
    if `p`, the larger of the two, is at most 0.05.
    """

    margin: float
    low: float
    high: float
    p: float


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """Both tests over paired differences, of which there are at least two."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        raise ConfigError(f"equivalence needs at least 2 pairs, not {count}: run more seeds.")
    mean, std = math.fsum(differences) / count, sample_std(differences)
    if std == 0:
        return Equivalence(margin, mean, mean, 0.0 if abs(mean) < margin else 1.0)
    error = std / math.sqrt(count)
    above = float(t.sf((mean + margin) / error, count - 1))
    below = float(t.cdf((mean - margin) / error, count - 1))
    half = interval_half_width(std, count, confidence=0.90)
    return Equivalence(margin, mean - half, mean + half, max(above, below))


def paired_test(values: Mapping[int, float], reference: Mapping[int, float]) -> PairedTest | None:
    """The paired t test over the seeds that both have; None where there are none."""
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    differences = [values[seed] - reference[seed] for seed in seeds]
    count = len(seeds)
    mean = math.fsum(differences) / count
    std = sample_std(differences) if count > 1 else 0.0
    # Accuracies are multiples of 1 / images: equal differences must not become certainty.
    if std <= 1e-12 * abs(mean):
        same = count > 1 and not any(differences)  # the two were the same, run by run
        return PairedTest(count, mean, 1.0 if same else None)
    half = interval_half_width(std, count)
    p = _two_sided(mean, std / math.sqrt(count), count - 1)
    return PairedTest(count, mean, p, std, mean - half, mean + half)


def _two_sided(mean: float, error: float, freedom: int) -> float:
    from scipy.stats import t

    return float(2 * t.sf(abs(mean) / error, freedom))


def detectable(std: float, count: int, comparisons: int) -> float:
    """(t_(1 - 0.025 / comparisons) + t_0.8) * std / sqrt(n), both with n - 1 degrees of freedom.

    The usual approximation of the smallest true difference that a paired t test at the level
    0.05 / comparisons finds with power 0.8. From few pairs its std is itself uncertain.
    """
    from scipy.stats import t

    quantiles = t.ppf([1 - (1 - CONFIDENCE) / 2 / comparisons, POWER], count - 1)
    return float(sum(quantiles)) * std / math.sqrt(count)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction. An undefined test (None) counts as a comparison.

    Guarantee: rejecting where the corrected value is at most a keeps the chance of any false
    rejection among all of them at most a (Holm 1979).
    """
    total = len(p_values)
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * total
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (total - rank) * p))
        corrected[index] = largest
    return corrected


def corrected(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """The tests with Holm's correction for their number."""
    values = holm([test.p for test in tests])
    total = len(tests)
    sizes = [test.std and detectable(test.std, test.count, total) for test in tests]
    return [
        replace(test, p_holm=value, comparisons=total, detectable=size)
        for test, value, size in zip(tests, values, sizes, strict=True)
    ]


@dataclass(frozen=True)
class Reached:
    """How soon runs reach a target: means over the `reached` of `count` runs that do at all."""

    target: float
    count: int
    reached: int
    epochs: float | None
    epsilon: float | None


def time_to_target(
    target: float, curves: Sequence[Mapping[str, Sequence[float | None]]]
) -> Reached:
    """The first epoch, and the epsilon spent by then, at which accuracy is at least `target`.

    `curves` hold "epoch", "accuracy" and "epsilon" with one entry for each measurement.
    """
    epochs, epsilons = [], []
    for curve in curves:
        measured = zip(curve["epoch"], curve["accuracy"], curve["epsilon"], strict=True)
        for epoch, accuracy, epsilon in measured:
            if accuracy is not None and epoch is not None and accuracy >= target:
                epochs.append(float(epoch))
                epsilons.append(epsilon)
                break
    finite = [e for e in epsilons if e is not None]
    return Reached(
        target=target,
        count=len(curves),
        reached=len(epochs),
        epochs=math.fsum(epochs) / len(epochs) if epochs else None,
        epsilon=math.fsum(finite) / len(finite) if finite and len(finite) == len(epochs) else None,
    )
