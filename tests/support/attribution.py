"""Models whose rows are followed, held against a loop over single records by plain autograd.

Written against the library, not with it: a model runs as the engine runs it, self-check first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import clip_and_sum, loop_gradients
from vestige import PrivacyEngine, PrivacyError
from vestige.gradients import Capture, following
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.gradients.rows import Rows
from vestige.gradients.self_check import self_check
from vestige.sampling.loader import Batch

Draw = Callable[[int], tuple[Tensor, ...]]
# A model, its inputs, and the numbers of rows that are as long as another axis.
Case = tuple[Callable[[], nn.Module], Draw, set[int]]
# A model, its inputs, and what the error names.
Mixed = tuple[Callable[[], nn.Module], Draw, str]


RARE = 1e9  # no synthetic row is as large: only what follows the operations can see what it does


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


def layer(run: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Fn(run, a=nn.Linear(6, 4), **parts)


V = vectors(6)
S = vectors(4, 6)
PAIR = sequences_with_lengths


def two(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 6, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)


def check_exact(make: Callable[[], nn.Module], draw: Draw, axes: set[int]) -> None:
    """Every row has its own gradient, whatever the number of rows."""
    assert_exact(make, draw, sorted({1, 2, 3, 5} | axes))


def check_refused(make: Callable[[], nn.Module], draw: Draw, names: str) -> None:
    """The model is refused at its first use, by an error that names the place."""
    torch.manual_seed(0)
    with pytest.raises(PrivacyError, match=names):
        use(make().double(), draw(5))


# -- with the engine --------------------------------------------------------------------------


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


def exact(make: Callable[[], nn.Module], draw: Draw, _: set[int]) -> bool:
    """Whether a model that is accepted has the right clipped sum."""
    torch.manual_seed(0)
    model = make().double()
    inputs = draw(5)
    with watched(model, 1e-2) as watch:
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


def labelled_by(patch: Any, name: str, family: Callable[..., Any]) -> None:
    patch.setattr(following, "FAMILIES", {**following.FAMILIES, name: family})


def assert_noticed(patch: Any, break_it: Callable[[Any], None], holds: Callable[[], bool]) -> None:
    """What holds does no longer hold once a part of the attribution is broken."""
    assert holds()
    patch.setattr(following, "_known", {})  # families that were looked up already
    break_it(patch)
    assert not holds()
