"""What settings must be together: each a refusal in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.train.schema import Schema


def check_one_of(config: Any, *names: str) -> None:
    """Of settings that follow from each other, at most one."""
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        both = " and ".join(f"{name} {getattr(config, name)}" for name in given)
        raise ConfigError(
            f"{both} are both given: one follows from the other, so give one of them."
        )


def check_lot(lot: int, records: int) -> None:
    """A lot must not be larger than the data."""
    if lot > records:
        raise ConfigError(
            f"lot {lot} is larger than the training data of {records} records: give a lot of at "
            f"most {records}."
        )


def check_out(folder: Path, fresh: bool) -> None:
    """Refuse a run folder that is in use or cannot be made; nothing is created."""
    try:
        if fresh and folder.is_dir() and any(folder.iterdir()) and not is_taken_up(folder):
            raise ConfigError(
                f"out {str(folder)!r} is in use: it is a folder with files in it; give a new or "
                "empty one."
            )
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    except OSError as error:
        raise ConfigError(
            f"out {str(folder)!r} cannot be used ({error.strerror}): give another folder."
        ) from error
    if not nearest.is_dir():
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not a folder; give another."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not writable; give another."
        )


def is_taken_up(out: Path | None) -> bool:
    """Whether torchrun has started the processes again, and `out` has a run to go on with."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    return again and out is not None and (out / "checkpoint.pt").is_file()


def check_restarts(out: Path | None) -> None:
    """Refuse restarts without a folder of a known name: each would begin a run of its own."""
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0"
    if out is None and int(most) > 0:
        raise ConfigError(
            f"torchrun --max-restarts {most} and no out: a start after a fault would not find the "
            "run, and begin another one on the same records. Name a folder with --out."
        )


def check_units(config: Any, schema: Schema) -> Schema:
    """The schema, which must not have a model learn from ids."""
    if config.units is not None and (schema.image or config.units in schema.columns):
        why = "are images" if schema.image else "has it as a column to learn from"
        raise ConfigError(
            f"units {config.units} for data whose schema {why}: give a table, and leave the "
            "column of ids out of its schema."
        )
    for name in ("train_size", "evaluate_epsilon"):
        if config.units is not None and getattr(config, name) is not None:
            raise ConfigError(
                f"{name} {getattr(config, name)} goes by records, and units {config.units} "
                "protects users: one user less would let others in, or change several. Leave "
                "it out."
            )
    return schema
