"""A run folder as a report needs it: read, checked, and nothing changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.memory.spectrum import ESTIMATORS

if TYPE_CHECKING:
    from vestige.lab.spectrum_report import Layer

CONFIG, METRICS, RESULT, WEIGHTS = "config.json", "metrics.jsonl", "result.json", "model.pt"
_NEEDED = {
    RESULT: ("method", "dataset", "model", "accuracy", "epsilon", "delta", "guarantee", "steps"),
    METRICS: ("step", "epoch", "epsilon", "test_loss", "test_accuracy"),
}
_LISTS = ("rho", "tempering", "depth", "memory_ratio", "confidence", "gate")


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `memory` has per-epoch means by group, as rows have them."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    memory: dict[str, Any] | None

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
    result = _object(folder / RESULT, _text(folder / RESULT), RESULT)
    lines = []
    path = folder / METRICS
    for number, written in enumerate(_text(path).splitlines(), start=1):
        if written.strip():
            lines.append(_object(path, written, METRICS, number))
    for name in ("accuracy", "delta", "steps"):
        if not is_number(result[name]):
            raise _damaged(folder / RESULT, f"{name} is {result[name]!r}, not a finite number")
    for line in lines:
        for name in _NEEDED[METRICS]:
            if not (is_number(line[name]) or (line[name] is None and name != "epoch")):
                raise _damaged(path, f"{name} is {line[name]!r} at epoch {line['epoch']!r}")
    config = _object(folder / CONFIG, _text(folder / CONFIG), CONFIG)
    return Run(folder, config, result, tuple(lines), _memory(path, lines))


def trained_layers(folder: Path, settings: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The power-law fits of a run's weights; none where the weights cannot be read.

    They are fitted by the method's own estimator where it has one.
    """
    from vestige.lab.spectrum_report import Request, examine

    if not (folder / WEIGHTS).is_file():
        return ()
    estimator = settings.get("estimator")
    try:
        chosen = estimator if isinstance(estimator, str) else ESTIMATORS[0]
        return examine(Request(str(folder / WEIGHTS), chosen)).layers
    except (ConfigError, OSError):
        return ()  # a report of the other files is better than none


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from error
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is no text") from error


def _object(path: Path, text: str, name: str, number: int | None = None) -> dict[str, Any]:
    place = "" if number is None else f"line {number}: "
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{place}this is no JSON") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"{place}this is no JSON object")
    for key in _NEEDED.get(name, ()):
        if key not in found:
            raise _damaged(path, f"{place}{key} is missing")
    return found


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
            if all(name in found for _, found in told):
                facts[name] = [_means(found[name], len(groups)) for _, found in told]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(
            path, "its diagnostics are not one number for each step and group"
        ) from error
    return facts


def _means(steps: list[list[Any]], groups: int) -> list[float | None]:
    means: list[float | None] = []
    for group in range(groups):
        known = [step[group] for step in steps if is_number(step[group])]
        means.append(math.fsum(known) / len(known) if known else None)
    return means
