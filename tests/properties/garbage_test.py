"""Garbage in: every bad record, dataset and model works, or gives one clear error.

"Works" means that the record moves the clipped sum, the input of `Door.release`, by at most its
bound C, and that the other records' part stays what it was. "One clear error" means an error of
vestige.errors (or, where only the user's own loss is at fault, torch's) whose message names the
cause, after which `engine.abandon_lot()` charges the lot that was drawn and training goes on.

What the guarantee does not cover: an error that only one private record causes (a label out of
range, a row that cannot be read) tells whoever sees it, or sees the run end early, that the record
is there. Charging the lot keeps epsilon right for everything that is released; the error itself,
its text and its moment are outside of the guarantee and should stay with those who may see the
data. Records that can be counted as nothing (NaN, infinity, overflow) therefore raise no error.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support.program import plain, run
from tests.support.replays import PRIVATE, SMALL, VARIANTS, both, small_settings
from tests.support.zoo import Odd, Tied
from vestige import ConfigError, PrivacyEngine, PrivacyError, UnsupportedModel, VestigeError
from vestige.audit.verify.replay import compare
from vestige.audit.verify.runs import neighbour, records
from vestige.gradients.clipping import Auto
from vestige.release.door import Door
from vestige.train.config import TrainConfig
from vestige.train.training import train

BOUND = 0.7
FORMS = {
    "flat": "flat",
    "per_layer": "per_layer",
    "auto": "auto",
    "auto_per_layer": "auto_per_layer",
    "auto without stability": Auto("flat", 0.0),
    "quantile": "quantile",
}


@dataclass
class Lot:
    """What one lot brought to the door."""

    values: torch.Tensor
    bounds: tuple[float, ...]
    counts: torch.Tensor | None
    segments: list[slice]


@pytest.fixture
def lots(monkeypatch):
    """The clipped sums that the engine releases, in order."""
    seen, release = [], Door.release

    def spy(door, clipped, *args, **kwargs):
        counts = None if clipped._counts is None else clipped._counts.clone()
        seen.append(Lot(clipped._values.clone(), clipped.bounds, counts, door.segments))
        return release(door, clipped, *args, **kwargs)

    monkeypatch.setattr(Door, "release", spy)
    return seen


def private(model, dataset, **options):
    """A run whose every lot is the whole dataset, which alone tells it from another."""
    engine = PrivacyEngine("rdp", noise_seed=3)
    known = {"sample_rate": 1.0, "dataset_size": 100, "noise_multiplier": 1.0}
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=4),
        **known | {"max_grad_norm": BOUND} | options,
    )


def by_row(engine, model, x, y):
    engine.backward(F.cross_entropy(model(x), y, reduction="none"))


def by_mean(engine, model, x, y):
    F.cross_entropy(model(x), y).backward()


def squared(engine, model, x, y):
    engine.backward((model(x) - y).square().flatten(1).sum(1))


def sum_of(lots, make, dataset, loss=by_row, **options):
    """The clipped sum of one lot with all of the dataset."""
    engine, model, optimizer, loader = private(make(), dataset, **options)
    for batch in loader:
        loss(engine, model, *batch)
        optimizer.step()
        if engine.released:
            break
    return lots.pop()


def check_bound(lots, make, clean, garbage, loss=by_row, rounding=1e-11, **options):
    """The garbage record moves the sum by its own bounded part, and nobody else's."""
    both_of = tuple(torch.cat(pair) for pair in zip(clean, garbage, strict=True))
    whole, rest, alone = (
        sum_of(lots, make, TensorDataset(*data), loss, **options)
        for data in (both_of, clean, garbage)
    )
    move = whole.values - rest.values
    assert whole.values.isfinite().all()
    # One example alone: no other is added up in another order.
    assert float(alone.values.double().norm()) <= BOUND * (1 + 1e-6)
    for segment, bound in zip(alone.segments, alone.bounds, strict=True):
        assert float(alone.values[segment].double().norm()) <= bound * (1 + 1e-6)
    assert float((move - alone.values).norm()) <= rounding  # the others' part is what it was
    if alone.counts is not None:
        assert float((whole.counts - rest.counts).abs().max()) <= 0.5
    return alone.values


# -- records that work ----------------------------------------------------------------------


def seeded(make):
    def made():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make()

    return made


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        )


class Sequences(nn.Module):
    """Positions, a recurrent layer, a normalisation, attention, and a tuple that comes out."""

    def __init__(self):
        super().__init__()
        self.memory, self.norm = nn.GRU(4, 4, batch_first=True), nn.LayerNorm(4)
        self.attend, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        h, last = self.memory(x.unflatten(1, (4, 4)))
        h = self.norm(h)
        return self.out(self.attend(h, h, h)[0].mean(1)), last


class Fallback(nn.Module):
    """A layer that runs row by row, and weights that are used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.odd = nn.Linear(16, 3), nn.Linear(16, 16), Odd()

    def forward(self, x):
        h = self.mix(torch.tanh(self.mix(x)))
        return F.pad(self.odd(self.first(h)), (0, 1))


def of_tuple(engine, model, x, y):
    engine.backward(F.cross_entropy(model(x)[0], y, reduction="none"))


MODELS = {
    "linear": (
        seeded(lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()),
        by_row,
    ),
    "images": (seeded(lambda: Images().double()), by_row),
    "sequences": (seeded(lambda: Sequences().double()), of_tuple),
    "fallback": (seeded(lambda: Fallback().double()), by_row),
}
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(6, 16, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (6,), generator=GENERATOR)
T = torch.randn(6, 3, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e30, 1e160, 1e308])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("linear", form) for form in FORMS),
        *((name, form) for name in list(MODELS)[1:] for form in ("flat", "auto_per_layer")),
    ],
)
def test_an_input_of_any_size_stays_within_the_bound(name, form, value, lots):
    make, loss = MODELS[name]
    x = X[:1].clone()
    x[0, ::3] = value
    part = check_bound(lots, make, (X, Y), (x, Y[:1]), loss, clipping=FORMS[form])
    if math.isnan(value):
        assert not part.any()  # it counts as nothing


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e160, 1e308])
@pytest.mark.parametrize("form", FORMS)
def test_a_target_of_any_size_stays_within_the_bound(form, value, lots):
    """Labels of a regression; the largest ones overflow in the square, so in every gradient."""
    make, _ = MODELS["linear"]
    garbage = (X[:1], torch.full((1, 3), value, dtype=torch.float64))
    part = check_bound(lots, make, (X, T), garbage, squared, clipping=FORMS[form])
    assert bool(part.any()) == (value == 1e30)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [by_row, by_mean], ids=["rows", "mean"])
def test_duplicates_count_each(loss, form, lots):
    make, _ = MODELS["images"]
    part = check_bound(lots, make, (X, Y), (X[:1], Y[:1]), loss, clipping=FORMS[form])
    twins = TensorDataset(X[[0, 0, 0]], Y[[0, 0, 0]])
    assert torch.allclose(sum_of(lots, make, twins, loss, clipping=FORMS[form]).values, 3 * part)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_zero_add_nothing(form, lots):
    def silent(engine, model, x, y):
        engine.backward(x[:, 0] * F.cross_entropy(model(x), y, reduction="none"))

    x = X[:1].clone()
    x[0, 0] = 0
    make, _ = MODELS["images"]
    part = check_bound(lots, make, (X, Y), (x, Y[:1]), silent, clipping=FORMS[form])
    assert not part.any()


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30, -1e30, 1e305])
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_of_any_size_for_one_row_stays_within_the_bound(form, factor, lots):
    def weighted(engine, model, x, y):
        engine.backward(x[:, 0] * F.cross_entropy(model(x), y, reduction="none"))

    def blind():
        return nn.Sequential(Hidden(), MODELS["linear"][0]())

    x = X[:1].clone()
    x[0, 0] = factor
    check_bound(lots, blind, (X, Y), (x, Y[:1]), weighted, clipping=FORMS[form])


class Hidden(nn.Module):
    """Keeps the first number of a row, which is the weight of its loss, from the model."""

    def forward(self, x):
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)


@pytest.mark.parametrize("form", ["flat", "auto_per_layer"])
@pytest.mark.parametrize("value", [math.nan, 250.0, 6e4, 3e38], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_overflow_in_low_precision_stays_within_the_bound(dtype, value, form, lots):
    def make():
        return MODELS["linear"][0]().to(dtype)

    x, t = X.to(dtype), T.to(dtype)
    for garbage in (
        (torch.full((1, 16), value).to(dtype), t[:1]),
        (x[:1], torch.full((1, 3), value).to(dtype)),
    ):
        check_bound(lots, make, (x, t), garbage, squared, 2e-6, clipping=FORMS[form])


def test_overflow_under_autocast_stays_within_the_bound(lots):
    def half(engine, model, x, t):
        with torch.autocast("cpu", torch.float16):
            losses = (model(x).float() - t).square().sum(1)
        engine.backward(losses)

    def make():
        return MODELS["linear"][0]().float()

    for value in (1e5, 1e30, math.nan):
        garbage = torch.full((1, 16), value)
        check_bound(lots, make, (X.float(), T.float()), (garbage, T[:1].float()), half, 2e-6)


def test_token_models_keep_the_bound_when_every_token_is_the_same(lots):
    def loss(engine, model, x, y):
        engine.backward(1e20 * model(x).square().sum((1, 2)))

    tokens = torch.randint(0, 7, (6, 5), generator=GENERATOR)
    same = torch.zeros(1, 5, dtype=torch.int64)
    make = seeded(lambda: Tied().double())
    for form in FORMS.values():
        check_bound(lots, make, (tokens, Y), (same, Y[:1]), loss, clipping=form)


@pytest.mark.parametrize("shape", [(6, 0, 4), (6, 3, 0)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element", "ignore:the self-check was skipped")
def test_axes_of_size_zero_work(shape, lots):
    def loss(engine, model, x, y):
        engine.backward(model(x).sum((1, 2)))

    with torch.random.fork_rng():
        dataset = TensorDataset(torch.zeros(shape, dtype=torch.float64), Y)
        lot = sum_of(lots, lambda: nn.Linear(shape[2], 3).double(), dataset, loss)
    expected = 0.0 if shape[1] == 0 else 6 * BOUND  # the bias sees the positions, if there are any
    assert float(lot.values.norm()) == pytest.approx(expected, rel=1e-6)
    tokens = TensorDataset(torch.zeros(6, 0, dtype=torch.int64), Y)
    assert not sum_of(lots, lambda: nn.Embedding(5, 3).double(), tokens, loss).values.any()


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x,
    "with a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_in_memory_changes_nothing(name, lots):
    make, _ = MODELS["images"]
    x = X[:1].expand(6, 16) if name == "expanded" else X
    expected = sum_of(lots, make, TensorDataset(x.clone(), Y))
    found = sum_of(lots, make, TensorDataset(LAYOUTS[name](x), Y))
    assert torch.equal(found.values, expected.values)


class Complex(nn.Module):
    """Complex numbers in the middle, and a real parameter that multiplies them."""

    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.randn(16)), nn.Linear(16, 3)

    def forward(self, x):
        return self.out((torch.fft.fft(x) * self.scale).abs())


def test_complex_numbers_inside_and_sparse_gradients_work(lots):
    make = seeded(lambda: Complex().double())
    x = torch.full((1, 16), 1e100, dtype=torch.float64)
    check_bound(lots, make, (X, Y), (x, Y[:1]))
    tables = [
        seeded(lambda s=s: nn.Sequential(nn.Embedding(7, 3, sparse=s), nn.Flatten()).double())
        for s in (False, True)
    ]
    tokens = TensorDataset(torch.tensor([[0], [3], [3]]), Y[:3])
    dense, sparse = (sum_of(lots, make, tokens).values for make in tables)
    assert torch.equal(dense, sparse)


def test_a_label_to_ignore_is_nothing_where_losses_come_by_row(lots):
    """Under a mean it would change everybody's weight: docs/guide.md says so."""
    make, _ = MODELS["linear"]
    assert not check_bound(lots, make, (X, Y), (X[:1], torch.tensor([-100]))).any()


@pytest.mark.parametrize("method", [*PRIVATE, *VARIANTS], ids=str)
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        *(pytest.param(v, marks=[pytest.mark.slow, pytest.mark.audit]) for v in (math.inf, 1e30)),
    ],
)
def test_every_method_keeps_its_bound_with_a_bad_record(value, method):
    chosen = small_settings(method) if isinstance(method, str) else method
    whole = records(SMALL)
    whole.tensors[0][-1] = value
    pair = both(chosen, data=(whole, neighbour(whole, chosen)))
    found = [finding for finding in compare(pair) if finding.what != "nothing was tested"]
    assert [str(finding) for finding in found] == []
    assert max(pair.used) <= 1 + 1e-6
    assert all(look.query.isfinite().all() for look in pair.first.sums)


# -- what is refused before a lot is drawn ----------------------------------------------------


class Sized(Dataset):
    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return X[index], Y[index]


class Endless(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


def with_weight(value):
    model = MODELS["linear"][0]()
    model[0].weight.data[2, 3] = value
    return model


def without_parameters():
    model = nn.Tanh()
    model.unused = nn.Parameter(torch.zeros(1), requires_grad=False)
    return model


AT_ONCE = {
    "no records": (MODELS["linear"][0], Sized(0), ConfigError, "empty dataset"),
    "no length": (MODELS["linear"][0], Endless(), ConfigError, r"has no length .*Endless"),
    "negative length": (MODELS["linear"][0], Sized(-1), ConfigError, "has no length"),
    "no parameters": (without_parameters, Sized(6), ConfigError, "no trainable parameter"),
    "weights not a number": (
        lambda: with_weight(math.nan),
        Sized(6),
        ConfigError,
        "'0.weight' holds NaN or infinity",
    ),
    "infinite weights": (lambda: with_weight(-math.inf), Sized(6), ConfigError, "'0.weight'"),
    "lazy": (lambda: nn.LazyLinear(3), Sized(6), UnsupportedModel, "'weight' of a lazy module"),
    "complex": (
        lambda: nn.Sequential(nn.Linear(16, 3, dtype=torch.complex64)),
        Sized(6),
        UnsupportedModel,
        r"'0.weight' has dtype torch.complex64",
    ),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_is_refused_at_once(name):
    make, dataset, kind, message = AT_ONCE[name]
    model = make()
    hooks = len(model._forward_hooks)
    with pytest.raises(kind, match=message) as error:
        private(model, dataset)
    assert "\n" not in str(error.value)
    assert len(model._forward_hooks) == hooks  # and the model is the user's own still


# -- what is refused in the middle of a lot ---------------------------------------------------


class Returns(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = MODELS["linear"][0](), how

    def forward(self, x):
        return self.how(self.inner(x))


IMAGES = X.unflatten(1, (1, 4, 4))
CONV = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double())
TABLE = seeded(lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 3)).double())
TOKENS = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0], [1, 1], [2, 2]])


def bad_token(token):
    tokens = TOKENS.clone()
    tokens[3, 1] = token
    return tokens


# name: model, inputs, what the mended loop makes of them, error, message
BAD_INPUTS = {
    "pixels as bytes": (
        MODELS["linear"][0],
        torch.randint(0, 256, (6, 16), dtype=torch.uint8),
        lambda x: x.double(),
        r"linear with '0.weight' .*uint8 of shape .*x\.float\(\)",
    ),
    "images as bytes": (CONV, IMAGES.byte(), lambda x: x.double(), "conv2d with '0.weight'.*uint8"),
    "integers": (MODELS["linear"][0], X.long(), lambda x: x.double(), "linear.*int64"),
    "another precision": (MODELS["linear"][0], X.float(), lambda x: x.double(), "linear.*float32"),
    "complex": (
        MODELS["linear"][0],
        X.to(torch.complex128),
        lambda x: x.real,
        "linear.*complex128",
    ),
    "sparse": (MODELS["linear"][0], X.to_sparse(), lambda x: x.to_dense(), r"x\.to_dense\(\)"),
    "too few features": (
        MODELS["linear"][0],
        X[:, :9],
        lambda x: F.pad(x, (0, 7)),
        r"linear.*shape \(3, 9\).*shape \(8, 16\)",
    ),
    "too many channels": (CONV, IMAGES.expand(6, 3, 4, 4), lambda x: x[:, :1], "have 1 channels"),
    "no channels": (CONV, IMAGES[:, 0], lambda x: x[:, None], "3 axes, where rows, channels"),
    "flat images": (CONV, X, lambda x: x.unflatten(1, (1, 4, 4)), "2 axes, where rows, channels"),
    "small images": (CONV, IMAGES[..., :2, :2], lambda x: F.pad(x, (0, 2, 0, 2)), "Kernel size"),
    "a token too far": (TABLE, bad_token(7), lambda x: x.clamp(0, 6), "index out of range"),
    "a negative token": (TABLE, bad_token(-1), lambda x: x.clamp(0, 6), "index out of range"),
    "broken tokens": (TABLE, TOKENS.double(), lambda x: x.long(), "embedding with '0.weight'"),
    "no time steps": (
        seeded(lambda: nn.Sequential(Last(), nn.Linear(4, 3)).double()),
        torch.zeros(6, 0, 16, dtype=torch.float64),
        lambda x: F.pad(x, (0, 0, 0, 1)),
        "gru with '0.memory",
    ),
}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(16, 4, batch_first=True)

    def forward(self, x):
        return self.memory(x)[0][:, -1]


def goes_on(lots, engine, model, optimizer, batches, loss, expected):
    """After an error: nothing leaked, the lot is charged, and the next one is as it should be."""
    assert all(p.grad is None for p in model.parameters())
    assert engine.released == 0 and engine.ledger.steps == 0
    engine.abandon_lot()
    assert engine.released == 0 and engine.ledger.steps == 1
    loss(engine, model, *next(batches))
    optimizer.step()
    assert engine.released == 1 and engine.ledger.steps == 2
    assert torch.allclose(lots.pop().values, expected.values, atol=1e-12)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_named_and_can_be_mended(name, lots):
    make, x, mend, message = BAD_INPUTS[name]
    expected = sum_of(lots, make, TensorDataset(mend(x), Y))
    engine, model, optimizer, loader = private(make(), TensorDataset(x, Y))
    batches = iter(loader)
    with pytest.raises(VestigeError, match=message) as error:
        by_row(engine, model, *next(batches))
    assert isinstance(error.value, ConfigError | UnsupportedModel)
    assert "\n" not in str(error.value)

    def mended(engine, model, x, y):
        by_row(engine, model, mend(x), y)

    goes_on(lots, engine, model, optimizer, batches, mended, expected)


# name: what the loss is made of, the error and what it says
BAD_LOSSES = {
    "a label too far": (lambda m, x, y: rows(m(x), y + 3), IndexError, r"Target \d is out of"),
    "a negative label": (lambda m, x, y: rows(m(x), y - 7), IndexError, r"Target -\d is out of"),
    "labels of two axes": (lambda m, x, y: rows(m(x), y[:, None]), RuntimeError, "target tensor"),
    "labels with a fraction": (lambda m, x, y: rows(m(x), y.double()), RuntimeError, "dtype"),
    "one loss for all": (lambda m, x, y: rows(m(x), y).sum(), PrivacyError, "got a loss of 0 axes"),
    "no loss": (lambda m, x, y: None, PrivacyError, "got a loss of NoneType"),
    "a loss too few": (lambda m, x, y: rows(m(x), y)[1:], PrivacyError, "does not match the rows"),
    "no rows": (lambda m, x, y: rows(m(x[:0]), y[:0]), PrivacyError, "does not match the rows"),
    "rows twice": (
        lambda m, x, y: rows(m(x.repeat(2, 1)), y.repeat(2))[: len(y)],
        PrivacyError,
        "pass each of its batches whole",
    ),
    "a loss without the model": (lambda m, x, y: x.sum(1), RuntimeError, "does not require grad"),
    "a complex loss": (
        lambda m, x, y: rows(m(x), y).to(torch.complex128),
        RuntimeError,
        "complex128",
    ),
}


def rows(scores, y):
    return F.cross_entropy(scores, y, reduction="none")


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_losses_that_do_not_fit_are_named_and_can_be_mended(name, lots):
    make, _ = MODELS["linear"]
    losses, kind, message = BAD_LOSSES[name]
    dataset = TensorDataset(X, Y)
    expected = sum_of(lots, make, dataset)
    engine, model, optimizer, loader = private(make(), dataset)
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(kind, match=message):
        engine.backward(losses(model, x, y))
    goes_on(lots, engine, model, optimizer, batches, by_row, expected)


OUTPUTS = {
    "tuple": (lambda h: (h, h.sum()), lambda out: out[0]),
    "a tuple with hidden states": (lambda h: (h, h[None], h.t()), lambda out: out[0]),
    "list": (lambda h: [h], lambda out: out[0]),
    "dict": (lambda h: {"scores": h, "note": "text"}, lambda out: out["scores"]),
    "nested": (lambda h: {"parts": (None, [h])}, lambda out: out["parts"][1][0]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_models_that_return_more_than_scores(name, lots):
    how, pick = OUTPUTS[name]
    expected = sum_of(lots, MODELS["linear"][0], TensorDataset(X, Y))

    def picked(engine, model, x, y):
        by_row(engine, lambda x: pick(model(x)), x, y)

    def make():
        return Returns(how)

    assert torch.equal(sum_of(lots, make, TensorDataset(X, Y), picked).values, expected.values)
    # A loop that takes it for the scores hears it from its own loss, and can be mended.
    engine, model, optimizer, loader = private(make(), TensorDataset(X, Y))
    batches = iter(loader)
    with pytest.raises(TypeError, match=r"must be Tensor, not (tuple|list|dict)"):
        by_row(engine, model, *next(batches))
    goes_on(lots, engine, model, optimizer, batches, picked, expected)


WITHOUT_ROWS = {
    "a sum for a mean": (torch.sum, "part in the loss that the model returns"),
    "number": (lambda h: float(h.detach().sum()), "turns values of the batch into a Python value"),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_model_that_joins_its_rows_in_another_way_is_refused(name):
    how, message = WITHOUT_ROWS[name]
    engine, model, _, loader = private(Returns(how), TensorDataset(X, Y))
    with pytest.raises(PrivacyError, match=message):
        model(next(iter(loader))[0])
    engine.abandon_lot()
    assert engine.ledger.steps == 1


def test_a_model_without_outputs_by_row_is_not_called_checked():
    engine, model, _, loader = private(Returns(lambda h: None), TensorDataset(X, Y))
    with pytest.warns(UserWarning, match="returns nothing with batch rows"):
        model(next(iter(loader))[0])
    engine.abandon_lot()
    assert engine.ledger.steps == 1


class Logarithms(nn.Module):
    """Normal numbers have none: all that it makes of them is NaN, which differs from nothing."""

    def __init__(self, coupled):
        super().__init__()
        self.out, self.coupled = nn.Linear(16, 3), coupled

    def forward(self, x):
        h = x.log()
        return self.out(h - h.mean(0) if self.coupled else h)


def test_the_self_check_is_not_satisfied_by_what_is_no_number(lots):
    dataset = TensorDataset(X.abs(), Y)
    sum_of(lots, lambda: Logarithms(False).double(), dataset)
    engine, model, _, loader = private(Logarithms(True).double(), dataset)
    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        by_row(engine, model, *next(iter(loader)))


# -- data that cannot be read -----------------------------------------------------------------


class Trapped(Dataset):
    """The record `at` cannot be read while `raises` is set."""

    def __init__(self, raises, at=4):
        self.raises, self.at = raises, at

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == self.at and self.raises is not None:
            return self.raises()
        return X[index], Y[index]


def raising(error):
    def trap():
        raise error

    return trap


TRAPS = {
    "KeyError": (raising(KeyError("column 7")), "KeyError: 'column 7'"),
    "IndexError": (raising(IndexError("row 4")), "IndexError: row 4"),
    "StopIteration": (raising(StopIteration()), "StopIteration"),
    "MemoryError": (raising(MemoryError()), "MemoryError"),
    "OSError": (raising(OSError(5, "Input/output error", "x.png")), "Input/output error"),
    "ragged": (lambda: (X[0, :9], Y[0]), "equal size"),
    "None": (lambda: (None, Y[0]), "NoneType"),
    "too short": (lambda: (X[0],), "equal size"),
}


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("name", TRAPS)
def test_a_dataset_that_raises_in_the_middle(name, physical, lots):
    """The lot is charged and not drawn again: another loop goes on with the next one."""
    trap, message = TRAPS[name]
    make, _ = MODELS["linear"]
    dataset = Trapped(trap)
    expected = sum_of(lots, make, TensorDataset(X, Y))
    engine, model, optimizer, loader = private(make(), dataset, max_physical_batch_size=physical)
    with pytest.raises(ConfigError, match=f"a batch could not be read: .*{message}") as error:
        for batch in loader:
            by_row(engine, model, *batch)
            optimizer.step()
    assert "\n" not in str(error.value) and engine.released == 0
    with pytest.raises(PrivacyError, match=r"engine\.abandon_lot"):
        next(iter(loader))
    dataset.raises = None
    engine.abandon_lot()
    assert engine.ledger.steps == 1
    for batch in loader:
        by_row(engine, model, *batch)
        optimizer.step()
        if engine.released:
            break
    assert engine.ledger.steps == 2 and engine._run.position.lot > 0
    assert torch.allclose(lots.pop().values, expected.values, atol=1e-12)


# Workers that failed take torch five seconds to end.
@pytest.mark.parametrize(("name", "persistent"), [("raises", False), ("dies", True)])
def test_a_worker_that_fails(name, persistent):
    traps = {
        "raises": (raising(KeyError("column 7")), "KeyError: 'column 7'"),
        "dies": (lambda: os._exit(1), "exited unexpectedly"),
    }
    trap, message = traps[name]
    dataset, make = Trapped(trap), MODELS["linear"][0]
    engine = PrivacyEngine("rdp", noise_seed=3)
    model = make()
    source = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=persistent)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=source,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        sample_rate=1.0,
        dataset_size=100,
    )
    with pytest.raises(ConfigError, match=message) as error:
        next(iter(loader))
    assert "\n" not in str(error.value)
    engine.abandon_lot()
    dataset.raises = None  # what the next workers will see
    by_row(engine, model, *next(iter(loader)))
    optimizer.step()
    assert (engine.released, engine.ledger.steps) == (1, 2)


def test_a_lot_that_could_not_be_read_is_charged_and_never_drawn_again():
    engine, model, optimizer, loader = private(
        MODELS["linear"][0](), Trapped(raising(KeyError("x"))), sample_rate=0.5
    )
    seen = []
    for _ in range(12):
        try:
            for batch in loader:
                by_row(engine, model, *batch)
                optimizer.step()
        except ConfigError:
            seen.append(engine._run.position.lot)
            engine.abandon_lot()
    assert len(seen) == len(set(seen)) == 12
    assert engine.ledger.steps == engine._run.lots.next_lot == engine.released + len(seen)


# -- the command line -------------------------------------------------------------------------


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    clean = {
        "x_train": rng.normal(size=(12, 16)).astype(np.float32),
        "y_train": np.arange(12) % 3,
        "x_test": rng.normal(size=(5, 16)).astype(np.float32),
        "y_test": np.arange(5) % 3,
        "classes": 3,
    }
    return clean | changes


def at(entry: str, place: Any, value: Any) -> dict[str, Any]:
    changed = arrays()[entry].copy()
    changed[place] = value
    return {entry: changed}


REFUSED = {
    "NaN": (at("x_train", (3, 5), np.nan), "x_train holds values that are not finite"),
    "infinity": (at("x_test", 2, np.inf), "x_test holds values that are not finite"),
    "label too far": (at("y_train", 4, 3), "y_train holds the label 3, but there are 3 classes"),
    "negative label": (at("y_test", 1, -1), "y_test holds the label -1"),
    "labels as numbers": ({"y_train": np.full(12, np.nan)}, "y_train is float64"),
    "integer images": ({"x_train": np.ones((12, 16), np.int32)}, "x_train is int32"),
    "complex": ({"x_train": np.ones((12, 16), np.complex64)}, "x_train is complex64"),
    "objects": ({"x_train": np.array([None] * 12)}, "no object arrays"),
    "texts": ({"x_train": np.array(["a"] * 12)}, "x_train has the shape (12,)"),
    "no examples": (
        {"x_train": np.zeros((0, 16), np.float32), "y_train": np.zeros(0, int)},
        "y_train is empty",
    ),
    "an empty axis": ({"x_train": np.zeros((12, 0), np.float32)}, "no empty axis"),
    "other shapes": ({"x_test": np.zeros((5, 9), np.float32)}, "both splits must have the same"),
    "fewer labels": ({"y_train": np.arange(9) % 3}, "one label for each example"),
    "too many classes": ({"classes": 2**40}, "classes is 1099511627776; it must be at most"),
    "too large a model": ({"classes": 10**7 - 1, "y_train": np.arange(12)}, None),
    "fewer records than a lot": (
        {"x_train": np.zeros((3, 16), np.float32), "y_train": np.arange(3)},
        "lot 4 is larger than the training data of 3 records",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_gets_one_line_and_leaves_nothing(name, tmp_path: Path):
    changes, message = REFUSED[name]
    np.savez(tmp_path / "own.npz", **arrays(**changes))
    options = "--steps 2 --lot 4 --accountant rdp --model mlp"
    if message is None:
        wide = {f"x_{s}": np.zeros((n, 200), np.float32) for s, n in (("train", 12), ("test", 5))}
        np.savez(tmp_path / "own.npz", **arrays(**changes, **wide))
        options = options.replace("mlp", "linear")
        message = "would have 2009999799 parameters"
    result = run(f"train --dataset {tmp_path}/own.npz --out {tmp_path}/run {options}")
    assert result.exit_code == 2
    error = plain(result.stderr)
    assert error.startswith("vestige: error:") and message in error
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own.npz"]


ACCEPTED = {
    "bytes": {
        "x_train": np.full((12, 4, 4), 255, np.uint8),
        "x_test": np.zeros((5, 4, 4), np.uint8),
    },
    "the largest numbers": at("x_train", 3, 3.4e38),
    "only zeros": {"x_train": np.zeros((12, 16), np.float32)},
    "one record twelve times": {"x_train": np.ones((12, 16), np.float32), "y_train": [1] * 12},
    "half precision": {"x_train": np.full((12, 16), 6e4, np.float16)},
    "big endian": {"x_train": arrays()["x_train"].astype(">f8")},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_odd_file_trains(name, tmp_path: Path):
    np.savez(tmp_path / "own.npz", **arrays(**ACCEPTED[name]))
    result = run(
        f"train --dataset {tmp_path}/own.npz --out {tmp_path}/run --steps 3 --lot 1 "
        "--accountant rdp --noise-seed 1 --json"
    )
    assert result.exit_code == 0, result.output
    state = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(values.isfinite().all() for values in state.values())


@pytest.mark.parametrize("value", [3.4e38, 1e30, 0.0])
@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_a_bad_record_of_a_file_stays_within_the_bound(model, value, lots, tmp_path: Path):
    """The first lots of two runs that start alike; all records are in them."""
    found = {}
    whole = arrays(x_train=arrays()["x_train"].reshape(12, 1, 4, 4))
    whole["x_test"] = whole["x_test"].reshape(5, 1, 4, 4)
    whole["x_train"][-1] = value
    for count in (11, 12):
        path = tmp_path / f"{count}.npz"
        records = {key: whole[key][:count] for key in ("x_train", "y_train")}
        np.savez(path, **whole | records)
        train(
            TrainConfig(
                dataset=str(path),
                model=model,
                lot=count,
                steps=1,
                clip=BOUND,
                accountant="rdp",
                device="cpu",
                noise_seed=1,
                out=tmp_path / f"run {count}",
            )
        )
        found[count] = lots.pop().values
    assert found[12].isfinite().all()
    assert float((found[12] - found[11]).double().norm()) <= BOUND * (1 + 1e-5)


def test_arrays_that_unpack_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch):
    """A file of a few kilobytes, refused by what its directory says, before it is unpacked."""
    from vestige.train import data

    path = tmp_path / "bomb.npz"
    zeros = np.zeros((2000, 2000), np.float32)
    np.savez_compressed(path, **arrays(x_train=zeros, y_train=np.zeros(2000, int)))
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(data, "_memory", lambda: 8e6)
    with pytest.raises(ConfigError, match=r"take 0\.0 GiB, more than the 0\.0 GiB"):
        data.load(path)
    monkeypatch.undo()
    assert data._memory() > 2**28
