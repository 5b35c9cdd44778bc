"""`vestige suggest`: a first choice of settings, from public facts, with the reasons."""

from __future__ import annotations

from typing import Annotated

import typer

from vestige.cli.options import Json, options_of
from vestige.cli.render import print_json, print_pairs
from vestige.cli.train import OWN_DATA
from vestige.train.config import TrainConfig

PUBLIC = "dataset target schema_file task model dataset_size data_dir".split()


@options_of(TrainConfig, only=PUBLIC, forms=OWN_DATA)
def suggest(
    config: TrainConfig,
    epsilon: Annotated[float, typer.Option(help="The epsilon of the run.")],
    as_json: Json = False,
) -> None:
    """Print each setting with its reason, and the command for the run."""
    from vestige.train.suggestion import suggest as suggested

    config.changed(epsilon=epsilon)  # refuses a bad one
    found = suggested(config, epsilon)
    if as_json:
        print_json(found.as_dict())
        return
    print_pairs(
        (f"{name.replace('_', ' ')} {getattr(found, name):.4g}", reason)
        for name, reason in found.reasons.items()
    )
    typer.echo("\nA starting point by public facts, not an optimum. To train with it:")
    typer.echo(found.command)
