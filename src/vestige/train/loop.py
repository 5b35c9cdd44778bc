"""One run, from the private engine to its metrics. It writes nothing: train/run_folder.py does.

`Session.lots` trains and hands out a `Progress` after every release, and one with a line of metrics
at the end of every epoch.

Guarantee: what a session hands out is a function of the releases, of public settings and of the
held-out split. Realised lot sizes, the times that follow them and per-example numbers are never
handed out, and the training loss only on request, under a name that says that it is outside the
guarantee.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige import methods
from vestige.checks import finite
from vestige.engine.caveats import SIZE
from vestige.engine.ending import ending
from vestige.engine.forecast import events_ahead, lots_until
from vestige.errors import BudgetExhausted
from vestige.privacy import accounting
from vestige.privacy.accounting import computed_every, epsilon_on_the_way
from vestige.privacy.ending import AS_PLANNED
from vestige.statement import claim
from vestige.statement.words import sentence
from vestige.train.checks import PRIOR
from vestige.train.config import TrainConfig
from vestige.train.engine_options import noise_form, physical_rows, rows_at_once, unit
from vestige.train.interrupt import Interrupt

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vestige.engine.privacy_engine import PrivacyEngine
    from vestige.train.data import Dataset

HELD_OUT = "the held-out split, whose records the guarantee does not cover"
OWN_HELD_OUT = (
    "the held-out split of your own data: exact figures, which the guarantee does not cover and "
    "which are not for publication (--evaluate-epsilon releases one with noise)"
)

# The settings that a result repeats.
_REPEATED = "dataset model delta target_epsilon clip lr seed repeatable_noise max_epsilon".split()


@dataclass(frozen=True)
class Progress:
    """Where a run stands: told to `train`'s callback at every stage, lot and epoch.

    `metrics` is a line of metrics.jsonl, at the end of an epoch only, and `folder` the one that it
    was written to, where it was.
    """

    stage: str
    step: int = 0
    steps: int = 0
    epochs: int = 0
    metrics: Mapping[str, Any] | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """What is known before the first lot: how long the run is, its noise, and where it may end."""

    steps: int
    noise: float
    planned: float  # epsilon at the end of the plan, with everything else on the ledger
    groups: tuple[str, ...]
    earlier: int = 0  # releases of other runs on the ledger, which the noise was solved with


class Session:
    """One run, from the private engine to its result."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        model: nn.Module,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        device: str,
        prepared: Prepared,
    ) -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from vestige.engine.privacy_engine import PrivacyEngine

        self.config, self.dataset, self.model = config, dataset, model
        self.date = date.today().isoformat()  # before the first lot: later times follow lot sizes
        self.device, self.prepared, self.steps = device, prepared, prepared.steps
        x_train, x_test = dataset.features or (dataset.x_train, dataset.x_test)
        self.train_data = x_train.to(device), dataset.y_train.to(device)
        self.test_data = x_test.to(device), dataset.y_test.to(device)
        self.optimizer = make_optimizer(model.parameters(), lr=config.chosen_lr)
        self.engine: PrivacyEngine = PrivacyEngine(
            config.accountant, seed=config.seed, noise_seed=config.noise_seed
        )
        _, _, self.loader = self.engine.make_private(
            module=model,
            optimizer=self.optimizer,
            data_loader=DataLoader(TensorDataset(*self.train_data), batch_size=config.chosen_lot),
            **noise_form(config, prepared.noise, prepared.groups, dataset),
            clipping=config.chosen_clipping,
            method=methods.resolve(config.method, config.settings),
            max_physical_batch_size=physical_rows(config),
            steps=self.steps,
            averaging=config.averaging,
            history_dtype=getattr(torch, config.history_dtype) if config.history_dtype else None,
            history_device=config.history_device,
            max_epsilon=config.max_epsilon,
            delta=config.delta,
            data_name=Path(config.dataset).name,
            dataset_size=config.dataset_size,
            compile=config.compile,
            **unit(config, dataset),
        )
        self.lines: list[dict[str, Any]] = []
        self.noted: dict[str, Any] = {}  # diagnostics of the epoch under way, by name
        self.seconds = 0.0  # of training; follows the sizes of lots, so it is never written
        self.budget_spent = False

    @property
    def per_epoch(self) -> int:
        """The number of lots in an epoch."""
        return self.engine.plan.lots_per_epoch

    def run(self, tell: Callable[[Progress], None]) -> dict[str, Any]:
        """Train to the end or to the first Ctrl-C, and return the result; nothing is written."""
        with Interrupt() as interrupt, self.settled():
            for progress in self.lots(lambda: interrupt.pending):
                tell(progress)
            return self.result()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """While entered, convolutions repeat in test mode; the engine is closed at the end."""
        import torch

        # On a GPU they add in an order of their own each time, unless they are told not to.
        before = torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = before or self.config.noise_seed is not None
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = before
            self.engine.close()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.engine.released == self.steps or self.budget_spent

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last release ended an epoch, or the run."""
        return self.engine.released % self.per_epoch == 0 or self.engine.released == self.steps

    def lots(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Train; comes back after every release, and with a line of metrics after every epoch.

        Where `stop` answers yes, the lot at hand is the last one, and its metrics come at once.
        """
        engine = self.engine
        yield self._progress()
        while not (self.over or stop()):
            started = time.perf_counter()
            for _ in self._epoch():
                self._note(engine.diagnostics())
                self.seconds += time.perf_counter() - started
                yield self._progress()
                started = time.perf_counter()
                if self.at_epoch_end or stop():
                    break
            if not self.lines or self.lines[-1]["step"] != engine.released:
                # Otherwise the budget was spent at the end of an epoch.
                self.lines.append(self._measure())
                yield self._progress(self.lines[-1])

    def _progress(self, metrics: Mapping[str, Any] | None = None) -> Progress:
        epochs = -(-self.steps // self.per_epoch)
        return Progress("training", self.engine.released, self.steps, epochs, metrics)

    def _epoch(self) -> Iterator[None]:
        """One pass over the loader; comes back after every release."""
        from vestige.train.recipes.least_squares import losses_of

        engine, losses = self.engine, losses_of(self.model)
        try:
            for x, y in self.loader:
                before = engine.released

                def closure(x: Tensor = x, y: Tensor = y) -> None:
                    self.optimizer.zero_grad()
                    with self._precision():
                        scores = self.model(x)
                    engine.backward(losses(self.dataset, scores.float(), y))

                self.optimizer.step(closure)  # type: ignore[arg-type]
                if engine.released > before:  # else the rest of this lot is still to come
                    yield
        except BudgetExhausted:
            self.budget_spent = True

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to bfloat16 where the run asks for it. Figures are of the model as it is."""
        import torch

        asked = self.config.precision == "bfloat16"
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16) if asked else contextlib.nullcontext()

    def _measure(self) -> dict[str, Any]:
        """A line of metrics.jsonl, from the weights and the held-out split."""
        line: dict[str, Any] = {
            "step": self.engine.released,
            "epoch": -(-self.engine.released // self.per_epoch),
            "epsilon": finite(self._live_epsilon()),
            **self._figures("test_"),
        }
        if self.config.averaging and self.engine.released:
            with self.averaged():
                line |= self._figures("averaged_test_")
        if self.noted:
            line["diagnostics"], self.noted = self.noted, {}
        if self.config.train_loss:
            loss, _ = self._evaluate(*self.train_data)
            line["train_loss_outside_guarantee"] = finite(loss)
        return line

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Add a step's numbers about the memory to the arrays of this epoch."""
        if "groups" in facts:  # a method without memory has nothing to tell
            self.noted.setdefault("groups", facts["groups"])
            for name, value in facts.items():
                if name != "groups":
                    self.noted.setdefault(name, []).append(value)

    def _live_epsilon(self) -> float:
        """Epsilon by the run's own accountant, from a bounded number of compositions.

        Up to about thirty epochs have one each. In longer runs several share that of the last of
        them, which is an upper bound for all.
        """
        run, per_epoch = self.engine._attached(), self.engine.plan.lots_per_epoch
        spent = self.engine.ledger.merged()
        left = events_ahead(run, lots_until(run, self.steps))
        every = per_epoch * computed_every(-(-self.steps // per_epoch), [*spent, *left])
        lots = lots_until(run, min(-(-run.door.steps // every) * every, self.steps))
        if run.guard:
            lots = run.guard.affordable(lots)
        point = [*spent, *events_ahead(run, lots)]
        return epsilon_on_the_way(spent, point, self.config.delta, self.engine.accountant)

    def _figures(self, prefix: str) -> dict[str, Any]:
        """Loss and accuracy on the held-out split; for regression the error beside it."""
        from vestige.train.tasks import from_hits

        loss, share = self._evaluate(*self.test_data)
        named = {"loss": loss, "accuracy": None} | from_hits(self.dataset, share)
        return {f"{prefix}{n}": v if v is None else finite(v) for n, v in named.items()}

    def held_out_scores(self) -> Tensor:
        """The scores of the held-out split."""
        from vestige.train.tasks import scores_of

        return scores_of(self.model, self.test_data[0], rows_at_once(self.config))

    def _evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss, and how right the predictions are."""
        from vestige.train.tasks import evaluated

        return evaluated(self.dataset, self.model, (x, y), rows_at_once(self.config))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While entered, the model has its averaged weights."""
        last = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.engine.averaged_state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(last)

    def result(self, folder: str = "") -> dict[str, Any]:
        """What the run came to, as result.json has it."""
        from vestige.train.metrics import measured

        plan, last = self.engine.plan, self.lines[-1] if self.lines else self._measure()
        end, spent = ending(self.engine._attached()), self.engine.ledger.merged()
        epsilon = end.epsilon(spent, self.config.delta, self.engine.accountant)
        said = sentence("ended", end, released=self.engine.released, planned=self.steps)
        public = self.config.public()
        result = {name: public[name] for name in _REPEATED} | {
            "method": plan.method,
            "settings": dict(plan.settings),
            "beta": plan.beta,
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "task": self.dataset.task,
            "metrics": measured(self.dataset, self.held_out_scores()),
            "measured_on": OWN_HELD_OUT if self.dataset.own else HELD_OUT,
            "epsilon": finite(epsilon),
            "accountant": self.engine.accountant,
            "guarantee": accounting.guarantee(epsilon, self.engine.adjacency),
            "adjacency": self.engine.adjacency,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sample_rate,
            "lot": plan.batch_size,
            "records": plan.dataset_size,
            "steps": self.engine.released,
            "epochs": self.engine.released / plan.lots_per_epoch,
            "clipping": plan.clipping,
            "optimizer": type(self.optimizer).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "interrupted": not self.over,
            "budget_spent": self.budget_spent,
            "lost_releases": self.engine.lost,
            "earlier_releases": self.engine.earlier,
            "caveats": self.caveats() + ([said] if end.kind != AS_PLANNED else []),
            "device": self.device,
            "folder": folder,
            "versions": versions(),
        }
        more = {
            "averaged_accuracy": "averaged_test_accuracy",
            "averaged_loss": "averaged_test_loss",
            "train_loss_outside_guarantee": "train_loss_outside_guarantee",
        }
        return result | {name: last[line] for name, line in more.items() if line in last}

    def caveats(self) -> list[str]:
        """What a reader of the result must know."""
        # Of a command the option, of a loop the argument.
        caveats = [said.replace(SIZE, "--dataset-size") for said in self.engine.caveats()]
        if self.dataset.classes_inferred:
            caveats.append(
                f"the number of classes, {self.dataset.classes}, was read off the labels and is "
                "treated as public (state it by an entry classes in the .npz)"
            )
        if self.config.delta * self.engine.plan.dataset_size > 1:
            caveats.append(
                f"delta {self.config.delta:g} is above 1 / records: it allows a whole record to "
                "be published; choose one well below"
            )
        if self.config.features and ":" in self.config.features:
            caveats.append(
                f"the features are those of {self.config.features}, frozen: that this module has "
                "not learned from these records is taken on trust"
            )
        if self.config.features == PRIOR or self.config.weights is not None:
            caveats.append(
                "the model begins with a file of weights: that vestige prior has made it, from no "
                "data, is taken on trust"
            )
        if self.config.train_loss:
            caveats.append("the training loss is outside the guarantee: do not publish it")
        return caveats


def versions() -> dict[str, str]:
    """The versions of what the numbers of a run depend on."""
    return claim.versions(("torch", "numpy", "dp-accounting"))
