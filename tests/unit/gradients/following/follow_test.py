"""Following as a whole: chains of operations, and operations that no family names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.attribution import (
    RARE,
    Fn,
    Mixed,
    Step,
    V,
    assert_noticed,
    check_refused,
    layer,
    refused,
    watched,
)
from tests.support.reference import clip_and_sum
from vestige.errors import VestigeError
from vestige.gradients import following
from vestige.gradients.clipping import Clip
from vestige.gradients.rows import Meeting, Rows
from vestige.gradients.self_check import self_check


@torch.library.custom_op("vestige_tests::relu", mutates_args=())
def relu_in_name(x: Tensor) -> Tensor:
    return x - x.mean(0)


def tanh(x: Tensor) -> Tensor:
    """An operation of somebody's library, which torch's function modes see by its name."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(tanh, (x,), x)  # type: ignore[no-any-return]
    return x - (x - RARE).relu().mean(0)


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


# Models, inputs, and what the error names.
MIXED: dict[str, Mixed] = {
    "an operation called relu": (layer(lambda s, x: s.a(relu_in_name(x))), V, "vestige_tests"),
    "a function called tanh": (layer(lambda s, x: s.a(tanh(x))), V, "'tanh'"),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_examples_that_meet_are_refused_at_first_use(name):
    check_refused(*MIXED[name])


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


def names_are_enough(patch: Any) -> None:
    name_of = following.name_of

    def last_name(func: Any) -> str:
        return name_of(func).rpartition(".")[2]

    patch.setattr(following, "name_of", last_name)


MUTANTS: dict[str, tuple[Callable[[Any], None], Callable[[], bool]]] = {
    "an operation by its last name": (
        names_are_enough,
        lambda: refused(*MIXED["an operation called relu"][:2], False),
    ),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_attribution_is_noticed(name, monkeypatch):
    assert_noticed(monkeypatch, *MUTANTS[name])


def labelled(value: Tensor, axis: int, operation: Callable[[Tensor], Any]) -> Any:
    """The label of `operation(value)`, where `value` has its rows on an axis."""
    seen: list[Any] = []
    rows = Rows(1, value.shape[axis]).at(value.shape, axis, 1)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if any(v is value for v in args):
                seen.append(following.follow(func, {id(value): rows}, args, kwargs or {}, out))
            return out

    with Mode():
        operation(value)
    return seen[-1]


PROBABILITIES = torch.full((3, 5), 0.2)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.cross_entropy(x, PROBABILITIES, reduction="none"),
        lambda x: F.cross_entropy(x, PROBABILITIES),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long), reduction="none"),
        lambda x: torch.renorm(x, 2, 0, 1.0),
        lambda x: torch.trapezoid(x),
        lambda x: torch.searchsorted(x, torch.ones(3, 2)),
        torch.linalg.pinv,
    ],
)
def test_rows_on_the_axis_that_an_operation_goes_along_meet(operation):
    label = labelled(torch.rand(3, 5), 1, operation)
    assert isinstance(label, Meeting)
    assert not label.lost


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.cross_entropy(x, PROBABILITIES, reduction="none"),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long), reduction="none"),
        lambda x: torch.renorm(x, 2, 0, 1.0),
        torch.trapezoid,
        lambda x: torch.searchsorted(x, torch.ones(3, 2)),
        copy.deepcopy,
        torch.as_tensor,
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: x[np.array([0, 1, 2])],
        lambda x: x[:, [np.int64(4), np.int64(0)]],
    ],
)
def test_rows_on_another_axis_stay_apart(operation):
    label = labelled(torch.rand(3, 5), 0, operation)
    assert label is None or (isinstance(label, Rows) and label.order is None)
