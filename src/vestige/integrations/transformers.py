"""`PrivateTrainer`: the Trainer of Hugging Face transformers, with differential privacy.

A lot has per_device_train_batch_size * gradient_accumulation_steps records in expectation, and runs
through the model per_device_train_batch_size at a time. A step of the trainer is a release.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vestige.engine.attention import mask_as_usual
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.integrations import trained
from vestige.integrations.row_losses import logits_in, row_losses
from vestige.integrations.trained import PrivacyArguments
from vestige.plan import lots_per_epoch
from vestige.sampling.loader import PrivateLoader

try:
    from transformers import EarlyStoppingCallback, Trainer
    from transformers.trainer_utils import TrainOutput, get_last_checkpoint
except ImportError as error:
    raise ConfigError(
        "vestige.integrations.transformers needs transformers and accelerate, which are not "
        "installed: pip install 'vestige-dp[hf]'."
    ) from error

__all__ = ["PrivacyArguments", "PrivateTrainer"]

# What a trainer logs of its own accord and what follows lots, losses or raw gradients. Times do.
_LEFT_OUT = {"loss", "grad_norm", "train_loss", "total_flos", "num_input_tokens_seen"}
_LEFT_OUT |= {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
# Arguments that do not go with private training, and why.
_REFUSED = {
    "fp16": (False, "bf16=True needs no loss scaling: use that"),
    "torch_compile": (False, "operations of a compiled model cannot be followed"),
    "auto_find_batch_size": (False, "the batch size is a public setting of the run"),
    "use_liger_kernel": (False, "its fused loss couples the rows"),
    "train_sampling_strategy": ("random", "lots are Poisson samples"),
}


class PrivateTrainer(Trainer):
    """A `Trainer` whose model is trained by a `PrivacyEngine`, which is its attribute `engine`.

    Everything else is as in `Trainer`: evaluation, callbacks, checkpoints, PEFT. Beside each
    checkpoint lie the engine's state and the privacy statement, in the output folder the ledger;
    `train(resume_from_checkpoint=...)` goes on with them. `compute_loss_func` must return one loss
    per row; without it the losses of rows are made from the model's logits.

    Guarantee: that of `PrivacyEngine`, for the weights and for all that the trainer logs and saves:
    training loss, gradient norm, times and counts of tokens are left out. Figures of the evaluation
    data are exact, and their records are not covered.
    """

    def __init__(self, *args: Any, privacy: PrivacyArguments, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        self._resumed: str | None = None
        given: Any = self.args
        _check(given)
        rows, accumulated = given.per_device_train_batch_size, given.gradient_accumulation_steps
        self._lot, self._physical = rows * accumulated, rows if accumulated > 1 else None
        self.args: Any = copy.copy(given)
        self.args.ignore_data_skip = True  # the engine knows which lot is next
        self.args.include_num_input_tokens_seen = "no"
        self.model_accepts_loss_kwargs = False  # no num_items_in_batch

    # -- before the first lot ---------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the beginning or from a checkpoint. The loss in what it returns is NaN."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ConfigError(
                    f"there is no checkpoint in {self.args.output_dir!r} to go on from: call "
                    "train() without resume_from_checkpoint."
                )
        self._resumed = resume_from_checkpoint or None
        try:
            out = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self.engine is not None:
                self.engine.abandon_lot()  # one that was left open is charged
                self.engine.close()
            # All loops of a process share it: one that was left in a lot would never step again.
            self.accelerator.gradient_state.sync_gradients = True
            mask_as_usual(self.model)
        loss = out.training_loss if self.privacy.train_loss else math.nan
        return TrainOutput(out.global_step, loss, self._public(out.metrics))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The private loader: the run begins here, with a new engine on the same ledger."""
        if self.train_dataset is None:
            raise ConfigError("PrivateTrainer has no train_dataset: there is nothing to train on.")
        self.create_optimizer()
        size = self.privacy.dataset_size or len(self.train_dataset)
        lots = lots_per_epoch(size, self._lot)
        steps = self.args.max_steps if self.args.max_steps > 0 else None
        self.engine, loader = trained.make_private(
            self.privacy,
            Path(self.args.output_dir),
            trained.saved_beside(self._resumed) if self._resumed else None,
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self._source(),
            max_physical_batch_size=self._physical,
            steps=steps or math.ceil(self.args.num_train_epochs * lots),
        )
        for what in self._choices():
            self.engine.add_caveat(trained.CHOSEN.format(what=what))
        self.args.gradient_accumulation_steps = loader.batches_per_lot
        if self._physical and len(loader) % loader.batches_per_lot:
            raise ConfigError(
                f"method {self.engine.plan.method!r} hands out all records beside its lots, which "
                "gradient_accumulation_steps does not go with: set it to 1."
            )
        return loader

    def _source(self) -> DataLoader[Any]:
        """The data in the form that `Trainer` would read them in."""
        data, collate = self.train_dataset, self.data_collator
        if hasattr(data, "column_names"):  # of the package datasets
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            data,
            batch_size=self._lot,
            shuffle=True,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _choices(self) -> Iterator[str]:
        """What lets the evaluation choose among the weights."""
        if self.args.load_best_model_at_end or self.args.save_strategy == "best":
            yield "the best checkpoint is kept"
        if any(isinstance(c, EarlyStoppingCallback) for c in self.callback_handler.callbacks):
            yield "training stops early"
        if self.args.lr_scheduler_type == "reduce_lr_on_plateau":
            yield "the learning rate follows the evaluation"

    def num_examples(self, dataloader: Any) -> int:
        """The number of records of a loader; of the private one, the public number."""
        if self.engine is not None and isinstance(dataloader, PrivateLoader):
            return self.engine.plan.dataset_size
        return int(super().num_examples(dataloader))

    # -- a lot ------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, None]:
        """The batches of a lot, one at a time: each must be stepped on before the next is read."""
        return _Batches(epoch_iterator, num_batches), None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of one physical batch; returns 0, or its loss if that is wanted."""
        assert self.engine is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            losses = self._row_losses(model, inputs)
        self.engine.backward(losses)
        if not self.accelerator.sync_gradients:
            self.optimizer.optimizer.step()  # moves nothing: the lot is not complete
        mean = losses.detach().mean()
        return mean if self.privacy.train_loss else torch.zeros_like(mean)

    def _row_losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per row, from `compute_loss_func` or from the logits."""
        base = _base(self.accelerator.unwrap_model(model))
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        # A decoder is fed with the labels; the loss that the model makes of them is not used.
        decodes = getattr(base.config, "is_encoder_decoder", False)
        outputs = model(**(inputs if decodes else rest))
        labels = inputs.get("labels")
        if self.compute_loss_func is not None:
            made: Tensor = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
            return made
        if labels is None:
            raise ConfigError(
                f"the training data have no 'labels' but {', '.join(inputs)}: name the column "
                "labels, or give compute_loss_func."
            )
        smoothing = self.args.label_smoothing_factor
        return row_losses(getattr(base, "loss_type", None), logits_in(outputs), labels, smoothing)

    def _run_epoch(self, **given: Any) -> None:
        """An epoch; one that a checkpoint was made in the middle of has its rest only."""
        done = self.state.global_step - given["epoch"] * given["num_update_steps_per_epoch"]
        if done > 0:
            given["epoch"] += done / given["num_update_steps_per_epoch"]
            given["num_update_steps_per_epoch"] -= done
        super()._run_epoch(**given)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After every step: nothing is logged or saved of a model that is trained in part."""
        if self.engine is not None and self.engine.released == 1:
            trained.check_reached(self.engine)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # -- what is logged and saved -----------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Records are clipped one by one: there is nothing to clip."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Not known before the release, and not logged."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Would follow the sizes of lots: not counted."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is public, and epsilon beside it."""
        shown = self._public(logs)
        if self.engine is not None and self.is_in_train:
            shown["epsilon"] = trained.epsilon(self.engine, self.privacy)
        super().log(shown, *args, **kwargs)

    def _public(self, logs: Mapping[str, float]) -> dict[str, float]:
        kept = {name: value for name, value in logs.items() if name not in _LEFT_OUT}
        wanted = ("loss", "train_loss") if self.privacy.train_loss else ()
        return kept | {name + trained.MARK: logs[name] for name in wanted if name in logs}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self.engine is not None
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        trained.save_beside(self.engine, self.privacy, folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.engine is not None:
            self.engine.load_state_dict(trained.saved_beside(checkpoint))


def _base(model: Any) -> Any:
    """The model itself, inside of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Batches:
    """So many batches of an iterator, read when they are asked for."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self._count), self._batches, strict=False):
            yield batch


def _check(args: Any) -> None:
    """Refuse arguments that private training does not go with."""
    trained.refuse("PrivateTrainer", args, _REFUSED)
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        raise ConfigError(
            f"PrivateTrainer runs in one process on one device, not on {args.world_size} x "
            f"{max(1, args.n_gpu)}: set CUDA_VISIBLE_DEVICES to one of them, and start it without "
            "torchrun, deepspeed or fsdp; for several, write the loop yourself (docs/scaling.md)."
        )
