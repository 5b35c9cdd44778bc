"""Releases of a direction and a length instead of a sum of vectors (GeoDP, and what it should be).

`Box` and `Tangent` bound what one example contributes to the direction, so their releases are
ordinary Gaussian mechanisms; `perturbed` is GeoDP as published, which is not private. Paper: Duan,
Hu, Ye, Sun 2025, arXiv 2504.05618.
"""

from vestige.geometry.base import Geometry
from vestige.geometry.box import Box
from vestige.geometry.hyperspherical import to_cartesian, to_hyperspherical
from vestige.geometry.published import angle_scale, perturbed
from vestige.geometry.tangent import Tangent

__all__ = [
    "Box",
    "Geometry",
    "Tangent",
    "angle_scale",
    "perturbed",
    "to_cartesian",
    "to_hyperspherical",
]
