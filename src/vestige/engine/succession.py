"""One engine takes the place of another on a model or an optimizer, or leaves all as it was.

Guarantee: a lot that the earlier engine has drawn is charged before the later one looks at the
ledger (`Books.join`), whichever of them goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vestige.engine.lineage import Things, Trace


@contextmanager
def taking_place(module: Any, optimizer: Any) -> Iterator[list[Trace]]:
    """The engines on a model or an optimizer, off them while another one is made.

    Whoever has made it ends them; where that fails, they go on as if nothing had been tried.
    """
    known = isinstance(module, nn.Module) and isinstance(optimizer, Optimizer)
    there = Things.of(module, optimizer, None).in_the_way(module, optimizer) if known else []
    try:
        for trace in there:
            trace.step_aside()
        yield there
    except BaseException:
        for trace in there:
            trace.come_back()
        raise
