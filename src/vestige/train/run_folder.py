"""The folder of a run: where it is, what is written into it and when, and taking it up again.

The folder gets config.json, ledger.jsonl and a first checkpoint before the first lot is drawn, a
line of metrics and a checkpoint at every epoch, and model.pt, statement.md, statement.json and
result.json at the end, when the checkpoint goes. A process that is killed leaves a folder that
`training.resume` continues. Files appear whole or not at all.

Guarantee: that of train/loop.py; the secrets beside the checkpoint are all else that is written.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.checks import finite
from vestige.engine.ending import stopped
from vestige.errors import ConfigError, StorageError
from vestige.files import write_whole
from vestige.statement.model import RunFacts
from vestige.train.checks import check_out
from vestige.train.interrupt import Interrupt
from vestige.train.loop import Progress, Session, versions

if TYPE_CHECKING:
    from torch import Tensor, nn

LEDGER, CHECKPOINT = "ledger.jsonl", "checkpoint.pt"
METRICS, CONFIG, RESULT = "metrics.jsonl", "config.json", "result.json"


class RunFolder:
    """The folder of a run. Files appear whole or not at all.

    If the run fails before `keep` was set (at the first release), the folder disappears again.
    """

    def __init__(self, out: Path | None, name: str) -> None:
        self.keep = False
        self._written: list[Path] = []
        safe = re.sub(r"[^\w.-]", "_", name)
        self._default = Path("runs") / f"{safe}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
        self._out = out

    def __enter__(self) -> RunFolder:
        self.path = self._out if self._out is not None else self._default
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            if self._out is not None:
                check_out(self._out, fresh=True)  # it may have filled up in the meantime
                self._out.mkdir(parents=True, exist_ok=True)
            else:
                self._make_default()
        except OSError as error:
            raise ConfigError(
                f"the run folder {str(self.path)!r} cannot be made ({error.strerror}): give "
                "another one as out."
            ) from error
        return self

    def _make_default(self) -> None:
        """Runs that start in the same second get the suffixes -2, -3, ..."""
        number = 1
        while True:
            try:
                self.path.mkdir(parents=True)
                return
            except FileExistsError:
                number += 1
                self.path = self._default.with_name(f"{self._default.name}-{number}")
                self._made = [self.path]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.keep:
            return
        for file in self._written:
            file.unlink(missing_ok=True)
            for secret in self.path.glob(f"*{file.name}.*.secret*"):
                secret.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def own(self, name: str) -> Path:
        """The path of a file of this run that somebody else writes."""
        path = self.path / name
        if path not in self._written:
            self._written.append(path)
        return path

    def write(self, name: str, content: bytes) -> None:
        """A whole file, or, if it fails, none."""
        path = self.path / name
        try:
            write_whole(path, content)
        except OSError as error:
            raise StorageError(
                f"{str(path)!r} cannot be written ({error.strerror}): make room, or make the "
                "folder writable, and resume the run."
            ) from error
        self._written.append(path)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file for people and machines."""
        self.write(name, f"{json.dumps(value, indent=2, allow_nan=False)}\n".encode())

    def write_lines(self, name: str, values: list[dict[str, Any]]) -> None:
        """One JSON object on each line, rewritten as a whole: no line is ever half there."""
        self.write(name, "".join(f"{json.dumps(v, allow_nan=False)}\n" for v in values).encode())


class ExistingFolder(RunFolder):
    """The folder of a run that is resumed: it stays whatever happens."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.name)
        self.path, self.keep = path, True

    def __enter__(self) -> ExistingFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is taken back: what is there was there before."""


def run_ledger(folder: Path, saved: Path | str | None, named: Path | str | None) -> Path:
    """The ledger of the run in `folder`, whose checkpoint has `saved` its path.

    The folder may be somebody else's, so it can name files inside itself and no others: those have
    to be `named` by whoever asks.
    """
    if named is not None:
        return Path(named)
    path = folder / LEDGER if saved is None else Path(saved)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        inside = False
    if not inside:
        raise ConfigError(
            f"the run in {str(folder)!r} has its ledger outside of its folder: if {str(path)!r} is "
            "yours, name it with --ledger (in Python, ledger=...)."
        )
    return path


class RunWriter:
    """Runs a session and has everything on the disk that a reader or a resume needs."""

    def __init__(
        self, session: Session, folder: RunFolder | None = None, ledger: Path | None = None
    ) -> None:
        """`ledger` is a file that the run is charged on beside others, which its noise was not
        solved for; otherwise it is what the configuration says."""
        config = session.config
        self._beside = ledger
        parts = (Path(config.dataset).stem, config.chosen_model, config.method)
        self._folder = folder or RunFolder(config.out, "-".join(parts))
        self._session, self._engine, self._resumed = session, session.engine, False

    def restore(self, ledger: Path, checkpoint: Path) -> None:
        """Take up the run where its last checkpoint was made."""
        self._engine.keep_ledger(ledger, create=False)
        frozen = self._frozen()
        try:
            saved = self._engine.load_checkpoint(checkpoint)
            now = self._frozen().items()
            if not all(frozen[name].allclose(value, 0, 0, equal_nan=True) for name, value in now):
                raise ConfigError(
                    f"the features {self._session.config.features!r} have other weights than when "
                    "the run began: give it those, or start another."
                )
        except BaseException:
            self._engine.close()
            raise
        self._session.lines, self._session.noted = saved["lines"], saved["noted"]
        self._resumed = True

    def _frozen(self) -> dict[str, Tensor]:
        """Copies of the weights of fixed features: the model has them, and the records were seen
        by those at hand."""
        from vestige.train.recipes.features import OnFeatures

        model = self._session.model
        held = model.features.state_dict() if isinstance(model, OnFeatures) else {}
        return {name: value.clone() for name, value in held.items()}

    def run(self, tell: Callable[[Progress], None]) -> dict[str, Any]:
        """Train to the end or to the first Ctrl-C, write every file and return the result."""
        with Interrupt() as interrupt, self._folder as folder, self._session.settled():
            try:
                if not self._resumed:
                    self._begin()
                self._train(tell, interrupt)
                return self._finish()
            finally:
                folder.keep = folder.keep or bool(self._engine.charged)

    def _begin(self) -> None:
        """Have on the disk what a resume needs, before the first lot."""
        session, ledger = self._session, self._session.config.ledger
        self._engine.keep_ledger(self._beside or ledger or self._folder.own(LEDGER))
        if self._beside is None and self._engine.earlier != session.prepared.earlier:
            raise ConfigError(
                f"the ledger {str(ledger)!r} was charged by another run while this one was "
                "prepared: start it again, and what was spent will be counted."
            )
        plan = self._engine.plan
        described = session.config.public() | {
            "settings": dict(plan.settings),
            "beta": plan.beta,
            "noise_multiplier": plan.noise_multiplier,
            "planned_steps": session.steps,
            "planned_epsilon": finite(session.prepared.planned),
            "optimizer": type(session.optimizer).__name__,
            "device": session.device,
            "versions": versions(),
        }
        self._folder.write_json(CONFIG, described)
        self._save()

    def _train(self, tell: Callable[[Progress], None], interrupt: Interrupt) -> None:
        session, engine, before = self._session, self._engine, self._engine.released
        every = session.config.checkpoint_every or session.per_epoch

        def asked() -> bool:  # all ranks stop at the same lot
            return engine.ranks.decided(lambda: interrupt.pending)

        for progress in session.lots(asked):
            if progress.metrics is not None:
                self._folder.write_lines(METRICS, session.lines)
                whole = engine.released % session.per_epoch == 0
                if whole and (engine.released % every == 0 or asked()):
                    self._save()
                tell(replace(progress, folder=self._folder.path))
                continue
            made, before = engine.released > before, engine.released
            self._folder.keep = self._folder.keep or made
            tell(progress)
            due = engine.released % every == 0 or asked()
            if made and due and not session.at_epoch_end:
                self._save()  # before the line of an epoch that was cut short

    def _save(self) -> None:
        session = self._session
        config = session.config.saved()
        if self._beside is not None:
            config["ledger"] = str(self._beside.absolute())  # for whoever resumes the run
        self._engine.save_checkpoint(
            self._folder.own(CHECKPOINT),
            config=config,
            prepared=asdict(session.prepared) | {"groups": list(session.prepared.groups)},
            ending=stopped(self._engine._attached()).state(),
            lines=session.lines,
            noted=session.noted,
        )

    def _finish(self) -> dict[str, Any]:
        """Write what a run leaves behind; the checkpoint of one that is over goes."""
        from vestige import statement
        from vestige.engine import checkpoint
        from vestige.train.saved_model import MODEL_FILE, WEIGHTS_FILE, described, sha256

        session, folder = self._session, self._folder
        weights = weights_of(self._session.model)
        folder.write(WEIGHTS_FILE, weights)
        config = session.config
        facts = described(session.dataset, config.chosen_model, config.features)
        folder.write_json(MODEL_FILE, facts)
        if session.config.averaging and self._engine.released:
            with session.averaged():
                folder.write("model_averaged.pt", weights_of(self._session.model))
        result = session.result(str(folder.path))
        if (epsilon := session.config.evaluate_epsilon) and session.over:
            # Every rank has the weights and the records: one of them releases, for all.
            release = partial(self._released_figure, epsilon)
            result["held_out_release"] = self._engine.ranks.decided(release)
        facts = self._facts(result) | {"weights_sha256": sha256(weights)}
        stated = self._engine.statement(session.config.delta, caveats=session.caveats(), **facts)
        folder.write_json(statement.JSON_FILE, stated)
        folder.write(statement.MARKDOWN_FILE, statement.markdown(stated).encode())
        folder.write_json(RESULT, result)
        if session.over:
            checkpoint.remove(folder.path / CHECKPOINT)
        return result

    def _released_figure(self, epsilon: float) -> dict[str, Any]:
        """The held-out figure with noise, charged to the ledger of the held-out records."""
        from vestige.train.evaluation import ledger_of_held_out, released_share
        from vestige.train.tasks import from_hits, hits

        session, config = self._session, self._session.config
        right = hits(session.dataset, session.held_out_scores(), session.test_data[1])
        ledger = ledger_of_held_out(config.ledger or self._folder.own(LEDGER))
        about = {"name": Path(config.dataset).name, "part": "held-out"}
        found = released_share(right, epsilon, config.delta, ledger, about, config.noise_seed)
        (none,), (whole,) = (from_hits(session.dataset, share).values() for share in (0.0, 1.0))
        found["standard_error"] *= abs(whole - none)  # in the unit of the figure
        return from_hits(session.dataset, found.pop("share")) | found

    def _facts(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The public facts of the run that its statement names."""
        from vestige.train.recipes.least_squares import told

        session = self._session
        facts = {name: result[name] for name in RunFacts.model_fields if name in result} | {
            "classes": session.dataset.classes,
            "classes_inferred": session.dataset.classes_inferred,
            "planned_epsilon": finite(session.prepared.planned),
            "date": session.date,
            "held_out": ["test_loss", "test_accuracy"],
            "outside_guarantee": (
                ["train_loss_outside_guarantee"] if session.config.train_loss else []
            ),
        }
        for name in ("tuning", "features"):
            if getattr(session.config, name):
                facts[name] = getattr(session.config, name)
        if (moments := told(session.model, session.dataset)) is not None:
            facts["released_sum"] = moments
        return facts | ({"stopped_by": "budget guard"} if session.budget_spent else {})


def weights_of(model: nn.Module) -> bytes:
    """What model.pt holds."""
    import torch

    # Copies on the CPU: the file then loads on any machine and holds the weights alone.
    copies = {n: value.detach().to("cpu", copy=True) for n, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(copies, buffer)
    return buffer.getvalue()
