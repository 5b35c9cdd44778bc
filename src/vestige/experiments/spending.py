"""Epsilon over the epochs of a run, by the tight accountant, for little money.

PLD takes a tenth of a second for each number of steps. It is asked at about a dozen epochs, spaced
evenly in their logarithm, and log epsilon is interpolated in log epoch between them. That curve is
convex (epsilon grows like a root of the steps first and like the steps later), so the chord lies
above it: what is interpolated is still an upper bound, by less than half a per cent. Where epochs
are not charged alike (trees and cycles of correlated noise) the next known value is the bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from vestige import accounting
from vestige.ledger import Event

_POINTS = 13
_MOST_DIFFERENT = 4  # events; the PLD of a schedule takes up to a minute, RDP does not


def epsilon_curve(
    spent: Sequence[Sequence[Event]], delta: float, final: float | None, accountant: str = "pld"
) -> list[float | None]:
    """Epsilon after each epoch, from the ledger's events at that time; `final` is the last one.

    None where it is infinite.
    """
    epochs = len(spent)
    if final is None:
        return [None] * epochs
    if accountant == "pld" and any(len(events) > _MOST_DIFFERENT for events in spent):
        accountant = "rdp"
    asked = sorted({round(epochs ** (i / (_POINTS - 1))) for i in range(_POINTS)} - {0})
    known: dict[int, float] = {}
    for epoch in asked:
        value = accounting.epsilon(spent[epoch - 1], delta, accountant)
        known[epoch] = min(value, final) if epoch < epochs else final
    charged = [sum(event.count for event in events) for events in spent]
    even = len({b - a for a, b in itertools.pairwise([0, *charged])}) == 1
    return [_shown(_between(epoch, known, even)) for epoch in range(1, epochs + 1)]


def _between(epoch: int, known: dict[int, float], even: bool) -> float:
    if epoch in known:
        return known[epoch]
    before = max(e for e in known if e < epoch)
    after = min(e for e in known if e > epoch)
    if not known[before] or not even:
        return known[after]
    share = math.log(epoch / before) / math.log(after / before)
    return math.exp((1 - share) * math.log(known[before]) + share * math.log(known[after]))


def _shown(value: float) -> float | None:
    """Five digits, rounded up: less would claim more than is known."""
    if not math.isfinite(value) or value == 0:
        return value if math.isfinite(value) else None
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return float(f"{math.ceil(value / unit) * unit:.6g}")
