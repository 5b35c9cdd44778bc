"""Torch's stack of function modes, and code that changes operations where no mode sees it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vestige.errors import UnsupportedModel


class Lowest(TorchFunctionMode):
    """A mode that lies below those of the loop: what they do in place of an operation it sees."""

    def __enter__(self) -> Lowest:
        super().__enter__()  # type: ignore[no-untyped-call]
        below = torch.overrides._get_current_function_mode_stack()
        foreign = [i for i, m in enumerate(below) if not is_library(type(m).__module__)]
        if foreign:  # the others keep their order, in which they leave
            stack = taken()[:-1]
            put([*stack[: foreign[0]], self, *stack[foreign[0] :]])
        return self

    def __exit__(self, *error: Any) -> None:
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        put(above[::-1])


_collecting = False


def _note(phase: str, _: Any) -> None:
    global _collecting
    _collecting = phase == "start"


gc.callbacks.append(_note)


def collecting() -> bool:
    """Whether the garbage collector is at work, which it may be between any two lines of torch."""
    return _collecting


def taken() -> list[Any]:
    """The modes, the lowest first, which are on the stack no longer."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    return modes[::-1]


def put(modes: list[Any]) -> None:
    """Put modes on the stack, the lowest first."""
    for mode in modes:
        _push_mode(mode)


def is_library(module: str | None) -> bool:
    """Whether code is torch's or this library's, by the name of its module."""
    return (module or "").partition(".")[0] in ("torch", "vestige")


def refuse_unseen_code() -> None:
    """Refuse what changes operations, or what they save, where no function mode sees it."""
    for mode in _get_current_dispatch_mode_stack():
        refuse_dispatch_mode(mode)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        refuse_own_saving(*hooks)


def refuse_dispatch_mode(mode: Any) -> None:
    """Refuse a mode below autograd that is not torch's."""
    if not is_library(type(mode).__module__):
        raise UnsupportedModel(
            f"{type(mode).__name__}, a TorchDispatchMode, is active while the private model or its "
            "loss runs: what it makes of the rows cannot be followed. Leave it out, or use a "
            "torch.overrides.TorchFunctionMode."
        )


def refuse_own_saving(pack: Any, unpack: Any) -> None:
    """What a backward pass computes with must be what the forward pass has saved."""
    if not all(is_library(getattr(hook, "__module__", None)) for hook in (pack, unpack)):
        raise UnsupportedModel(
            "saved_tensors_hooks of your own are active while the private model runs: what they "
            "give back in the backward pass cannot be followed from row to row. Use "
            "torch.autograd.graph.save_on_cpu or torch.utils.checkpoint."
        )
