"""The command line as tests run it: in this process, with unexpected errors failing the test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from vestige.cli.app import app

TINY = (
    "train --model linear --train-size 40 --test-size 20 --lot 8 --steps 7 --accountant rdp "
    "--device cpu"
)


def run(arguments: str, *more: str, **environment: str) -> Result:
    """The program with `arguments`, split at the spaces, and `more`, taken as they are."""
    line = [*arguments.split(), *more]
    # catch_exceptions=False: an error that the program does not expect must fail the test.
    return CliRunner().invoke(
        app, line, env=environment, catch_exceptions=False, prog_name="vestige"
    )


def run_json(arguments: str, *more: str) -> dict[str, Any]:
    """What the program prints with --json, and nothing else beside it."""
    result = run(arguments, *more, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert isinstance(report, dict)
    return report


def plain(text: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[│╭╮╰╯─┃┏┓]", " ", text).split())


def weights(report: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that a run has written."""
    loaded = torch.load(Path(report["folder"]) / "model.pt", weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def check_refused(result: Result, message: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("vestige: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
