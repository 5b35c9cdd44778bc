"""Tangents: contributions, decoding and turning."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.directions import (
    as_vector,
    lengths_of,
    normal,
)
from vestige.errors import ConfigError
from vestige.geometry import (
    Tangent,
)


def tangent_reference(rows, lengths, u, radius, clip, weighted):
    """Tangent, one example at a time."""
    total = [0.0] * (len(u) + 1)
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        total[-1] += length
        size = math.hypot(*row)
        if size == 0:
            continue
        cosine = sum(x * y / size for x, y in zip(row, u, strict=True))
        angle = math.acos(max(-1.0, min(1.0, cosine)))
        for z, (x, y) in enumerate(zip(row, u, strict=True)):
            turn = (x / size - cosine * y) / math.sin(angle)
            total[z] += min(angle, radius) * turn * (length / clip if weighted else 1.0)
    return torch.tensor(total, dtype=torch.float64)


@pytest.mark.parametrize("radius", [0.05, 1.0, math.pi])
@pytest.mark.parametrize("weighted", [True, False])
def test_tangent_contributions(radius, weighted):
    rows = normal(30, 6)
    rows[4] = 0.0
    geometry = Tangent(rows[0], radius=radius, weighted=weighted, seed=3)
    lengths = lengths_of(rows, 2.0)
    u = geometry.state_dict()["reference"]
    assert float(u.norm()) == pytest.approx(1.0, rel=1e-12)
    expected = tangent_reference(rows, lengths, u.tolist(), radius, 2.0, weighted)
    actual = geometry.contribution(rows, lengths, 2.0)
    torch.testing.assert_close(actual, expected)
    assert float(actual[:-1] @ u) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("size", [2, 3, 50, 3000])
@pytest.mark.parametrize("turn", [1e-9, 1e-3, 0.3, 0.69])
def test_equal_gradients_decode_to_themselves_in_the_tangent_space(size, turn):
    geometry = Tangent(torch.zeros(size, dtype=torch.float64), radius=0.7)
    u = as_vector(geometry)
    aside = normal(size, seed=1)
    aside -= (aside @ u) * u
    g = 2.0 * (math.cos(turn) * u + math.sin(turn) * aside / aside.norm())
    rows = g.expand(16, size)
    values = geometry.contribution(rows, lengths_of(rows, 2.0), 2.0)
    torch.testing.assert_close(geometry.gradient(values, 16), g, rtol=0.0, atol=1e-12)
    # The reference is that direction now, so the same gradients ask for no turn.
    assert float(geometry.contribution(rows, lengths_of(rows, 2.0), 2.0)[:-1].norm()) < 1e-12


def test_short_gradients_turn_less_where_weighted():
    rows = 0.5 * normal(1, 6).expand(8, 6)
    rows = rows / lengths_of(rows, math.inf)[:, None] * 0.5
    for weighted, share in ((True, 0.25), (False, 1.0)):
        geometry = Tangent(rows[0], radius=math.pi, weighted=weighted)
        u = as_vector(geometry)
        angle = math.acos(float(u @ rows[0]) / 0.5)
        out = geometry.gradient(geometry.contribution(rows, lengths_of(rows, 2.0), 2.0), 8)
        assert float(out.norm()) == pytest.approx(0.5)
        assert math.acos(float(u @ out) / 0.5) == pytest.approx(share * angle, rel=1e-9)


def test_tangent_decoding():
    geometry = Tangent(torch.zeros(6, dtype=torch.float64), radius=1.2)
    for step in range(4):
        u = as_vector(geometry).tolist()
        values = normal(7, seed=step) * 2
        values[-1] = abs(values[-1])
        lot = 3
        x = [v / lot for v in values[:-1].tolist()]
        along = sum(a * b for a, b in zip(x, u, strict=True))
        x = [a - along * b for a, b in zip(x, u, strict=True)]
        size = math.hypot(*x)
        angle = min(size, 1.2)
        expected = [
            float(values[-1]) / lot * (math.cos(angle) * b + math.sin(angle) * a / size)
            for a, b in zip(x, u, strict=True)
        ]
        assert geometry.gradient(values, lot).tolist() == pytest.approx(expected, rel=1e-10)


def test_noise_along_the_reference_is_dropped_and_noise_beyond_the_radius_cut():
    size = 1000
    still = Tangent(torch.zeros(size, dtype=torch.float64), radius=0.5)
    u = as_vector(still)
    along = torch.cat([300.0 * u, torch.tensor([4.0])])
    torch.testing.assert_close(still.gradient(along, 2), 2.0 * u, rtol=0.0, atol=1e-11)
    loud = Tangent(torch.zeros(size, dtype=torch.float64), radius=0.5)
    out = loud.gradient(torch.cat([100 * normal(size), torch.ones(1)]), 1)
    assert math.acos(float(out @ u)) == pytest.approx(0.5)  # without the cut anywhere on the sphere


def test_gradients_along_the_reference_show_no_way_to_turn():
    geometry = Tangent(torch.zeros(1000, dtype=torch.float64), radius=2.0)
    u = as_vector(geometry)
    for sign in (3.0, -3.0, -1e-30):
        part = geometry.contribution((sign * u)[None], torch.ones(1), 1.0)
        assert not part[:-1].any()  # backwards it is pi away, and rounding would choose the way
        assert float(part[-1]) == pytest.approx(1.0)


def test_a_reference_stays_a_unit_vector():
    geometry = Tangent(torch.zeros(50, dtype=torch.float64), radius=0.5)
    geometry.load_state_dict({"reference": as_vector(geometry) * (1 + 5e-7)})
    geometry.gradient(normal(51), 50)
    assert float(as_vector(geometry).norm()) == pytest.approx(1.0, abs=1e-14)


def test_tangent_turns_with_the_gradients():
    size = 12
    rotation = torch.linalg.qr(normal(size, size, seed=5))[0]
    rows, noise = normal(20, size), normal(size, seed=9)
    plain = Tangent(rows[0], radius=0.9)
    turned = Tangent(rows[0], radius=0.9)
    turned.load_state_dict({"reference": rotation @ plain.state_dict()["reference"]})
    for _ in range(3):
        values = plain.contribution(rows, lengths_of(rows, 2.0), 2.0)
        rotated = turned.contribution(rows @ rotation.T, lengths_of(rows, 2.0), 2.0)
        torch.testing.assert_close(rotated[:-1], rotation @ values[:-1], rtol=0, atol=1e-12)
        values[:-1] += noise
        rotated[:-1] += rotation @ noise
        out, other = plain.gradient(values, 20), turned.gradient(rotated, 20)
        torch.testing.assert_close(other, rotation @ out, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("radius", [0, -1.0, 3.15, math.nan, math.inf, True, "1", None])
def test_tangent_settings(radius):
    with pytest.raises(ConfigError, match="radius="):
        Tangent(torch.zeros(5), radius=radius)
