"""Mistakes that other private trainers made, one test per row of docs/pitfalls.md.

Rows whose test fits better elsewhere (noise, lots, the loop, accountants) are listed in that table.
The sums are read off the public API: no noise, divisor 1 (`lot_sum`), so that whatever the loop
does is inside what is tested. "The bound" is C (1 + 1e-6) in float32.
"""

from __future__ import annotations

import collections
import copy
import io
import itertools
import json
import math
import pickle
import re
import secrets
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support.garbage import gone
from tests.support.loops import (
    epoch,
    lot_sum,
    mean_loss,
    mlp,
    private,
    records,
    step,
    weights,
)
from tests.support.zoo import Odd, Tied
from vestige import PrivacyEngine, PrivacyError, UnsupportedModel, VestigeError
from vestige.sampling.lots import draw_lot
from vestige.sampling.streams import Randomness

BOUND = 1 + 1e-6


def without(dataset, index=-1):
    """The neighbour of `dataset` that lacks one record (the last, unless told otherwise)."""
    index %= len(dataset)
    return TensorDataset(*(torch.cat([t[:index], t[index + 1 :]]) for t in dataset.tensors))


def one_output(model, batch):
    """<cotangent, output>, averaged over the rows: the gradient is given by the record itself."""
    out = model(batch[0])
    return (out * batch[1]).flatten(1).sum(1).mean()


def contribution(model, x, g, **options):
    """The norm of what one record, with input x and output gradient g, adds to a sum, over C."""
    total = lot_sum(model, TensorDataset(x[None], g[None]), one_output, **options)
    return float(total.double().norm()) / options.get("max_grad_norm", 1.0)


# -- neighbouring datasets ------------------------------------------------------------------


def test_pitfall_03_every_public_number_is_the_same_on_neighbours():
    """D and D' are told apart by the weights alone: the declared size stands for both."""
    runs = []
    for dataset in (records(24), without(records(24)), without(records(24), 3)):
        run = private(
            dataset=dataset,
            dataset_size=24,
            batch_size=5,
            max_physical_batch_size=2,
            clipping="per_layer",
        )
        engine, model, optimizer, loader = run
        epoch(model, optimizer, loader)
        runs.append(
            (
                engine.plan,
                engine.state_dict() | {"run": ""},  # a name drawn at random
                engine.ledger.events,
                engine.released,
                engine.get_epsilon(1e-5),
                engine.caveats(),
                len(loader),
                optimizer.state_dict()["param_groups"],
            )
        )
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("physical", [None, 2])
def test_replay_lots_of_neighbours_differ_by_one_record(clipping, physical):
    """Same key, same weights: a lot's sum moves by at most the bound, and only with the record."""
    dataset = records(24, scale=30.0, dtype=torch.float64)
    sums = {}
    for name, data in (("D", dataset), ("D'", without(dataset))):
        model = mlp(dtype=torch.float64)
        _, model, optimizer, loader = private(
            model,
            data,
            dataset_size=24,
            noise_multiplier=0.0,
            max_grad_norm=0.4,
            clipping=clipping,
            max_physical_batch_size=physical,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        )
        sums[name] = []
        for _ in range(5):
            for x, y in loader:
                step(model, optimizer, x, y)
                if model[0].weight.grad is not None:
                    sums[name].append(torch.cat([p.grad.flatten() for p in model.parameters()]) * 6)
    present = [23 in draw_lot(Randomness(11), t, 24, 6 / 24) for t in range(20)]
    assert len(sums["D"]) == len(sums["D'"]) == 20
    assert 0 < sum(present) < 20
    for a, b, there in zip(sums["D"], sums["D'"], present, strict=True):
        distance = float((a - b).norm())
        assert distance <= 0.4 * (1 + 1e-9)
        assert (distance > 1e-9) == there


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(48, 3),
        )  # fmt: skip


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.cell(x.flatten(1).view(len(x), 4, 4))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(len(x), 4, 4)).mean(1)[:, :3]


class Twice(nn.Module):
    """A layer that is used twice, a tied one, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.mix, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = self.mix(torch.tanh(self.mix(x.flatten(1)))) * self.scale
        return F.linear(h, self.mix.weight)[:, :3]


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


NETS = (Plain, Convolutional, Sequence, Attention, Twice)


@settings(max_examples=40, deadline=None)
@given(
    net=st.sampled_from(NETS),
    clipping=st.sampled_from(["flat", "per_layer"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e3, 1e9, 1e18, 1e30, math.inf, math.nan]),
    where=st.sampled_from(["input", "target"]),
    bound=st.sampled_from([1e-3, 1.0, 50.0]),
    physical=st.sampled_from([None, 1, 3]),
)
def test_pitfall_11_one_record_moves_the_sum_by_at_most_the_sensitivity(
    net, clipping, dtype, reduction, seed, size, where, bound, physical
):
    """Random nets and data, and a record as bad as it can be."""
    torch.manual_seed(seed)
    model = net().to(dtype)
    x, y = torch.randn(5, 1, 4, 4, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    (x if where == "input" else y)[4] *= size
    dataset = TensorDataset(x, y)

    def loss(model, batch):
        losses = (model(batch[0]) - batch[1]).square().sum(1)
        return losses.mean() if reduction == "mean" else losses.sum()

    options = {
        "clipping": clipping,
        "max_grad_norm": bound,
        "loss_reduction": reduction,
        "max_physical_batch_size": physical,
    }
    larger = lot_sum(model, dataset, loss, **options)
    smaller = lot_sum(model, without(dataset), loss, **options)
    assert torch.isfinite(larger).all()
    # In float32 the other four records are added up in another order: rounding of their sum.
    slack = 1e-9 if dtype == torch.float64 else 1e-5
    assert float((larger - smaller).double().norm()) <= bound * (1 + slack)


def test_pitfall_11_the_bound_is_reached_and_is_joint():
    """The sensitivity is not declared too large either: an extreme record uses all of it."""
    x, y = torch.randn(1, 16) * 100, torch.tensor([[1e4, -1e4, 1e4]])
    for clipping, bound in (("flat", 0.5), ("per_layer", 0.5), ("per_layer", [0.3, 0.4])):
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))
        data = TensorDataset(x, y)
        total = lot_sum(model, data, one_output, clipping=clipping, max_grad_norm=bound)
        assert float(total.norm()) == pytest.approx(0.5, rel=1e-5)


def test_pitfall_28_replacing_a_record_would_cost_twice_the_bound():
    """Why the plan says "add or remove": a replaced record moves the sum by up to 2 C."""
    engine, *_ = private()
    assert engine.plan.adjacency == "add or remove one record"
    x, g = torch.randn(1, 5) * 100, torch.full((1, 3), 100.0)
    model = nn.Linear(5, 3)
    one = lot_sum(model, TensorDataset(x, g), one_output)
    other = lot_sum(model, TensorDataset(x, -g), one_output)
    assert float((one - other).norm()) == pytest.approx(2.0, rel=1e-5)


# -- rounding -------------------------------------------------------------------------------


def cancelling(size, second):
    """Candidates (x, g) of two positions that almost cancel; constant rows round all one way."""
    for value, step_ in itertools.product((0.905, 0.656, 0.31, 0.7, 0.239), (0.004, 0.0023, 0.015)):
        x = torch.full((2, size), value)
        x[1] *= 1 + step_
        g = torch.full((2, second), 3e5)
        g[1] *= -1
        yield x, g


@pytest.mark.parametrize(("width", "out"), [(1024, 1024), (8192, 64)])
def test_pitfall_11_cancelling_time_steps_stay_within_the_bound_linear(width, out):
    """Norms from Gram matrices lose what cancels; what is added must stay within C all the same."""
    layer = nn.Linear(width, out, bias=False)
    worst = max(contribution(layer, x, g) for x, g in cancelling(width, out))
    assert worst <= BOUND


@pytest.mark.parametrize("width", [768, 4096])
def test_pitfall_11_cancelling_time_steps_stay_within_the_bound_embedding(width):
    table, worst = nn.Embedding(3, width), 0.0
    for x, _ in cancelling(width, 1):
        g = x * torch.tensor([[1e6], [-1e6]])
        worst = max(worst, contribution(table, torch.zeros(2, dtype=torch.long), g))
    assert worst <= BOUND


@pytest.mark.parametrize("channels", [512, 2048])
def test_pitfall_11_cancelling_positions_stay_within_the_bound_convolution(channels):
    layer, worst = nn.Conv2d(channels, 256, 1, bias=False), 0.0
    for x, g in cancelling(channels, 256):
        worst = max(worst, contribution(layer, x.t().unsqueeze(2), g.t().unsqueeze(2)))
    assert worst <= BOUND


class Difference(nn.Module):
    """One layer used on both halves of the input, their outputs subtracted."""

    def __init__(self, width, out):
        super().__init__()
        self.layer = nn.Linear(width, out, bias=False)

    def forward(self, x):
        return self.layer(x[:, 0]) - self.layer(x[:, 1])


@pytest.mark.parametrize(("width", "out"), [(1024, 1024), (8192, 64)])
def test_pitfall_11_cancelling_uses_stay_within_the_bound_tied(width, out):
    model = Difference(width, out)
    worst = max(contribution(model, x, g[0]) for x, g in cancelling(width, out))
    assert worst <= BOUND


@pytest.mark.parametrize("width", [64, 256])
def test_pitfall_11_cancelling_random_time_steps_stay_within_the_bound(width):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    sign = torch.tensor([1.0, -1.0]).repeat(4).view(8, 1)
    for digits in range(8):
        base = torch.randn(1, width, generator=generator)
        x = base + 10.0**-digits * torch.randn(8, width, generator=generator)
        g = 1e4 * torch.randn(1, width, generator=generator) * sign
        assert contribution(layer, x, g) <= BOUND


@pytest.mark.parametrize(("width", "out"), [(784, 10), (3072, 10), (65536, 2), (10**6, 1)])
def test_pitfall_35_norms_of_many_equal_numbers_do_not_overshoot(width, out):
    """A float32 sum of squares that are all equal rounds one way: the norm must not suffer."""
    layer = nn.Linear(width, out, bias=False)
    for value in (0.1, 0.3, 0.55, 0.77, 0.93):
        x, g = torch.full((width,), value), torch.full((out,), 40.0)
        assert contribution(layer, x, g) <= BOUND


@pytest.mark.parametrize("width", [4096, 100_000])
def test_pitfall_35_norms_of_a_large_bias_do_not_overshoot(width):
    layer = nn.Linear(1, width)
    for value in (0.1, 0.3, 0.55, 0.77, 0.93):
        assert contribution(layer, torch.zeros(1), torch.full((width,), value)) <= BOUND


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("rows", [1, 256])
def test_pitfall_35_tiny_inputs_with_huge_gradients_stay_within_the_bound(rows, sequence):
    """|a|^2 underflows to zero while |a| |g| is far above C: a norm of zero would clip nothing."""
    width, bound = 784, 1e-3
    x, g = torch.zeros(rows, width), torch.zeros(rows, 2)
    x[0], g[0] = 2.6e-23, 1e18 * rows
    if sequence:
        x, g = x.unsqueeze(1).repeat(1, 3, 1), g.unsqueeze(1).repeat(1, 3, 1)
    layer = nn.Linear(width, 2, bias=False)
    total = lot_sum(layer, TensorDataset(x, g), one_output, max_grad_norm=bound)
    assert float(total.double().norm()) <= bound * BOUND


@pytest.mark.parametrize("bound", [1.0, 1e-3])
@pytest.mark.parametrize("kind", ["product", "input", "bias"])
def test_pitfall_35_gradients_beyond_float32_stay_within_the_bound(kind, bound):
    """Clip factors near 1e-45 are rounded to a handful of values, by up to half of themselves."""
    width = 1 if kind == "product" else 300
    layer = nn.Linear(width, width, bias=kind == "bias")
    for power in range(24):
        if kind == "product":
            size = 10 ** (20 + power / 10)
            x, g = torch.full((width,), size), torch.full((width,), size)
        else:
            size = 10 ** (30 + power / 3)
            x, g = torch.full((width,), size), torch.full((width,), 1e-3 * (1 + power / 24))
            if kind == "bias":
                x, g = torch.zeros(width), x
        assert contribution(layer, x, g, max_grad_norm=bound) <= BOUND


def test_pitfall_35_many_equal_looks_at_one_row_stay_within_the_bound():
    """512 equal terms added one after the other round all one way, after the norm was taken."""
    table = nn.Embedding(2, 1024)
    for value in (0.1, 0.3, 0.55, 0.77, 0.93):
        g = torch.full((512, 1024), 100 * value)
        assert contribution(table, torch.zeros(512, dtype=torch.long), g) <= BOUND


def test_pitfall_35_low_precision_models_keep_the_bound():
    for cast in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(cast)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(1, 64, generator=generator).to(cast)
            g = 10 * torch.randn(1, 8, generator=generator).to(cast)

            def loss(model, batch):
                return (model(batch[0]).float() * batch[1].float()).sum(1).mean()

            # The last step rounds the released gradient to the parameters' precision.
            rounding = 1 + torch.finfo(cast).eps
            total = lot_sum(model, TensorDataset(x, g), loss, max_grad_norm=0.5)
            assert float(total.double().norm()) <= 0.5 * rounding


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_pitfall_35_a_backward_inside_autocast_keeps_the_bound(clipping):
    """Norms and sums must not be taken in bfloat16 because the loop's context says so."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.tensor([1.0, -1.0]).repeat(4).view(8, 1)
    base = torch.randn(1, 64, generator=generator)
    for noise in (1e-3, 1e-2, 3e-2, 0.3):
        x = base + noise * torch.randn(8, 64, generator=generator)
        g = 1e3 * torch.randn(1, 64, generator=generator) * sign
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        _, model, optimizer, loader = private(
            model,
            TensorDataset(x[None], g[None]),
            1,
            optimizer,
            noise_multiplier=0.0,
            clipping=clipping,
        )
        batch = next(iter(loader))
        with torch.autocast("cpu", torch.bfloat16):
            one_output(model, batch).backward()
            optimizer.step()
        total = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert float(total.double().norm()) <= BOUND


def test_autocast_models_are_self_checked_and_trained():
    """The check must run under autocast too: a skipped one is a warning, here an error."""
    model = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    dataset = TensorDataset(torch.randn(24, 1, 5), torch.randint(0, 3, (24,)))
    engine, model, optimizer, loader = private(model, dataset)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert engine.released == len(loader)


# -- bad records ----------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_pitfall_10_a_record_that_is_not_finite_contributes_nothing(net, value, clipping):
    torch.manual_seed(0)
    model = net()
    x, y = torch.randn(6, 1, 4, 4), torch.randn(6, 3)
    x[2, 0, 1, 1] = value
    dataset = TensorDataset(x, y)
    poisoned = lot_sum(model, dataset, one_output, clipping=clipping)
    clean = lot_sum(model, without(dataset, 2), one_output, clipping=clipping)
    assert torch.isfinite(poisoned).all()
    # A layer whose own gradient is finite may count on its own; the others hear nothing of it.
    whole = clipping == "flat" or math.isnan(value)
    assert float((poisoned - clean).norm()) <= (1e-5 if whole else 1 + 1e-5)


def test_pitfall_10_the_weights_stay_finite():
    x, y = torch.randn(24, 5), torch.randint(0, 3, (24,))
    x[::2] = math.nan
    engine, model, optimizer, loader = private(dataset=TensorDataset(x, y))
    for _ in range(3):
        epoch(model, optimizer, loader)
    assert torch.isfinite(weights(model)).all()
    assert engine.released == 3 * len(loader)


def test_pitfall_09_empty_lots_release_and_cost_like_any_other():
    """Almost every lot is empty: the loop takes all of them, each is noised and each is charged."""
    engine, model, optimizer, loader = private(
        dataset=records(3), batch_size=1, dataset_size=300, max_physical_batch_size=2
    )
    empty = 0
    for number, (x, y) in enumerate(loader, 1):
        before, released = weights(model), engine.released
        step(model, optimizer, x, y)
        empty += not x.any()
        # Every lot comes in ceil((1 + 6) / 2) batches, and ends with the last of them.
        assert engine.released - released == (number % 4 == 0)
        assert (weights(model) != before).all() == (number % 4 == 0)
    assert number == len(loader) == 4 * 300
    assert empty > 4 * 300 - 20
    assert engine.released == engine.ledger.steps == 300


def test_pitfall_09_an_empty_lot_is_nothing_but_noise():
    """Its stand-in row has a gradient like any row; none of it may reach the sum."""
    engine, model, optimizer, loader = private(
        dataset=records(3), batch_size=1, sample_rate=1e-12, noise_multiplier=0.0
    )
    for x, y in loader:
        step(model, optimizer, x, y)
        assert not any(p.grad.any() for p in model.parameters())
    assert engine.released == 3


# -- raw gradients --------------------------------------------------------------------------


def test_pitfall_20_a_gradient_of_a_frozen_parameter_never_reaches_the_optimizer():
    """Unfrozen for the backward pass and frozen again for the step, as GAN loops do."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    _, model, optimizer, loader = private(model)
    with pytest.raises(VestigeError):
        for x, y in loader:
            optimizer.zero_grad()
            model[0].weight.requires_grad_(True)
            F.cross_entropy(model(x), y).backward()
            model[0].weight.requires_grad_(False)
            optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_pitfall_20_an_old_gradient_of_a_frozen_parameter_is_not_applied():
    model = mlp()
    F.cross_entropy(model(torch.randn(4, 5)), torch.zeros(4, dtype=torch.long)).backward()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    _, model, optimizer, loader = private(model)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
        except VestigeError:
            break
    assert all(torch.equal(before[k], v) for k, v in model[0].state_dict().items())


OUTSIDE = {
    "a penalty": lambda m, x: m(x).sum() + m[0].weight.square().sum(),
    "a part of the model": lambda m, x: m[2](m[1](m[0](x))).sum(),
    "its forward method": lambda m, x: m.forward(x).sum(),
    "functional code": lambda m, x: F.linear(m(x), m[2].weight.t()).sum(),
    "a written slice": lambda m, x: _written(m(x), m[2].bias),
}


def _written(out, value):
    out = out.clone()
    out[:, :] = value
    return out.sum()


@pytest.mark.parametrize("name", OUTSIDE)
def test_pitfall_20_a_parameter_used_outside_the_model_is_refused(name):
    engine, model, optimizer, loader = private()
    x, _ = next(iter(loader))
    with pytest.raises(UnsupportedModel, match="not captured per example"):
        OUTSIDE[name](model, x).backward()
    with pytest.raises(PrivacyError):
        optimizer.step()
    assert engine.released == 0


def test_pitfall_20_evaluation_mode_is_captured_all_the_same():
    """Opacus' hooks were off in eval mode, and the raw gradient went through."""
    model = mlp()
    model.eval()
    expected = lot_sum(mlp(), records())
    assert torch.allclose(lot_sum(model, records()), expected)


@pytest.mark.filterwarnings("ignore:the self-check was skipped")
def test_pitfall_20_gradient_checkpointing_is_right_or_refused():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
            self.reentrant = reentrant

        def body(self, x):
            return torch.tanh(self.first(x))

        def forward(self, x):
            x = x.requires_grad_() if self.reentrant else x
            return self.last(checkpoint(self.body, x, use_reentrant=self.reentrant))

    plain = mlp()
    models = [Checkpointed(reentrant) for reentrant in (False, True)]
    for model in models:
        model.first.load_state_dict(plain[0].state_dict())
        model.last.load_state_dict(plain[2].state_dict())
    assert torch.equal(lot_sum(models[0], records()), lot_sum(plain, records()))
    with pytest.raises(VestigeError, match="use_reentrant=False"):
        lot_sum(models[1], records())


def test_pitfall_18_a_loss_scaler_cannot_skip_a_release_unnoticed():
    engine, model, optimizer, loader = private()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError, match=r"GradScaler \(leave it out: bf16 autocast needs no"):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):  # torch's own
        scaler.step(optimizer)
    assert engine.released == 0
    assert torch.equal(weights(model), before)


# -- examples that meet ---------------------------------------------------------------------


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        out = self.layer(x)
        return out - out.mean(0)


class OverTheBatch(nn.Module):
    """Attention whose sequence axis is the batch."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(5, 1, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(0)
        return self.attend(x, x, x)[0].squeeze(0)[:, :3]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return F.batch_norm(self.layer(x), None, None, training=True)


class Rolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x + x.roll(1, 0))


class MixedInTraining(nn.Module):
    """Mixup inside the model: two examples meet, in training mode only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        if self.training:
            x = 0.5 * x + 0.5 * x[torch.randperm(len(x))]
        return self.layer(x)


COUPLED = (Centred, OverTheBatch, Functional, Rolled, MixedInTraining)


@pytest.mark.parametrize("net", COUPLED, ids=lambda net: net.__name__)
def test_pitfall_21_models_whose_examples_meet_are_refused(net):
    engine, model, optimizer, loader = private(net())
    with pytest.raises(PrivacyError):
        epoch(model, optimizer, loader)
    assert engine.released == 0


def test_pitfall_21_a_refused_model_stays_refused():
    """Running the cell again, or catching the error, must not get past the check."""
    engine, model, optimizer, loader = private(Centred())
    for _ in range(3):
        with pytest.raises(PrivacyError, match="examples of a batch meet in 'mean'"):
            epoch(model, optimizer, loader)
        engine.abandon_lot()
    assert engine.released == 0


def test_pitfall_21_coupling_is_found_under_autocast():
    _, model, _, loader = private(Centred())
    x, _ = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PrivacyError):
        model(x)


def test_pitfall_21_dropout_is_no_coupling():
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    engine, model, optimizer, loader = private(model)
    epoch(model, optimizer, loader)
    assert engine.released == len(loader)


class TimeFirst(nn.Module):
    """Puts its positions first, unannounced: with as many rows as positions it looks right."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def test_pitfall_21_positions_are_not_taken_for_rows_when_there_are_as_many():
    """Four records of four positions: were positions clipped, one record could reach 4 C."""
    x = torch.zeros(4, 4, 5)
    x[0] = 100.0
    dataset = TensorDataset(x, torch.full((4, 4, 3), 100.0))
    try:
        total = lot_sum(TimeFirst(), dataset, one_output)
    except VestigeError:
        return
    assert float(total.norm()) <= BOUND


class Tokens(Dataset):
    """Sequences with padding: (x, where it is padding)."""

    def __init__(self, x, pad):
        self.x, self.pad = x, pad

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.pad[i]


class Unpadded(nn.Module):
    """Works on the real tokens only, as flash attention does: rows of several examples at once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x, pad):
        out = torch.zeros_like(x)
        out[~pad] = self.layer(x[~pad])
        return out.sum(1)


def test_pitfall_21_packed_tokens_are_refused_or_attributed_to_their_example():
    """3 + 1 tokens of two examples look like 2 rows of 2: one example would sit in both rows."""
    up = torch.full((4,), 100.0)
    x = torch.stack([torch.stack([up, up, 3 * up, up]), torch.stack([-up, up, up, up])])
    pad = torch.tensor([[False, False, False, True], [False, True, True, True]])

    def loss(model, batch):
        return model(*batch).sum(1).mean()

    try:
        both = lot_sum(Unpadded(), Tokens(x, pad), loss)
        one = lot_sum(Unpadded(), Tokens(x[1:], pad[1:]), loss)
    except VestigeError:
        return
    assert float((both - one).norm()) <= BOUND


@pytest.mark.parametrize("net", (*NETS, Odd, Tied), ids=lambda net: net.__name__)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_pitfall_21_an_example_does_not_feel_another(net, clipping):
    """Example i's part of the sum is the same whatever example j is."""
    torch.manual_seed(0)
    model = net().double()
    if net is Tied:
        i, j, k = (torch.randint(0, 7, (1, 5)) for _ in range(3))
        target = torch.randn(1, 5, 7, dtype=torch.double)
    else:
        shape, out = ((1, 3), 2) if net is Odd else ((1, 1, 4, 4), 3)
        i, j, k = (torch.randn(shape, dtype=torch.double) for _ in range(3))
        target = torch.randn(1, out, dtype=torch.double)

    def total(*rows):
        data = TensorDataset(torch.cat(rows), target.repeat(len(rows), *[1] * (target.ndim - 1)))
        return lot_sum(model, data, one_output, clipping=clipping, max_grad_norm=0.1)

    with_j = total(i, j) - total(j)
    with_k = total(i, k) - total(k)
    assert with_j.norm() > 1e-3
    assert torch.allclose(with_j, with_k, atol=1e-12)


class Average(nn.Module):
    """Keeps a running mean of its inputs; how, is up to `way`."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(5, 3), way
        if way in ("frozen", "trained"):
            self.mean = nn.Parameter(torch.zeros(5), requires_grad=way == "trained")
        else:
            self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            new = 0.9 * self.mean.detach() + 0.1 * x.detach().mean(0)
            if self.way == "replaced":
                self.mean = new
            elif self.way == "data":
                self.mean.data.copy_(new)
            else:
                with torch.no_grad():
                    self.mean.copy_(new)
        return self.layer(x - self.mean)


@pytest.mark.parametrize("way", ["in place", "replaced", "data", "frozen", "trained"])
def test_pitfall_22_statistics_of_private_batches_are_refused(way):
    engine, model, optimizer, loader = private(Average(way))
    with pytest.raises(PrivacyError, match="mean"):
        epoch(model, optimizer, loader)
    assert engine.released == 0


def test_pitfall_22_spectral_norm_is_refused():
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    engine, model, optimizer, loader = private(model)
    with pytest.raises(PrivacyError):
        epoch(model, optimizer, loader)
    assert engine.released == 0


def test_pitfall_23_a_tied_layer_is_clipped_once():
    """Two uses of one weight are one gradient: bounded by C together, not each."""
    torch.manual_seed(0)
    model = Twice()
    x, g = torch.randn(1, 16) * 50, torch.randn(1, 3) * 1e4
    for clipping in ("flat", "per_layer"):
        data = TensorDataset(x, g)
        total = lot_sum(model, data, one_output, clipping=clipping, max_grad_norm=0.5)
        assert 0.49 < float(total.norm()) <= 0.5 * BOUND


# -- units ----------------------------------------------------------------------------------


def test_pitfall_24_augmentations_of_an_example_are_clipped_together():
    """Four views of each record in one backward: still C a record."""

    def loss(model, batch):
        x, y = batch
        views = [x, x + 0.1, x * 1.1, x.flip(1)]
        return sum(100 * F.cross_entropy(model(v), y) for v in views)

    dataset = records(1, scale=5.0)
    for clipping in ("flat", "per_layer"):
        total = lot_sum(mlp(), dataset, loss, clipping=clipping, max_grad_norm=0.5)
        assert 0.3 < float(total.norm()) <= 0.5 * BOUND


def test_pitfall_24_views_as_extra_rows_are_refused():
    def twice(rows):
        x = torch.stack([x for x, _ in rows])
        y = torch.stack([y for _, y in rows])
        return torch.cat([x, x.flip(1)]), torch.cat([y, y])

    model = mlp()
    _, optimizer, loader = PrivacyEngine(noise_seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=6, collate_fn=twice),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(PrivacyError, match="not the one the private loader handed out"):
        epoch(model, optimizer, loader)


def test_pitfall_39_a_sequence_is_one_unit_and_padding_is_none():
    """A language model: C for all tokens of a sequence together; the padding row never moves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7))
    x, y = torch.randint(1, 7, (4, 50)), torch.randint(0, 7, (4, 50))
    x[:, 30:] = 0

    def loss(model, batch):
        return 1e3 * F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    sums = [lot_sum(model, TensorDataset(x[:n], y[:n]), loss) for n in range(1, 5)]
    assert float(sums[0].norm()) == pytest.approx(1.0, rel=1e-5)
    for before, after in itertools.pairwise(sums):
        assert float((after - before).norm()) == pytest.approx(1.0, rel=1e-4)
    assert not sums[-1][:4].any()


# -- secrets --------------------------------------------------------------------------------


def test_pitfall_16_two_resumed_runs_never_share_noise_or_lots():
    engine, model, optimizer, loader = private(engine=PrivacyEngine())
    epoch(model, optimizer, loader)
    state = json.loads(json.dumps(engine.state_dict()))
    noise = []
    for _ in range(2):
        fresh, twin, optimizer, loader = private(engine=PrivacyEngine())
        fresh.load_state_dict(state)
        twin.load_state_dict(model.state_dict())
        step(twin, optimizer, *next(iter(loader)))
        noise.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
        assert fresh.released == 5
    assert not torch.equal(*noise)
    # Standard deviation C / 6 on each coordinate: equal noise would leave next to nothing.
    assert float((noise[0] - noise[1]).norm()) > 0.5


def test_pitfall_34_noise_comes_from_the_operating_system_and_not_from_torch(monkeypatch):
    asked = []

    def token(count):
        asked.append(count)
        return token_bytes(count)

    token_bytes = secrets.token_bytes
    monkeypatch.setattr(secrets, "token_bytes", token)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        engine, model, optimizer, loader = private(engine=PrivacyEngine(seed=0))
        state = torch.get_rng_state()
        epoch(model, optimizer, loader)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(weights(model))
        assert engine.caveats()[0].startswith("the number of records")
    assert asked == [8, 32, 8, 32]  # the name of the run, and the key of its lots and noise
    assert not torch.equal(*runs)


def test_pitfall_34_a_seed_leaves_no_trace():
    seed = 1234567890123
    engine, model, optimizer, loader = private(engine=PrivacyEngine(noise_seed=seed))
    epoch(model, optimizer, loader)
    text = json.dumps(engine.state_dict()) + repr(engine.ledger)
    for shown in (engine, engine.plan, loader):
        text += repr(shown) + shown._repr_html_()
    assert str(seed) not in text
    assert "not private towards anyone who knows the seed" in engine.caveats()[0]


def test_pitfall_41_nothing_that_is_saved_holds_an_example():
    marker = 1234.5678
    x = torch.full((24, 5), marker)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, model, optimizer, loader = private(
        model,
        TensorDataset(x, torch.zeros(24, dtype=torch.long)),
        optimizer=optimizer,
        max_physical_batch_size=2,
    )
    batches = iter(loader)
    for _ in range(7):
        step(model, optimizer, *next(batches))
        scheduler.step()
    a, b = next(batches)
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    needle = torch.full((2,), marker).numpy().tobytes()
    saved = [model, model.state_dict(), optimizer, optimizer.state_dict(), scheduler.state_dict()]
    for thing in [*saved, engine.state_dict(), engine.plan, scheduler]:
        file = io.BytesIO()
        torch.save(thing, file)
        assert needle not in file.getvalue()
    for secret in (engine, loader):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(secret)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_pitfall_41_a_batch_is_forgotten_after_its_step(clipping):
    """No collate function, hook or buffer keeps an example alive (Opacus kept the first batch)."""
    rows = [(x, y) for x, y in records()]
    _, model, optimizer, loader = private(dataset=rows, clipping=clipping)
    kept = []
    for x, y in loader:
        step(model, optimizer, x, y)
        kept.append(weakref.ref(x))
    del x, y
    assert gone(*kept)


Found = collections.namedtuple("Found", ["epsilon", "noise"])


def test_pitfall_07_the_accountant_that_calibrates_is_the_one_that_reports():
    """Different accountants need different noise for the same target; each keeps its own word."""
    found = {}
    for accountant in ("pld", "rdp", "rdp_classic"):
        model = mlp()
        engine = PrivacyEngine(accountant=accountant, noise_seed=1)
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records(), batch_size=6),
            target_epsilon=4.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )
        epoch(model, optimizer, loader)
        found[accountant] = Found(engine.get_epsilon(1e-5), engine.plan.noise_multiplier)
    assert all(3.9 < f.epsilon <= 4.0 for f in found.values())
    assert found["pld"].noise < found["rdp"].noise < found["rdp_classic"].noise


def test_pitfall_19_an_old_gradient_is_not_used_twice():
    """Without zero_grad the last release still lies in .grad; it must not be added to the next."""
    results = []
    for clear in (True, False):
        _, model, optimizer, loader = private()
        for x, y in loader:
            if clear:
                optimizer.zero_grad()
            mean_loss(model, (x, y)).backward()
            optimizer.step()
        results.append(weights(model))
    assert torch.equal(*results)


def test_every_row_and_every_test_of_the_table_exists():
    root = Path(__file__).parents[2]
    table = (root / "docs" / "pitfalls.md").read_text()
    rows = re.findall(r"^\| (\d+) [CTNDF] \|", table, flags=re.MULTILINE)
    assert rows == [str(n) for n in range(1, 64)]
    sources = "\n".join(path.read_text() for path in (root / "tests").rglob("*_test.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    assert set(re.findall(r"`(test_\w+)`", table)) - tests == set()
    # And the other way round: a test of this file that carries a number is in the table.
    for name in re.findall(r"^def (test_pitfall_\w+)\(", Path(__file__).read_text(), re.MULTILINE):
        number = int(name.split("_")[2])
        row = next(line for line in table.splitlines() if line.startswith(f"| {number} "))
        family = "cancelling" in name or f"`{name}`" in row
        assert family or name in ALSO, f"{name} is not in row {number} of docs/pitfalls.md"


ALSO = {
    "test_pitfall_21_coupling_is_found_under_autocast",
    "test_pitfall_21_dropout_is_no_coupling",
}
