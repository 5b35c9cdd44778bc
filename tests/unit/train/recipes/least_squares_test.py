"""Least squares: what is released, how far a record moves it, its noise, and its solution."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

import vestige
from tests.support.own_tables import rows, write_table
from tests.support.training import equal, weights
from vestige import PrivacyEngine, statement
from vestige.errors import ConfigError
from vestige.release.door import Door
from vestige.release.observer import Observer, Passage
from vestige.train.config import TrainConfig
from vestige.train.data import load
from vestige.train.dataset import Dataset
from vestige.train.recipes import least_squares
from vestige.train.recipes.least_squares import (
    LeastSquares,
    moment_losses,
    sensitivity,
    target_bound,
    targets,
    usual_ridge,
)
from vestige.train.run_folder import RunWriter
from vestige.train.training import prepare, resume, train

HARD_ROWS = (0.0, 0.3, 1.0, 1.0001, 40.0, 1e18, 3e38)


def made(
    rows: int = 60, inputs: int = 4, classes: int = 3, task: str = "classification"
) -> Dataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(rows, inputs, generator=random)
    y = torch.randint(0, classes, (rows,), generator=random)
    if task != "classification":
        y = torch.randn(rows, classes, generator=random).clamp(-1, 1)
    return Dataset("made", x, y, x, y, classes, task=task)


def only(data: Dataset, label: int) -> Dataset:
    """Records of one class as they are, the others as none."""
    kept = (data.y_train == label)[:, None]
    x = torch.where(kept, data.x_train, math.nan)
    return replace(data, x_train=x, weights=None)


class Sums(Observer):
    """Keeps what arrives at the door and what leaves it."""

    def arrives(self, passage: Passage) -> None:
        self.total, self.bounds = passage.total.clone(), passage.bounds

    def released(self, passage: Passage) -> None:
        self.values = passage.values.clone()


def released(
    data: Dataset, noise: float = 0.0, bound: float = 1.0, seed: int = 0, size: int | None = None
) -> tuple[LeastSquares, Sums, PrivacyEngine]:
    """A model whose moments were released, and what went through the door."""
    model = LeastSquares(data.x_train[0].numel(), data.classes, bound)
    engine, seen = PrivacyEngine(noise_seed=seed), Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    records = len(data.x_train) if size is None else size
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=records),
        noise_multiplier=noise,
        max_grad_norm=sensitivity(bound, target_bound(data)),
        dataset_size=records,
        max_physical_batch_size=16,
        steps=1,
    )
    engine.door.observers.append(seen)
    for x, y in loader:
        optimizer.zero_grad()
        engine.backward(moment_losses(data, model(x), y))
        optimizer.step()
    assert engine.released == 1
    return model, seen, engine


def by_hand(data: Dataset, bound: float, ridge: float) -> np.ndarray[Any, Any]:
    """Ridge regression on clipped rows, in a few lines of numpy."""
    x = np.concatenate(
        [data.x_train.flatten(1).double().numpy(), np.ones((len(data.x_train), 1))], 1
    )
    x *= np.minimum(1, bound / np.linalg.norm(x, axis=1, keepdims=True))
    if data.task == "classification":
        t = np.eye(data.classes)[data.y_train.numpy()] - 1 / data.classes
    else:
        t = data.y_train.double().numpy()
    square = x.T @ x / len(x) + ridge * np.eye(x.shape[1])
    return np.linalg.solve(square, x.T @ t / len(x)).T


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_without_noise_it_is_ridge_regression(task: str, bound: float) -> None:
    data = made(task=task)
    model, _, _ = released(data, bound=bound)
    model.ridge.fill_(0.01)
    model.eval()
    expected = torch.from_numpy(by_hand(data, bound, 0.01))
    torch.testing.assert_close(model.solution.double(), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        scores = model(data.x_test)
    torch.testing.assert_close(scores, model.rows(data.x_test) @ model.solution.T)


def test_multi_label_targets_are_signs() -> None:
    data = made(task="multi-label")
    signs = targets(data, (data.y_train > 0).float())
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert float(signs.norm(dim=1).max()) <= target_bound(data) + 1e-12


def largest_move(bound: float) -> float:
    """The largest distance over the claimed sensitivity that one hard record moves the sums."""
    ratio = 0.0
    for task in ("classification", "regression"):
        data = made(rows=12, task=task)
        claimed = sensitivity(bound, target_bound(data))
        _, without, _ = released(data, bound=bound, size=13)
        random = torch.Generator().manual_seed(3)
        for size in HARD_ROWS:
            for axis in (torch.randn(4, generator=random), torch.eye(4)[1]):
                x = torch.cat([data.x_train, (axis.double() * size / 2).float()[None]])
                y = data.y_train[:1] if task == "classification" else 1e6 * torch.ones(1, 3)
                y = torch.cat([data.y_train, y])
                _, with_it, _ = released(replace(data, x_train=x, y_train=y), bound=bound)
                moved = float((with_it.total.double() - without.total.double()).norm())
                assert with_it.bounds == pytest.approx((claimed,))
                ratio = max(ratio, moved / claimed)
    return ratio


def test_no_record_moves_the_sums_further_than_the_bound() -> None:
    """Rows below, at and above the bound, zero and huge: the proof, by brute force."""
    assert 0.999 < largest_move(bound=1.0) <= 1 + 1e-5


def check_sensitivity() -> None:
    random = torch.Generator().manual_seed(0)
    for task in ("classification", "regression"):
        data, model = made(task=task), LeastSquares(4, 3, bound=2.0)
        scale = torch.logspace(-3, 30, 200)[:, None]
        x = model.rows(torch.randn(200, 4, generator=random) * scale).double()
        y = 50 * torch.randn(200, 3, generator=random)
        if task == "classification":
            y = torch.randint(0, 3, (200,), generator=random)
        t = least_squares.targets(data, y)
        moved = torch.cat([model.upper(x), (x[:, :, None] * t[:, None]).flatten(1)], 1).norm(dim=1)
        torch.testing.assert_close(moved, x.norm(dim=1) * torch.hypot(x.norm(dim=1), t.norm(dim=1)))
        assert float(moved.max()) <= sensitivity(2.0, target_bound(data)) * (1 + 1e-6)


def test_the_bound_holds_before_the_engine_clips() -> None:
    check_sensitivity()


def test_weights_of_classes_take_no_record_beyond_the_bound() -> None:
    data = replace(made(), weights=(0.4, 1.0, 6.0))
    weighted, _, _ = released(data)
    of_each = [released(only(data, label))[0].moments()[0] for label in range(3)]
    expected = sum(w / 6 * part for w, part in zip(data.weights or (), of_each, strict=True))
    torch.testing.assert_close(weighted.moments()[0], expected, rtol=1e-4, atol=1e-6)


def test_what_is_no_number_adds_nothing() -> None:
    data = made(rows=12)
    x = torch.cat([data.x_train, torch.full((1, 4), math.nan)])
    y = torch.cat([data.y_train, data.y_train[:1]])
    _, with_it, _ = released(replace(data, x_train=x, y_train=y))
    _, without, _ = released(data, size=13)
    torch.testing.assert_close(with_it.total, without.total)


def check_noise() -> None:
    """Symmetric, sigma C on the diagonal and on x t^T, sigma C / sqrt(2) off the diagonal."""
    data, sigma, records = made(rows=8, inputs=30, classes=40), 2.0, 8
    plain, _, _ = released(data)
    noisy, seen, _ = released(data, noise=sigma, seed=5)
    std = sigma * sensitivity(1.0, target_bound(data))
    square, cross = (
        (a - b) * records / std for a, b in zip(noisy.moments(), plain.moments(), strict=True)
    )
    assert torch.equal(square, square.T)
    off = square[tuple(torch.triu_indices(31, 31, 1))] * math.sqrt(2)
    for drawn in (off, square.diagonal(), cross.flatten()):
        assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert seen.values.numel() == 31 * 32 // 2 + 40 * 31


def test_the_noise_has_the_law_that_is_charged() -> None:
    check_noise()


def test_one_release_at_rate_one_charged_before_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    data, held = made(), []
    _, _, engine = released(data, noise=1.5)
    (event,) = engine.ledger.merged()
    assert (event.sample_rate, event.noise_multiplier, event.count) == (1.0, 1.5, 1)
    assert engine.plan.sample_rate == 1

    def drawn(self: Door, *_: object) -> None:
        held.append(self.ledger.steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(Door, "_noise", drawn)
    with pytest.raises(KeyboardInterrupt):
        released(data, noise=1.5)
    assert held == [1]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_wrong_noise_is_noticed(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a weight, or with that of noise that is drawn for both triangles and averaged, on
    top of the one that pays for a single draw."""

    def weights(pairs: torch.Tensor) -> torch.Tensor:
        return torch.where(pairs[0] == pairs[1], 1.0, weight).double()

    monkeypatch.setattr(least_squares, "_weights", weights)
    with pytest.raises(AssertionError):
        check_noise()


def test_targets_that_are_not_clipped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = least_squares.targets

    def unclipped(data: Dataset, y: torch.Tensor) -> torch.Tensor:
        return y.double() if data.task == "regression" else right(data, y)

    monkeypatch.setattr(least_squares, "targets", unclipped)
    with pytest.raises(AssertionError):
        check_sensitivity()


def test_eigenvalues_that_noise_made_negative_count_as_zero() -> None:
    model = LeastSquares(2, 1, ridge=0.5)
    with torch.no_grad():
        model.triangle.weight.copy_(torch.tensor([[-3.0, 0.0, 0.0, -1.0, 0.0, 2.0]]))
        model.cross.weight.copy_(torch.tensor([[1.0, 1.0, 5.0]]))
    model.eval()
    torch.testing.assert_close(model.solution, torch.tensor([[2.0, 2.0, 2.0]]))


def test_the_usual_ridge_is_half_the_noise_s_largest_eigenvalue() -> None:
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 200, generator=random).triu()
    noise = (noise + noise.triu(1).T) / math.sqrt(2)
    largest = float(torch.linalg.eigvalsh(noise)[-1]) * 3.0 / 50
    assert usual_ridge(199, 3.0 / 50) == pytest.approx(largest / 2, rel=0.1)


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2000"):
        LeastSquares(2001, 1)


# -- as a recipe ------------------------------------------------------------------------------


def recipe(out: Path, **changes: Any) -> TrainConfig:
    values = {"recipe": "least-squares", "epsilon": 8.0, "noise_seed": 3, "train_size": 800}
    return TrainConfig(out=out, **values | changes)


def test_a_run_is_one_release_with_a_statement(tmp_path: Path) -> None:
    result = train(recipe(tmp_path / "run"))
    assert (result["steps"], result["sample_rate"], result["lot"]) == (1, 1.0, 800)
    assert 7.9 < result["epsilon"] <= 8 and result["accuracy"] > 0.8
    stated = statement.read(tmp_path / "run")
    (event,) = stated["ledger"]["events"]
    assert (event["sample_rate"], event["count"]) == (1.0, 1)
    assert stated["mechanism"]["clip_bounds"] == [pytest.approx(math.sqrt(1 + 0.9))]
    assert "every record is in every lot" in stated["sampler"]["text"]
    assert "|x| <= 1" in stated["run"]["released_sum"]
    test = load("digits")
    model = vestige.load(tmp_path / "run")
    right = (model(test.x_test).argmax(1) == test.y_test).float().mean()
    assert float(right) == pytest.approx(result["accuracy"])
    bound = sensitivity(1.0, math.sqrt(0.9)) * result["noise_multiplier"] / 800
    assert float(model.module.ridge) == pytest.approx(usual_ridge(64, bound))


def test_a_run_that_was_killed_before_its_release_goes_on(tmp_path: Path) -> None:
    whole = train(recipe(tmp_path / "whole"))
    config = recipe(tmp_path / "cut")
    session = prepare(config)
    writer = RunWriter(session)
    with writer._folder as folder:
        writer._begin()
        folder.keep = True
    session.engine.close()
    assert equal(weights(resume(tmp_path / "cut")), weights(whole))


def test_the_number_of_records_may_be_declared(tmp_path: Path) -> None:
    result = train(recipe(tmp_path / "run", dataset_size=1000))
    assert (result["lot"], result["sample_rate"], result["records"]) == (1000, 1.0, 1000)


def test_regression_on_a_table(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv", rows(600), task="regression", target='"days"')
    out = tmp_path / "run"
    config = recipe(out, dataset=str(table), epsilon=None, train_size=None, noise_multiplier=0.5)
    assert train(config)["metrics"]["mae"] < 5
    (said,) = vestige.load(out).predict(rows(1))
    assert said["prediction"]["days"] == pytest.approx(rows(1)[0]["days"], abs=12)


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 3},
        {"lot": 64},
        {"lr": 0.5},
        {"method": "fo"},
        {"momentum": 0.9},
        {"clipping": "auto"},
        {"clip": (1.0, 1.0)},
        {"precision": "bfloat16"},
    ],
)
def test_what_is_for_steps_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        prepare(recipe(tmp_path / "run", **given))


def test_a_ridge_is_for_least_squares() -> None:
    assert TrainConfig(recipe="least-squares", ridge=0.5).ridge == 0.5
    with pytest.raises(ConfigError, match=r"ridge 0\.5"):
        TrainConfig(ridge=0.5)
