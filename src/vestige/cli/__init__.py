"""The command line, one small file per command. It parses, calls and prints."""

from __future__ import annotations

import io
import os
import sys

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main() -> None:
    """The entry point of the `vestige` program; without its extra it says what to install."""
    # Read by torch when it allocates first. Large lots come in large pages, which halves a step of
    # the recipe scatter on a CPU.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        from vestige.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"vestige: error: the command needs {error.name}, which is not installed: "
            "pip install 'vestige-dp[cli]'"
        )
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows no UTF-8 gets a question mark for a letter that it lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="vestige")
