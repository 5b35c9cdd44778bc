"""Engines that share a model, an optimizer or data: they compose, or they say what is left out."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.support.garbage import gone
from vestige import ConfigError, PrivacyEngine, PrivacyError, statement
from vestige.engine.lineage import Trace
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.methods import DPFTRL
from vestige.privacy import accounting
from vestige.privacy.ledger import Event, Ledger
from vestige.privacy.ledger_file import read

N, LOT = 60, 10
OTHERS = "other engines of this process"


def make_model():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def make_data():
    return TensorDataset(torch.randn(N, 5), torch.randint(0, 3, (N,)))


def private(model, data, ledger=None, engine=None, optimizer=None, **options):
    """An engine on this model and data, with what its loop needs."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trainable, lr=0.1)
    engine = engine or PrivacyEngine("rdp", ledger=ledger)
    loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=LOT),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "dataset_size": N} | options,
    )[2]
    return engine, model, optimizer, loader


def step(engine, model, optimizer, batch):
    optimizer.zero_grad()
    engine.backward(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    optimizer.step()


def epochs(made, count=1):
    engine, model, optimizer, loader = made
    for _ in range(count):
        for batch in loader:
            step(engine, model, optimizer, batch)
    return made


def about(engine, what):
    return [caveat for caveat in engine.caveats() if what in caveat]


# -- the same model or optimizer ------------------------------------------------------------


def test_a_second_engine_on_a_model_goes_on_with_the_ledger_of_the_first():
    model, data = make_model(), make_data()
    first = epochs(private(model, data), 2)
    first[0].detach()
    alone = first[0].get_epsilon(1e-5)
    second = epochs(private(model, make_data()), 3)
    both = accounting.epsilon([Event(LOT / N, 1.0, 30)], 1e-5, "rdp")
    assert second[0].get_epsilon(1e-5) == both > alone
    assert about(second[0], "the 12 releases on its ledger are part of epsilon")
    stated = second[0].statement(1e-5)
    assert stated["guarantee"]["epsilon"] == both
    assert sum(event["count"] for event in stated["ledger"]["earlier"]) == 12
    assert not about(second[0], OTHERS)


def test_a_notebook_cell_that_is_run_again_takes_the_place_of_the_engine_before():
    model, data = make_model(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = epochs(private(model, data, optimizer=optimizer))
    for batch in first[3]:  # interrupted in the middle of a lot
        model(batch[0])
        break
    second = epochs(private(model, data, optimizer=optimizer))
    assert second[0].released == 6
    assert second[0].ledger.steps == 6 + 1 + 6  # the open lot of the first was charged
    with pytest.raises(PrivacyError, match="a new one has taken its place"):
        epochs(first)


def test_an_engine_that_is_gone_leaves_no_hooks_to_the_next_one():
    """Where only the model was kept: what watches it still must not do so beside another."""
    model, other = make_model(), make_model()
    groups = partition(model, "flat")
    capture = Capture(model, groups, Clip.over(1.0, groups.names))
    capture.attach()
    dead = weakref.ref(make_data())
    trace = Trace("session", Ledger(), Ledger(), dead, weakref.ref(capture))
    assert trace.over
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not trace.in_the_way(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert trace.in_the_way(nn.Sequential(model), optimizer)
    trace.step_aside()
    assert not model._forward_pre_hooks and not model._forward_hooks
    trace.come_back()
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    capture.detach()  # as the engine did before it was gone: there is nothing to put back
    assert not trace.in_the_way(nn.Sequential(model), optimizer)


@pytest.mark.parametrize("again", ["same objects", "a new model", "closed", "detached"])
def test_a_notebook_cell_with_a_ledger_file_is_run_again(tmp_path, again):
    model, data = make_model(), make_data()
    first = epochs(private(model, data, tmp_path / "l"))
    if again == "closed":
        first[0].close()
    if again == "detached":
        first[0].detach()
    model = make_model() if again == "a new model" else model
    second = epochs(private(model, data, tmp_path / "l"))
    assert second[0].ledger.steps == 12
    assert not about(second[0], OTHERS)
    second[0].close()
    assert sum(event.count for event in read(tmp_path / "l").events) == 12


def test_the_message_on_unfreezing_hands_the_ledger_on_and_that_composes(tmp_path):
    for path in (None, tmp_path / "l"):
        model, data = make_model(), make_data()
        model[0].requires_grad_(False)
        first = epochs(private(model, data, path))
        model[0].requires_grad_(True)
        with pytest.raises(PrivacyError, match=r"PrivacyEngine\(ledger=engine.ledger\)"):
            epochs(first)
        second = epochs(private(model, data, first[0].ledger))
        assert second[0].ledger.steps == 13
        assert second[0].charged == 6
        assert not about(second[0], OTHERS)
        second[0].detach()
    assert sum(event.count for event in read(tmp_path / "l").events) == 13


def test_the_ledger_of_an_engine_that_has_ended_is_opened_again(tmp_path):
    model, data = make_model(), make_data()
    first = epochs(private(model, data, tmp_path / "l"))
    first[0].detach()
    second = epochs(private(model, data, first[0].ledger))
    second[0].detach()
    assert sum(event.count for event in read(tmp_path / "l").events) == 12


def test_an_engine_without_the_file_of_the_one_before_still_counts_it(tmp_path):
    model, data = make_model(), make_data()
    epochs(private(model, data, tmp_path / "l"))
    second = epochs(private(model, data))
    assert second[0].ledger.steps == 12
    assert about(second[0], "no file that knows of this run")
    third = epochs(private(model, data))
    assert third[0].ledger.steps == 18
    assert sum(event.count for event in read(tmp_path / "l").events) == 6


def test_another_ledger_that_was_asked_for_is_kept_and_the_rest_is_said():
    model, data = make_model(), make_data()
    epochs(private(model, data), 2)
    second = epochs(private(model, data, Ledger()))
    assert second[0].ledger.steps == 6
    (caveat,) = about(second[0], "have trained this model")
    assert "(1)" in caveat and "12 releases are not part of epsilon" in caveat
    assert caveat in second[0].statement(1e-5)["caveats"]
    assert caveat in " ".join(statement.markdown(second[0].statement(1e-5)).split())


@pytest.mark.parametrize("shares", ["a part", "a whole", "a tied layer", "memory", "a frozen part"])
def test_weights_are_found_wherever_they_are(shares):
    old, data = make_model(), make_data()
    epochs(private(old, data))[0].detach()
    new = make_model()
    if shares == "a part":
        new = nn.Sequential(old, nn.Linear(3, 3))
    if shares == "a whole":
        new = nn.Sequential(old[0])
        new.append(nn.Linear(8, 3))
    if shares == "a tied layer":
        new[0].weight = old[0].weight
    if shares == "memory":
        new[2].weight.data = old[2].weight.data
    if shares == "a frozen part":
        new[0].weight = nn.Parameter(old[0].weight.detach(), requires_grad=False)
    second = epochs(private(new, make_data()))
    assert second[0].ledger.steps == 12


def test_models_that_share_a_layer_train_side_by_side_and_compose():
    one, two = make_model(), make_model()
    two[0] = one[0]
    first, second = private(one, make_data()), private(two, make_data())
    for _ in range(2):
        epochs(first)
        epochs(second)
    assert first[0].ledger.steps == second[0].ledger.steps == 24
    assert (first[0].released, second[0].released) == (12, 12)


def test_engines_on_a_model_with_ledgers_of_their_own_are_all_counted():
    model, data = make_model(), make_data()
    epochs(private(model, data, Ledger()))
    epochs(private(model, data, Ledger()), 2)
    third = epochs(private(model, data))
    assert third[0].ledger.steps == 6 + 12 + 6
    fourth = epochs(private(model, data))
    assert fourth[0].ledger.steps == 6 + 12 + 6 + 6


def test_the_adjacency_and_test_mode_of_an_engine_before_are_inherited():
    model, data = make_model(), make_data()
    seeded = PrivacyEngine("rdp", noise_seed=1)
    epochs(private(model, data, engine=seeded, method=DPFTRL(), steps=6))
    second = epochs(private(model, data))
    assert second[0].adjacency.startswith("zero out")
    assert about(second[0], "another run on the ledger was in test mode")
    stated = second[0].statement(1e-5)
    assert stated["status"] == "test mode"
    assert "zero out" in stated["headline"] and "zero out" in stated["guarantee"]["kind"]


def test_a_fresh_model_on_fresh_data_has_nothing_to_say():
    made = epochs(private(make_model(), make_data()))
    assert made[0].caveats() == []
    made = private(copy.deepcopy(made[1]), make_data())
    assert made[0].caveats() == []


def test_what_is_gone_is_not_found_in_what_takes_its_place():
    """Many models and data sets, one after the other, at the same addresses."""
    seen = []
    for _ in range(12):
        model, data = make_model(), make_data()
        seen.append((id(model[0].weight), id(data), data.tensors[0].data_ptr()))
        made = epochs(private(model, data))
        assert made[0].caveats() == [] and made[0].ledger.steps == 6
        del made, model, data
        gc.collect()
    assert any(len(set(places)) < 12 for places in zip(*seen, strict=True))  # they came again


def test_traces_keep_no_model_alive(tmp_path):
    data = make_data()
    for path in (None, tmp_path / "l"):
        made = epochs(private(make_model(), data, path))
        made[0].close()
        model = weakref.ref(made[1])
        del made
        assert gone(model)
    assert about(private(make_model(), data)[0], "their 12 releases")


def test_an_engine_that_was_never_used_leaves_nothing():
    model, data = make_model(), make_data()
    private(model, data)
    second = epochs(private(model, data))
    assert second[0].caveats() == []
    assert second[0].ledger.steps == 6


# -- the same data --------------------------------------------------------------------------


class Rows(Dataset):
    """A data set that keeps its records in an attribute."""

    def __init__(self, records):
        self.records = records
        self.mean = MEAN

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return torch.as_tensor(self.records[index]), 0


MEAN = torch.zeros(3)
X = torch.randn(N, 5)
ARRAY = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
LIST = [(row.clone(), 0) for row in torch.randn(N, 5)]
SET = make_data()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: SET, lambda: SET),
        (lambda: SET, lambda: Subset(SET, range(N))),
        (lambda: TensorDataset(X, SET.tensors[1]), lambda: TensorDataset(X, torch.zeros(N).long())),
        (
            lambda: TensorDataset(X, SET.tensors[1]),
            lambda: TensorDataset(X[:], torch.ones(N).long()),
        ),
        (lambda: Rows(X), lambda: Rows(X)),
        (lambda: Rows(ARRAY), lambda: Rows(ARRAY[:])),
        (lambda: Rows(ARRAY), lambda: Rows(torch.from_numpy(ARRAY))),
        (lambda: LIST, lambda: LIST),
        (lambda: LIST, lambda: list(LIST)),
        (lambda: torch.utils.data.ConcatDataset([SET]), lambda: SET),
    ],
)
def test_another_model_on_the_same_data_is_told_of_what_its_epsilon_leaves_out(one, other):
    first, before = one(), make_model()
    made = epochs(private(before, first))
    second = epochs(private(make_model(), other()), 2)
    assert second[0].ledger.steps == 12
    (caveat,) = about(second[0], "have trained on this data")
    assert "releases are not part of epsilon" in caveat and "ledger=engine.ledger" in caveat
    assert caveat in second[0].statement(1e-5)["caveats"]
    # And the first one is told of the second.
    assert about(made[0], "have trained on this data")


def test_a_ledger_that_was_handed_on_leaves_nothing_out():
    data = make_data()
    first = epochs(private(make_model(), data))
    second = epochs(private(make_model(), data, first[0].ledger))
    assert second[0].ledger.steps == 12
    assert first[0].caveats() == second[0].caveats() == []


def test_what_is_not_the_records_does_not_make_data_the_same():
    epochs(private(make_model(), Rows(torch.randn(N, 5))))
    assert epochs(private(make_model(), Rows(torch.randn(N, 5))))[0].caveats() == []


# -- a target on a ledger -------------------------------------------------------------------


def with_target(model, data, engine, target, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=LOT),
        **{"target_epsilon": target, "target_delta": 1e-5, "epochs": 2, "max_grad_norm": 1.0}
        | options,
    )[2]
    return engine, model, optimizer, loader


@pytest.mark.parametrize("kind", ["file", "shared", "same model"])
def test_a_target_is_for_everything_on_the_ledger(tmp_path, kind):
    model, data = make_model(), make_data()
    first = epochs(with_target(model, data, PrivacyEngine("rdp", ledger=tmp_path / "l"), 2.0), 2)
    assert 1.9 < first[0].get_epsilon(1e-5) <= 2.0
    if kind == "file":
        first[0].close()

    def engine():
        given = {"file": tmp_path / "l", "shared": first[0].ledger, "same model": None}[kind]
        return PrivacyEngine("rdp", ledger=given)

    model = model if kind == "same model" else make_model()
    for target in (1.0, 2.0):
        with pytest.raises(ConfigError, match=rf"target_epsilon {target} is used up by the ledger"):
            with_target(model, data, engine(), target)
    second = epochs(with_target(model, data, engine(), 3.0), 2)
    assert 2.9 < second[0].get_epsilon(1e-5) <= 3.0
    assert second[0].charged == 12 and second[0].earlier == 12


def test_a_run_with_a_target_goes_on_from_its_checkpoint(tmp_path):
    torch.manual_seed(0)
    data, path = make_data(), tmp_path / "l"
    save = tmp_path / "c"
    first = epochs(with_target(make_model(), data, PrivacyEngine("rdp", ledger=path), 2.0))
    first[0].save_checkpoint(save)
    first[0].close()
    with pytest.raises(PrivacyError, match=r"other settings \(noise_multiplier.*resume=CHECKPOINT"):
        other = PrivacyEngine("rdp", ledger=path)
        with_target(make_model(), data, other, 2.0)[0].load_checkpoint(save)
    other.close()
    again = PrivacyEngine("rdp", ledger=path)
    second = with_target(make_model(), data, again, 2.0, resume=save)
    again.load_checkpoint(save)
    epochs(second)
    assert again.released == 12
    assert again.get_epsilon(1e-5) <= 2.0
    # A checkpoint that is not there yet is no obstacle.
    fresh = PrivacyEngine("rdp")
    with_target(make_model(), make_data(), fresh, 2.0, resume=tmp_path / "none")
    assert fresh.plan.noise_multiplier == second[0].plan.noise_multiplier


# -- going back to a checkpoint -------------------------------------------------------------


def test_going_back_without_a_ledger_file_is_said(tmp_path):
    data = make_data()
    first = epochs(private(make_model(), data))
    first[0].save_checkpoint(tmp_path / "c")
    epochs(first, 5)
    first[0].detach()
    second = private(make_model(), data)
    second[0].load_checkpoint(tmp_path / "c")
    epochs(second, 5)
    (caveat,) = about(second[0], "saved state without a ledger file")
    assert caveat in second[0].statement(1e-5)["caveats"]
    assert about(second[0], "36 releases are not part of epsilon")
    # Also by whoever goes on from there, and where nothing was charged when the state was saved.
    state = second[0].state_dict()
    third = private(make_model(), make_data())
    third[0].load_state_dict(state)
    assert about(third[0], "saved state without a ledger file")
    empty = private(make_model(), make_data())[0].state_dict()
    fourth = private(make_model(), make_data())
    fourth[0].load_state_dict(empty)
    fourth[0].keep_ledger(tmp_path / "l")
    fourth[0].save_checkpoint(tmp_path / "d")
    fourth[0].close()
    fifth = private(make_model(), make_data(), tmp_path / "l")
    fifth[0].load_checkpoint(tmp_path / "d")
    assert about(fifth[0], "saved state without a ledger file")


def test_going_back_with_the_same_model_stays_charged(tmp_path):
    model, data = make_model(), make_data()
    first = epochs(private(model, data))
    first[0].save_checkpoint(tmp_path / "c")
    epochs(first, 2)
    second = private(model, data)
    second[0].load_checkpoint(tmp_path / "c")
    epochs(second)
    assert second[0].released == 12
    assert second[0].ledger.steps == second[0].charged == 18 + 6
    assert second[0].lost == 12
    assert not about(second[0], OTHERS)


def test_a_state_of_another_run_composes_with_what_the_model_was_trained_with(tmp_path):
    other = epochs(private(make_model(), make_data()))
    other[0].save_checkpoint(tmp_path / "c")
    model = make_model()
    epochs(private(model, make_data()), 2)
    second = private(model, make_data())
    second[0].load_checkpoint(tmp_path / "c")
    assert (second[0].charged, second[0].earlier) == (6, 12)


def test_a_ledger_file_knows_of_what_came_after_the_checkpoint(tmp_path):
    data = make_data()
    first = epochs(private(make_model(), data, tmp_path / "l"))
    first[0].save_checkpoint(tmp_path / "c")
    epochs(first, 2)
    first[0].close()
    second = private(make_model(), data, tmp_path / "l")
    second[0].load_checkpoint(tmp_path / "c")
    epochs(second)
    assert second[0].ledger.steps == 18 + 6
    assert second[0].caveats() == []


def test_a_saved_state_keeps_what_others_on_its_ledger_were():
    data = make_data()
    first = epochs(private(make_model(), data, engine=PrivacyEngine("rdp", noise_seed=1)))
    zeroed = private(make_model(), data, first[0].ledger, method=DPFTRL(), steps=6)
    epochs(zeroed)
    second = epochs(private(make_model(), data, first[0].ledger))
    state = second[0].state_dict()
    third = private(make_model(), make_data())
    third[0].load_state_dict(state)
    assert third[0].adjacency.startswith("zero out")
    assert third[0].statement(1e-5)["status"] == "test mode"
    for broken in ({"adjacency": 3, "test_mode": True}, {"adjacency": "x"}, 5, {"what": 1}):
        bad = private(make_model(), make_data())[0]
        if broken == {"adjacency": "x"}:
            bad.load_state_dict(state | {"others": broken})
            continue
        with pytest.raises(ConfigError, match="others="):
            bad.load_state_dict(state | {"others": broken})
        assert bad.ledger.steps == 0
