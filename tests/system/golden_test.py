"""What must not change by accident: weights of every method, statements, tables, help texts.

The files lie in tests/golden. After a change that is meant, write them anew and look at the diff:

    python -m tests.system.golden_test
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.small_runs import flat, private, run
from vestige.cli.app import app
from vestige.lab import catalogue, report
from vestige.lab.rows import Rows
from vestige.lab.summary import begun, fitted, rows_of, summarised
from vestige.methods import METHODS
from vestige.train.config import TrainConfig
from vestige.train.training import train

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
RESULTS = ROOT / "results"
LONG = re.compile(r"\b\d+\.\d{3,}\b")
EXPERIMENTS = sorted(path.parent.name for path in RESULTS.glob("*/table.json"))
STATEMENTS = {
    "dp-sgd": {},
    "fo": {"method": "fo", "settings": {"beta": 0.9}},
    "sma-quantile": {"method": "sma", "clipping": "quantile", "max_epsilon": 8.0},
    "dp-ftrl": {"method": "dp-ftrl", "noise_multiplier": 3.0},
    "geodp-not-private": {"method": "geodp", "settings": {"bounding": 0.1}},
}
COMMANDS = [
    [],
    *([name] for name in "demo schema suggest prior train predict export budget calibrate".split()),
    *([name] for name in "plan spectrum methods reproduce report compare resume statement".split()),
    *([name] for name in "tune audit verify ledger".split()),
    ["ledger", "show"],
    ["ledger", "merge"],
]


def weights_of(name: str) -> list[float]:
    """Every weight of the small net after 20 private steps with a known seed."""
    engine, model, *rest = private(name, steps=20)
    run(engine, model, *rest, 20)
    return flat(model.parameters()).tolist()


def statement_of(name: str, folder: Path) -> str:
    """A statement, as Markdown and as JSON, without what differs from machine to machine."""
    options = {"epochs": 2, "noise_seed": 3} | STATEMENTS[name]
    train(TrainConfig(out=folder / name, **options))
    texts = [(folder / name / f"statement.{kind}").read_text() for kind in ("md", "json")]
    text = "\n".join(texts)
    # Numbers first: their last digits follow the processor, and the next pattern takes long ones.
    text = re.sub(r"\d+\.\d{9,}", lambda match: f"{float(match[0]):.8g}", text)
    for pattern in (r"[0-9a-f]{16,}", r"\d+\.\d+\.\d+(\+\w+)?", r"\d{4}-\d\d-\d\d[T\d:.+Z]*"):
        text = re.sub(pattern, "*", text)
    return text


def help_of(command: list[str]) -> str:
    """The help text of one command, 100 columns wide, without colours."""
    from typer.testing import CliRunner

    wide = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*command, "--help"], env=wide, prog_name="vestige")
    assert result.exit_code == 0
    return re.sub(r" +$", "", result.stdout, flags=re.MULTILINE)


def help_file(command: list[str]) -> str:
    return "-".join(["vestige", *command]) + ".txt"


@pytest.mark.parametrize("name", METHODS)
def test_weights_after_twenty_steps(name: str) -> None:
    kept = json.loads((GOLDEN / "weights.json").read_text())
    torch.testing.assert_close(
        torch.tensor(weights_of(name)), torch.tensor(kept[name]), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(name: str, tmp_path: Path) -> None:
    made, kept = statement_of(name, tmp_path), (GOLDEN / f"statement-{name}.txt").read_text()
    assert LONG.sub("*", made) == LONG.sub("*", kept)
    # Convolutions of privacy losses end in other digits on other processors, at small deltas most.
    numbers = [list(map(float, LONG.findall(text))) for text in (made, kept)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


@pytest.mark.parametrize("command", COMMANDS, ids=help_file)
def test_help_texts(command: list[str]) -> None:
    assert help_of(command) == (GOLDEN / help_file(command)).read_text()


def test_tables_of_every_experiment() -> None:
    rows = Rows(RESULTS).refresh()
    known = [name for name in catalogue.names() if begun(catalogue.find(name), rows)]
    assert known == EXPERIMENTS
    for name in EXPERIMENTS:
        experiment = fitted(catalogue.find(name), rows)
        levels = report.levels_of(experiment, rows)
        numbers = summarised(experiment, rows_of(experiment, rows), levels)
        kept = json.loads((RESULTS / name / "table.json").read_text())
        assert json.loads(json.dumps(numbers)) | {"made_by": kept["made_by"]} == kept, name


def test_reports_of_every_experiment_are_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(RESULTS / "rows.jsonl", folder)
    report.report(folder)
    for name in EXPERIMENTS:
        for table in ("table.json", "table.md"):
            assert (folder / name / table).read_text() == (RESULTS / name / table).read_text()


def test_the_tables_of_runtimes_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made with a folder of definitions of their own, which has no model without privacy."""
    timing = RESULTS / "timing"
    monkeypatch.setenv("VESTIGE_EXPERIMENTS", str(timing))
    folder = tmp_path / "timing"
    folder.mkdir()
    shutil.copy(timing / "rows.jsonl", folder)
    written = {path.relative_to(folder) for path in report.report(folder)}
    kept = {path.relative_to(timing) for path in timing.glob("*/table.*")}
    assert kept and kept <= written
    for path in kept:
        assert (folder / path).read_text() == (timing / path).read_text()


def write() -> None:
    """Write every golden file but the tables, which `vestige report results` writes."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    weights = {name: [round(value, 12) for value in weights_of(name)] for name in METHODS}
    rows = (f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in weights.items())
    (GOLDEN / "weights.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
    for command in COMMANDS:
        (GOLDEN / help_file(command)).write_text(help_of(command))
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / "vestige-golden"
    shutil.rmtree(scratch, ignore_errors=True)
    for name in STATEMENTS:
        (GOLDEN / f"statement-{name}.txt").write_text(statement_of(name, scratch))


if __name__ == "__main__":
    write()
