"""Weights in half precision that the optimizer moves in float32.

A step of a learning rate times a gradient is often below the last bit of a bf16 weight and would
be lost. Here every half-precision parameter has a float32 copy. The optimizer sees the copy in the
parameter's place, with the release in float32, and the parameter gets the result, rounded.

Guarantee: functions of releases and weights, so they cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from vestige.errors import ConfigError
from vestige.release.door import Release
from vestige.release.part import Gradient, Part

_NARROW = (torch.bfloat16, torch.float16)


class MasterWeights(Part):
    """The float32 copies of the parameters in half precision. Comes last among the parts."""

    name, what = "master_weights", "float32 weights"
    saved = ("masters",)

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.dtype in _NARROW}
        if not self._parameters:
            raise ConfigError(
                "master_weights=True for a model without trainable parameters in bfloat16 or "
                "float16: leave it out."
            )
        self._optimizer = optimizer
        self.masters = {name: p.detach().float() for name, p in self._parameters.items()}
        self._narrow: dict[str, Tensor] = {}  # the model's own tensors, while the copies stand in

    def lot_begins(self) -> None:
        """Put the model's tensors back where a step has failed."""
        self._put_back()

    @torch.no_grad()
    def released(self, release: Release, gradient: Gradient) -> None:
        """The optimizer is about to step: have it move the copies."""
        if gradient.withheld:
            return
        self._follow_loads()
        for name, parameter in self._parameters.items():
            self._narrow[name], parameter.data = parameter.data, self.masters[name]
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():  # what a load has cast to the parameter's type
                if isinstance(value, Tensor) and value.dtype in _NARROW:
                    state[key] = value.float()

    def _follow_loads(self) -> None:
        """Copy the weights that somebody has loaded: one read by the host tells which they are."""
        own, masters = [p.data for p in self._parameters.values()], list(self.masters.values())
        rounded = [torch.empty_like(values) for values in own]
        torch._foreach_copy_(rounded, masters)
        torch._foreach_sub_(rounded, own)
        for apart, values, master in zip(_largest(rounded), own, masters, strict=True):
            if apart != 0:  # or is not a number
                master.copy_(values)

    def stepped(self) -> None:
        """The copies were moved: round them into the model."""
        self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        if not self._narrow:
            return
        own, masters = list(self._narrow.values()), [self.masters[name] for name in self._narrow]
        torch._foreach_copy_(own, masters)
        for name, values in self._narrow.items():
            parameter = self._parameters[name]
            parameter.grad = None  # of another type: the engine sets it anew at every release
            parameter.data = values
        self._narrow = {}

    @contextmanager
    def wide(self) -> Iterator[None]:
        """While entered, parameters have the type of their copies: an optimizer's state that is
        loaded keeps its precision."""
        own = {name: p.data for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.data = self.masters[name]
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]


def _largest(tensors: list[Tensor]) -> list[float]:
    """The largest magnitude of each."""
    largest: list[float] = torch.stack(torch._foreach_norm(tensors, math.inf)).tolist()
    return largest
