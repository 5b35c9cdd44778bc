"""Reading releases with correlated noise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.audits import (
    CORRELATED,
    PLAIN,
    observed,
    standard,
)
from vestige.audit.attack.correlated import correlated_scores, stretch_signals


@pytest.mark.parametrize("name", CORRELATED)
def test_whitened_scores_are_standard_without_the_canary_and_shifted_with_it(name):
    options, canaries, run = observed(PLAIN[name], 2.0, trials=1500, steps=16)
    _, (scores, inside, _) = correlated_scores(options, run, canaries, 2.0)
    assert standard(scores[~inside])
    shift = scores[inside]
    planned = (
        max(charge.weight for charge in options.charges(len(canaries.target(options).dataset)))
        / 2.0
    )
    assert shift.var() < 1.3
    assert 0.3 * planned < shift.mean() < planned * 1.05


def test_the_lots_of_a_stretch_by_hand():
    drawn = np.zeros((5, 4), dtype=bool)
    drawn[1, 0] = drawn[3, 0] = True  # second place of both stretches
    drawn[2, 1] = True  # first place of the second
    signals = stretch_signals(drawn, 2, 2)
    assert signals.shape == (3, 5, 4)
    assert signals[0, :, 0].tolist() == [0, 1, 0, 0, 0]
    assert signals[1, :, 0].tolist() == [0, 0, 0, 1, 0]
    assert signals[2, :, 0].tolist() == [0, 0, 0, 0, 0]  # after the end of the run
    assert signals[0, :, 1].tolist() == [1, 0, 0, 0, 0]
    assert signals[2, :, 1].tolist() == [0, 0, 0, 0, 1]
    assert signals[0, :, 2].tolist() == [1, 0, 0, 0, 0]  # never drawn: any place


def test_the_lots_of_a_long_stretch_come_every_period():
    drawn = np.zeros((7, 3), dtype=bool)
    drawn[[1, 4], 0] = True
    signals = stretch_signals(drawn, 7, 3)
    assert signals[0, :, 0].tolist() == [0, 1, 0, 0, 1, 0, 0]  # those that drew it
    assert signals[0, :, 1].tolist() == [0, 1, 0, 0, 1, 0, 0]  # never drawn: the second place
    assert signals[0, :, 2].tolist() == [0, 0, 1, 0, 0, 1, 0]
