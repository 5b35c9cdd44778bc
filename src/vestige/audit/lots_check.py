"""Whether lots are drawn as they are charged: at most at the charged rate, record by record.

For every charge at a rate q below 1, each record must be in what the charge pays for (a lot, or a
cycle of lots with correlated noise) with probability at most q, at most once, and independently of
all others. Tested, each at its share of a declared false-alarm rate:

    all records together, and the busiest one    upper tails of binomial laws with probability q
    the spread of sizes and of the records' counts    lower tails of chi-square laws: lots of a
                                                      fixed size, or a shuffled order, hardly vary
    records that two lots k charges apart share       upper tails of binomial laws with probability
                                                      q^2: lots that are drawn once and used again

With correlated noise a lot here is all that one charge pays for: within a cycle every record has
one place, but whether it is drawn is independent from cycle to cycle, so q^2 is right there too.

The rates and sizes are those of a run of the real engine; a rate of 1 claims nothing and is passed
over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vestige.audit.findings import Finding, Report
from vestige.audit.observation import SETTING, Observation, observe, stretches
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, resolve

FALSE_ALARM = 1e-6  # of one run of a check on a method that is right


@dataclass(frozen=True)
class _Draw:
    """The records of one stretch, and the rate that was charged for it."""

    rate: float
    records: tuple[int, ...]
    run: int  # which of the recordings it is of


def lots_check(
    method: str | Method,
    *,
    steps: int = SETTING.steps,
    seed: int | None = None,
    false_alarm: float = FALSE_ALARM,
    clipping: Clipping | None = None,
) -> list[Finding]:
    """Where lots are not drawn as they are charged: empty where all is well."""
    seen = observe(resolve(method), steps=steps, seed=seed, clipping=clipping)
    return list(examine(seen, false_alarm).findings)


def examine(seen: Observation, false_alarm: float = FALSE_ALARM) -> Report:
    """The check on a run that was observed."""
    draws = [draw for draw in _draws(seen) if draw.rate < 1]
    if not draws:
        reason = "every charge is at rate 1: sampling is not claimed to hide anything"
        return Report("lots", not_applicable=reason)
    size = seen.setting.size
    tested = [*_rates(draws, size), *_spreads(draws, size), *_overlaps(draws, size)]
    level = false_alarm / len(tested)
    findings = [finding for finding, chance in tested if not chance >= level]
    drawn = sum(len(set(draw.records)) for draw in draws) / (len(draws) * size)
    charged = max(draw.rate for draw in draws)
    figures = {"charges": len(draws), "rate_drawn": drawn, "rate_charged": charged}
    return Report("lots", (*_repeats(draws), *findings), figures)


def _draws(seen: Observation) -> Iterable[_Draw]:
    for run, recording in enumerate(seen.recordings):
        records = {lot.number: lot.records for lot in recording.lots if not lot.measures}
        for stretch in stretches(recording, seen.correlated):
            members = [i for number in stretch.lots for i in records.get(number, ())]
            if any(number in records for number in stretch.lots):
                yield _Draw(stretch.rate, tuple(members), run)


def _repeats(draws: Sequence[_Draw]) -> Iterable[Finding]:
    for number, draw in enumerate(draws):
        (record, times), *_ = Counter(draw.records).most_common(1) or [(0, 0)]
        if times > 1:
            yield Finding(
                "record drawn twice",
                f"record {record} was drawn {times} times for charge {number}; allowed is once.",
                number,
                float(times),
                1.0,
            )
            return


def _rates(draws: Sequence[_Draw], size: int) -> Iterable[tuple[Finding, float]]:
    from scipy.stats import binom

    rate = max(draw.rate for draw in draws)
    counts = _counts(draws, size)
    drawn, chances = int(counts.sum()), len(draws) * size
    yield (
        Finding(
            "sampling rate",
            f"records were drawn at a rate of {drawn / chances:.4f} ({drawn} of {chances}), "
            f"which the ledger was charged {rate:.4f} for.",
            figure=drawn / chances,
            bound=rate,
        ),
        float(binom.sf(drawn - 1, chances, rate)),
    )
    busiest = int(counts.argmax())
    yield (
        Finding(
            "sampling rate of a record",
            f"record {busiest} was drawn for {counts[busiest]} of {len(draws)} charges at rate "
            f"{rate:.4f}: others are drawn less for it, and it is charged as if it were one of "
            "them.",
            figure=counts[busiest] / len(draws),
            bound=rate,
        ),
        float(binom.sf(counts[busiest] - 1, len(draws), rate)) * size,
    )


def _spreads(draws: Sequence[_Draw], size: int) -> Iterable[tuple[Finding, float]]:
    from scipy.stats import chi2

    sizes = np.array([len(set(draw.records)) for draw in draws], dtype=np.float64)
    counts = _counts(draws, size)
    for what, values, trials in (
        ("size of a lot", sizes, size),
        ("number of lots of a record", counts, len(draws)),
    ):
        share = values.mean() / trials
        expected = trials * share * (1 - share)
        freedom = len(values) - 1
        if not expected or not freedom:
            continue
        found = values.var(ddof=1) / expected
        yield (
            Finding(
                "spread of the lots",
                f"the {what} has {found:.3g} times the variance of independent draws: lots of a "
                "fixed size or a shuffled order are charged as Poisson lots.",
                figure=float(found),
                bound=1.0,
            ),
            float(chi2.cdf(freedom * found, freedom)),
        )


def _overlaps(draws: Sequence[_Draw], size: int) -> Iterable[tuple[Finding, float]]:
    """The lag at which lots share the most, for all lags up to half a run.

    A lag's pairs are taken in two halves. In each no lot is in two pairs, so that the pairs are
    independent and the law is exactly binomial.
    """
    from scipy.stats import binom

    rate = max(draw.rate for draw in draws)
    drawn = [_members([d for d in draws if d.run == run], size) for run in {d.run for d in draws}]
    tested: list[tuple[float, int, int, int]] = []  # chance, lag, shared records, pairs
    for lag in range(1, max(len(lots) for lots in drawn) // 2 + 1):
        for half in (0, 1):
            shared = pairs = 0
            for lots in drawn:
                starts = np.arange(max(0, len(lots) - lag))
                starts = starts[starts // lag % 2 == half]
                shared += int((lots[starts] & lots[starts + lag]).sum())
                pairs += len(starts)
            if pairs:
                chance = float(binom.sf(shared - 1, pairs * size, rate**2))
                tested.append((chance, lag, shared, pairs))
    if not tested:
        return
    chance, lag, shared, pairs = min(tested)
    yield (
        Finding(
            "overlap of lots",
            f"{pairs} pairs of lots {lag} charges apart share {shared} records, where independent "
            f"lots at rate {rate:.4f} share {pairs * size * rate**2:.1f}: a lot that is used again "
            "is charged as a fresh one.",
            figure=shared / (pairs * size),
            bound=rate**2,
        ),
        chance * len(tested),
    )


def _members(draws: Sequence[_Draw], size: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """A row for each draw, true where the record is in it."""
    members = np.zeros((len(draws), size), dtype=np.bool_)
    for row, draw in enumerate(draws):
        members[row, list(draw.records)] = True
    return members


def _counts(draws: Sequence[_Draw], size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    counts = np.zeros(size)
    for draw in draws:
        for record in set(draw.records):
            counts[record] += 1
    return counts
