"""Adam whose second moment is corrected for the known noise of the releases (DP-AdamBC).

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   phi <- b2 phi + (1 - b2) noise variance
    theta <- theta - lr * m^ / sqrt(max(v^ - phi^, floor))

with m^, v^, phi^ corrected for their start at zero. Without the correction v is mostly noise and
Adam becomes SGD with a small step. Weight decay is coupled (Adam) or decoupled (AdamW).

Paper: Tang, Shpilevskiy and Lecuyer, DP-AdamBC, AAAI 2024, arXiv 2312.14334 (no epsilon in the
denominator, as in its code); decoupled: Chooi et al. 2025, arXiv 2511.07843.
Guarantee: post-processing; the noise variance is a public number of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.gradients.groups import Slot
from vestige.release.door import Release
from vestige.release.part import Gradient, Part


class AdamBC(Optimizer):
    """Adam with bias-corrected second moment, for `method="dp-adambc"`.

    `floor` bounds the corrected second moment from below; None is 1e-2 times the noise variance,
    which has the right scale for any clipping norm and lot. The engine sets `noise_variances`
    (by id of the parameter) before every step.
    """

    noise_variances: Mapping[int, float] = MappingProxyType({})
    decay: ClassVar[float] = 0.0  # of the weights, where none is given
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        weight_decay = self.decay if weight_decay is None else weight_decay
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not is_number(value) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0.")
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not pair or not all(is_number(b) and 0 <= b < 1 for b in betas):
            raise ConfigError(f"betas={betas!r} must be two numbers in [0, 1).")
        if floor is not None and (not is_number(floor) or floor <= 0):
            raise ConfigError(f"floor={floor!r} must be a finite number above 0, or None.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "floor": floor,
            "weight_decay": weight_decay,
            "decoupled": self.decoupled,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2), lr = self.state[parameter], group["betas"], group["lr"]
        if not state:
            state |= {"step": 0, "noise": 0.0}
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        variance = self.noise_variances.get(id(parameter), 0.0)
        state["step"] += 1
        state["noise"] = b2 * state["noise"] + (1 - b2) * variance
        gradient = parameter.grad
        assert gradient is not None
        if group["weight_decay"] and group["decoupled"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["mean"].lerp_(gradient, 1 - b1)
        state["square"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        start = 1 - b2 ** state["step"]
        noise = state["noise"] / start
        floor = group["floor"] or max(1e-2 * noise, 1e-16)
        corrected = state["square"].div(start).sub_(noise).clamp_(min=floor)
        parameter.addcdiv_(state["mean"], corrected.sqrt_(), value=-lr / (1 - b1 ** state["step"]))


class AdamWBC(AdamBC):
    """AdamBC with decoupled weight decay, 0.01 by default, for `method="dp-adamw-bc"`."""

    decay, decoupled = 0.01, True


class KnownNoise(Part):
    """Tells the optimizer how much noise is in each parameter's gradient."""

    def __init__(self, optimizer: AdamBC, slots: Sequence[Slot]) -> None:
        self._optimizer, self._slots = optimizer, slots

    def released(self, release: Release, gradient: Gradient) -> None:
        """The variances as the parts before this one have left them."""
        self._optimizer.noise_variances = {
            id(slot.parameter): gradient.variances[slot.group] for slot in self._slots
        }
