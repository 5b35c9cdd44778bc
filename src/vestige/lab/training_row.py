"""One row: train as a task says, on data that is prepared once, and keep the numbers.

Guarantee of tuning: a run that is measured on validation images is given training images only; the
test split is not even read from the disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.lab.diagnostics import MemoryRecord
from vestige.lab.grid import Row, Task
from vestige.lab.kept_runs import run_in
from vestige.lab.plain_loop import Images, run_side_by_side
from vestige.lab.readings import Reading
from vestige.lab.setting import RunSetting
from vestige.lab.spending import epsilon_curve
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.run_folder import METRICS
from vestige.train.training import Progress

if TYPE_CHECKING:
    import torch

    from vestige.train.data import Dataset

_OF_CONFIG = "dataset model method settings seed lr delta epochs".split()
_OF_RESULT = "epsilon guarantee noise_multiplier optimizer parameters steps".split()
Watch = Callable[[int, int], None]  # told the epochs that are done, and how many there are


def make_row(
    task: Task,
    device: str | None = None,
    watch: Watch | None = None,
    workers: int = 1,
    home: Path | None = None,
) -> Row:
    """Run a task and return its row. `watch` may raise to give the row up.

    `workers` is how many rows are made at the same time: seconds are only comparable between rows
    where it is the same. `home` is the run folder of a long row: it goes on from the checkpoint
    there.
    """
    watch = watch or (lambda *_: None)
    if task.run is None:
        row, used = _direction_row(task), "cpu"
    elif isinstance(task.run, Reading):
        return plain_rows([task], device or task.device, watch)[0]
    else:
        row, used = _training_row(task, task.run, device or task.device, watch, home)
    return row | {"versions": training.versions(), "hardware": hardware(used, workers)}


def _training_row(
    task: Task, run: RunSetting, device: str, watch: Watch, home: Path | None
) -> tuple[Row, str]:
    record = _Record(run, watch)
    data, digest = _prepared(run, device)
    if home is None:
        config, made = run.train_config(device), _optimizer(run)
        session = training.prepare(config, optimizer=made, dataset=data)
        record.ledger = session.engine.ledger.merged
        result = session.run(record)
        seconds = session.seconds
    else:
        result, seconds = _long_run(run, device, data, record, home)
    if result["interrupted"]:
        raise KeyboardInterrupt
    record.account(result, last_only=task.role == "tuning")
    row = {
        **_place(task),
        **{name: task.config[name] for name in _OF_CONFIG},
        "data": digest,
        "final_accuracy": result["accuracy"],
        **({"averaged_accuracy": result["averaged_accuracy"]} if run.averaging else {}),
        "best_accuracy": record.best,
        "final_loss": _rounded(result["loss"]),
        "epsilon_marginal": record.marginal,
        **{name: result[name] for name in _OF_RESULT},
        "seconds": round(seconds, 3),
        "curve": record.curve,
        "diagnostics": record.memory.summary(run.epochs),
    }
    return row, result["device"]


def _long_run(
    run: RunSetting, device: str, data: Dataset, record: _Record, home: Path
) -> tuple[dict[str, Any], float]:
    """The result of a run with checkpoints, and the seconds of every command that had a part."""
    began, taken = time.perf_counter(), home.with_suffix(".seconds")
    before = float(taken.read_text()) if taken.exists() else 0.0

    def tell(progress: Progress) -> None:
        if progress.metrics is not None:
            write_whole(taken, str(before + time.perf_counter() - began).encode())
            record.watch(progress.metrics["epoch"], run.epochs)

    config = run.train_config(device)
    result = run_in(home, config, data, tell, optimizer=_optimizer(run))
    for line in (home / METRICS).read_text().splitlines():
        record.add(json.loads(line))
    return result, before + time.perf_counter() - began


def groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Readings that can run side by side: those with the same data, lot and length."""
    shared = ("dataset", "train_range", "test_range", "lot", "epochs")
    together: dict[str, list[Task]] = {}
    for task in tasks:
        together.setdefault(str([task.config[name] for name in shared]), []).append(task)
    return list(together.values())


def plain_rows(tasks: Sequence[Task], device: str, watch: Watch | None = None) -> list[Row]:
    """The rows of readings that share data, lot and length, made side by side.

    Their seconds are those of all of them together.
    """
    readings = [task.run for task in tasks if isinstance(task.run, Reading)]
    started = time.perf_counter()
    images, digest = _images(readings[0])
    curves = run_side_by_side(readings, images, device, watch)
    seconds = round(time.perf_counter() - started, 3)
    machine = {"versions": training.versions(), "hardware": hardware(device, 1)}
    return [
        {
            **_place(task),
            **{name: getattr(reading, name) for name in ("dataset", "seed", "lr", "epochs")},
            "data": digest,
            "model": "mlp",
            "method": "plain loop",
            "settings": task.config,
            "final_accuracy": curve[-1],
            "best_accuracy": max(curve),
            "final_loss": None,
            "epsilon": None,
            "epsilon_marginal": None,
            "delta": None,
            "guarantee": "none: a plain loop without a ledger, on public images",
            "noise_multiplier": reading.noise_multiplier,
            "optimizer": "Adam" if reading.adam else "SGD",
            "steps": reading.steps,
            "seconds": seconds,
            "curve": {
                "epoch": list(range(1, reading.epochs + 1)),
                "accuracy": curve,
                "loss": [None] * reading.epochs,
                "epsilon": [None] * reading.epochs,
            },
            "diagnostics": None,
            **machine,
        }
        for task, reading, curve in zip(tasks, readings, curves, strict=True)
    ]


def _images(reading: Reading) -> tuple[Images, str]:
    held_out = (reading.test_range[0], reading.test_range[1])
    data, digest = _load(reading.dataset, tuple(reading.train_range), held_out, False)
    # The loader's pixels are 2 x - 1, and the readings scale them each in its own way.
    x_train, x_test = ((x.flatten(1) + 1) / 2 for x in (data.x_train, data.x_test))
    return Images(x_train, data.y_train, x_test, data.y_test, data.classes), digest


def papers_event(run: RunSetting, beta: Any) -> Event | None:
    """One release as the papers account it: at sigma/beta of one group alone.

    That is a guarantee where there is one group and one look at the lot, and a diagnostic
    otherwise. None for noise that was solved for, and for a beta that varies.
    """
    sigma = run.noise_multiplier or run.group_noise_multiplier
    if not sigma or not isinstance(beta, int | float):
        return None
    return Event(run.lot / (run.train_range[1] - run.train_range[0]), sigma / beta)


class _Record:
    """Listens to a run: its curve, what it had spent by each epoch, and its memory."""

    def __init__(self, run: RunSetting, watch: Watch) -> None:
        self._run, self.watch = run, watch
        window = run.config()["settings"].get("window", 1)
        self.memory = MemoryRecord(run.epochs, window if isinstance(window, int) else 1)
        self.curve: dict[str, list[Any]] = {"epoch": [], "accuracy": [], "loss": []}
        self.ledger: Callable[[], tuple[Event, ...]] = tuple
        self.best = 0.0
        self.marginal: float | None = None
        self._spent: list[tuple[Event, ...]] = []  # of a long run nothing: its lines say epsilon
        self._told: list[float | None] = []

    def __call__(self, progress: Progress) -> None:
        """The callback of the training loop."""
        if progress.metrics is not None:
            self._spent.append(self.ledger())
            self.add(progress.metrics)
            self.watch(progress.metrics["epoch"], self._run.epochs)

    def add(self, line: Mapping[str, Any]) -> None:
        """A line of metrics."""
        self.curve["epoch"].append(line["epoch"])
        self.curve["accuracy"].append(line["test_accuracy"])
        self.curve["loss"].append(_rounded(line["test_loss"]))
        self.best = max(self.best, line["test_accuracy"])
        self._told.append(line["epsilon"])
        if "diagnostics" in line:
            self.memory.add(line["epoch"], line["diagnostics"])

    def account(self, result: Mapping[str, Any], last_only: bool) -> None:
        """Add the epsilons to the curve; of a tuning run only the last epoch is kept."""
        run, final, event = self._run, result["epsilon"], papers_event(self._run, result["beta"])
        papers: list[list[Event]] = []
        if event is not None and final is not None:
            per_epoch = result["steps"] // run.epochs
            papers = [[replace(event, count=per_epoch * e)] for e in self.curve["epoch"]]
            self.marginal = accounting.epsilon(papers[-1], run.delta, "rdp_classic")
        if last_only:
            self.curve = {name: values[-1:] for name, values in self.curve.items()}
            self.curve["epsilon"] = [final]
            return
        whole = epsilon_curve(self._spent, run.delta, final) if self._spent else self._told
        self.curve["epsilon"] = whole
        if papers:
            self.curve["epsilon_marginal"] = epsilon_curve(
                papers, run.delta, self.marginal, "rdp_classic"
            )


def _optimizer(run: RunSetting) -> Callable[..., torch.optim.Optimizer] | None:
    if not run.momentum:
        return None  # the method's own
    import torch

    return functools.partial(torch.optim.SGD, momentum=run.momentum)


def _prepared(run: RunSetting, device: str) -> tuple[Dataset, str]:
    held_out = run.validation_range or run.test_range
    assert held_out is not None
    tuning = run.validation_range is not None
    asked = run.dataset, tuple(run.train_range), tuple(held_out), tuning
    if run.features or run.model.startswith("scatter"):
        return _featured(run.model, run.features, *asked, device)
    return _load(*asked)


@functools.lru_cache(maxsize=2)  # what is tuned on, and what is reported
def _featured(
    kind: str,
    features: str | None,
    name: str,
    train: tuple[int, ...],
    held_out: tuple[int, ...],
    validation: bool,
    device: str,
) -> tuple[Dataset, str]:
    """The data with their fixed features, which all runs in a row share.

    Where the features were learned, the digest is that of data and features.
    """
    from vestige.train.recipes.features import with_features

    data, digest = _load(name, train, held_out, validation)
    where = training.device_of(device)
    config = TrainConfig(dataset=name, model=kind, features=features)
    model = training.model_of(config, data, where)
    if features:
        fixed = model.get_submodule("features")
        weights = [value.cpu().numpy().tobytes() for value in fixed.state_dict().values()]
        digest = hashlib.sha256(b"".join((digest.encode(), *weights))).hexdigest()[:16]
    return with_features(data, model, where, lambda _: None), digest


@functools.lru_cache(maxsize=4)
def _load(
    name: str, train: tuple[int, ...], held_out: tuple[int, ...], validation: bool
) -> tuple[Dataset, str]:
    """The data, and its digest: rows of two versions of a benchmark are told apart by it."""
    from vestige.train import data

    spans = (train[0], train[1]), (held_out[0], held_out[1])
    loaded = data.load_ranges(name, *spans, validation=validation)
    digest = hashlib.sha256()
    for part in (loaded.x_train, loaded.y_train, loaded.x_test, loaded.y_test):
        digest.update(part.contiguous().numpy().tobytes())
    return loaded, digest.hexdigest()[:16]


def _direction_row(task: Task) -> Row:
    started = time.perf_counter()
    errors = _measure(task.config)
    seconds = round(time.perf_counter() - started, 3)
    return {**_place(task), "errors": errors, "seconds": seconds}


def _place(task: Task) -> Row:
    names = ("hash", "experiment", "column", "role", "label", "config")
    return {name: getattr(task, name) for name in names}


def _measure(config: Mapping[str, Any]) -> dict[str, float]:
    """The errors at one point of a direction study, by method and measure."""
    from vestige.geometry.study import DirectionStudy, direction_study

    settings = {name: value for name, value in config.items() if name != "kind"}
    try:
        study = DirectionStudy(**settings)
    except TypeError as error:
        raise ConfigError(f"a point lacks a setting ({error}): add it to the sweep.") from error
    return direction_study(study)


def hardware(device: str, workers: int) -> dict[str, Any]:
    """The machine that a row was made on, in words."""
    import torch

    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "workers": workers,
        "device": "cpu",
    }
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
    return found


@functools.cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
