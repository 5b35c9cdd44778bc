"""Modes of the loop around the private model and inside it: those that mix rows are seen."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from vestige import PrivacyEngine, PrivacyError

WIDTH, ROWS = 4, 8


class Mixes(TorchFunctionMode):
    """Once it is `on`, after the self-check."""

    on = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + out.roll(1, 0) if self.on and func is torch.tanh else out


class MixesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + out.roll(1, 0) if func is torch.ops.aten.tanh.default else out


class Looks(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 3)
        self.inside: Any = nullcontext()

    def forward(self, x):
        hidden = self.first(x)
        with self.inside:
            hidden = torch.tanh(hidden)
        return self.last(hidden)


def step(around: Any, inside: Any = None) -> None:
    model = Net()
    engine = PrivacyEngine(accountant="rdp")
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=ROWS),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
    )
    before = [m for m in _get_current_function_mode_stack() if isinstance(m, Mixes | Looks)]
    x, y = next(iter(loader))
    model(x)  # checked
    model.inside = inside or nullcontext()
    Mixes.on = True
    try:
        with around:
            out = model(x)
        F.cross_entropy(out, y).backward()
    finally:
        Mixes.on = False
        left = [m for m in _get_current_function_mode_stack() if isinstance(m, Mixes | Looks)]
        assert left == before
    optimizer.step()


def test_what_a_mode_around_the_model_does_is_followed():
    with pytest.raises(PrivacyError, match="examples of a batch meet"):
        step(Mixes())


def test_modes_below_autograd_are_refused():
    with pytest.raises(PrivacyError, match="MixesBelow, a TorchDispatchMode"):
        step(MixesBelow())
    with pytest.raises(PrivacyError, match="MixesBelow, a TorchDispatchMode"):
        step(nullcontext(), MixesBelow())


@pytest.mark.parametrize(
    "mode",
    [
        Looks,
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.detect_anomaly(check_nan=False),
    ],
)
def test_modes_that_change_nothing_are_no_matter(mode):
    step(mode())
    step(nullcontext(), mode())


def test_modes_leave_in_their_order():
    with Looks() as outer:
        step(Looks())
        assert _get_current_function_mode_stack()[-1] is outer
