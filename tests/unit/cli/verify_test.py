"""`vestige verify MODULE:factory`: what it prints, and what may go wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vestige.audit.options import FEWEST_TRIALS
from vestige.audit.verify import CHECKS, TRIALS, load
from vestige.cli.app import app
from vestige.engine.ways import Ways
from vestige.methods import (
    FO,
)

PAGE = Path(__file__).parents[3] / "docs" / "verify.md"


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)


def examples():
    """The page's own module: its Python blocks, one after the other."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def printed():
    """What the page shows after each command: (arguments, output)."""
    console = r"```console\n\$ vestige verify (.*?)\n(.*?)```"
    return dict(re.findall(console, PAGE.read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with modules of our own, forgotten afterwards."""
    before = set(sys.modules)
    (tmp_path / "my_methods.py").write_text(examples())
    (tmp_path / "odd.py").write_text(
        "number = 3\n"
        "def fails():\n    raise ValueError('no such\\nthing')\n"
        "def returns():\n    return number\n"
        "def needs(argument):\n    return argument\n"
        "def a_class():\n    from vestige.methods import FO\n    return FO\n"
        "def an_instance():\n    from vestige.methods import FO\n    return FO(beta=0.5)\n"
    )
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "worse.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("my_methods", "odd", "broken", "worse"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("odd", "not of the form MODULE:factory"),
        (":odd", "not of the form MODULE:factory"),
        ("odd:", "not of the form MODULE:factory"),
        ("nowhere:x", "module 'nowhere' was not found"),
        ("json.nowhere:x", "module 'json.nowhere' was not found"),
        ("broken:x", "module 'broken' needs another: No module named 'nowhere_to_be_found'"),
        ("worse:x", "module 'worse' could not be imported: RuntimeError: not today"),
        ("odd:missing", "module 'odd' has no 'missing'"),
        ("odd:number", "is a int, which cannot be called"),
        ("odd:fails", "raised ValueError: no such thing"),
        ("odd:needs", "raised TypeError"),
        ("odd:returns", "returned a int"),
    ],
)
def test_a_wrong_target_is_one_line_and_exit_code_2(target, words, folder):
    result = run(target)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line


def test_a_factory_may_return_an_instance_or_a_class_or_be_one(folder):
    assert load("odd:an_instance") == FO(beta=0.5)
    assert load("odd:a_class") == FO()
    assert load("vestige.methods:FO") == FO()
    assert load("my_methods:Echo").name == "echo"
    assert str(folder) not in sys.path


@pytest.mark.parametrize(("name", "failing"), [("Echo", []), ("Eager", ["replay"])])
def test_the_examples_of_the_page_pass_and_fail(name, failing, folder):
    result = run(f"my_methods:{name}", "--quick", "--seed", "1", "--json")
    assert result.exit_code == bool(failing)
    verdict = json.loads(result.stdout, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert verdict["method"] == name.lower() and verdict["passed"] == (not failing)
    assert [check["check"] for check in verdict["checks"]] == list(CHECKS)
    assert [c["check"] for c in verdict["checks"] if not c["passed"]] == failing
    for check in verdict["checks"]:
        assert bool(check["findings"]) != check["passed"]
        for finding in check["findings"]:
            assert finding["figure"] > finding["bound"] and finding["sentence"].endswith(".")


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("place", range(2))
def test_the_page_shows_what_is_printed(place, folder):
    arguments, shown = list(printed().items())[place]
    result = run(*arguments.split())
    seconds = re.compile(r"\d+ seconds")
    ours, theirs = seconds.sub("s", result.stdout), seconds.sub("s", shown)
    assert [line.rstrip() for line in ours.splitlines()] == [
        line.rstrip() for line in theirs.splitlines()
    ]


def test_the_table_says_what_was_seen_and_what_was_found(folder):
    result = run("my_methods:Eager", "--quick", "--seed", "1")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout and "5 of 6 checks passed" in result.stdout
    assert "replay: ordinary lots: one record moves the whole query by" in result.stdout


def test_few_trials_are_refused():
    shown = " ".join(run("--help").stdout.split())
    assert f"default: {TRIALS}" in shown and f"x>={FEWEST_TRIALS}" in shown
    result = run("vestige.methods:FO", "--trials", str(FEWEST_TRIALS - 1))
    assert result.exit_code == 2 and "trials" in result.stderr


def test_mis_attributed_rows_are_said_in_words(folder, monkeypatch):
    monkeypatch.setattr(Ways, "_check_way", lambda self, args, kwargs: None)
    result = run("my_methods:Echo", "--quick", "--seed", "1")
    assert result.exit_code == 1
    assert "rows: mis-attributed rows: record 0 of the model 'a gate on the batch'" in result.stdout


def test_the_command_is_known_before_torch_is_imported():
    code = (
        "import sys, vestige.cli.verify;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
