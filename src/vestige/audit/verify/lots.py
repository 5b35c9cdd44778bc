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
import numpy.typing as npt
from scipy import stats

from vestige.audit.verify.findings import FALSE_ALARM, Finding, Report, Tested, alarms
from vestige.audit.verify.runs import OBSERVED, Observation, observe, stretches
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, resolve


def lots_check(
    method: str | Method,
    *,
    steps: int = OBSERVED.steps,
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
    size, rate = seen.setting.size, max(draw.rate for draw in draws)
    runs = sorted({draw.run for draw in draws})
    members = [_members([draw for draw in draws if draw.run == run], size) for run in runs]
    drawn = np.concatenate(members)
    tested = [*_rates(drawn, rate), *_spreads(drawn), *_overlaps(members, rate)]
    figures = {"charges": len(draws), "rate_drawn": float(drawn.mean()), "rate_charged": rate}
    return Report("lots", (*_repeats(draws), *alarms(tested, false_alarm)), figures)


@dataclass(frozen=True)
class _Draw:
    """The records of one stretch, and the rate that was charged for it."""

    rate: float
    records: tuple[int, ...]
    run: int  # which of the recordings it is of


Members = npt.NDArray[np.bool_]
"""A row for each draw, true where the record is in it."""


def _members(draws: Sequence[_Draw], size: int) -> Members:
    members = np.zeros((len(draws), size), dtype=np.bool_)
    for row, draw in enumerate(draws):
        members[row, list(draw.records)] = True
    return members


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
            sentence = (
                f"record {record} was drawn {times} times for charge {number}; allowed is once."
            )
            yield Finding("record drawn twice", sentence, number, float(times), 1.0)
            return


def _rates(drawn: Members, rate: float) -> Iterable[Tested]:
    counts = drawn.sum(axis=0)
    charges, size = drawn.shape
    total, chances = int(counts.sum()), drawn.size
    sentence = (
        f"records were drawn at a rate of {total / chances:.4f} ({total} of {chances}), which "
        f"the ledger was charged {rate:.4f} for."
    )
    chance = float(stats.binom.sf(total - 1, chances, rate))
    yield Finding("sampling rate", sentence, None, total / chances, rate), chance
    busiest = int(counts.argmax())
    most = int(counts[busiest])
    sentence = (
        f"record {busiest} was drawn for {most} of {charges} charges at rate {rate:.4f}: others "
        "are drawn less for it, and it is charged as if it were one of them."
    )
    chance = float(stats.binom.sf(most - 1, charges, rate)) * size
    yield Finding("sampling rate of a record", sentence, None, most / charges, rate), chance


def _spreads(drawn: Members) -> Iterable[Tested]:
    for what, values, trials in (
        ("size of a lot", drawn.sum(axis=1), drawn.shape[1]),
        ("number of lots of a record", drawn.sum(axis=0), drawn.shape[0]),
    ):
        share = values.mean() / trials
        expected, freedom = trials * share * (1 - share), len(values) - 1
        if not expected or not freedom:
            continue
        spread = float(values.var(ddof=1) / expected)
        sentence = (
            f"the {what} has {spread:.3g} times the variance of independent draws: lots of a fixed "
            "size or a shuffled order are charged as Poisson lots."
        )
        chance = float(stats.chi2.cdf(freedom * spread, freedom))
        yield Finding("spread of the lots", sentence, None, spread, 1.0), chance


def _overlaps(members: Sequence[Members], rate: float) -> Iterable[Tested]:
    """The lag at which lots share the most, for all lags up to half a run.

    A lag's pairs are taken in two halves. In each no lot is in two pairs, so that the pairs are
    independent and the law is exactly binomial.
    """
    size = members[0].shape[1]
    tested: list[tuple[float, int, int, int]] = []  # chance, lag, shared records, pairs
    for lag in range(1, max(len(lots) for lots in members) // 2 + 1):
        for half in (0, 1):
            shared = pairs = 0
            for lots in members:
                starts = np.arange(max(0, len(lots) - lag))
                starts = starts[starts // lag % 2 == half]
                shared += int((lots[starts] & lots[starts + lag]).sum())
                pairs += len(starts)
            if pairs:
                chance = float(stats.binom.sf(shared - 1, pairs * size, rate**2))
                tested.append((chance, lag, shared, pairs))
    if not tested:
        return
    chance, lag, shared, pairs = min(tested)
    sentence = (
        f"{pairs} pairs of lots {lag} charges apart share {shared} records, where independent "
        f"lots at rate {rate:.4f} share {pairs * size * rate**2:.1f}: a lot that is used again "
        "is charged as a fresh one."
    )
    finding = Finding("overlap of lots", sentence, None, shared / (pairs * size), rate**2)
    yield finding, chance * len(tested)
