"""A dataset in memory: two splits, what is to be predicted, and how records become numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

PLAIN: Mapping[str, Any] = {"kind": "numbers"}
"""The preprocessing of inputs that are taken as they are."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a held-out split in memory: float32 inputs and their targets.

    Classification: int64 labels 0 to classes - 1. Multi-label: float32 zeros and ones, one column
    for each of `classes` labels. Regression: float32 from -1 to 1, one column for each target.

    `classes_inferred` is True where the number of classes was read off the labels of a user's
    file: it is then treated as public. `labels` are the names of the classes, labels or targets;
    `preprocessing` says, as JSON types, how a record becomes an input. `own` marks somebody's own
    records, whose exact held-out figures are not to be published. `weights` of the classes come
    from declared frequencies; `ranges` are those of regression's targets. `features` of both
    splits stand for their inputs in a model that learns from fixed features (train/recipes).
    `units` are the ids of the training records' users, where users are protected: private, and
    never written.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    classes_inferred: bool = False
    task: str = "classification"
    labels: tuple[str, ...] = ()
    preprocessing: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    own: bool = False
    weights: tuple[float, ...] | None = None
    ranges: tuple[tuple[float, ...], ...] = ()
    features: tuple[Tensor, Tensor] | None = None
    units: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def protected(self) -> int:
        """The number of privacy units in the training split: records, or users."""
        return len(self.x_train) if self.units is None else len(set(self.units))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example: (channels, height, width) for images."""
        return tuple(self.x_train.shape[1:])
