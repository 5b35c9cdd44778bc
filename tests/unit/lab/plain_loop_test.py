"""The plain loop against autograd, the rule of the library, and what each reading says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.lab.plain_loop import Images, SideBySide, run_side_by_side
from vestige.lab.readings import Reading
from vestige.memory.rules import FractionalMemory, View

FACTS: dict[str, Any] = {
    "dataset": "cifar10",
    "train_range": [0, 40],
    "test_range": [0, 10],
    "lot": 8,
    "epochs": 2,
    "lr": 0.5,
    "noise_multiplier": 0.7,
}


@pytest.fixture
def images() -> Images:
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(50, 6, generator=random), torch.randint(0, 3, (50,), generator=random)
    return Images(x[:40], y[:40], x[40:], y[40:], 3)


def reading(**changes: Any) -> Reading:
    return Reading(**FACTS | changes)


def network(flat: Tensor) -> nn.Sequential:
    layers = [nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3)]
    model = nn.Sequential(*layers)
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    return model


@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
def test_the_clipped_sum_is_that_of_a_loop_over_the_examples(images: Images, clip: float) -> None:
    loop = SideBySide([reading(clip=clip), reading(clip=clip, seed=1)], images, "cpu")
    rows = torch.tensor([[0, 3, 5], [7, 2, 39]])
    inside = torch.tensor([[True, True, False], [True, True, True]])
    sums = loop.clipped(rows, inside)
    for run in range(2):
        model, total = network(loop.theta[run]), 0
        for row, counts in zip(rows[run], inside[run], strict=True):
            x = images.x_train[row] * 2 - 1
            loss = F.cross_entropy(model(x)[None], images.y_train[row][None])
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradient = torch.cat([part.flatten() for part in parts])
            total = total + counts * gradient * min(1.0, clip / float(gradient.norm()))
        torch.testing.assert_close(sums[run], total, rtol=1e-4, atol=1e-6)


def test_lots_are_poisson(images: Images) -> None:
    """Each record is drawn at its rate, on its own: the size varies as a binomial does."""
    loop = SideBySide([reading(seed=seed) for seed in range(200)], images, "cpu")
    rows, inside = loop.lots()
    counts = torch.bincount(rows[inside], minlength=40) / 200
    assert abs(float(counts.mean()) - 0.2) < 0.02
    assert counts.max() < 0.35
    assert 3.5 < float(inside.sum(1).float().var()) < 10  # 40 * 0.2 * 0.8 is 6.4


def test_the_memory_is_the_rule_of_the_library(images: Images) -> None:
    runs = [reading(beta=0.9), reading(beta=0.9, window=3, alpha=0.5, inconsistency=0.4)]
    loop = SideBySide(runs, images, "cpu")
    for _ in range(5):
        loop.remember(torch.randn(2, loop.theta.shape[1]))
        loop.step += 1
    recalled = loop.recalled()
    for run, settings in enumerate(runs):
        lags = min(5, settings.window - 1)
        kept = loop.kept[:lags, run].double()
        trend = loop.trend[run].double()
        rule = FractionalMemory(
            window=settings.window, alpha=settings.alpha, tempering=0.0, ema=settings.ema,
            inconsistency=settings.inconsistency, min_scale=1e-6, confidence=1.0, eps=1e-12,
        )  # fmt: skip
        view = View(
            5,
            (kept @ kept.T).numpy()[None],
            (kept @ trend).numpy()[None],
            np.array([float(trend @ trend)]),
        )
        weights = torch.from_numpy(rule.recall(view).weights[0])
        torch.testing.assert_close(recalled[run].double(), weights @ kept, rtol=1e-4, atol=1e-5)


def test_a_run_does_not_depend_on_its_neighbours(images: Images) -> None:
    alone = run_side_by_side([reading(seed=3, beta=0.9)], images)
    beside = run_side_by_side([reading(seed=9), reading(seed=3, beta=0.9)], images)
    assert alone[0] == beside[1]
    assert len(alone[0]) == 2


def one_step(images: Images, **changes: Any) -> SideBySide:
    """A loop after two steps."""
    loop = SideBySide([reading(**changes)], images, "cpu")
    for _ in range(2):
        loop.train_step()
    return loop


def test_where_the_noise_is(images: Images) -> None:
    """Without a memory, noise in what is stored alone leaves the weights as without any noise."""
    quiet = one_step(images, noise_multiplier=0.0, beta=0.999999)
    stored = one_step(images, noise="stored", beta=0.999999, window=2)
    noisy = one_step(images, beta=0.999999)
    torch.testing.assert_close(stored.theta, quiet.theta, rtol=0, atol=1e-4)
    assert (noisy.theta - quiet.theta).norm() > 0.1
    assert (stored.kept[0] - quiet.kept[0]).norm() > 1
    unseen = one_step(images, noise="step", beta=0.999999)
    torch.testing.assert_close(unseen.kept[1], quiet.kept[1], rtol=0, atol=1e-3)
    torch.testing.assert_close(unseen.theta, noisy.theta, rtol=0, atol=1e-4)


def test_beta_may_shrink_the_noise(images: Images) -> None:
    full = one_step(images, beta=0.5, window=1)
    half = one_step(images, beta=0.5, window=1, noise_times_beta=True)
    quiet = one_step(images, beta=0.5, window=1, noise_multiplier=0.0)
    ratio = (half.theta - quiet.theta).norm() / (full.theta - quiet.theta).norm()
    assert float(ratio) == pytest.approx(0.5, abs=0.05)


def test_scalings_of_pixels(images: Images) -> None:
    runs = [reading(pixels=name) for name in ("half", "unit", "standard")]
    x = SideBySide(runs, images, "cpu").scaled(images.x_train.expand(3, -1, -1))
    torch.testing.assert_close(x[0], images.x_train * 2 - 1)
    torch.testing.assert_close(x[1], images.x_train)
    assert abs(float(x[2].mean())) < 1e-5
    assert float(x[2].std()) == pytest.approx(1, abs=1e-4)


def test_a_cosine_ends_at_zero_and_adam_moves_by_its_rate(images: Images) -> None:
    loop = SideBySide([reading(cosine=True), reading(adam=True, lr=1e-3)], images, "cpu")
    steps = []
    for _ in range(loop.steps):
        before = loop.theta.clone()
        loop.train_step()
        steps.append((loop.theta - before).norm(dim=1))
    assert steps[-1][0] < 0.1 * steps[0][0]
    size = loop.theta.shape[1] ** 0.5
    assert float(steps[0][1]) == pytest.approx(1e-3 * size, rel=0.1)
