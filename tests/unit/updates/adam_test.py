"""What is done with releases: every update rule against a few lines of its own, 20 steps, 1e-9."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from tests.support.small_runs import LOT, SIGMA, flat, private, run
from vestige import ConfigError
from vestige.methods import Doppler, resolve
from vestige.updates.adam import AdamBC, AdamWBC

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


# -- Adam -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp-adam", "dp-adambc", "dp-adamw", "dp-adamw-bc"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_adam_family_is_its_equations(name, decay, seen):
    lr, b1, b2, floor = 0.02, 0.8, 0.95, 1e-4
    corrected, decoupled = name.endswith("bc"), "w" in name
    extra = {"floor": floor} if corrected else {}

    def make(params):
        return resolve(name).optimizer_class(
            params, lr=lr, betas=(b1, b2), weight_decay=decay, **extra
        )

    engine, model, optimizer, loader = private(name, make)
    theta = flat(model.parameters())
    run(engine, model, optimizer, loader)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    phi = (SIGMA * 1.0 / LOT) ** 2
    for t, g in enumerate(seen, start=1):
        if decoupled:
            theta = theta * (1 - lr * decay)
        else:
            g = g + decay * theta
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        mean, square = m / (1 - b1**t), v / (1 - b2**t)
        if corrected:
            theta = theta - lr * mean / (square - phi).clamp(min=floor).sqrt()
        else:
            theta = theta - lr * mean / (square.sqrt() + 1e-8)
    assert (flat(model.parameters()) - theta).abs().max() < 1e-9


def test_the_correction_follows_noise_schedules_groups_and_filters():
    """phi is the variance of the release that was used: each step's, each group's, filtered."""
    engine, model, optimizer, loader = private(
        "dp-adambc",
        clipping="per_layer",
        max_grad_norm=[1.0, 2.0],
        noise_multiplier=None,
        group_noise_multipliers=lambda t: [1.0 + t, 3.0],
        steps=4,
        denoiser=Doppler(smoothing=0.5),
    )
    run(engine, model, optimizer, loader, 4)
    h = [0.5 * 0.5**k for k in range(4)]
    power = sum(x * x for x in h) / sum(h) ** 2
    expected = [power * (4.0 / LOT) ** 2, power * (6.0 / LOT) ** 2]
    found = optimizer.noise_variances
    assert found[id(model[0].weight)] == pytest.approx(expected[0], rel=1e-6)
    assert found[id(model[2].bias)] == pytest.approx(expected[1], rel=1e-6)


def test_a_corrected_second_moment_estimates_the_signal():
    """With a constant gradient and heavy noise v^ - phi is the squared gradient, v^ is not."""
    parameter = nn.Parameter(torch.zeros(4000, dtype=torch.float64))
    optimizer = AdamBC([parameter], lr=0.0, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        noise = torch.randn(4000, generator=generator, dtype=torch.float64)
        parameter.grad = 0.3 + noise
        optimizer.noise_variances = {id(parameter): 1.0}
        optimizer.step()
    state = optimizer.state[parameter]
    start = 1 - 0.99 ** state["step"]
    assert float((state["square"] / start).mean()) == pytest.approx(1.09, abs=0.01)
    assert float((state["square"] - state["noise"]).mean()) / start == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"floor": 0.0}, "floor=0.0"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
    ],
)
def test_bad_settings_of_the_corrected_adam_are_refused(options, message):
    for kind in (AdamBC, AdamWBC):
        with pytest.raises(ConfigError, match=message):
            kind([nn.Parameter(torch.zeros(2))], **options)


# -- filters --------------------------------------------------------------------------------


# -- ascents --------------------------------------------------------------------------------


def test_a_copied_adam_still_steps():
    parameter = nn.Parameter(torch.ones(3))
    twin = copy.deepcopy(AdamBC([parameter], lr=0.1))
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()


# -- all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_saving_and_loading_in_the_middle_continues_bit_for_bit(name):
    whole = private(name)
    run(*whole, 13)
    engine, model, optimizer, loader = private(name)
    run(engine, model, optimizer, loader, 6)
    buffer = io.BytesIO()
    torch.save([engine.state_dict(), model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    engine, model, optimizer, loader = private(name)
    engine.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    run(engine, model, optimizer, loader, 7)
    assert torch.equal(flat(model.parameters()), flat(whole[1].parameters()))
    broken = copy.deepcopy(saved[0])
    part = "filter" if "filter" in engine.parts else "ascent"
    if {"filter", "ascent"} & set(engine.parts):
        other, *_ = private(name)
        with pytest.raises(ConfigError, match="does not fit"):
            other.load_state_dict(broken | {part: None})
