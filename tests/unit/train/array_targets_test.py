"""Columns of labels and numbers in .npz files; class numbers are data_test's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vestige.errors import ConfigError
from vestige.train.data import load


def written(path: Path, y: np.ndarray) -> Path:
    x = np.random.default_rng(0).normal(size=(len(y), 3)).astype(np.float32)
    np.savez(path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return path


def test_columns_are_read_as_the_task_says(tmp_path: Path) -> None:
    path = written(tmp_path / "a.npz", np.eye(6)[:, :2])
    found = load(path, task="multi-label")
    assert (found.classes, found.y_train.shape, found.task) == (2, (6, 2), "multi-label")
    assert found.own and not found.classes_inferred
    assert load(path, task="regression").y_train.dtype.is_floating_point


def test_one_target_may_be_a_plain_row_of_numbers(tmp_path: Path) -> None:
    y = np.linspace(-1, 1, 6)
    rows, column = (
        written(tmp_path / name, y.reshape(n)) for name, n in (("a.npz", 6), ("b.npz", (6, 1)))
    )
    plain, whole = (load(path, task="regression") for path in (rows, column))
    assert plain.y_train.tolist() == whole.y_train.tolist() and plain.classes == 1


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (np.ones(6), "multi-label", r"numbers of shape .*of one column make y\.reshape\(-1, 1\)"),
        (
            np.zeros((6, 0)),
            "regression",
            r"regression needs numbers of shape \(examples, columns\)",
        ),
        (np.full((6, 1), 2), "multi-label", "other values than 0 and 1"),
        (np.full((6, 1), 1.5), "regression", "scale it by a public range"),
        (np.full((6, 1), np.nan), "regression", "scale it by a public range"),
        (np.full((6, 1), "a"), "multi-label", "multi-label needs numbers"),
    ],
)
def test_other_columns_are_refused(y: np.ndarray, task: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path / "a.npz", y), task=task)


def test_both_splits_have_the_same_columns(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.zeros((4, 2))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y[:, :1])
    with pytest.raises(ConfigError, match="y_train has 2 columns and y_test 1"):
        load(tmp_path / "a.npz", task="regression")
