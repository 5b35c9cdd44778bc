"""From a TOML file to an experiment, checked before anything runs.

Every message names the file, the place in it, the key and the rule, so that it can be mended.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vestige.errors import ConfigError
from vestige.lab.arms import Candidate
from vestige.lab.definition import Experiment
from vestige.lab.fields import refusal
from vestige.lab.readings import Reading
from vestige.lab.setting import RunSetting


def read(path: Path) -> Experiment:
    """The experiment that a TOML file describes. ConfigError names the file and the key."""
    values = _values(path)
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {refusal(error, Experiment)}") from error
    if experiment.name != path.stem:
        raise ConfigError(
            f"{path}: top level: name = {experiment.name!r} is not the file's name: it must be "
            f"{path.stem!r}."
        )
    if experiment.kind == "direction-error":
        experiment = experiment.model_copy(update={"seeds": 1, "tables": []})
    experiment._path = path
    if experiment.kind == "training":
        _check_runs(path, experiment)
        if "quick_values" in experiment.model_fields_set:
            _check_runs(path, experiment.quickened())
    return experiment


def _values(path: Path) -> dict[str, Any]:
    """What the file holds; ConfigError where it is no TOML, or holds what no experiment can."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the experiment {path} cannot be read ({error.strerror}): check the name."
        ) from error
    except ValueError as error:  # not TOML, or not UTF-8
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: this is no valid TOML ({reason}): mend it there.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: brackets are nested too deeply: mend it there.") from error
    _check_values(path, values, "top level")
    return values


def _check_values(path: Path, value: Any, place: str) -> None:
    """Numbers must be finite, and within what a computer counts with; nothing is a date."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not -(2**63) < value < 2**63:
        raise ConfigError(f"{path}: {place} = {str(value)[:40]} is wrong: it is out of range.")
    if not isinstance(value, int | float | str | list | dict):
        raise ConfigError(f"{path}: {place} = {value} is wrong: it is a date or a time.")
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value, start=1)
    for key, item in inner:
        _check_values(path, item, str(key) if place == "top level" else f"{place}, {key}")


def _check_runs(path: Path, experiment: Experiment) -> None:
    """Make a run of every arm and value, which checks methods, datasets, settings and sizes."""
    first = next(experiment.variants())
    others = [
        first | {key: value} for key, values in experiment.grid.items() for value in values[1:]
    ]
    for dataset in experiment.datasets:
        for number, arm in enumerate(experiment.arms, start=1):
            for variant in (first, *others):
                place = f"{path}: arm {number} ({arm.label})"
                _check_run(place, experiment.run, arm, dataset, variant, 0)
    fair = experiment.fair
    for dataset in experiment.fair_datasets:
        for number, tuned in enumerate(fair.arms if fair else (), start=1):
            place = f"{path}: fair, arm {number} ({tuned.label})"
            for candidate in tuned.candidates() or [Candidate(0.1, {})]:
                _check_run(place, experiment.fair_run, tuned, dataset, 1.0, candidate, 0, True)


def _check_run(place: str, make: Callable[..., RunSetting | Reading], *arguments: Any) -> None:
    try:
        run = make(*arguments)
        if isinstance(run, RunSetting):
            run.train_config()
    except (ConfigError, TypeError) as error:
        # A TypeError is a value of the wrong kind that a constructor tripped over.
        raise ConfigError(f"{place}: {error}") from error
