"""Models that pick entries, or put some in place, by an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.attribution import (
    PAIR,
    RARE,
    Case,
    Fn,
    Mixed,
    S,
    V,
    assert_noticed,
    check_exact,
    check_refused,
    exact,
    labelled_by,
    layer,
    linear,
    order_is_ignored,
    refused,
    sequences_with_lengths,
    vectors,
)
from vestige.gradients import following, tracker
from vestige.gradients.following.base import Call
from vestige.gradients.rows import Rows


def sorted_by_length(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    perm = n.argsort(descending=True, stable=True)
    out, _ = s.r(x[perm])
    return s.b(out[perm.argsort()])


def permuted(s: Fn, x: Tensor) -> Tensor:
    perm = torch.arange(len(x) - 1, -1, -1)
    return s.b(torch.tanh(s.a(x.index_select(0, perm)))).index_select(0, perm)


def last_token(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    h, _ = s.r(x)
    return s.b(h[torch.arange(len(x)), n - 1])


def gathered(s: Fn, x: Tensor, n: Tensor) -> Tensor:
    h = s.a(x)
    at = (n - 1).view(-1, 1, 1).expand(-1, 1, h.shape[2])
    return s.b(h.gather(1, at).squeeze(1))


def looked_up(at: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A constant for every length, such as the weights of classes."""

    def run(s: Fn, x: Tensor, n: Tensor) -> Tensor:
        table = torch.linspace(0.5, 1.5, 5, dtype=x.dtype)
        return s.a(x).sum(1) * at(table, n)[:, None]

    return layer(run)


def setitem(s: Fn, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], x.shape[1], 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        out[:, t] = s.b(torch.tanh(s.a(x[:, t])))
    return out


def experts(s: Fn, x: Tensor) -> Tensor:
    at = s.g(x)[:, 0].topk(max(1, len(x) // 2)).indices
    return s.a(x).index_add(0, at, s.e(x[at]))


def routed(s: Fn, x: Tensor) -> Tensor:
    k, out = x[:, 0] > 0, x.new_zeros(len(x), 4)
    for i, e in enumerate((s.a, s.e)):
        at = torch.where(k == i)[0]
        out = out.index_add(0, at, e(x[at]))
    return out


def statistic(of: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return layer(lambda s, x: s.a(of(x)))


def unseen(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`use` sees a number (2, or 3 if some row is huge) that the whole batch has made."""
    return layer(lambda s, x: s.a(x) + use(x, (x.abs().amax() > RARE).long() + 2).sum(1, True))


EXACT: dict[str, Case] = {
    "rows sorted by length around a GRU": (
        lambda: Fn(sorted_by_length, r=nn.GRU(6, 4, batch_first=True), b=nn.Linear(4, 3)),
        sequences_with_lengths,
        {4, 6},
    ),
    "index_select and back": (lambda: Fn(permuted, **linear()), vectors(6), {4, 6}),
    "gather": (lambda: Fn(gathered, **linear()), sequences_with_lengths, {4, 6}),
    "a table, by gather": (looked_up(lambda t, n: t.gather(0, n)), sequences_with_lengths, {4, 6}),
    "a table, by index_select": (
        looked_up(lambda t, n: t.index_select(0, n)),
        sequences_with_lengths,
        {4, 6},
    ),
    "a table, by take": (looked_up(torch.take), sequences_with_lengths, {4, 6}),
    "a table, by take_along_dim": (
        looked_up(lambda t, n: torch.take_along_dim(t[None], n[:, None], 1)[:, 0]),
        sequences_with_lengths,
        {4, 6},
    ),
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
    "written step by step": (lambda: Fn(setitem, **linear()), vectors(4, 6), {3, 4, 6}),
    "numpy integers as indices": (
        lambda: Fn(lambda s, x: s.b(s.a(x.transpose(0, 1)[np.int64(1)].unsqueeze(1))), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
}

# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "the first row for all": (statistic(lambda x: x - x[0]), V, "sub"),
    "the row before, by slices": (statistic(lambda x: x[1:] - x[:-1]), V, "sub"),
    "a mask of rows": (layer(lambda s, x: s.a(x[x[:, 0] > 0])), V, "__getitem__"),
    "a mask of positions": (layer(lambda s, x: s.a(x[x[..., 0] > 0])), S, "__getitem__"),
    "nonzero": (
        layer(lambda s, x: s.a(x[(x[:, 0] > 0).nonzero()[:, 0]])),
        V,
        "order|picked",
    ),
    "unique": (layer(lambda s, x: s.a(x) + torch.unique(x).mean()), V, "'unique'"),
    "masked_select": (
        layer(lambda s, x: s.a(x) + x.masked_select(x > 0).sum()),
        V,
        "masked_select",
    ),
    "top-k routing": (
        lambda: Fn(experts, a=nn.Linear(6, 4), e=nn.Linear(6, 4), g=nn.Linear(6, 1)),
        V,
        "topk|index|picked",
    ),
    "routing": (
        lambda: Fn(routed, a=nn.Linear(6, 4), e=nn.Linear(6, 4)),
        V,
        "where|getitem|index_add|picked",
    ),
    "a slice to the longest": (
        layer(lambda s, x, n: s.a(x[:, : n.max()]).sum(1)),
        PAIR,
        "max|getitem",
    ),
    "a slice by a rare number": (unseen(lambda x, k: x[:, :k]), V, "getitem|amax|all"),
    "index by a rare number": (unseen(lambda x, k: x[:, k][:, None]), V, "getitem|amax|all"),
    "added up by length": (
        layer(
            lambda s, x, n: s.a(x).sum(1) + x.new_zeros(5).scatter_add(0, n, x[:, 0, 0])[n, None]
        ),
        PAIR,
        "scatter_add",
    ),
    "rows by gather": (
        layer(lambda s, x, n: s.a(x[:, 0].gather(0, n[:, None].expand(-1, 6) % len(x)))),
        PAIR,
        "gather",
    ),
    "rows by take": (layer(lambda s, x, n: s.a(x[:, 0]) + x.take(n)[:, None]), PAIR, "take"),
    "rank in the lot": (
        layer(lambda s, x: s.a(x) + x[:, 0].argsort().argsort()[:, None]),
        V,
        "argsort|order|add",
    ),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_every_row_has_its_own_gradient(name):
    check_exact(*EXACT[name])


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


# -- mutants ----------------------------------------------------------------------------------


def masks_pick_rows(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "refuse_length", lambda self, tensor: None)

    def picked(call: Call) -> Rows:
        whole, *_ = call.labels(call.args)
        return Rows(call.out.numel() // len(call.out), whole.batch)

    labelled_by(patch, "__getitem__", picked)


def arguments_go_unseen(patch: Any) -> None:
    patch.setattr(following, "LENDING_SHAPE", {"__getitem__", "narrow", "select", "roll", "clamp"})


def all_picked(s: Fn, x: Tensor) -> Tensor:
    """As many positions as there are rows, all of the first row."""
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[0, : len(x)] = True
    return s.a(x[(x < 1e9) & mask][:, None] * torch.ones(6, dtype=x.dtype))


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "rows in the order they come, in a GRU": (
        order_is_ignored,
        lambda: exact(*EXACT["rows sorted by length around a GRU"]),
    ),
    "masks pick rows": (masks_pick_rows, lambda: refused(layer(all_picked), V, False)),
    "arguments that no family looks at": (
        arguments_go_unseen,
        lambda: refused(*MIXED["a slice by a rare number"][:2]),
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])
