"""`vestige statement`: what a run promises about privacy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from vestige.cli.options import Json, options_of
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.privacy.options import File, Options


class Form(Options):
    """In which form a statement is wanted, or what is to be done with its signature."""

    registry: bool = Field(
        default=False,
        description="As an entry for the registry of DP deployments (YAML, tier 3).",
    )
    nist: bool = Field(default=False, description="As a map to the questions of NIST SP 800-226.")
    sign: File | None = Field(
        default=None,
        description="Sign statement.json with this private Ed25519 key, into a .sig file.",
    )
    verify: File | None = Field(
        default=None,
        description="Check the signature, and the weights, by this public Ed25519 key.",
    )


@options_of(Form)
def statement(
    run: Annotated[Path, typer.Argument(help="A run folder of vestige train.")],
    form: Form,
    as_json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this file instead of the screen; NAME.html is a page."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Of an unfinished run: the ledger file that it shares with others."),
    ] = None,
) -> None:
    """Print the statement of a run, write it to a file, sign it or check its signature."""
    if as_json + sum(map(bool, dict(form).values())) > 1:
        raise ConfigError("give one of --json, --registry, --nist, --sign and --verify.")
    if form.sign is not None or form.verify is not None:
        _signature(run, form.sign, form.verify)
        return
    found = _found(run, ledger)
    text = _text(found, as_json, form, page=out is not None and out.suffix == ".html")
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)


def _found(run: Path, ledger: Path | None) -> dict[str, Any]:
    from vestige.statement import check, read

    if not (run / "checkpoint.pt").is_file():
        return read(run)
    # Of a run that was killed or interrupted: the ledger knows of more than an earlier page.
    from vestige.train.unfinished import of_folder

    found = of_folder(run, ledger)
    check(found)
    return found


def _text(found: dict[str, Any], as_json: bool, form: Form, page: bool) -> str:
    from vestige.statement import html, markdown, nist_map
    from vestige.statement.registry import entry, yaml

    if as_json:
        return f"{json.dumps(found, indent=2, allow_nan=False)}\n"
    if form.registry:
        return yaml(entry(found))
    if form.nist:
        return nist_map(found)
    return html(found) if page else markdown(found)


def _signature(run: Path, sign: Path | None, verify: Path | None) -> None:
    from vestige.statement import signing

    if (run / "checkpoint.pt").is_file():
        raise ConfigError(f"the run in {str(run)!r} is not over: resume it first.")
    if sign is not None:
        typer.echo(f"wrote {signing.sign(run, sign)}")
    elif verify is not None:
        signing.verify(run, verify)
        typer.echo(
            "the signature fits: statement.json is as it was signed, and model.pt is its model"
        )
