"""Ascent: the gradient of a lot is taken at weights moved uphill by a public direction.

The move is a function of earlier releases and weights, so the gradient's sensitivity and the cost
are those of DP-SGD. The weights are moved when a lot is handed out and put back, bit for bit,
before the optimizer's step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.release.door import Release
from vestige.release.part import Gradient, Part


class Ascent(Part):
    """Moves the weights by radius * direction / |direction|, or by radius * direction itself.

    The direction is the last release (DP-SAT) or, with `displacement`, the last step that the
    weights took, backwards (its momentum variant; a negative radius looks ahead). With `led` the
    passes of a step say when to climb, otherwise every lot begins with it.
    """

    name, what = "ascent", "ascent direction"
    saved = ("direction", "known")

    def __init__(
        self,
        slots: Sequence[Any],
        like: Tensor,
        radius: float,
        displacement: bool = False,
        normalised: bool = True,
        led: bool = False,
    ) -> None:
        self._slots, self.radius = list(slots), radius
        self._displacement, self._normalised, self._led = displacement, normalised, led
        self.direction = torch.zeros_like(like)
        self.known = False
        self._home: list[Tensor] | None = None
        self._versions: list[int] | None = None

    def lot_begins(self) -> None:
        """Climb along releases: the loop has not seen the lot."""
        if not self._led:
            self.climb()

    def lot_ends(self) -> None:
        """Put the weights back to where they were."""
        self.return_home()

    def released(self, release: Release, gradient: Gradient) -> None:
        """Learn the next direction."""
        self.learn(release)

    @torch.no_grad()
    def climb(self) -> None:
        """Move the weights uphill; nothing happens before the first release."""
        self.return_home()
        norm = float(self.direction.norm()) if self.known else 0.0
        if not norm or not self.radius:
            return
        self._versions = None  # on the way: an interrupt here brings them home as well
        self._home = [slot.parameter.detach().clone() for slot in self._slots]
        for slot in self._slots:
            step = slot.view(self.direction).to(slot.parameter.dtype)
            slot.parameter.add_(step, alpha=self.radius / (norm if self._normalised else 1.0))
        self._versions = [slot.parameter._version for slot in self._slots]

    @torch.no_grad()
    def return_home(self) -> None:
        """Put the weights back to where they were."""
        if self._home is None:
            return
        now = [slot.parameter._version for slot in self._slots]
        if self._versions is None or self._versions == now:
            for slot, home in zip(self._slots, self._home, strict=True):
                slot.parameter.copy_(home)
        else:
            warnings.warn(
                "somebody wrote to the weights between a batch and its step: they are left as "
                "written, and not put back to where they were before the ascent.",
                UserWarning,
                stacklevel=2,
            )
        self._home = None

    @torch.no_grad()
    def learn(self, release: Release) -> None:
        """The release becomes the next direction, or the weights' last position is noted."""
        if not isinstance(release, Release):
            raise TypeError(f"an ascent takes releases only, not a {type(release).__name__}")
        if self._displacement:
            self.known = False  # until `stepped`: a step that fails leaves no direction
            for slot in self._slots:
                slot.view(self.direction).copy_(slot.parameter)
        else:
            self.direction.copy_(release.values)
            self.known = True

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has moved the weights: the way back is the direction of the next climb."""
        if self._displacement:
            for slot in self._slots:
                slot.view(self.direction).sub_(slot.parameter)
            self.known = True


class AlternatingAscent(Ascent):
    """Every other release only says where to climb, and moves nothing; the next is taken uphill."""

    withholds = True

    def released(self, release: Release, gradient: Gradient) -> None:
        """Learn the direction from an even release; after an odd one there is none."""
        if release.step % 2 == 0:
            self.learn(release)
            gradient.withheld = True
        else:
            self.known = False
