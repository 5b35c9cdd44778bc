"""From a release of directions and lengths to the gradient that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vestige.geometry import Geometry
from vestige.release.door import Release
from vestige.release.part import Gradient, Part


class Decoding(Part):
    """Puts the geometry's gradient in the place of the release. Its reference is the state."""

    name, what = "geometry", "reference direction"

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def released(self, release: Release, gradient: Gradient) -> None:
        """Decode; the release's direction becomes the next reference."""
        gradient.values.copy_(self.geometry.gradient(release.values, gradient.batch_size))

    def state_dict(self) -> dict[str, Any]:
        """The reference. It is public."""
        return self.geometry.state_dict()

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a saved reference that does not fit."""
        self.geometry.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved reference."""
        self.geometry.load_state_dict(state)
