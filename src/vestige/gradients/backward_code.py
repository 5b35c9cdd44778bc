"""Code of the model that runs in the backward pass: custom autograd Functions, and hooks on nodes.

The function mode of a forward pass sees neither. `torch.autograd.Function.apply` is therefore told
of here, while a private model runs in this thread: the backward of a custom Function, and the hooks
of modules that are made of one, are followed like a gradient hook of a tensor. What they return
must have the rows that the Function's inputs had. Hooks on nodes of torch's own, and hooks on what
autograd saves, are refused.

torch's functions are replaced once, when the first private model runs, by ones that ask whether a
watched forward pass runs in this thread; otherwise they are torch's own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.hooks import Follows
from vestige.gradients.modes import is_library, refuse_dispatch_mode, refuse_own_saving
from vestige.gradients.rows import Label, Meeting, Rows, Summed
from vestige.gradients.tracker import Tracker

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

_GETTER: Any = torch.Tensor.grad_fn
GRAD_FN = _GETTER.__get__
_SAVED = "_vestige_saved"  # on a node: the labels of what it saves
_SEVERAL, _ASKS = graph.register_multi_grad_hook, graph._get_grad_fn_or_grad_acc
_THREAD = threading.local()  # `captures`: those whose models run in this thread, innermost last


# -- what is followed --------------------------------------------------------------------------


class _Context:
    """A Function's ctx in its backward: what it saved has its labels again."""

    def __init__(self, node: Any, tracker: Tracker) -> None:
        saved = node.saved_tensors if _SAVED in vars(node) else ()
        for tensor, label in zip(saved, vars(node).get(_SAVED, ()), strict=True):
            if isinstance(tensor, Tensor) and id(tensor) not in tracker.registered:
                tracker.give(tensor, label)
        vars(self).update(_node=node, saved_tensors=saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._node, name, value)


class Followed:
    """Stands for a custom Function on one node, whose backward pass and hooks it follows.

    `given` are the labels of the Function's arguments, True for what is no tensor; `made` those of
    its results.
    """

    def __init__(
        self,
        function: Any,
        tracker: Tracker,
        given: Sequence[Label | bool | None],
        made: Sequence[Label | None],
    ) -> None:
        self._function, self._tracker, self._given = function, tracker, given
        self._inputs = [label for label in given if label is not True]
        # What is the same for all rows has a gradient that all of them share, unless it is a loss.
        shared = Meeting("the gradient of what all examples share", lost=True)
        self._outputs = [
            None if isinstance(label, Summed) else shared if label is None else label
            for label in made
        ]
        self.vjp = torch.autograd.Function.vjp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def backward(self, node: Any, *grads: Any) -> Any:
        """The Function's own, followed."""
        function, plain = self._function, torch.autograd.Function.vjp
        own = function.backward if function.vjp is plain else function.vjp
        context = _Context(node, self._tracker)  # may run a checkpointed block again
        self._give(grads, self._outputs)
        with Follows(self._tracker):
            made = own(context, *grads)
        self._check(made if isinstance(made, tuple) else (made,), self._given)
        return made

    def after(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A hook on the node that sees and may replace the gradients of the inputs."""

        def run(inputs: Any, outputs: Any) -> Any:
            self._give(inputs, self._inputs)
            self._give(outputs, self._outputs)
            with Follows(self._tracker):
                made = hook(inputs, outputs)
            self._check(inputs, self._inputs)
            if made is not None:
                self._check(made if isinstance(made, tuple) else (made,), self._inputs)
            return made

        return run

    def before(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A hook on the node that sees and may replace the gradients of the outputs."""

        def run(outputs: Any) -> Any:
            self._give(outputs, self._outputs)
            with Follows(self._tracker):
                made = hook(outputs)
            for values in (outputs, made if isinstance(made, tuple) else (made,)):
                self._check(values, self._outputs)
            return made

        return run

    def _give(self, grads: Sequence[Any], labels: Sequence[Any]) -> None:
        for grad, label in zip(grads, labels, strict=True):
            if isinstance(grad, Tensor):
                self._tracker.give(grad, None if isinstance(label, Summed) else label)

    def _check(self, grads: Sequence[Any], labels: Sequence[Label | bool | None]) -> None:
        """Each gradient has the rows of what it is the gradient of."""
        name = self._function.__name__
        for i, grad in enumerate(grads):
            if not isinstance(grad, Tensor):
                continue
            wanted = labels[i] if i < len(labels) else Rows(1, -1)  # by keyword: not followed
            found = self._tracker.label(grad)
            if isinstance(wanted, Rows):
                if isinstance(found, Meeting):
                    raise found.refusal()
                if not (isinstance(found, Rows) and found.same(wanted)):
                    raise Meeting(f"the backward pass of {name!r}").refusal()
            elif isinstance(wanted, Summed) and found is not None:
                raise Meeting(f"the backward pass of {name!r}").refusal()


class Node:
    """A node of the model's graph as the model sees it: without hooks, which nobody follows."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook", "_register_hook_dict") or (
            name.startswith("_raw_saved")
        ):
            raise UnsupportedModel(
                f"a hook is put on a node of the model's graph (grad_fn.{name}), where the rows of "
                "a gradient cannot be followed: put it on the tensor (tensor.register_hook), or on "
                "a module by register_full_backward_hook."
            )
        value = getattr(self._node, name)
        if name == "next_functions":
            return tuple((seen(node), number) for node, number in value)
        return value


def seen(node: Any) -> Any:
    """What the model gets when it asks for a tensor's node."""
    followed = isinstance(getattr(node, "__dict__", {}).get("_forward_cls"), Followed)
    return node if node is None or followed or _for_several_hooks() else Node(node)


def _for_several_hooks() -> bool:
    """Whether torch asks, to know when all tensors of `register_multi_grad_hook` have had theirs,
    which are hooks on tensors."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("__torch_function__", _ASKS.__name__):
        frame = frame.f_back
    return frame is not None and frame.f_code is _SEVERAL.__code__


# -- while a model runs ------------------------------------------------------------------------


@contextmanager
def watching(capture: Capture) -> Iterator[None]:
    """While entered, custom Functions that are called in this thread are followed."""
    _install()
    captures = _captures()
    captures.append(capture)
    try:
        yield
    finally:
        captures.remove(capture)


def _captures() -> list[Capture]:
    if not hasattr(_THREAD, "captures"):
        _THREAD.captures = []
    captures: list[Capture] = _THREAD.captures
    return captures


def _watching() -> Capture | None:
    captures = _captures()
    return captures[-1] if captures and captures[-1].watching else None


def _made(
    capture: Capture, function: Any, given: Sequence[Label | bool | None], kwargs: Any, out: Any
) -> None:
    """A custom Function was called: follow its node, if it has one."""
    results = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    with torch._C.DisableTorchFunction():  # the nodes themselves
        nodes: list[Any] = [t.grad_fn for t in results]
    node = next((n for n in nodes if getattr(n, "_forward_cls", None) is function), None)
    if node is None:
        return
    if getattr(function, "boxed_grads_call", False):
        raise PrivacyError(f"{function.__name__!r} takes its gradients as one list: not followed.")
    tracker = capture.tracker
    node._forward_cls = Followed(function, tracker, given, [tracker.label(t) for t in results])


@functools.cache
def _install() -> None:
    """Replace torch's functions."""
    function: Any = torch.autograd.Function
    context: Any = FunctionCtx
    node: Any = BackwardCFunction
    saving: Any = graph.saved_tensors_hooks
    apply, save = vars(function)["apply"].__func__, context.save_for_backward
    enter_mode = TorchDispatchMode.__enter__
    enter, hook, prehook = saving.__enter__, node.register_hook, node.register_prehook

    @functools.wraps(apply)
    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        capture = _watching()
        if capture is None or (is_library(cls.__module__) and cls is not BackwardHookFunction):
            return apply(cls, *args, **kwargs)
        label = capture.tracker.label
        given = [label(a) if isinstance(a, Tensor) else True for a in args]
        out = apply(cls, *args, **kwargs)
        _made(capture, cls, given, kwargs, out)
        return out

    @functools.wraps(save)
    def saved(self: Any, *tensors: Any) -> None:
        save(self, *tensors)
        capture = _watching()
        if capture is not None and not is_library(type(self)._forward_cls.__module__):
            label = capture.tracker.label
            vars(self)[_SAVED] = [label(t) if isinstance(t, Tensor) else None for t in tensors]

    @functools.wraps(enter)
    def entered(self: Any) -> None:
        if _watching() is not None and not (
            type(self) is not saving and is_library(type(self).__module__)
        ):
            refuse_own_saving(self.pack_hook, self.unpack_hook)
        enter(self)

    @functools.wraps(enter_mode)
    def entered_mode(self: Any) -> Any:
        if _watching() is not None:
            refuse_dispatch_mode(self)
        return enter_mode(self)  # type: ignore[no-untyped-call]

    def hooked(self: Any, fn: Any) -> Any:
        owner = vars(self).get("_forward_cls")
        return hook(self, owner.after(fn) if isinstance(owner, Followed) else fn)

    def prehooked(self: Any, fn: Any) -> Any:
        owner = vars(self).get("_forward_cls")
        return prehook(self, owner.before(fn) if isinstance(owner, Followed) else fn)

    function.apply = classmethod(applied)
    context.save_for_backward = saved
    saving.__enter__ = entered
    TorchDispatchMode.__enter__ = entered_mode  # type: ignore[method-assign]
    node.register_hook, node.register_prehook = hooked, prehooked
