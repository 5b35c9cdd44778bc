"""Opacus' accountants as calculators."""

from __future__ import annotations

import pytest

from tests.support.loops import private, step
from vestige.accountants import (
    GaussianAccountant,
    GDPAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
)
from vestige.accountants.utils import get_noise_multiplier
from vestige.errors import ConfigError, PrivacyError
from vestige.privacy.accounting import epsilon
from vestige.privacy.events import Event


@pytest.mark.parametrize(("kind", "name"), [(PRVAccountant, "pld"), (RDPAccountant, "rdp")])
def test_an_accountant_composes_its_steps(kind, name):
    accountant = kind()
    assert accountant.get_epsilon(1e-5) == 0.0
    for noise in (1.0, 1.0, 2.0, 1.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.01)
    assert accountant.history == [(1.0, 0.01, 2), (2.0, 0.01, 1), (1.0, 0.01, 1)]
    events = [Event(0.01, 1.0, 3), Event(0.01, 2.0)]
    assert accountant.get_epsilon(delta=1e-5, alphas=[2, 3]) == epsilon(events, 1e-5, name)
    again = create_accountant(name)
    again.load_state_dict(accountant.state_dict())
    assert (again.history, len(again)) == (accountant.history, 3)
    assert type(again) is kind and again.mechanism() == name


def test_a_step_hook_counts_beside_the_ledger():
    engine, model, optimizer, loader = private()
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.25))
    for x, y in loader:
        step(model, optimizer, x, y)
    assert accountant.history == engine.accountant.history == [(1.0, 0.25, 4)]


def test_the_noise_of_a_target_is_the_smallest_that_keeps_it():
    found = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, epochs=10, epsilon_tolerance=0.1
    )
    assert epsilon([Event(0.01, found, 1000)], 1e-5, "rdp") <= 3.0
    assert epsilon([Event(0.01, 0.998 * found, 1000)], 1e-5, "rdp") > 3.0
    tighter = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, steps=1000, accountant="prv"
    )
    assert tighter < found


def test_an_epoch_is_as_long_as_the_engines():
    rate = 6 / 20  # four lots, the last of them short in an ordinary loader
    target = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": rate}
    assert get_noise_multiplier(**target, epochs=5) == get_noise_multiplier(**target, steps=20)


@pytest.mark.parametrize("length", [{}, {"epochs": 1, "steps": 2}])
def test_the_length_is_given_once(length):
    with pytest.raises(ConfigError, match="give exactly one of them"):
        get_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, **length)
    with pytest.raises(ConfigError, match="sample_rate 0"):
        get_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=0, epochs=1)


@pytest.mark.parametrize(
    "make", [GDPAccountant, GaussianAccountant, lambda: create_accountant("gdp")]
)
def test_gdp_is_refused_with_the_reason(make):
    with pytest.raises(PrivacyError, match=r"can be below the true epsilon.* Use accountant='prv'"):
        make()


def test_no_accountant_is_registered():
    with pytest.raises(PrivacyError, match="upper bound that was proven"):
        register_accountant("mine", PRVAccountant)
    with pytest.raises(ConfigError, match="'mine' is unknown"):
        create_accountant("mine")
