"""Epsilon over the epochs of a run."""

from __future__ import annotations

import pytest

from vestige.lab.spending import epsilon_curve
from vestige.privacy import accounting
from vestige.privacy.ledger import Event


def test_the_epsilon_curve_is_a_close_upper_bound() -> None:
    """Between the epochs that PLD was asked for, too."""
    epochs = 250
    for noise in (0.7, 1.2222, 4.5):
        spent = [[Event(0.04, noise, 25 * epoch)] for epoch in range(1, epochs + 1)]
        final = accounting.epsilon(spent[-1], 1e-5)
        curve = [e for e in epsilon_curve(spent, 1e-5, final) if e is not None]
        assert len(curve) == epochs
        assert curve == sorted(curve)
        for epoch in (1, 4, 11, 26, 61, 100, 137, 199, 222, 250):
            exact = accounting.epsilon(spent[epoch - 1], 1e-5)
            asked = min(epochs, -(-epoch // 8) * 8)
            assert exact <= curve[epoch - 1]
            assert curve[epoch - 1] <= accounting.epsilon(spent[asked - 1], 1e-5) * (1 + 1e-4)
            assert curve[epoch - 1] <= accounting.epsilon(spent[epoch - 1], 1e-5, "rdp") * 1.0001


@pytest.mark.parametrize(("rate", "noise", "per"), [(0.01, 1.0, 10), (0.005, 0.7, 2), (0.02, 1, 1)])
def test_the_epsilon_curve_is_no_chord(rate: float, noise: float, per: int) -> None:
    """Early epochs of a small rate: epsilon is concave there, and a chord lies below it."""
    spent = [[Event(rate, noise, per * epoch)] for epoch in range(1, 61)]
    curve = epsilon_curve(spent, 1e-5, accounting.epsilon(spent[-1], 1e-5))
    for events, shown in zip(spent, curve, strict=True):
        assert shown is not None and shown >= accounting.epsilon(events, 1e-5)


def test_the_epsilon_curve_without_a_guarantee() -> None:
    assert epsilon_curve([[Event(0.1, 0.0, 1)]], 1e-5, None) == [None]
