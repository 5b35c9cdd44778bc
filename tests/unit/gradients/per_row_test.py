"""Rows with weights of their own give the gradients of a loop over rows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.own_weights import (
    assert_close,
    expanded,
    loop,
    small,
    some_moves,
    traces,
)
from tests.support.reference import call
from tests.support.zoo import BY_RULE, cast, zoo
from vestige import PrivacyError, UnsupportedModel
from vestige.gradients.groups import partition
from vestige.gradients.per_row import Expanded, own_ascent

REFUSED_BY_VMAP = set(BY_RULE["recurrent"]) - {"gru cell", "rnn cell"}


@pytest.mark.parametrize("name", list(zoo()))
def test_gradients_equal_a_loop_over_rows_at_each_rows_weights(name):
    model, x, pick = zoo()[name]
    model, x = model.double(), cast(x, torch.float64)
    groups = partition(model, "per_layer")
    rows = Expanded(model, groups)
    cotangent = torch.randn_like(pick(call(model, x)))

    def closure():
        loss = (pick(call(model, x)) * cotangent).sum()
        loss.backward()
        return loss

    if name in REFUSED_BY_VMAP:
        with pytest.raises(UnsupportedModel, match=r"every row \(.*\): use dp-sam or dp-sat"):
            rows.gradients(closure, 9)
        return
    before = traces(model)
    got, loss = rows.gradients(closure, 9)
    assert_close(got, loop(model, x, cotangent, groups, pick=pick))
    assert_close(loss.detach(), (pick(call(model, x)) * cotangent).sum().detach())
    moves = some_moves(9, groups)
    expected = loop(model, x, cotangent, groups, moves, pick=pick)
    got, loss = rows.gradients(closure, 9, moves.clone())
    assert_close(got, expected)
    assert traces(model) == before


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_per_example_sam_equals_a_loop_with_normalised_ascents(reduction):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()
    x, y = torch.randn(7, 2, 5, 5).double(), torch.randint(0, 3, (7,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows, criterion = expanded(model), nn.CrossEntropyLoss(reduction=reduction)

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    radius = 0.4
    first, loss = rows.gradients(closure, 7)
    assert_close(loss.detach(), criterion(model(x), y).detach())
    plain = first.clone()
    uphill, moved_loss = rows.gradients(closure, 7, own_ascent(first, radius))
    assert float(moved_loss.detach()) > float(loss.detach())  # every row went up its own hill
    for i in range(7):
        twin = copy.deepcopy(model)
        for expected in (plain[i], uphill[i]):
            twin.zero_grad()
            F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]).backward()
            g = torch.cat([p.grad.flatten() for p in twin.parameters()])
            assert_close(expected * (7 if reduction == "mean" else 1), g)
            with torch.no_grad():
                for slot, p in zip(rows.groups.slots, twin.parameters(), strict=True):
                    p.add_(slot.view(g), alpha=radius / float(g.norm()))


def test_own_ascent_has_the_radius_and_no_direction_where_there_is_none():
    torch.manual_seed(3)
    gradients = torch.randn(8, 1000)
    gradients[1] = 0
    gradients[2, 7] = torch.nan
    gradients[3, 7] = -torch.inf
    gradients[4] *= 1e-24  # squares underflow in float32
    gradients[5] *= 1e30  # and overflow
    gradients[6] *= 1e-44  # the factor itself would overflow
    before = gradients.clone()
    moves = own_ascent(gradients, 0.3)
    assert moves.data_ptr() == gradients.data_ptr()
    assert not moves[[1, 2, 3, 6]].any()
    for i in (0, 4, 5, 7):
        assert_close(moves[i].double(), 0.3 * before[i].double() / before[i].double().norm(), 1e-6)
    assert not own_ascent(before[:1].clone(), 0.0).any()


def test_frozen_parameters_stay_shared():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    for frozen in (model[0].weight, model[2].bias, model[3].weight):
        frozen.requires_grad_(False)
    x, cotangent = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    rows = expanded(model)
    moves = some_moves(6, rows.groups)
    got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 6, moves.clone())
    assert_close(got, loop(model, x, cotangent, rows.groups, moves))
    assert all(p.grad is None for p in model.parameters())
    model[3].weight.requires_grad_()
    with pytest.raises(PrivacyError, match=r"newly trainable: 3\.weight"):
        rows.gradients(lambda: None, 6)


class Holder:
    """No pytree: its rows cannot be told apart."""

    def __init__(self, x):
        self.x = x


class Named(nn.Module):
    """Nested keyword inputs, a dict of outputs, options that are no tensors, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids=None, extra=None, labels=None, scale=1.0, mode="tanh", unused=None):
        assert unused is None and mode == "tanh"
        h = torch.tanh(self.table(ids["tokens"])) * extra[1][0].unsqueeze(-1)
        logits = self.out(h.mean(1)) * scale
        out = {"logits": logits, "states": (h, None), "mode": mode, "cache": Holder(h)}
        if labels is not None:
            reduction = "sum" if scale == 2 else "mean"
            out["loss"] = F.cross_entropy(logits, labels, reduction=reduction)
        return out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_keyword_and_nested_inputs_and_outputs(reduction):
    torch.manual_seed(6)
    model, scale = Named().double(), 2 if reduction == "sum" else torch.tensor(1.5)
    ids, mask = torch.randint(0, 7, (5, 6)), torch.rand(5, 6).double()
    labels = torch.randint(0, 3, (5,))
    given = {"ids": {"tokens": ids}, "extra": ["keep", (mask, 3)], "scale": scale}
    plain = model(**given, labels=labels)
    rows = expanded(model, mean_loss=reduction == "mean")
    seen = {}

    def inside():
        seen.update(model(**given, labels=labels))
        seen["loss"].backward()

    def outside():
        F.cross_entropy(model(**given)["logits"], labels, reduction=reduction).backward()

    by_model, _ = rows.gradients(inside, 5)
    assert seen["mode"] == "tanh" and seen["states"][1] is None and seen["cache"] is None
    assert_close(seen["logits"].detach(), plain["logits"].detach())
    assert_close(seen["states"][0].detach(), plain["states"][0].detach())
    assert_close(seen["loss"].detach(), plain["loss"].detach())
    by_model = by_model.clone()
    by_loop = []
    for i in range(5):
        one = slice(i, i + 1)
        twin = copy.deepcopy(model)
        row = {"ids": {"tokens": ids[one]}, "extra": ["keep", (mask[one], 3)], "scale": scale}
        F.cross_entropy(twin(**row)["logits"], labels[one]).backward()
        by_loop.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
    expected = torch.stack(by_loop) / (5 if reduction == "mean" else 1)
    assert_close(by_model, expected)
    assert_close(rows.gradients(outside, 5)[0], expected)


class Sequences(nn.Module):
    """(positions, rows, features) in; (positions, rows, classes) and (rows, classes) out."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.attend(x, x, x)[0] * weights.view(1, -1, 1)
        out = self.out(h)
        return out, out.mean(0), out.sum(2)


@pytest.mark.parametrize("positions", [6, 5])
def test_rows_on_the_second_axis(positions):
    torch.manual_seed(7)
    model, x = Sequences().double(), torch.randn(positions, 5, 4).double()
    weights, rows = torch.rand(5).double(), expanded(model, axis=1)
    expected = model(x, weights)
    cotangents = [torch.randn_like(out) for out in expected]
    seen = []

    def closure():
        seen[:] = model(x, weights)
        sum((out * c).sum() for out, c in zip(seen, cotangents, strict=True)).backward()

    got, _ = rows.gradients(closure, 5)
    for out, plain in zip(seen, expected, strict=True):
        assert_close(out.detach(), plain.detach())
    by_loop = []
    for i in range(5):
        twin, one = copy.deepcopy(model), slice(i, i + 1)
        a, b, c = twin(x[:, one], weights[one])
        loss = (a * cotangents[0][:, one]).sum() + (b * cotangents[1][one]).sum()
        (loss + (c * cotangents[2][:, one]).sum()).backward()
        by_loop.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
    assert_close(got, torch.stack(by_loop))


def test_outputs_of_one_position_or_one_class_keep_their_rows_on_the_second_axis():
    class Outputs(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = super().forward(x)
            return out, out.mean(0)

    model, x, seen = Outputs(4, 1), torch.randn(1, 5, 4), []

    def closure():
        seen[:] = model(x)
        seen[0].sum().backward()

    expanded(model, axis=1).gradients(closure, 5)
    assert [out.shape for out in seen] == [(1, 5, 1), (5, 1)]


def test_dropout_differs_from_row_to_row():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2)).double()
    x = torch.ones(6, 3).double()
    rows = expanded(model)

    def distinct():
        got, _ = rows.gradients(lambda: model(x).sum().backward(), 6)
        return len(torch.unique(got, dim=0))

    assert distinct() == 6
    model.eval()
    assert distinct() == 1


def test_the_root_may_call_itself():
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = torch.tanh(self.inner(x))
            return self(x, depth - 1) if depth else x

    model, x = Again().double(), torch.randn(4, 3).double()
    rows, cotangent = expanded(model), torch.randn(4, 3).double()
    got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 4)
    assert_close(got, loop(model, x, cotangent, rows.groups))


def test_hooks_of_the_root_run_once_with_the_whole_batch():
    model, x, cotangent = small()
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    model.register_forward_hook(lambda m, args, out: out * 3)
    rows = expanded(model)
    got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5)
    assert seen == [(5, 3)]
    assert_close(got, loop(model, x, cotangent, rows.groups))


def test_a_parameter_without_a_part_in_the_loss_has_no_gradient():
    model, x, cotangent = small()
    rows = expanded(model)
    everything, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5)
    assert everything.all()
    model.forward = lambda x: nn.Sequential.forward(model[:2], x)  # the last layer is left out
    got, _ = rows.gradients(lambda: model(x).sum().backward(), 5)
    segment = slice(rows.groups.slots[2].start, None)
    assert not got[:, segment].any() and got[:, : segment.start].all()


def test_buffers_are_used_again_and_never_for_weights_and_gradients_at_once():
    model, x, cotangent = small()
    rows = expanded(model)

    def closure(n=5):
        (model(x[:n]) * cotangent[:n]).sum().backward()

    first, _ = rows.gradients(closure, 5)
    kept = first.clone()
    second, _ = rows.gradients(closure, 5, torch.zeros_like(first))
    assert_close(first, kept)  # the pass with a move has a buffer of its own
    assert_close(second, kept)
    place = first.data_ptr()
    fewer, _ = rows.gradients(lambda: closure(3), 3)
    assert fewer.data_ptr() == place
    assert_close(fewer, kept[:3])
    # Three steps uphill in a row: each result becomes the next weights.
    moves = own_ascent(rows.gradients(closure, 5)[0], 0.1)
    for _ in range(2):
        known = moves.clone()
        got, _ = rows.gradients(closure, 5, moves)
        assert got.data_ptr() != moves.data_ptr()
        assert_close(got, loop(model, x, cotangent, rows.groups, known))
        moves = own_ascent(got, 0.1)
