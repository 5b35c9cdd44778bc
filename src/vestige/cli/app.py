"""The program `vestige`: a table of commands, each loaded when it is called, and its errors.

Bad input gets one line on stderr and exit code 2; results go to stdout and progress to stderr, so
that `--json` leaves the JSON alone on stdout.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from vestige import __version__
from vestige.checks import one_line
from vestige.cli import INTERRUPTED
from vestige.errors import StorageError, VestigeError

# What each command is for; it is the function of that name in the module of that name. `--help`
# reads this table alone, so no command makes another one slow to start.
COMMANDS = {
    "demo": "Three methods on public digits at the same epsilon, in a minute.",
    "schema": "Draft the public schema of your own data: what it can hold, for you to declare.",
    "suggest": "A first choice of lot, epochs, clip, rate and noise from public facts, with the "
    "reasons.",
    "prior": "Learn features from images of a random process, for train --recipe prior: no data.",
    "train": "Train a model privately and write a run folder with the weights and the result.",
    "predict": "What the model of a run says about new records.",
    "export": "The model of a run for other programs: torch.export, ONNX, the Hugging Face hub.",
    "budget": "What a run costs: epsilon of that many releases under every accountant.",
    "calibrate": "The noise multiplier that keeps a run within epsilon.",
    "plan": "Which noise accumulates least at an epsilon, what it gains and what it costs in "
    "memory.",
    "spectrum": "How heavy-tailed the layers are: a table of power-law exponents, and a log-log "
    "plot.",
    "methods": "Every private training method: its guarantee, its cost and its paper.",
    "reproduce": "Run a table or figure of the papers; finished rows are kept and never run again.",
    "report": "Make tables, plots and report.html: of results from their rows alone, or of a run.",
    "compare": "Compare methods on your data at equal privacy, and say what the whole comparison "
    "costs.",
    "tune": "Search settings on private data: the best of a secret number of trials, at the cost "
    "of all.",
    "resume": "Continue a run that was killed or interrupted; of a finished one, print the result.",
    "statement": "What a run promises about privacy, and what it does not: a statement to be "
    "signed.",
    "audit": "Attack the real engine; exit code 1 if a bound exceeds what the engine claims.",
    "verify": "Replay, measure and attack a method of your own; exit code 1 if anything is found.",
    "ledger": "What was spent on the data: show a ledger, or merge several.",
}

# Which extra brings a package that the core does not need.
EXTRAS = {
    "sklearn": "cli",
    "pooch": "cli",
    "matplotlib": "cli",
    "markdown_it": "cli",
    "pandas": "lab",
    "pyarrow": "data",
    "PIL": "data",
    "onnx": "export",
    "onnxscript": "export",
    "safetensors": "hf",
    "jsonschema": "registry",
    "yaml": "registry",
    "tensorboard": "tensorboard",
}

# typer has carried a click of its own since 0.26: this is UsageError, wherever it lives.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


class Program(TyperGroup):
    """The command group: commands come from the table, and every expected error is one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, help in COMMANDS.items():
            self.add_command(TyperCommand(name, help=help))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that was called, loaded now."""
        name, named, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else named, rest

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run the command and exit: 0, 2 for bad input, 1 for a full disk, 130 after Ctrl-C."""
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "vestige"
            _fail(f"{_usage(error)}; see '{command} --help'", 2)
        except StorageError as error:
            _fail(str(error), 1)
        except VestigeError as error:
            _fail(str(error), 2)
        except OSError as error:
            _fail(_of_system(error), 2 if isinstance(error, _NOT_THERE) else 1)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            _fail(
                f"this needs {package}, which is not installed: "
                f"pip install 'vestige-dp[{EXTRAS[package]}]'",
                2,
            )
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; Ctrl-C outside the training loop ends here."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("vestige: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


def load(name: str) -> Any:
    """The command of that name, from the module of that name."""
    command = getattr(importlib.import_module(f"vestige.cli.{name}"), name)
    if not isinstance(command, typer.Typer):  # one command, else a group of them
        single = typer.Typer(add_completion=False)
        single.command(name)(command)
        command = single
    loaded = typer.main.get_command(command)
    loaded.name, loaded.help = name, COMMANDS[name]
    return loaded


# What typer calls a text that it cannot read as the type of an option.
_EXAMPLES = {
    "float_parsing": "no number: give one such as 3 or 0.5",
    "int_parsing": "no whole number: give one such as 3",
}
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def _usage(error: Any) -> str:
    """What is wrong with a command line, with the value that typer leaves out."""
    message = str(error.format_message()).rstrip(".")
    reader = getattr(error.__cause__, "errors", None)  # pydantic's, since typer 0.29
    for found in reader()[:1] if reader else ():
        why = _EXAMPLES.get(found["type"], str(found["msg"]).rstrip("."))
        message = f"{message.removesuffix(str(found['msg']))}{found['input']!r} is {why}"
    return message


def _of_system(error: OSError) -> str:
    """What the system has refused, with the path and what to do about it."""
    if error.filename is None or error.strerror is None:
        return str(error)
    path, why = Path(os.fsdecode(error.filename)), error.strerror
    if isinstance(error, _NOT_THERE) and not path.parent.is_dir():
        return f"{str(path)!r} lies in no folder that exists: make it, or name another path."
    if isinstance(error, _NOT_THERE):
        return f"{str(path)!r} cannot be opened ({why}): check the path."
    return (
        f"{str(path)!r} cannot be opened or written ({why}): make room there and give yourself "
        "the right to it, or name another path."
    )


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"vestige: error: {one_line(message)}", err=True)
    sys.exit(code)


app = typer.Typer(
    cls=Program,
    add_completion=False,
    # A pretty traceback would print local variables, and those can be training examples.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vestige {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Differentially private PyTorch training that remembers only what it has released."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
