"""The table of rules, and what several rules need.

A rule covers torch functions that use a trainable parameter. It is called in their place with the
capture, the function and the function's own arguments; it runs the operation with the parameter
detached and taps its output, or returns `NotImplemented` where no parameter is among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vestige.gradients.groups import Slot
from vestige.gradients.refs import Ref
from vestige.gradients.uses import Use

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture as Capture

Uses = list[tuple[Slot, Use]]
Rule = Callable[..., Any]
Covered = TypeVar("Covered", bound=Rule)

RULES: dict[Any, Rule] = {}  # by the torch function that they cover


def rule(*functions: Any) -> Callable[[Covered], Covered]:
    """Register a rule for torch functions: `@rule(F.linear)`."""

    def register(run: Covered) -> Covered:
        RULES.update(dict.fromkeys(functions, run))
        return run

    return register


def plain(ref: Ref | None, value: Any) -> Any:
    """The argument as autograd may see it: detached if it is a parameter."""
    return ref.value if ref else value
