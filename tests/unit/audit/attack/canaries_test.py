"""Reading releases: who was in the lot, with the claimed law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.audits import (
    CORRELATED,
    PLAIN,
    observed,
    standard,
)
from vestige.audit.attack.canaries import readings
from vestige.audit.attack.training import inclusion


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *((name, None) for name in PLAIN if name not in CORRELATED),
        ("dp-sgd", "per_layer"),
        ("fo", "auto"),
        ("sma", "quantile_per_layer"),
    ],
)
def test_without_noise_a_reading_says_exactly_who_was_in_the_lot(name, clipping):
    """So every canary saturates every group in every look, and touches nobody else."""
    _, canaries, found = observed(PLAIN[name], 1e-5, clipping=clipping)
    read, mu = readings(found, canaries.count)
    inside = inclusion(found.lots, canaries.count)
    assert 0.02 < inside.mean() < 0.1  # a tenth of the half that is in the data
    assert not inside[:, ~canaries.member].any()
    assert np.abs(read / mu[:, None] - inside).max() < 2e-3


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        ("dp-sgd", None),
        ("fo", None),
        ("sma", None),
        ("kalman, beta", None),
        ("dp-sam", None),
        ("dp-is", None),
        ("dp-adam-ac-private", None),
        ("sma", "quantile_per_layer"),
    ],
)
def test_readings_have_the_claimed_law_and_are_independent(name, clipping):
    """False alarms: 5 standard deviations of each of three statistics, below 2e-6 together."""
    setting, canaries, found = observed(PLAIN[name], 1.3, trials=1000, clipping=clipping)
    read, mu = readings(found, canaries.count)
    assert np.allclose(1 / mu, setting.multipliers(1.3), rtol=1e-6)
    noise = read - mu[:, None] * (inclusion(found.lots, canaries.count) & canaries.member)
    assert standard(noise.ravel())
    steps = (noise[1:] * noise[:-1]).ravel()
    others = (noise[:, 1:] * noise[:, :-1]).ravel()
    assert abs(steps.mean()) * math.sqrt(len(steps)) < 5
    assert abs(others.mean()) * math.sqrt(len(others)) < 5
