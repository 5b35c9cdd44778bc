"""Which records are in which lot: a function of the secret key and the lot's number alone.

    Poisson         every record is in every lot independently with the sampling rate
    CyclicPoisson   record i has a group, uniform on 0 ... bands - 1; lot t takes each record of
                    group t mod bands with probability bands * sample_rate
    FixedOrder      the records in one random order, cut into pieces; lot k is piece k mod period

A Poisson lot is drawn in time proportional to the lot: the gaps between its records are geometric,
so the draw jumps from one record to the next. Lots may be empty. The last two are for methods whose
noise is correlated from lot to lot. Cyclic Poisson lots of one record are `bands` or more apart
(BandMF, arXiv 2306.08153), and their expected size is that of Poisson lots at `sample_rate`. In the
fixed order every record comes once per epoch, always in the same place (DP-FTRL, arXiv 2103.00039).

Guarantee: exact Poisson sampling up to 2^-53 in each gap's probability, which is what the
accountants assume (Abadi et al. 2016; shuffled or fixed-size batches would need other accounting,
Chua et al. 2024). Groups and draws of cyclic lots are independent from record to record, so that
what is charged, one draw at rate bands * sample_rate for a cycle of `bands` lots, holds for adding
or removing one record. So does a charge at rate 1 for all lots of a record's group in a run (a
banded inverse): it needs groups that are independent from record to record, and the turns apart.
A fixed order amplifies nothing: lots are charged at rate 1. Taking a record out would move others
to other lots, so what is charged there is for zeroing one record out (its gradient becomes zero and
its place stays), with the number of records public.
Groups and order are functions of the secret key alone. A run that was resumed under another key has
others, and must be charged from there on as a new run, with noise that begins anew.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vestige.checks import check_count, check_share
from vestige.errors import ConfigError
from vestige.plan import Table, at
from vestige.sampling.streams import LOTS, Randomness

GROUPS, ORDER = b"groups", b"order"


def draw_lot(
    randomness: Randomness, step: int, size: int, sample_rate: float
) -> npt.NDArray[np.int64]:
    """The sorted indices of lot `step`: each of range(size) with probability `sample_rate`."""
    if sample_rate >= 1:
        return np.arange(size, dtype=np.int64)
    expected = size * sample_rate
    want = int(expected + 6 * math.sqrt(expected) + 16)
    while True:
        # A longer draw of the same stream begins with the same numbers.
        u = randomness.uniforms(LOTS, step, want)
        gaps = np.minimum(np.floor(np.log(u) / math.log1p(-sample_rate)), 2.0**62 / want)
        places = np.cumsum(gaps + 1) - 1
        if places[-1] >= size:
            return places[places < size].astype(np.int64)
        want *= 2


class Drawing(Protocol):
    """Decides which records are in which lot, from the secret key and the lot's number alone."""

    def lot(self, number: int) -> npt.NDArray[np.int64]:
        """The sorted indices of lot `number`."""


class Poisson:
    """Every record is in every lot independently; the rate may follow a table."""

    def __init__(self, randomness: Randomness, size: int, sample_rate: Table) -> None:
        self._randomness, self._size, self._rate = randomness, size, sample_rate

    def lot(self, number: int) -> npt.NDArray[np.int64]:
        """The sorted indices of lot `number`."""
        return draw_lot(self._randomness, number, self._size, at(self._rate, number))


class CyclicPoisson:
    """The records in `bands` groups that take turns; `rate` is the probability within a turn."""

    def __init__(self, randomness: Randomness, size: int, sample_rate: float, bands: int) -> None:
        check_share("sample_rate", sample_rate)
        rate = check_count("bands", bands) * sample_rate
        if rate > 1 + 1e-12:  # a rate that was computed may be above by rounding
            raise ConfigError(
                f"bands={bands} times the sampling rate {sample_rate:g} is {rate:g}, above 1: a "
                "group would have too few records for its lots. Use fewer bands (at most "
                f"{int(1 / sample_rate + 1e-9)}) or a smaller lot."
            )
        self.rate, self.bands = min(1.0, rate), bands
        self._randomness = randomness
        groups = np.ceil(randomness.uniforms(GROUPS, 0, size) * bands).astype(np.int64) - 1
        members = np.argsort(groups, kind="stable")
        self._members = np.split(members, np.cumsum(np.bincount(groups, minlength=bands))[:-1])

    def lot(self, number: int) -> npt.NDArray[np.int64]:
        """The sorted indices of lot `number`."""
        members = self._members[number % self.bands]
        return members[draw_lot(self._randomness, number, len(members), self.rate)]


class FixedOrder:
    """Every record once in `period` lots, in an order that stays the same."""

    def __init__(self, randomness: Randomness, size: int, batch_size: int) -> None:
        check_count("batch_size", batch_size)
        order = np.argsort(randomness.uniforms(ORDER, 0, size), kind="stable")
        self._pieces = [
            np.sort(order[first : first + batch_size]) for first in range(0, size, batch_size)
        ]
        self.period = len(self._pieces)

    def lot(self, number: int) -> npt.NDArray[np.int64]:
        """The sorted indices of lot `number`."""
        return self._pieces[number % self.period]
