"""The page of a run: guarantee, settings, curves, spectrum and memory, raw numbers, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vestige.checks import is_number, round_up
from vestige.lab import rendering, wording
from vestige.lab.plots import Plot
from vestige.lab.report.downloads import download
from vestige.lab.report.run_data import Run
from vestige.lab.spectrum_report import Layer, layer_table
from vestige.methods import METHODS
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.statement.model import HTML_FILE
from vestige.statement.table import Table

Pairs = list[tuple[str, str]]
_PLACES = ("folder", "data_dir", "schema_file")  # where the files lay is not told
_ACCURACIES = {
    "accuracy": "held-out accuracy",
    "averaged_accuracy": "with averaged weights",
}
_FIGURES = {
    "balanced_accuracy": "held-out balanced accuracy",
    "auc": "held-out AUC",
    "rmse": "held-out RMSE",
    "mae": "held-out mean absolute error",
}
_NAMES = {
    "model": "model",
    "parameters": "parameters",
    "records": "training records",
    "lot": "expected lot",
    "epochs": "epochs",
    "optimizer": "optimizer",
    "lr": "learning rate",
    "clip": "clipping norm",
    "clipping": "clipping",
    "device": "device",
}
# Of the command for a run, in order; the method's settings stand behind its name.
_OPTIONS = (
    *"dataset model method epsilon noise_multiplier delta accountant lot steps clip".split(),
    *"clipping lr seed averaging history_dtype train_size test_size target schema_file".split(),
    *"task dataset_size tuning evaluate_epsilon".split(),
)
_SPELLED = {"schema_file": "schema"}
_PAPERS_FIGURE = (
    "The papers' figure is their RDP value at sigma/beta of one clipping group alone. It is a "
    "diagnostic, not a guarantee: a reader of the model sees every group."
)


def run_page(run: Run, plots: Mapping[str, Plot], layers: Sequence[Layer]) -> str:
    """The page as text."""
    result = run.result
    method = METHODS.get(str(result["method"]))
    summary = method.summary[:1].upper() + method.summary[1:] if method else ""
    measured = [
        (label, f"{result[name]:.2%}")
        for name, label in _ACCURACIES.items()
        if result.get(name) is not None
    ]
    figures = result.get("metrics") or {}
    measured += [
        (label, wording.number(figures[name], ".4g"))
        for name, label in _FIGURES.items()
        if figures.get(name) is not None
    ]
    steps = "1 step" if result["steps"] == 1 else f"{result['steps']:,} steps"
    finite = result["epsilon"] is not None and result["guarantee"] != "none"
    marginal = _papers_figure(run) if finite else None
    has_memory = layers or "memory" in plots
    parts = {
        "guarantee": "Guarantee",
        "settings": "Settings",
        "curves": "Result and curves",
        "memory": "Spectrum and memory" if has_memory else "",
        "numbers": "Numbers and commands",
    }
    caption = "Power-law exponents of the trained weights"
    return rendering.html(
        "run.html.j2",
        kind="Vestige report: a private training run",
        title=f"{result['method']} on {_dataset(result)}",
        lead=f"{result['model']}, {steps}, run folder {run.name}",
        parts={anchor: title for anchor, title in parts.items() if title},
        result=result,
        finite=finite,
        mechanism=_mechanism(result, marginal),
        notes=_notes(result, marginal),
        method="" if method is None else f"{summary}. {method.paper}".strip(),
        settings=_settings(run),
        method_settings=[(n, wording.value(v)) for n, v in (result.get("settings") or {}).items()],
        tiles=[*measured, ("held-out loss", wording.number(result.get("loss"), ".4f"))],
        measured_on=str(result.get("measured_on") or ""),
        matrix=_confusion(figures.get("confusion_matrix"), run.labels),
        statement=HTML_FILE if (run.folder / HTML_FILE).is_file() else None,
        plots=plots,
        layers=layer_table(layers, caption) if layers else None,
        files=_files(run),
        command=train_command(run),
        made_by=f"vestige report {_place(run)}",
        versions=list((result.get("versions") or {}).items()),
    )


def _place(run: Run) -> str:
    """The folder as the run was told it, with its parent at most: no more of a path is shown."""
    alone = str(run.result.get("folder")) == run.name
    return shlex.quote(run.name if alone else f"{run.folder.absolute().parent.name}/{run.name}")


def _confusion(matrix: Any, labels: Sequence[str]) -> Table | None:
    """Which classes were taken for which, where there are few enough to read."""
    if not isinstance(matrix, list) or len(matrix) > 10:
        return None
    known = len(labels) == len(matrix)
    names = list(labels) if known else [str(place) for place in range(len(matrix))]
    lines = [[name, *map(str, row)] for name, row in zip(names, matrix, strict=True)]
    caption = "Held-out records by class (lines) and predicted class (columns)"
    return Table(["class", *names], lines, caption)


def _dataset(result: Mapping[str, Any]) -> str:
    return wording.dataset(Path(str(result["dataset"])).name)


def _mechanism(result: Mapping[str, Any], marginal: float | None) -> Pairs:
    """Noise, sampling and the number of releases: what epsilon follows from."""
    told = []
    noise, beta, rate = (result.get(name) for name in ("noise_multiplier", "beta", "sample_rate"))
    if isinstance(noise, int | float):
        told.append(("noise multiplier", f"{noise:.4g}"))
        if isinstance(beta, int | float) and beta < 1:
            told.append((f"accounted at (beta {beta:g})", f"{noise / beta:.4g}"))
    if isinstance(rate, int | float):
        told.append(("sampling rate", f"{rate:.4g}"))
    told.append(("releases", f"{result['steps']:,}"))
    if marginal is not None:
        told.append(("papers' figure (diagnostic)", round_up(marginal)))
    return told


def _notes(result: Mapping[str, Any], marginal: float | None) -> list[str]:
    warning = wording.weak(result["epsilon"])
    notes = [str(caveat) for caveat in result.get("caveats") or ()]
    notes += [] if warning is None else [warning]
    return notes + ([] if marginal is None else [_PAPERS_FIGURE])


def _papers_figure(run: Run) -> float | None:
    """What one group alone would cost, by the papers' conversion; None where that is the whole."""
    result, facts = run.result, run.memory
    groups = len(facts["groups"]) if facts else 1
    if "per_layer" not in str(result.get("clipping")) or isinstance(result.get("clip"), list):
        return None  # the groups are the memory's, or have norms of their own
    names = ("noise_multiplier", "beta", "sample_rate")
    numbers = [float(result[name]) for name in names if is_number(result.get(name))]
    if groups < 2 or len(numbers) < len(names) or min(numbers) <= 0:
        return None
    noise, beta, rate = numbers
    given = run.config.get("group_noise_multiplier")
    # A joint multiplier s in G groups, each with its share of the norm, is s sqrt(G) in each.
    of_group = float(given) if isinstance(given, int | float) else noise * groups**0.5
    event = Event(rate, of_group / beta, int(result["steps"]))
    return accounting.epsilon([event], result["delta"], "rdp_classic")


def _settings(run: Run) -> Pairs:
    result = run.result
    told = [("data", _dataset(result)), ("method", str(result["method"]))]
    told += [(label, wording.value(result[n])) for n, label in _NAMES.items() if n in result]
    told.append(("seed", str(result.get("seed", wording.NONE))))
    for name in ("averaging", "history_dtype", "train_size", "test_size"):
        if run.config.get(name) is not None:
            told.append((name.replace("_", " "), wording.value(run.config[name])))
    return told


def _files(run: Run) -> list[dict[str, str]]:
    lines = "".join(f"{json.dumps(line)}\n" for line in run.lines).encode()
    return [
        download("metrics.jsonl", "one line for each epoch", lines),
        download("result.json", "", _json(run.result)),
        download("config.json", "", _json(run.config)),
    ]


def _json(values: Mapping[str, Any]) -> bytes:
    kept = {name: value for name, value in values.items() if name not in _PLACES}
    return f"{json.dumps(kept, indent=2)}\n".encode()


def train_command(run: Run) -> str | None:
    """The command line for a run with these settings; None for settings that it cannot say."""
    config = run.config
    if "group_noise_multiplier" in config or "planned_steps" not in config:
        return None
    method = METHODS.get(str(config.get("method")))
    defaults = method.load()().settings() if method else {}
    given = config | {
        "dataset": Path(str(config.get("dataset"))).name,
        "epsilon": config.get("target_epsilon"),
        "steps": config["planned_steps"],
        "schema_file": config.get("schema_file") and Path(str(config["schema_file"])).name,
    }
    if given["epsilon"] is not None:
        given["noise_multiplier"] = None
    options = [(name, given.get(name)) for name in _OPTIONS]
    settings = [
        ("set", f"{name}={_word(value)}")
        for name, value in (config.get("settings") or {}).items()
        if _word(defaults.get(name)) != _word(value)
    ]
    words = [
        f"--{_SPELLED.get(name, name.replace('_', '-'))} {shlex.quote(_word(value))}"
        for name, value in [*options[:3], *settings, *options[3:]]
        if value is not None and value != []
    ]
    words += ["--train-loss"] if "train_loss_outside_guarantee" in run.result else []
    return " ".join(["vestige train", *words])


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(_word(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
