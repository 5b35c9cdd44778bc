"""Reading releases of directions and angles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.audits import (
    observed,
    standard,
)
from vestige.audit.attack.directions import run_angles, tangent_readings
from vestige.audit.attack.training import inclusion
from vestige.audit.options import AuditOptions


def test_tangents_of_the_other_canaries_are_taken_off_exactly():
    _, canaries, found = observed("geodp-tangent", 1e-5)
    read, mu = tangent_readings(found, canaries.count)
    inside = inclusion(found.lots, canaries.count)
    assert np.abs((read / mu[:, None])[~inside]).max() < 1e-3
    assert (read / mu[:, None])[inside].min() > 0.9
    _, canaries, found = observed("geodp-tangent", 1.5, trials=1000)
    read, mu = tangent_readings(found, canaries.count)
    assert standard(read[~inclusion(found.lots, canaries.count)])


def test_canaries_of_angles_use_nearly_the_whole_bound():
    options = AuditOptions(method="geodp-box", noise_multiplier=1e-3, steps=4, trials=200, seed=1)
    found, read = run_angles(options, 1e-3, 0, 200, lambda step: None)
    assert not read.inside[:, ~read.member].any()
    assert np.abs((read.numbers / read.mu[:, None])[~read.inside]).max() < 0.02
    assert (read.numbers / read.mu[:, None])[read.inside].min() > 0.95
    # mu is half of what a step is charged for: the direction, at sqrt(2) sigma.
    assert read.mu == pytest.approx(np.full(4, 1 / (math.sqrt(2) * 1e-3)), rel=0.01)
    assert len(found.references) == 4
