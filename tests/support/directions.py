"""Geometries for tests, and their coordinates written out as loops."""

from __future__ import annotations

import math

import pytest
import torch

from vestige.geometry import (
    Box,
    Tangent,
    to_cartesian,
)

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
