"""Rows with weights of their own give the gradients of a loop over rows, and leave no trace."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import call, loop_gradients, take
from tests.support.zoo import zoo
from tests.unit.gradients.collector_test import cast
from vestige import PrivacyEngine, PrivacyError, UnsupportedModel
from vestige.gradients.groups import partition
from vestige.gradients.per_row import Expanded, own_ascent

REFUSED_BY_VMAP = {"lstm", "gru", "rnn"}


def moved_copy(model, groups, move):
    """A copy of the model at theta + move."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for slot in groups.slots:
            parameters[slot.name].add_(slot.view(move))
    return twin


def loop(model, x, cotangent, groups, moves=None, axis=0, pick=lambda out: out):
    """(n, P): row i's gradient of <cotangent_i, output_i> at theta + moves[i], row by row."""
    if moves is None:
        return loop_gradients(model, x, cotangent, groups, axis, pick)
    rows = []
    for i, move in enumerate(moves):
        one, twin = slice(i, i + 1), moved_copy(model, groups, move)
        row, weight = take(x, one, axis), take(cotangent, one, axis)
        rows.append(loop_gradients(twin, row, weight, groups, axis, pick))
    return torch.cat(rows)


def some_moves(rows, groups, dtype=torch.float64):
    moves = torch.randn(rows, groups.size, dtype=dtype)
    return moves.div_(moves.norm(dim=1, keepdim=True))


def assert_close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape
    assert (got - expected).norm() <= tolerance * expected.norm()
    assert expected.norm() > 0


def traces(model):
    """What a pass must leave as it was."""
    return (
        [sorted(m.__dict__) for m in model.modules()],
        [m.__dict__.get("forward") for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [(k, id(t)) for m in model.modules() for k, t in {**m._parameters, **m._buffers}.items()],
        [t.tolist() for t in model.state_dict().values()],
    )


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(5, 3).double(), torch.randn(5, 2).double()


def expanded(model, axis=0, **options):
    return Expanded(model, partition(model, "flat"), axis, **options)


# -- the gradients themselves ---------------------------------------------------------------


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


class Images(nn.Module):
    """Convolutions that take every path: shared weights, a group for each row, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.large = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.small = nn.Conv2d(16, 24, 3, dilation=2, bias=False)
        self.out = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.large(F.elu(self.first(x), inplace=True)))
        return self.out(self.small(h).mean((2, 3)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_float32_paths_agree_with_the_loop_in_float64(channels_last):
    torch.manual_seed(1)
    model, x, cotangent = Images(), torch.randn(6, 3, 13, 13), torch.randn(6, 3)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    rows = expanded(model)
    moves = some_moves(6, rows.groups, torch.float32)
    for move in (None, moves.clone()):
        got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 6, move)
        twin = copy.deepcopy(model).double()
        known = None if move is None else moves.double()
        expected = loop(twin, x.double(), cotangent.double(), rows.groups, known)
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, 1e-5)


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


def test_tied_parameters_are_one_and_a_layer_used_twice_adds_up():
    torch.manual_seed(4)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.b(torch.tanh(self.a(x))) @ self.a.weight)
            return self.conv(torch.tanh(self.conv(h.unsqueeze(1))))

    model, x = Shared().double(), torch.randn(5, 3, 4).double()
    rows, cotangent = expanded(model), torch.randn(5, 1, 3, 4).double()
    assert rows.groups.size == 16 + 4 + 10
    moves = some_moves(5, rows.groups)
    for move in (None, moves.clone()):
        got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5, move)
        assert_close(got, loop(model, x, cotangent, rows.groups, None if move is None else moves))


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


def test_autocast_and_half_precision_weights():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))
    x, cotangent = torch.randn(5, 3, 5, 5), torch.randn(5, 2)
    expected = loop(model, x, cotangent, partition(model, "flat"))

    def closure(dtype=None):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
            out = model(x.to(dtype or x.dtype))
        (out * cotangent).sum().backward()

    assert_close(expanded(model).gradients(closure, 5)[0], expected, 0.02)
    model.bfloat16()
    rows = expanded(model)
    for move in (None, torch.zeros(5, rows.groups.size)):
        got, _ = rows.gradients(lambda: closure(torch.bfloat16), 5, move)
        assert got.dtype == torch.float32
        assert_close(got, expected, 0.02)


# -- what a closure must do -----------------------------------------------------------------


def once(model, x, c):
    (model(x) * c).sum().backward()


def no_forward(model, x, c):
    x.clone().requires_grad_().sum().backward()


def evaluation_only(model, x, c):
    with torch.no_grad():
        model(x)


def no_backward(model, x, c):
    return model(x).sum()


def two_forwards(model, x, c):
    (model(x) + model(x)).sum().backward()


def two_backwards(model, x, c):
    loss = (model(x) * c).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def fewer_rows(model, x, c):
    model(x[:3]).sum().backward()


def no_rows(model, x, c):
    model(3.0).sum().backward()


def a_part_of_the_model(model, x, c):
    (model(x) + model[2](torch.tanh(model[0](x)))).sum().backward()


def a_penalty(model, x, c):
    (model(x).sum() + model[0].weight.square().sum()).backward()


def a_gradient_of_a_gradient(model, x, c):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (no_forward, PrivacyError, "did not call the model: .* once on the whole batch"),
        (evaluation_only, PrivacyError, "did not call the model"),
        (no_backward, PrivacyError, "did not call backward on its loss"),
        (two_forwards, PrivacyError, r"called the model twice.*under torch.no_grad\(\)"),
        (two_backwards, PrivacyError, "called backward twice: add the losses up"),
        (fewer_rows, PrivacyError, r"\(3, 3\), whose axis 0 has not the 5 rows"),
        (no_rows, PrivacyError, "without a tensor of the batch's 5 rows"),
        (a_part_of_the_model, UnsupportedModel, "call the model itself, not its parts"),
        (a_penalty, UnsupportedModel, "'0.weight' received a gradient.*weight_decay"),
        (a_gradient_of_a_gradient, UnsupportedModel, "gradient penalties"),
    ],
)
def test_closures_that_do_something_else_are_refused(closure, error, message):
    model, x, c = small()
    rows, before = expanded(model), traces(model)
    with pytest.raises(error, match=message):
        rows.gradients(lambda: closure(model, x, c), 5)
    assert traces(model) == before
    got, _ = rows.gradients(lambda: once(model, x, c), 5)  # and the next one goes through
    assert_close(got, loop(model, x, c, rows.groups))


def test_an_evaluation_inside_the_closure_is_the_ordinary_forward():
    model, x, c = small()
    rows, other = expanded(model), torch.randn(2, 3).double()
    plain, seen = model(other).detach(), []

    def closure():
        with torch.no_grad():
            seen.append(model(other))
        once(model, x, c)
        with torch.no_grad():
            seen.append(model(other))

    moves = some_moves(5, rows.groups)
    got, _ = rows.gradients(closure, 5, moves.clone())
    assert torch.equal(seen[0], plain) and torch.equal(seen[1], plain)
    assert_close(got, loop(model, x, c, rows.groups, moves))


@pytest.mark.parametrize(
    ("shared", "error", "message"),
    [
        (torch.ones(3, 2), PrivacyError, r"shape \(3, 2\).*make what all rows share a buffer"),
        (torch.ones(1, 2), PrivacyError, r"shape \(1, 2\)"),
        (Holder(torch.ones(5, 2)), UnsupportedModel, "is given a Holder.*tuples, lists and dicts"),
    ],
)
def test_arguments_that_could_carry_one_row_to_another_are_refused(shared, error, message):
    class Adds(nn.Linear):
        def forward(self, x: Tensor, shared=None) -> Tensor:
            return super().forward(x)

    model, x = Adds(3, 2).double(), torch.randn(5, 3).double()
    with pytest.raises(error, match=message):
        expanded(model).gradients(lambda: model(x, shared=shared).sum().backward(), 5)
    expanded(model).gradients(lambda: model(x, shared=torch.tensor(2.0)).sum().backward(), 5)


# -- models that cannot be run so -----------------------------------------------------------


class Does(nn.Module):
    def __init__(self, action) -> None:
        super().__init__()
        self.inner, self.action = nn.Linear(3, 3), action
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor):
        return self.action(self, x)


def branches(model, x):
    return model.inner(x) if x.sum() > 0 else x


def picks(model, x):
    return model.inner(x[x[:, 0] > 0])


def fills(model, x):
    out = torch.zeros(len(x), 3, dtype=x.dtype)
    out[:, :] = model.inner(x)
    return out


def checkpoints(model, x):
    return checkpoint(model.inner, x, use_reentrant=False)


def loses_rows(model, x):
    return model.inner(x).flatten()


def wraps(model, x):
    return Holder(model.inner(x))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (branches, r"Does could not be run .*data-dependent control flow.*use dp-sam or dp-sat"),
        (picks, "boolean mask.*use dp-sam or dp-sat"),
        (fills, "vmap.*use dp-sam or dp-sat"),
        (checkpoints, "vmap.*use dp-sam or dp-sat"),
        (loses_rows, r"an output of shape \(3,\) has no batch axis"),
        (wraps, "returns a Holder without tensors"),
    ],
)
def test_what_vmap_cannot_do_is_refused_by_name(action, message):
    model, x = Does(action).double(), torch.randn(5, 3).double()
    before = traces(model)
    with pytest.raises(UnsupportedModel, match=message):
        expanded(model).gradients(lambda: model(x).sum().backward(), 5)
    assert traces(model) == before


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_mix_examples_are_refused(option):
    model, x = nn.Embedding(7, 3, **option), torch.randint(0, 7, (5, 4))
    before = traces(model)
    with pytest.raises(UnsupportedModel, match="max_norm or scale_grad_by_freq"):
        expanded(model).gradients(lambda: model(x).sum().backward(), 5)
    assert traces(model) == before


def test_a_sparse_embedding_gives_dense_gradients():
    model, x = nn.Embedding(7, 3, sparse=True).double(), torch.randint(0, 7, (5, 4))
    rows, cotangent = expanded(model), torch.randn(5, 4, 3).double()
    got, _ = rows.gradients(lambda: (model(x) * cotangent).sum().backward(), 5)
    dense = nn.Embedding.from_pretrained(model.weight.detach(), freeze=False)
    assert_close(got, loop(dense, x, cotangent, rows.groups))


def counts(model, x):
    model.count += 1
    return model.inner(x)


def replaces(model, x):
    model.count = model.count + x.mean().detach()
    return model.inner(x)


@pytest.mark.parametrize("action", [counts, replaces])
def test_a_forward_that_changes_a_buffer_is_refused(action):
    model, x = Does(action).double(), torch.randn(5, 3).double()
    buffer = model.count
    with pytest.raises(PrivacyError, match="'count' was changed by the forward pass"):
        expanded(model).gradients(lambda: model(x).sum().backward(), 5)
    assert model.count is buffer
    assert "forward" not in model.__dict__


# -- nothing is left behind -----------------------------------------------------------------


def fails(error):
    def action(model, x):
        model.count = model.count + x.mean().detach()
        raise error

    return action


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyError("x"), TypeError("y")])
@pytest.mark.parametrize("where", ["forward", "closure", "backward"])
def test_the_model_is_as_before_after_an_exception(where, error, own_forward):
    model, x = Does(fails(error) if where == "forward" else branches).double(), torch.ones(5, 3)
    x, rows = x.double(), expanded(model)
    if where != "forward":
        model.action = lambda m, x: m.inner(x)
    if own_forward:
        model.forward = lambda x, inner=model.forward: inner(x)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = traces(model)

    def broken(_):
        raise error

    def closure():
        loss = model(x).sum()
        if where == "closure":
            raise error
        if where == "backward":
            loss.register_hook(broken)
        loss.backward()

    for move in (None, some_moves(5, rows.groups)):
        with pytest.raises(type(error)):
            rows.gradients(closure, 5, move)
        assert str(traces(model)) == str(before)
    model.action = lambda m, x: m.inner(x)
    got, _ = rows.gradients(lambda: model(x).sum().backward(), 5)
    assert torch.equal(got, torch.ones(5, 12).double())  # of a sum of a linear layer of ones


def test_a_forward_on_the_instance_is_the_one_that_runs():
    model, x, c = small()
    model.forward = lambda x: 2 * nn.Sequential.forward(model, x)
    rows, own = expanded(model), model.forward
    got, _ = rows.gradients(lambda: once(model, x, c), 5)
    del model.forward
    assert_close(got, 2 * loop(model, x, c, rows.groups))
    model.forward = own
    rows.gradients(lambda: once(model, x, c), 5)
    assert model.forward is own


def test_inside_a_private_engine_with_the_capture_paused():
    torch.manual_seed(10)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()
    x, y = torch.randn(6, 1, 5, 5).double(), torch.randint(0, 3, (6,))
    twin = copy.deepcopy(model)
    engine = PrivacyEngine(accountant="rdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
            noise_multiplier=0.0,
            max_grad_norm=1e6,
        )
    capture = engine._run.capture
    rows = Expanded(model, capture.groups, capture.axis)
    (bx, by) = next(iter(loader))
    assert len(bx) == 6

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(bx), by)
        loss.backward()
        return loss

    hooks = traces(model)[2:4]
    capture.paused = True
    try:
        first, _ = rows.gradients(closure, 6)
        moves = own_ascent(first, 0.2)
        known = moves.clone()
        got, _ = rows.gradients(closure, 6, moves)
    finally:
        capture.paused = False
    assert traces(model)[2:4] == hooks
    assert not capture.collector.total.any() and capture.batch.backward is None
    assert all(p.grad is None for p in model.parameters())
    for i in range(6):
        one = moved_copy(twin, rows.groups, known[i])
        (F.cross_entropy(one(bx[i : i + 1]), by[i : i + 1]) / 6).backward()
        assert_close(got[i], torch.cat([p.grad.flatten() for p in one.parameters()]))
    # The ordinary private step of the same batch is untouched by all this.
    closure()
    optimizer.step()
    F.cross_entropy(twin(bx), by).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.detach(), (q - q.grad).detach(), 1e-6)
