"""`PrivacyCallback`: Lightning's Trainer, with differential privacy.

The batch size of the training loader becomes the expected lot. A step of the trainer is a physical
batch; the weights move, and schedulers advance, once per lot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.integrations import trained
from vestige.integrations.trained import PrivacyArguments
from vestige.plan import lots_per_epoch
from vestige.sampling.loader import batches_of_a_lot, check_loader

try:
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
except ImportError as error:
    raise ConfigError(
        "vestige.integrations.lightning needs lightning, which is not installed: "
        "pip install 'vestige-dp[lightning]'."
    ) from error

__all__ = ["PrivacyArguments", "PrivacyCallback"]
_LOGGED = (
    "training_step logs {names}, which follow the records of single lots: they are outside the "
    "guarantee, do not publish them"
)
# Settings of the trainer that do not go with private training, and what to do instead.
_REFUSED = {
    "accumulate_grad_batches": (1, "use PrivacyCallback(max_physical_batch_size=...)"),
    "gradient_clip_val": (None, "records are clipped one by one, by max_grad_norm"),
    "limit_train_batches": (1.0, "an epoch could end in the middle of a lot; use max_steps"),
    "overfit_batches": (0.0, "lots are Poisson samples of all records"),
    "world_size": (
        1,
        "Lightning's strategies for several processes wrap the model: Trainer(devices=1), or a "
        "loop of your own under torchrun (docs/scaling.md)",
    ),
    "reload_dataloaders_every_n_epochs": (0, "the private loader goes on by itself"),
}


class PrivacyCallback(Callback):
    """Makes `trainer.fit` train by a `PrivacyEngine`, which is the attribute `engine` meanwhile.

    `training_step` returns the mean of the rows' losses, and calls the module itself, `self(x)`, or
    the one child that has parameters. `max_physical_batch_size` is the most rows at a time.
    Checkpoints hold the engine's state and the statement, under "privacy_statement"; the ledger is
    a file in `default_root_dir`; `trainer.fit(ckpt_path=...)` goes on with them.

    Guarantee: that of `PrivacyEngine`, for the weights and for what Lightning logs of its own
    accord, epsilon among it. What `training_step` logs is outside of it, and a caveat says so.
    """

    def __init__(
        self, privacy: PrivacyArguments, max_physical_batch_size: int | None = None
    ) -> None:
        self.privacy, self._physical = privacy, max_physical_batch_size
        self.engine: PrivacyEngine | None = None
        self._saved: dict[str, Any] | None = None
        self._source: Any = None  # the user's own loader, or what has it

    # -- a run begins and ends --------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put an engine on the model, and its lots in place of the training data."""
        _check(trainer)
        place = trainer.fit_loop._data_source
        source, self._source = place.dataloader(), place.instance
        lot = check_loader(source)
        size = self.privacy.dataset_size or len(source.dataset)
        steps = (trainer.max_epochs or 0) * lots_per_epoch(size, lot)
        if trainer.max_steps > 0:
            most = -(-trainer.max_steps // batches_of_a_lot(lot, self._physical))
            steps = min(steps, most) if steps > 0 else most
        self.engine, place.instance = trained.make_private(
            self.privacy,
            Path(trainer.default_root_dir),
            self._saved,
            module=_trained_module(pl_module),
            optimizer=trainer.optimizers[0],
            data_loader=source,
            max_physical_batch_size=self._physical,
            steps=steps if steps > 0 else None,
        )
        if self._saved is not None:
            self.engine.load_state_dict(self._saved)
            self._saved = None
        for what in _choices(trainer):
            self.engine.add_caveat(trained.CHOSEN.format(what=what))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A lot that was left open is charged."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the ledger, and give the trainer its own loader back."""
        if self.engine is not None and self._source is not None:
            self.engine.abandon_lot()
            self.engine.close()
            trainer.fit_loop._data_source.instance, self._source = self._source, None

    # -- on the way -------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Stop if a parameter has no part in the first release; say what is logged."""
        assert self.engine is not None
        if self.engine.released == 1 and not self.engine.in_lot:
            trained.check_reached(self.engine)
        logged = [key.partition(".") for key in trainer._results or ()]
        names = sorted({name for step, _, name in logged if step == "training_step"})
        if names:
            self.engine.add_caveat(_LOGGED.format(names=", ".join(names)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log epsilon."""
        assert self.engine is not None
        pl_module.log("epsilon", trained.epsilon(self.engine, self.privacy))

    # -- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The engine's state, which is public."""
        return {} if self.engine is None else trained.state_of(self.engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Remember the state to go on from."""
        self._saved = dict(state_dict) or None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the statement into the checkpoint."""
        if self.engine is not None:
            checkpoint["privacy_statement"] = self.engine.statement(self.privacy.delta)


def _check(trainer: Any) -> None:
    trained.refuse("PrivacyCallback", trainer, _REFUSED)
    if len(trainer.optimizers) != 1 or trainer.precision == "16-mixed":
        raise ConfigError(
            f"PrivacyCallback takes one optimizer and no loss scaling: this trainer has "
            f"{len(trainer.optimizers)}, and precision={trainer.precision!r} (use 'bf16-mixed')."
        )


def _trained_module(module: nn.Module) -> nn.Module:
    """What `training_step` calls: the one child that has parameters, or the module itself."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    return children[0] if len(children) == 1 and not own else module


def _choices(trainer: Any) -> Iterator[str]:
    """What lets figures choose among the weights."""
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping):
            yield "training stops early"
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            yield "the best checkpoint is kept"
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        yield "the learning rate follows a plateau"
