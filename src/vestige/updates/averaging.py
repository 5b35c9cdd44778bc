"""Averages of the iterates: the weights after every step, which are public, averaged for free.

    "ema"           mean <- decay * mean + (1 - decay) * theta_t,   started at theta_1;
                    "ema:0.999" has that decay, "ema" alone 0.99
    "uniform-tail"  the plain mean of the last half of the planned steps
    "fractional"    mean <- mean + (order + 1) / (t + order) * (theta_t - mean): weights that grow
                    like t^order, a power law over the iterates (polynomial-decay averaging)

Papers: Polyak and Juditsky 1992; Shamir and Zhang 2013 (arXiv 1212.1824) for the polynomial decay.
Guarantee: iterates are functions of releases, so their averages cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vestige.errors import ConfigError
from vestige.plan import parsed_averaging
from vestige.release.part import Part

ORDER = 3.0


class Averaging(Part):
    """The running average of the parameters, in the wider of float32 and their own type."""

    name, what = "averaging", "average"
    saved = ("count", "means")

    def __init__(self, kind: str, parameters: Mapping[str, Tensor], steps: int | None) -> None:
        self.kind, self._decay = parsed_averaging(kind)
        if self.kind == "uniform-tail" and steps is None:
            raise ConfigError(
                "averaging='uniform-tail' averages the last half of the run: pass steps=..., the "
                "number of lots of the whole run."
            )
        self._parameters = dict(parameters)
        self._start = 0 if steps is None else steps // 2
        self.count = 0
        self.means = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def stepped(self) -> None:
        """Take in the weights after a step."""
        self.count += 1
        weight = self._weight()
        for name, parameter in self._parameters.items():
            self.means[name].lerp_(parameter.detach().to(self.means[name].dtype), weight)

    def _weight(self) -> float:
        """The weight of the newest iterate in the mean; 1 restarts it."""
        t = self.count
        if self.kind == "ema":
            return 1.0 if t == 1 else 1 - self._decay
        if self.kind == "fractional":
            return (ORDER + 1) / (t + ORDER)
        # Before the tail the average is the iterate itself, so that it is always there to look at.
        return 1 / max(1, t - self._start)

    def averaged(self) -> dict[int, Tensor]:
        """The averaged parameters, in their own type, by the parameter's id."""
        return {
            id(p): self.means[name].to(p.dtype, copy=True) for name, p in self._parameters.items()
        }
