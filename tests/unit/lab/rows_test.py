"""Rows that survive: torn lines, full disks, claims and merges."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import TOY, fake_row, filled, python, stored, written
from vestige.errors import ConfigError
from vestige.lab.definition import Experiment
from vestige.lab.grid import Task, tasks_of
from vestige.lab.rows import ROWS, TORN, Rows, RowStore, merge
from vestige.lab.setting import config_hash


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_rows_are_read_as_they_come(tmp_path: Path, toy: Experiment) -> None:
    first, second, *_ = tasks_of(toy, {})
    reader = Rows(tmp_path)
    assert reader.refresh() == {}
    store = RowStore(tmp_path)
    store.append(fake_row(first))
    assert set(reader.refresh()) == {first.hash}
    with (tmp_path / ROWS).open("ab") as file:  # somebody is in the middle of a line
        line = json.dumps(fake_row(second)).encode() + b"\n"
        file.write(line[:30])
        file.flush()
        assert set(reader.refresh()) == {first.hash}
        file.write(line[30:])
        file.flush()
        assert set(reader.refresh()) == {first.hash, second.hash}
    assert reader.complaints == []


@pytest.mark.parametrize("cut", [1, 20, -2])
def test_a_cut_last_line_is_set_aside(tmp_path: Path, toy: Experiment, cut: int) -> None:
    tasks = filled(tmp_path, toy)
    whole = (tmp_path / ROWS).read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = lines[-1][:cut]
    (tmp_path / ROWS).write_bytes(b"".join(lines[:-1]) + torn)
    store = RowStore(tmp_path)
    assert set(store.refresh()) == {task.hash for task in tasks[:-1]}
    assert "cut" in store.complaints[0] and TORN in store.complaints[0]
    store.append(fake_row(tasks[-1]))
    assert (tmp_path / ROWS).read_bytes() == whole
    assert (tmp_path / TORN).read_bytes() == torn + b"\n"


def test_a_row_that_lost_its_line_end_is_kept(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path, toy)
    whole = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(whole[:-1])
    store = RowStore(tmp_path)
    assert set(store.refresh()) == {task.hash for task in tasks}
    assert store.complaints == []
    assert (tmp_path / ROWS).read_bytes() == whole
    assert not (tmp_path / TORN).exists()


def test_damaged_lines_in_the_middle_are_set_aside(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path, toy)
    lines = (tmp_path / ROWS).read_bytes().splitlines(keepends=True)
    edited = lines[1].replace(b'"seed":1', b'"seed":7').replace(b'"seed": 1', b'"seed": 7')
    assert edited != lines[1]
    (tmp_path / ROWS).write_bytes(lines[0] + edited + b"garbage\n" + b"".join(lines[2:]))
    assert tasks[1].hash not in Rows(tmp_path).refresh()  # reading alone changes nothing
    store = RowStore(tmp_path)
    assert set(store.refresh()) == {t.hash for t in tasks} - {tasks[1].hash}
    assert "2 cut or damaged" in store.complaints[0]
    assert (tmp_path / TORN).read_bytes() == edited + b"garbage\n"


def test_a_line_that_another_process_tore_does_not_spoil_the_next(
    tmp_path: Path, toy: Experiment
) -> None:
    first, second, *_ = tasks_of(toy, {})
    store = RowStore(tmp_path)
    store.append(fake_row(first))
    with (tmp_path / ROWS).open("ab") as file:
        file.write(b'{"hash": "dead')
    store.append(fake_row(second))
    assert set(store.refresh()) == {first.hash, second.hash}
    assert (tmp_path / TORN).read_bytes() == b'{"hash": "dead\n'


def test_a_full_disk_keeps_every_finished_row(tmp_path: Path, toy: Experiment) -> None:
    """A limit on the size of files stands in for the disk: writes stop in the middle of a row."""
    script = """
        import resource, signal, sys
        from pathlib import Path
        from tests.support.experiments import fake_row
        from vestige.lab.reading import read
        from vestige.lab.grid import Task, tasks_of
        from vestige.lab.rows import RowStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tasks = list(tasks_of(read(Path(sys.argv[1])), {}, ("published",)))
        store = RowStore(Path(sys.argv[2]))
        store.append(fake_row(tasks[0]))
        size = (Path(sys.argv[2]) / "rows.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        try:
            store.append(fake_row(tasks[1]))
        except OSError as error:
            print(error)
    """
    done = python(script, str(toy.path), str(tmp_path / "out"))
    assert "could not be added" in done and "is kept" in done and "same command" in done
    assert [row["hash"] for row in stored(tmp_path / "out")] == [next(iter(tasks_of(toy, {}))).hash]
    assert (tmp_path / "out" / ROWS).read_bytes().endswith(b"\n")


def test_a_claim_excludes_other_processes_and_dies_with_its_own(
    tmp_path: Path, toy: Experiment
) -> None:
    task = next(iter(tasks_of(toy, {})))
    script = """
        import sys, time
        from pathlib import Path
        from vestige.lab.rows import RowStore
        with RowStore(Path(sys.argv[1])).claim(sys.argv[2]) as mine:
            print(mine, flush=True)
            time.sleep(600)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), task.hash],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    store = RowStore(tmp_path)
    with store.claim(task.hash) as mine:
        assert not mine
    with store.claim("0" * 16) as other:
        assert other
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with store.claim(task.hash) as mine:
        assert mine
    holder.stdout.close()


def test_rows_made_elsewhere_are_merged(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path / "there", toy)
    with (tmp_path / "there" / ROWS).open("a") as file:
        file.write('{"hash": "cut')
    store = RowStore(tmp_path / "here")
    store.append(fake_row(tasks[0]))
    assert merge(store, tmp_path / "there" / ROWS) == (3, 1)
    assert merge(store, tmp_path / "there" / ROWS) == (0, 4)
    assert set(store.refresh()) == {task.hash for task in tasks}
    with pytest.raises(ConfigError, match="no file"):
        merge(store, tmp_path / "nothing")


def of_images(task: Task, digest: str) -> dict[str, Any]:
    return fake_row(task) | {"dataset": "digits", "data": digest}


OTHER = r"another digits .* keep them in a folder of their own"


def test_rows_of_another_version_of_the_data_are_not_merged(
    tmp_path: Path, toy: Experiment
) -> None:
    """The same name and range, and other images: nothing of it is added."""
    tasks = filled(tmp_path / "there", toy)
    here, there = RowStore(tmp_path / "here"), RowStore(tmp_path / "other")
    here.append(of_images(tasks[0], "0123456789abcdef"))
    there.append(of_images(tasks[1], "fedcba9876543210"))
    there.append(of_images(tasks[2], "fedcba9876543210"))
    with pytest.raises(ConfigError, match=OTHER):
        merge(here, tmp_path / "other" / ROWS)
    assert len(here.refresh()) == 1


def test_a_row_of_another_version_of_the_data_is_not_added(tmp_path: Path, toy: Experiment) -> None:
    """Rows of one file, also those of another process, and then one of another file."""
    tasks = filled(tmp_path / "there", toy)
    store, other = RowStore(tmp_path / "here"), RowStore(tmp_path / "here")
    store.append(of_images(tasks[0], "0123456789abcdef"))
    before = (tmp_path / "here" / ROWS).read_bytes()
    with pytest.raises(ConfigError, match=OTHER) as refusal:
        other.append(of_images(tasks[1], "fedcba9876543210"))
    assert "\n" not in str(refusal.value) and tasks[1].hash in str(refusal.value)
    assert (tmp_path / "here" / ROWS).read_bytes() == before
    other.append(of_images(tasks[1], "0123456789abcdef"))
    other.append(fake_row(tasks[2]))  # a point of a study, or a user's own data: no digest
    elsewhere = tasks[3].config | {"train_range": [0, 200]}
    row = of_images(tasks[3], "fedcba9876543210") | {"config": elsewhere}
    other.append(row | {"hash": config_hash(elsewhere)})  # other images, another digest
    assert len(store.refresh()) == 4


def test_a_file_with_rows_of_two_versions_of_the_data_is_not_read(
    tmp_path: Path, toy: Experiment
) -> None:
    """A report would average them."""
    tasks = filled(tmp_path / "there", toy)
    rows = [of_images(tasks[0], "0123456789abcdef"), of_images(tasks[1], "fedcba9876543210")]
    (tmp_path / ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reader = Rows(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=OTHER):
            reader.refresh()
