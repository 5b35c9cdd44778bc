"""The training behind the command line, usable as functions: `train` and `resume`.

`train` runs a `TrainConfig` and leaves a folder with the weights, the result and the statement;
`resume` continues a run that was killed or interrupted; run_folder.py writes. Torch is imported
inside the functions, so that a wrong option is answered at once.

Guarantee: that of run_folder.py; and what a resumed run had spent before stays charged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige import methods
from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.privacy.ledger import Event
from vestige.train import ranks
from vestige.train.checks import LEAST_SQUARES, PRIOR, check_lot, check_restarts, is_taken_up
from vestige.train.config import DEFAULT_NOISE, TrainConfig
from vestige.train.loop import HELD_OUT, Prepared, Progress, Session, versions
from vestige.train.run_folder import CHECKPOINT, ExistingFolder, RunWriter, run_ledger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vestige.train.data import Dataset

__all__ = ["HELD_OUT", "Progress", "Session", "prepare", "resume", "train", "versions"]

Optimizers = Callable[..., "torch.optim.Optimizer"]
Tell = Callable[[Progress], None]


def train(
    config: TrainConfig, *, optimizer: Optimizers | None = None, progress: Tell | None = None
) -> dict[str, Any]:
    """Train as `config` says, write the run folder, and return what result.json holds.

    `optimizer` is called with the parameters and lr=...: any class of torch.optim, SGD by default.
    On the main thread the first Ctrl-C ends the run after the lot at hand, with everything written
    and "interrupted": true; a second one is a KeyboardInterrupt. Either can be resumed.

    Processes that torchrun has started again after a fault (--max-restarts) go on with the run.

    Guarantee: the result's epsilon is the engine's, for the releases that were really made; with a
    target `epsilon` it never exceeds the target, with a `max_epsilon` never that.
    """
    check_restarts(config.out)
    if is_taken_up(config.out):
        return _go_on(config, optimizer, progress)
    tell = progress or (lambda _: None)
    with ranks.joined(config.device) as device, ranks.written(config) as own:
        session = prepare(own.changed(device=device), optimizer=optimizer, progress=progress)
        return RunWriter(session).run(tell)


def _go_on(
    config: TrainConfig, optimizer: Optimizers | None, progress: Tell | None
) -> dict[str, Any]:
    """Take up the run that processes before these, with the same settings, have left."""
    from vestige.engine import checkpoint

    folder = Path(config.out or "")
    saved, ours = checkpoint.read(folder / CHECKPOINT)[0]["others"].get("config"), config.saved()
    if not isinstance(saved, dict) or {**saved, "device": config.device} != ours:
        raise ConfigError(
            f"out {str(folder)!r} is in use by a run with other settings: give a new or empty one."
        )
    own = config.chosen_model if ":" in config.chosen_model else None
    return resume(
        folder,
        optimizer=optimizer,
        progress=progress,
        noise_seed=config.noise_seed,
        ledger=config.ledger,
        model=own,
    )


def resume(
    folder: Path | str,
    *,
    optimizer: Optimizers | None = None,
    progress: Tell | None = None,
    noise_seed: int | None = None,
    ledger: Path | str | None = None,
    model: str | None = None,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Continue the run in `folder` from its last checkpoint; a finished run's result is returned.

    In test mode the steps after the checkpoint are made again, with the same lots and noise, and
    compared with what was released; `noise_seed` is needed only where the secrets beside the
    checkpoint are gone. Otherwise lots and noise have a new key, and lost steps stay charged.
    `ledger` is the file that the run shares with others: a run folder is not believed when it names
    files outside of itself, nor when it names code: `model` is the MODULE:factory of a model of
    one's own. `dataset` takes the place of the one that the run names, as in `prepare`.

    Guarantee: everything that was released before and is released now is in the ledger.
    """
    folder = Path(folder)
    finished = _finished(folder)
    from vestige.engine import checkpoint

    if finished is not None:
        checkpoint.remove(folder / CHECKPOINT)  # a crash may have left it
        return finished
    saved, noise_seed = _saved(folder / CHECKPOINT, noise_seed)
    config, known = _restored(saved, noise_seed)
    if config.code is not None and model != config.code:
        raise ConfigError(
            f"the model of the run in {str(folder)!r} is made by {config.code!r}: if that is "
            f"yours, name it with --model {config.code} (in Python, model=...)."
        )
    path = run_ledger(folder, config.ledger, ledger)
    if ledger is not None:
        config = config.changed(ledger=path)
    with ranks.joined(config.device) as device, ranks.written(config) as own:
        session = prepare(
            own.changed(device=device),
            optimizer=optimizer,
            progress=progress,
            dataset=dataset,
            known=known,
        )
        writer = RunWriter(session, ExistingFolder(folder) if ranks.leads() else None)
        writer.restore(path, folder / CHECKPOINT)
        return writer.run(progress or (lambda _: None))


def _saved(path: Path, noise_seed: int | None) -> tuple[dict[str, Any], int | None]:
    """What a loop of this module has saved in a checkpoint, and the seed of a run in test mode."""
    from vestige.engine import checkpoint

    state, secret = checkpoint.read(path)
    saved = state["others"]
    if not isinstance(saved.get("config"), dict) or not isinstance(saved.get("prepared"), dict):
        raise ConfigError(
            f"{str(path)!r} was saved by a loop of its own and not by vestige "
            "train: go on there, with engine.load_checkpoint."
        )
    repeatable = bool(state["engine"].get("repeatable_noise"))
    if noise_seed is not None and not repeatable:
        raise ConfigError(
            f"noise_seed={noise_seed} for a run that is not in test mode: leave it out."
        )
    if secret and secret["noise_seed"] is not None:
        noise_seed = secret["noise_seed"]
    if repeatable and noise_seed is None:
        raise ConfigError(
            f"the run in {str(path.parent)!r} is in test mode, and {path.name}.*.secret with its "
            "noise seed is gone: give the noise_seed that it was started with."
        )
    return saved, noise_seed


def prepare(
    config: TrainConfig,
    *,
    optimizer: Optimizers | None = None,
    progress: Tell | None = None,
    dataset: Dataset | None = None,
    known: Prepared | None = None,
) -> Session:
    """`train` up to its first lot: `Session.run` trains, and `RunWriter` writes too.

    `dataset` takes the place of the one that `config` names, for callers that have it at hand;
    `known` is what an earlier call has solved for.
    """
    tell = progress or (lambda _: None)
    tell(Progress(f"loading {Path(config.dataset).name}"))

    from vestige.gradients.clipping import split_clipping
    from vestige.gradients.groups import partition
    from vestige.train.recipes.features import with_features

    device = device_of(config.device)
    if dataset is None:
        dataset = load_data(config, config.seed)
    records = config.dataset_size or dataset.protected
    config = _whole(config, records)
    check_lot(config.chosen_lot, records)
    model = model_of(config, dataset, device)
    method = methods.resolve(config.method, config.settings)
    if known is None:
        # Found here rather than in the engine, before seconds go into the calibration.
        parts, _ = split_clipping(config.chosen_clipping)
        groups = partition(model, parts).names
        _check_bounds(config.clip, groups)
        tell(Progress("accounting"))
        if config.evaluate_epsilon is not None:  # refused now rather than after the training
            accounting.calibrate(config.evaluate_epsilon, config.delta, 1.0, 1)
        known = _accounted(config, records, groups)
    _declare(config, model, dataset, known, records)
    dataset = with_features(
        dataset,
        model,
        device,
        lambda done: tell(Progress("features", int(100 * done), 100)),
        config.feature_cache and config.feature_cache / f"{Path(config.dataset).stem}.features",
    )
    made = optimizer or method.make_optimizer
    if config.momentum:
        made = partial(made, momentum=config.momentum)
    return Session(config, dataset, model, made, device, known)


def _whole(config: TrainConfig, records: int) -> TrainConfig:
    """Least squares are one release of all records."""
    if config.chosen_model != LEAST_SQUARES:
        return config
    if config.lot not in (None, records):
        raise ConfigError(
            f"lot {config.lot} is for training in steps, and least squares are one release of all "
            f"{records} records: leave it out."
        )
    return config.changed(lot=records, steps=1, lr=1.0)


def model_of(config: TrainConfig, dataset: Dataset, device: str) -> nn.Module:
    """The fresh model of a run, whose features were shown to be row-wise."""
    from vestige.train import models
    from vestige.train.recipes.features import check_rows
    from vestige.train.recipes.prior import begin_from, pretrained

    name, shape = config.chosen_model, dataset.input_shape
    if config.features is None:
        built = models.build(name, shape, dataset.classes, config.seed)
        if config.weights is not None:
            begin_from(built, pretrained(config.weights, None))
        return built.to(device)
    on = models.on_features(config.features, name, shape, dataset.classes, config.seed).to(device)
    if config.features == PRIOR:
        weights = pretrained(config.weights, config.data_dir)
        on.get_submodule("features.0").load_state_dict(weights)
    if config.code is not None:
        check_rows(on, config.code, shape)
    return on


def _declare(
    config: TrainConfig, model: nn.Module, dataset: Dataset, known: Prepared, records: int
) -> None:
    """Tell least squares the public numbers that they go by."""
    from vestige.train.recipes.least_squares import declare

    if config.chosen_model == LEAST_SQUARES:
        declare(model, dataset, config.clip, config.ridge, known.noise / records)


def load_data(config: TrainConfig, seed: int) -> Dataset:
    """The data of a run; `seed` fixes the split of digits, which has no official one."""
    from vestige.train import data, own_data

    path, sizes = Path(config.dataset), (config.train_size, config.test_size)
    schema = config.schema_of_data()
    if schema is not None:
        return own_data.load_own(path, schema, *sizes, config.units)
    return data.load(
        config.dataset, config.data_dir, *sizes, seed, task=config.task or "classification"
    )


def _accounted(config: TrainConfig, records: int, groups: tuple[str, ...]) -> Prepared:
    """The noise of a run and the epsilon at its end, with what else is on its ledger."""
    method, steps = methods.resolve(config.method, config.settings), config.planned_steps(records)
    noise = DEFAULT_NOISE if config.noise_multiplier is None else config.noise_multiplier
    if config.group_noise_multiplier is not None:
        noise = config.group_noise_multiplier / math.sqrt(len(groups))
    planned, earlier = math.inf, _earlier(config)
    if method.private or config.epsilon is not None:
        lot, rate = config.chosen_lot, config.chosen_lot / records
        charges = methods.planned_charges(
            method, config.chosen_clipping, len(groups), records, lot, rate, steps
        )
        if config.epsilon is not None:
            noise, _ = accounting.noise_for(
                config.epsilon, config.delta, charges, config.accountant, earlier
            )
        events = [*earlier, *accounting.events_of(charges, noise)]
        planned = accounting.epsilon(events, config.delta, config.accountant)
    return Prepared(steps, noise, planned, groups, sum(event.count for event in earlier))


def _earlier(config: TrainConfig) -> Sequence[Event]:
    """What other runs have spent on the ledger that the run shares with them."""
    if config.ledger is None or not config.ledger.exists():
        return ()
    return ledger_file.read(config.ledger).events


def _restored(saved: dict[str, Any], noise_seed: int | None) -> tuple[TrainConfig, Prepared]:
    """The settings of a saved run and what was solved for."""
    try:
        prepared = Prepared(**saved["prepared"] | {"groups": tuple(saved["prepared"]["groups"])})
        return TrainConfig.restored(saved["config"], noise_seed), prepared
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the checkpoint's settings cannot be read ({error}): it was made by another version."
        ) from error


def _finished(folder: Path) -> dict[str, Any] | None:
    """The result of a run that is over; None where there is something to continue."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder: give the folder of a run.")
    if not (folder / "result.json").exists():
        if not (folder / CHECKPOINT).exists():
            raise ConfigError(
                f"{str(folder)!r} has neither {CHECKPOINT} nor result.json: it is not the folder "
                "of a run."
            )
        return None
    try:
        result = json.loads((folder / "result.json").read_bytes())
        assert isinstance(result, dict)
        return None if result["interrupted"] else result
    except (OSError, ValueError, KeyError, AssertionError, RecursionError) as error:
        raise ConfigError(
            f"{str(folder / 'result.json')!r} is damaged ({type(error).__name__}): remove it to "
            "resume from the checkpoint."
        ) from error


def _check_bounds(clip: float | tuple[float, ...], groups: tuple[str, ...]) -> None:
    if isinstance(clip, tuple) and len(clip) != len(groups):
        raise ConfigError(
            f"clip has {len(clip)} numbers for {len(groups)} clipping groups: give one number, or "
            f"one for each of {', '.join(groups)}."
        )


def device_of(name: str) -> str:
    """The torch device for a name that `TrainConfig` has accepted."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if found else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= found:
        raise ConfigError(
            f"device {name!r} is not there: torch finds {found} CUDA devices; use auto or cpu."
        )
    return name
