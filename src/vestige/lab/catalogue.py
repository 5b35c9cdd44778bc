"""Where experiments are found: TOML files inside the package, or in a folder that is named."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.lab.definition import Experiment
from vestige.lab.grid import count_of
from vestige.lab.reading import read

VARIABLE = "VESTIGE_EXPERIMENTS"


def folder() -> Path:
    """The folder with the experiments: VESTIGE_EXPERIMENTS, or the one inside the package."""
    named = os.environ.get(VARIABLE)
    chosen = Path(named) if named else Path(str(resources.files("vestige.lab") / "experiments"))
    if not any(chosen.glob("*.toml")):
        raise ConfigError(
            f"the folder {str(chosen)!r} holds no experiment, that is, no .toml file: name another "
            f"one in {VARIABLE}, or leave the variable away."
        )
    return chosen


def names() -> list[str]:
    """The names of all experiments, in order."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def find(name: str) -> Experiment:
    """The experiment of that name, or the one in the file at that path."""
    if name.endswith(".toml"):
        return read(Path(name))
    path = folder() / f"{name}.toml"
    if not name or "/" in name or not path.is_file():
        raise ConfigError(
            f"experiment {name!r} is unknown: choose one of {', '.join(names())}, or give the path "
            "of a .toml file."
        )
    return read(path)


def called(experiment: Experiment) -> str:
    """What `find` finds an experiment by."""
    own = experiment.path.resolve() == (folder() / f"{experiment.name}.toml").resolve()
    return experiment.name if own else str(experiment.path)


def chosen(wanted: list[str]) -> list[Experiment]:
    """The experiments of these names, each once; "all" is every one."""
    if wanted == ["all"]:
        wanted = names()
    return [find(name) for name in dict.fromkeys(wanted)]


def described() -> list[dict[str, Any]]:
    """Every experiment in a few words, with the number of its rows."""
    return [
        {
            "name": experiment.name,
            "title": experiment.title,
            "paper": experiment.paper,
            "item": experiment.item,
            "kind": experiment.kind,
            "datasets": list(experiment.datasets),
            "seeds": experiment.seeds,
            **count_of(experiment),
        }
        for experiment in (find(name) for name in names())
    ]
