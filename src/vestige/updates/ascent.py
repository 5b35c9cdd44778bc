"""Ascent: the gradient of a lot is taken at weights moved uphill by a public direction.

The move is a function of earlier releases and weights, so the gradient's sensitivity and the cost
are those of DP-SGD. The weights are moved when a lot is handed out and put back, bit for bit,
before the optimizer's step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.checks import check_state
from vestige.release.door import Release


class Ascent:
    """Moves the weights by radius * direction / |direction|, or by radius * direction itself.

    The direction is the last release (DP-SAT) or, with `displacement`, the last step that the
    weights took, backwards (its momentum variant; a negative radius looks ahead).
    """

    def __init__(
        self,
        slots: Sequence[Any],
        like: Tensor,
        radius: float,
        displacement: bool = False,
        normalised: bool = True,
    ) -> None:
        self._slots, self.radius = list(slots), radius
        self._displacement, self._normalised = displacement, normalised
        self._direction = torch.zeros_like(like)
        self._known = False
        self._home: list[Tensor] | None = None
        self._versions: list[int] | None = None

    @torch.no_grad()
    def climb(self) -> None:
        """Move the weights uphill; nothing happens before the first release."""
        self.return_home()
        norm = float(self._direction.norm()) if self._known else 0.0
        if not norm or not self.radius:
            return
        self._versions = None  # on the way: an interrupt here brings them home as well
        self._home = [slot.parameter.detach().clone() for slot in self._slots]
        for slot in self._slots:
            step = slot.view(self._direction).to(slot.parameter.dtype)
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
            self._known = False  # until `stepped`: a step that fails leaves no direction
            for slot in self._slots:
                slot.view(self._direction).copy_(slot.parameter)
        else:
            self._direction.copy_(release.values)
            self._known = True

    def forget(self) -> None:
        """There is no direction until the next release that is learnt from."""
        self._known = False

    @torch.no_grad()
    def stepped(self) -> None:
        """The optimizer has moved the weights: the way back is the direction of the next climb."""
        if self._displacement:
            for slot in self._slots:
                slot.view(self._direction).sub_(slot.parameter)
            self._known = True

    def state_dict(self) -> dict[str, Any]:
        """The direction. It is public."""
        return {"direction": self._direction.clone(), "known": self._known}

    def check_state(self, state: Any) -> None:
        """Refuse a saved direction that does not fit."""
        check_state("ascent", state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved direction that `check_state` has let through."""
        self._direction.copy_(state["direction"])
        self._known = bool(state["known"])
