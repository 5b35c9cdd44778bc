"""Angles in a box: contributions, decoding, references."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.directions import (
    as_vector,
    lengths_of,
    normal,
    reference_angles,
    reference_vector,
)
from vestige.errors import ConfigError
from vestige.geometry import (
    Box,
    to_cartesian,
)


def box_reference(rows, lengths, phi, beta):
    """Box, one example and one angle at a time."""
    total = [0.0] * (len(phi) + 1)
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        total[-1] += length
        if not any(row):
            continue
        for z, theta in enumerate(reference_angles(row)):
            last = z == len(phi) - 1
            deviation = theta - phi[z]
            if last and deviation > math.pi:
                deviation -= 2 * math.pi
            if last and deviation < -math.pi:
                deviation += 2 * math.pi
            limit = beta * math.pi * (1 if last else 0.5)
            total[z] += max(-limit, min(limit, deviation))
    return torch.tensor(total, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_box_contributions(beta, size):
    rows = normal(30, size)
    rows[4] = 0.0
    geometry = Box(rows[0], beta=beta, seed=3)
    lengths = lengths_of(rows, 0.5)
    phi = geometry.state_dict()["reference"].tolist()
    assert phi == pytest.approx(reference_angles(as_vector(geometry)), abs=1e-12)
    expected = box_reference(rows, lengths, phi, beta)
    torch.testing.assert_close(geometry.contribution(rows, lengths, 0.5), expected)


def test_a_missing_angle_asks_for_no_change():
    row = torch.tensor([[0.3, -0.4, 0.0, 0.0, 0.0]])
    box = Box(row[0], beta=1.0)
    part = box.contribution(row, torch.tensor([0.5]), 1.0)
    assert part[2:4].tolist() == [0.0, 0.0]  # the loop above would pull these to an angle of 0
    assert (part[:2] != 0).all()


def test_equal_gradients_within_the_box_decode_to_themselves():
    geometry = Box(torch.zeros(40, dtype=torch.float64), beta=0.1)
    phi = geometry.state_dict()["reference"]
    g = to_cartesian(torch.ones(1), (phi + 0.15 * torch.sign(math.pi / 2 - phi))[None])
    rows = g.expand(16, 40)
    values = geometry.contribution(rows, lengths_of(rows), 1.0)
    torch.testing.assert_close(geometry.gradient(values, 16), g[0], rtol=0.0, atol=1e-12)
    assert float(geometry.contribution(rows, lengths_of(rows), 1.0)[:-1].norm()) < 1e-10


def test_box_decoding_folds_angles_back():
    geometry = Box(torch.zeros(6, dtype=torch.float64), beta=1.0)
    folded = 0
    for step in range(6):
        phi = geometry.state_dict()["reference"].tolist()
        values = normal(6, seed=step) * 8
        values[-1] = abs(values[-1])
        angles = [p + v / 4 for p, v in zip(phi, values[:-1].tolist(), strict=True)]
        for z in range(len(angles) - 1):
            while not 0 <= angles[z] <= math.pi:  # reflected at the ends
                angles[z] = -angles[z] if angles[z] < 0 else 2 * math.pi - angles[z]
                folded += 1
        out = geometry.gradient(values, 4)
        expected = reference_vector(float(values[-1]) / 4, angles)
        torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-12)
        # The reference is the decoded vector's own angles.
        now = geometry.state_dict()["reference"].tolist()
        assert now == pytest.approx(reference_angles(out), abs=1e-9)
    assert folded > 5


def test_a_box_reference_survives_directions_that_underflow():
    geometry = Box(torch.zeros(20_000), beta=1.0)
    values = torch.cat([torch.full((19_999,), 1.0), torch.ones(1)])
    out = geometry.gradient(values, 1)
    assert int((out != 0).sum()) < 5000  # most coordinates are products of too many sines
    reference = geometry.state_dict()["reference"]
    assert int((reference == 0).sum()) == 0
    assert reference.isfinite().all()


@pytest.mark.parametrize("beta", [0, 0.0, -0.1, 1.1, math.nan, math.inf, True, "0.1", None])
def test_box_settings(beta):
    with pytest.raises(ConfigError, match="beta="):
        Box(torch.zeros(5), beta=beta)
