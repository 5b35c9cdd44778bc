"""Learning-rate schedulers advance per release, not per physical batch.

A loop that calls `scheduler.step()` after every `optimizer.step()` would run through its schedule
too fast when a lot comes in several physical batches. A scheduler knows its optimizer, and not the
other way round, so `step` of the scheduler classes asks whether that optimizer is a private one
that has just released nothing. Every other scheduler of the process steps as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Weak on both sides: a run holds its optimizer.
_RELEASED: WeakKeyDictionary[Optimizer, WeakMethod[Callable[[], bool]]] = WeakKeyDictionary()


def gate_schedulers(optimizer: Optimizer, released: Callable[[], bool]) -> None:
    """Hold the schedulers of `optimizer` still wherever `released()`, a method, is false.

    To be called again once in a while: classes may have been defined since.
    """
    _RELEASED[optimizer] = WeakMethod(released)
    for kind in _classes(LRScheduler):
        step = vars(kind).get("step")
        if step is not None and not hasattr(step, "_asks"):
            kind.step = _gated(step)  # type: ignore[method-assign]


def free_schedulers(optimizer: Optimizer) -> None:
    """The optimizer is an ordinary one again."""
    _RELEASED.pop(optimizer, None)


def _classes(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _classes(below)


def _gated(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def gated(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        asked = _RELEASED.get(optimizer) if isinstance(optimizer, Optimizer) else None
        released = asked and asked()
        being_made = getattr(self, "_is_initial", False)  # constructors take a step of their own
        return step(self, *args, **kwargs) if not released or being_made or released() else None

    gated._asks = True  # type: ignore[attr-defined]
    return gated
