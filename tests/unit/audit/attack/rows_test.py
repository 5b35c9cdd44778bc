"""Mis-attributed rows under attack."""

from __future__ import annotations

import pytest

from vestige.audit.attack.rows import audit_rows, misread
from vestige.gradients.rows import Rows


@pytest.mark.parametrize("seed", [1, 2])
def test_mis_attributed_rows_are_caught_and_rightly_attributed_ones_are_not(seed):
    broken, whole = (audit_rows(b, trials=200, seed=seed) for b in (True, False))
    assert broken.epsilon_claimed == whole.epsilon_claimed == pytest.approx(0.434, abs=1e-3)
    assert broken.violated and broken.epsilon_lower > 2
    assert "by 35.19 C" in broken.notes[0]
    assert not whole.violated and "by 1 C" in whole.notes[0]


def test_the_engine_is_broken_for_the_attack_only():
    first = Rows.first
    with pytest.raises(KeyError), misread():
        assert Rows.first is not first
        raise KeyError
    assert Rows.first is first
