"""Models whose rows are moved: axes in another order, repeated, joined, split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.attribution import (
    PAIR,
    RARE,
    Case,
    Fn,
    Mixed,
    V,
    assert_noticed,
    check_exact,
    check_refused,
    exact,
    labelled_by,
    layer,
    linear,
    order_is_ignored,
    two,
    vectors,
)


def time_major(s: Fn, x: Tensor) -> Tensor:
    b, t, d = x.shape
    h = s.b(torch.relu(s.a(x.transpose(0, 1).reshape(t * b, d))))
    return h.view(t, b, -1).transpose(0, 1)


def heads(s: Fn, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q = s.a(x).view(b, t, 2, 2).transpose(1, 2).reshape(b * 2, t, 2)
    mixed = torch.bmm(q, q.transpose(1, 2)).softmax(-1) @ q
    return s.b(mixed.view(b, 2, t, 2).transpose(1, 2).reshape(b, t, 4))


def frames(s: Fn, x: Tensor) -> Tensor:
    b, t = x.shape[:2]
    return s.f(s.c(x.flatten(0, 1)).flatten(1)).view(b, t, -1).sum(1)


def hidden_states(s: Fn, x: Tensor) -> Tensor:
    _, h = s.r(x)
    return s.b(h.transpose(0, 1).reshape(len(x), -1))


def looped(s: Fn, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for step in x.transpose(0, 1):  # iterating over a tensor
        h = torch.tanh(s.a(step) + h)
    return s.b(h)


def statistic(of: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return layer(lambda s, x: s.a(of(x)))


def unseen(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`use` sees a number (2, or 3 if some row is huge) that the whole batch has made."""
    return layer(lambda s, x: s.a(x) + use(x, (x.abs().amax() > RARE).long() + 2).sum(1, True))


EXACT: dict[str, Case] = {
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
    "heads folded into the batch": (lambda: Fn(heads, **linear()), vectors(3, 6), {3, 4, 6}),
    "frames through a convolution": (
        lambda: nn.Sequential(Fn(frames, c=nn.Conv2d(2, 3, 2), f=nn.Linear(27, 3))),
        vectors(3, 2, 4, 4),
        {3, 4},
    ),
    "hidden states of layers": (
        lambda: Fn(hidden_states, r=nn.GRU(6, 2, 2, batch_first=True), b=nn.Linear(4, 3)),
        vectors(4, 6),
        {4, 6},
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
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "a flip that is not undone": (layer(lambda s, x: s.a(x.flip(0))), V, "order"),
    "a roll that is not undone": (layer(lambda s, x: s.a(x.roll(1, 0))), V, "order"),
    "flip of the output": (layer(lambda s, x: s.a(x).flip(0)), V, "order"),
    "rows swapped between inputs": (layer(lambda s, x, y: s.a(x) + y.flip(0)[:, :4]), two, "add"),
    "the row before": (statistic(lambda x: x + x.roll(1, 0)), V, "add"),
    "the first row by select": (statistic(lambda x: x * x.select(0, 0)), V, "mul"),
    "narrow by a rare number": (unseen(lambda x, k: x.narrow(1, 0, k)), V, "narrow|amax|all"),
    "select by a rare number": (unseen(lambda x, k: x.select(1, k)[:, None]), V, "select|amax|all"),
    "roll by a rare number": (unseen(lambda x, k: x[:, :2].roll(k, 1)), V, "roll|amax|all"),
    "one_hot without classes": (
        layer(lambda s, x, n: s.a(x).sum(1) + F.one_hot(n).double().mean(1, True)),
        PAIR,
        "one_hot",
    ),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


# -- mutants ----------------------------------------------------------------------------------


def transposed_rows_stay(patch: Any) -> None:
    labelled_by(patch, "transpose", lambda call: call.label)


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "rows in the order they come": (order_is_ignored, lambda: exact(*EXACT["flip and undo"])),
    "a transposed tensor's rows where they were": (
        transposed_rows_stay,
        lambda: exact(*EXACT["time-major flatten"]),
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])
