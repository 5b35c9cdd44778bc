"""One model in training: follows every lot from the loader through the step to the release.

The order of events is checked at every turn: a drawn lot must be released, a release needs a fresh
backward, and the trainable set must be the one that the noise was planned for. What a method adds
to the plain step stands in a list of parts, which this file knows nothing about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from vestige.engine.attention import mask_always, mask_as_usual
from vestige.engine.forecast import coming_events
from vestige.engine.guard import BudgetGuard
from vestige.engine.schedulers import free_schedulers, gate_schedulers
from vestige.engine.sharded_run import connect
from vestige.engine.validation import check_optimizer
from vestige.engine.ways import Ways
from vestige.errors import PrivacyError
from vestige.gradients import Capture
from vestige.gradients.backward import exact
from vestige.gradients.loss_watch import LossWatch
from vestige.gradients.shards import like_shard, own_groups
from vestige.methods.method import Feature
from vestige.parallel.meetings import Doing
from vestige.parallel.ranks import Ranks
from vestige.plan import PrivacyPlan
from vestige.release.digests import terms
from vestige.release.door import Branch, ClippedSum, Door, Release
from vestige.release.part import Gradient, Part, Survey
from vestige.sampling.loader import Batch, LotSampler
from vestige.updates.passes import Passes

_P = TypeVar("_P", bound=Part)


class Phase(Enum):
    """Where a run is between two releases."""

    BETWEEN = auto()  # no lot is at hand
    LOT = auto()  # a lot was handed out, and is not released yet
    DETACHED = auto()  # the hooks were taken off


class Run:
    """One model in training: follows every lot from the loader to the release."""

    def __init__(
        self,
        plan: PrivacyPlan,
        optimizer: Optimizer,
        capture: Capture,
        lots: LotSampler,
        door: Door,
        parts: Sequence[Part],
        passes: Passes | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.ranks.carry(capture.collector)
        self.ranks.fault = self.pay_ahead
        self.plan, self.optimizer, self.capture = plan, optimizer, capture
        self.agreed = plan  # as it was made: a public schedule goes on with `plan`
        self.excludes: Mapping[Feature, str] = {}  # what the method does not go with
        self.calibrated = False  # whether the noise was solved for a target
        self.lots, self.door, self.position = lots, door, door.position
        self.groups = capture.groups
        self.parts, self.passes = tuple(parts), passes
        self.survey = next((part for part in parts if isinstance(part, Survey)), None)
        if passes:
            passes.first_look = self._first_look
        self.losses = LossWatch(capture)
        self.guard: BudgetGuard | None = None
        self.phase = Phase.BETWEEN
        self.moved = True  # whether the last step moved the weights
        self.repeatable = door.facts.test_mode
        self.gave_up = False  # whether a lot was abandoned
        self.kept_elsewhere = False  # whether rank 0 has the ledger in a file
        self.gap = False  # whether it was once taken up from a state without a ledger file
        self.ways = Ways(capture, self.ranks)
        self.declared: list[str] = []  # caveats that whoever runs the loop has added
        self._hooks: tuple[Any, ...] = ()
        self._depth = 0  # how many calls of optimizer.step() are under way, one inside the other
        self._epoch: int | None = None  # the first lot of the last epoch that was looked at
        own = own_groups(self.groups)
        self._gradient = own.buffer()
        self._device = self._gradient.device.type
        self._held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._views = [(s.trained, s.view(self._gradient)) for s in own.slots]
        connect(self)

    def attach(self) -> None:
        """Hook into the model and the optimizer."""
        self._hook()
        for parameter in self.capture.module.parameters():
            parameter.grad = None  # an old, unprotected gradient must not be applied

    def _hook(self) -> None:
        self.capture.attach()
        self._hooks = (
            *self.losses.attach(),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )
        mask_always(self.capture.module)

    def step_aside(self) -> None:
        """Take the hooks off, and put back what a lot has moved: another engine is being made."""
        self.capture.detach()
        if self._hooks:  # else the masks may be another engine's
            mask_as_usual(self.capture.module)
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._each(lambda part: part.lot_ends())

    def come_back(self) -> None:
        """The other engine came to nothing: go on where this one was."""
        self.step_aside()
        self._hook()
        if self.in_lot:
            self._each(lambda part: part.lot_begins())

    def detach(self) -> None:
        """Take the hooks off."""
        leaves, self.phase = self.phase is not Phase.DETACHED, Phase.DETACHED
        self.losses.stop()
        self.step_aside()
        free_schedulers(self.optimizer)
        if leaves:
            self._leave_ledger()  # last: a ledger file that is gone raises

    @property
    def begun(self) -> bool:
        """Whether a lot was ever handed out."""
        return self._epoch is not None

    @property
    def detached(self) -> bool:
        """Whether the hooks were taken off."""
        return self.phase is Phase.DETACHED

    @property
    def in_lot(self) -> bool:
        """Whether a lot was handed out that is not released yet."""
        return self.phase is Phase.LOT

    def _has_moved(self) -> bool:
        return self.moved

    def part(self, kind: type[_P]) -> _P | None:
        """The part of that kind, if the run has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def _leave_ledger(self) -> None:
        """The last engine that leaves a ledger lets its file go."""
        ledger = self.door.ledger
        ledger.pending.pop(self.door.run, None)
        ledger.engines -= 1
        if ledger.file and not ledger.engines:
            ledger.file.close()
        elif ledger.file and self.door.account:
            ledger.file.leave(self.door.account)

    # -- a lot begins -----------------------------------------------------------------------

    def hand_out(self, batch: Batch) -> None:
        """The loader gives `batch` to the loop."""
        self._check_turn(batch)
        if self.phase is Phase.BETWEEN:
            self._begin_lot(batch)
        self.capture.start(batch)
        self.losses.start(batch)
        for observer in self.door.observers:
            observer.handed_out(batch, self._branch())

    def _check_turn(self, batch: Batch) -> None:
        """Refuse a batch out of turn."""
        if self.phase is Phase.DETACHED:
            raise PrivacyError(
                "the engine was detached, or a new one has taken its place: its loader does not go "
                "on feeding an ordinary loop. Use the original DataLoader, or make_private of "
                "PrivacyEngine(ledger=engine.ledger)."
            )
        if self.capture.batch is not None:
            raise PrivacyError(
                "the loader was asked for another batch before optimizer.step() was called for "
                "the last one: every drawn lot must be released. Step on every batch (to add "
                "gradients up, make the lots larger, and give max_physical_batch_size= for the "
                "memory), read other loops from DataLoader(loader.dataset, BATCH_SIZE, "
                "collate_fn=loader.collate_fn), or call engine.abandon_lot()."
            )
        if self.phase is Phase.LOT and self.position.lot != batch.lot:
            raise PrivacyError(
                "a lot was left before its last physical batch: every drawn lot must be released. "
                "Finish it, or call engine.abandon_lot()."
            )

    def _begin_lot(self, batch: Batch) -> None:
        """Everything that is done before the loop sees a lot: nothing here can depend on it."""
        if self._epoch != self.lots.first_lot:  # once an epoch
            self.capture.tracker.check_buffers()
            gate_schedulers(self.optimizer, self._has_moved)
            self._epoch = self.lots.first_lot
        self.position.lot = batch.lot
        self.ranks.check_alone()
        if self.guard:
            self.ranks.decided(self.guard.check)
        self.door.ledger.pending[self.door.run] = coming_events(self, 1)
        self._depth = 0  # of a step that failed
        self._each(lambda part: part.lot_begins())
        self.capture.collector.clear()
        if self.survey:
            self.survey.begin(batch.lot, batch.measures)
        self.phase = Phase.LOT

    def check_state(self) -> None:
        """Refuse to write down a model that holds values of private batches."""
        self.capture.tracker.check_buffers()
        self.capture.tracker.check_kept()

    def charge_lot(self) -> None:
        """Charge what the lot at hand costs, unless it was paid for."""
        if self.survey and self.survey.measuring:
            self.door.charge_measurement(self.survey.norm_noise)
        else:
            lot, beta = self.position.lot, self.plan.beta_of(self.position.release)
            self.door.charge(self.plan.rate_of(lot), beta, lot)

    def pay_ahead(self) -> None:
        """Charge the open lot now: whatever becomes of it, it is paid for."""
        if self.in_lot:
            self.door.pay_ahead(self.charge_lot)

    def abandon_lot(self) -> None:
        """Charge the open lot and forget it."""
        lot = self.position.lot
        if self.phase is Phase.LOT:
            self.gave_up = True
            self.lots.given_up = lot
            self.charge_lot()
            self.phase = Phase.BETWEEN
        self.capture.stop_watching()
        self.losses.stop()
        self._each(lambda part: part.lot_ends())
        self.capture.collector.clear()
        self.capture.batch = None
        self.door.ledger.pending.pop(self.door.run, None)

    # -- optimizer.step() -------------------------------------------------------------------

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
        self.losses.stop()  # first: it would be told of every attribute that is looked at here
        self._check_parameters(optimizer)
        self.capture.batch = None
        self.moved = batch.last and not batch.measures
        if batch.last and self.capture.meet:
            self.capture.meet(Doing.STEPPING)
        if batch.last:
            self.phase = Phase.BETWEEN
            self._each(lambda part: part.lot_ends())
        for parameter, _ in self._views:
            parameter.grad = None  # optimizers pass over parameters without a gradient
        if batch.last and batch.measures:
            self._measure()
        elif batch.last:
            self._release()
        return args, kwargs

    def _check_parameters(self, optimizer: Optimizer) -> None:
        """The trainable set is the planned one; nothing else in the optimizer has a gradient."""
        self.groups.check_unchanged(self.capture.module)
        if {id(p) for group in optimizer.param_groups for p in group["params"]} != self._held:
            check_optimizer(optimizer, self.capture.module)
        planned = self.groups.ids
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in planned:
                    raise PrivacyError(
                        "a frozen parameter in the optimizer has a gradient, which never went "
                        "through the clip and the noise: set its .grad to None and do not train it."
                    )

    def _measure(self) -> None:
        """All records were seen: release the number that was measured."""
        assert self.survey is not None
        exact = torch.tensor([self.survey.take_norms()], dtype=torch.float64)
        told = self.survey.norm_noise, self.position.lot
        number = ClippedSum(exact, (1.0,), add_up=lambda: self.ranks.add_number(exact, told))
        self.survey.settle(self.door.measure(number, *told))

    def _clipped_sum(self) -> ClippedSum:
        collector = self.capture.collector
        add_up = None if self.ranks.alone else self._add_up
        return ClippedSum(collector.total, collector.bounds, collector.counts, add_up)

    def _add_up(self) -> None:
        """With several processes: the sum of the whole lot, once it is charged."""
        collector, place = self.capture.collector, (self.position.lot << 32) + self.door.steps
        weights, last = [slot.parameter for slot in self.groups.slots], self.door.last
        if collector.sharded:
            weights, last = [], []  # every rank has others
        seen = (weights, last, place, terms(self.door, collector.bounds))
        self.ranks.add_up(collector, seen)

    def _first_look(self) -> Release:
        """A noisy sum of the lot at hand, which will be released once more."""
        with exact(self._device):
            lot = self.position.lot
            return self.door.first_look(self._clipped_sum(), self.plan.rate_of(lot), lot)

    def _release(self) -> None:
        """Let the noisy sum out, and hand it, divided by the public batch size, to the optimizer.

        The parts see it at once: it is public and charged, whatever comes next.
        """
        lot, step = self.position.lot, self.position.release
        with exact(self._device):
            release = self.door.release(
                self._clipped_sum(),
                self.plan.rate_of(lot),
                self._branch(),
                gain=self.plan.beta_of(step),
                lot=lot,
            )
            size = self.plan.batch_size
            gradient = Gradient(self._gradient, size, [(s / size) ** 2 for s in release.stds])
            if release.values.shape == self._gradient.shape:  # else a part decodes it
                torch.div(release.values, size, out=self._gradient)
            for part in self.parts:
                part.released(release, gradient)
        self.moved = not gradient.withheld
        for parameter, view in self._views if self.moved else ():
            same = parameter.dtype == view.dtype
            parameter.grad = like_shard(view if same else view.to(parameter.dtype), parameter)
        if step == self.plan.steps:
            warnings.warn(
                f"the run goes beyond the {self.plan.steps} steps it was planned for: epsilon "
                "grows past its target. get_epsilon() stays right.",
                UserWarning,
                stacklevel=5,
            )

    def _branch(self) -> Branch | None:
        """What a memory recalled before the lot was handed out."""
        return next((part.branch for part in self.parts if part.branch is not None), None)

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Runs when the optimizer has updated the weights."""
        self._depth = max(0, self._depth - 1)
        if not self._depth and self.moved:
            self._each(lambda part: part.stepped())

    def _each(self, act: Callable[[Part], None]) -> None:
        if not self.parts:
            return
        with exact(self._device):
            for part in self.parts:
                act(part)
