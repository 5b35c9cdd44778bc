"""Directions and lengths: coordinates, bounded parts, decoding, and GeoDP's counterexamples.

References are explicit loops over Python numbers, which share nothing with the library.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import norm

from vestige.errors import ConfigError
from vestige.geometry import (
    Box,
    Tangent,
    angle_scale,
    base,
    perturbed,
    to_cartesian,
    to_hyperspherical,
)
from vestige.geometry.study import MEASURES, METHODS, DirectionStudy, direction_study

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
GEOMETRIES = {
    "box": lambda like, seed=0: Box(like, beta=0.1, seed=seed),
    "wide box": lambda like, seed=0: Box(like, beta=1.0, seed=seed),
    "tangent": lambda like, seed=0: Tangent(like, radius=0.7, seed=seed),
    "unweighted": lambda like, seed=0: Tangent(like, radius=math.pi, weighted=False, seed=seed),
    "tiny tangent": lambda like, seed=0: Tangent(like, radius=1e-6, seed=seed),
}
each_geometry = pytest.mark.parametrize("make", GEOMETRIES.values(), ids=GEOMETRIES)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lengths_of(rows, clip=1.0):
    return torch.linalg.vector_norm(rows.double(), dim=1).clamp(max=clip)


def as_vector(geometry):
    """The reference as a unit vector, from the public state."""
    reference = geometry.state_dict()["reference"]
    if isinstance(geometry, Tangent):
        return reference
    return to_cartesian(torch.ones(1), reference[None])[0]


def reference_angles(vector):
    """theta_z = atan2(|g_z+1:d|, g_z), the last atan2(g_d, g_d-1), one at a time."""
    g = [float(x) for x in vector]
    angles = [math.atan2(math.hypot(*g[z + 1 :]), g[z]) for z in range(len(g) - 2)]
    return [*angles, math.atan2(g[-1], g[-2])]


def reference_vector(radius, angles):
    """r cos(theta_z) prod_k<z sin(theta_k), one at a time."""
    vector, product = [], float(radius)
    for angle in angles:
        vector.append(product * math.cos(angle))
        product *= math.sin(angle)
    return torch.tensor([*vector, product], dtype=torch.float64)


# Hyperspherical coordinates


anything = st.one_of(
    st.just(0.0),
    st.just(-0.0),
    st.floats(-2, 2),
    st.floats(-1e150, 1e150),
    st.floats(-1e-150, 1e-150),
)


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=9),
        elements=anything,
    )
)
def test_rows_come_back(rows):
    rows = torch.from_numpy(rows)
    radius, angles = to_hyperspherical(rows)
    back = to_cartesian(radius, angles)
    for row, r, copy in zip(rows.tolist(), radius.tolist(), back.tolist(), strict=True):
        assert r == pytest.approx(math.hypot(*row), rel=1e-14, abs=1e-320)
        assert math.dist(row, copy) <= 1e-14 * r + 1e-320
    assert ((angles[:, :-1] >= 0) & (angles[:, :-1] <= math.pi)).all()
    assert ((angles[:, -1] > -math.pi - 1e-15) & (angles[:, -1] <= math.pi)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_angles_are_those_of_the_definition(dtype):
    rows = normal(20, 7, dtype=dtype)
    radius, angles = to_hyperspherical(rows)
    assert radius.dtype == angles.dtype == torch.float64
    for row, r, row_angles in zip(rows, radius, angles, strict=True):
        assert row_angles.tolist() == pytest.approx(reference_angles(row), abs=1e-14)
        torch.testing.assert_close(
            to_cartesian(r[None], row_angles[None])[0], reference_vector(r, row_angles.tolist())
        )


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x,
        lambda x: x**9,  # a few large coordinates
        lambda x: x * torch.exp(-torch.arange(x.shape[1], dtype=x.dtype) / 100),  # tails underflow
        lambda x: x * torch.exp(torch.arange(x.shape[1], dtype=x.dtype) / 200),
        lambda x: -torch.ones_like(x),
        lambda x: x * 1e300,
        lambda x: x * 1e-300,
    ],
)
def test_a_hundred_thousand_dimensions_come_back(shape):
    rows = shape(normal(3, 100_000))
    radius, angles = to_hyperspherical(rows)
    error = (to_cartesian(radius, angles) - rows) / radius[:, None]
    assert float(torch.linalg.vector_norm(error, dim=1).max()) < 1e-12
    scale = rows.abs().amax(dim=1, keepdim=True)
    expected = torch.linalg.vector_norm(rows / scale, dim=1) * scale[:, 0]
    torch.testing.assert_close(radius, expected, rtol=1e-12, atol=0.0)


def test_angles_out_of_range_flip_signs_and_long_products_reach_zero():
    angles = normal(3, 6) * 4
    expected = torch.stack([reference_vector(2.0, row.tolist()) for row in angles])
    torch.testing.assert_close(to_cartesian(torch.full((3,), 2.0), angles), expected)
    far = to_cartesian(torch.ones(1), torch.full((1, 100_000), 0.5))[0]
    assert far.isfinite().all()
    assert float(far.norm()) == pytest.approx(1.0)
    assert float(far[-1]) == 0.0


def test_vectors_on_the_axes_come_back():
    rows = torch.cat([torch.eye(5), -torch.eye(5), torch.zeros(1, 5)]).double()
    rows[0, 1:] = -0.0
    radius, angles = to_hyperspherical(rows)
    torch.testing.assert_close(to_cartesian(radius, angles), rows, rtol=0.0, atol=1e-15)
    assert radius.tolist() == [1.0] * 10 + [0.0]
    # -0.0 is no reason for an angle of pi, and -pi is not in the last one's range.
    assert angles[0].tolist() == [0.0] * 4
    assert to_hyperspherical(torch.tensor([[-1.0, -0.0]]))[1].item() == math.pi


def test_angles_that_do_not_exist_are_the_callers():
    rows = torch.tensor([[1.0, -2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    radius, angles = to_hyperspherical(rows, undefined=torch.tensor([0.1, 0.2, 0.3]))
    assert angles[0, 2] == angles[1, 2] == pytest.approx(0.3)
    assert angles[1].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert angles[2].tolist() == pytest.approx([math.pi / 2] * 3)
    torch.testing.assert_close(to_cartesian(radius, angles), rows.double(), rtol=0.0, atol=1e-15)


def test_what_has_no_angles_is_refused():
    with pytest.raises(ConfigError, match="length 1"):
        to_hyperspherical(torch.ones(3, 1))
    with pytest.raises(ConfigError, match="matrix"):
        to_hyperspherical(torch.ones(3))
    with pytest.raises(ConfigError, match="floating point"):
        to_hyperspherical(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="do not belong together"):
        to_cartesian(torch.ones(2), torch.ones(3, 4))


# Contributions


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


def test_a_missing_angle_asks_for_no_change():
    row = torch.tensor([[0.3, -0.4, 0.0, 0.0, 0.0]])
    box = Box(row[0], beta=1.0)
    part = box.contribution(row, torch.tensor([0.5]), 1.0)
    assert part[2:4].tolist() == [0.0, 0.0]  # the loop above would pull these to an angle of 0
    assert (part[:2] != 0).all()


HUGE, DENORMAL = float(np.finfo(np.float32).max), float(np.float32(1e-40))
extreme = st.one_of(
    st.just(0.0),
    st.floats(-1, 1, width=32),
    st.floats(-HUGE, HUGE, width=32),
    st.floats(-DENORMAL, DENORMAL, width=32),
    st.sampled_from([HUGE, -HUGE, DENORMAL, -DENORMAL]),
)


def assert_bounded(geometry, rows, clip):
    """Every row alone stays within the bound of each segment, by measurement in float64."""
    for row in rows:
        length = lengths_of(row[None], clip)
        part = geometry.contribution(row[None], length, clip).double()
        assert part.isfinite().all()
        for segment, bound in zip(geometry.segments, geometry.bounds(clip), strict=True):
            assert float(torch.linalg.vector_norm(part[segment])) <= bound * (1 + 1e-12)
        if not row.any():
            assert not part.any()


@each_geometry
@settings(deadline=None, max_examples=60)
@given(
    rows=hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(7)), elements=extreme),
    clip=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 5),
)
def test_no_gradient_exceeds_the_bounds(make, rows, clip, seed):
    rows = torch.from_numpy(rows)
    assert_bounded(make(rows[0], seed), rows, clip)


@each_geometry
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 50, 20_000])
def test_gradients_along_the_reference_stay_within_the_bounds(make, dtype, size):
    geometry = make(torch.zeros(size, dtype=dtype))
    u = as_vector(geometry)
    aside = normal(size)
    aside = aside / aside.norm()
    rows = [
        scale * (sign * u + tilt * aside)
        for scale in (1e-30, 1.0, 1e30)
        for sign in (1.0, -1.0)
        for tilt in (0.0, 1e-17, 1e-15, 1e-13, 1e-11, 1e-9, 1e-7, 1e-4)
    ]
    assert_bounded(geometry, torch.stack(rows).to(dtype), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bounds_are_reached(dtype):
    box = Box(torch.zeros(400, dtype=dtype), beta=0.1)
    phi = box.state_dict()["reference"]
    angles = phi + torch.where(phi > math.pi / 2, -1.0, 1.0) * 0.2
    angles[-1] = phi[-1] + 3.0
    row = to_cartesian(torch.full((1,), 5.0), angles[None]).to(dtype)
    part = box.contribution(row, lengths_of(row), 1.0).double()
    bounds = box.bounds(1.0)
    assert bounds == (pytest.approx(0.05 * math.pi * math.sqrt(402)), 1.0)
    assert float(part[:-1].norm()) == pytest.approx(bounds[0], rel=1e-6)
    assert float(part[-1]) == pytest.approx(bounds[1], rel=1e-6)

    tangent = Tangent(torch.zeros(400, dtype=dtype), radius=0.7)
    part = tangent.contribution(row, lengths_of(row, 3.0), 3.0).double()
    assert tangent.bounds(3.0) == (0.7, 3.0)
    assert float(part[:-1].norm()) == pytest.approx(0.7, rel=1e-6)
    assert float(part[-1]) == pytest.approx(3.0, rel=1e-6)


@each_geometry
def test_contributions_add_up(make, monkeypatch):
    rows = normal(23, 9)
    rows[7] = 0.0
    lengths = lengths_of(rows, 2.0)
    geometry = make(rows[0])
    whole = geometry.contribution(rows, lengths, 2.0)
    alone = sum(
        geometry.contribution(rows[i : i + 1], lengths[i : i + 1], 2.0) for i in range(len(rows))
    )
    torch.testing.assert_close(whole, alone, rtol=1e-12, atol=1e-15)
    monkeypatch.setattr(base, "_BLOCK", 40)  # four rows at a time
    torch.testing.assert_close(
        geometry.contribution(rows, lengths, 2.0), whole, rtol=1e-12, atol=1e-15
    )
    assert geometry.contribution(rows[:0], lengths[:0], 2.0).tolist() == [0.0] * geometry.size
    assert len(whole) == geometry.size == geometry.segments[1].stop
    assert geometry.segments[0] == slice(0, geometry.size - 1)


@each_geometry
def test_rows_that_must_not_count_do_not(make):
    rows = normal(6, 5)
    lengths = lengths_of(rows)
    geometry = make(rows[0])
    expected = geometry.contribution(rows[:2], lengths[:2], 1.0)
    rows[2, 1], rows[3, 2], rows[4] = math.nan, -math.inf, 0.0
    lengths = torch.tensor([*lengths[:2], math.nan, math.inf, 0.0, 0.0])
    torch.testing.assert_close(geometry.contribution(rows, lengths, 1.0), expected)
    # Nor does a gradient that is not finite have a direction, if its length says that it counts.
    stray = geometry.contribution(rows[2:4], torch.ones(2), 1.0)
    assert stray[:-1].tolist() == [0.0] * (geometry.size - 1)
    # A length above the bound is cut, whatever the caller has done.
    long = geometry.contribution(rows[:1], torch.tensor([50.0]), 1.0)
    assert float(long[-1]) <= 1.0
    assert float(long[:-1].norm()) <= geometry.bounds(1.0)[0]


@each_geometry
@pytest.mark.parametrize(
    ("dtype", "wider"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_precision_follows_the_model(make, dtype, wider):
    rows = normal(4, 6, dtype=dtype)
    geometry = make(rows[0])
    part = geometry.contribution(rows, lengths_of(rows), 1.0)
    assert part.dtype == wider
    assert geometry.gradient(part, 4).dtype == wider


# Decoding


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


@each_geometry
def test_a_negative_length_is_none_but_the_direction_is_kept(make):
    geometry, twin = make(torch.zeros(9).double()), make(torch.zeros(9).double())
    values = normal(geometry.size)
    values[-1] = -2.0
    before = geometry.state_dict()["reference"]
    assert geometry.gradient(values, 5).tolist() == [0.0] * 9
    after = geometry.state_dict()["reference"]
    assert not torch.equal(before, after)
    values[-1] = 2.0
    twin.gradient(values, 5)
    assert torch.equal(twin.state_dict()["reference"], after)


@each_geometry
def test_decoding_is_a_function_of_release_and_state(make):
    rows = normal(8, 9)
    first, second = make(rows[0]), make(torch.ones(9).double())
    torch.manual_seed(1)
    random = torch.get_rng_state()
    for step in range(3):
        first.contribution(rows + step, lengths_of(rows), 1.0)  # data, which leaves no trace
        values = normal(first.size, seed=step)
        kept = values.clone()
        assert torch.equal(first.gradient(values, 8), second.gradient(values, 8))
        assert torch.equal(values, kept)
    make(rows[0])
    assert torch.equal(torch.get_rng_state(), random)


@each_geometry
def test_what_is_returned_is_not_the_state(make):
    geometry = make(torch.zeros(9).double())
    out = geometry.gradient(normal(geometry.size).abs(), 1)
    state = geometry.state_dict()["reference"].clone()
    out.zero_()
    geometry.state_dict()["reference"].zero_()
    assert torch.equal(geometry.state_dict()["reference"], state)


@each_geometry
def test_references_come_from_the_seed(make):
    like = torch.zeros(30)
    assert torch.equal(as_vector(make(like, 4)), as_vector(make(like, 4)))
    assert not torch.equal(as_vector(make(like, 4)), as_vector(make(like, 5)))
    for seed in (4, -1, 2**80):
        assert float(as_vector(make(like, seed)).norm()) == pytest.approx(1.0)
    # It must not be what others draw with the same seed, above all not the model's weights.
    assert abs(float(as_vector(make(like, 4)) @ normal(30, seed=4))) < 4.0


# State


@each_geometry
def test_state_round_trip(make):
    geometry, other = make(torch.zeros(9), 1), make(torch.zeros(9), 2)
    geometry.gradient(normal(geometry.size), 3)
    state = geometry.state_dict()
    other.check_state(state)
    other.load_state_dict(state)
    values = normal(geometry.size, seed=7)
    assert torch.equal(geometry.gradient(values, 3), other.gradient(values, 3))
    assert not torch.equal(state["reference"], geometry.state_dict()["reference"])  # a copy


@each_geometry
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make):
    geometry = make(torch.zeros(9))
    good = geometry.state_dict()["reference"]
    bad = [
        None,
        [],
        {},
        {"reference": good.tolist()},
        {"reference": torch.ones(20, dtype=torch.float64)},
        {"reference": torch.full_like(good, math.nan)},
        {"reference": torch.zeros(len(good), dtype=torch.int64)},
    ]
    if isinstance(geometry, Tangent):
        bad.append({"reference": 2 * good})
    for state in bad:
        with pytest.raises(ConfigError, match="does not fit"):
            geometry.check_state(state)
    assert torch.equal(geometry.state_dict()["reference"], good)
    geometry.check_state({"reference": good})


# What is refused


@pytest.mark.parametrize("beta", [0, 0.0, -0.1, 1.1, math.nan, math.inf, True, "0.1", None])
def test_box_settings(beta):
    with pytest.raises(ConfigError, match="beta="):
        Box(torch.zeros(5), beta=beta)


@pytest.mark.parametrize("radius", [0, -1.0, 3.15, math.nan, math.inf, True, "1", None])
def test_tangent_settings(radius):
    with pytest.raises(ConfigError, match="radius="):
        Tangent(torch.zeros(5), radius=radius)


@pytest.mark.parametrize("kind", [Box, Tangent])
def test_models_and_seeds_that_do_not_fit(kind):
    for like in (torch.zeros(1), torch.zeros(0), torch.zeros(2, 2), torch.zeros(5).long()):
        with pytest.raises(ConfigError, match="no direction to release"):
            kind(like)
    for seed in (1.5, True, None, "1"):
        with pytest.raises(ConfigError, match="seed="):
            kind(torch.zeros(5), seed=seed)
    assert kind(torch.zeros(2)).size == (2 if kind is Box else 3)


@each_geometry
def test_arguments_that_do_not_fit(make):
    geometry = make(torch.zeros(5))
    rows, lengths = torch.ones(3, 5), torch.ones(3)
    for clip in (0.0, -1.0, math.nan, math.inf, "1", True):
        with pytest.raises(ConfigError, match="clip="):
            geometry.contribution(rows, lengths, clip)
        with pytest.raises(ConfigError, match="clip="):
            geometry.bounds(clip)
    for shape in ((3, 4), (5,), (3, 5, 1)):
        with pytest.raises(ConfigError, match="gradients of shape"):
            geometry.contribution(torch.ones(shape), lengths, 1.0)
    with pytest.raises(ConfigError, match="lengths of shape"):
        geometry.contribution(rows, torch.ones(4), 1.0)
    values = torch.ones(geometry.size)
    with pytest.raises(TypeError, match="list"):
        geometry.gradient(values.tolist(), 3)
    with pytest.raises(ConfigError, match="no release"):
        geometry.gradient(values[:-1], 3)
    for lot in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="lot="):
            geometry.gradient(values, lot)


# GeoDP as published


def gaussian_delta(epsilon, shift):
    """delta of a Gaussian mechanism whose outputs are `shift` standard deviations apart."""
    # In logarithms: e^epsilon times a tail probability may be 0 * inf.
    tail = math.exp(min(700.0, epsilon + norm.logcdf(-shift / 2 - epsilon / shift)))
    return float(norm.cdf(shift / 2 - epsilon / shift)) - tail


def published_reference(mean, noise, clip, batch, bounding):
    """The published equations, one angle at a time."""
    d = len(mean)
    scale = math.sqrt(d + 2) * bounding * math.pi / batch
    radius = math.hypot(*mean.tolist()) + clip / batch * float(noise[0])
    angles = reference_angles(mean)
    return reference_vector(
        radius, [a + scale * n for a, n in zip(angles, noise[1:].tolist(), strict=True)]
    )


@pytest.mark.parametrize("size", [2, 3, 40])
def test_the_published_equations(size):
    mean, noise = normal(size), 3 * normal(size, seed=1)
    out = perturbed(mean, noise, 0.5, 16, 0.3)
    torch.testing.assert_close(out, published_reference(mean, noise, 0.5, 16, 0.3))
    torch.testing.assert_close(perturbed(mean, torch.zeros(size), 0.5, 16, 0.3), mean)
    assert perturbed(mean.float(), noise.float(), 0.5, 16, 0.3).dtype == torch.float32


def test_published_arguments():
    mean = torch.ones(4)
    for wrong in ({"clip": 0.0}, {"batch": 0}, {"bounding": 0.0}, {"bounding": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            perturbed(mean, mean, **{"clip": 1.0, "batch": 8, "bounding": 0.5, **wrong})
    with pytest.raises(ConfigError, match="noise of shape"):
        perturbed(mean, torch.ones(3), 1.0, 8, 0.5)


BATCH, BOUNDING = 64, 0.1
CLAIMED = gaussian_delta(10.0, math.sqrt(2))  # radius and angles at sigma = 1 each


def opposing_batches():
    """Counterexample (a): 63 gradients that sum to -e_1 / 2, and one more of e_1 (C = 1)."""
    others = torch.zeros(BATCH - 1, 2, dtype=torch.float64)
    others[:, 0] = -0.5 / (BATCH - 1)
    return others, torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def test_one_example_turns_the_mean_by_pi():
    others, one = opposing_batches()
    without, with_it = others.sum(0) / BATCH, torch.cat([others, one]).sum(0) / BATCH
    quiet = torch.zeros(2, dtype=torch.float64)
    outputs = [perturbed(mean, quiet, 1.0, BATCH, BOUNDING) for mean in (with_it, without)]
    angles = to_hyperspherical(torch.stack(outputs))[1][:, 0]
    apart = float((angles[0] - angles[1]).abs())
    assert apart == pytest.approx(math.pi)
    std = angle_scale(2, BATCH, BOUNDING)  # of theta* at sigma = 1
    assert apart / std == pytest.approx(320, rel=1e-3)
    # What (r*, theta*) is said to have, and what it has, at epsilon = 10.
    assert CLAIMED < 1e-9
    assert gaussian_delta(10.0, apart / std) == pytest.approx(1.0, abs=1e-12)


def test_the_vector_alone_hides_that_turn_in_a_random_sign():
    # r is C / 2B there, so r* < 0 in 31 of 100 draws, which puts the vector back to the other side:
    # (a) is a counterexample for the pair (r*, theta*), which the paper's proof is about.
    others, one = opposing_batches()
    with_it = torch.cat([others, one]).sum(0) / BATCH
    flips = sum(
        float(perturbed(with_it, normal(2, seed=s), 1.0, BATCH, BOUNDING)[0]) < 0
        for s in range(2000)
    )
    assert flips / 2000 == pytest.approx(float(norm.cdf(-0.5)), abs=0.05)  # 4.8 sigma


def test_one_example_turns_the_vector_without_cancellation():
    # Counterexample (b), with a first coordinate of C / 8: neither r nor theta_1 can hide it.
    means = [torch.tensor([1 / 8, s / (2 * BATCH), 0.0], dtype=torch.float64) for s in (1, -1)]
    assert float((means[0] - means[1]).norm()) == pytest.approx(1 / BATCH)  # one example's share
    angles = torch.cat([to_hyperspherical(mean[None])[1] for mean in means])
    std = angle_scale(3, BATCH, BOUNDING)
    assert float((angles[0, 1] - angles[1, 1]).abs()) / std > 280
    # The second coordinate r* sin(theta_1*) cos(theta_2*) has the wrong sign only if one of these
    # three Gaussians leaves its interval.
    wrong = (
        norm.cdf(-float(means[0].norm()) * BATCH)
        + norm.cdf(-float(angles[0, 0]) / std)
        + norm.cdf(-(math.pi - float(angles[0, 0])) / std)
        + 2 * norm.cdf(-(math.pi / 2) / std)
    )
    assert 1 - wrong - math.exp(10) * wrong > 0.9998
    assert CLAIMED < 1e-9
    for seed in range(300):
        noise = normal(3, seed=seed)
        signs = [float(perturbed(mean, noise, 1.0, BATCH, BOUNDING)[1].sign()) for mean in means]
        assert signs == [1.0, -1.0]


@pytest.mark.parametrize("batch", [64, 256])
def test_typical_batches_exceed_the_claimed_sensitivity(batch):
    # Counterexample (c): isotropic gradients of length C, one of them removed.
    rows = normal(batch, 1000)
    rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    mean = rows.mean(dim=0)
    turned = to_hyperspherical(mean - rows / batch)[1] - to_hyperspherical(mean[None])[1]
    turned[:, -1] = torch.remainder(turned[:, -1] + math.pi, 2 * math.pi) - math.pi
    moves = torch.linalg.vector_norm(turned, dim=1)
    assert float(moves.min()) > angle_scale(1000, batch, 0.1)  # every single example
    assert float(moves.min()) > 10 * angle_scale(1000, batch, 0.01)


@each_geometry
def test_the_variants_withstand_the_counterexamples(make):
    for rows in (torch.cat(opposing_batches()), torch.eye(3).double().repeat(8, 1)):
        geometry = make(rows[0])
        lengths = lengths_of(rows)
        change = geometry.contribution(rows, lengths, 1.0) - geometry.contribution(
            rows[:-1], lengths[:-1], 1.0
        )
        for segment, bound in zip(geometry.segments, geometry.bounds(1.0), strict=True):
            assert float(change[segment].norm()) <= bound * (1 + 1e-12)


def test_geodp_is_better_only_where_it_adds_too_little_noise():
    # ALGORITHMS 15.3 (f): sigma = 1, |mean| = C, d = 1e4, B = 256.
    size, batch = 10_000, 256

    def cosine(vector, truth):
        return float(vector @ truth / vector.norm() / truth.norm())

    measured = {beta: [] for beta in (1.0, 0.1, 0.01, 0.001)}
    plain = []
    for seed in range(6):
        mean = normal(size, seed=seed)
        mean /= mean.norm()
        noise = normal(size, seed=100 + seed)
        plain.append(cosine(mean + noise / batch, mean))
        for beta, cosines in measured.items():
            cosines.append(cosine(perturbed(mean, noise, 1.0, batch, beta), mean))
    means = {beta: sum(cosines) / 6 for beta, cosines in measured.items()}
    assert means == pytest.approx({1.0: 0.0, 0.1: 0.01, 0.01: 0.70, 0.001: 0.996}, abs=0.02)
    assert sum(plain) / 6 == pytest.approx(0.93, abs=0.01)
    # Ahead exactly below beta = C / (pi sqrt(d) |g|) = 0.0032.
    assert means[0.001] > sum(plain) / 6 > means[0.01]


# The study


def test_the_study_measures_what_is_known_in_closed_form():
    setting = DirectionStudy(400, 256, 2.0, 0.3, trials=20, examples=16, releases=4)
    found = direction_study(setting)
    assert set(found) == {f"{m}_{measure}" for m in METHODS for measure in MEASURES}
    assert found["dp_sgd_gradient_mse"] == pytest.approx((2.0 / 256) ** 2, rel=0.1)
    assert found["averaged_gradient_mse"] == pytest.approx((2.0 / 256) ** 2 / 4, rel=0.1)
    assert found["geodp_direction_mse"] == pytest.approx(
        (2.0 * angle_scale(400, 256, 0.3)) ** 2, rel=0.1
    )
    # |noise| / |mean| = sigma sqrt(d) / (B signal); the mean's length is slightly below signal.
    ratio = 2.0 * 20 / (256 * 0.5)
    assert found["dp_sgd_cosine"] == pytest.approx(1 / math.sqrt(1 + ratio**2), abs=0.02)
    assert direction_study(setting) == found
    assert direction_study(DirectionStudy(400, 256, 2.0, 0.3, trials=20, seed=1)) != found


def test_the_study_without_noise():
    found = direction_study(DirectionStudy(200, 64, 0.0, 1.0, trials=2, examples=8, releases=30))
    for method in ("dp_sgd", "geodp", "averaged"):
        assert found[f"{method}_direction_mse"] < 1e-20
        assert found[f"{method}_cosine"] == pytest.approx(1.0)
    assert found["tangent_cosine"] > 0.99
    # The mean of angles is not the angle of the mean.
    assert 0.3 < found["box_cosine"] < 0.95
    # The first reference has nothing to do with the gradient: a few short turns do not find it.
    short = direction_study(DirectionStudy(200, 64, 0.0, 0.01, trials=2, examples=8, releases=3))
    assert abs(short["tangent_cosine"]) < 0.35


def test_the_last_angle_of_the_study_is_wrapped():
    # Noise alone has a uniform angle: the mean of its wrapped error is pi^2 / 3, unwrapped twice.
    found = direction_study(DirectionStudy(2, 8, 1e3, 0.1, trials=400, examples=8, releases=1))
    assert found["dp_sgd_direction_mse"] == pytest.approx(math.pi**2 / 3, rel=0.2)


def test_the_variants_get_the_noise_of_their_joint_multiplier(monkeypatch):
    seen = {}
    for kind in (Box, Tangent):

        def spy(self, values, lot, decode=kind.gradient):
            seen.setdefault(type(self), []).append((values.clone(), self.bounds(1.0)))
            return decode(self, values, lot)

        monkeypatch.setattr(kind, "gradient", spy)
    direction_study(DirectionStudy(2000, 8, 1e4, 0.5, trials=20, examples=8, releases=2))
    for releases in seen.values():
        assert len(releases) == 40
        for index, part in enumerate((slice(None, -1), slice(-1, None))):
            # At this sigma the contributions are nothing beside the noise.
            scaled = torch.cat([values[part] / bounds[index] for values, bounds in releases])
            multiplier = float(scaled.square().mean().sqrt()) / 1e4
            assert multiplier == pytest.approx(math.sqrt(2), rel=0.01 if index == 0 else 0.4)


def test_angle_errors_may_favour_geodp_where_the_direction_does_not():
    found = direction_study(DirectionStudy(5000, 2048, 0.1, 1.0, signal=0.01, releases=1))
    assert found["geodp_direction_mse"] < found["dp_sgd_direction_mse"]
    assert found["geodp_cosine"] < found["dp_sgd_cosine"] - 0.05


@pytest.mark.parametrize(
    "wrong",
    [
        {"dimension": 1},
        {"dimension": 10.0},
        {"batch": 0},
        {"batch": 100},
        {"sigma": -1.0},
        {"sigma": math.nan},
        {"bounding": 0.0},
        {"bounding": 1.1},
        {"signal": 0.0},
        {"trials": 0},
        {"examples": 0},
        {"releases": 0},
        {"seed": -1},
    ],
)
def test_study_settings(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        DirectionStudy(**{"dimension": 10, "batch": 128, "sigma": 1.0, "bounding": 0.1, **wrong})


@pytest.mark.parametrize("name", ["geodp-fig3", "geodp-fig4"])
def test_the_figures_are_sweeps_of_the_study(name):
    figure = tomllib.loads((EXPERIMENTS / f"{name}.toml").read_text())
    assert figure["name"] == name
    assert figure["kind"] == "direction-error"
    assert figure["assumed"]
    assert figure["paper"]
    assert figure["title"]
    quick = figure["quick"]
    points = 0
    for sweep in figure["sweep"]:
        for value in sweep["values"]:
            point = {**sweep["fixed"], sweep["varied"]: value}
            DirectionStudy(**point)
            small = {
                key: size // quick["divide"].get(key, 1)
                for key, size in point.items()
                if key in quick["divide"]
            }
            DirectionStudy(**{**point, **small, **quick["set"]})
            points += 1
    assert points == {"geodp-fig3": 9 * 6 + 5, "geodp-fig4": 2 * 6}[name]
    found = direction_study(DirectionStudy(**{**point, **small, **quick["set"]}))
    assert all(math.isfinite(value) for value in found.values())
