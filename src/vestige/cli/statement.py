"""`vestige statement`: what a run promises about privacy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from vestige.cli.options import Json, options_of
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.privacy.options import File, Options

# How a page of that ending is written, by `vestige.statement`.
_PAGES = {".html": "html", ".pdf": "pdf"}
_TEXT = (".md", ".markdown", ".txt", "")


class Form(Options):
    """In which form a statement is wanted, or what is to be done with its signature."""

    registry: bool = Field(
        default=False,
        description="As an entry for the registry of DP deployments (YAML, tier 3).",
    )
    checkout: File | None = Field(
        default=None,
        description="With --registry: a checkout of the registry's data, or its schema file, that "
        "the entry is checked against.",
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
        typer.Option(
            help="Write to this file instead of the screen; NAME.html is a page, NAME.pdf too."
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Of an unfinished run: the ledger file that it shares with others."),
    ] = None,
) -> None:
    """Print the statement of a run, write it to a file, sign it or check its signature."""
    chosen = form.model_dump(exclude={"checkout"}).values()
    if as_json + sum(map(bool, chosen)) > 1:
        raise ConfigError("give one of --json, --registry, --nist, --sign and --verify.")
    if form.checkout is not None and not form.registry:
        raise ConfigError("--checkout is for an entry of the registry: give --registry too.")
    if form.sign is not None or form.verify is not None:
        _signature(run, form.sign, form.verify)
        return
    suffix = "" if out is None else out.suffix
    _check_ending(suffix, page=not (as_json or form.registry or form.nist))
    content = _content(_found(run, ledger), as_json, form, suffix)
    if out is None:
        typer.echo(content, nl=False)
    else:
        write_whole(out, content)
        typer.echo(f"wrote {out}")


def _check_ending(suffix: str, page: bool) -> None:
    """Refuse a file whose name says something else than it would hold."""
    if suffix in _PAGES and not page:
        raise ConfigError(
            f"{suffix} is for the page of a statement: give --out another ending, or leave --json, "
            "--registry and --nist out."
        )
    if page and suffix not in (*_PAGES, *_TEXT):
        raise ConfigError(
            f"--out with the ending {suffix}: a statement is written as .html, .pdf or .md. Give "
            "one of these endings."
        )


def _found(run: Path, ledger: Path | None) -> dict[str, Any]:
    from vestige.statement import check, read

    if not (run / "checkpoint.pt").is_file():
        return read(run)
    # Of a run that was killed or interrupted: the ledger knows of more than an earlier page.
    from vestige.train.unfinished import of_folder

    found = of_folder(run, ledger)
    check(found)
    return found


def _content(found: dict[str, Any], as_json: bool, form: Form, suffix: str) -> str | bytes:
    from vestige import statement

    if as_json:
        return f"{json.dumps(found, indent=2, allow_nan=False)}\n"
    if form.registry:
        return _entry(found, form.checkout)
    if form.nist:
        return statement.nist_map(found)
    write: Callable[[dict[str, Any]], str | bytes] = getattr(
        statement, _PAGES.get(suffix, "markdown")
    )
    return write(found)


def _entry(found: dict[str, Any], checkout: Path | None) -> str:
    from vestige.statement.registry import check_against, entry, yaml

    written = yaml(entry(found))
    if checkout is not None:
        check_against(written, checkout)
    return written


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
