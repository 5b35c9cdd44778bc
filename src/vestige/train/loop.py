"""One run of the command line, from the private engine to the written result.

The folder gets config.json, ledger.jsonl and a first checkpoint before the first lot is drawn, a
line of metrics and a checkpoint at every epoch, and model.pt, statement.md, statement.json and
result.json at the end, when the checkpoint goes. A process that is killed leaves a folder that
`training.resume` continues.

Guarantee: what the folder holds is a function of the releases, of public settings and of the
held-out split, apart from the secrets beside the checkpoint. Realised lot sizes, the times that
follow them and per-example numbers are never written, and the training loss only on request, under
a name that says that it is outside the guarantee.
"""

from __future__ import annotations

import contextlib
import io
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vestige
from vestige.checks import finite
from vestige.engine.ending import ending, stopped
from vestige.engine.forecast import events_ahead, lots_until
from vestige.errors import BudgetExhausted, ConfigError
from vestige.methods import resolve
from vestige.privacy import accounting
from vestige.privacy.accounting import computed_every, epsilon_on_the_way
from vestige.privacy.ending import AS_PLANNED
from vestige.statement.model import RunFacts
from vestige.train.config import TrainConfig
from vestige.train.interrupts import Interrupt
from vestige.train.run_folder import LEDGER, RunFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vestige.engine.privacy_engine import PrivacyEngine
    from vestige.train.data import Dataset

HELD_OUT = "the held-out split, whose records the guarantee does not cover"
CHECKPOINT = "checkpoint.pt"

# How many rows go through a model at once: memory must not grow with the lot.
_ROWS = {"linear": 4096, "mlp": 4096, "cnn": 1024, "resnet18": 128}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: told to `train`'s callback at every stage, lot and epoch.

    `metrics` is the line of metrics.jsonl that was just written, at the end of an epoch only, and
    `folder` the one that it was written to.
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
    """One run, from the private engine to the written result."""

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
        self.device, self.prepared, self.steps = device, prepared, prepared.steps
        self.train_data = dataset.x_train.to(device), dataset.y_train.to(device)
        self.test_data = dataset.x_test.to(device), dataset.y_test.to(device)
        self.optimizer = make_optimizer(model.parameters(), lr=config.chosen_lr)
        self.engine: PrivacyEngine = PrivacyEngine(
            config.accountant, seed=config.seed, noise_seed=config.noise_seed
        )
        _, _, self.loader = self.engine.make_private(
            module=model,
            optimizer=self.optimizer,
            data_loader=DataLoader(TensorDataset(*self.train_data), batch_size=config.chosen_lot),
            **_noise_form(config, prepared.noise, prepared.groups),
            clipping=config.chosen_clipping,
            method=resolve(config.method, config.settings),
            max_physical_batch_size=_physical_rows(config),
            steps=self.steps,
            averaging=config.averaging,
            history_dtype=getattr(torch, config.history_dtype) if config.history_dtype else None,
            max_epsilon=config.max_epsilon,
            delta=config.delta,
            data_name=Path(config.dataset).name,
        )
        self.lines: list[dict[str, Any]] = []
        self.noted: dict[str, Any] = {}  # diagnostics of the epoch under way, by name
        self.seconds = 0.0  # of training; follows the sizes of lots, so it is never written
        self.resumed = False
        self.budget_spent = False

    def run(
        self, tell: Callable[[Progress], None], folder: RunFolder | None = None
    ) -> dict[str, Any]:
        """Train, write every file into a fresh run folder or `folder`, and return the result."""
        repeatable = _deterministic(self.config.noise_seed is not None)
        parts = (Path(self.config.dataset).stem, self.config.chosen_model, self.config.method)
        place = RunFolder(self.config.out, "-".join(parts)) if folder is None else folder
        with Interrupt() as interrupt, repeatable, place as folder:
            try:
                if folder.durable and not self.resumed:
                    self._begin(folder)
                self._train(tell, interrupt, folder)
                return self._finish(folder)
            finally:
                folder.keep = folder.keep or bool(self.engine.charged)
                self.engine.close()

    def _begin(self, folder: RunFolder) -> None:
        """Have on the disk what a resume needs, before the first lot."""
        self.engine.keep_ledger(self.config.ledger or folder.own(LEDGER))
        if self.engine.earlier != self.prepared.earlier:
            raise ConfigError(
                f"the ledger {str(self.config.ledger)!r} was charged by another run while this one "
                "was prepared: start it again, and what was spent will be counted."
            )
        folder.write_json("config.json", self._public_config())
        self._save(folder)

    def restore(self, folder: Path, ledger: Path) -> None:
        """Take up the run in `folder` where its last checkpoint was made."""
        self.engine.keep_ledger(ledger, create=False)
        try:
            saved = self.engine.load_checkpoint(folder / CHECKPOINT)
        except BaseException:
            self.engine.close()
            raise
        self.lines, self.noted = saved["lines"], saved["noted"]
        self.resumed = True

    def _public_config(self) -> dict[str, Any]:
        return self.config.public() | {
            "settings": dict(self.engine.plan.settings),
            "beta": self.engine.plan.beta,
            "noise_multiplier": self.engine.plan.noise_multiplier,
            "planned_steps": self.steps,
            "planned_epsilon": finite(self.prepared.planned),
            "optimizer": type(self.optimizer).__name__,
            "device": self.device,
            "versions": versions(),
        }

    def _train(
        self, tell: Callable[[Progress], None], interrupt: Interrupt, folder: RunFolder
    ) -> None:
        engine, per_epoch = self.engine, self.engine.plan.lots_per_epoch
        every = self.config.checkpoint_every or per_epoch
        epochs = -(-self.steps // per_epoch)
        tell(Progress("training", engine.released, self.steps, epochs))
        while engine.released < self.steps and not interrupt.pending and not self.budget_spent:
            before, started = self.seconds, time.perf_counter()
            for _ in self._epoch():
                folder.keep = True
                tell(Progress("training", engine.released, self.steps, epochs))
                self._note(engine.diagnostics())
                self.seconds = before + time.perf_counter() - started
                at_end = engine.released % per_epoch == 0 or engine.released == self.steps
                if not at_end and (interrupt.pending or engine.released % every == 0):
                    self._save(folder)  # before the line of an epoch that was cut short
                if at_end or interrupt.pending:
                    break
            if self.lines and self.lines[-1]["step"] == engine.released:
                continue  # the budget was spent at the end of an epoch
            self.lines.append(self._measure())
            folder.write_lines("metrics.jsonl", self.lines)
            if engine.released % per_epoch == 0 and (
                engine.released % every == 0 or interrupt.pending
            ):
                self._save(folder)
            line = self.lines[-1]
            tell(Progress("training", engine.released, self.steps, epochs, line, folder.path))

    def _epoch(self) -> Iterator[None]:
        """One pass over the loader; comes back after every release."""
        from torch.nn.functional import cross_entropy

        engine = self.engine
        try:
            for x, y in self.loader:
                before = engine.released

                def closure(x: Tensor = x, y: Tensor = y) -> None:
                    self.optimizer.zero_grad()
                    engine.backward(cross_entropy(self.model(x), y, reduction="none"))

                self.optimizer.step(closure)  # type: ignore[arg-type]
                if engine.released > before:  # else the rest of this lot is still to come
                    yield
        except BudgetExhausted:
            self.budget_spent = True

    def _finish(self, folder: RunFolder) -> dict[str, Any]:
        """Write what a run leaves behind; the checkpoint of one that is over goes."""
        from vestige.engine import checkpoint

        folder.write("model.pt", self._weights())
        if self.config.averaging and self.engine.released:
            with self._averaged():
                folder.write("model_averaged.pt", self._weights())
        over = self.engine.released == self.steps or self.budget_spent
        result = self._result(str(folder.path), interrupted=not over)
        if folder.durable:
            self._state(folder, result)
        folder.write_json("result.json", result)
        if over and folder.durable:
            checkpoint.remove(folder.path / CHECKPOINT)
        return result

    def _state(self, folder: RunFolder, result: Mapping[str, Any]) -> None:
        """Write the privacy statement."""
        from vestige import statement

        stated = self.engine.statement(
            self.config.delta, caveats=self._caveats(), **self._facts(result)
        )
        folder.write_json(statement.JSON_FILE, stated)
        folder.write(statement.MARKDOWN_FILE, statement.markdown(stated).encode())

    def _facts(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The public facts of the run that its statement names."""
        facts = {name: result[name] for name in RunFacts.model_fields if name in result} | {
            "classes": self.dataset.classes,
            "classes_inferred": self.dataset.classes_inferred,
            "planned_epsilon": finite(self.prepared.planned),
            "held_out": ["test_loss", "test_accuracy"],
            "outside_guarantee": ["train_loss_outside_guarantee"] if self.config.train_loss else [],
        }
        return facts | ({"stopped_by": "budget guard"} if self.budget_spent else {})

    def _save(self, folder: RunFolder) -> None:
        if folder.durable:
            self.engine.save_checkpoint(
                folder.own(CHECKPOINT),
                config=self.config.saved(),
                prepared={
                    "steps": self.steps,
                    "noise": self.prepared.noise,
                    "planned": self.prepared.planned,
                    "groups": list(self.prepared.groups),
                    "earlier": self.prepared.earlier,
                },
                ending=stopped(self.engine._attached()).state(),
                lines=self.lines,
                noted=self.noted,
            )

    def _measure(self) -> dict[str, Any]:
        """A line of metrics.jsonl, from the weights and the held-out split."""
        loss, accuracy = self._evaluate(*self.test_data)
        line: dict[str, Any] = {
            "step": self.engine.released,
            "epoch": -(-self.engine.released // self.engine.plan.lots_per_epoch),
            "epsilon": finite(self._live_epsilon()),
            "test_loss": finite(loss),
            "test_accuracy": accuracy,
        }
        if self.config.averaging and self.engine.released:
            with self._averaged():
                loss, accuracy = self._evaluate(*self.test_data)
            line |= {"averaged_test_loss": finite(loss), "averaged_test_accuracy": accuracy}
        if self.noted:
            line["diagnostics"], self.noted = self.noted, {}
        if self.config.train_loss:
            line["train_loss_outside_guarantee"] = finite(self._evaluate(*self.train_data)[0])
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

    def _evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy."""
        import torch
        from torch.nn.functional import cross_entropy

        rows = _ROWS[self.config.chosen_model]
        loss, right = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for part, labels in zip(x.split(rows), y.split(rows), strict=True):
                scores = self.model(part)
                loss += float(cross_entropy(scores, labels, reduction="sum"))
                right += int((scores.argmax(1) == labels).sum())
        self.model.train()
        return loss / len(y), right / len(y)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """While entered, the model has its averaged weights."""
        last = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.engine.averaged_state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(last)

    def _weights(self) -> bytes:
        import torch

        # Copies on the CPU: the file then loads on any machine and holds the weights alone.
        state = {k: v.detach().to("cpu", copy=True) for k, v in self.model.state_dict().items()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def _result(self, folder: str, interrupted: bool) -> dict[str, Any]:
        plan, last = self.engine.plan, self.lines[-1] if self.lines else self._measure()
        end, spent = ending(self.engine._attached()), self.engine.ledger.merged()
        epsilon = end.epsilon(spent, self.config.delta, self.engine.accountant)
        said = end.text(self.engine.released, self.steps)
        result = {
            "method": plan.method,
            "settings": dict(plan.settings),
            "beta": plan.beta,
            "dataset": self.config.dataset,
            "model": self.config.chosen_model,
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "measured_on": HELD_OUT,
            "epsilon": finite(epsilon),
            "delta": self.config.delta,
            "target_epsilon": self.config.epsilon,
            "accountant": self.engine.accountant,
            "guarantee": accounting.guarantee(epsilon, self.engine.adjacency),
            "adjacency": self.engine.adjacency,
            "noise_multiplier": plan.noise_multiplier,
            "sample_rate": plan.sample_rate,
            "lot": plan.batch_size,
            "records": plan.dataset_size,
            "steps": self.engine.released,
            "epochs": self.engine.released / plan.lots_per_epoch,
            "clip": self.config.public()["clip"],
            "clipping": plan.clipping,
            "optimizer": type(self.optimizer).__name__,
            "lr": self.config.chosen_lr,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seed": self.config.seed,
            "repeatable_noise": self.config.noise_seed is not None,
            "interrupted": interrupted,
            "max_epsilon": self.config.max_epsilon,
            "budget_spent": self.budget_spent,
            "lost_releases": self.engine.lost,
            "earlier_releases": self.engine.earlier,
            "caveats": self._caveats() + ([said] if end.kind != AS_PLANNED else []),
            "device": self.device,
            "folder": folder,
            "versions": versions(),
        }
        if "averaged_test_accuracy" in last:
            result["averaged_accuracy"] = last["averaged_test_accuracy"]
            result["averaged_loss"] = last["averaged_test_loss"]
        if self.config.train_loss:
            key = "train_loss_outside_guarantee"
            result[key] = last[key]
        return result

    def _caveats(self) -> list[str]:
        caveats = self.engine.caveats()
        if self.dataset.classes_inferred:
            caveats.append(
                f"the number of classes, {self.dataset.classes}, was read off the labels and is "
                "treated as public (state it by an entry classes in the .npz)"
            )
        if self.config.delta * len(self.dataset.x_train) > 1:
            caveats.append(
                f"delta {self.config.delta:g} is above 1 / records: it allows a whole record to "
                "be published; choose one well below"
            )
        if self.config.train_loss:
            caveats.append("the training loss is outside the guarantee: do not publish it")
        return caveats


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Convolutions on a GPU add in an order of their own each time, unless they are told not to."""
    import torch

    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = before or wanted
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _noise_form(config: TrainConfig, noise: float, groups: tuple[str, ...]) -> dict[str, Any]:
    """Noise and clip as the engine takes them: jointly, or the papers' sigma_g C_g by group."""
    if config.group_noise_multiplier is None:
        return {"noise_multiplier": noise, "max_grad_norm": config.clip}
    whole = config.clip if isinstance(config.clip, tuple) else (config.clip,) * len(groups)
    own = (config.group_noise_multiplier,) * len(groups)
    return {"group_noise_multipliers": own, "max_grad_norm": whole}


def _physical_rows(config: TrainConfig) -> int | None:
    """The rows that a model runs on at once; None where a method needs the lot in one piece."""
    looks = resolve(config.method, config.settings).looks
    return _ROWS[config.chosen_model] if looks == 1 else None


def versions() -> dict[str, str]:
    """The versions of what the numbers of a run depend on."""
    packages = ("torch", "numpy", "dp-accounting")
    return {
        "vestige": vestige.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }
