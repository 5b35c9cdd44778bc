"""What Opacus' wrappers show, on the user's own model and optimizer.

`make_private` returns the objects that it was given. Here their class becomes a subclass of itself,
of the same name, with the attributes that Opacus' users read; what an object already has stays. A
copy or a pickle is of the original class.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vestige.compat.refusals import gone, refuse
from vestige.engine.run import Run
from vestige.plan import at

# Weak on both sides: a run holds its model and its optimizer.
_RUNS: weakref.WeakKeyDictionary[Any, weakref.ref[Run]] = weakref.WeakKeyDictionary()


def run_of(thing: Any) -> Run | None:
    """The run that a model or an optimizer is in, while it is there."""
    found = _RUNS.get(thing)
    return found() if found else None


def _run(thing: Any) -> Run:
    run = run_of(thing)
    if run is None:
        refuse("DPOptimizer", "an optimizer without its engine")
    return run


def _settings_of(optimizer: Any, name: str) -> Any:
    """A public number of the run, from its plan."""
    run = _run(optimizer)
    if name == "noise_multiplier":
        return at(run.plan.noise_multiplier, run.position.release)
    if name == "expected_batch_size":
        return run.plan.batch_size
    bounds = run.capture.collector.clip.bounds
    return bounds[0] if len(bounds) == 1 else list(bounds)


def _planned(name: str) -> property:
    """A number of the plan, which is read and never set."""
    return property(
        lambda optimizer: _settings_of(optimizer, name),
        lambda optimizer, value: refuse(name, f"setting optimizer.{name}"),
        doc=f"{name} of the plan; setting it is refused.",
    )


def _attach_step_hook(self: Optimizer, fn: Callable[[Optimizer], None]) -> None:
    """Call `fn(optimizer)` after every release, before the weights move."""
    run = _run(self)
    self.register_step_pre_hook(
        lambda optimizer, args, options: fn(optimizer) if run.moved else None
    )


def _inside(name: str) -> Any:
    return property(lambda self: refuse("grad_sample", f"optimizer.{name}"))


def _detach(self: nn.Module) -> nn.Module:
    """Take the hooks off and give the plain module back."""
    run = run_of(self)
    if run is not None and not run.detached:
        run.detach()
    undress(self)
    return self


OPTIMIZER: dict[str, Any] = {
    **{
        name: _planned(name)
        for name in ("noise_multiplier", "max_grad_norm", "expected_batch_size")
    },
    "original_optimizer": property(lambda self: self),
    "accumulated_iterations": property(lambda self: 1),
    "attach_step_hook": _attach_step_hook,
    **{
        name: _inside(name)
        for name in (
            *("grad_samples", "clip_and_accumulate", "add_noise", "signal_skip_step"),
            *("pre_step", "scale_grad", "summed_grad"),
        )
    },
    **{name: gone(name, "optimizer") for name in ("privacy_engine", "virtual_step")},
}
MODULE: dict[str, Any] = {
    "_module": property(lambda self: self),
    "to_standard_module": _detach,
    "remove_hooks": _detach,
    "cleanup": _detach,
}


class DPOptimizer:
    """`isinstance(optimizer, DPOptimizer)` tells a private optimizer; none is made by hand."""

    def __init__(self, *args: Any, **options: Any) -> None:
        refuse("DPOptimizer")


def dress(thing: Any, run: Run, face: dict[str, Any], *bases: type) -> None:
    """Show what is in `face`, but for what the thing has already."""
    original = type(thing)
    shown = {name: value for name, value in face.items() if not hasattr(thing, name)}

    def plain(self: Any, protocol: Any) -> Any:
        """A copy or a pickle of the original class."""
        undress(self)
        try:
            how, what, *state = self.__reduce_ex__(protocol)
        finally:
            dress(self, run, face, *bases)
        if how.__name__ == "__newobj__":  # pickle would compare it with the class that is shown
            how, what = copyreg._reconstructor, (*what, object, None)  # type: ignore[attr-defined]
        return how, what, *state

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    shown |= {"_vestige_plain": original, "__reduce_ex__": plain, **names}
    thing.__class__ = type(original.__name__, (original, *bases), shown)
    _RUNS[thing] = weakref.ref(run)


def undress(thing: Any) -> None:
    """The original class again."""
    if hasattr(type(thing), "_vestige_plain"):
        thing.__class__ = type(thing)._vestige_plain
