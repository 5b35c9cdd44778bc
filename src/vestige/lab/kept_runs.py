"""The folder of a comparison: what was asked for, and a run folder for each of its runs.

The same command goes on where an earlier one was stopped: finished runs are read, one that was cut
short is resumed from its checkpoint, and the others are begun.

Guarantee: every run is charged on the study's ledger before its noise is drawn. A run that is read
again costs nothing more, and one that is resumed stays charged for what it lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.privacy.ledger import Event
from vestige.statement import read
from vestige.train import training
from vestige.train.checks import check_out
from vestige.train.config import TrainConfig
from vestige.train.run_folder import CHECKPOINT, LEDGER, RESULT, RunWriter
from vestige.train.training import Progress

if TYPE_CHECKING:
    import torch

    from vestige.train.data import Dataset

STUDY, RUNS = "study.json", "runs"


def run_in(
    home: Path,
    config: TrainConfig,
    dataset: Dataset,
    tell: Callable[[Progress], None],
    *,
    ledger: Path | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """The result of the run in `home`, which is begun, gone on with or read, as it is there."""
    if (home / RESULT).exists() or (home / CHECKPOINT).exists():
        model = config.chosen_model
        return training.resume(
            home, optimizer=optimizer, progress=tell, ledger=ledger, model=model, dataset=dataset
        )
    session = training.prepare(config.changed(out=home), optimizer=optimizer, dataset=dataset)
    return RunWriter(session, ledger=ledger).run(tell)


class KeptRuns:
    """The runs of a study in a folder; `asked` is what the study was asked for, as JSON types.

    ConfigError where the folder holds another study, or something else.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], ledger: Path | None) -> None:
        self._folder, self.ledger = folder, ledger or folder / LEDGER
        named = None if ledger is None else str(ledger.absolute())
        wanted = json.loads(json.dumps({**asked, "ledger": named}))
        if (folder / STUDY).is_file():
            self._check(wanted)
            return
        check_out(folder, fresh=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / STUDY, f"{json.dumps(wanted, indent=2)}\n")

    def _check(self, wanted: Mapping[str, Any]) -> None:
        try:
            kept = json.loads((self._folder / STUDY).read_bytes())
            other = [name for name in wanted if kept.get(name) != wanted[name]]
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self._folder / STUDY} is damaged ({type(error).__name__}): give another out."
            ) from error
        if other:
            name = other[0]
            raise ConfigError(
                f"out {str(self._folder)!r} holds another study: its {name} is {kept.get(name)!r} "
                f"and not {wanted[name]!r}; give the same options to go on, or another folder."
            )

    def run(
        self,
        name: str,
        config: TrainConfig,
        dataset: Dataset,
        tell: Callable[[Progress], None],
    ) -> tuple[dict[str, Any], list[Event]]:
        """The result of the run of that name, and what it is charged for: made, or planned."""
        home = self._folder / RUNS / name
        result = run_in(home, config, dataset, tell, ledger=self.ledger)
        charged = read(home)["ledger"]
        events = [
            Event(event["sample_rate"], float(event["noise_multiplier"]), event["count"])
            for event in (*charged["events"], *charged["unmade"])
        ]
        return result | {"folder": f"{RUNS}/{name}"}, events
