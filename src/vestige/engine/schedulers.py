"""Learning-rate schedulers advance per release, not per physical batch.

A loop that calls `scheduler.step()` after every `optimizer.step()` would run through its schedule
too fast when a lot comes in several physical batches. The schedulers of the private optimizer are
found and given a subclass whose `step` does nothing unless the optimizer has just released; their
state_dict is unchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def gate_schedulers(optimizer: Optimizer, released: Callable[[], bool]) -> None:
    """Gate every scheduler of `optimizer` on `released()`; those already gated are left alone."""
    for scheduler in _schedulers_of(optimizer):
        original = type(scheduler)
        if "_gated" not in vars(original):
            scheduler.__class__ = _gated(original, released)


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    # A scheduler holds its optimizer and not the other way round, so ask the garbage collector.
    owners: list[Any] = []
    for referrer in gc.get_referrers(optimizer):
        owners.append(referrer)
        if isinstance(referrer, dict) and referrer.get("optimizer") is optimizer:
            owners.extend(gc.get_referrers(referrer))
    return [o for o in owners if isinstance(o, LRScheduler) and o.optimizer is optimizer]


def _blank(kind: type[LRScheduler]) -> LRScheduler:
    return kind.__new__(kind)


def _gated(original: type[LRScheduler], released: Callable[[], bool]) -> type[LRScheduler]:
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if released():
            original.step(self, *args, **kwargs)

    def as_before(self: LRScheduler, protocol: Any) -> Any:
        # A copy or a pickle is of the user's own class.
        return _blank, (original,), vars(self)

    return type(
        original.__name__, (original,), {"step": step, "_gated": True, "__reduce_ex__": as_before}
    )
