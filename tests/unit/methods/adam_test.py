"""The Adam family as methods: schedules, owners of their update, charges."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import LOT, SIGMA, N, flat, net, private, run
from vestige import ConfigError, PrivacyEngine
from vestige.methods import ADPAdamW, resolve
from vestige.updates.adam import AdamBC

NEW = [
    "dp-adam",
    "dp-adambc",
    "dp-adamw",
    "dp-adamw-bc",
    "dp-sat",
    "dp-sat-momentum",
    "doppler",
    "kalman",
    "disk",
]


@pytest.mark.parametrize(
    ("name", "wrong", "wanted"),
    [
        ("dp-adam", torch.optim.SGD, "torch.optim.adam.Adam,"),
        ("dp-adam", torch.optim.AdamW, "torch.optim.adam.Adam,"),
        ("dp-adamw", torch.optim.Adam, "torch.optim.adamw.AdamW"),
        ("dp-adambc", torch.optim.Adam, "vestige.updates.adam.AdamBC"),
        ("dp-adamw-bc", AdamBC, "vestige.updates.adam.AdamWBC"),
        ("dp-sat", torch.optim.Adam, "torch.optim.sgd.SGD"),
    ],
)
def test_a_method_that_owns_its_update_names_the_optimizer_it_wants(name, wrong, wanted):
    model = net()
    with pytest.raises(ConfigError, match=wanted):
        private(name, lambda p: wrong(p, lr=0.1), model)
    assert all(p.grad is None for p in model.parameters())


def test_adp_adamw_lowers_its_noise_and_charges_every_step():
    engine, *rest = private(ADPAdamW(start=4.0), steps=5)
    run(engine, *rest, 5)
    sigmas = [SIGMA * 4 ** (1 - t / 4) for t in range(5)]
    assert [e.noise_multiplier for e in engine.ledger.events] == pytest.approx(sigmas)
    assert engine.plan.noise_multiplier == pytest.approx(tuple(sigmas))
    assert [stds[0] for stds in engine.plan.noise_stds] == pytest.approx(sigmas)


def test_adp_adamw_is_solved_for_a_target():
    model, engine = net(), PrivacyEngine("rdp", noise_seed=1)
    x = torch.randn(N, 5, dtype=torch.float64)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, torch.zeros(N).long()), batch_size=LOT),
        target_epsilon=2.0,
        target_delta=1e-5,
        steps=6,
        max_grad_norm=1.0,
        method="adp-adamw",
    )
    run(engine, model, optimizer, loader, 6)
    assert 1.99 < engine.get_epsilon(1e-5) <= 2.0


def test_adp_adamw_with_a_start_of_one_is_dp_adamw_bit_for_bit():
    ours, theirs = private(ADPAdamW(start=1), steps=8), private("dp-adamw")
    run(*ours, 8)
    run(*theirs, 8)
    assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))
    assert ours[0].ledger.events == theirs[0].ledger.events
    for bad in (0.5, math.nan, "x"):
        with pytest.raises(ConfigError, match="start="):
            ADPAdamW(start=bad)
    assert ADPAdamW(start=9.0).noise_shape(1) == (1.0,)
    with pytest.raises(ConfigError, match="positive finite"):
        private(ADPAdamW(start=1e308), steps=3, noise_multiplier=10.0)
    with pytest.raises(ConfigError, match="pass steps="):
        private("adp-adamw")


def test_an_ambiguous_name_is_answered_with_what_is_known():
    with pytest.raises(ConfigError, match="simulated annealing"):
        resolve("sa-dp-sgd")


def test_post_fm_refuses_the_corrected_adam():
    with pytest.raises(ConfigError, match="does not know"):
        private("post-fm", lambda p: AdamBC(p, lr=0.1))


@pytest.mark.parametrize("name", NEW)
def test_updates_are_charged_like_dp_sgd(name):
    engine, *rest = private(name)
    run(engine, *rest, 5)
    (event,) = engine.ledger.events
    assert (event.sample_rate, event.noise_multiplier, event.count) == (LOT / N, SIGMA, 5)
