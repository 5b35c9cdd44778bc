"""What every trainer needs: the run that it was asked for, files beside checkpoints, refusals."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vestige import statement
from vestige.checks import plain, round_up
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError, PrivacyError
from vestige.files import write_whole
from vestige.methods import Method
from vestige.sampling.loader import PrivateLoader

STATE_FILE, LEDGER_FILE = "privacy.pt", "ledger.jsonl"
MARK = "_outside_guarantee"
CHOSEN = (
    "{what}: evaluation figures have a say in which weights are kept, and epsilon does not cover "
    "the records that those figures come from"
)
TRAIN_LOSS = "the training loss is logged outside the guarantee: do not publish it"


@dataclass(frozen=True)
class PrivacyArguments:
    """What a trainer needs to know beside its own arguments.

    Give `target_epsilon`, for the whole run and everything on the ledger before it, or
    `noise_multiplier`. `max_grad_norm` is the clip bound of one record, not the trainer's argument
    of that name, which does nothing here. `ledger` is a file, ledger.jsonl in the trainer's folder
    unless another is named. `train_loss=True` logs the training loss under a name that says that it
    is outside the guarantee. `options` are further arguments of `PrivacyEngine.make_private`.

    Guarantee: that of `PrivacyEngine`, for the model and for all that the trainer logs and saves,
    but for what is marked as outside of it.
    """

    max_grad_norm: float
    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    method: str | Method = "dp-sgd"
    dataset_size: int | None = None
    accountant: str = "pld"
    ledger: str | Path | None = None
    train_loss: bool = False
    noise_seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError(
                f"target_epsilon={self.target_epsilon} and noise_multiplier="
                f"{self.noise_multiplier}: give exactly one of them to PrivacyArguments."
            )


def make_private(
    privacy: PrivacyArguments, folder: Path, saved: Mapping[str, Any] | None = None, **given: Any
) -> tuple[PrivacyEngine, PrivateLoader]:
    """An engine on a trainer's model, and its loader; `saved` is the state to go on from.

    `given` are the arguments of `PrivacyEngine.make_private` that the trainer knows.
    """
    ledger = folder / LEDGER_FILE if privacy.ledger is None else Path(privacy.ledger)
    ledger.parent.mkdir(parents=True, exist_ok=True)
    engine = PrivacyEngine(privacy.accountant, noise_seed=privacy.noise_seed, ledger=ledger)
    own = ("max_grad_norm", "method", "dataset_size")
    given |= {name: getattr(privacy, name) for name in own} | dict(privacy.options)
    noise = privacy.noise_multiplier
    if saved is not None:
        noise = plain(saved["plan"]["noise_multiplier"])  # as it was solved for when the run began
    if noise is None:
        given |= {"target_epsilon": privacy.target_epsilon, "target_delta": privacy.delta}
        _, _, loader = engine.make_private_with_epsilon(**given)
    else:
        _, _, loader = engine.make_private(noise_multiplier=noise, **given)
    if privacy.train_loss:
        engine.add_caveat(TRAIN_LOSS)
    return engine, loader


def state_of(engine: PrivacyEngine) -> dict[str, Any]:
    """The engine's state, which is public, between two lots."""
    if engine.in_lot:
        raise PrivacyError(
            "a checkpoint in the middle of a lot could not be gone on from: save once an epoch, or "
            "after a number of steps that is a multiple of loader.batches_per_lot."
        )
    return engine.state_dict()


def save_beside(engine: PrivacyEngine, privacy: PrivacyArguments, folder: Path) -> None:
    """Write the engine's state and the statement into the folder of a checkpoint.

    Guarantee: all of it is public.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state_of(engine), content)
    write_whole(folder / STATE_FILE, content.getvalue())
    stated = engine.statement(privacy.delta)
    write_whole(folder / statement.JSON_FILE, json.dumps(stated, indent=2, allow_nan=False))
    write_whole(folder / statement.MARKDOWN_FILE, statement.markdown(stated))


def saved_beside(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The engine's state in the folder of a checkpoint."""
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        raise ConfigError(
            f"the checkpoint {str(folder)!r} has no {STATE_FILE}: it was not written by a private "
            "trainer, and what its run has spent is unknown. Go on from one that has it."
        )
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def refuse(who: str, settings: Any, refused: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse settings of a trainer that differ from what is allowed; a remedy is told with each."""
    for name, (allowed, remedy) in refused.items():
        value = getattr(settings, name, allowed)
        if value != allowed:
            raise ConfigError(f"{who} does not take {name}={value!r}: {remedy}.")


def check_reached(engine: PrivacyEngine) -> None:
    """After the first release: every trainable parameter has had a part in it."""
    untrained = engine.untrained()
    if untrained:
        more = f" and {len(untrained) - 1} more" if len(untrained) > 1 else ""
        raise PrivacyError(
            f"parameter {untrained[0]!r}{more} had no part in the first release: the loss does not "
            "depend on it, so that it would be trained by noise alone. Freeze it "
            "(requires_grad_(False)), or mend the model."
        )


def epsilon(engine: PrivacyEngine, privacy: PrivacyArguments) -> float:
    """What the run has spent, rounded up, for a log."""
    return float(round_up(engine.get_epsilon(privacy.delta), 4))
