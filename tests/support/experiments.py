"""Small experiments, rows made up from nothing, and the runner in a process of its own."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vestige.lab import report
from vestige.lab.definition import Experiment
from vestige.lab.grid import Task, tasks_of
from vestige.lab.progress import Display
from vestige.lab.reading import read
from vestige.lab.readings import Reading
from vestige.lab.rows import ROWS, RowStore
from vestige.lab.runner import Request, reproduce
from vestige.lab.summary import rows_of

TOY = """
name = "toy"
title = "A toy"
paper = "none"
item = "Table 0"
claim = "Nothing."
seeds = 2
reference = "DP-SGD"
tables = ["accuracy", "runtime", "memory", "targets"]
assumed = ["Everything."]

[targets]
digits = 0.2

[protocol]
datasets = ["digits"]
model = "linear"
train_range = [0, 300]
test_range = [0, 100]
lot = 50
epochs = 2
lr = 0.5
noise_multiplier = 1.0

[[arm]]
label = "DP-SGD"
method = "dp-sgd"
paper = { accuracy = 0.5, std = 0.1, low = 0.3, high = 0.7 }

[[arm]]
label = "FO"
method = "fo"
settings = { beta = 0.8, window = 3 }
"""


FAIR = """
[fair]
epsilons = [2.0]
validation_range = [300, 500]
tuning_seed = 100
seeds = 2

[[fair.arm]]
label = "DP-SGD"
method = "dp-sgd"
rates = [0.1, 1.0]

[[fair.arm]]
label = "FO"
method = "fo"
rates = [0.1, 1.0]

[[fair.arm]]
label = "control"
method = "dp-sgd"
follows = "FO"
"""


def written(folder: Path, text: str, name: str = "toy") -> Experiment:
    """The experiment that a text describes."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return read(path)


def quiet(request: Request) -> Any:
    return reproduce(request, Display(quiet=True))


def stored(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / ROWS).read_text().splitlines()]


def fake_row(task: Task) -> dict[str, Any]:
    return {"hash": task.hash, "config": task.config, "seconds": 0.0}


def filled(root: Path, experiment: Experiment) -> list[Task]:
    tasks = list(tasks_of(experiment, {}, ("published",)))
    store = RowStore(root)
    for task in tasks:
        store.append(fake_row(task))
    return tasks


def python(script: str, *arguments: str) -> str:
    """What a Python process prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    return done.stdout


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; no test measures how long that takes."""
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to pass")


def command(experiment: Experiment, out: Path, *more: str) -> subprocess.Popen[str]:
    """The real runner in a process of its own."""
    line = [sys.executable, "-m", "vestige.lab", str(experiment.path), "--out", str(out)]
    return subprocess.Popen(
        [*line, *more],
        stderr=subprocess.PIPE,
        text=True,
        # A background shell hands SIGINT down as ignored: Ctrl-C shall mean something here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def full_row(task: Task) -> dict[str, Any]:
    """A row with made-up numbers that depend on the task alone."""
    assert task.run is not None
    luck = int(task.hash, 16) % 1000 / 20000
    epochs = task.run.epochs
    return {
        **fake_row(task),
        "experiment": task.experiment,
        "column": task.column,
        "role": task.role,
        "label": task.label,
        "dataset": task.run.dataset,
        "model": task.run.model,
        "method": task.run.method,
        "settings": task.config["settings"],
        "seed": task.run.seed,
        "lr": task.run.lr,
        "final_accuracy": 0.3 + luck,
        "best_accuracy": 0.35 + luck,
        "final_loss": 2.0,
        "epsilon": 3.0,
        "epsilon_marginal": 4.0,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
        "steps": 10,
        "epochs": epochs,
        "seconds": 10 + luck,
        "curve": {
            "epoch": list(range(1, epochs + 1)),
            "accuracy": [0.3 + luck] * epochs,
            "loss": [2.0] * epochs,
            "epsilon": [3.0] * epochs,
        },
        "diagnostics": None,
        "versions": {},
        "hardware": {"processor": "none", "workers": 1, "device": "cpu"},
    }


def pretend(experiment: Experiment, root: Path) -> None:
    """Fill a results folder with made-up rows of both columns."""
    store = RowStore(root)
    for _ in range(2):  # the second time, the rates are chosen
        for task in tasks_of(experiment, store.refresh()):
            if task.hash not in store.refresh():
                store.append(full_row(task))


# -- experiments that are reported -----------------------------------------------------------


HOSTILE = "<script>alert('x')</script> & \"quoted\" $\\frac{1"


REPORT_TOY = """
name = "toy"
title = "A toy"
paper = "Nobody, arXiv 2605.09890"
claim = "Everything is better."
seeds = 3
reference = "DP-SGD"
tables = ["accuracy", "runtime", "memory", "targets"]
figures = [
    "accuracy-by-epoch", "accuracy-by-epsilon", "epsilon-by-epoch", "depth-by-interval", "stages",
    "runtime", "final-accuracy",
]
assumed = ["Something, see `fo-unstated`."]
[targets]
mnist = 0.5
[protocol]
datasets = ["mnist"]
model = "mlp"
train_range = [0, 100]
test_range = [0, 50]
noise_multiplier = 1.1
lot = 20
epochs = 6
lr = 0.5
[[arm]]
label = "DP-SGD"
method = "dp-sgd"
paper = { accuracy = 0.71, std = 0.01, low = 0.70, high = 0.72, seconds = 3.0, relative = 1.0 }
[[arm]]
label = "SMA"
method = "sma"
paper = { depth = 3.2, memory_ratio = 0.0133, accuracy = 0.8 }
[[arm]]
label = "GeoDP"
method = "geodp"
[[absent]]
label = "Another"
reason = "nobody knows what it is."
paper = { accuracy = 0.6, std = 0.01, low = 0.59, high = 0.61 }
"""


REPORT_FAIR = """
[fair]
epsilons = [3.0, 8.0]
validation_range = [100, 150]
tuning_seed = 100
seeds = 2
[[fair.arm]]
label = "DP-SGD"
method = "dp-sgd"
rates = [0.1, 0.5]
[[fair.arm]]
label = "Followed"
method = "sma"
follows = "DP-SGD"
"""


def made_row(task: Task) -> dict[str, Any]:
    """A row as the runner makes them, with numbers that depend on the task alone."""
    machine = {"processor": "a machine", "cores": 2, "threads": 1, "workers": 1, "device": "cpu"}
    row: dict[str, Any] = {
        "hash": task.hash,
        "experiment": task.experiment,
        "column": task.column,
        "role": task.role,
        "label": task.label,
        "config": task.config,
        "seconds": 3 + int(task.hash, 16) % 100 / 50,
        "versions": {"vestige": "0.1.0", "torch": "2.13.0"},
        "hardware": machine,
    }
    if task.run is None:
        size = float(dict(task.cell)[list(dict(task.cell))[1]])
        errors = {
            f"{method}_{measure}": (i + 1) * 1e-3 * (size + 1) ** 0.5
            for i, method in enumerate(("dp_sgd", "geodp", "tangent"))
            for measure in ("direction_mse", "gradient_mse", "cosine")
        }
        return row | {"errors": errors}
    setting, luck = task.run, random.Random(task.hash)
    epochs = setting.epochs
    top = 0.6 + 0.2 * luck.random()
    accuracy = [round(top * (1 - math.exp(-(e + 1) / 3)), 4) for e in range(epochs)]
    plain = isinstance(setting, Reading)
    method = "plain loop" if plain else setting.method
    private = method not in ("geodp", "dp-adam-ac", "plain loop")
    target = None if plain else setting.epsilon
    last = (target or 9.0) if private else None
    curve = {
        "epoch": list(range(1, epochs + 1)),
        "accuracy": accuracy,
        "loss": [round(2 - a, 4) for a in accuracy],
        "epsilon": [last and round(last * ((e + 1) / epochs) ** 0.5, 4) for e in range(epochs)],
    }
    if task.role == "tuning":
        curve = {name: values[-1:] for name, values in curve.items()}
    if not plain and setting.averaging:
        row["averaged_accuracy"] = round(top, 4)
    return row | {
        "dataset": setting.dataset,
        "model": "mlp" if plain else setting.model,
        "method": method,
        "settings": task.config if plain else task.config["settings"],
        "seed": setting.seed,
        "lr": float(setting.lr),
        "final_accuracy": accuracy[-1],
        "best_accuracy": max(accuracy),
        "final_loss": 1.2,
        "epsilon": last,
        "epsilon_marginal": 5.0 if private and target is None else None,
        "delta": None if plain else setting.delta,
        "guarantee": "(epsilon, delta)-DP, add or remove one record" if private else "none",
        "noise_multiplier": 1.1,
        "steps": 5 * epochs,
        "epochs": epochs,
        "curve": curve,
        "diagnostics": _memory(setting.model, epochs, luck) if method == "sma" else None,
    }


def _memory(model: str, epochs: int, luck: random.Random) -> dict[str, Any]:
    groups = ["hidden1", "hidden2", "out"]
    if model == "resnet18":
        groups = [
            "conv",
            "norm",
            *(f"blocks.{i}.{n}" for i in range(8) for n in ("conv1", "norm1")),
        ]
    facts: dict[str, Any] = {
        "groups": groups,
        "epoch": list(range(1, epochs + 1)),
        "steps": [5] * epochs,
    }
    for name in ("rho", "tempering", "depth", "memory_ratio"):
        facts[name] = [
            [None if "norm" in g and name == "rho" else round(luck.random() * 4, 4) for g in groups]
            for _ in range(epochs)
        ]
    return facts | {"mean": dict.fromkeys(("rho", "tempering", "depth", "memory_ratio"), 1.5)}


def made_rows(experiment: Experiment, make: Callable[[Task], Any] = made_row) -> list[Any]:
    """All rows of an experiment, as `rows_of` gives them."""
    rows: dict[str, Any] = {}
    while new := [task for task in tasks_of(experiment, rows) if task.hash not in rows]:
        rows |= {task.hash: made for task in new if (made := make(task)) is not None}
        if any(task.hash not in rows for task in new):
            break
    return rows_of(experiment, rows)


def report_toy(folder: Path, content: str = REPORT_TOY + REPORT_FAIR) -> Experiment:
    """The experiment of a TOML text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.toml").write_text(content)
    return read(folder / "toy.toml")


def report_files(
    experiment: Experiment, folder: Path, rows: list[Any] | None = None
) -> dict[str, str]:
    """The report's files by name."""
    made = report.write(experiment, made_rows(experiment) if rows is None else rows, folder)
    return {path.name: path.read_text(encoding="utf-8") for path in made}


def only(**wanted: Any) -> Callable[[Task], Any]:
    """Rows of some tasks only."""

    def make(task: Task) -> Any:
        known = {
            "seed": task.run.seed if task.run else None,
            "label": task.label,
            "column": task.column,
            "role": task.role,
        }
        return made_row(task) if all(known[name] == v for name, v in wanted.items()) else None

    return make


def forgetful(task: Task) -> dict[str, Any]:
    return made_row(task) | ({"diagnostics": None} if task.run else {})


def unprotected(task: Task) -> dict[str, Any]:
    row = made_row(task)
    row |= {"epsilon": None, "epsilon_marginal": None, "guarantee": "none"}
    row["curve"] = row["curve"] | {"epsilon": [None] * len(row["curve"]["epoch"])}
    return row
