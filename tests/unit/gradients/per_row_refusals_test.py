"""What rows with weights of their own refuse, and that nothing is left behind."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.own_weights import (
    Does,
    assert_close,
    expanded,
    loop,
    moved_copy,
    once,
    small,
    some_moves,
    traces,
)
from vestige import PrivacyEngine, PrivacyError, UnsupportedModel
from vestige.gradients.per_row import Expanded, own_ascent


class Holder:
    """No pytree: its rows cannot be told apart."""

    def __init__(self, x):
        self.x = x


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
