"""The user's generators are given back bit for bit, and a model that seeds them is refused."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.masks import (
    ROWS,
    WIDTH,
    Masked,
    by_dropout,
    by_torch,
    data,
    private,
    seed_all,
    state_of_all,
)
from vestige import PrivacyError
from vestige.gradients.loss_watch import LossWatch
from vestige.sampling.forward_randomness import LotStream, untouched
from vestige.sampling.streams import Randomness


class Failing(Masked):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        torch.rand(3), np.random.randn(), random.gauss(0, 1)
        if self.error and len(x) == ROWS:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("check", [False, True])
def test_generators_are_given_back(error, held, check):
    seed_all(3)
    if held:  # a normal number that waits for the next call
        np.random.randn(), random.gauss(0, 1), torch.randn(1)
    engine, model, _, loader = private(Failing(error), self_check=check)
    for x, _y in loader:
        before, seed = state_of_all(), torch.initial_seed()
        if error:
            with pytest.raises(type(error)):
                model(x)
        else:
            model(x)
        assert state_of_all() == before
        assert torch.initial_seed() == seed
        break
    engine.detach()


def test_a_self_check_before_the_first_batch_leaves_the_generators_alone():
    _, model, _, _ = private(Failing(None), self_check=True)
    model.train(False)
    seed_all(3)
    x, before = data()[0], state_of_all()
    model(x)  # no lot is at hand: what the pass itself draws is the user's
    after = state_of_all()
    seed_all(3)
    torch.rand(3), np.random.randn(), random.gauss(0, 1)
    assert after == state_of_all() != before


def test_generators_of_a_model_are_given_back():
    class Own(Masked):
        def __init__(self):
            super().__init__(self.numbers)
            self.one, self.two = torch.Generator().manual_seed(0), np.random.default_rng(0)
            self.three, self.four = random.Random(0), np.random.RandomState(0)

        def numbers(self, rows):
            noise = self.two.random((rows, WIDTH)) + self.three.random() + self.four.randn()
            return torch.rand(rows, WIDTH, generator=self.one) + torch.tensor(noise).float()

    model = Own()

    def states():
        return str((model.one.get_state().tolist(), model.two.bit_generator.state)) + str(
            (model.three.getstate(), model.four.get_state(legacy=False))
        )

    engine, _, _, loader = private(model)
    for x, _y in loader:
        before = states()
        model(x)
        assert states() == before
        with untouched(engine._run.capture.batch.stream):  # as a self-check does
            model.numbers(2)
        assert states() == before
        break


def test_global_generators_that_a_model_holds_are_given_back():
    """sklearn's check_random_state(None) is numpy's global generator."""
    held = np.random.rand.__self__, random.random.__self__, torch.default_generator
    seed_all(0)
    before = state_of_all()
    stream = LotStream(Randomness(1), 0, explicit=(*held, held[0]._bit_generator))
    with stream.installed():
        assert state_of_all() != before
        np.random.randn()
    assert state_of_all() == before
    np.random.randn()
    before = state_of_all()
    with untouched(stream):
        np.random.randn()
    assert state_of_all() == before


def test_numpys_other_bit_generators_are_given_back():
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        np.random.randn()
        before = str(np.random.get_state(legacy=False))
        stream = LotStream(Randomness(1), 0)
        with stream.installed():
            first = np.random.randn(4)
        with LotStream(Randomness(1), 0).installed():
            assert (np.random.randn(4) == first).all()
        assert str(np.random.get_state(legacy=False)) == before
    finally:
        np.random.set_bit_generator(original)


def test_ctrl_c_leaves_nothing_on(recwarn):
    engine, model, _, loader = private(Failing(KeyboardInterrupt()))
    for x, _y in loader:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        left = torch.overrides._get_current_function_mode_stack()
        # Watches of losses of other loops that broke off go with the next one.
        assert not [mode for mode in left if not isinstance(mode, LossWatch)]
        break
    engine.abandon_lot()


def test_copies_of_the_model_know_nothing_of_the_engine():
    _, model, _, _ = private(nn.Sequential(nn.Linear(3, 2)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._compiled_call_impl is None
        twin(torch.ones(1, 3)).sum().backward()
    engine, model, _, _ = private(nn.Sequential(nn.Linear(3, 2)))
    engine.detach()
    assert model._compiled_call_impl is None


def test_streams_within_each_other_are_given_back_in_order():
    seed_all(0)
    before = state_of_all()
    one, other = LotStream(Randomness(1), 0), LotStream(Randomness(2), 0)
    with one.installed():
        inside = state_of_all()
        with other.installed(), one.installed():
            assert state_of_all() != inside
        assert state_of_all() == inside
    assert state_of_all() == before


def test_a_checkpoint_holds_the_users_states_and_not_the_stream(tmp_path):
    engine, model, optimizer, loader = private(Masked(by_torch))
    inside = []
    model.draw = lambda rows: inside.append(torch.get_rng_state()) or by_torch(rows)
    seed_all(4)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    engine.save_checkpoint(tmp_path / "c")
    (secret,) = tmp_path.glob("*.secret")
    written = (tmp_path / "c").read_bytes(), bytes.fromhex(secret.read_text().split('"')[3])
    assert torch.get_rng_state().numpy().tobytes() == written[1]
    for words in (inside[0].numpy().tobytes()[24:64],):
        assert not any(words in file for file in written)


def seeded(rows):
    torch.manual_seed(0)
    return by_dropout(rows)


def seeded_aside(rows):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return by_dropout(rows)


def put_back(rows, state=torch.Generator().manual_seed(0).get_state()):  # noqa: B008
    torch.set_rng_state(state)
    return by_dropout(rows)


def seeded_own(rows, own=torch.Generator()):  # noqa: B008
    own.manual_seed(0)
    return torch.rand(rows, WIDTH, generator=own)


@pytest.mark.parametrize("draw", [seeded, seeded_aside, put_back, seeded_own])
def test_a_model_that_seeds_a_generator_is_refused(draw):
    engine, model, _, loader = private(Masked(draw))
    seed_all(0)
    before = state_of_all()
    for x, _y in loader:
        with pytest.raises(PrivacyError, match="seeds a torch generator inside its forward"):
            model(x)
        break
    assert state_of_all() == before
    engine.detach()
