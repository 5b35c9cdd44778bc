"""Numbers and rows of the loop whose way is known by contents, and what earlier batches leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine, PrivacyError
from vestige.gradients.loop_constants import LoopConstants

N, WIDTH, CLASSES, BOUND = 12, 6, 3, 1.0
MEET = r"examples meet|rows of the batch"
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes and a figure of each record; the first record is loud."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (N,), generator=generator)
    r = torch.randn(N, generator=generator)
    x[0], r[0], y[0] = 30 * x[0], 50.0, CLASSES - 1
    return x, y, r


def clipped_sums(loss: Callable[..., Tensor], columns: Any, steps: int, **options: Any) -> Tensor:
    """The sums of the first steps, each of all records."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(*columns), batch_size=N - 1, **options),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        sample_rate=1.0,
        dataset_size=N - 1,
    )
    sums = []
    while len(sums) < steps:
        for batch in loader:
            engine.backward(loss(model, *batch))
            optimizer.step()
            sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * (N - 1))
            optimizer.zero_grad()
    return torch.stack(sums[:steps])


def ratio(make: Callable[[], Loss], steps: int = 1) -> float:
    """How far the first record moves a sum, in clip bounds; `make` makes the loss of a run."""
    others = tuple(t[1:] for t in data())
    apart = clipped_sums(make(), data(), steps) - clipped_sums(make(), others, steps)
    return float(apart.norm(dim=1).max()) / BOUND


def rows(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y, reduction="none")


def beside(number: Callable[[Tensor, Tensor], Any]) -> Loss:
    """Losses of rows that are multiplied with what follows from classes and figures."""
    return lambda m, x, y, r: rows(m, x, y) * number(y, r)


def centred(pick: Callable[[Tensor], Any]) -> Loss:
    """Outputs around the centre of those that are picked."""

    def loss(m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        out = m(x)
        return (out - out.detach()[pick(y)].mean(0)).square().sum(1)

    return loss


def given(change: Callable[[Tensor], Tensor]) -> Loss:
    return lambda m, x, y, r: rows(m, change(x), y)


def mixed(places: Callable[[int], Any]) -> Loss:
    return given(lambda x: 0.5 * x + 0.5 * x[places(len(x))])


def by_data(x: Tensor) -> Tensor:
    x.data = x - x.mean(0)
    return x


def masked_of_others(x: Tensor) -> Tensor:
    x = x.clone()
    some = torch.arange(len(x)) % 2 == 0
    x[some] = x[some].flip(0)
    return x


def by_rank(m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    losses = rows(m, x, y)
    return losses[losses.detach().argsort()] * torch.linspace(-1, 1, len(x))


def by_rank_of_inputs(m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    order = r.argsort()
    return rows(m, x[order], y[order]) * torch.linspace(-1, 1, len(x))


def adversarial(scale: Callable[[Tensor], Tensor], backward: bool = False) -> Loss:
    """Inputs against another model, along its gradient."""

    def loss(m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        total = F.cross_entropy(copy.deepcopy(m)(leaf), y, reduction="sum")
        if backward:
            total.backward()
        gradient = leaf.grad if backward else torch.autograd.grad(total, leaf)[0]
        assert gradient is not None
        return rows(m, x + 3 * scale(gradient), y)

    return loss


REFUSED: dict[str, Loss] = {
    "whether any record is large": beside(lambda y, r: torch.where((r > 40).any(), -1.0, 1.0)),
    "the largest class": lambda m, x, y, r: (m(x)[:, 0] - y / y.max()).square(),
    "the largest class for all": beside(lambda y, r: r - y.max().expand(len(r))),
    "the largest pixel": given(lambda x: (x * 10).int() / (x * 10).int().max()),
    "a copy by tensor": beside(lambda y, r: r - torch.tensor(r).mean()),
    "a copy by as_tensor": beside(lambda y, r: r - torch.as_tensor(r).mean()),
    "a copy by new_tensor": beside(lambda y, r: r - r.new_tensor(r).mean()),
    "a variable": beside(lambda y, r: r - torch.autograd.Variable(r).mean()),
    "a parameter": beside(lambda y, r: r - nn.Parameter(r, requires_grad=False).mean()),
    "memory that numpy sees": beside(lambda y, r: r - torch.from_numpy(r.numpy()).mean()),
    "mixup that is made a variable": given(lambda x: torch.autograd.Variable(x + x.flip(0))),
    "a deep copy": beside(lambda y, r: r - copy.deepcopy(r).mean()),
    "a mean of what a mask picks": beside(lambda y, r: r - r[r > 0].mean()),
    "a mean of what is selected": beside(lambda y, r: r - torch.masked_select(r, r > 0).mean()),
    "an integral": beside(lambda y, r: r - torch.trapezoid(r)),
    "ranks": beside(lambda y, r: torch.searchsorted(r.sort()[0], r) - N / 2),
    "the centre of a class": centred(lambda y: y == CLASSES - 1),
    "the centre of a class, by numpy": centred(lambda y: (y == CLASSES - 1).numpy()),
    "mixup by numpy": mixed(lambda n: np.arange(n)[::-1].copy()),
    "mixup by a list of numpy's": mixed(lambda n: list(np.arange(n)[::-1])),
    "columns scaled together": given(lambda x: torch.renorm(x.T, 2, 0, 1.0).T),
    "an assignment to .data": given(by_data),
    "columns scaled by their own batch norm": given(nn.BatchNorm1d(WIDTH)),
    "upside down": given(lambda x: x + torch.flipud(x)),
    "turned round": given(lambda x: x + torch.rot90(x, 2)),
    "parts of the batch": given(lambda x: x + torch.cat(torch.vsplit(x, [3])[::-1])),
    "entries of others": given(lambda x: x.masked_scatter(x > 0, x.flip(0))),
    "a product over rows": given(lambda x: x - torch.tensordot(torch.ones(len(x)), x, 1)),
    "masked rows of others": given(masked_of_others),
    "weights by rank": by_rank,
    "weights by the rank of inputs": by_rank_of_inputs,
    "a gradient's norm": adversarial(lambda g: g / g.norm(), backward=True),
    "a gradient's norm, by autograd.grad": adversarial(lambda g: g / g.norm()),
}


def own_masks(x: Tensor) -> Tensor:
    x = x.clone()
    some = x[:, 0] > 0
    x[some] = x[some] * 2
    x[x < -1] = -1.0
    return x


def padded_columns(x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1)
    longest = (lengths.max() + 1).clamp(max=WIDTH)
    return F.pad(x[:, :longest], (0, WIDTH - longest))


def as_long_as_the_longest(x: Tensor) -> Tensor:
    lengths = (x > -99).sum(1)
    return x * (torch.arange(max(lengths))[None] < lengths[:, None])


def sorted_and_masked(m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    order = r.argsort()
    losses = rows(m, x[order], y[order])
    return losses * (r[order] > 0)


ACCEPTED: dict[str, Loss] = {
    "constants by new_tensor": beside(lambda y, r: r.new_tensor([0.5, 1.0, 2.0])[y]),
    "numbers of rows by tensor": beside(lambda y, r: torch.tensor([v.sigmoid() for v in r])),
    "own masks": given(own_masks),
    "numpy's own order": given(lambda x: x[np.arange(len(x))]),
    "no rows under a mask": given(lambda x: (x[x[:, 0] > 1e9].sum(), x)[1]),
    "cut at the longest": given(padded_columns),
    "as long as the longest": given(as_long_as_the_longest),
    "like one row": given(lambda x: x - torch.zeros_like(x[0])),
    "sorted, with what is sorted alike": sorted_and_masked,
    "a gradient's sign": adversarial(torch.sign, backward=True),
    "a norm of each row's gradient": adversarial(lambda g: g / g.norm(dim=1, keepdim=True)),
}


class Kept:
    """A loss that keeps something of each batch for the next one."""

    def __init__(self, keep: Callable[..., Any], use: Callable[..., Tensor]) -> None:
        self._keep, self._use, self._kept = keep, use, None

    def __call__(self, m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        out = m(x)
        losses = self._use(m, x, y, out, self._kept)
        self._kept = self._keep(x, out, losses, self._kept)
        return losses


def towards(m: nn.Module, x: Tensor, y: Tensor, out: Tensor, kept: Tensor | None) -> Tensor:
    return (out if kept is None else out - kept).square().sum(1)


def with_inputs(m: nn.Module, x: Tensor, y: Tensor, out: Tensor, kept: Tensor | None) -> Tensor:
    return rows(m, x if kept is None else x + kept, y)


EARLIER: dict[str, Callable[[], Loss]] = {
    "outputs": lambda: Kept(lambda x, out, v, kept: out.detach().mean(0), towards),
    "a moving average": lambda: Kept(
        lambda x, out, v, kept: (torch.zeros(CLASSES) if kept is None else kept).lerp(
            out.detach().mean(0), 0.5
        ),
        towards,
    ),
    "a bank that is written to": lambda: Kept(
        lambda x, out, v, kept: (torch.zeros(1, CLASSES) if kept is None else kept).copy_(
            out.detach()[:1]
        ),
        towards,
    ),
    "inputs": lambda: Kept(lambda x, out, v, kept: x.mean(0), with_inputs),
    "losses": lambda: Kept(
        lambda x, out, v, kept: v.detach().mean(),
        lambda m, x, y, out, kept: rows(m, x, y) * (1 if kept is None else 1 - kept),
    ),
}


class OfRecords:
    """Every record's last outputs, at a place of its own."""

    def __init__(self) -> None:
        self._outputs = torch.zeros(100, CLASSES)

    def __call__(self, m: nn.Module, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        out, number = m(x), (r * 1000).long() % 100
        losses = (out - self._outputs[number]).square().sum(1)
        self._outputs[number] = out.detach()
        return losses


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", REFUSED)
def test_what_several_rows_have_made_is_refused(name):
    with pytest.raises(PrivacyError, match=MEET):
        ratio(lambda: REFUSED[name])


@pytest.mark.parametrize("name", EARLIER)
def test_what_an_earlier_batch_has_left_is_refused(name):
    with pytest.raises(PrivacyError, match=f"{MEET}|earlier batch"):
        ratio(EARLIER[name], steps=2)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_each_row_has_made_is_accepted(name):
    assert ratio(lambda: ACCEPTED[name]) <= 1 + 1e-5


def test_what_is_kept_for_each_record_alone_is_accepted():
    assert len(((data()[2] * 1000).long() % 100).unique()) == N
    assert ratio(OfRecords, steps=3) <= 1 + 1e-5


@pytest.mark.parametrize("name", ["mixup by numpy", "the centre of a class", "a deep copy"])
def test_one_record_would_move_the_others(name, monkeypatch):
    monkeypatch.setattr(LoopConstants, "check", lambda self, nodes: None)
    monkeypatch.setattr(LoopConstants, "check_inputs", lambda self, given: None)
    assert ratio(lambda: REFUSED[name]) > 1.05


def test_an_earlier_batch_would_move_the_others(monkeypatch):
    monkeypatch.setattr(LoopConstants, "check", lambda self, nodes: None)
    assert ratio(EARLIER["outputs"], steps=2) > 2


def as_records(batch: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*batch, strict=True))


LISTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], tuple[Tensor, ...]]]] = {
    "of records": (lambda records: records, as_records),
    "of dictionaries": (
        lambda records: [dict(zip("xyr", record, strict=True)) for record in records],
        lambda batch: as_records([tuple(record.values()) for record in batch]),
    ),
    "of fields": (
        lambda records: [list(column) for column in zip(*records, strict=True)],
        lambda batch: tuple(torch.stack(column) for column in batch),
    ),
    "padded": (
        lambda records: records,
        lambda batch: (
            nn.utils.rnn.pad_sequence([x for x, *_ in batch], batch_first=True),
            *as_records([record[1:] for record in batch]),
        ),
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_records_that_come_one_by_one_are_followed(name):
    collate, together = LISTS[name]

    def run(change: Callable[[Tensor], Tensor]) -> None:
        loss = given(change)
        clipped_sums(
            lambda m, *batch: loss(m, *together(list(batch))), data(), 1, collate_fn=collate
        )

    run(lambda x: x / 2)
    with pytest.raises(PrivacyError, match=MEET):
        run(lambda x: x - x.mean(0))
