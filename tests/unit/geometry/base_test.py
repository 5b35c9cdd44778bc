"""Directions and lengths: coordinates, bounded parts, decoding, and GeoDP's counterexamples.

References are explicit loops over Python numbers, which share nothing with the library.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.directions import (
    as_vector,
    each_geometry,
    lengths_of,
    normal,
)
from vestige.errors import ConfigError
from vestige.geometry import (
    Box,
    Tangent,
    base,
    to_cartesian,
)

# Hyperspherical coordinates


# Contributions


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


# The study
