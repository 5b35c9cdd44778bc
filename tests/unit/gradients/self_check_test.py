"""The self-check: what labels cannot see, and every new way in which a model is used."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support import loops
from tests.support.attribution import (
    RARE,
    Fn,
    Mixed,
    V,
    assert_noticed,
    check_refused,
    layer,
    linear,
    private,
    refused,
    train,
)
from vestige import PrivacyError
from vestige.engine.ways import Ways
from vestige.gradients import self_check as selfcheck


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


def loop_of_thresholds(s: Fn, x: Tensor) -> Tensor:
    h = s.a(x)
    for most in (0.0, RARE):
        if bool(x.abs().max() > most):
            h = h * (1 + most)
    return h


def rows_by_position(s: Fn, x: Tensor) -> Tensor:
    return s.a(x + torch.arange(len(x))[:, None])


class Later(nn.Module):
    """Rows meet once `when` says so."""

    def __init__(self, when: Callable[[Later], bool]) -> None:
        super().__init__()
        self.when, self.calls, self.inner = when, 0, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x - x.mean(0) if self.when(self) else x


def by_place(x: Tensor) -> Tensor:
    """No label tells that rows differ by their place: only the self-check does."""
    return x + torch.arange(len(x))[:, None]


class Kind(enum.Enum):
    A = 1
    B = 2


# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "the place in the lot": (layer(rows_by_position), V, "position in the lot"),
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
}


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


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


# -- mutants ----------------------------------------------------------------------------------


def places_do_not_matter(patch: Any) -> None:
    patch.setattr(selfcheck, "compare", lambda trial, tested, company: None)
    patch.setattr(selfcheck, "compare_places", lambda trial, rows: None)


def few_places_matter(patch: Any) -> None:
    patch.setattr(selfcheck, "compare_places", lambda trial, rows: None)


def tolerance_of_five_percent(patch: Any) -> None:
    patch.setattr(selfcheck, "GRADIENTS", 0.05)
    patch.setattr(selfcheck, "OUTPUTS", 0.05)


def slightly(s: Fn, x: Tensor) -> Tensor:
    """A row's place matters a little, which only the self-check can see."""
    return s.b(s.a(x) * (1 + 1e-3 * torch.arange(len(x)))[:, None])


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
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


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])


def test_a_way_without_its_arguments_is_noticed(monkeypatch):
    monkeypatch.setattr("vestige.engine.ways.signature", lambda inputs: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_another_argument_is_checked_like_the_first("a", "b")


def test_a_check_of_the_first_way_only_is_noticed(monkeypatch):
    check, seen = Ways._check_way, set()

    def once(self: Ways, args: Any, kwargs: Any) -> None:
        if id(self) not in seen:
            check(self, args, kwargs)
        seen.add(id(self))

    monkeypatch.setattr(Ways, "_check_way", once)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_training_flag_is_checked_like_the_first("its own")


class Squeezed(nn.Module):
    def __init__(self, *axis):
        super().__init__()
        self.layer, self.axis = nn.Linear(5, 1), axis

    def forward(self, x):
        return self.layer(x).squeeze(*self.axis)


def test_a_squeeze_that_takes_the_row_of_a_lot_of_one_is_refused_before_it_meets_one():
    """Its output has no axis of rows then, and the loss would fail, or broadcast, on that lot."""
    data = TensorDataset(torch.randn(24, 5), torch.rand(24))
    _, model, _, loader = loops.private(Squeezed(), data)
    with pytest.raises(PrivacyError, match=r"squeeze\(\).*name the axis, as in squeeze\(-1\)"):
        for x, _ in loader:
            model(x)
    engine, model, optimizer, loader = loops.private(Squeezed(-1), data, batch_size=2)
    sizes = set()
    for _ in range(3):
        for x, y in loader:
            sizes.add(len(x))
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
    assert 1 in sizes and engine.released == 3 * len(loader)
