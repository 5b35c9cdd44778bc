"""The runner: kills, Ctrl-C, full disks and deadlines lose no finished row and run none twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import (
    TOY,
    command,
    python,
    quiet,
    stored,
    wait_for,
    written,
)
from tests.support.program import run
from vestige.errors import ConfigError
from vestige.lab import report
from vestige.lab.definition import Experiment
from vestige.lab.grid import Task, tasks_of
from vestige.lab.rows import ROWS, Rows
from vestige.lab.runner import STOPPING, Request, what_next
from vestige.lab.training_row import make_row


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_an_unwritable_folder(tmp_path: Path, toy: Experiment) -> None:
    (tmp_path / "file").write_text("")
    result = run("reproduce", str(toy.path), "--out", str(tmp_path / "file" / "results"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr and "--out" in result.stderr


WORKER = """
    import random, sys, time
    from pathlib import Path
    from tests.support.experiments import fake_row, quiet
    from vestige.lab import training_row
    from vestige.lab.reading import read
    from vestige.lab.runner import Request
    out = Path(sys.argv[2])
    def make(task, *_):
        with (out / "started.txt").open("a") as file:
            file.write(task.hash + "\\n")
        time.sleep(random.uniform(0, 0.02))
        return fake_row(task)
    training_row.make_row = make
    quiet(Request(experiments=(read(Path(sys.argv[1])),), out=out))
"""


def workers(path: Path, out: Path, count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that share the rows of an experiment, as two commands would."""
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(path), str(out)]
    root = Path(__file__).parents[3]
    return [subprocess.Popen(command, cwd=root) for _ in range(count)]


def test_workers_share_a_grid_and_run_no_row_twice(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 60"))
    for worker in workers(toy.path, tmp_path, 2):
        assert worker.wait(timeout=600) == 0
    hashes = {task.hash for task in tasks_of(toy, {})}
    assert len(hashes) == 120
    assert Counter(row["hash"] for row in stored(tmp_path)) == Counter(hashes)
    assert Counter((tmp_path / "started.txt").read_text().split()) == Counter(hashes)


def test_killed_workers_lose_and_double_no_row(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 60"))
    kept: list[bytes] = []
    for goal in (10, 40, 80):
        running = workers(toy.path, tmp_path, 2)
        wait_for(lambda goal=goal: len(Rows(tmp_path).refresh()) >= goal)  # type: ignore[misc]
        for worker in running:
            worker.kill()
            worker.wait()
        now = (tmp_path / ROWS).read_bytes()
        assert now.startswith(b"".join(kept))  # nothing that was there is gone or changed
        kept = now[: now.rfind(b"\n") + 1].splitlines(keepends=True)
    (last,) = workers(toy.path, tmp_path, 1)
    assert last.wait(timeout=600) == 0
    assert Counter(row["hash"] for row in stored(tmp_path)) == Counter(
        task.hash for task in tasks_of(toy, {})
    )


def test_the_runner_killed_in_the_middle_continues(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 4"))
    out = tmp_path / "out"
    first = command(toy, out, "--workers", "2")
    wait_for(lambda: len(Rows(out).refresh()) >= 1)
    first.kill()
    first.communicate()
    before = (out / ROWS).read_bytes()
    assert first.returncode == -signal.SIGKILL
    outcome = quiet(Request(experiments=(toy,), out=out))
    assert (outcome.total, outcome.finished, outcome.failures) == (8, 8, [])
    whole = before[: before.rfind(b"\n") + 1]
    assert (out / ROWS).read_bytes().startswith(whole)
    assert Counter(row["hash"] for row in stored(out)) == Counter(
        task.hash for task in tasks_of(toy, {})
    )


def test_ctrl_c_keeps_rows_and_says_how_to_continue(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 200"))
    running = command(toy, tmp_path / "out", "--workers", "2")
    wait_for(lambda: len(Rows(tmp_path / "out").refresh()) >= 1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 130
    assert f"continue with `vestige reproduce {toy.path}" in said and "--workers 2" in said
    assert "interrupted" in said
    assert said.index(STOPPING) < said.index("interrupted")
    assert len(stored(tmp_path / "out")) >= 1


def test_finished_rows_are_not_run_again(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(experiments=(toy,), out=tmp_path / "out")
    outcome = quiet(request)
    assert (outcome.total, outcome.finished, outcome.made, outcome.failures) == (4, 4, 4, [])
    before = (tmp_path / "out" / ROWS).read_bytes()

    def never(*_: Any) -> None:
        raise AssertionError("a finished row was run again")

    monkeypatch.setattr("vestige.lab.training_row.make_row", never)
    again = quiet(request)
    assert (again.finished, again.made, again.failures) == (4, 0, [])
    other = written(tmp_path, TOY.replace('"toy"', '"twin"'), "twin")
    shared = quiet(Request(experiments=(other,), out=tmp_path / "out"))
    assert (shared.finished, shared.made) == (4, 0)
    assert (tmp_path / "out" / ROWS).read_bytes() == before


def test_more_seeds_add_rows(tmp_path: Path, toy: Experiment) -> None:
    quiet(Request(experiments=(toy,), out=tmp_path / "out", seeds=1))
    assert len(stored(tmp_path / "out")) == 2
    quiet(Request(experiments=(toy,), out=tmp_path / "out", seeds=3))
    assert len(stored(tmp_path / "out")) == 6
    report.write_found(toy, Rows(tmp_path / "out").refresh(), tmp_path / "out" / "toy")
    numbers = json.loads((tmp_path / "out" / "toy" / "table.json").read_text())
    assert [line["count"] for line in numbers["published"][0]["lines"]] == [3, 3]


def test_a_row_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_row

    def fragile(task: Task, *more: Any) -> Any:
        if task.label == "FO":
            raise ConfigError("this one cannot be made.")
        return real(task, *more)

    monkeypatch.setattr("vestige.lab.training_row.make_row", fragile)
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out"))
    assert (outcome.total, outcome.finished) == (4, 2)
    assert len(outcome.failures) == 2 and "this one cannot be made" in outcome.failures[0]
    assert "continue with" in " ".join(what_next(Request(experiments=(toy,)), outcome))


def test_a_deadline_starts_no_more_rows(tmp_path: Path, toy: Experiment) -> None:
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out", minutes=1e-9))
    assert (outcome.finished, outcome.deadline, outcome.failures) == (0, True, [])


def test_smoke_runs_are_kept_apart(tmp_path: Path, toy: Experiment) -> None:
    request = Request(experiments=(toy,), out=tmp_path / "out", quick=True)
    quiet(request)
    assert request.root == tmp_path / "out" / "quick"
    assert not (tmp_path / "out" / ROWS).exists()
    assert Request(experiments=(toy,), quick=True).root == Path("runs/quick")
    longer = toy.model_copy(update={"protocol": toy.protocol.model_copy(update={"epochs": 9})})
    real = {task.hash for task in tasks_of(longer, {})}
    assert not real & {row["hash"] for row in stored(request.root)}
    assert "smoke run" in " ".join(what_next(request, quiet(request)))


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"seeds": 0}, {"column": "middle"}, {"minutes": 0.0}]
)
def test_bad_requests(toy: Experiment, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Request(experiments=(toy,), **options)


def test_the_runner_needs_neither_typer_nor_rich() -> None:
    """Nor matplotlib, pooch or scikit-learn: what has to be there is torch and the accountant."""
    script = """
        import runpy, sys
        for name in ("typer", "rich", "matplotlib", "pooch", "sklearn", "vestige.cli.app"):
            sys.modules[name] = None
        sys.argv = ["vestige.lab", "--list"]
        try:
            runpy.run_module("vestige.lab", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
        import vestige.lab.runner, vestige.lab.training_row
    """
    assert "fo-tab3" in python(script)
