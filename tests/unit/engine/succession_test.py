"""A make_private that fails leaves the engine that was there before as it was."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.support.loops import N, mlp, private, records
from vestige import ConfigError, PrivacyEngine
from vestige.methods import DPSGD
from vestige.privacy.ledger_file import read

ROWS = 4  # of a batch: every lot comes in several


class Unlucky(DPSGD):
    """Fails where its parts are made, which is late."""

    def parts(self, context):
        raise ValueError("no parts today")


class Interrupted(torch.optim.SGD):
    """Ctrl-C falls between two of the new engine's hooks."""

    def register_step_post_hook(self, hook):
        os.kill(os.getpid(), signal.SIGINT)
        return super().register_step_post_hook(hook)


class Broken(torch.utils.data.TensorDataset):
    """Records that cannot be read, or Ctrl-C while they are."""

    def __init__(self, *tensors, interrupts):
        super().__init__(*tensors)
        self.interrupts = interrupts

    def __getitem__(self, index):
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the disk is gone")


def data(interrupts=None):
    tensors = records().tensors
    return records() if interrupts is None else Broken(*tensors, interrupts=interrupts)


def try_another(model, optimizer, ledger=None, dataset=None, epsilon=None, **options):
    engine = PrivacyEngine("rdp", ledger=ledger)
    noise = {"noise_multiplier": 1.0}
    make = engine.make_private
    if epsilon is not None:
        make = engine.make_private_with_epsilon
        noise = {"target_epsilon": epsilon, "target_delta": 1e-5, "epochs": 1}
    make(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset or data(), batch_size=6),
        **noise | {"max_grad_norm": 1.0} | options,
    )


def other_optimizer(model):
    return Interrupted(model.parameters(), lr=0.1)


FAILURES = {
    "a budget without delta": (ConfigError, {"max_epsilon": 3.0}),
    "parts": (ValueError, {"method": Unlucky()}),
    "a record": (OSError, {"dataset": data(False), "max_physical_batch_size": "auto"}),
    "Ctrl-C in a record": (
        KeyboardInterrupt,
        {"dataset": data(True), "max_physical_batch_size": "auto"},
    ),
    "Ctrl-C between hooks": (KeyboardInterrupt, {"optimizer": other_optimizer}),
    "a target that is used up": (ConfigError, {"epsilon": 0.01}),
    "a late option after the target": (ValueError, {"epsilon": 9.0, "method": Unlucky()}),
}


def fail(model, optimizer, how, **more):
    error, options = FAILURES[how]
    options = dict(options) | more
    optimizer = options.pop("optimizer", lambda _: optimizer)(model)
    with pytest.raises(error):
        try_another(model, optimizer, **options)


def trained(method, moment=None, how=None, ledger=None):
    """The engine after two epochs; at a moment of its third lot another one fails to be made."""
    model = mlp()
    engine = PrivacyEngine("rdp", noise_seed=3, ledger=ledger)
    _, _, optimizer, loader = private(
        model, engine=engine, method=method, dataset_size=N, max_physical_batch_size=ROWS
    )
    count = 0
    for _ in range(2):
        for x, y in loader:
            here = moment if count == 2 * loader.batches_per_lot else None
            count += 1
            if here == "batch":
                fail(model, optimizer, how)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if here == "loss":
                fail(model, optimizer, how)
            loss.backward()
            if here == "backward":
                fail(model, optimizer, how)
            optimizer.step()
            if here == "step":
                fail(model, optimizer, how)
    return engine, model


@pytest.mark.parametrize(
    ("method", "moments"),
    [
        ("dp-sgd", "batch loss backward step"),
        ("sma", "batch loss backward step"),
        ("dp-sat", "batch backward step"),  # its weights are moved while a lot is at hand
    ],
)
def test_the_engine_before_goes_on_bit_for_bit(method, moments):
    plain, expected = trained(method)
    assert plain.released == 8
    for moment in moments.split():
        for how in FAILURES if method == "dp-sgd" else ("parts", "Ctrl-C between hooks"):
            engine, model = trained(method, moment, how)
            assert [*map(torch.equal, model.parameters(), expected.parameters())] == [True] * 4
            assert engine.ledger.events == plain.ledger.events
            assert engine.released == 8 and engine.ledger.engines == 1
            assert engine.caveats() == plain.caveats()


def test_a_file_is_charged_once_for_a_lot_that_was_at_hand(tmp_path):
    engine, _ = trained("dp-sgd", "loss", "parts", tmp_path / "l")
    engine.close()
    assert sum(event.count for event in read(tmp_path / "l").events) == 8


def in_a_lot(ledger=None, method="dp-sgd", released=3):
    """An engine that has released so many lots and has the next one at hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine("rdp", ledger=ledger)
    _, _, _, loader = private(
        model, engine=engine, optimizer=optimizer, method=method, dataset_size=N
    )
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if engine.released == released:
            return engine, model, optimizer
        loss.backward()
        optimizer.step()
    raise AssertionError("the epoch has four lots")


@pytest.mark.parametrize("kind", ["own", "file", "measuring"])
def test_whoever_takes_the_place_counts_the_lot_that_was_at_hand(tmp_path, kind):
    path = tmp_path / "l" if kind == "file" else None
    measures = ("dp-is", 0) if kind == "measuring" else ("dp-sgd", 3)
    engine, model, optimizer = in_a_lot(path, *measures)
    charged = engine.ledger.steps
    fail(model, optimizer, "parts")
    assert engine.ledger.steps == charged + 1
    second = PrivacyEngine("rdp")
    second.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(), batch_size=6),
        target_epsilon=20.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    assert engine.ledger.steps == second.ledger.steps == charged + 1  # and not twice
    assert (second.ledger is engine.ledger) == (kind != "file")  # which was closed
    assert second.plan.noise_multiplier > 0
    assert not [said for said in second.caveats() if "not part of epsilon" in said]


def test_the_masks_and_hooks_are_those_of_the_engine_that_has_the_model():
    engine, model, optimizer = in_a_lot()
    before = len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)
    fail(model, optimizer, "parts")
    assert (len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)) == before
    try_another(model, optimizer)
    assert (len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)) == before
    engine.detach()  # whose place was taken already
    assert (len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)) == before
