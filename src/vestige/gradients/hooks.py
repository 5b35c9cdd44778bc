"""Hooks that the capture puts on a model, its parameters and its tensors.

None of them follows a model that is copied by `copy.deepcopy` or saved by `torch.save`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.overrides import TorchFunctionMode

from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.modes import refuse_own_saving
from vestige.gradients.rows import Meeting, Rows
from vestige.gradients.tracker import Tracker

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

# Facts about a tensor that are not its contents; lengths may follow from contents nevertheless.
LENGTHS = {
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.__len__,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
}
FACTS = {
    *LENGTHS,
    torch.Tensor.dim,
    torch.Tensor.stride,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_contiguous,
    torch.Tensor.get_device,
    *(
        getattr(torch.Tensor, name).__get__
        for name in "dtype device ndim requires_grad layout is_cuda is_sparse".split()
    ),
}


class Hook:
    """A bound method as a hook that turns into a no-op when the model is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


def do_nothing(*_: Any) -> None:
    """What a copied model has in place of the capture's hooks."""


def _nothing() -> Callable[..., None]:
    return do_nothing


def refuse_training(norm: nn.Module, _: Any) -> None:
    """A batch norm that was taken because it was frozen must stay so, also without gradients."""
    if norm.training:
        raise UnsupportedModel(
            f"{type(norm).__name__} was frozen when private training began and is in train() now, "
            "where it mixes the examples of a batch and keeps their statistics: call .eval() on "
            "it after model.train()."
        )


def refuse_around_the_model() -> None:
    """What calls the private model in its own forward and does more to it than calling it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", ""):
        raise UnsupportedModel(  # it would run the model's own hooks again, too
            "the private model as a whole is inside torch.utils.checkpoint: checkpoint blocks "
            "inside its forward instead, where they are run again by the same rules."
        )
    if hooks is not None:
        refuse_own_saving(*hooks)
    if nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:
        raise UnsupportedModel(
            "the private model was put into DistributedDataParallel, which sends buffers and adds "
            "up gradients on its own: call the module inside it (docs/scaling.md). The engine adds "
            "up clipped sums over the ranks by itself."
        )


class Interruptible:
    """How the root is called: Ctrl-C runs none of torch's hooks, so the forward is left here.

    torch keeps this attribute out of copies and pickles. What `module.compile()` put there is put
    aside; a wrapper of torch.compile that calls the model runs it as it is, unseen by Dynamo.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._before: Any = None

    def put_on(self, module: nn.Module) -> None:
        """Have the module called by this."""
        before = module._compiled_call_impl
        if not isinstance(before, Interruptible):
            self._before = before
            module._compiled_call_impl = self

    def take_off(self, module: nn.Module) -> None:
        """Have it called as before."""
        if module._compiled_call_impl is self:
            module._compiled_call_impl = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._capture.compiled():  # here: torch looks up forward before it calls hooks
                return self._capture.module._call_impl(*args, **kwargs)
        except Exception:
            raise  # the hooks have run
        except BaseException:
            self._capture.stop_watching()
            raise

    def __deepcopy__(self, memo: Any) -> None:
        return None


# Dynamo leaves a call to itself, as by torch.compiler.disable, which would load it for seconds.
Interruptible.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
set_code_exec_strategy(
    Interruptible.__call__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)


class Follows(TorchFunctionMode):
    """Follows rows through code of the model that runs in the backward pass."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            return func(*args, **kwargs)
        seen = self._tracker.before(args, kwargs)
        out = func(*args, **kwargs)
        self._tracker.follow(func, seen, args, kwargs, out)
        return out


class FollowedHook(Follows):
    """A gradient hook of the model: what it makes of a gradient must keep the tensor's rows."""

    def __init__(self, hook: Callable[[Tensor], Any], tracker: Tracker, rows: Rows) -> None:
        super().__init__(tracker)
        self._hook, self._rows = hook, rows

    def __call__(self, g: Tensor) -> Any:
        self._tracker.give(g, self._rows)
        with self:
            out = self._hook(g)
        for value in (g, out):
            label = self._tracker.label(value) if isinstance(value, Tensor) else self._rows
            if isinstance(label, Meeting):
                raise label.refusal()
            if not (isinstance(label, Rows) and label.same(self._rows)):
                raise Meeting("a gradient hook").refusal()
        return out


class Refusal:
    """Refuses a gradient that reaches an output in which examples meet."""

    def __init__(self, label: Meeting) -> None:
        self._label = label

    def __call__(self, _: Tensor) -> None:
        raise self._label.refusal()


class Guard:
    """Refuses a gradient that reaches a parameter without having gone through a rule."""

    off = False  # of all models while synthetic rows are differentiated by plain autograd

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, g: Tensor | None) -> None:
        if Guard.off or g is None:  # a compiled graph says of each input that it has none
            return
        raise UnsupportedModel(
            f"parameter {self.name!r} received a gradient that was not captured per example. It "
            "was used outside the model's forward call (call the model itself, not its parts), in "
            "a regularisation term of the loss (use the optimizer's weight_decay), under gradient "
            "checkpointing or torch.compile, or by an operation that Vestige does not see."
        )


def versions(parts: list[nn.Module], passing: set[int]) -> list[tuple[int, int]]:
    """Identity and version of every buffer and parameter, without looking up their names.

    Tensors in `passing` come and go while the model runs, and are left out.
    """
    return [
        (id(tensor), tensor._version)
        for module in parts
        for tensor in (*module._buffers.values(), *module._parameters.values())
        if tensor is not None and id(tensor) not in passing
    ]


def changed_by_forward(name: str) -> PrivacyError:
    """The error for a buffer or parameter that the forward pass writes to."""
    return PrivacyError(
        f"buffer or parameter {name!r} was changed by the forward pass. Statistics of private "
        "batches are an unprotected release: use vestige.fix(model) for batch norm, turn the "
        "tracking off (track_running_stats=False), or move the update out of the model."
    )
