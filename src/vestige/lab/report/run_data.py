"""A run folder as a report needs it: read, checked, and nothing changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.lab.report.checks import Checked, Finite, what_is_wrong
from vestige.lab.spectrum_report import Layer, Request, examine
from vestige.memory.spectrum import ESTIMATORS

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
MODEL, WEIGHTS = "model.json", "model.pt"
_LISTS = ("rho", "tempering", "depth", "memory_ratio", "confidence", "gate")


class _Result(Checked):
    method: Any
    dataset: Any
    model: Any
    accuracy: Finite | None
    epsilon: Any
    delta: Finite
    guarantee: Any
    steps: Finite


class _Line(Checked):
    step: Finite | None
    epoch: Finite
    epsilon: Finite | None
    test_loss: Finite | None
    test_accuracy: Finite | None


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `memory` has per-epoch means by group, as rows have them.

    `labels` are the names of classes or targets, where the folder says them.
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    memory: dict[str, Any] | None
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's own name: where it lies does not change a report."""
        return self.folder.absolute().name


def is_run(folder: Path) -> bool:
    """Whether a folder looks like one of `vestige train`."""
    return any((folder / name).is_file() for name in (RESULT, CONFIG))


def read_run(folder: Path) -> Run:
    """The run of a folder. ConfigError where it is unfinished or a file of it is damaged."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder: give a run folder of vestige train.")
    for name in (CONFIG, RESULT, METRICS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"the run folder {str(folder)!r} has no {name}: the run did not finish, or this "
                "is no run folder; give one of a finished `vestige train`."
            )
    result = _object(folder / RESULT, _text(folder / RESULT), _Result)
    lines = [
        _object(folder / METRICS, written, _Line, f"line {number}: ")
        for number, written in enumerate(_text(folder / METRICS).splitlines(), start=1)
        if written.strip()
    ]
    config = _object(folder / CONFIG, _text(folder / CONFIG), Checked)
    memory = _memory(folder / METRICS, lines)
    return Run(folder, config, result, tuple(lines), memory, _labels(folder / MODEL))


def trained_layers(folder: Path, settings: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The power-law fits of a run's weights; none where the weights cannot be read.

    They are fitted by the method's own estimator where it has one.
    """
    if not (folder / WEIGHTS).is_file():
        return ()
    estimator = settings.get("estimator")
    try:
        chosen = estimator if isinstance(estimator, str) else ESTIMATORS[0]
        return examine(Request(target=str(folder / WEIGHTS), estimator=chosen)).layers
    except (ConfigError, OSError):
        return ()  # a report of the other files is better than none


def _labels(path: Path) -> tuple[str, ...]:
    try:
        return tuple(map(str, json.loads(path.read_text(encoding="utf-8"))["labels"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()  # numbers are better than no report


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from error
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is no text") from error


def _object(path: Path, text: str, model: type[Checked], place: str = "") -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{place}this is no JSON") from error
    if not isinstance(values, dict):
        raise _damaged(path, f"{place}this is no JSON object")
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise _damaged(path, f"{place}{what_is_wrong(error)}") from error
    return values


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {what}; train again, or restore the file.")


def _memory(path: Path, lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The diagnostics of all steps as means over each epoch; None where there are none."""
    told = [(line["epoch"], line["diagnostics"]) for line in lines if line.get("diagnostics")]
    if not told:
        return None
    try:
        groups = [str(group) for group in told[0][1]["groups"]]
        facts: dict[str, Any] = {"groups": groups, "epoch": [epoch for epoch, _ in told]}
        for name in _LISTS:
            if all(name in steps for _, steps in told):
                facts[name] = [_means(steps[name], len(groups)) for _, steps in told]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(
            path, "its diagnostics are not one number for each step and group"
        ) from error
    return facts


def _means(steps: list[list[Any]], groups: int) -> list[float | None]:
    means: list[float | None] = []
    for group in range(groups):
        values = [step[group] for step in steps if is_number(step[group])]
        means.append(math.fsum(values) / len(values) if values else None)
    return means
