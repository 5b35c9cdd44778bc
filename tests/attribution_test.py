"""Which example a gradient belongs to: exact for every model that is accepted, else refused.

Written against the library, not with it. `Watched` runs a model as the engine does (self-check
first) and the answers are held against a loop over single records by plain autograd.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.reference import clip_and_sum, loop_gradients
from vestige import PrivacyError
from vestige.clipping import Clip
from vestige.errors import VestigeError
from vestige.gradients import Batch, Capture, capture
from vestige.groups import partition
from vestige.selfcheck import self_check

Model = Callable[["Fn", Any], Any]


class Fn(nn.Module):
    """A forward pass written as a function of the module and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Step:
    """The clipped sum of one batch and the norm of each of its rows."""

    def __init__(self, watch: Capture, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._watch = watch
        watch.collector.clear()
        watch.collector.norms = []
        watch.start(Batch(len(inputs[0])))
        self.out = model(*inputs)

    def backward(self, cotangent: Tensor) -> tuple[Tensor, list[float]]:
        (self.out * cotangent).sum().backward()
        norms = self._watch.collector.norms
        return self._watch.collector.total.clone(), list(norms or [])


@contextmanager
def watched(model: nn.Module, bound: float = 1.0) -> Iterator[Capture]:
    """The model as the engine watches it."""
    groups = partition(model, "flat")
    watch = capture(model, groups, Clip((bound,)))
    watch.mean_loss = False
    watch.attach()
    try:
        yield watch
    finally:
        watch.detach()


def checked(watch: Capture, inputs: tuple[Tensor, ...]) -> None:
    """The self-check, which must not be skipped."""
    why = self_check(watch, inputs, {}, 0)
    assert why is None, why


def use(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """First use: self-check, forward and backward. Whatever is refused is refused here."""
    with watched(model) as watch:
        why = self_check(watch, inputs, {}, 0)
        watch.collector.clear()
        watch.start(Batch(len(inputs[0])))
        out = model(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        assert why is None, why
        torch.autograd.backward([o for o in outs], [torch.randn_like(o) for o in outs])


def assert_exact(
    make: Callable[[], nn.Module], draw: Callable[[int], tuple[Tensor, ...]], sizes: Any
) -> None:
    """Self-checked once; then for every number of rows the sum equals the loop's, and with one
    row's cotangent at a time every other row has a norm of exactly zero."""
    torch.manual_seed(0)
    model = make().double()
    bound = 1e-2  # so that every row is clipped: a wrong norm would show
    with watched(model, bound) as watch:
        checked(watch, draw(4))
        for n in sizes:
            inputs = draw(n)
            groups = watch.groups
            twin = copy.deepcopy(model)
            cotangent = torch.randn(twin(*inputs).shape, dtype=torch.float64)
            cotangent *= torch.logspace(-1, 1, n).double().view(-1, *[1] * (cotangent.ndim - 1))
            gradients = loop_gradients(twin, inputs, cotangent, groups)
            expected = clip_and_sum(gradients, groups, Clip((bound,)))
            got, norms = Step(watch, model, inputs).backward(cotangent)
            assert (got - expected).norm() <= 1e-9 * expected.norm(), n
            assert np.allclose(norms, gradients.norm(dim=1), rtol=1e-9), n
            for row in range(n):
                one = torch.zeros_like(cotangent)
                one[row] = cotangent[row]
                _, norms = Step(watch, model, inputs).backward(one)
                assert [i for i, norm in enumerate(norms) if norm] == [row], n


def vectors(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: (torch.randn(n, *shape, dtype=torch.float64),)


def lengths(n: int, longest: int) -> Tensor:
    """Not in order, and not all the same."""
    return torch.randint(1, longest + 1, (n,))


def sequences_with_lengths(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 4, 6, dtype=torch.float64), lengths(n, 4)


def linear(**more: Any) -> dict[str, Any]:
    return {"a": nn.Linear(6, 4), "b": nn.Linear(4, 3), **more}


# -- what works -------------------------------------------------------------------------------


def time_major(s: Fn, x: Tensor) -> Tensor:
    b, t, d = x.shape
    h = s.b(torch.relu(s.a(x.transpose(0, 1).reshape(t * b, d))))
    return h.view(t, b, -1).transpose(0, 1)


def sorted_by_length(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    perm = n.argsort(descending=True, stable=True)
    out, _ = s.r(x[perm])
    return s.b(out[perm.argsort()])


def permuted(s: Fn, x: Tensor) -> Tensor:
    perm = torch.arange(len(x) - 1, -1, -1)
    return s.b(torch.tanh(s.a(x.index_select(0, perm)))).index_select(0, perm)


def heads(s: Fn, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q = s.a(x).view(b, t, 2, 2).transpose(1, 2).reshape(b * 2, t, 2)
    mixed = torch.bmm(q, q.transpose(1, 2)).softmax(-1) @ q
    return s.b(mixed.view(b, 2, t, 2).transpose(1, 2).reshape(b, t, 4))


def frames(s: Fn, x: Tensor) -> Tensor:
    b, t = x.shape[:2]
    return s.f(s.c(x.flatten(0, 1)).flatten(1)).view(b, t, -1).sum(1)


def last_token(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    h, _ = s.r(x)
    return s.b(h[torch.arange(len(x)), n - 1])


def gathered(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    h = s.a(x)
    at = (n - 1).view(-1, 1, 1).expand(-1, 1, h.shape[2])
    return s.b(h.gather(1, at).squeeze(1))


def hidden_states(s: Fn, x: Tensor) -> Tensor:
    _, h = s.r(x)
    return s.b(h.transpose(0, 1).reshape(len(x), -1))


def setitem(s: Fn, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], x.shape[1], 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        out[:, t] = s.b(torch.tanh(s.a(x[:, t])))
    return out


def inplace_view(s: Fn, x: Tensor) -> Tensor:
    h = s.a(x) * 1.0
    h[:, :2].mul_(2.0)
    h.view(len(x), -1)[:, 1:].add_(1.0)
    return s.b(h)


def looped(s: Fn, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for step in x.transpose(0, 1):  # iterating over a tensor
        h = torch.tanh(s.a(step) + h)
    return s.b(h)


ROWWISE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], set[int]]] = {
    "time-major flatten": (lambda: Fn(time_major, **linear()), vectors(4, 6), {3, 4, 6}),
    "views by cat": (
        lambda: Fn(lambda s, x: sum(s.b(s.a(torch.cat([x, -x.flip(1)]))).chunk(2)), **linear()),
        vectors(6),
        {3, 4, 6},
    ),
    "views by cat, unequal use": (
        lambda: Fn(lambda s, x: torch.cat(s.a(torch.cat([x, 2 * x])).split(len(x)), 1), **linear()),
        vectors(6),
        {4, 6},
    ),
    "views by stack": (
        lambda: Fn(lambda s, x: s.b(s.a(torch.stack([x, -x]))).sum(0), **linear()),
        vectors(6),
        {4, 6},
    ),
    "views by repeat": (
        lambda: Fn(lambda s, x: s.a(x.repeat(2, 1)).view(2, len(x), 4).sum(0), **linear()),
        vectors(6),
        {4, 6},
    ),
    "views by tile": (
        lambda: Fn(lambda s, x: s.a(x.tile(3, 1)).view(3, len(x), 4).sum(0), **linear()),
        vectors(6),
        {4, 6},
    ),
    "views by repeat_interleave": (
        lambda: Fn(
            lambda s, x: s.a(x.repeat_interleave(2, 0)).view(len(x), 2, 4).sum(1), **linear()
        ),
        vectors(6),
        {4, 6},
    ),
    "rows sorted by length around a GRU": (
        lambda: Fn(sorted_by_length, r=nn.GRU(6, 4, batch_first=True), b=nn.Linear(4, 3)),
        sequences_with_lengths,
        {4, 6},
    ),
    "flip and undo": (
        lambda: Fn(lambda s, x: s.b(s.a(x.flip(0)).tanh().flip(0)), **linear()),
        vectors(6),
        {4, 6},
    ),
    "roll and undo": (
        lambda: Fn(lambda s, x: s.b(s.a(x.roll(1, 0)).tanh().roll(-1, 0)), **linear()),
        vectors(6),
        {4, 6},
    ),
    "chunks put together again": (
        lambda: Fn(lambda s, x: torch.cat(s.b(s.a(x)).chunk(2)), **linear()),
        vectors(6),
        {4, 6},
    ),
    "index_select and back": (lambda: Fn(permuted, **linear()), vectors(6), {4, 6}),
    "heads folded into the batch": (lambda: Fn(heads, **linear()), vectors(3, 6), {3, 4, 6}),
    "frames through a convolution": (
        lambda: nn.Sequential(Fn(frames, c=nn.Conv2d(2, 3, 2), f=nn.Linear(27, 3))),
        vectors(3, 2, 4, 4),
        {3, 4},
    ),
    "gather": (lambda: Fn(gathered, **linear()), sequences_with_lengths, {4, 6}),
    "picked by arange": (
        lambda: Fn(lambda s, x: s.b(s.a(x)[torch.arange(len(x))]), **linear()),
        vectors(6),
        {4, 6},
    ),
    "last token": (
        lambda: Fn(last_token, r=nn.GRU(6, 4, batch_first=True), b=nn.Linear(4, 3)),
        sequences_with_lengths,
        {4, 6},
    ),
    "hidden states of layers": (
        lambda: Fn(hidden_states, r=nn.GRU(6, 2, 2, batch_first=True), b=nn.Linear(4, 3)),
        vectors(4, 6),
        {4, 6},
    ),
    "packed einsum": (
        lambda: Fn(
            lambda s, x: torch.einsum("bti,ijk,bsj->bk", x, s.w, x),
            w=nn.Parameter(torch.randn(6, 6, 3)),
        ),
        vectors(4, 6),
        {3, 4, 6},
    ),
    "narrow and select": (
        lambda: Fn(lambda s, x: s.b(s.a(x).narrow(1, 1, 2).select(1, 0)), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
    "windows by unfold": (
        lambda: Fn(lambda s, x: s.w(x.unfold(1, 2, 1)).flatten(1), w=nn.Linear(2, 3)),
        vectors(6),
        {3, 6},
    ),
    "pixel_shuffle": (
        lambda: Fn(lambda s, x: s.c(F.pixel_shuffle(x, 2)).flatten(1), c=nn.Conv2d(1, 2, 2)),
        vectors(4, 3, 3),
        {3, 4},
    ),
    "written step by step": (lambda: Fn(setitem, **linear()), vectors(4, 6), {3, 4, 6}),
    "in place on views": (lambda: Fn(inplace_view, **linear()), vectors(6), {4, 6}),
    "iterated over": (lambda: Fn(looped, **linear()), vectors(5, 6), {4, 5, 6}),
    "class token and positions": (
        lambda: Fn(
            lambda s, x: s.b(s.a(torch.cat([s.c.expand(len(x), -1, -1), x], 1) + s.p)).mean(1),
            c=nn.Parameter(torch.randn(1, 1, 6)),
            p=nn.Parameter(torch.randn(5, 6)),
            **linear(),
        ),
        vectors(4, 6),
        {4, 5, 6},
    ),
    "a hypernetwork, one weight a row": (
        lambda: Fn(lambda s, x: torch.bmm(s.h(x).view(-1, 3, 6), x.unsqueeze(2)), h=nn.Linear(6, 18)),
        vectors(6),
        {3, 6},
    ),
    "softmax over positions": (
        lambda: Fn(lambda s, x: (s.a(x).softmax(1) * s.a(x).cumsum(1)).sum(1), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
    "numpy integers as indices": (
        lambda: Fn(
            lambda s, x: s.b(s.a(x.transpose(0, 1)[np.int64(1)].unsqueeze(1))), **linear()
        ),
        vectors(4, 6),
        {4, 6},
    ),
}


@pytest.mark.parametrize("name", list(ROWWISE))
def test_every_row_of_an_accepted_model_has_its_own_gradient(name):
    make, draw, axes = ROWWISE[name]
    assert_exact(make, draw, sorted({1, 2, 3, 5} | axes))
