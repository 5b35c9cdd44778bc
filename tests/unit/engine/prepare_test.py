"""From the arguments of make_private to a plan."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import small_runs
from tests.support.loops import epoch, mlp, private, records
from vestige import ConfigError, PrivacyEngine, accounting
from vestige.engine import privacy_engine
from vestige.gradients import Capture
from vestige.plan import lots_per_epoch

MODEL = mlp()


STRANGER = nn.Parameter(torch.zeros(3))


REFUSED = {
    "poisson_sampling": {"poisson_sampling": False},
    "noise_generator": {"noise_generator": torch.Generator()},
    "noise_multiplier=-0.1": {"noise_multiplier": -0.1},
    "noise_multiplier=nan": {"noise_multiplier": math.nan},
    "noise_multiplier=inf": {"noise_multiplier": math.inf},
    "exactly one": {"noise_multiplier": 1.0, "group_noise_multipliers": [1.0]},
    "exactly one of them": {"noise_multiplier": None},
    "group_noise_multipliers has 3": {"group_noise_multipliers": [1.0, 1.0, 1.0]},
    "max_grad_norm=0": {"max_grad_norm": 0},
    "max_grad_norm=-1": {"max_grad_norm": -1.0},
    "max_grad_norm=inf": {"max_grad_norm": math.inf},
    "max_grad_norm=nan": {"max_grad_norm": math.nan},
    "clipping='ghost'": {"clipping": "ghost"},
    "method='sgd'": {"method": "sgd"},
    "loss_reduction='none'": {"loss_reduction": "none"},
    "sample_rate=0": {"sample_rate": 0.0},
    "sample_rate=1.5": {"sample_rate": 1.5},
    "steps=0": {"steps": 0},
    "max_physical_batch_size=0": {"max_physical_batch_size": 0},
    "max_physical_batch_size=2.5": {"max_physical_batch_size": 2.5},
    "dataset_size=0": {"dataset_size": 0},
    "larger than the data": {"dataset_size": 5},
    "noise_seed": {"noise_seed": "7"},
    "misses 2.bias": {"clipping": [["0.weight", "0.bias"], ["2.weight"]]},
    "twice": {"clipping": [["0.weight", "0.bias", "2.weight"], ["2.weight", "2.bias"]]},
    "not a trainable parameter": {"clipping": [["0.weight", "nowhere"]]},
    "reduction='sum'": {"criterion": nn.CrossEntropyLoss(reduction="sum")},
    "class weights": {"criterion": nn.CrossEntropyLoss(weight=torch.ones(3))},
    "ignore_index": {"criterion": nn.CrossEntropyLoss(ignore_index=0)},
    "does not hold": {"optimizer": torch.optim.SGD(MODEL[0].parameters(), lr=0.1)},
    "not parameters of the model": {
        "optimizer": torch.optim.SGD([*MODEL.parameters(), STRANGER], lr=0.1)
    },
    "LBFGS": {"optimizer": torch.optim.LBFGS(MODEL.parameters())},
    "torch.optim": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_settings_are_refused_with_their_name_and_leave_the_model_alone(message):
    engine = PrivacyEngine()
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        private(MODEL, engine=engine, **REFUSED[message])
    assert not MODEL._forward_hooks
    assert not MODEL._forward_pre_hooks
    private(MODEL, engine=engine)[0].detach()


IDS = torch.arange(24) // 3


def test_users_are_what_sizes_and_rates_count():
    engine, *_ = small_runs.private("dp-sgd", units=IDS, rows_per_unit=2)
    plan = engine.plan
    assert (plan.dataset_size, plan.batch_size, plan.sample_rate) == (8, 6, 0.75)
    assert (plan.unit_rows, plan.counted) == (2, "users")
    assert plan.adjacency == "add or remove one user with all rows"
    assert "one user with all rows" in str(plan)
    assert plan == type(plan).restored(plan.as_dict())
    declared, *_ = small_runs.private("dp-sgd", units=IDS, rows_per_unit=2, dataset_size=12)
    assert declared.plan.sample_rate == 0.5


def test_views_leave_sizes_and_neighbours_as_they_are():
    engine, *_ = small_runs.private("dp-sgd", views=4, augment=lambda x: x)
    plan = engine.plan
    assert (plan.dataset_size, plan.batch_size, plan.sample_rate) == (24, 6, 0.25)
    assert (plan.unit_rows, plan.views, plan.adjacency) == (4, 4, "add or remove one record")


def test_noise_is_solved_for_at_the_rate_of_users():
    engine = PrivacyEngine()
    model = mlp()
    data = TensorDataset(torch.randn(24, 5), torch.zeros(24).long())
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=2),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        units=IDS,
        rows_per_unit=2,
    )
    expected = accounting.calibrate(3.0, 1e-3, 2 / 8, 8)
    assert engine.plan.steps == 8
    assert engine.plan.noise_multiplier == pytest.approx(expected.noise_multiplier)


@pytest.mark.parametrize(
    "options",
    [
        {"units": IDS, "rows_per_unit": 4, "max_physical_batch_size": 3},
        {"views": 4, "augment": abs, "max_physical_batch_size": 3},
        {"units": IDS, "rows_per_unit": 2, "views": 2, "augment": abs}
        | {"max_physical_batch_size": 3},
    ],
)
def test_a_unit_without_room_in_a_physical_batch_is_refused(options):
    with pytest.raises(ConfigError, match="no room for the 4 rows of one privacy unit"):
        small_runs.private("dp-sgd", **options)


@pytest.mark.parametrize("bound", [torch.tensor(1.0), [torch.tensor(0.6), np.float32(0.8)]])
def test_bounds_given_as_tensors_or_numpy_numbers_mean_their_values(bound):
    engine, *_ = private(clipping="per_layer", max_grad_norm=bound)
    assert engine.plan.sensitivity == pytest.approx(1.0)


def test_a_single_bound_is_split_over_the_layers():
    engine, *_ = private(clipping="per_layer", max_grad_norm=0.9)
    assert engine.plan.group_names == ("0", "2")
    assert engine.plan.bounds == pytest.approx((0.9 / math.sqrt(2),) * 2)
    assert engine.plan.sensitivity == pytest.approx(0.9)
    assert engine.plan.noise_stds == pytest.approx((0.9, 0.9))


def test_a_sequence_gives_each_group_its_bound():
    engine, *_ = private(clipping="per_layer", max_grad_norm=[3.0, 4.0], noise_multiplier=0.5)
    assert engine.plan.bounds == (3.0, 4.0)
    assert engine.plan.sensitivity == 5.0
    assert engine.plan.noise_stds == (2.5, 2.5)
    assert engine.plan.noise_multiplier == 0.5


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_sequence_of_the_wrong_length_lists_the_groups(length):
    model = nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    if length == 3:
        model[1][1].requires_grad_(False)
    count = 2 if length == 3 else 3
    names = "0, 1.0" if length == 3 else "0, 1.0, 1.1"
    with pytest.raises(ConfigError, match=rf"{length} values for {count} groups.*{names}\."):
        private(model, clipping="per_layer", max_grad_norm=[1.0] * length)


def test_a_partition_may_name_parameters_or_give_them():
    model = mlp()
    engine, *_ = private(
        model,
        clipping={"first": ["0.weight"], "rest": [model[0].bias, "2.weight", model[2].bias]},
        max_grad_norm=[1.0, 2.0],
    )
    assert engine.plan.group_names == ("first", "rest")
    assert engine.plan.clipping == "partition"


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp_classic", "prv"])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_calibration_never_exceeds_the_target(accountant, target):
    model = mlp()
    engine = PrivacyEngine(accountant=accountant, noise_seed=0)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=7),
        target_epsilon=target,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=1.0,
    )
    assert engine.plan.steps == 3 * 4
    for _ in range(3):
        epoch(model, optimizer, loader)
    assert 0.98 * target < engine.get_epsilon(1e-5) <= target


def test_the_length_of_a_calibrated_run_is_given_once():
    model = mlp()
    options = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(records(), batch_size=6),
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
        "max_grad_norm": 1.0,
    }
    for extra, message in (
        ({}, "exactly one"),
        ({"epochs": 1, "steps": 4}, "exactly one"),
        ({"epochs": 0}, "epochs=0"),
        ({"steps": -1}, "steps=-1"),
        ({"epochs": 1, "noise_multiplier": 1.0}, "solves for the noise"),
        ({"epochs": 1, "target_epsilon": 0.0}, "target_epsilon"),
        ({"epochs": 1, "target_delta": 1.0}, "delta"),
    ):
        with pytest.raises(ConfigError, match=message):
            PrivacyEngine().make_private_with_epsilon(**{**options, **extra})
    by_steps = PrivacyEngine()
    by_steps.make_private_with_epsilon(**options, steps=8)
    by_steps.detach()
    by_epochs = PrivacyEngine()
    by_epochs.make_private_with_epsilon(**options, epochs=2)
    assert by_steps.plan == by_epochs.plan


def test_an_epoch_has_ceil_lots_for_every_length():
    """int(1 / (1 / L)) loses a step for L = 391 and 140 others below 2000."""
    for length in range(1, 3000):
        assert lots_per_epoch(128 * length, 128) == length
        assert lots_per_epoch(128 * length + 1, 128) == length + 1
        assert lots_per_epoch(128 * length - 127, 128) == length


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_lots_per_epoch_is_exact(size, batch):
    assert lots_per_epoch(size, batch) == math.ceil(Fraction(size, batch))


@pytest.mark.parametrize("size", [1, 49, 50, 51, 391 * 2, 391 * 2 + 1])
def test_loader_plan_and_calibration_share_one_epoch(size):
    batch = min(2, size)
    model = nn.Linear(1, 1)
    engine = PrivacyEngine(accountant="rdp")
    data = TensorDataset(torch.zeros(size, 1))
    _, _, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch),
        target_epsilon=5.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
    )
    assert len(loader) == engine.plan.lots_per_epoch == math.ceil(size / batch)
    assert engine.plan.steps == 2 * len(loader)
    assert engine.plan.sample_rate == batch / size


def test_a_declared_size_and_rate_are_what_is_sampled_and_charged():
    engine, model, optimizer, loader = private(dataset_size=48)
    assert engine.plan.sample_rate == 6 / 48
    assert len(loader) == 8
    epoch(model, optimizer, loader)
    assert [(e.sample_rate, e.count) for e in engine.ledger.events] == [(6 / 48, 8)]
    engine, model, optimizer, loader = private(sample_rate=0.5)
    assert len(loader) == 4
    epoch(model, optimizer, loader)
    assert [(e.sample_rate, e.count) for e in engine.ledger.events] == [(0.5, 4)]


def test_unknown_options_are_refused_before_the_noise_is_solved_for(monkeypatch):
    def solving(*_):
        raise AssertionError("the noise was solved for")

    monkeypatch.setattr(accounting, "noise_for", solving)
    model = mlp()
    with pytest.raises(ConfigError, match=r"no argument 'max_physical_batchsize'.*Did you mean"):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records(), batch_size=6),
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
            max_physical_batchsize=2,
        )


@pytest.mark.parametrize("where", ["PrivateLoader", "attach"])
def test_a_make_private_that_fails_leaves_nothing_behind(where, monkeypatch, tmp_path):
    """No hooks, no attributes, no lock, no line in the ledger: the next one finds all as it was."""
    model = mlp()
    before = set(vars(model)), set(vars(model[0]))

    def fails(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patched:
        if where == "attach":
            patched.setattr(Capture, "attach", fails)
        else:
            patched.setattr(privacy_engine, "PrivateLoader", fails)
        engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
        with pytest.raises(MemoryError):
            private(model, engine=engine)
    assert (set(vars(model)), set(vars(model[0]))) == before
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert model._compiled_call_impl is None
    assert all(not p._backward_hooks for p in model.parameters())
    for other in (engine, PrivacyEngine(ledger=tmp_path / "ledger.jsonl")):
        found = private(mlp(), engine=other)
        epoch(*found[1:])
        other.close()
    assert other.ledger.steps == 4 + 4
    assert not any("this model or its optimizer" in caveat for caveat in other.caveats())
