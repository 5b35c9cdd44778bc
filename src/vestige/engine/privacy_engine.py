"""`PrivacyEngine`: put it around your own training loop.

It ties the rooms together: Poisson lots from the loader, per-example clipping in the backward pass,
one release per lot in `optimizer.step()`, and the ledger that every release is charged to.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vestige import statement
from vestige.checks import check_count
from vestige.engine import checkpoint
from vestige.engine import state as saving
from vestige.engine.build import assemble, check_settings
from vestige.engine.ending import ending
from vestige.engine.forecast import coming_events, lots_left
from vestige.engine.guard import BudgetGuard
from vestige.engine.lineage import Things, Trace
from vestige.engine.run import Run
from vestige.engine.validation import check_criterion, check_model, check_optimizer
from vestige.errors import ConfigError, PrivacyError
from vestige.gradients.clipping import Auto, Clip, Clipping, Quantile, taken_apart
from vestige.gradients.groups import partition
from vestige.methods import METHODS, Method, planned_charges, query_weight, resolve
from vestige.plan import ADJACENCY, PrivacyPlan, Schedule, constant, lots_per_epoch, sampling_rate
from vestige.privacy import accounting
from vestige.privacy.ledger import Ledger, together
from vestige.privacy.ledger_file import Account, LedgerFile, common_data, opened_here
from vestige.privacy.ledger_file import read as read_ledger
from vestige.privacy.noise_scales import GroupNoise, NoiseScale, noise_scales, shaped
from vestige.release.door import Door
from vestige.sampling.loader import PrivateLoader, check_loader
from vestige.sampling.streams import Randomness

REPEATABLE = "repeatable noise: not private towards anyone who knows the seed"
REPEATABLE_BEFORE = (
    "another run on the ledger was in test mode: what all of them released is not private towards "
    "anyone who knows its seed"
)


class PrivacyEngine:
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
        self._ledger = ledger if isinstance(ledger, Ledger) else Ledger()
        self._ledger_given = ledger is not None
        self._things: Things | None = None
        self._inherited = 0  # releases of engines before, on whose ledger this one goes on
        # Opened when everything else is right, so that a refused setting leaves no lock behind.
        self._ledger_path = None if isinstance(ledger, Ledger) else ledger
        self._name = secrets.token_hex(8)  # of this run on its ledger
        self._run: Run | None = None

    # -- making things private --------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: Schedule | None = None,
        max_grad_norm: float | Sequence[float],
        clipping: Clipping | None = None,
        group_noise_multipliers: GroupNoise | None = None,
        method: str | Method = "dp-sgd",
        max_physical_batch_size: int | None = None,
        loss_reduction: str = "mean",
        criterion: Any = None,
        batch_first: bool = True,
        dataset_size: int | None = None,
        sample_rate: Schedule | None = None,
        steps: int | None = None,
        history_dtype: torch.dtype | None = None,
        denoiser: str | Method | None = None,
        averaging: str | None = None,
        seed: int | None = None,
        noise_seed: int | None = None,
        secure_noise: bool = False,
        secure_mode: bool = False,
        self_check: bool = True,
        max_epsilon: float | None = None,
        delta: float | None = None,
        data_name: str | None = None,
        poisson_sampling: bool = True,
        noise_generator: Any = None,
    ) -> tuple[nn.Module, Optimizer, PrivateLoader]:
        """Train privately with a given noise multiplier; returns (module, optimizer, loader).

        The module and the optimizer are the ones passed in, with hooks; the loader is new. Its
        batch size becomes the expected lot size and the public divisor of every sum. The noise
        multiplier, the sampling rate and a method's beta may be schedules: a sequence with one
        number per step, or a function of the step. See docs/guide.md for each argument.

        Guarantee: each `optimizer.step()` that completes a lot is one release, charged before its
        noise is drawn.
        """
        if self._run is not None:
            raise ConfigError(
                "make_private was called before on this engine: one engine guards one run. For "
                "another model on the same data make PrivacyEngine(ledger=engine.ledger)."
            )
        if not poisson_sampling:
            raise ConfigError(
                "poisson_sampling=False is refused: the accountants assume Poisson lots, and fixed "
                "or shuffled batches with the same epsilon would be a false claim."
            )
        if noise_generator is not None:
            raise ConfigError(
                "noise_generator is refused: noise is keyed by the engine, step by step. Use "
                "noise_seed=... for a repeatable test run or secure_mode=True."
            )
        check_model(module)
        check_optimizer(optimizer, module)
        check_criterion(criterion, loss_reduction, module)
        batch_size = check_loader(data_loader)
        if max_physical_batch_size is not None:
            check_count("max_physical_batch_size", max_physical_batch_size)
        if steps is not None:
            check_count("steps", steps)
        if history_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            raise ConfigError(
                f"history_dtype={history_dtype} is not one that releases can be kept in: use "
                "torch.bfloat16 for half the memory, or leave it out."
            )
        chosen = resolve(method).tabulated(steps)
        chosen.check_optimizer(optimizer)
        parts, form = taken_apart(chosen.clipping if clipping is None else clipping)
        groups = partition(module, parts)
        stability = form.stability if isinstance(form, Auto) else None
        clip = Clip.over(max_grad_norm, groups.names, stability)
        geometry = chosen.geometry(groups.buffer())
        names = groups.names if geometry is None else ("direction", "magnitude")
        bounds = clip.bounds if geometry is None else geometry.bounds(clip.bounds[0])
        noise = noise_scales(noise_multiplier, group_noise_multipliers, names, steps)
        if geometry is not None and group_noise_multipliers is None:
            noise = [NoiseScale.evenly(scale.joint, len(names)) for scale in noise]
        noise = shaped(noise, chosen.noise_shape(steps))
        check_settings(
            chosen,
            optimizer,
            form,
            groups,
            noise,
            data_loader.num_workers,
            max_physical_batch_size,
        )
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        size = records if dataset_size is None else dataset_size
        shape = chosen.clip_shape(steps) or (1.0,)
        scheduled = [
            tuple(c * shape[min(t, len(shape) - 1)] for c in bounds) for t in range(len(noise))
        ]
        stds = tuple(scale.stds(scheduled[t]) for t, scale in enumerate(noise))
        plan = PrivacyPlan(
            method=chosen.name,
            dataset_size=size,
            size_declared=dataset_size is not None,
            batch_size=batch_size,
            sample_rate=chosen.charged_rate(sampling_rate(size, batch_size, sample_rate, steps)),
            clipping=str(form) if form else parts if isinstance(parts, str) else "partition",
            group_names=names,
            bounds=scheduled[0],
            noise_multiplier=constant([scale.joint for scale in noise]),
            noise_stds=stds[0] if len(stds) == 1 else stds,
            beta=query_weight(chosen, steps),
            settings=_settings(chosen, denoiser),
            averaging=averaging,
            history_dtype=None if history_dtype is None else str(history_dtype),
            steps=steps,
            max_physical_batch_size=max_physical_batch_size,
            loss_reduction=loss_reduction,
            count_noise=form.noise(batch_size) if isinstance(form, Quantile) else None,
            adjacency=chosen.adjacency,
            private=chosen.private,
        )
        self._noise_seed_used = self._noise_seed if noise_seed is None else noise_seed
        things = Things.of(module, optimizer, data_loader.dataset)
        self._join(things, module, optimizer)
        run = assemble(
            plan,
            chosen,
            module=module,
            optimizer=optimizer,
            groups=groups,
            clip=clip,
            form=form,
            noise=noise,
            randomness=Randomness(
                self._noise_seed_used,
                self._secure or secure_mode or secure_noise,
            ),
            ledger=self._ledger,
            name=self._name,
            records=records,
            history_dtype=history_dtype,
            denoiser=denoiser,
            batch_first=batch_first,
            self_check=self_check,
            seed=(self._seed if seed is None else seed) or 0,
        )
        if max_epsilon is not None:
            run.guard = BudgetGuard(max_epsilon, delta, self.accountant, run)
        self._facts = {
            "name": data_name,
            "records": size,
            **checkpoint.row_facts(data_loader.dataset),
        }
        if self._ledger.file:
            run.door.account = self._account(self._ledger.file, run)
        elif self._ledger_path is not None:
            self._open_ledger(Path(self._ledger_path), run)
        self._ledger.engines += 1
        run.attach()
        self._run, self._things = run, things
        things.leave(Trace(self._name, self._ledger, run.door.own, weakref.ref(run)))
        return module, optimizer, PrivateLoader(data_loader, run.lots, run.hand_out, module)

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
        if (epochs is None) == (steps is None):
            raise ConfigError(
                f"epochs={epochs} and steps={steps}: give exactly one of them, the length of the "
                "run that the noise is solved for."
            )
        if "noise_multiplier" in options or "group_noise_multipliers" in options:
            raise ConfigError(
                "make_private_with_epsilon solves for the noise: leave the noise multiplier out, "
                "or call make_private."
            )
        batch_size = check_loader(data_loader)
        size = len(data_loader.dataset) if dataset_size is None else dataset_size  # type: ignore[arg-type]
        sampling_rate(size, batch_size)  # refuses bad sizes before they are divided
        if steps is None:
            steps = check_count("epochs", epochs) * lots_per_epoch(size, batch_size)
        # A schedule is evaluated once: what is calibrated is what runs.
        rate = sampling_rate(size, batch_size, sample_rate, check_count("steps", steps))
        chosen = resolve(method).tabulated(steps)
        form = options.get("clipping")
        form = chosen.clipping if form is None else form
        charges = planned_charges(
            chosen,
            form,
            partition(module, taken_apart(form)[0]).count,
            size,
            batch_size,
            rate,
            steps,
        )
        if resume is not None and Path(resume).exists():
            noise, earlier = checkpoint.saved_noise(Path(resume)), None
        else:
            self._join(Things.of(module, optimizer, data_loader.dataset), module, optimizer)
            earlier = self._ledger.merged()
            if self._ledger_path is not None and Path(self._ledger_path).exists():
                earlier = read_ledger(Path(self._ledger_path)).events
            noise, _ = accounting.noise_for(
                target_epsilon, target_delta, charges, self.accountant, earlier
            )
        made = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise,
            max_grad_norm=max_grad_norm,
            method=chosen,
            dataset_size=dataset_size,
            sample_rate=rate,
            steps=steps,
            **{"delta": target_delta} | options,
        )
        if earlier is not None and self._ledger.merged() != earlier:
            self.detach()
            raise ConfigError(
                f"the ledger was charged by another run while the noise was solved for: it holds "
                f"{self._ledger.steps} releases now. Call make_private_with_epsilon of a new "
                "engine, and they will be counted."
            )
        return made

    def _join(self, things: Things, module: nn.Module, optimizer: Optimizer) -> None:
        """Choose the ledger, and take the place of engines on the same model or optimizer."""
        file = self._ledger.file
        if file and file.closed:
            self._ledger, self._ledger_path = Ledger(), file.path  # of an engine that has ended
        if self._ledger_path is not None:
            shared = opened_here(Path(self._ledger_path))
            if shared and shared.ledger:
                self._ledger, self._ledger_path = shared.ledger, None
        held = self._ledger
        held.engines += 1  # the last engine that leaves would close its file
        try:
            for trace in things.trained_by():
                trace.make_room(module, optimizer)
        finally:
            held.engines -= 1
        if not self._ledger_given:
            self._ledger = things.ledger_before() or held
        if self._ledger is not held:
            self._inherited = self._ledger.steps

    def keep_ledger(self, path: str | Path, create: bool = True) -> None:
        """Keep the ledger in this file, before the first release; as PrivacyEngine(ledger=...).

        Guarantee: from now on a charge is on the disk before its noise is drawn. What the file
        already holds, of this run or of others on the same data, composes.
        """
        self._open_ledger(Path(path), self._attached(), create)

    def _open_ledger(self, path: Path, run: Run, create: bool = True) -> None:
        file = LedgerFile(path, create)
        try:
            account = self._account(file, run)
            self._ledger.keep_in(file)
        except BaseException:
            file.close()
            raise
        run.door.account = account

    def close(self) -> None:
        """Give back what is reserved on the ledger file and not used, and let others have it."""
        if self._ledger.file:
            self._ledger.file.close()

    def _account(self, file: LedgerFile, run: Run) -> Account:
        """The account of this run on a ledger file, which must be about the same data."""
        data = {key: self._facts[key] for key in ("name", "records")}
        common_data([*(r.about for r in file.content.runs.values()), {"data": data}])
        about = {
            "data": data,
            "method": run.plan.method,
            "steps": run.plan.steps,
            "adjacency": run.plan.adjacency,
            "test_mode": run.repeatable,
        }
        # A crash charges the open block: at most a fiftieth of the plan.
        block = min(64, max(1, (run.plan.steps or 800) // 50))
        return file.account(
            run.door.run,
            about,
            block,
            lambda lots: coming_events(run, min(lots, lots_left(run))),
            run.door.session,
        )

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
        return accounting.epsilon(self._ledger.merged(), delta, name)

    def diagnostics(self) -> dict[str, Any]:
        """The last step's numbers about the memory, as lists with one entry per group.

        Empty before the first step; "step" alone for a method without memory. docs/methods says
        what each name means.

        Guarantee: functions of releases, weights and public settings; publishing them costs
        nothing.
        """
        run = self._attached()
        if run.memory:
            return run.memory.diagnostics()
        return {"step": run.door.steps - 1} if run.door.steps else {}

    def averaged_state_dict(self) -> dict[str, Any]:
        """The model's state_dict with the averaged parameters in place of the last ones.

        Guarantee: post-processing; as private as the model itself.
        """
        run = self._attached()
        averaging = run.parts.averaging
        if averaging is None or averaging.count == 0:
            raise ConfigError(
                "there is no average of the weights yet: pass averaging='ema' (or 'uniform-tail', "
                "'fractional') to make_private, and take a step."
            )
        run.check_state()
        module, means = run.capture.module, averaging.means()
        # By identity: a tied parameter has several names.
        named = module.named_parameters(remove_duplicate=False)
        averaged = {name: means[id(p)] for name, p in named if id(p) in means}
        return {**module.state_dict(), **averaged}

    @property
    def released(self) -> int:
        """The number of releases so far."""
        return self._run.door.steps if self._run else 0

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
        return self._ledger.steps - self.charged

    @property
    def adjacency(self) -> str:
        """What neighbouring data are, for everything on the ledger together."""
        run = self._attached()
        return together([run.door.facts, self._ledger.facts()]).adjacency

    @property
    def plan(self) -> PrivacyPlan:
        """The public facts of the run."""
        return self._attached().plan

    @property
    def door(self) -> Door:
        """Where releases come from; its `observers` are told of everything that goes through."""
        return self._attached().door

    @property
    def ledger(self) -> Ledger:
        """What was charged, in order."""
        return self._ledger

    def caveats(self) -> list[str]:
        """What the reader of epsilon must know, in sentences: none for a plain run."""
        run = self._attached()
        found = []
        if not run.plan.private:
            found.append(f"no guarantee: {METHODS[run.plan.method].guarantee}")
        if run.repeatable:
            found.append(REPEATABLE)
        if self._ledger.facts(but=run.door.run).test_mode:
            found.append(REPEATABLE_BEFORE)
        multipliers = run.plan.noise_multiplier
        if 0 in (multipliers if isinstance(multipliers, tuple) else (multipliers,)):
            found.append("no noise: nothing is private, epsilon is infinite")
        if self.adjacency != ADJACENCY:
            found.append(f"epsilon holds for another adjacency: {self.adjacency}")
        if run.plan.count_noise == 0:
            found.append("no noise on the counts: nothing is private, epsilon is infinite")
        if run.capture.tracker.shared:  # not their shapes, which may follow the records
            found.append(
                "the model is given tensors without the batch's rows: they are taken for public"
            )
        if run.unchecked is not None:
            found.append(f"that examples do not mix was not checked: {run.unchecked}")
        if not run.plan.size_declared:
            found.append(
                f"the number of records, {run.plan.dataset_size}, is treated as public (it was not "
                "declared as dataset_size=...)"
            )
        return found + run.losses.caveats + self._lineage(run)

    def _lineage(self, run: Run) -> list[str]:
        """What epsilon contains of other engines' releases, and what it leaves out."""
        found = []
        if self._inherited:
            found.append(
                "this model or its optimizer was trained before by another engine of this process: "
                f"the {self._inherited} releases on its ledger are part of epsilon"
                + ("" if self._ledger.file else " (they are on no file that knows of this run)")
            )
        if run.gap:
            found.append(
                "the run went on from a saved state without a ledger file: what was released after "
                "that state was saved is part of epsilon only as far as this process knows of it "
                "(keep a file, PrivacyEngine(ledger=FILE))"
            )
        assert self._things is not None
        return found + self._things.left_out_of(self._ledger)

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
        saving.load_state(self._attached(), state)

    def save_checkpoint(self, path: str | Path, **others: Any) -> None:
        """Save everything that this run needs to go on, between two lots, in place of `path`.

        `others` are objects with a state_dict, such as a learning-rate scheduler, or plain values;
        `load_checkpoint` gives them back.

        Guarantee: what `path` holds is public: weights, releases and the ledger, no example. Keep
        PATH.*.secret, with the state of torch's generators, to yourself.
        """
        saving.save(Path(path), self._attached(), self._facts, self._noise_seed_used, others)

    def load_checkpoint(self, path: str | Path, **others: Any) -> dict[str, Any]:
        """Go on from a checkpoint: after make_private with the same settings, before any step.

        Objects in `others` get their state back; the saved plain values are returned. Refuses
        another model, method, optimizer or data set, naming the difference, and changes nothing
        then.

        Guarantee: that of `load_state_dict`.
        """
        return saving.load(Path(path), self._attached(), self._facts, others)

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigError("call make_private or make_private_with_epsilon first.")
        return self._run


def _settings(method: Method, denoiser: str | Method | None) -> dict[str, Any]:
    """The method's settings, and those of a denoiser after it."""
    if denoiser is None:
        return method.settings()
    after = resolve(denoiser)
    return method.settings() | {"denoiser": {"name": after.name, **after.settings()}}
