"""Whether something is gone, however many rounds of the collector that takes."""

from __future__ import annotations

import gc
from typing import Any

ROUNDS = 20


def gone(*references: Any) -> bool:
    """Whether none of the weak references leads anywhere any more.

    One round may not do: it frees nodes of autograd, which hide from the collector what hooks of
    tensors hold, and only the next one finds that.
    """
    for _ in range(ROUNDS):
        if all(reference() is None for reference in references):
            return True
        gc.collect()
    return False
