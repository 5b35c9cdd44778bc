"""What a reader of epsilon must know: said when it is so, and only then."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.support.small_runs import LOT, N, private, run
from vestige import PrivacyEngine
from vestige.engine.caveats import REPEATABLE
from vestige.release.observer import Observer


def plain(**options):
    """A run of which there is nothing to say."""
    return private("dp-sgd", engine_options={"noise_seed": None}, dataset_size=N, **options)


def test_there_is_nothing_to_say_of_a_plain_run():
    engine, *rest = plain()
    assert engine.caveats() == []
    run(engine, *rest, 2)
    assert engine.caveats() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_seed": 3}, REPEATABLE),
        ({"noise_multiplier": 0.0}, "no noise: nothing is private, epsilon is infinite"),
        ({"self_check": False}, "was not checked: self_check=False switched it off"),
        ({"dataset_size": None}, f"the number of records, {N}, is treated as public"),
    ],
)
def test_one_thing_is_said(options, words):
    engine, *_ = private(
        "dp-sgd", engine_options={"noise_seed": None}, **{"dataset_size": N} | options
    )
    (sentence,) = engine.caveats()
    assert words in sentence


def test_a_method_without_a_guarantee_and_another_adjacency_are_named():
    engine, *_ = private("geodp", dataset_size=N)
    assert any(c.startswith("no guarantee: not private as published") for c in engine.caveats())
    engine, *_ = private("dp-ftrl", steps=4)
    assert any("another adjacency: zero out one record" in c for c in engine.caveats())


def test_an_observer_at_the_door_is_said():
    engine, *_ = plain()
    engine.door.observers.append(Observer())
    (sentence,) = engine.caveats()
    assert "sums before their noise" in sentence


def test_a_second_engine_on_the_same_model_says_what_it_inherits():
    engine, model, optimizer, loader = plain()
    run(engine, model, optimizer, loader, 3)
    other = PrivacyEngine("rdp")
    other.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(loader.dataset, batch_size=LOT),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        dataset_size=N,
    )
    assert any("the 3 releases on its ledger are part of epsilon" in c for c in other.caveats())
