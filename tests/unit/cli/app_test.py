"""The program: its commands, its options, its exit codes, and one line for each bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vestige
from tests.support.program import TINY, check_refused, run
from vestige.cli.app import load

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_version_and_help() -> None:
    assert run("--version").stdout == f"vestige {vestige.__version__}\n"
    for arguments in ("", "--help", "-h"):
        result = run(arguments)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in ("train", "budget", "calibrate"))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "train",
            "dataset model method set epsilon noise-multiplier delta accountant lot epochs steps "
            "clip clipping history-dtype history-device averaging lr seed noise-seed device "
            "data-dir train-size test-size train-loss tensorboard max-epsilon checkpoint-every "
            "ledger out json data target schema task dataset-size tuning evaluate-epsilon "
            "compile momentum recipe units rows-per-unit views mix-views precision "
            "features feature-cache ridge weights",
        ),
        (
            "budget",
            "sample-rate noise-multiplier steps delta beta group-noise-multiplier groups json",
        ),
        ("calibrate", "epsilon delta sample-rate steps beta groups accountant json"),
        ("plan", "dataset-size lot epochs epsilon delta accountant max-memory plot json"),
        ("methods", "json"),
    ],
)
def test_every_command_has_exactly_these_options(command: str, options: str) -> None:
    names = [name for parameter in load(command).params for name in parameter.opts]
    assert sorted(names) == sorted(f"--{name}" for name in options.split())
    assert all(f"--{name}" in run(f"{command} --help").stdout for name in options.split())


def test_python_m_vestige_is_the_same_program() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vestige", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"vestige {vestige.__version__}\n"
    ran = subprocess.run(
        [sys.executable, "-m", "vestige", "train", "--delta", "1"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(
        "vestige: error: delta 1.0 is out of range: give a number strictly between 0 and 1"
    )
    assert ran.stderr.count("\n") == 1


def test_torch_is_not_imported_where_it_is_not_needed() -> None:
    """Also not to find that an argument of `train` is wrong."""
    commands = [
        "--help",
        "--version",
        "train --help",
        "budget --sample-rate .1 --noise-multiplier 1 --steps 9",
        "calibrate --sample-rate .1 --epsilon 2 --steps 9",
        "train --dataset nope",
        "train --model nope",
        "train --noise-multiplier -1",
        "train --train-size 20 --lot 30",
        "train --out /dev/null",
    ]
    program = (
        "import sys\n"
        "from vestige.cli.app import app\n"
        f"for arguments in {commands!r}:\n"
        "    try:\n"
        "        app(arguments.split())\n"
        "    except SystemExit as end:\n"
        "        print('code', end.code, 'torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    codes = [line for line in ran.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 0 False"] * 5 + ["code 2 False"] * 5


def test_a_full_disk_gets_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run(TINY)
    assert result.exit_code == 1
    assert result.stderr == "vestige: error: [Errno 28] No space left on device\n"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("--nonsense", "No such option: --nonsense"),
    ],
)
def test_other_bad_input_gets_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    check_refused(run(arguments), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train --epsilon zero",
            "'--epsilon': 'zero' is no number: give one such as 3 or 0.5",
        ),
        ("train --dataset-size many", "'many' is no whole number: give one such as 3; see"),
        ("train --lot 1.5", "'--lot': '1.5' is no whole number"),
    ],
)
def test_a_value_of_another_kind_is_named(arguments: str, message: str) -> None:
    check_refused(run(arguments), message)


def test_what_the_system_refuses_names_the_path_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,2\n")
    draft = ("schema", str(tmp_path / "t.csv"), "--target", "y", "--out")
    check_refused(run(*draft, "x/y.toml"), "'x/y.toml' lies in no folder that exists: make it")
    beneath = tmp_path / "t.csv" / "y.toml"
    check_refused(run(*draft, str(beneath)), f"{str(beneath)!r} lies in no folder")
