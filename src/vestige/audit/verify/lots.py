"""Whether lots are drawn as they are charged: at most at the charged rate, record by record.

For every charge at a rate q below 1, each record must be in what the charge pays for (a lot, or a
cycle of lots with correlated noise) with probability at most q, at most once, and independently of
all others. Rates and overlaps are tested by upper tails of binomial laws, the spread of sizes by
lower tails of chi-square laws, each at its share of a declared false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from vestige.audit.tape import Recording
from vestige.audit.verify.findings import FALSE_ALARM, Finding, Report, Tested, alarms
from vestige.audit.verify.runs import Observation, stretches

Draw = tuple[float, npt.NDArray[np.int64]]
"""The rate that one charge was at, and how often each record was drawn for it."""

Members = npt.NDArray[np.bool_]
"""A row for each charge, true where the record was drawn."""


def examine(seen: Observation, false_alarm: float = FALSE_ALARM) -> Report:
    """The check on a run that was observed."""
    runs = [_draws(recording, seen) for recording in seen.recordings]
    draws = [draw for run in runs for draw in run]
    if not draws:
        reason = "every charge is at rate 1: sampling is not claimed to hide anything"
        return Report("lots", not_applicable=reason)
    rate = max(rate for rate, _ in draws)
    members = [np.array([counts > 0 for _, counts in run]) for run in runs if run]
    drawn = np.concatenate(members)
    tested = [*_rates(drawn, rate), *_spreads(drawn), *_overlaps(members, rate)]
    figures = {"charges": len(draws), "rate_drawn": float(drawn.mean()), "rate_charged": rate}
    return Report("lots", (*_repeats(draws), *alarms(tested, false_alarm)), figures)


def _draws(recording: Recording, seen: Observation) -> list[Draw]:
    """What was drawn for the charges that claim a rate below 1."""
    records = {lot.number: lot.records for lot in recording.lots if not lot.measures}
    draws = []
    for stretch in stretches(recording, seen.correlated):
        lots = [records[number] for number in stretch.lots if number in records]
        if lots and stretch.rate < 1:
            drawn = np.array([record for lot in lots for record in lot], dtype=np.int64)
            draws.append((stretch.rate, np.bincount(drawn, minlength=seen.setting.size)))
    return draws


def _repeats(draws: Sequence[Draw]) -> Iterable[Finding]:
    for number, (_, counts) in enumerate(draws):
        record, times = int(counts.argmax()), int(counts.max())
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
