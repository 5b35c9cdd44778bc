"""The fixed public list of settings that a search draws from. No torch here."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vestige import methods
from vestige.errors import ConfigError
from vestige.train.checks import LEAST_SQUARES
from vestige.train.config import TrainConfig

FIELDS = "lr clip lot epochs steps momentum model method clipping noise_multiplier views".split()
_MOST = 1000  # each is prepared once before anything is spent
_LEFT_OUT = {
    "out": "a search has a folder of its own",
    "max_epsilon": "every trial runs to its end",
    "train_loss": "a score must not look at training records without noise",
    "group_noise_multiplier": "a search has one noise multiplier",
    "checkpoint_every": "a search leaves nothing to resume from",
    "compile": "the caches of a compiler tell what was compiled",
    "features": "trials learn on the inputs",
    "weights": "every trial begins anew",
}


@dataclass(frozen=True)
class Candidate:
    """Settings that a trial may have: what was given for it, and the whole configuration."""

    given: Mapping[str, Any]
    config: TrainConfig

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.given.items())


def from_grid(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of each setting; a single value counts as one."""
    several = [
        v if isinstance(v, Sequence) and not isinstance(v, str) else (v,) for v in grid.values()
    ]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*several)]


def from_file(path: Path) -> list[dict[str, Any]]:
    """The tables [[candidate]] of a TOML file, each with its settings."""
    try:
        found = tomllib.loads(path.read_text())
        rows = found.pop("candidate")
        if found or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it should hold tables [[candidate]] and nothing else")
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"the candidates in {str(path)!r} cannot be read ({error}): give a TOML file with a "
            "table [[candidate]] for each, such as lr = 0.5."
        ) from None
    return rows


def candidates(base: TrainConfig, rows: Iterable[Mapping[str, Any]]) -> tuple[Candidate, ...]:
    """The candidates over what they share; ConfigError for one that no trial could have.

    A name that is no setting of a run is one of the method's.
    """
    for name, why in _LEFT_OUT.items():
        if getattr(base, name) not in (None, False):
            raise ConfigError(f"{name} {getattr(base, name)} does not go with a search: {why}.")
    made = []
    for row in itertools.islice(rows, _MOST + 1):
        own = {name: value for name, value in row.items() if name in FIELDS}
        other = {name: value for name, value in row.items() if name not in FIELDS}
        for name in other:
            if name in TrainConfig.model_fields:
                raise ConfigError(
                    f"{name} is not for trying: give it once, for all; what may be tried is "
                    f"{', '.join(FIELDS)}, and the settings of the method."
                )
        settings = {"settings": {**base.settings, **other}} if other else {}
        made.append(Candidate(dict(row), base.changed(**own, **settings)))
    if not 2 <= len(made) <= _MOST or len({str(one) for one in made}) != len(made):
        raise ConfigError(
            f"{len(made)} candidates, {len({str(one) for one in made})} of them different: give 2 "
            f"to {_MOST} different ones, such as --try lr=0.1,0.5,1."
        )
    for one in made:
        if one.config.chosen_model == LEAST_SQUARES:
            raise ConfigError(
                f"model {LEAST_SQUARES!r} is one release and has nothing to search: use vestige "
                "train."
            )
        if not methods.resolve(one.config.method, one.config.settings).private:
            raise ConfigError(
                f"method {one.config.method!r} has no guarantee, and no search over it has: leave "
                "it out."
            )
    return tuple(made)
