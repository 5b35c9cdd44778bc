"""In-place changes between the model and the loss that the autograd graph does not show.

An operation under `torch.no_grad()`, or on `out.detach()` or `out.data`, may write numbers of all
rows into an output of the model. Where nothing has saved the output, torch does not object, and the
loss reads as if each row had been by itself. A tensor counts its changes, and a change that the
graph records gives it another node: one that leaves the node as it was is hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from vestige.errors import PrivacyError
from vestige.gradients.refs import tensors_in

_MARK = "vestige version"  # on a node: its tensor had no recorded change since
_HIDDEN = "vestige hidden"  # on a node: its tensor was changed


class HiddenWrites:
    """Finds hidden changes of the model's outputs, and of what the loop makes of them.

    Guarantee: a hidden change of an output is refused, through whatever tensor that shares its
    count of changes, or its `data`, it was made. Others are seen where a torch function that is
    called with `call` makes them in any of its arguments.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[weakref.ref[Tensor], list[int]]] = []
        self._found: str | None = None

    def clear(self) -> None:
        """Forget what was watched."""
        self._outputs.clear()
        self._found = None

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """The model hands out `outputs`."""
        for tensor in outputs:
            if tensor.grad_fn is not None:
                source = _source(tensor)
                source.grad_fn.metadata[_MARK] = True  # type: ignore[union-attr, index]
                self._outputs.append((weakref.ref(source), [source._version]))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        made = {id(t): t for t in map(_source, tensors_in((args, kwargs))) if t.grad_fn is not None}
        before = [(t, t._version, t.grad_fn) for t in made.values()]  # parameters have no node
        result = function(*args, **kwargs)
        for tensor, version, node in before:
            if tensor._version != version and tensor.grad_fn is node:
                node.metadata[_HIDDEN] = _said(tensor)  # type: ignore[union-attr, index]
        if first is not None and id(_source(first)) in made:
            if function == _DATA.__get__:
                self._outputs.append((weakref.ref(result), [result._version]))
            if function == _DATA.__set__:
                self._found = self._found or _said(_source(first))
        self._look()
        return result

    def check(self, nodes: Callable[[], Iterable[Any]]) -> None:
        """PrivacyError if an output, or what one of a loss's nodes has made, was changed."""
        self._look()
        marks = (node.metadata.get(_HIDDEN) for node in nodes())
        found = self._found or next((mark for mark in marks if mark), None)
        if found:
            raise PrivacyError(
                f"{found} was changed in place where autograd does not see it (torch.no_grad(), "
                "detach() or data), so that rows could meet unseen. Make a new tensor, such as "
                "out = out - shift, or change a copy, out.detach().clone()."
            )

    def _look(self) -> None:
        for reference, seen in self._outputs:
            tensor = reference()
            if tensor is None or tensor._version == seen[0]:
                continue
            seen[0] = tensor._version
            node: Any = tensor.grad_fn
            if node is None or _MARK in node.metadata:
                self._found = self._found or _said(tensor)
            else:
                node.metadata[_MARK] = True  # a recorded change


_DATA: Any = Tensor.data


def _source(tensor: Tensor) -> Tensor:
    """The tensor that a view is of: its node changes with recorded changes alone."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def _said(tensor: Tensor) -> str:
    return f"an output of the model, or what was made of it, of shape {tuple(tensor.shape)}"
