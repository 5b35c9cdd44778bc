"""One model in training: follows every lot from the loader through the step to the release.

The order of events is checked at every turn: a drawn lot must be released, a release needs a fresh
backward, and the trainable set must be the one that the noise was planned for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from vestige.engine.forecast import coming_events
from vestige.engine.guard import BudgetGuard
from vestige.engine.importance import Importance
from vestige.engine.schedulers import gate_schedulers
from vestige.engine.validation import check_optimizer
from vestige.errors import PrivacyError
from vestige.geometry import Geometry
from vestige.gradients import Capture
from vestige.gradients.capture import exact
from vestige.gradients.loss_watch import LossWatch
from vestige.gradients.self_check import self_check
from vestige.memory.recollection import Recollection
from vestige.plan import PrivacyPlan, Table, at
from vestige.release.door import ClippedSum, Door, Release
from vestige.sampling.loader import Batch, LotSampler
from vestige.sampling.streams import Randomness
from vestige.updates.adam import AdamBC
from vestige.updates.ascent import Ascent
from vestige.updates.averaging import Averaging
from vestige.updates.clip_control import ClipControl, QuantileControl, RawPercentile
from vestige.updates.estimated import EstimatedMemory
from vestige.updates.filters import Filter
from vestige.updates.passes import Passes
from vestige.updates.rate_control import RateControl


@dataclass
class Parts:
    """What a method adds to the plain step: each is None where it adds nothing.

    `filter_share` is beta where the memory filters releases instead of entering the query;
    `alternates` says that every other lot only gives the direction of an ascent.
    """

    memory: Recollection | EstimatedMemory | None = None
    filter_share: Table | None = None
    denoiser: Filter | None = None
    ascent: Ascent | None = None
    alternates: bool = False
    averaging: Averaging | None = None
    geometry: Geometry | None = None
    importance: Importance | None = None
    clip: ClipControl | None = None
    rate: RateControl | None = None

    def saved(self) -> dict[str, Any]:
        """The parts that have a state, by the name that it is saved under."""
        return {
            "filter": self.denoiser,
            "ascent": self.ascent,
            "averaging": self.averaging,
            "geometry": self.geometry,
            "importance": self.importance,
            "clip": self.clip,
            "rate": self.rate,
        }


class Run:
    """One model in training: follows every lot from the loader to the release."""

    def __init__(
        self,
        plan: PrivacyPlan,
        optimizer: Optimizer,
        watch: Capture,
        lots: LotSampler,
        door: Door,
        randomness: Randomness,
        check: bool,
        seed: int,
        parts: Parts,
        make_passes: Callable[[Capture, Callable[[], Release], Any], Passes | None],
    ) -> None:
        self.plan, self.optimizer, self.capture = plan, optimizer, watch
        self.lots, self.door = lots, door
        self.repeatable = randomness.repeatable
        self.groups = watch.groups
        self.parts, self.memory, self.ascent = parts, parts.memory, parts.ascent
        watch.mean_loss = plan.loss_reduction == "mean"
        self.losses = LossWatch(watch)
        self.passes = make_passes(watch, self._first_look, parts.ascent)
        self._seed = seed
        self._just_released = True
        self._detached = False
        self._lot_open = False
        self._current_lot = 0
        self.coming_lot = 0  # the lot at hand, or the next one
        self.guard: BudgetGuard | None = None
        self.begun = False  # whether a lot was handed out
        self.gave_up = False  # whether one was abandoned
        self.gap = False  # whether it was once taken up from a state without a ledger file
        self._depth = 0  # how many calls of optimizer.step() are under way, one inside the other
        self._gated_from: int | None = None
        self._looked_from: int | None = None
        self._gradient = watch.groups.buffer()
        self._device = self._gradient.device.type
        self._held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._views = [(s.parameter, s.view(self._gradient)) for s in self.groups.slots]
        self._checked: set[Any] = set()
        self.unchecked: str | None = None  # why the self-check said nothing
        if check:
            watch.before_forward = self._check_way
        else:
            self.unchecked = "self_check=False switched it off"

    def attach(self) -> None:
        """Hook into the model and the optimizer."""
        self.capture.attach()
        self._hooks = (
            *self.losses.attach(),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )
        for parameter in self.capture.module.parameters():
            parameter.grad = None  # an old, unprotected gradient must not be applied

    def detach(self) -> None:
        """Take the hooks off."""
        leaves, self._detached = not self._detached, True
        self.losses.stop()
        self.capture.detach()
        if self.parts.rate:
            self.parts.rate.restore(self.optimizer)
        if self.ascent:
            self.ascent.return_home()
        for hook in self._hooks:
            hook.remove()
        if leaves:
            self._leave_ledger()  # last: a ledger file that is gone raises

    @property
    def detached(self) -> bool:
        """Whether the hooks were taken off."""
        return self._detached

    def _leave_ledger(self) -> None:
        """The last engine that leaves a ledger lets its file go."""
        ledger = self.door.ledger
        ledger.pending.pop(self.door.run, None)
        ledger.engines -= 1
        if ledger.file and not ledger.engines:
            ledger.file.close()
        elif ledger.file and self.door.account:
            ledger.file.leave(self.door.account)

    def _check_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the model's rows once for every way in which gradients are taken: the training
        flags of its modules, and what it is given but for lengths."""
        modules = self.capture.module.modules()
        way = (tuple(m.training for m in modules), _signature((args, kwargs)))
        if way in self._checked:
            return
        check, self.capture.before_forward = self.capture.before_forward, None
        try:
            why = self_check(self.capture, args, kwargs, self._seed)
        finally:
            self.capture.before_forward = check
        if why is not None:
            self.unchecked = why
            warnings.warn(
                f"the self-check was skipped because {why}. That the examples do not mix is shown "
                "by following their rows through the model's operations only.",
                UserWarning,
                stacklevel=2,
            )
        self._checked.add(way)  # not if it was refused: a model that was refused stays refused

    def hand_out(self, batch: Batch) -> None:
        """The loader gives `batch` to the loop."""
        if self._detached:
            raise PrivacyError(
                "the engine was detached, or a new one has taken its place: its loader does not go "
                "on feeding an ordinary loop. Use the original DataLoader, or make_private of "
                "PrivacyEngine(ledger=engine.ledger)."
            )
        if self.parts.rate:
            self.parts.rate.restore(self.optimizer)  # of a step that failed
        if self.capture.batch is not None:
            raise PrivacyError(
                "the loader was asked for another batch before optimizer.step() was called for "
                "the last one: every drawn lot must be released. Step on every batch, look at "
                "loader.dataset instead of drawing a lot, or call engine.abandon_lot()."
            )
        if self._lot_open and self._current_lot != batch.lot:
            raise PrivacyError(
                "a lot was left before its last physical batch: every drawn lot must be released. "
                "Finish it, or call engine.abandon_lot()."
            )
        if not self._lot_open:
            if self._looked_from != self.lots.first_lot:  # once an epoch
                self.capture.tracker.check_buffers()
                self._looked_from = self.lots.first_lot
            self.coming_lot = batch.lot
            if self.guard:
                self.guard.check()  # before the loop sees the lot
            self.door.ledger.pending[self.door.run] = coming_events(self, 1)
            self._depth = 0  # of a step that failed
            self.begun = True
            if self.memory:
                # Done at the end of the last step, unless somebody has changed the weights since.
                # The loop has not seen the lot yet, and the memory never does.
                self._recall(self.memory)
            if self.ascent and not self.passes:
                self.ascent.climb()  # along releases only: the loop has not seen the lot
            collector = self.capture.collector
            collector.clear()
            if self.parts.clip:
                collector.clip = replace(collector.clip, bounds=self.parts.clip.bounds)
            if self.parts.importance:
                self.parts.importance.begin(batch.lot, batch.measures)
            self._lot_open, self._current_lot = True, batch.lot
        moves = batch.last and not batch.measures and not self.parts.alternates
        if not moves and self._gated_from != self.lots.first_lot:
            # Once an epoch: looking for schedulers takes longer than a step.
            gate_schedulers(self.optimizer, lambda: self._just_released)
            self._gated_from = self.lots.first_lot
        self.capture.start(batch)
        self.losses.start(batch)
        for observer in self.door.observers:
            observer.handed_out(batch, self.memory.branch if self.memory else None)

    def check_state(self) -> None:
        """Refuse to write down a model that holds values of private batches."""
        self.capture.tracker.check_buffers()
        self.capture.tracker.check_kept()

    @property
    def in_lot(self) -> bool:
        """Whether a lot was handed out that is not released yet."""
        return self._lot_open

    def abandon_lot(self) -> None:
        """Charge the open lot and forget it."""
        if self._lot_open:
            self.gave_up = True
            self.lots.given_up = self._current_lot
            if self.parts.importance and self.parts.importance.measuring:
                self.door.charge_measurement(self.parts.importance.norm_noise)
            else:
                self.door.charge(
                    self.plan.rate_of(self._current_lot),
                    self.plan.beta_of(self.door.steps),
                    self._current_lot,
                )
        self.capture.stop_watching()
        self.losses.stop()
        if self.ascent:
            self.ascent.return_home()
        if self.parts.rate:
            self.parts.rate.restore(self.optimizer)
        self.capture.collector.clear()
        self.capture.batch = None
        self._lot_open = False
        self.door.ledger.pending.pop(self.door.run, None)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Runs when the loop calls optimizer.step(): release, and set the gradients."""
        self._depth += 1
        if self._depth > 1:
            return args, kwargs  # a step that is called by the step of a subclass
        try:
            return self._begin_step(optimizer, args, kwargs)
        except BaseException:
            self._depth = 0
            raise

    def _begin_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.passes and closure is None:
            raise PrivacyError(
                f"method {self.plan.method!r} evaluates every batch twice: call "
                "optimizer.step(closure), where closure() runs the model on the batch, calls "
                "backward on the loss and returns it."
            )
        if closure is not None:
            with torch.enable_grad():
                # Backward must come before the release.
                loss = self.passes.run(closure) if self.passes else closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        batch = self.capture.batch
        if batch is None or not batch.done:
            raise PrivacyError(
                "optimizer.step() without a fresh backward: the loop must draw a batch from the "
                "private loader, call backward on its loss, and then step, once for every batch."
            )
        self.groups.check_unchanged(self.capture.module)
        if {id(p) for group in optimizer.param_groups for p in group["params"]} != self._held:
            check_optimizer(optimizer, self.capture.module)
        self._check_strangers(optimizer)
        self.losses.stop()
        self.capture.batch = None
        self._just_released = batch.last and not batch.measures
        if batch.last:
            self._lot_open = False
            if self.ascent:
                self.ascent.return_home()
        for parameter, _ in self._views:
            parameter.grad = None  # optimizers pass over parameters without a gradient
        if batch.measures and batch.last:
            assert self.parts.importance is not None
            self._measure(self.parts.importance)
        elif batch.last:
            self._use(self._release())
            if self.plan.steps is not None and self.door.steps == self.plan.steps + 1:
                warnings.warn(
                    f"the run goes beyond the {self.plan.steps} steps it was planned for: epsilon "
                    "grows past its target. get_epsilon() stays right.",
                    UserWarning,
                    stacklevel=4,
                )
        return args, kwargs

    def _measure(self, importance: Importance) -> None:
        """All records were seen: release the normaliser of the coming lots."""
        total, multiplier = importance.take_norms(), importance.norm_noise
        importance.settle(self.door.measure(total, 1.0, multiplier, self._current_lot))

    def _use(self, release: Release) -> None:
        """What follows from a release: the next direction, or the next step of the weights."""
        if self.parts.alternates and release.step % 2 == 0:
            assert self.ascent is not None
            self.ascent.learn(release)
            self._just_released = False  # for schedulers and averages: the weights do not move
        else:
            self._apply(release)
        if isinstance(self.parts.clip, RawPercentile):
            self.parts.clip.look(self.capture.collector.norms or ())
        if self.parts.clip:
            self.parts.clip.learn(release)
        if self.parts.rate:
            self.parts.rate.learn(self._clipped_fraction())

    def _clipped_fraction(self) -> float:
        """How many examples were clipped: noisy, except for the method that is not private."""
        control = self.parts.clip
        if isinstance(control, QuantileControl):
            return 1 - control.fractions[0]
        assert isinstance(control, RawPercentile)
        return control.clipped

    def _clipped_sum(self) -> ClippedSum:
        collector = self.capture.collector
        return ClippedSum(collector.total, collector.bounds, collector.counts)

    def _first_look(self) -> Release:
        """A noisy sum of the lot at hand, which will be released once more."""
        with exact(self._device):
            lot = self._current_lot
            return self.door.first_look(self._clipped_sum(), self.plan.rate_of(lot), lot)

    def _check_strangers(self, optimizer: Optimizer) -> None:
        """A parameter outside the plan may sit in the optimizer, but without a gradient."""
        planned = self.groups.ids
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in planned:
                    raise PrivacyError(
                        "a frozen parameter in the optimizer has a gradient, which never went "
                        "through the clip and the noise: set its .grad to None and do not train it."
                    )

    def _release(self) -> Release:
        """The noisy sum, remembered at once: it is public and charged, whatever comes next."""
        in_query = self.memory is not None and self.parts.filter_share is None
        with exact(self._device):
            release = self.door.release(
                self._clipped_sum(),
                self.plan.rate_of(self._current_lot),
                self.memory.branch if self.memory and in_query else None,
                gain=self.plan.beta_of(self.door.steps),
                lot=self._current_lot,
            )
            if self.memory:
                self.memory.remember(release)
        return release

    def _apply(self, release: Release) -> None:
        """Hand the release, divided by the public batch size, to the optimizer."""
        with exact(self._device):
            if self.parts.geometry:
                self._gradient.copy_(
                    self.parts.geometry.gradient(release.values, self.plan.batch_size)
                )
            elif self.parts.denoiser:
                self.parts.denoiser.apply(release, self._gradient)
                self._gradient.div_(self.plan.batch_size)
            else:
                torch.div(release.values, self.plan.batch_size, out=self._gradient)
            if self.parts.importance:
                self._gradient.mul_(self.parts.importance.mean_norm)
            if self.parts.filter_share is not None:
                self._gradient.mul_(at(self.parts.filter_share, release.step))
                if self.memory and self.memory.branch is not None:
                    self._gradient.add_(self.memory.branch.values, alpha=1 / self.plan.batch_size)
        for parameter, view in self._views:
            same = parameter.dtype == view.dtype
            parameter.grad = view if same else view.to(parameter.dtype)
        if self.parts.alternates:
            assert self.ascent is not None
            self.ascent.forget()  # the next lot gives a direction, at the weights themselves
        elif self.ascent:
            self.ascent.learn(release)
        if isinstance(self.optimizer, AdamBC):
            self.optimizer.noise_variances = self._noise_variances(release)
        if self.parts.rate:
            self.parts.rate.scale(self.optimizer)

    def _noise_variances(self, release: Release) -> dict[int, float]:
        """The variance of the noise in each parameter's gradient, by the parameter's id."""
        stds, denoiser = release.stds, self.parts.denoiser
        powers = denoiser.noise_powers(len(stds)) if denoiser else [1.0] * len(stds)
        scale = (self.parts.importance.mean_norm if self.parts.importance else 1.0) ** 2
        scale /= self.plan.batch_size**2
        return {
            id(slot.parameter): scale * powers[slot.group] * stds[slot.group] ** 2
            for slot in self.groups.slots
        }

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Runs when the optimizer has updated the weights: recall the branch of the next step."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        if self.parts.rate:
            self.parts.rate.restore(optimizer)
        if not self._just_released:
            return
        if self.ascent:
            self.ascent.stepped()
        if self.parts.averaging:
            self.parts.averaging.update()
        if self.memory:
            self._recall(self.memory)

    def _recall(self, memory: Recollection | EstimatedMemory) -> None:
        with exact(self._device):
            memory.prepare(self.door.steps)


def _signature(inputs: Any) -> Any:
    """What a call of the model looks like but for the lengths of its axes."""

    def one(path: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            return pytree.keystr(path), value.dtype, value.ndim
        plain = isinstance(value, bool | int | float | complex | str | bytes | type(None) | Enum)
        return pytree.keystr(path), value if plain else type(value)

    return tuple(one(path, value) for path, value in pytree.tree_leaves_with_path(inputs))
