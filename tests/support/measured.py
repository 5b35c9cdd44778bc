"""The rows of results/, read by code that the reports have not."""

from __future__ import annotations

import functools
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scipy import stats

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "src/vestige/lab/experiments"
EPSILONS = (3.0, 8.0, 17.44)
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST"}
NAMES |= {"svhn": "SVHN (cut again)"}
WORDS = "none one two three four five six seven eight nine ten".split()

# The FO paper's protocol, its two methods, and the same at equal epsilon.
SETS = {"model": "mlp", "train_range": [0, 5000], "test_range": [0, 2000], "lot": 200}
ALONE = {**SETS, "lr": 0.8, "epochs": 250, "noise_multiplier": 1.1, "clip": 1.0, "momentum": 0.0}
DP_SGD = {**ALONE, "method": "dp-sgd", "clipping": "flat"}
FO_CONSTANTS = {"tempering": 0.0, "inconsistency": 0.1, "ema": 0.3}
FO_CONSTANTS |= {"confidence": 1.0, "min_scale": 1e-6}
FO = {**ALONE, **FO_CONSTANTS, "method": "fo", "beta": 0.9, "alpha": 0.8, "window": 8}
FO_C10, DP_C10 = {**FO, "dataset": "cifar10"}, {**DP_SGD, "dataset": "cifar10"}
ADAM = {**SETS, "dataset": "cifar10", "lr": 0.01, "epochs": 250, "noise_multiplier": 1.1}
ADAM |= {"clip": 1.0}  # of the FO paper's protocol
FLAT = ("dp-is", "dp-sam", "dp-sat")  # its other baselines, at DP-SGD's rate
CALLED = {"fo": "FO", "dp-sgd": "DP-SGD", "dp-adam": "DP-Adam", "dp-adamw": "DP-AdamW"}
CALLED |= {"dp-is": "DP-IS", "dp-sam": "DP-SAM", "dp-sat": "DP-SAT"}
CALLED |= {"dp-adam-ac": "DP-Adam-AC (not private)"}
OWN: dict[str, dict[str, Any]] = {  # the settings that the papers' tables have
    "fo": {"method": "fo", "beta": 0.9, "alpha": 0.8, "window": 8},
    "sma": {"method": "sma", "beta": 0.95, "alpha": 0.7, "window": 4, "interval": [2.0, 6.0]},
}
FAIR = {**SETS, "role": "final", "momentum": 0.0}
DATA = {"fo": ("cifar10", "svhn", "cifar100"), "sma": ("cifar10", "cifar100", "mnist")}
LAYERS = {**SETS, "dataset": "cifar10", "lr": 0.8, "epochs": 250, "clipping": "per_layer"}
LAYERS |= {"group_noise_multiplier": 1.1, "clip": 1.0}
SMA = {**LAYERS, "method": "sma", "beta": 0.95, "debias": False, "tempering": 1.0, "ema": 0.3}
SMA |= {"warmup": None, "norm_cap": 1.0, "estimator": "hill", "refresh": 1}


@functools.cache
def rows(folder: str = "results") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / folder / "rows.jsonl").read_text().splitlines()]


def definition(name: str) -> dict[str, Any]:
    return tomllib.loads((EXPERIMENTS / f"{name}.toml").read_text())


def printed(name: str, label: str) -> dict[str, float]:
    """What the paper prints for an arm."""
    (paper,) = (arm["paper"] for arm in definition(name)["arm"] if arm["label"] == label)
    return dict(paper)


def has(row: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether a row has these facts, of the run or among the settings of its method.

    Experiments share rows: a row goes by what was run, not by who asked for it first.
    """
    known = {**row.get("settings", {}), **row["config"], "role": row["role"]}
    return all(known.get(name) == value for name, value in facts.items())


def runs(seeds: Iterable[int] = range(5), **facts: Any) -> dict[int, dict[str, Any]]:
    """Every run with these facts, by seed."""
    chosen = [row for row in rows() if has(row, facts) and row["config"].get("seed") in seeds]
    assert chosen and len({row["seed"] for row in chosen}) == len(chosen), facts
    return {row["seed"]: row for row in chosen}


def found(
    what: str = "final_accuracy", seeds: Iterable[int] = range(5), **facts: Any
) -> dict[int, Any]:
    """A number of every run with these facts, by seed."""
    return {seed: row[what] for seed, row in runs(seeds, **facts).items()}


def mean(values: Mapping[int, float] | Iterable[float]) -> float:
    return statistics.fmean(values.values() if isinstance(values, Mapping) else values)


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def smallest_seen(ours: Mapping[int, float], theirs: Mapping[int, float], tests: int) -> float:
    """The smallest true difference that a paired test finds with power 0.8, one of so many."""
    gaps = differences(ours, theirs)
    t = stats.t(len(gaps) - 1)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return float((t.ppf(1 - 0.025 / tests) + t.ppf(0.8)) * error)


def up(value: float) -> str:
    return f"{math.ceil(value * 100) / 100:.2f}"


def rate_of(method: str, cell: Mapping[str, Any]) -> float:
    (rate,) = {row["lr"] for row in rows() if has(row, {**cell, "method": method})}
    return float(rate)


def apart(method: str, dataset: str, epsilon: float, seeds: Iterable[int]) -> list[float]:
    """The method's accuracy less that of DP-SGD with its rate, epsilon and clipping."""
    clipping = "flat" if method == "fo" else "per_layer"
    cell = {**FAIR, "dataset": dataset, "target_epsilon": epsilon, "clipping": clipping}
    cell["epochs"] = 250 if dataset == "cifar10" else 100
    ours = found(seeds=seeds, **cell, **OWN[method])
    rate = rate_of(method, {**cell, **OWN[method]})
    return differences(ours, found(seeds=seeds, **cell, method="dp-sgd", lr=rate))


def curves(label: str) -> list[float]:
    """Accuracy by epoch of a line of fo-readings, on average over its five seeds."""
    own = [r for r in rows() if r["experiment"] == "fo-readings" and r["label"] == label]
    assert len(own) == 5
    each = (row["curve"]["accuracy"] for row in own)
    return [statistics.fmean(some) for some in zip(*each, strict=True)]


def reading(label: str, epoch: int = 250, best: bool = False) -> float:
    if best:
        own = [r for r in rows() if r["experiment"] == "fo-readings" and r["label"] == label]
        return mean([row["best_accuracy"] for row in own])
    return curves(label)[epoch - 1]


def at_epsilon(row: Mapping[str, Any], epsilon: float) -> float:
    """Accuracy after the last epoch that is within an epsilon."""
    curve = row["curve"]
    pairs = zip(curve["epsilon"], curve["accuracy"], strict=True)
    return float([accuracy for spent, accuracy in pairs if spent <= epsilon][-1])


def larger(name: str, panel: str) -> dict[float, bool]:
    """The points of a panel: by what varies, whether GeoDP's direction error is the larger one."""
    (sweep,) = (sweep for sweep in definition(name)["sweep"] if sweep["name"] == panel)
    points = {}
    for value in sweep["values"]:
        fixed = {**sweep["fixed"], sweep["varied"]: value, "kind": "direction-error"}
        (errors,) = (row["errors"] for row in rows() if has(row, fixed))
        points[value] = errors["geodp_direction_mse"] > errors["dp_sgd_direction_mse"]
    return points
