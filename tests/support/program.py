"""The command line as tests run it: in this process, with unexpected errors failing the test."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vestige.cli.app import app


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
