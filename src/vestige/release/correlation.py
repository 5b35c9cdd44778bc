"""Correlated noise at the door: which noise a lot gets, and which lots are charged.

The noise of one charge covers `every` lots in a row: a cycle of the groups of a cyclic Poisson
draw, a tree, or a block of a banded inverse. The charge is due when the first lot of the stretch
comes. A record's lots are whole `period`s apart.

Guarantee: charged before the first noise of a stretch is drawn. A run that continues under another
key begins a new stretch, charged as such: its noise does not overlap with the earlier noise, so the
two compose (see correlated.py).
"""

from __future__ import annotations

from torch import Tensor

from vestige.privacy.accounting import Charge
from vestige.release.correlated import NoiseProcess


class Correlation:
    """A noise process whose rows are lots, and its charge for every `every` lots."""

    def __init__(
        self, process: NoiseProcess, every: int, charge: Charge, period: int | None = None
    ) -> None:
        self._process, self.every, self._charge = process, every, charge
        self.period = every if period is None else period
        self._first = 0  # the lot that the process began with
        self._paid = -1  # the last stretch that was charged

    def due(self, lot: int) -> Charge | None:
        """What must be charged before `lot` is released; None where an earlier charge covers it."""
        return self._charge if self._stretch(lot) > self._paid else None

    def begins(self, lot: int) -> Charge | None:
        """What will be charged when `lot` comes in its turn: None within a stretch."""
        return self._charge if (lot - self._first) % self.every == 0 else None

    def paid(self, lot: int) -> None:
        """The charge of the stretch of `lot` is in the ledger."""
        self._paid = self._stretch(lot)

    def noise(self, lot: int) -> Tensor:
        """The noise of `lot`, in units of sigma * C."""
        return self._process.at(lot - self._first)

    def marginal(self, lot: int) -> float:
        """The standard deviation of one number of that noise, in the same units."""
        return self._process.marginal(lot - self._first)

    def continue_from(self, lot: int, repeatable: bool) -> None:
        """A saved run continues with `lot`: in test mode with the noise of a run that never
        stopped. The stretch under way is charged again, since the key may be another."""
        if repeatable:
            self._paid = self._stretch(lot) - 1
        else:
            self._first = lot

    def _stretch(self, lot: int) -> int:
        return (lot - self._first) // self.every
