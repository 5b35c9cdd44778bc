"""`PrivacyEngine`: put it around your own training loop.

It ties the rooms together: Poisson lots from the loader, per-example clipping in the backward pass,
one release per lot in `optimizer.step()`, and the ledger that every release is charged to.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor, cuda, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vestige import statement
from vestige.checks import Shown, round_up
from vestige.engine import checkpoint, validation
from vestige.engine import state as saving
from vestige.engine.books import Books, follow
from vestige.engine.build import Ingredients, build
from vestige.engine.caveats import caveats
from vestige.engine.ending import ending
from vestige.engine.fitting import fitted
from vestige.engine.guard import BudgetGuard
from vestige.engine.lineage import Things, Trace
from vestige.engine.options import Keywords, Options
from vestige.engine.prepare import Ahead, Request, check_sharded, prepare
from vestige.engine.run import Run
from vestige.engine.shard_checks import check_trained_shards
from vestige.engine.succession import taking_place
from vestige.errors import ConfigError, PrivacyError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, resolve
from vestige.parallel.ranks import Ranks
from vestige.plan import USER, PrivacyPlan, Schedule
from vestige.privacy import accounting
from vestige.privacy.ledger import Ledger, together
from vestige.release.door import Door
from vestige.release.part import Part
from vestige.sampling.loader import PrivateLoader, unwrapped
from vestige.sampling.normals import made_by
from vestige.sampling.streams import Randomness, key_of
from vestige.updates.averaging import Averaging

_USUAL_DELTA = 1e-5  # what is shown where nobody has named a delta
_NAMES = tuple(field.name for field in fields(Request))


class PrivacyEngine(Shown):
    """Makes a model, an optimizer and a data loader train with differential privacy.

    Guarantee: after any number of steps, everything the loop has released (the weights, and all
    that is computed from them) is (epsilon, delta)-differentially private for adding or removing
    one record (or what `adjacency` says), with epsilon = `get_epsilon(delta)`, provided that
    each row's loss depends on that row alone and that `noise_seed` was not used. Dropout inside the
    model and augmentation in the loader draw from the run's secret key, whatever seeds are set.
    What the loop itself does with batches, such as printing training losses or drawing random
    numbers outside of `secret_randomness()`, is outside the guarantee.

    `ledger` is that of another engine, or a file, that this one composes with. An engine without
    one that is given a model or an optimizer that another engine of this process has trained takes
    that engine's place and goes on with its ledger; `caveats` says so, and tells of engines on the
    same data.

    Papers: Abadi et al. 2016 (arXiv 1607.00133); accounting by Google's dp-accounting.
    """

    def __init__(
        self,
        accountant: str = "pld",
        *,
        secure_mode: bool = False,
        seed: int | None = None,
        noise_seed: int | None = None,
        ledger: Ledger | str | Path | None = None,
    ) -> None:
        self.accountant = accounting.accountant_name(accountant)
        self._secure, self._seed, self._noise_seed = secure_mode, seed, noise_seed
        self._books = Books(ledger)
        self._things: Things | None = None
        self._name = secrets.token_hex(8)  # of this run on its ledger
        self._run: Run | None = None
        self._found: Ranks | None = None
        self._delta: float | None = None  # that the run was planned for

    # -- making things private --------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: Schedule | None = None,
        max_grad_norm: float | Sequence[float],
        method: str | Method = "dp-sgd",
        clipping: Clipping | None = None,
        max_physical_batch_size: int | Literal["auto"] | None = None,
        loss_reduction: str = "mean",
        criterion: Any = None,
        dataset_size: int | None = None,
        steps: int | None = None,
        **keywords: Unpack[Keywords],
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Train privately with a given noise multiplier; returns (module, optimizer, loader).

        The module and the optimizer are the ones passed in, with hooks; the loader is new. Its
        batch size becomes the expected lot size and the public divisor of every sum. The noise
        multiplier, the sampling rate and a method's beta may be schedules: a sequence with one
        number per step, or a function of the step. See docs/guide.md for each argument, those of
        `vestige.engine.options` included.

        Guarantee: each `optimizer.step()` that completes a lot is one release, charged before its
        noise is drawn.
        """
        if self._run is not None:
            raise ConfigError(
                "make_private was called before on this engine: one engine guards one run. For "
                "another model on the same data make PrivacyEngine(ledger=engine.ledger)."
            )
        data_loader = unwrapped(data_loader)
        options = Options.of(keywords, _NAMES)
        module = validation.uncompiled(module, options.compile)
        inner, held = validation.unwrapped(module, optimizer)
        request = Request(
            inner,
            held,
            data_loader,
            noise_multiplier,
            max_grad_norm,
            method,
            clipping,
            None if max_physical_batch_size == "auto" else max_physical_batch_size,
            loss_reduction,
            criterion,
            dataset_size,
            steps,
            options,
        )
        with taking_place(inner, held) as before:
            if max_physical_batch_size == "auto":
                request = fitted(request, self._ranks(options))
            run, things = self._run_of(request)
            try:
                self._books.check_unchanged()
                loader = PrivateLoader(data_loader, run.lots, run.hand_out, inner)
                run.attach()
                for trace in before:
                    trace.end()
            except BaseException:
                run.detach()  # no hook and no lock is left behind
                raise
        self._run, self._things = run, things
        alive = weakref.ref(run), weakref.ref(run.capture)
        things.leave(Trace(self._name, self.ledger, run.door.own, *alive))
        return module, optimizer, loader

    def _run_of(self, request: Request) -> tuple[Run, Things]:
        """The run on its ledger, not yet attached to the model."""
        options = request.options
        ranks = self._ranks(options)

        def checked() -> tuple[PrivacyPlan, Method, Ingredients, Things]:
            plan, method, made = prepare(request)
            things = Things.of(request.module, request.optimizer, request.data_loader.dataset)
            self._books.join(things, request.module, request.optimizer)
            if options.sharded:
                check_sharded(method, request.dataset_size)
            check_trained_shards(made, method, plan, ranks)
            return plan, method, made, things

        plan, method, made, things = ranks.each(checked)
        data = request.data_loader.dataset
        secure = self._secure or options.secure_mode or options.secure_noise
        records: Any = {} if options.sharded else made.records
        ranks.check_same(_common(request, plan, records, secure))
        compared = ranks.check_records(data, options.sharded)
        if made.units is not None:
            ranks.check_units(made.units.digests, options.sharded)
        seed = self._noise_seed if options.noise_seed is None else options.noise_seed
        seed = ranks.sent(seed)
        share = ranks.rank, ranks.world
        key = ranks.key(key_of(seed))
        randomness = Randomness(seed, secure, key, share, options.sharded)
        run = build(plan, method, made, randomness, self.ledger, self._name, ranks)
        ranks.give_weights([*request.module.parameters(), *request.module.buffers()])
        if not compared:
            run.declared.append(
                "whether every rank has the same records in the same order, or, sharded, records "
                "of its own, could not be compared: a record on two ranks would count twice"
            )
        if options.self_check:
            run.ways.check_rows((self._seed if options.seed is None else options.seed) or 0)
        if options.compile:
            rows = min(plan.max_physical_batch_size or plan.batch_size, plan.batch_size)
            run.ways.compile(rows // ranks.world)
        if options.max_epsilon is not None:
            run.guard = BudgetGuard(options.max_epsilon, options.delta, self.accountant, run)
        self._noise_seed_used = seed
        self._delta = options.delta
        facts = checkpoint.row_facts(data)
        if made.units is not None:
            facts["unit"] = USER
        self._facts = {"name": options.data_name, "records": plan.dataset_size, **facts}
        self._books.enter(run, self._facts)
        return run, things

    def _ranks(self, options: Options) -> Ranks:
        """The processes that train together, found once."""
        if self._found is None:
            self._found = Ranks.found(options.process_group)
        return self._found

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | Sequence[float],
        method: str | Method = "dp-sgd",
        dataset_size: int | None = None,
        sample_rate: Schedule | None = None,
        resume: str | Path | None = None,
        **options: Any,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """`make_private` with the noise solved for: `target_epsilon` after `epochs` (or `steps`).

        What the ledger holds before counts: the target is for everything on it together. `resume`
        is the checkpoint that `load_checkpoint` will go on from, if it is there: the noise is then
        the one that was solved for when that run began.

        Guarantee: the epsilon reported by this engine after that many lots is at most the target,
        as long as no other engine charges the same ledger meanwhile: the same accountant and the
        same events calibrate and report.
        """
        if "noise_multiplier" in options or "group_noise_multipliers" in options:
            raise ConfigError(
                "make_private_with_epsilon solves for the noise: leave the noise multiplier out, "
                "or call make_private."
            )
        further = {name: value for name, value in options.items() if name not in _NAMES}
        # Solving for the noise takes long: what is wrong is told now.
        known = Options.of({**further, "sample_rate": sample_rate}, _NAMES)
        ranks = self._ranks(known)
        data_loader = unwrapped(data_loader)
        module = validation.uncompiled(module, bool(options.get("compile")))
        inner, held = validation.unwrapped(module, optimizer)
        ahead = Ahead.of(
            inner,
            data_loader,
            resolve(method),
            (epochs, steps),
            dataset_size,
            known,
            options.get("clipping"),
        )
        taken_up = resume is not None and ranks.decided(Path(resume).exists)
        if resume is not None and taken_up:
            noise, earlier = ranks.decided(lambda: checkpoint.saved_noise(Path(resume))), None
        else:
            self._books.join(Things.of(inner, held, data_loader.dataset), inner, held)
            earlier = ranks.decided(self._books.spent)
            noise, _ = ranks.decided(
                lambda: accounting.noise_for(
                    target_epsilon, target_delta, ahead.charges, self.accountant, earlier
                )
            )
        try:
            self._books.solved_beside = earlier
            made = self.make_private(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=noise,
                max_grad_norm=max_grad_norm,
                method=ahead.method,
                dataset_size=dataset_size,
                sample_rate=ahead.rate,
                steps=ahead.steps,
                **{"delta": target_delta} | options,
            )
        finally:
            self._books.solved_beside = None
        self._attached().calibrated = True
        return made

    def keep_ledger(self, path: str | Path, create: bool = True) -> None:
        """Keep the ledger in this file, before the first release; as PrivacyEngine(ledger=...).

        Guarantee: from now on a charge is on the disk before its noise is drawn. What the file
        already holds, of this run or of others on the same data, composes.
        """
        self._books.open(Path(path), self._attached(), self._facts, create)

    def close(self) -> None:
        """Give back what is reserved on the ledger file and not used, and let others have it."""
        if self.ledger.file:
            self.ledger.file.close()

    # -- while training ---------------------------------------------------------------------

    def backward(self, losses: Tensor) -> None:
        """Backward from one loss per row: no reduction to declare, nothing to get wrong."""
        run = self._attached()
        batch = run.capture.batch
        rows = batch.rows if batch else None
        if not isinstance(losses, Tensor) or losses.ndim != 1 or losses.shape[0] != rows:
            got = f"{losses.ndim} axes" if isinstance(losses, Tensor) else type(losses).__name__
            raise PrivacyError(
                f"engine.backward got a loss of {got} that does not match the rows of the batch "
                "that the loader handed out: give one loss per row, one axis, for example "
                "F.cross_entropy(output, y, reduction='none')."
            )
        if run.capture.paused:
            # Rows with weights of their own: the sum is taken in the way that was declared.
            (losses.mean() if run.capture.mean_loss else losses.sum()).backward()
            return
        run.capture.mean_loss = False
        try:
            losses.sum().backward()
        finally:
            run.capture.mean_loss = run.plan.loss_reduction == "mean"

    @contextmanager
    def secret_randomness(self) -> Iterator[None]:
        """For what your loop itself draws for a batch: mixup, noise on inputs, dropout in the loss.

        Guarantee: inside `with`, torch, `random` and `numpy.random` draw from the secret stream of
        the lot, as they do inside the model; afterwards they are as they were.
        """
        batch = self._attached().capture.batch
        if batch is None or batch.stream is None:
            raise PrivacyError(
                "secret_randomness() was called with no batch at hand: call it between a batch of "
                "the private loader and optimizer.step()."
            )
        with batch.stream.installed():
            yield

    def abandon_lot(self) -> None:
        """Give up the lot at hand (after an error or an interrupt). It is charged all the same."""
        self._attached().abandon_lot()

    def detach(self) -> None:
        """Take the hooks off the model and the optimizer, so that they can be used elsewhere."""
        self._attached().detach()

    # -- what was spent ---------------------------------------------------------------------

    def get_epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Epsilon of everything released so far, at `delta`, by this engine's accountant.

        Guarantee: an upper bound (PLD rounds up; RDP is a bound by construction) for adding or
        removing one record, or for what `adjacency` says.
        """
        name = self.accountant if accountant is None else accounting.accountant_name(accountant)
        return accounting.epsilon(self.ledger.merged(), delta, name)

    def diagnostics(self) -> dict[str, Any]:
        """The last step's numbers about the memory, as lists with one entry per group.

        Empty before the first step; "step" alone for a method without memory. docs/methods says
        what each name means.

        Guarantee: functions of releases, weights and public settings; publishing them costs
        nothing.
        """
        if "memory" in self.parts:
            return self.parts["memory"].diagnostics()
        return {"step": self.released - 1} if self.released else {}

    def averaged_state_dict(self) -> dict[str, Any]:
        """The model's state_dict with the averaged parameters in place of the last ones.

        Guarantee: post-processing; as private as the model itself.
        """
        run = self._attached()
        averaging = run.part(Averaging)
        if averaging is None or averaging.count == 0:
            raise ConfigError(
                "there is no average of the weights yet: pass averaging='ema' (or 'uniform-tail', "
                "'fractional') to make_private, and take a step."
            )
        run.check_state()
        module, means = run.capture.module, averaging.averaged()
        # By identity: a tied parameter has several names.
        named = module.named_parameters(remove_duplicate=False)
        averaged = {name: means[id(p)] for name, p in named if id(p) in means}
        return {**module.state_dict(), **averaged}

    @property
    def released(self) -> int:
        """The number of releases so far."""
        return self._run.door.steps if self._run else 0

    @property
    def in_lot(self) -> bool:
        """Whether a lot was handed out that is neither released nor abandoned yet."""
        return self._run is not None and self._run.in_lot

    def statement(
        self, delta: float, *, caveats: Sequence[str] | None = None, **facts: Any
    ) -> dict[str, Any]:
        """The privacy statement of everything on this engine's ledger, as plain JSON types.

        `facts` are public facts of the run (docs/statement.md); `vestige.statement.markdown` makes
        a page of it that a privacy officer can sign. What other runs have charged to the same
        ledger file is part of the claim and listed apart. `caveats` are the engine's own unless
        they are given.
        """
        run, charged = self._attached(), self._attached().door.own.events
        return statement.build(
            replace(self.plan, adjacency=self.adjacency),
            charged,
            delta=delta,
            accountant=self.accountant,
            released=self.released,
            repeatable=run.repeatable,
            caveats=self.caveats() if caveats is None else caveats,
            run=facts,
            earlier=statement.without(self.ledger.merged(), charged),
            over_reported=self.lost,
            ending=ending(run),
            repeatable_before=self.ledger.facts(but=run.door.run).test_mode,
        )

    @property
    def lost(self) -> int:
        """The number of charges for releases that a crash has lost: the model has no part in it."""
        return self._run.door.lost if self._run else 0

    @property
    def charged(self) -> int:
        """The number of charges that this run has on its ledger."""
        return self._run.door.own.steps if self._run else 0

    @property
    def earlier(self) -> int:
        """The number of releases of other runs on the same ledger: they compose."""
        return self.ledger.steps - self.charged

    @property
    def adjacency(self) -> str:
        """What neighbouring data are, for everything on the ledger together."""
        run = self._attached()
        return together([run.door.facts, self.ledger.facts()]).adjacency

    @property
    def ranks(self) -> Ranks:
        """The processes that train together; one alone without a process group."""
        return self._attached().ranks

    @property
    def plan(self) -> PrivacyPlan:
        """The public facts of the run."""
        return self._attached().plan

    @property
    def door(self) -> Door:
        """Where releases come from; its `observers` are told of everything that goes through."""
        return self._attached().door

    @property
    def parts(self) -> dict[str, Part]:
        """What follows a release, by name: memory, filter, average. All of it is public."""
        return {part.name: part for part in self._attached().parts if part.name}

    @property
    def ledger(self) -> Ledger:
        """What was charged, in order."""
        return self._books.ledger

    def caveats(self) -> list[str]:
        """What the reader of epsilon must know, in sentences: none for a plain run."""
        run = self._attached()
        assert self._things is not None
        return caveats(run, self.adjacency, self._books.inherited, self._things)

    def add_caveat(self, sentence: str) -> None:
        """Add to `caveats`, and so to the statement, what only the loop knows of."""
        declared = self._attached().declared
        if sentence not in declared:
            declared.append(sentence)

    def untrained(self) -> list[str]:
        """The names of trainable parameters that no backward pass has come to so far."""
        run = self._attached()
        return [s.name for s in run.groups.slots if s.name not in run.capture.reached]

    def _shown(self, whole: bool) -> Mapping[str, object]:
        if self._run is None:
            return {"accountant": self.accountant, "state": "nothing is private yet: make_private"}
        planned = "" if self.plan.steps is None else f" of {self.plan.steps} planned"
        facts: dict[str, object] = {"releases": f"{self.released}{planned}"}
        if whole and self._delta is None:
            spent = round_up(self.get_epsilon(_USUAL_DELTA))
            facts["epsilon so far"] = (
                f"{spent} at delta {_USUAL_DELTA:g}; engine.get_epsilon(DELTA)"
            )
        elif whole and self._delta:
            spent = round_up(self.get_epsilon(self._delta))
            facts["epsilon so far"] = f"{spent} at delta {self._delta:g}"
        facts |= {"charges on the ledger": self.ledger.steps, "accountant": self.accountant}
        facts = facts | dict(self.plan._shown(whole)) | {"releases": facts["releases"]}
        notes = self.caveats() if whole else []
        return facts | {f"note {place}": note for place, note in enumerate(notes, 1)}

    # -- saving -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plan, ledger and position as plain JSON types, and tensors of past releases in "memory".

        No key, no generator state, no example: all of it is public.
        """
        return saving.state_of(self._attached())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run: call it after make_private with the same settings, before any step.

        Guarantee: what was spent before stays charged. Noise is never repeated: this engine has a
        key of its own (in test mode, the noise_seed's: lots and noise continue where they were).
        """
        run = self._attached()
        run.ranks.each(lambda: saving.load_state(run, state))
        follow(run)

    def save_checkpoint(self, path: str | Path, **others: Any) -> None:
        """Save everything that this run needs to go on, between two lots, in place of `path`.

        `others` are objects with a state_dict, such as a learning-rate scheduler, or plain values;
        `load_checkpoint` gives them back. A sharded model is gathered: call it on every rank.

        Guarantee: what `path` holds is public: weights, releases and the ledger, no example. Keep
        PATH.*.secret, with the state of torch's generators, to yourself.
        """
        run, seed = self._attached(), self._noise_seed_used
        if run.ranks.leads or run.capture.meet:  # else it may be called on rank 0 alone
            saving.save(Path(path), run, self._facts, seed, others)

    def load_checkpoint(self, path: str | Path, **others: Any) -> dict[str, Any]:
        """Go on from a checkpoint: after make_private with the same settings, before any step.

        Objects in `others` get their state back; the saved plain values are returned. Refuses
        another model, method, optimizer or data set, naming the difference, and changes nothing
        then.

        Guarantee: that of `load_state_dict`.
        """
        run = self._attached()
        loaded = run.ranks.each(lambda: saving.load(Path(path), run, self._facts, others))
        follow(run)
        return loaded

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigError("call make_private or make_private_with_epsilon first.")
        return self._run


def _common(request: Request, plan: PrivacyPlan, records: Any, secure: bool) -> dict[str, Any]:
    """What every rank must be given alike."""
    options = request.options
    shapes = {}
    for name, p in request.module.named_parameters():
        told = "trained" if p.requires_grad else "frozen"
        shapes[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype}, {told}"
    device = next(request.module.parameters()).device
    kind = cuda.get_device_name(device) if device.type == "cuda" else device.type
    return (
        plan.as_dict()
        | shapes
        | {
            "records": records,
            "device": kind,
            "max_epsilon": options.max_epsilon,
            "delta": options.delta,
            "sharded": options.sharded,
            "secure_mode": secure,
            "noise made by": made_by(),
        }
    )
