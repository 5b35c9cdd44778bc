"""`vestige export`: the model of a run for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import OwnModel, Run
from vestige.errors import ConfigError


def export(
    run: Run,
    torch_export: Annotated[
        bool, typer.Option("--torch-export", help="A program of torch.export: model.pt2.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="An ONNX file: model.onnx.")] = False,
    hf: Annotated[
        bool,
        typer.Option(
            "--hf", help="A folder for the Hugging Face hub, its card with the guarantee: hf/."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to. Default: into the run folder.")
    ] = None,
    model: OwnModel = None,
) -> None:
    """Write the model in one form, and name the files."""
    if torch_export + onnx + hf != 1:
        raise ConfigError("give one of --torch-export, --onnx and --hf.")
    from vestige.train.export import checked, to_hub, to_onnx, to_torch

    loaded, stated = checked(run, model)
    if hf:
        written = to_hub(run, loaded, stated, out or run / "hf")
    elif onnx:
        written = [to_onnx(loaded, out or run / "model.onnx")]
    else:
        written = [to_torch(loaded, out or run / "model.pt2")]
    for path in written:
        typer.echo(f"wrote {path}")
