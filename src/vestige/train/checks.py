"""What settings must be together: each a refusal in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.plan import parsed_averaging
from vestige.train.schema import Schema

LEAST_SQUARES, PRIOR = "least-squares", "prior"
FEATURES = ("scatter", PRIOR)
_HEADS = ("linear", "mlp", LEAST_SQUARES)


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


def check_records(config: Any, own: bool) -> None:
    """Which records are used, and as what; `own` are somebody's, and no benchmark set."""
    _check_rows_of_unit(config)
    if own and config.units is None:  # of users, `check_units` says why not
        _check_first_records(config)


def _check_rows_of_unit(config: Any) -> None:
    """Views and users, and what belongs to them."""
    if config.mix_views and (config.views or 1) < 4:
        raise ConfigError(
            f"mix_views with views {config.views}: mixtures take two of the other half, so give "
            "at least 4 views."
        )
    if (config.units is None) != (config.rows_per_unit is None):
        raise ConfigError(
            f"units {config.units} and rows_per_unit {config.rows_per_unit}: give both, the column "
            "of ids and the most rows of a user in a lot, or neither."
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


def _check_first_records(config: Any) -> None:
    """Records of one's own are used whole: the first N of them are not the first N of a neighbour.

    Without one of the first N another record comes in, so that two change where the sum is charged
    for one. The held-out split may be cut where no figure of it is released as private.
    """
    names = ["train_size"] + ["test_size"] * (config.evaluate_epsilon is not None)
    for name in names:
        if (size := getattr(config, name)) is not None:
            raise ConfigError(
                f"{name} {size} takes the first {size} records of your own data: one record less "
                "would let another in, and two would change. Leave it out, or give a file that "
                "holds the records to use and no others."
            )


def check_device(device: str) -> str:
    """The name of a device, which may not be there."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device {device!r} is unknown: choose auto, cpu, cuda or cuda:N.")
    return device


def check_averaging(averaging: str | None) -> str | None:
    """The name of an average of the weights, or none."""
    if averaging is not None:
        parsed_averaging(averaging)
    return averaging


def check_data_dir(folder: Path | None) -> Path | None:
    """A folder that can be read, or none."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"data_dir {str(folder)!r} is no folder that can be read: give the folder that "
            "holds NAME.npz."
        )
    return folder


def check_features(config: Any) -> None:
    """Frozen features, what learns on them, and where they may be kept."""
    name, model, cache = config.features, config.chosen_model, config.feature_cache
    if config.weights is not None and name != PRIOR and (name is not None or model != "wrn"):
        raise ConfigError(
            f"weights {str(config.weights)!r} are for the features {PRIOR} and for the model wrn: "
            "leave them out."
        )
    if name is None:
        if config.recipe == "probe" or cache is not None:
            raise ConfigError(
                f"{'recipe probe' if cache is None else 'feature_cache'} is for frozen features: "
                "name them with features, for example scatter or MODULE:factory."
            )
        return
    if name not in FEATURES and not re.fullmatch(r"[\w.]+:\w+", name):
        raise ConfigError(
            f"features {name!r} are unknown: choose {', '.join(FEATURES)}, or name a "
            "MODULE:factory of your own."
        )
    if model not in _HEADS:
        raise ConfigError(
            f"model {model!r} does not learn on features: choose one of {', '.join(_HEADS)}."
        )
    run = Path("runs") if config.out is None else config.out
    if cache is not None and cache.resolve().is_relative_to(run.resolve()):
        raise ConfigError(
            f"feature_cache {str(cache)!r} is inside {str(run)!r}, which is made to be published: "
            "features are as private as the records, so give a folder elsewhere."
        )


def check_least_squares(config: Any) -> None:
    """Least squares are one release of all records: what is for steps has no place."""
    if config.chosen_model != LEAST_SQUARES:
        if config.ridge is not None:
            raise ConfigError(f"ridge {config.ridge} is for the model least-squares: leave it out.")
        return
    right: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(
            ("epochs", "momentum", "averaging", "precision", "group_noise_multiplier"), ()
        ),
        **{"steps": (1,), "lr": (1.0,), "method": ("dp-sgd",), "clipping": ("flat",)},
    }
    for name, values in right.items():
        value = getattr(config, name)
        if value is not None and value not in values:
            raise ConfigError(
                f"{name} {value} is for training in steps, and least squares are one release of "
                "all records: leave it out."
            )
    if isinstance(config.clip, tuple):
        raise ConfigError(f"clip {config.clip} must be one number: the norm of a row.")
