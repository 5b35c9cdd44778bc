"""Per-example gradients without materialising them: from a lot to its clipped sum.

Importing this package imports no torch, so that clipping settings can be checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

__all__ = ["Capture"]


def __getattr__(name: str) -> Any:
    if name != "Capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vestige.gradients.capture import Capture

    return Capture
