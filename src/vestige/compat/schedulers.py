"""Opacus' schedulers of noise and clip bounds, as tables that are fixed before the first lot.

Guarantee: that of `vestige.engine.public_schedule`. Each release is charged at its own noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from vestige.compat.faces import run_of
from vestige.compat.refusals import refuse
from vestige.engine.public_schedule import ClipFactors, NoiseSchedule, PublicSchedule
from vestige.errors import ConfigError

_CALLS = 10_000  # where the plan does not say how many steps a run has


class _Scheduler:
    """Built after make_private and before the first lot; `step()` after each epoch, or, with
    `every="release"`, after each release.

    Guarantee: `step` at other moments is refused, so that what it changes is a function of the
    release's number.
    """

    kind: ClassVar[type[PublicSchedule]]
    setting: ClassVar[str]

    def __init__(
        self, optimizer: Any, last_epoch: int, formula: str, function: Any, every: str
    ) -> None:
        run, self.optimizer = run_of(optimizer), optimizer
        if run is None:
            refuse("DPOptimizer", f"{type(self).__name__} of an optimizer without its engine")
        if last_epoch != -1:
            refuse("last_epoch", f"{type(self).__name__}(last_epoch={last_epoch})")
        lots = f"(step // {run.plan.lots_per_epoch})" if every == "epoch" else "(step)"
        first = f"{getattr(optimizer, self.setting)} * {formula.format(epoch=lots)}"
        instead = f"Call its step() after each {every}, or leave it out."
        if self.kind is NoiseSchedule:
            steps = run.plan.steps or "..."
            instead = f"Pass make_private(noise_multiplier=lambda step: {first}, steps={steps})."
        self._schedule = self.kind(
            run, _tabulated(function, run.plan.steps or _CALLS), instead, every
        )

    @property
    def last_epoch(self) -> int:
        """How often `step` was called."""
        return self._schedule.calls

    def step(self) -> None:
        """Go on to the next value, after an epoch or after a release."""
        self._schedule.advance()

    def state_dict(self) -> dict[str, int]:
        """Where it is; the engine's checkpoint has it too."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check the place, to which `engine.load_checkpoint` has brought it."""
        if state_dict != self.state_dict():
            refuse("last_epoch", f"{type(self).__name__}.load_state_dict({dict(state_dict)})")


def _tabulated(function: Callable[[int], float], calls: int) -> list[float]:
    """The factors of all calls; a function that raises has none for that call, nor for later."""
    table: list[float] = []
    for call in range(calls + 1):
        try:
            table.append(float(function(call)))
        except Exception as error:
            if not call:
                raise ConfigError(f"the scheduler's function raised {error!r} for 0.") from error
            break
    return table


class _Exponential(_Scheduler):
    def __init__(
        self, optimizer: Any, *, gamma: float, last_epoch: int = -1, every: str = "epoch"
    ) -> None:
        formula = f"{gamma} ** {{epoch}}"
        super().__init__(optimizer, last_epoch, formula, lambda call: gamma**call, every)


class _Step(_Scheduler):
    def __init__(
        self,
        optimizer: Any,
        *,
        step_size: int,
        gamma: float,
        last_epoch: int = -1,
        every: str = "epoch",
    ) -> None:
        formula = f"{gamma} ** ({{epoch}} // {step_size})"
        function = lambda call: gamma ** (call // step_size)  # noqa: E731
        super().__init__(optimizer, last_epoch, formula, function, every)


class _Noise(_Scheduler):
    kind, setting = NoiseSchedule, "noise_multiplier"


class _Clip(_Scheduler):
    kind, setting = ClipFactors, "max_grad_norm"


class ExponentialNoise(_Noise, _Exponential):
    """The noise multiplier times gamma after each call."""


class StepNoise(_Noise, _Step):
    """The noise multiplier times gamma after every `step_size` calls."""


class LambdaNoise(_Noise):
    """The first noise multiplier times `noise_lambda(calls)`."""

    def __init__(
        self,
        optimizer: Any,
        *,
        noise_lambda: Callable[[int], float],
        last_epoch: int = -1,
        every: str = "epoch",
    ) -> None:
        super().__init__(optimizer, last_epoch, "noise_lambda{epoch}", noise_lambda, every)


class ExponentialGradClip(_Clip, _Exponential):
    """The clip bound times gamma after each call."""


class StepGradClip(_Clip, _Step):
    """The clip bound times gamma after every `step_size` calls."""


class LambdaGradClip(_Clip):
    """The first clip bound times `scheduler_function(calls)`."""

    def __init__(
        self,
        optimizer: Any,
        *,
        scheduler_function: Callable[[int], float],
        last_epoch: int = -1,
        every: str = "epoch",
    ) -> None:
        super().__init__(
            optimizer, last_epoch, "scheduler_function{epoch}", scheduler_function, every
        )
