"""What is done with releases: every update rule against a few lines of its own, 20 steps, 1e-9."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import LOT, SIGMA, STEPS, N, flat, net, private, run
from vestige import ConfigError, PrivacyEngine
from vestige.methods import DPSAT, FO, ADPAdamW, Disk, Doppler, DPSATMomentum, Kalman, resolve
from vestige.release.door import Door
from vestige.updates.adam import AdamBC, AdamWBC
from vestige.updates.ascent import Ascent
from vestige.updates.filters import SECOND_ORDER, DopplerFilter, KalmanFilter, RunningMean

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


@pytest.fixture
def seen(monkeypatch):
    """Every release of the test's runs, divided by the lot."""
    found, original = [], Door.release

    def release(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        found.append(out.values.clone() / LOT)
        return out

    monkeypatch.setattr(Door, "release", release)
    return found


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
        steps=12,
        max_grad_norm=1.0,
        method="adp-adamw",
    )
    run(engine, model, optimizer, loader, 12)
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


# -- filters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [Doppler(smoothing=0.2), Doppler(order=2), Doppler(smoothing=1.0)]
)
def test_doppler_is_its_recursion(method, seen):
    engine, model, optimizer, loader = private(method)
    given = []
    run(
        engine,
        model,
        optimizer,
        loader,
        after=lambda: given.append(flat(p.grad for p in model.parameters())),
    )
    k = method.smoothing
    a, b = SECOND_ORDER if method.order == 2 else ((k - 1,), (k,))
    outputs, gains = [], []
    for t in range(STEPS):
        m = sum(b[i] * seen[t - i] for i in range(len(b)) if t >= i)
        m = m - sum(a[i - 1] * outputs[t - i] for i in range(1, len(a) + 1) if t >= i)
        c = sum(b[i] for i in range(len(b)) if t >= i)
        c = c - sum(a[i - 1] * gains[t - i] for i in range(1, len(a) + 1) if t >= i)
        outputs.append(m)
        gains.append(c)
        assert torch.allclose(given[t], m / c, rtol=1e-9, atol=1e-9)
    if k == 1.0:
        assert torch.equal(given[3], seen[3])


@pytest.mark.parametrize(
    "coefficients", [((-0.9,), (0.1,)), SECOND_ORDER, ((), (1.0,)), ((), (0.5, 0.5))]
)
def test_a_constant_gradient_passes_doppler_unchanged_from_the_first_step(coefficients):
    filtered = DopplerFilter(torch.zeros(5, dtype=torch.float64), *coefficients)
    values, out = torch.arange(1.0, 6.0, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for _ in range(30):
        filtered.see(values, [1.0], out)
        assert torch.allclose(out, values, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 60])
@pytest.mark.parametrize(
    "make",
    [
        lambda like: DopplerFilter(like, (-0.7,), (0.3,)),
        lambda like: DopplerFilter(like, (), (0.5, 0.5)),
        lambda like: DopplerFilter(like, *SECOND_ORDER),
        lambda like: RunningMean(like, 0.3),
        lambda like: KalmanFilter(like, [slice(0, len(like))]),
    ],
)
def test_the_noise_power_of_a_filter_is_what_white_noise_shows(make, steps):
    """At every step, while the filter settles too: AdamBC subtracts it."""
    out = torch.zeros(20_000, dtype=torch.float64)
    filtered = make(torch.zeros(20_000, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        values = torch.randn(20_000, generator=generator, dtype=torch.float64)
        filtered.see(values, [1.0], out)
    assert float(out.square().mean()) == pytest.approx(filtered.noise_powers(1)[0], rel=0.06)


@pytest.mark.parametrize("noise", [1e-12, 1e-9, 1e-6])
def test_kalman_passes_releases_that_are_almost_exact(noise):
    engine, *rest = private(Kalman(), noise_multiplier=noise)
    run(engine, *rest, 6)
    assert min(engine.parts["filter"].gains) > 0.99


def test_kalman_is_its_equations(seen):
    engine, model, optimizer, loader = private(Kalman())
    given = []
    run(
        engine,
        model,
        optimizer,
        loader,
        after=lambda: given.append(flat(p.grad for p in model.parameters())),
    )
    std = SIGMA * 1.0 / LOT
    for start, stop in ((0, 48), (48, 75)):
        estimate, excess = seen[0][start:stop].clone(), []
        for t in range(1, STEPS):
            y, before = seen[t][start:stop], seen[t - 1][start:stop]
            excess.append(float(((y - before) ** 2).mean()) - 2 * std**2)
            r = max(0.0, sum(excess) / len(excess)) / std**2
            k = max((-r + math.sqrt(r * r + 4 * r)) / 2, 1 / (t + 1))
            estimate = estimate + k * (y - estimate)
            assert torch.allclose(given[t][start:stop], estimate, rtol=1e-9, atol=1e-12)


def test_kalman_averages_pure_noise_and_follows_exact_releases():
    engine, model, optimizer, loader = private(Kalman(), sample_rate=1e-12)
    run(engine, model, optimizer, loader, 40)
    assert max(engine.parts["filter"].gains) < 0.5
    engine, model, optimizer, loader = private(Kalman(), noise_multiplier=0.0)
    run(engine, model, optimizer, loader, 4)
    assert engine.parts["filter"].gains == [1.0, 1.0]


@pytest.mark.parametrize("denoiser", ["doppler", "kalman"])
@pytest.mark.parametrize("method", ["fo", "sma", "dp-adam", "dp-sat", "dp-sgd"])
def test_a_denoiser_goes_after_any_method_and_costs_nothing(method, denoiser):
    engine, *rest = private(method, denoiser=denoiser)
    run(engine, *rest, 4)
    bare, *others = private(method)
    run(bare, *others, 4)
    assert engine.ledger.events == bare.ledger.events
    assert engine.plan.settings["denoiser"]["name"] == denoiser
    assert not torch.equal(flat(rest[0].parameters()), flat(others[0].parameters()))


def test_denoisers_that_make_no_sense_are_refused():
    for method, denoiser, message in (
        ("dp-sgd", "dp-adam", "no filter of releases"),
        ("dp-sgd", "disk", "no filter of releases"),
        ("doppler", "kalman", "filters or scales its releases itself"),
        ("post-fm", "kalman", "filters or scales its releases itself"),
        ("dp-sgd", "magic", "unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            private(method, denoiser=denoiser)


def test_filters_and_ascents_take_releases_only():
    filtered = DopplerFilter(torch.zeros(3), (), (1.0,))
    with pytest.raises(TypeError, match="releases only"):
        filtered.apply(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="releases only"):
        Ascent([], torch.zeros(3), 0.1, False).learn(torch.zeros(3))


def test_disk_looks_ahead_and_averages(seen):
    lr, gain = 0.3, 0.6
    engine, model, optimizer, loader = private(Disk(gain=gain), lambda p: torch.optim.SGD(p, lr=lr))
    home, last, mean, t = flat(model.parameters()), None, None, 0
    while engine.released < STEPS:
        for x, y in loader:
            expected = home if last is None else home + (1 - gain) / gain * (home - last)
            assert (flat(model.parameters()) - expected).abs().max() < 1e-12
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            mean = seen[t] if mean is None else (1 - gain) * mean + gain * seen[t]
            last, home, t = home, home - lr * mean, t + 1
            assert (flat(model.parameters()) - home).abs().max() < 1e-12
            if t == STEPS:
                break


def test_disk_with_a_gain_of_one_is_dp_sgd_bit_for_bit():
    ours = private(Disk(gain=1), lambda p: torch.optim.SGD(p, lr=0.1))
    theirs = private("dp-sgd", lambda p: torch.optim.SGD(p, lr=0.1))
    run(*ours)
    run(*theirs)
    assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))


def test_an_ambiguous_name_is_answered_with_what_is_known():
    with pytest.raises(ConfigError, match="simulated annealing"):
        resolve("sa-dp-sgd")


# -- ascents --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [DPSAT(radius=0.5), DPSATMomentum(radius=0.5)])
def test_dp_sat_takes_gradients_uphill_and_steps_from_where_it_was(method, seen):
    """Forward passes see theta + e; the update starts at theta; between steps theta is shown."""
    lr = 0.3
    _, model, optimizer, loader = private(method, lambda p: torch.optim.SGD(p, lr=lr))
    home, t, last = flat(model.parameters()), 0, None
    while t < STEPS:
        for x, y in loader:
            at = flat(model.parameters())
            if t == 0:
                assert torch.equal(at, home)
            else:
                direction = (last - home) if isinstance(method, DPSATMomentum) else seen[t - 1]
                expected = home + 0.5 * direction / direction.norm()
                assert (at - expected).abs().max() < 1e-12
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            last, home = home, home - lr * seen[t]
            assert (flat(model.parameters()) - home).abs().max() < 1e-12
            t += 1
            if t == STEPS:
                break


def test_a_radius_of_zero_is_dp_sgd_bit_for_bit():
    for method in (DPSAT(radius=0), DPSATMomentum(radius=0)):
        ours = private(method, lambda p: torch.optim.SGD(p, lr=0.1))
        theirs = private("dp-sgd", lambda p: torch.optim.SGD(p, lr=0.1))
        run(*ours)
        run(*theirs)
        assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))


def test_an_abandoned_lot_and_detaching_bring_the_weights_home():
    engine, model, optimizer, loader = private(DPSAT(radius=1.0))
    run(engine, model, optimizer, loader, 2)
    home = flat(model.parameters())
    for _ in loader:
        assert not torch.equal(flat(model.parameters()), home)
        engine.abandon_lot()
        assert torch.equal(flat(model.parameters()), home)
        break
    for _ in loader:
        engine.detach()
        assert torch.equal(flat(model.parameters()), home)
        break


@pytest.mark.parametrize("method", [Disk(), DPSATMomentum(radius=1.0)])
def test_a_step_that_fails_leaves_no_direction(method):
    engine, model, optimizer, loader = private(method, lambda p: torch.optim.SGD(p, lr=0.1))
    run(engine, model, optimizer, loader, 3)

    def fails(*_):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        run(engine, model, optimizer, loader, 1)
    hook.remove()
    home = flat(model.parameters())
    for _ in loader:
        assert torch.equal(flat(model.parameters()), home)
        engine.abandon_lot()
        break


def test_weights_loaded_in_the_middle_of_a_lot_are_not_overwritten():
    engine, model, optimizer, loader = private(DPSAT(radius=1.0))
    run(engine, model, optimizer, loader, 2)
    for _ in loader:
        model.load_state_dict({k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()})
        with pytest.warns(UserWarning, match="left as written"):
            engine.abandon_lot()
        break
    assert (flat(model.parameters()) == 7).all()


def test_post_fm_refuses_the_corrected_adam():
    with pytest.raises(ConfigError, match="does not know"):
        private("post-fm", lambda p: AdamBC(p, lr=0.1))


def test_a_copied_adam_still_steps():
    parameter = nn.Parameter(torch.ones(3))
    twin = copy.deepcopy(AdamBC([parameter], lr=0.1))
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()


def test_physical_batches_climb_once_per_lot():
    small = private(DPSAT(radius=0.5), max_physical_batch_size=2)
    run(*small, 8)
    whole = private(DPSAT(radius=0.5))
    run(*whole, 8)
    assert torch.allclose(flat(small[1].parameters()), flat(whole[1].parameters()), atol=1e-9)


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


@pytest.mark.parametrize("name", NEW)
def test_updates_are_charged_like_dp_sgd(name):
    engine, *rest = private(name)
    run(engine, *rest, 5)
    (event,) = engine.ledger.events
    assert (event.sample_rate, event.noise_multiplier, event.count) == (LOT / N, SIGMA, 5)


def test_a_memory_may_be_filtered_again():
    engine, *rest = private(FO(window=3), denoiser=Doppler(smoothing=0.5))
    run(engine, *rest, 6)
    assert engine.diagnostics()["memory_ratio"][0] > 0
