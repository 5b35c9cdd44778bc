"""The state of a run: saved, loaded, refused."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.loops import epoch, private, step, weights
from vestige import ConfigError, PrivacyEngine, PrivacyError, VestigeError
from vestige.engine.caveats import REPEATABLE


def test_a_repeatable_run_goes_on_where_it_was_bit_for_bit():
    def start():
        return private(batch_size=5, max_physical_batch_size=3, clipping="per_layer")

    def lots(run, count):
        engine, model, optimizer, loader = run
        goal = engine.released + count
        while engine.released < goal:
            for x, y in loader:
                step(model, optimizer, x, y)
                if engine.released == goal:
                    break

    whole = start()
    lots(whole, 9)
    first = start()
    lots(first, 4)
    saved = json.loads(json.dumps(first[0].state_dict()))
    second = start()
    second[1].load_state_dict(first[1].state_dict())
    second[0].load_state_dict(saved)
    assert second[0].released == 4
    assert second[0].get_epsilon(1e-5) == first[0].get_epsilon(1e-5)
    lots(second, 5)
    assert torch.equal(weights(second[1]), weights(whole[1]))
    assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)
    own_name = {"run": ""}
    assert second[0].state_dict() | own_name == whole[0].state_dict() | own_name


def test_a_resumed_run_stays_charged_and_marked_as_repeatable():
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    engine.abandon_lot()
    fresh, *_ = private(engine=PrivacyEngine())
    fresh.load_state_dict(engine.state_dict())
    assert fresh.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
    assert REPEATABLE in fresh.caveats()


def test_loading_is_refused_where_it_would_forget_or_mix():
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    state = engine.state_dict()
    with pytest.raises(PrivacyError, match="would forget them"):
        engine.load_state_dict(state)
    other, *_ = private(max_grad_norm=2.0)
    with pytest.raises(PrivacyError, match=r"other settings.*bounds"):
        other.load_state_dict(state)
    assert other.ledger.steps == 0
    clean, *_ = private()
    with pytest.raises(ConfigError, match="version"):
        clean.load_state_dict({**state, "version": 99})


@pytest.mark.parametrize("gone", ["plan", "ledger", "released", "next_lot"])
def test_a_damaged_state_is_refused_whole(gone):
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    state = engine.state_dict()
    del state[gone]
    clean, *_ = private()
    with pytest.raises(VestigeError):
        clean.load_state_dict(state)
    assert clean.ledger.steps == 0
    assert clean.released == 0


@pytest.mark.parametrize("name", ["repeatable_noise", "ledger_file"])
def test_a_state_whose_facts_are_no_facts_is_refused_whole(name):
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    clean, *_ = private()
    for wrong in (None, 1, "False", torch.zeros(2)):
        with pytest.raises(ConfigError, match=f"{name}=.* neither true nor false"):
            clean.load_state_dict({**engine.state_dict(), name: wrong})
    assert clean.ledger.steps == clean.released == 0


def test_the_state_holds_public_numbers_only():
    engine, model, optimizer, loader = private(engine=PrivacyEngine(), noise_seed=987654321)
    epoch(model, optimizer, loader)
    text = json.dumps(engine.state_dict())
    assert "987654321" not in text
    assert set(engine.state_dict()) == {
        "version", "run", "plan", "ledger", "own", "released", "next_lot", "lost",
        "repeatable_noise", "ledger_file",
    }  # fmt: skip
