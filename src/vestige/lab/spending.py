"""Epsilon over the epochs of a run, by the tight accountant, at a bounded price.

PLD takes a few hundredths of a second for each number of steps. It is asked at no more than 32
epochs, evenly spaced; an epoch in between has the value of the next one that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from vestige.checks import digits_up, finite
from vestige.privacy import accounting
from vestige.privacy.ledger import Event


def epsilon_curve(
    spent: Sequence[Sequence[Event]], delta: float, final: float | None, accountant: str = "pld"
) -> list[float | None]:
    """Epsilon after each epoch, from the ledger's events at that time; `final` is the last one.

    None where it is infinite. Guarantee: that of `accounting.epsilon_on_the_way`.
    """
    if final is None or not spent:
        return [None] * len(spent)
    every = accounting.computed_every(len(spent), spent[-1])
    curve: list[float | None] = []
    for number, events in enumerate(spent):
        point = min(number + every - number % every, len(spent)) - 1
        bound = accounting.epsilon_on_the_way(events, spent[point], delta, accountant)
        curve.append(_shown(min(bound, final)))
    curve[-1] = _shown(final)
    return curve


def _shown(value: float) -> float | None:
    """Five digits, rounded up: less would claim more than is known."""
    return finite(digits_up(value, 5))
