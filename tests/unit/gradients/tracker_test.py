"""Which example a gradient belongs to: exact for every model that is accepted, else refused.

Written against the library, not with it. `Watched` runs a model as the engine does (self-check
first) and the answers are held against a loop over single records by plain autograd.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
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
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import clip_and_sum, loop_gradients
from vestige import PrivacyEngine, PrivacyError
from vestige.engine.run import Run
from vestige.errors import VestigeError
from vestige.gradients import Capture, following, tracker
from vestige.gradients import self_check as selfcheck
from vestige.gradients.clipping import Clip
from vestige.gradients.following.base import Call
from vestige.gradients.groups import partition
from vestige.gradients.rows import Rows
from vestige.gradients.self_check import self_check
from vestige.sampling.loader import Batch

Draw = Callable[[int], tuple[Tensor, ...]]


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
    watch = Capture(model, groups, Clip((bound,)))
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
        torch.autograd.backward(list(outs), [torch.randn_like(o) for o in outs])


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
    """Not in order, and not all the same: 2, 1, 4, 3, 2, ..."""
    return torch.arange(1, 3 * n + 1, 3) % longest + 1


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


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    def run(s: Fn, x: Tensor) -> Tensor:
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(hook)
        return s.b(h.tanh())

    return lambda: Fn(run, **linear())


ROWWISE: dict[
    str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], set[int]]
] = {
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
    "a hook that keeps rows apart": (
        hooked(lambda g: 3 * g / (1 + g.norm(dim=1, keepdim=True))),
        vectors(6),
        {4, 6},
    ),
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
        lambda: Fn(
            lambda s, x: torch.bmm(s.h(x).view(-1, 3, 6), x.unsqueeze(2)), h=nn.Linear(6, 18)
        ),
        vectors(6),
        {3, 6},
    ),
    "softmax over positions": (
        lambda: Fn(lambda s, x: (s.a(x).softmax(1) * s.a(x).cumsum(1)).sum(1), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
    "numpy integers as indices": (
        lambda: Fn(lambda s, x: s.b(s.a(x.transpose(0, 1)[np.int64(1)].unsqueeze(1))), **linear()),
        vectors(4, 6),
        {4, 6},
    ),
}


@pytest.mark.parametrize("name", list(ROWWISE))
def test_every_row_of_an_accepted_model_has_its_own_gradient(name):
    make, draw, axes = ROWWISE[name]
    assert_exact(make, draw, sorted({1, 2, 3, 5} | axes))


# -- what is refused --------------------------------------------------------------------------

RARE = 1e9  # no synthetic row is as large: only what follows the operations can see what it does


def layer(run: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Fn(run, a=nn.Linear(6, 4), **parts)


def keeping(where: str) -> Callable[[], nn.Module]:
    """A model that keeps tensors of the batch somewhere."""

    def run(s: Fn, x: Tensor) -> Tensor:
        kept = x.detach().mean(0)
        if where == "attribute":
            s.kept = kept
        elif where == "list":
            s.kept.append(kept)
        elif where == "dict of lists":
            s.kept["a"] = [kept]
        elif where == "dataclass":
            s.kept.value = kept
        elif where == "buffer":
            s.kept += kept
        elif where == "buffer through .data":
            s.kept.data.copy_(kept)
        elif where == "buffer through a view of .data":
            s.kept.data.view(2, 3).copy_(kept.view(2, 3))
        elif where == "buffer by assignment to .data":
            s.kept.data = kept
        elif where == "buffer by out=" or where == "a tensor's view by out=":
            torch.mean(x.detach(), 0, out=s.kept[:])
        elif where == "without gradients":
            with torch.no_grad():
                s.kept = x.mean(0)
        else:
            s.kept = kept
        return s.a(x)

    def make() -> nn.Module:
        model = Extra(run, a=nn.Linear(6, 4)) if where == "extra state" else layer(run)()
        if where.startswith("buffer"):
            model.register_buffer("kept", torch.zeros(6, dtype=torch.float64))
        else:
            object.__setattr__(model, "kept", _EMPTY.get(where, lambda: None)())
        return model

    return make


@dataclasses.dataclass
class Box:
    value: Any = None


class Holder:
    """No module, no container: get_extra_state hands out what it has."""

    value: Any = None


class Extra(Fn):
    def get_extra_state(self) -> Any:
        return {"kept": getattr(self, "holder", Holder()).value}

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.holder = Holder()
        self.holder.value = x.detach()
        return self.a(x)


_EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict of lists": dict,
    "dataclass": Box,
    "a tensor's view by out=": lambda: torch.zeros(6, dtype=torch.float64),
}


class MixesForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class NormalisesBackward(MixesBackward):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-9)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.library.custom_op("vestige_tests::relu", mutates_args=())
def relu_in_name(x: Tensor) -> Tensor:
    return x - x.mean(0)


def written(write: Callable[[Tensor], None]) -> Callable[[], nn.Module]:
    """An activation is written to on the side."""

    def run(s: Fn, x: Tensor) -> Tensor:
        h = x * 1.0
        v = h.view(-1, 6)
        write(h)
        return s.a(v)

    return layer(run)


def set_data(s: Fn, x: Tensor) -> Tensor:
    h = x * 1.0
    h.data = h.data - h.data.mean(0)
    return s.a(h)


def view_of_data(h: Tensor) -> None:
    h.data.view(-1, 6).copy_(h.mean(0).expand_as(h))


def into_out(h: Tensor) -> None:
    torch.sub(h, h.mean(0), out=h.detach())


def loop_of_thresholds(s: Fn, x: Tensor) -> Tensor:
    h = s.a(x)
    for most in (0.0, RARE):
        if bool(x.abs().max() > most):
            h = h * (1 + most)
    return h


def shared(s: Fn, x: Tensor) -> Tensor:
    return F.linear(x, s.h(x)[0].view(3, 6))


def conv_by_batch(s: Fn, x: Tensor) -> Tensor:
    return F.conv1d(s.a(x).unsqueeze(1), x[:1, :2].unsqueeze(1))


def norm_by_batch(s: Fn, x: Tensor) -> Tensor:
    return F.layer_norm(s.a(x), (4,), weight=x[0, :4])


def experts(s: Fn, x: Tensor) -> Tensor:
    at = s.g(x)[:, 0].topk(max(1, len(x) // 2)).indices
    return s.a(x).index_add(0, at, s.e(x[at]))


def routed(s: Fn, x: Tensor) -> Tensor:
    k, out = x[:, 0] > 0, x.new_zeros(len(x), 4)
    for i, e in enumerate((s.a, s.e)):
        at = torch.where(k == i)[0]
        out = out.index_add(0, at, e(x[at]))
    return out


def capacity(s: Fn, x: Tensor) -> Tensor:
    chosen = (x[:, :1] > -10).double()
    return s.a(x) * (chosen.cumsum(0) <= 32)


def rows_by_position(s: Fn, x: Tensor) -> Tensor:
    return s.a(x + torch.arange(len(x))[:, None])


def statistic(of: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return layer(lambda s, x: s.a(of(x)))


def unseen(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """`use` sees a number (2, or 3 if some row is huge) that the whole batch has made."""
    return layer(lambda s, x: s.a(x) + use(x, (x.abs().amax() > RARE).long() + 2).sum(1, True))


V = vectors(6)
S = vectors(4, 6)
PAIR = sequences_with_lengths


def two(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 6, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)


def square(width: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: (torch.randn(n, width, dtype=torch.float64),)


# name -> model, inputs, what the error names
MIXED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "batch mean": (statistic(lambda x: x - x.mean(0)), V, "'(mean|sub|__sub__)'"),
    "slight batch mean": (statistic(lambda x: x - 1e-9 * x.mean(0)), V, "mean|sub|mul"),
    "batch mean without gradients": (statistic(lambda x: x - x.detach().mean(0)), V, "mean|sub"),
    "batch variance": (statistic(lambda x: x / x.std(0)), V, "'std'"),
    "batch softmax": (layer(lambda s, x: s.a(x).softmax(0)), V, "'softmax'"),
    "batch cumsum": (statistic(lambda x: x.cumsum(0)), V, "'cumsum'"),
    "dim as a tensor": (statistic(lambda x: x.cumsum(torch.tensor(0))), V, "'cumsum'"),
    "batch sort": (statistic(lambda x: x.sort(0).values), V, "'sort'"),
    "batch msort": (statistic(torch.msort), V, "'msort'"),
    "batch topk": (statistic(lambda x: x.topk(len(x), 0).values), V, "'topk'"),
    "batch maximum": (statistic(lambda x: x / x.abs().max()), V, "'max'"),
    "batch norm": (statistic(lambda x: x / x.norm()), V, "'norm'"),
    "batch median": (statistic(lambda x: x - x.median(0).values), V, "'median'"),
    "the first row for all": (statistic(lambda x: x - x[0]), V, "sub"),
    "the first row by select": (statistic(lambda x: x * x.select(0, 0)), V, "mul"),
    "the row before": (statistic(lambda x: x + x.roll(1, 0)), V, "add"),
    "the row before, by slices": (statistic(lambda x: x[1:] - x[:-1]), V, "sub"),
    "pairs": (layer(lambda s, x: (s.a(x) @ s.a(x).t()) @ x), V, "matmul"),
    "distances": (layer(lambda s, x: torch.cdist(s.a(x), s.a(x))), V, "'cdist'"),
    "cosines": (
        layer(lambda s, x: F.cosine_similarity(s.a(x)[None], s.a(x)[:, None], dim=2)),
        V,
        "'cosine_similarity'",
    ),
    "einsum of pairs": (
        layer(lambda s, x: torch.einsum("bi,ci->bc", s.a(x), x[:, :4])),
        V,
        "'einsum'",
    ),
    "a flip that is not undone": (layer(lambda s, x: s.a(x.flip(0))), V, "order"),
    "a roll that is not undone": (layer(lambda s, x: s.a(x.roll(1, 0))), V, "order"),
    "flip of the output": (layer(lambda s, x: s.a(x).flip(0)), V, "order"),
    "rows swapped between inputs": (layer(lambda s, x, y: s.a(x) + y.flip(0)[:, :4]), two, "add"),
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
    "how many": (
        layer(lambda s, x: s.a(x) * (x > RARE).nonzero().shape[0]),
        V,
        "shape of what",
    ),
    "how many, by len": (layer(lambda s, x: s.a(x) * len(x[x > RARE])), V, "shape of what"),
    "how many, by numel": (
        layer(lambda s, x: s.a(x) * x[x > RARE].numel()),
        V,
        "shape of what",
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
    "experts of limited capacity": (layer(capacity), V, "'cumsum'"),
    "lengths.max()": (
        layer(lambda s, x, n: s.a(x[:, : int(n.max())]).mean(1)),
        PAIR,
        "int|index|item",
    ),
    "a slice to the longest": (
        layer(lambda s, x, n: s.a(x[:, : n.max()]).sum(1)),
        PAIR,
        "max|getitem",
    ),
    "a branch on the mean": (
        layer(lambda s, x: s.a(x) if x.mean() > 0 else -s.a(x)),
        V,
        "depend|bool",
    ),
    "tolist": (layer(lambda s, x: s.a(x) * x.sum().tolist()), V, "'tolist'"),
    "item": (layer(lambda s, x: s.a(x) * x.sum().item()), V, "'item'"),
    "numpy": (layer(lambda s, x: s.a(x) * float(x.detach().numpy().sum())), V, "'numpy'"),
    "a gate on the mean": (layer(lambda s, x: s.a(x) * (x.mean() > 0)), V, "mean|gt"),
    "a slice by a rare number": (unseen(lambda x, k: x[:, :k]), V, "getitem|amax|all"),
    "narrow by a rare number": (unseen(lambda x, k: x.narrow(1, 0, k)), V, "narrow|amax|all"),
    "select by a rare number": (unseen(lambda x, k: x.select(1, k)[:, None]), V, "select|amax|all"),
    "index by a rare number": (unseen(lambda x, k: x[:, k][:, None]), V, "getitem|amax|all"),
    "roll by a rare number": (unseen(lambda x, k: x[:, :2].roll(k, 1)), V, "roll|amax|all"),
    "clamp by a rare number": (unseen(lambda x, k: x.clamp(max=k)), V, "clamp|amax|all"),
    "one_hot without classes": (
        layer(lambda s, x, n: s.a(x).sum(1) + F.one_hot(n).double().mean(1, True)),
        PAIR,
        "one_hot",
    ),
    "activations through .data": (written(lambda h: h.data.sub_(h.mean(0))), V, "in-place|sub"),
    "activations by assignment to .data": (layer(set_data), V, "data|sub"),
    "activations through a view of .data": (written(view_of_data), V, "in-place|copy|expand"),
    "activations by out=": (written(into_out), V, "sub|in-place"),
    "written through another view": (
        written(lambda h: h[:1].copy_(h[1:2])),
        V,
        "in-place",
    ),
    "a row's weights for all": (lambda: Fn(shared, h=nn.Linear(6, 18)), V, "linear"),
    "a row's kernel for all": (layer(conv_by_batch), V, "conv1d"),
    "a row's scales for all": (layer(norm_by_batch), V, "layer_norm"),
    "a convolution over the rows": (
        layer(lambda s, x: s.a(F.conv1d(x, s.k)), k=torch.randn(5, 5, 1, dtype=torch.float64)),
        V,
        "conv1d|not run",
    ),
    "attention on (rows, width)": (
        lambda: Fn(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(6, 2)),
        V,
        "attention|meet",
    ),
    "the place in the lot": (layer(rows_by_position), V, "position in the lot"),
    "rank in the lot": (
        layer(lambda s, x: s.a(x) + x[:, 0].argsort().argsort()[:, None]),
        V,
        "argsort|order|add",
    ),
    "a hook that centres": (hooked(lambda g: g - g.mean(0)), V, "attributed|depends|mean|sub"),
    "a hook that clips what is rare": (
        hooked(lambda g: g * (RARE / g.norm()).clamp(max=1.0)),
        V,
        "'norm'",
    ),
    "a hook that writes in place": (hooked(lambda g: g.clone().sub_(g.sum(0))), V, "'(sum|sub_)'"),
    "a hook that normalises": (hooked(lambda g: g / g.norm()), V, "depends|norm"),
    "autograd.Function, forward": (layer(lambda s, x: s.a(MixesForward.apply(x))), V, "sub|mean"),
    "autograd.Function, backward": (
        lambda: Fn(lambda s, x: s.b(MixesBackward.apply(s.a(x))), **linear()),
        V,
        "attributed|depend",
    ),
    "autograd.Function, backward norm": (
        lambda: Fn(lambda s, x: s.b(NormalisesBackward.apply(s.a(x))), **linear()),
        V,
        "depend",
    ),
    "a scripted function": (layer(lambda s, x: s.a(scripted(x))), V, "outside the model|depend"),
    "an operation called relu": (layer(lambda s, x: s.a(relu_in_name(x))), V, "vestige_tests"),
    "dropout of whole rows together": (
        layer(lambda s, x: s.a(x * (torch.rand(()) < x.mean().sigmoid()))),
        V,
        "lt|mean|mul",
    ),
    **{
        f"kept in {where}": (keeping(where), V, "keeps values|was changed")
        for where in (
            "attribute",
            "list",
            "dict of lists",
            "dataclass",
            "extra state",
            "buffer",
            "buffer through .data",
            "buffer through a view of .data",
            "buffer by assignment to .data",
            "buffer by out=",
            "a tensor's view by out=",
            "without gradients",
        )
    },
}


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    make, draw, names = MIXED[name]
    torch.manual_seed(0)
    with pytest.raises(PrivacyError, match=names):
        use(make().double(), draw(5))


# -- in another way than the first ------------------------------------------------------------


class Later(nn.Module):
    """Rows meet once `when` says so."""

    def __init__(self, when: Callable[[Later], bool]) -> None:
        super().__init__()
        self.when, self.calls, self.inner = when, 0, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x - x.mean(0) if self.when(self) else x


def private(model: nn.Module, rows: int = 6) -> Any:
    """The engine on rows of 6 numbers, one lot holding all of them."""
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.randn(rows, 6)), batch_size=rows),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    return engine, optimizer, loader


def train(model: nn.Module, run: Any, steps: int = 1, **options: Any) -> None:
    engine, optimizer, loader = run
    for _ in range(steps):
        for (x,) in loader:
            engine.backward(model(x, **options).sum(1))
            optimizer.step()


def test_statistics_that_begin_after_a_warm_up_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), Later(lambda m: m.calls > 100), nn.Linear(4, 3))
    run = private(model)
    train(model, run)
    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        train(model, run, steps=100)


def test_statistics_in_training_are_refused_after_an_evaluation_with_gradients():
    model = nn.Sequential(nn.Linear(6, 4), Later(lambda m: m.training), nn.Linear(4, 3))
    run = private(model)
    model.eval()
    model(torch.randn(7, 6))
    model.train()
    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        train(model, run)


def test_statistics_with_another_submodules_flag_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), Later(lambda m: not m.inner.training), nn.Linear(4, 3))
    run = private(model)
    train(model, run)
    model[1].inner.eval()
    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        train(model, run)


def by_place(x: Tensor) -> Tensor:
    """No label tells that rows differ by their place: only the self-check does."""
    return x + torch.arange(len(x))[:, None]


class Kind(enum.Enum):
    A = 1
    B = 2


@pytest.mark.parametrize(
    "first, second", [("a", "b"), (Kind.A, Kind.B), (1, 2), ((0, "a"), (0, "b"))]
)
def test_another_argument_is_checked_like_the_first(first, second):
    def run(s: Fn, x: Tensor, mode: Any = None) -> Tensor:
        return s.a(by_place(x) if mode == second else x)

    model = layer(run)()
    engine = private(model)
    train(model, engine, mode=first)
    with pytest.raises(PrivacyError, match="position in the lot"):
        train(model, engine, mode=second)


@pytest.mark.parametrize("whose", ["its own", "another module's"])
def test_a_training_flag_is_checked_like_the_first(whose):
    def run(s: Fn, x: Tensor) -> Tensor:
        flag = s.training if whose == "its own" else s.c.training
        return s.a(x if flag else by_place(x))

    model = layer(run, c=nn.Dropout(0.0))()
    engine = private(model)
    train(model, engine)
    (model if whose == "its own" else model.c).eval()
    with pytest.raises(PrivacyError, match="position in the lot"):
        train(model, engine)


def test_a_branch_that_the_self_check_did_not_take_is_refused():
    model = layer(loop_of_thresholds)()
    engine, optimizer, loader = private(model)
    loader.dataset.tensors[0].mul_(1e12)
    with pytest.raises(PrivacyError, match="'__bool__' turns values of the batch"):
        train(model, (engine, optimizer, loader))


def test_the_self_check_sees_places_as_far_as_the_lot_goes():
    def run(s: Fn, x: Tensor) -> Tensor:
        place = torch.arange(len(x), dtype=x.dtype)
        return s.a(x + torch.where(place < 20, 0.0, place)[:, None])

    model = layer(run)()
    with pytest.raises(PrivacyError, match="position in the lot"):
        train(model, private(model, rows=40))


def test_the_number_of_rows_may_not_choose_the_way():
    model = layer(lambda s, x: s.a(x) if len(x) < 20 else -s.a(x))()
    with pytest.raises(PrivacyError, match="number of rows"):
        train(model, private(model, rows=40))


# -- chains of operations ---------------------------------------------------------------------

SHAPES = [
    "transpose",
    "flatten",
    "flip",
    "roll",
    "pick",
    "cat",
    "repeat",
    "stack",
    "expand",
    "chunk",
]


def chain(steps: list[tuple[str, int]]) -> Callable[[Fn, Tensor], Tensor]:
    """Operations on axes by number, a linear layer after each, and a sum for each example."""

    def run(s: Fn, x: Tensor) -> Tensor:
        h = x
        for name, k in steps:
            h = move(h, name, k)
            h = torch.tanh(s.a(h) if h.shape[-1] == 6 else h)
        return h

    return run


def move(h: Tensor, name: str, k: int) -> Tensor:
    axis = k % max(1, h.ndim - 1)
    if name == "transpose":
        return h.transpose(axis, (axis + 1) % max(1, h.ndim - 1))
    if name == "flatten":
        return h.reshape(-1, h.shape[-1]) if k % 2 else h.flatten(0, max(0, h.ndim - 2))
    if name == "flip":
        return h.flip(axis)
    if name == "roll":
        return h.roll(k, axis)
    if name == "pick":
        order = torch.arange(h.shape[axis]).roll(k)
        return h.index_select(axis, order)
    if name == "cat":
        return torch.cat([h, -h], axis)
    if name == "repeat":
        return h.repeat_interleave(2, axis)
    if name == "stack":
        return torch.stack([h, 2 * h], axis)
    if name == "expand":
        return h.unsqueeze(axis).expand(*h.shape[:axis], 2, *h.shape[axis:])
    return sum(h.chunk(2, axis)) if h.shape[axis] % 2 == 0 else h


def owners(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Which entries of the output each row has a part in, found by changing the row."""
    with torch.no_grad():
        before = run(x)
        masks = []
        for i in range(len(x)):
            other = x.clone()
            other[i] += torch.randn_like(x[i])
            masks.append(run(other) != before)
    return masks


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 3)), min_size=1, max_size=6),
    n=st.sampled_from([2, 3, 4, 6]),
)
def test_chains_of_operations_are_exact_or_refused(steps, n):
    torch.manual_seed(0)
    model = Fn(chain(steps), a=nn.Linear(6, 6)).double()
    x = torch.randn(n, 2, 6, dtype=torch.float64)
    masks = owners(model, x)
    with watched(model, 1e-2) as watch:
        try:
            why = self_check(watch, (x,), {}, 0)
            step = Step(watch, model, (x,))
            cotangent = torch.randn_like(step.out)
            got, _ = step.backward(cotangent)
        except VestigeError:
            return
    assert why is None
    assert sum(mask.int() for mask in masks).max() == 1  # an entry with two owners is refused
    gradients = []
    for mask in masks:
        loss = (model(x) * cotangent * mask).sum()
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in found]))
    expected = clip_and_sum(torch.stack(gradients), watch.groups, Clip((1e-2,)))
    assert (got - expected).norm() <= 1e-9 * expected.norm()


# -- mutants ----------------------------------------------------------------------------------


def refused(
    make: Callable[[], nn.Module], draw: Draw, checking: bool = True, rows: int = 5
) -> bool:
    """Whether the model is refused: by the self-check or, without it, by what follows the rows."""
    torch.manual_seed(0)
    model = make().double()
    with watched(model) as watch:
        try:
            if checking:
                checked(watch, draw(rows))
            step = Step(watch, model, draw(rows))
            step.backward(torch.randn_like(step.out))
        except PrivacyError:
            return True
    return False


def exact(name: str, checking: bool = False) -> bool:
    """Whether a model that is accepted has the right clipped sum."""
    make, draw, _ = ROWWISE[name]
    torch.manual_seed(0)
    model = make().double()
    inputs = draw(5)
    with watched(model, 1e-2) as watch:
        if checking:
            checked(watch, inputs)
        step = Step(watch, model, inputs)
        cotangent = torch.randn_like(step.out)
        got, _ = step.backward(cotangent)
    gradients = loop_gradients(model, inputs, cotangent, watch.groups)
    expected = clip_and_sum(gradients, watch.groups, Clip((1e-2,)))
    return bool((got - expected).norm() <= 1e-9 * expected.norm())


def order_is_ignored(patch: Any) -> None:
    first = Rows.first

    def without_order(self: Rows, value: Tensor) -> Tensor:
        return first(Rows(self.stride, self.batch), value)

    patch.setattr(Rows, "first", without_order)


def first_label_wins(patch: Any) -> None:
    patch.setattr(tracker, "follow", lambda func, labels, *_: next(iter(labels.values())))


def labelled_by(patch: Any, name: str, family: Callable[..., Any]) -> None:
    patch.setattr(following, "FAMILIES", {**following.FAMILIES, name: family})


def transposed_rows_stay(patch: Any) -> None:
    labelled_by(patch, "transpose", lambda call: call.label)


def nothing_is_kept(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "check_kept", lambda self: None)


def values_may_leave(patch: Any) -> None:
    patch.setattr(tracker, "VALUES", [])


def lengths_may_leave(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "refuse_length", lambda self, tensor: None)


def places_do_not_matter(patch: Any) -> None:
    patch.setattr(selfcheck, "compare", lambda trial, tested, company: None)
    patch.setattr(selfcheck, "compare_places", lambda trial, rows: None)


def few_places_matter(patch: Any) -> None:
    patch.setattr(selfcheck, "compare_places", lambda trial, rows: None)


def masks_pick_rows(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "refuse_length", lambda self, tensor: None)

    def picked(call: Call) -> Rows:
        whole, *_ = call.labels(call.args)
        return Rows(call.out.numel() // len(call.out), whole.batch)

    labelled_by(patch, "__getitem__", picked)


def arguments_go_unseen(patch: Any) -> None:
    patch.setattr(following, "LENDING_SHAPE", {"__getitem__", "narrow", "select", "roll", "clamp"})


def names_are_enough(patch: Any) -> None:
    name_of = following.name_of

    def last_name(func: Any) -> str:
        return name_of(func).rpartition(".")[2]

    patch.setattr(following, "name_of", last_name)


def data_is_not_spread(patch: Any) -> None:
    patch.setattr(tracker.Tracker, "_spread", lambda self, target: None)
    patch.setattr(tracker.Tracker, "_note_written", lambda self, tensor: None)


def tolerance_of_five_percent(patch: Any) -> None:
    patch.setattr(selfcheck, "GRADIENTS", 0.05)
    patch.setattr(selfcheck, "OUTPUTS", 0.05)


class Slight(MixesBackward):
    """Rows meet a little, in the backward pass, where only the self-check can see it."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + 1e-2 * torch.tanh(g[0].sum()))


def slightly(s: Fn, x: Tensor) -> Tensor:
    return s.b(Slight.apply(s.a(x)))


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "rows in the order they come": (order_is_ignored, lambda: exact("flip and undo")),
    "rows in the order they come, in a GRU": (
        order_is_ignored,
        lambda: exact("rows sorted by length around a GRU"),
    ),
    "the first argument's label": (
        first_label_wins,
        lambda: refused(*MIXED["batch mean"][:2], False),
    ),
    "a transposed tensor's rows where they were": (
        transposed_rows_stay,
        lambda: exact("time-major flatten"),
    ),
    "what is kept is not looked at": (
        nothing_is_kept,
        lambda: refused(*MIXED["kept in list"][:2]),
    ),
    "values may leave": (values_may_leave, lambda: refused(*MIXED["item"][:2], False)),
    "lengths may leave": (lengths_may_leave, lambda: refused(*MIXED["how many, by len"][:2])),
    "masks pick rows": (masks_pick_rows, lambda: refused(layer(all_picked), V, False)),
    "arguments that no family looks at": (
        arguments_go_unseen,
        lambda: refused(*MIXED["a slice by a rare number"][:2]),
    ),
    "an operation by its last name": (
        names_are_enough,
        lambda: refused(*MIXED["an operation called relu"][:2], False),
    ),
    "writes through .data stay there": (
        data_is_not_spread,
        lambda: refused(*MIXED["kept in buffer through a view of .data"][:2], False),
    ),
    "no comparison of rows with rows alone": (
        places_do_not_matter,
        lambda: refused(*MIXED["the place in the lot"][:2]),
    ),
    "places compared for a few rows only": (
        few_places_matter,
        lambda: refused(layer(lambda s, x: s.a(x) * (1 + (len(x) == 20))), V, rows=20),
    ),
    "a tolerance of five percent": (
        tolerance_of_five_percent,
        lambda: refused(lambda: Fn(slightly, **linear()), V),
    ),
}


def all_picked(s: Fn, x: Tensor) -> Tensor:
    """As many positions as there are rows, all of the first row."""
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[0, : len(x)] = True
    return s.a(x[(x < 1e9) & mask][:, None] * torch.ones(6, dtype=x.dtype))


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    break_it, holds = MUTANTS[name]
    assert holds()
    monkeypatch.setattr(following, "_known", {})  # families that were looked up already
    break_it(monkeypatch)
    assert not holds()


def test_a_way_without_its_arguments_is_noticed(monkeypatch):
    monkeypatch.setattr("vestige.engine.run._signature", lambda inputs: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_another_argument_is_checked_like_the_first("a", "b")


def test_a_check_of_the_first_way_only_is_noticed(monkeypatch):
    check, seen = Run._check_way, set()

    def once(self: Run, args: Any, kwargs: Any) -> None:
        if id(self) not in seen:
            check(self, args, kwargs)
        seen.add(id(self))

    monkeypatch.setattr(Run, "_check_way", once)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_training_flag_is_checked_like_the_first("its own")
