"""Figures beyond accuracy, which may be the majority's share: exact functions of held-out data.

Guarantee: none for the held-out records; those that were trained on have no part in it.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from torch import Tensor

from vestige.train.dataset import Dataset
from vestige.train.tasks import unit


def measured(dataset: Dataset, scores: Tensor) -> dict[str, Any]:
    """The figures of the task on the held-out split, by scikit-learn; none where it is missing.

    What is undefined on these records (the AUC of a class that is not there) is None.
    """
    if importlib.util.find_spec("sklearn") is None or not bool(scores.isfinite().all()):
        return {}
    from sklearn import metrics

    y = dataset.y_test.cpu()
    scores = scores.cpu().double()
    if dataset.task == "regression":
        error = (scores.clamp(-1, 1) - y).numpy() * unit(dataset)
        return {
            "rmse": math.sqrt(float((error**2).mean())),
            "mae": float(abs(error).mean()),
        }
    if dataset.task == "multi-label":
        per_label = [_auc(y[:, i].numpy(), scores[:, i].numpy()) for i in range(y.shape[1])]
        known = [auc for auc in per_label if auc is not None]
        return {
            "all_labels_right": float(((scores > 0) == (y > 0.5)).all(1).double().mean()),
            "auc": math.fsum(known) / len(known) if known else None,
            "auc_by_label": per_label,
        }
    chances = scores.softmax(1).numpy()
    labels = list(range(dataset.classes))
    if len(labels) == 2:
        auc = _auc(y.numpy(), chances[:, 1])
    elif len(set(y.tolist())) == len(labels):
        auc = float(metrics.roc_auc_score(y.numpy(), chances, multi_class="ovr", labels=labels))
    else:
        auc = None
    matrix = metrics.confusion_matrix(y.numpy(), chances.argmax(1), labels=labels)
    rows = matrix.sum(axis=1)
    recalls = [matrix[i, i] / rows[i] for i in labels if rows[i]]
    found = {"balanced_accuracy": float(sum(recalls) / len(recalls)), "auc": auc}
    # Beyond that a table is no longer read.
    return found | ({"confusion_matrix": matrix.tolist()} if len(labels) <= 20 else {})


def _auc(y: Any, scores: Any) -> float | None:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, scores)) if 0 < y.sum() < len(y) else None
