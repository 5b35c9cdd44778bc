"""Hyperspherical coordinates: against their definition, in high dimensions, at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.directions import (
    normal,
    reference_angles,
    reference_vector,
)
from vestige.errors import ConfigError
from vestige.geometry import (
    to_cartesian,
    to_hyperspherical,
)

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
