"""What the y of an .npz file are: class numbers, or columns of labels or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vestige.errors import ConfigError
from vestige.train.download import Arrays

# Labels read off a file beyond this are more likely identifiers than classes.
_MOST_INFERRED_CLASSES, _MOST_CLASSES = 10_000, 10_000_000


def labels_of(arrays: Arrays, split: str) -> Tensor:
    """The class numbers of a split."""
    y = arrays[f"y_{split}"]
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise ConfigError(
            f"y_{split} is {y.dtype} of shape {y.shape}; labels must be integers of shape "
            f"(examples,): {_remedy(y)}."
        )
    if not len(y):
        raise ConfigError(f"y_{split} is empty; both splits need at least one example.")
    # Before the cast to int64, where a large unsigned label would wrap around.
    smallest, largest = int(y.min()), int(y.max())
    if smallest < 0 or largest >= 2**31:
        bad = smallest if smallest < 0 else largest
        raise ConfigError(f"y_{split} holds the label {bad}; labels must be 0 to classes - 1.")
    return torch.from_numpy(y.astype(np.int64))


def _remedy(y: NDArray[Any]) -> str:
    """What to do about labels that are no class numbers, by what they seem to be."""
    if y.dtype.kind in "USO":
        return "number the classes from 0 by a public list of their names"
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iub":
        return "take the one column, y[:, 0]"
    if y.ndim == 2:
        return "for several labels or targets give --task multi-label or --task regression"
    if y.dtype.kind == "f":
        return (
            "for numbers give --task regression; class numbers are converted with y.astype('int64')"
        )
    return "give one class number for each example"


def columns(arrays: Arrays, split: str, task: str) -> Tensor:
    """The columns of multi-label (zeros and ones) or of regression (numbers from -1 to 1)."""
    y = arrays[f"y_{split}"]
    if y.ndim == 1 and task == "regression":
        y = y[:, None]
    if y.ndim != 2 or not y.size or y.dtype.kind not in "iubf":
        one = "; of one column make y.reshape(-1, 1)" if y.ndim == 1 else ""
        raise ConfigError(
            f"y_{split} is {y.dtype} of shape {y.shape}; {task} needs numbers of shape (examples, "
            f"columns), with at least one of each{one}."
        )
    values = y.astype(np.float32)
    if task == "multi-label" and not np.isin(values, (0, 1)).all():
        raise ConfigError(f"y_{split} holds other values than 0 and 1, which multi-label needs.")
    if task == "regression" and not (np.abs(values) <= 1).all():
        raise ConfigError(
            f"y_{split} holds values outside of -1 to 1; scale it by a public range, (y - low) / "
            "(high - low) * 2 - 1, never by what the data holds."
        )
    return torch.from_numpy(values)


def outputs(labels: dict[str, Tensor]) -> int:
    """How many columns both splits have."""
    counts = {split: y.shape[1] for split, y in labels.items()}
    if counts["train"] != counts["test"]:
        raise ConfigError(
            f"y_train has {counts['train']} columns and y_test {counts['test']}; both must have "
            "the same."
        )
    return counts["train"]


def stated_classes(arrays: Arrays) -> int | None:
    """The number of classes that a file states."""
    if "classes" not in arrays:
        return None
    entry = arrays["classes"]
    if entry.size != 1 or entry.dtype.kind not in "iu":
        raise ConfigError(
            f"The entry classes is {entry.dtype} of shape {entry.shape}; it must be one integer: "
            "write it with numpy.savez(path, classes=10, ...)."
        )
    stated = int(entry.item())
    if stated > _MOST_CLASSES:
        raise ConfigError(
            f"The entry classes is {stated}; it must be at most {_MOST_CLASSES}, or the scores of "
            "one example alone fill the memory."
        )
    return stated


def class_count(labels: dict[str, Tensor], stated: int | None) -> int:
    """The number of classes: the stated one, or else what the labels need."""
    largest, split = max((int(y.max()), split) for split, y in labels.items())
    classes = largest + 1 if stated is None else stated
    if classes < 2:
        raise ConfigError(
            f"The number of classes is {classes}; a classifier needs at least 2. If the labels "
            "hold one class only, state the number by an integer entry classes in the .npz."
        )
    if stated is None and classes > _MOST_INFERRED_CLASSES:
        raise ConfigError(
            f"y_{split} holds the label {largest}, which would mean {classes} classes; number the "
            "classes from 0, or state their number by an integer entry classes in the .npz."
        )
    if largest >= classes:
        raise ConfigError(
            f"y_{split} holds the label {largest}, but there are {classes} classes; labels must be "
            f"0 to {classes - 1}."
        )
    return classes
