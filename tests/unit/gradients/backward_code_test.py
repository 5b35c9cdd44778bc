"""Code of a model that runs in the backward pass: it may change a row's gradient by that row alone.

What mixes rows only from a size on that no synthetic row has is for the following to see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.support.attribution import (
    RARE,
    Case,
    Fn,
    Mixed,
    V,
    check_exact,
    check_refused,
    linear,
    use,
    vectors,
)
from vestige import UnsupportedModel


class Function(torch.autograd.Function):
    """A Function that leaves its input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return x.view_as(x)


class Reversed(Function):
    """Gradient reversal, with a number that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.alpha * g, None


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1)


class Swish(torch.autograd.Function):
    """Keeps its input alone, as memory-efficient activations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s * (1 + x * (1 - s)))


class Pair(torch.autograd.Function):
    """Two inputs and two results, and a context that is set up apart."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y + h, g * x + h if ctx.needs_input_grad[1] else None


class ClipsWhatIsRare(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * (RARE / g.norm()).clamp(max=1.0)


class ReadsOthers(Swish):
    """Mixes by what it has saved, not by the gradient."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (1 + (x.abs().amax(0) - RARE).relu())


class TurnsRound(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.where(g.abs().amax(1, keepdim=True) > RARE, g.flip(0), g)


def between(function: Any, *more: Any) -> Callable[[], nn.Module]:
    """The Function between two layers."""
    return lambda: Fn(lambda s, x: s.b(function.apply(s.a(x), *more)), **linear())


def hooked(put: Callable[[Fn], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Fn(lambda s, x: s.b(s.a(x).tanh()), **linear())
        put(model)
        return model

    return make


def in_forward(put: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def run(s: Fn, x: Tensor) -> Tensor:
        h = s.a(x).tanh()
        if h.grad_fn is not None:
            put(h)
        return s.b(h)

    return lambda: Fn(run, **linear())


def clips(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if g is None else g * (RARE / g.norm()).clamp(max=1.0) for g in grads)


def centre(_: nn.Module, g: Any, __: Any) -> None:
    g[0].sub_(g[0].mean(0))


def saving(hooks: Callable[[], Any]) -> Callable[[], nn.Module]:
    def run(s: Fn, x: Tensor) -> Tensor:
        with hooks():
            h = s.a(x).tanh()
        return s.b(h)

    return lambda: Fn(run, **linear())


def twice(s: Fn, x: Tensor) -> Tensor:
    return s.b(Swish.apply(Swish.apply(s.a(x))) + Reversed.apply(s.a(x), 2.0))


EXACT: dict[str, Case] = {
    "gradient reversal": (between(Reversed, 0.5), vectors(6), {4, 6}),
    "a straight-through estimator": (between(StraightThrough), vectors(6), {4, 6}),
    "an activation that keeps its input": (between(Swish), vectors(6), {4, 6}),
    "Functions on Functions": (lambda: Fn(twice, **linear()), vectors(6), {4, 6}),
    "two inputs and two results": (
        lambda: Fn(lambda s, x: s.b(sum(Pair.apply(s.a(x), s.a(x).tanh()))), **linear()),
        vectors(6),
        {4, 6},
    ),
    "a module's backward hook": (
        hooked(lambda m: m.b.register_full_backward_hook(lambda _, g, __: (3 * g[0],))),
        vectors(6),
        {4, 6},
    ),
    "a module's backward hook that looks on": (
        hooked(lambda m: m.b.register_full_backward_hook(lambda _, g, h: None)),
        vectors(6),
        {4, 6},
    ),
    "a module's hook before its backward": (
        hooked(lambda m: m.b.register_full_backward_pre_hook(lambda _, g: (g[0] * 2,))),
        vectors(6),
        {4, 6},
    ),
    "several tensors' hook": (
        in_forward(lambda h: torch.autograd.graph.register_multi_grad_hook([h], lambda _: None)),
        vectors(6),
        {4, 6},
    ),
    "activations kept on the CPU": (saving(save_on_cpu), vectors(6), {4, 6}),
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "a Function that clips what is rare": (between(ClipsWhatIsRare), V, "'norm'"),
    "a Function that reads others": (between(ReadsOthers), V, "'mul'|'amax'"),
    "a Function that turns rows round": (between(TurnsRound), V, "'where'"),
    "a module's hook that clips what is rare": (
        hooked(lambda m: m.b.register_full_backward_hook(lambda _, g, __: clips(g))),
        V,
        "'norm'",
    ),
    "a module's hook in place": (
        hooked(lambda m: m.b.register_full_backward_hook(centre)),
        V,
        "'(mean|sub_)'",
    ),
    "a module's hook before its backward": (
        hooked(lambda m: m.b.register_full_backward_pre_hook(lambda _, g: clips(g))),
        V,
        "'norm'",
    ),
    "a module's hook of the old kind": (
        hooked(lambda m: m.b.register_backward_hook(lambda _, g, __: clips(g))),
        V,
        "register_full_backward_hook",
    ),
    "a node's hook": (
        in_forward(lambda h: h.grad_fn.register_hook(lambda g, _: clips(g))),
        V,
        "tensor.register_hook",
    ),
    "a node's hook before it": (
        in_forward(lambda h: h.grad_fn.register_prehook(clips)),
        V,
        "tensor.register_hook",
    ),
    "the hook of a node further down": (
        in_forward(lambda h: h.grad_fn.next_functions[0][0].register_prehook(clips)),
        V,
        "tensor.register_hook",
    ),
    "hooks on what is saved": (
        saving(lambda: saved_tensors_hooks(lambda t: t, lambda t: t.clamp(max=t.mean() + RARE))),
        V,
        "saved_tensors_hooks",
    ),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


def test_hooks_on_what_is_saved_are_refused_around_the_model():
    with (
        saved_tensors_hooks(lambda t: t, lambda t: t.clamp(max=t.mean() + RARE)),
        pytest.raises(UnsupportedModel, match="saved_tensors_hooks"),
    ):
        use(Fn(lambda s, x: s.b(s.a(x).tanh()), **linear()).double(), V(5))


def test_other_models_are_left_alone():
    use(between(Swish)().double(), V(5))  # torch's functions have been replaced
    x = torch.randn(5, 6, requires_grad=True)
    mixed = ClipsWhatIsRare.apply(x)
    mixed.grad_fn.register_prehook(clips)
    (mixed * 1e10).sum().backward()
    assert x.grad is not None
    assert float(x.grad.norm()) < 1.01 * RARE


def test_a_graph_is_freed_without_the_collector_of_cycles():
    freed = []

    class Noted(Swish):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.note = Note(freed)
            return Swish.forward(ctx, x)

    use(between(Noted)().double(), V(5))
    before = len(freed)
    use(between(Noted)().double(), V(5))
    assert before
    assert len(freed) == 2 * before


class Note:
    def __init__(self, freed: list[int]) -> None:
        self.freed = freed

    def __del__(self) -> None:
        self.freed.append(1)
