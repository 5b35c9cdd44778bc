"""The door: how much noise, on what, charged when, and that nothing else makes a release.

Distribution tests compare with N(0, std^2) by Kolmogorov-Smirnov and by the variance. Each accepts
the right noise but for one run in 10^8 (`FALSE_ALARM`, both tests together), and must reject noise
that is 2/3 or 3/2 of it. The noise is read off the public API, as what the optimizer is handed.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from tests.support.doors import branch_of, door_of, linear_groups
from tests.support.noise_law import FALSE_ALARM, assert_noise, is_noise
from vestige import ConfigError, PrivacyEngine
from vestige.gradients.groups import partition
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door, Release
from vestige.sampling import streams as randomness
from vestige.sampling.streams import Randomness

SIGMA, C = 1.3, 0.7


@pytest.fixture
def groups():
    return linear_groups()


def handed_over(rows, dtype, reduction, batch_size=4, **options):
    """Each parameter's gradient after one lot of all rows, times the divisor: the noisy sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)).to(dtype)
    x = torch.randn(rows, 40, dtype=dtype)
    loader = DataLoader(TensorDataset(x, torch.zeros(rows)), batch_size=batch_size)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=loader,
        max_grad_norm=C,
        loss_reduction=reduction,
        dataset_size=100,
        sample_rate=1.0,
        **options,
    )
    x, _ = next(iter(loader))
    losses = model(x).square().sum(1)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    optimizer.step()
    return [p.grad.double() * batch_size for p in model.parameters()]


def noise_of(rows, dtype, reduction, noise, **options):
    """What is left of the noisy sum when the noiseless one is taken off, by parameter."""
    noisy = handed_over(rows, dtype, reduction, **noise, **options)
    still = {key: 0.0 if key == "noise_multiplier" else [0.0, 0.0] for key in noise}
    exact = handed_over(rows, dtype, reduction, **still, **options)
    return [(a - b).flatten().numpy() for a, b in zip(noisy, exact, strict=True)]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_on_the_sum_has_the_planned_scale(reduction, rows, dtype, secure):
    noise = noise_of(rows, dtype, reduction, {"noise_multiplier": SIGMA}, secure_noise=secure)
    assert_noise(np.concatenate(noise), SIGMA * C)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_noise_by_group_has_each_groups_scale(rows, dtype, secure):
    w1, b1, w2, b2 = noise_of(
        rows,
        dtype,
        "mean",
        {"group_noise_multipliers": [2.0, 0.5]},
        clipping="per_layer",
        secure_noise=secure,
    )
    bound = C / math.sqrt(2)
    assert_noise(np.concatenate([w1, b1]), 2.0 * bound)
    assert_noise(np.concatenate([w2, b2]), 0.5 * bound)


def test_noise_of_a_layer_does_not_depend_on_its_own_bound_when_shared():
    """A joint multiplier means one standard deviation everywhere: sigma sqrt(sum C_g^2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 30))
    groups = partition(model, "per_layer")
    noise = NoiseScale.shared(SIGMA)
    assert noise.stds((3.0, 4.0)) == pytest.approx((SIGMA * 5.0, SIGMA * 5.0))
    release = door_of(groups, noise).release(ClippedSum(groups.buffer(), (3.0, 4.0)), 0.1)
    for segment in groups.segments():
        assert_noise(release.values[segment].numpy(), SIGMA * 5.0)


def normals(source, step, count, dtype=torch.float32):
    """The standard normal numbers that the door adds to a sum of zeros at `step`."""
    model = nn.Linear(count, 1, bias=False, dtype=dtype)
    groups = partition(model, "flat")
    door = Door(groups, NoiseScale.shared(1.0), source, Ledger())
    door.position.release = step
    return door.release(ClippedSum(groups.buffer(), (1.0,)), 0.1).values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_draws_keep_the_gaussian_shape_far_out(dtype):
    """Two million numbers: moments up to the fourth, and as many beyond 4 sigma as there should."""
    z = normals(Randomness(), 0, 2_000_000, dtype).double().numpy()
    n = len(z)
    spread = stats.norm.isf(FALSE_ALARM / 10)
    assert abs(z.mean()) < spread / math.sqrt(n)
    assert abs((z**2).mean() - 1) < spread * math.sqrt(2 / n)
    assert abs((z**3).mean()) < spread * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < spread * math.sqrt(96 / n)
    beyond = int((np.abs(z) > 4).sum())
    assert stats.binomtest(beyond, n, 2 * stats.norm.sf(4)).pvalue > FALSE_ALARM
    assert abs(np.corrcoef(z[: n // 2], z[n // 2 :])[0, 1]) < spread / math.sqrt(n / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_a_large_model_keep_their_scales_to_the_last_coordinate(dtype):
    """Noise is made in blocks; group boundaries fall inside blocks and groups span several."""
    model = nn.Sequential(
        nn.Linear(500, 700, bias=False), nn.Linear(700, 3, bias=False), nn.Linear(3, 90_001)
    ).to(dtype)
    groups = partition(model, "per_layer")
    noise = NoiseScale.by_group([0.5, 2.0, 1.0], groups.names)
    values = (
        door_of(groups, noise).release(ClippedSum(groups.buffer(), (1.0, 1.0, 4.0)), 0.1).values
    )
    for segment, std in zip(groups.segments(), (0.5, 2.0, 4.0), strict=True):
        part = values[segment].numpy()
        assert len(part) > 2000
        for piece in (part, part[:2000], part[-2000:]):
            assert_noise(piece, std)
    assert len(np.unique(values.double().numpy())) > 0.9 * len(values)


def test_a_wrong_distribution_is_rejected():
    """The yardstick itself: same variance but another shape, and the wrong scales."""
    rng = np.random.default_rng(0)
    assert is_noise(rng.normal(size=4000), 1.0)
    assert not is_noise(rng.laplace(size=4000) / math.sqrt(2), 1.0)
    assert not is_noise(rng.uniform(-1, 1, size=4000) * math.sqrt(3), 1.0)
    assert not is_noise(rng.normal(size=4000) + 0.2, 1.0)


def test_nothing_but_the_door_makes_a_release(groups):
    with pytest.raises(TypeError, match=r"Door\.release"):
        Release(torch.zeros(3), 0)
    with pytest.raises(TypeError, match=r"Door\.release"):
        Release(torch.zeros(3), 0, _certificate=object())
    out = door_of(groups, NoiseScale.shared(1.0)).release(ClippedSum(groups.buffer(), (1.0,)), 0.1)
    assert type(out) is Release
    assert out.step == 0


def test_the_proof_of_a_release_stays_in_the_module_of_the_door():
    source = Path(vestige.__file__).parent
    users = sorted(path for path in source.rglob("*.py") if "_certificate=" in path.read_text())
    assert users == [source / "release" / "door.py", source / "release" / "query.py"]
    assert "_RELEASED" not in users[1].read_text()


def test_the_ledger_is_charged_before_the_noise_is_drawn(groups, monkeypatch):
    ledger = Ledger()
    door = door_of(groups, NoiseScale.shared(1.5), ledger=ledger)

    def fails(*_):
        assert ledger.steps == 1
        raise RuntimeError("no noise today")

    monkeypatch.setattr(randomness, "Cipher", fails)
    with pytest.raises(RuntimeError, match="no noise today"):
        door.release(ClippedSum(groups.buffer(), (1.0,)), 0.1)
    assert ledger.steps == 1
    assert door.steps == 0
    (event,) = ledger.events
    assert (event.sample_rate, event.noise_multiplier) == (0.1, 1.5)


def test_a_failed_draw_hands_nothing_to_the_optimizer(monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    before = copy.deepcopy(model.state_dict())
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    (x,) = next(iter(loader))
    model(x).sum(1).mean().backward()

    def fails(*_):
        raise RuntimeError("no noise today")

    monkeypatch.setattr(randomness, "Cipher", fails)
    with pytest.raises(RuntimeError, match="no noise today"):
        optimizer.step()
    assert engine.ledger.steps == 1
    assert engine.released == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_a_gain_and_a_branch_are_applied_and_charged(groups):
    """release = gain * sum + branch + noise, charged at the multiplier divided by the gain."""
    ledger = Ledger()
    silent = door_of(groups, NoiseScale.shared(0.0), ledger=ledger)
    total, memory = torch.randn(40), torch.randn(40)
    silent.position.release = 1
    out = silent.release(ClippedSum(total, (1.0,)), 0.1, branch_of(groups, memory, 1), gain=0.5)
    assert torch.allclose(out.values, 0.5 * total + memory)
    noisy = door_of(groups, NoiseScale.shared(1.2), ledger=ledger)
    noisy.position.release = 1
    noisy.release(ClippedSum(total, (1.0,)), 0.3, branch_of(groups, memory, 1), gain=0.5)
    assert [(e.sample_rate, e.noise_multiplier) for e in ledger.events] == [(0.1, 0.0), (0.3, 2.4)]


@pytest.mark.parametrize("with_branch", [True, False])
def test_an_interrupt_inside_the_door_leaves_no_sum_without_noise(groups, with_branch, monkeypatch):
    """Whatever the buffer holds when the sum is about to be added, it is not the query."""
    door = door_of(groups, NoiseScale.shared(1.0))
    clipped = ClippedSum(torch.full((40,), 100.0), (1.0,))
    before = door.release(clipped, 0.1)
    branch = branch_of(groups, torch.zeros(40), 1) if with_branch else None

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    noise = torch.randn(40)
    with monkeypatch.context() as patch:
        patch.setattr(Randomness, "normal_blocks", lambda *_: iter([(slice(0, 40), noise)]))
        patch.setattr(torch.Tensor, "add_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            door.release(clipped, 0.1, branch, gain=0.5)
    assert before.values.abs().max() < 20  # noise alone: neither the old sum nor the new


def test_noise_may_change_from_step_to_step_and_is_charged_as_drawn(groups):
    ledger = Ledger()
    scales = [NoiseScale.shared(sigma) for sigma in (1.0, 3.0)]
    door = door_of(groups, scales, ledger=ledger)
    clipped = ClippedSum(groups.buffer(), (2.0,))
    for _ in range(4):
        door.release(clipped, 0.1)
    assert [(e.noise_multiplier, e.count) for e in ledger.events] == [(1.0, 1), (3.0, 3)]


def test_group_multipliers_are_charged_jointly():
    noise = NoiseScale.by_group([1.0, 2.0, 4.0], ["a", "b", "c"])
    assert noise.joint == pytest.approx((1 + 1 / 4 + 1 / 16) ** -0.5)
    assert noise.stds((1.0, 3.0, 0.5)) == (1.0, 6.0, 2.0)
    with pytest.raises(ConfigError, match="a, b, c"):
        NoiseScale.by_group([1.0, 2.0], ["a", "b", "c"])
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="positive finite"):
            NoiseScale.shared(bad)
        with pytest.raises(ConfigError, match="positive finite"):
            NoiseScale.by_group([1.0, bad], ["a", "b"])
