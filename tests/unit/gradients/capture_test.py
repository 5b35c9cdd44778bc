"""The capture: rows are told apart by where they come from, and nothing uncaptured gets through."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import call, captured_sum, clip_and_sum, loop_gradients, take
from tests.support.zoo import zoo
from vestige import PrivacyEngine, PrivacyError, UnsupportedModel, fix
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition


class Positions(nn.Module):
    """Position embeddings looked up once for all rows, three ways."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.words = nn.Embedding(11, 4)
        self.flat = nn.Embedding(length, 4)
        self.lead = nn.Embedding(length, 4)
        self.bias = nn.Embedding(length * 2, 2)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(self.length)
        h = self.words(x) + self.flat(at).unsqueeze(0) + self.lead(at.unsqueeze(0))
        scores = (h @ h.transpose(1, 2)).unsqueeze(1)
        distance = at[:, None] - at[None] + self.length
        scores = scores + self.bias(distance).permute(2, 0, 1)
        return self.out(scores.softmax(-1).mean(1) @ h)


class Unrolled(nn.Module):
    """A recurrent cell by hand: its initial state is a constant with batch rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ones(len(x), 4, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = torch.tanh(self.wx(x[:, t]) + self.wh(h))
        return h


class Mixed(nn.Module):
    def __init__(self, mix) -> None:
        super().__init__()
        self.inner, self.mix = nn.Linear(4, 4), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.inner, x)


def make_private(model: nn.Module, x: Tensor, y: Tensor | None = None, **options):
    y = torch.zeros(len(x), dtype=torch.long) if y is None else y
    engine = PrivacyEngine(accountant="rdp")
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, **options}
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        **settings,
    )
    return engine, *made


@pytest.mark.parametrize("rows", [5, 6, 1, 3])
def test_a_lot_as_long_as_the_sequence_is_not_mistaken_for_it(rows):
    torch.manual_seed(1)
    model = Positions(5).double()  # rows == 5: the tables have exactly as many rows as the lot
    x = torch.randint(0, 11, (rows, 5))
    groups = partition(model, "flat")
    cotangent = torch.randn(rows, 5, 3, dtype=torch.float64)
    gradients = loop_gradients(model, x, cotangent, groups)
    bound = float(gradients.norm(dim=1).min()) / 2
    expected = clip_and_sum(gradients, groups, Clip((bound,)))
    got, _ = captured_sum(model, x, cotangent, "flat", bound)
    assert (got - expected).norm() < 1e-9 * expected.norm()


def test_an_initial_state_made_in_the_forward_pass_has_batch_rows():
    torch.manual_seed(2)
    model = Unrolled().double()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    groups = partition(model, "flat")
    gradients = loop_gradients(model, x, torch.ones(6, 4, dtype=torch.float64), groups)
    expected = clip_and_sum(gradients, groups, Clip((1.0,)))
    engine, model, optimizer, loader = make_private(model, x)
    for a, _ in loader:
        engine.backward(model(a).sum(1))
        optimizer.step()
    got = torch.cat([p.grad.flatten() for p in model.parameters()]) * 6
    assert (got - expected).norm() < 1e-9 * expected.norm()


def test_without_a_self_check_a_constant_input_is_refused():
    x = torch.randn(6, 4, 3)
    _, model, _, loader = make_private(Unrolled(), x, self_check=False)
    with pytest.raises(UnsupportedModel, match="no batch rows"):
        for a, _ in loader:
            model(a)


@pytest.mark.parametrize("name", list(zoo()))
def test_an_examples_gradient_does_not_depend_on_the_others(name):
    model, x, pick = zoo()[name]
    out = pick(call(model, x))
    cotangent = torch.zeros_like(out)
    cotangent[4] = torch.randn_like(out[4])  # only example 4 contributes
    before, _ = captured_sum(model, x, cotangent, pick=pick)
    order = [0, 8, 2, 3, 4, 1, 6, 1, 7]  # replace, repeat and permute the others
    after, _ = captured_sum(model, take(x, order), cotangent, pick=pick)
    assert (after - before).norm() <= 1e-5 * before.norm()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear, short sequence",
        "conv2d",
        "conv2d gram",
        "group norm",
        "lstm",
        "attention",
    ],
)
def test_a_poisoned_example_contributes_at_most_the_bound(name, poison, clipping):
    model, x, pick = zoo()[name]
    x = tuple(t.clone() for t in x) if isinstance(x, tuple) else x.clone()
    cotangent = torch.randn_like(pick(call(model, x)))
    keep = [i for i in range(9) if i != 3]
    clean, _ = captured_sum(model, take(x, keep), cotangent[keep], clipping, 0.1, pick=pick)
    for t in x if isinstance(x, tuple) else (x,):
        t[3] = poison
    total, _ = captured_sum(model, x, cotangent, clipping, 0.1, pick=pick)
    assert torch.isfinite(total).all()
    assert (total - clean).norm() <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("length, width", [(4, 64), (64, 4)])
def test_cancelling_positions_do_not_slip_through_the_clip(length, width):
    # In float32 the Gram matrices of nearly opposite positions cancel to noise around zero.
    torch.manual_seed(3)
    model = nn.Linear(width, width, bias=False)
    half = 1e4 * torch.randn(1, length // 2, width)
    x = torch.cat([half, half * (1 + 1e-7)], dim=1)
    g = torch.randn(1, length // 2, width)
    cotangent = torch.cat([g, -g * (1 + 1e-7)], dim=1)
    total, _ = captured_sum(model, x, cotangent, "flat", 1.0)
    assert total.norm() <= 1 + 1e-6


def test_clipped_norms_stay_within_the_bound_at_every_scale():
    torch.manual_seed(4)
    for name, (model, x, pick) in zoo().items():
        for scale in (1e-3, 1.0, 1e6):
            cotangent = scale * torch.randn_like(pick(call(model, x)))
            for i in range(3):
                one = slice(i, i + 1)
                total, _ = captured_sum(model, take(x, one), cotangent[one], bounds=0.5, pick=pick)
                assert total.norm() <= 0.5 * (1 + 1e-6), name


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation produced."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_no_tensor_is_as_large_as_rows_times_parameters(clipping):
    rows = 32
    tied = nn.Embedding(200, 24)
    head = nn.Linear(24, 200, bias=False)
    head.weight = tied.weight
    models = [
        (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(rows, 64)),
        (nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 32, 3)), torch.randn(rows, 8, 8, 8)),
        (nn.Sequential(tied, nn.Linear(24, 24), head), torch.randint(0, 200, (rows, 4))),
    ]
    for model, x in models:
        parameters = sum(p.numel() for p in model.parameters())
        cotangent = torch.randn_like(model(x))
        with Largest() as largest:
            captured_sum(model, x, cotangent, clipping)
        assert largest.numel < rows * parameters


CROSSINGS = {
    "batch statistics": lambda inner, x: inner(x - x.mean(0)),
    "attention over the batch": lambda inner, x: torch.softmax(x @ x.t(), 1) @ inner(x),
    "neighbouring rows": lambda inner, x: inner(x) + inner(x).roll(1, 0),
}


@pytest.mark.parametrize("name", list(CROSSINGS))
def test_the_self_check_finds_rows_that_mix(name):
    torch.manual_seed(5)
    _, model, _, loader = make_private(Mixed(CROSSINGS[name]), torch.randn(8, 4))
    with pytest.raises(PrivacyError, match="examples of a batch meet in '"):
        for x, _ in loader:
            model(x)


def test_the_self_check_leaves_no_trace():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    engine, model, _, loader = make_private(model, torch.randn(8, 4))
    state = torch.get_rng_state()
    for x, _ in loader:
        with torch.random.fork_rng():
            model(x)
        break
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert engine.released == 0 and not engine._run.capture.collector.total.any()


def test_a_model_that_rejects_synthetic_rows_trains_with_a_warning():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not (x == 1).all():
                raise ValueError("ones only")
            return self.inner(x)

    engine, model, optimizer, loader = make_private(Picky(), torch.ones(8, 4))
    with pytest.warns(UserWarning, match="self-check was skipped"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert engine.released == 1


def test_a_gradient_by_any_other_way_is_refused():
    _, model, _, loader = make_private(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4)
    )
    for x, y in loader:
        with pytest.raises(UnsupportedModel, match=r"'0.weight' received a gradient"):
            (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()
        with pytest.raises(UnsupportedModel, match="call the model itself"):
            model[0](x).sum().backward()
        assert all(p.grad is None for p in model.parameters())


def test_an_uncovered_use_at_the_root_names_the_parameter_and_the_remedy():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x @ torch.softmax(self.odd, 0))

    _, model, _, loader = make_private(Root(), torch.randn(8, 4))
    with pytest.raises(UnsupportedModel, match=r"'odd' is used by 'softmax'.*submodule of its own"):
        for x, _ in loader:
            model(x)


@pytest.mark.parametrize(
    "norm, name",
    [(nn.BatchNorm1d(4), "1"), (nn.SyncBatchNorm(4), "1")],
)
def test_batch_norm_is_refused_and_fixed(norm, name):
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
    with pytest.raises(UnsupportedModel, match=rf"module '{name}' \({type(norm).__name__}\).*fix"):
        make_private(model, torch.randn(8, 4))
    fixed = fix(model)
    assert isinstance(fixed[1], nn.GroupNorm) and model[1] is norm
    assert list(fixed.state_dict()) == [
        k for k in model.state_dict() if "running" not in k and "num" not in k
    ]
    engine, fixed, optimizer, loader = make_private(fixed, torch.randn(8, 4))
    for x, y in loader:
        F.cross_entropy(fixed(x), y).backward()
        optimizer.step()
    assert engine.released == 1


def test_a_buffer_that_the_forward_pass_changes_is_refused():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().mean(0)
            return super().forward(x)

    _, model, _, loader = make_private(Counting(), torch.randn(8, 4), self_check=False)
    with pytest.raises(PrivacyError, match="'seen' of Counting was changed by the forward"):
        for x, _ in loader:
            model(x)


def test_an_input_changed_in_place_is_refused():
    _, model, _, loader = make_private(
        Mixed(lambda inner, x: inner(x) + x.mul_(2)), torch.randn(8, 4), self_check=False
    )
    with pytest.raises(PrivacyError, match="in-place"):
        for x, _ in loader:
            (model(x).sum() / len(x)).backward()


def test_copies_and_pickles_of_the_model_are_free_of_the_engine():
    _, model, _, _ = make_private(nn.Sequential(nn.Linear(4, 2)), torch.randn(8, 4))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), loaded):
        assert list(twin.state_dict()) == list(model.state_dict())
        twin(torch.randn(3, 4)).sum().backward()  # an ordinary model again
        assert twin[0].weight.grad is not None


def test_rows_on_the_second_axis():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn = nn.Embedding(11, 4), nn.GRU(4, 3)
            self.place = nn.Parameter(torch.randn(5, 1, 4))
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.rnn(self.table(x) + self.place)[0])

    torch.manual_seed(7)
    model = TimeFirst().double()
    x = torch.randint(0, 11, (5, 6))
    groups = partition(model, "per_layer")
    cotangent = torch.randn(5, 6, 3, dtype=torch.float64)
    gradients = loop_gradients(model, x, cotangent, groups, axis=1)
    expected = clip_and_sum(gradients, groups, Clip.over(1.0, groups.names))
    for physical in (None, 4):
        got, _ = captured_sum(model, x, cotangent, "per_layer", 1.0, physical, axis=1)
        assert (got - expected).norm() < 1e-9 * expected.norm()


def test_autocast_and_low_precision_parameters_sum_in_float32():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    x = torch.randn(8, 16)
    exact, _ = captured_sum(model, x, torch.ones(8, 2))

    def under_autocast(out: Tensor) -> Tensor:
        return out.float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, _ = captured_sum(model, x, torch.ones(8, 2), pick=under_autocast)
    low, _ = captured_sum(model.bfloat16(), x.bfloat16(), torch.ones(8, 2).bfloat16())
    for total in (mixed, low):
        assert total.dtype == torch.float32
        assert (total - exact).norm() < 0.05 * exact.norm()


def test_two_forward_passes_in_one_backward_count_as_one_example():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    twice = Mixed(lambda _, v: v)
    del twice
    groups = partition(model, "per_layer")
    rows = []
    for i in range(6):
        twin = copy.deepcopy(model)
        (twin(x[i : i + 1]).sum() + twin(-x[i : i + 1]).square().sum()).backward()
        rows.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))
    expected = clip_and_sum(torch.stack(rows), groups, Clip.over(1.0, groups.names))
    engine, model, optimizer, loader = make_private(model, x, clipping="per_layer")
    for a, _ in loader:
        engine.backward(model(a).sum(1) + model(-a).square().sum(1))
        optimizer.step()
    got = torch.cat([p.grad.flatten() for p in model.parameters()]) * 6
    assert (got - expected).norm() < 1e-9 * expected.norm()
