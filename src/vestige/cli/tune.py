"""`vestige tune`: private random search. The options of a run are train's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field
from rich.console import Console

from vestige.checks import printable, round_up
from vestige.cli import INTERRUPTED
from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import print_json, print_pairs
from vestige.cli.train import OWN_DATA, parse_clip, parse_settings
from vestige.errors import ConfigError
from vestige.privacy.options import File, Options
from vestige.statement.escaping import in_terminal
from vestige.train.config import TrainConfig
from vestige.train.training import Progress

if TYPE_CHECKING:
    from vestige.train.tune import Search

SHARED = (
    *"dataset target schema_file task model method settings epsilon noise_multiplier delta".split(),
    *"lot epochs steps clip clipping averaging lr seed noise_seed precision".split(),
    *"device data_dir train_size test_size dataset_size views units rows_per_unit".split(),
    *"recipe features feature_cache momentum tuning evaluate_epsilon ledger".split(),
)


class Design(Options):
    """What is tried, how often, and what scores are measured on."""

    grid: Mapping[str, Any] = Field(
        default={},
        description="A setting to try and its values, such as lr=0.1,0.5,1; repeatable: every "
        "combination is a candidate.",
    )
    candidates: File | None = Field(
        default=None, description="The list as a TOML file instead: a table [[candidate]] for each."
    )
    trials: float = Field(
        default=10.0, description="The mean number of trials; the number itself stays secret."
    )
    eta: float = Field(
        default=0.0,
        le=10,
        description="The law of that number: 0 logarithmic, 1 geometric, any above -1. Smaller is "
        "cheaper and varies more.",
    )
    held_out_is_public: bool = Field(
        default=False,
        description="Declare that the held-out records are public, so that scores on them may be "
        "exact.",
    )
    out: File | None = Field(
        default=None,
        description="The winner's folder, new or empty; the same command begins anew on the ledger "
        "of a search that was stopped.",
    )


@options_of(
    Design,
    forms={
        "grid": Form(
            list[str] | None,
            lambda pairs: parse_settings(pairs, "--try"),
            name="--try",
            metavar="NAME=VALUES",
        )
    },
)
@options_of(
    TrainConfig,
    only=SHARED,
    forms={
        "settings": Form(list[str] | None, parse_settings, name="--set", metavar="KEY=VALUE"),
        "clip": Form(str, parse_clip),
        **OWN_DATA,
        "epsilon": Form(help="Solve for the noise at which the whole search has this epsilon."),
        "evaluate_epsilon": Form(
            help="Add noise to every score: epsilon of the whole search for the held-out records."
        ),
        "ledger": Form(
            help="The ledger file that is charged. Default: ledger.jsonl in the folder."
        ),
    },
)
def tune(base: TrainConfig, design: Design, as_json: Json = False) -> None:
    """Search, and print the winner at the cost of the whole search."""
    if bool(design.grid) == (design.candidates is not None):
        raise ConfigError("give what to try, as --try NAME=VALUES or as --candidates FILE.")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, as by train
    from vestige.train.tune import Search, from_file, from_grid
    from vestige.train.tune import tune as searched

    rows = from_grid(design.grid) if design.candidates is None else from_file(design.candidates)
    chosen = {name: getattr(design, name) for name in ("trials", "eta", "out")}
    search = Search(tuple(rows), base, public_held_out=design.held_out_is_public, **chosen)
    told = _expected(search)
    # The stream itself: what is printed while trials run goes nowhere.
    console = Console(file=sys.stderr)
    with console.status(told) as status:

        def tell(progress: Progress) -> None:
            status.update(f"{progress.stage}  ({told})")
            if not (console.is_terminal or as_json):
                typer.echo(progress.stage, err=True)

        if not as_json:
            typer.echo(f"vestige: {told}", err=True)
        result = searched(search, tell)
    if as_json:
        print_json(result)
    elif not result["interrupted"]:
        _print(result)
    if result["interrupted"]:
        ledger = printable(result["ledger"])
        again = "the same command begins a new one on the same ledger"
        if design.out is None and base.ledger is None:
            again = f"begin a new one with --ledger {ledger}, so that both are counted"
        typer.echo(
            f"vestige: interrupted; the search stays charged on {ledger}, in all epsilon "
            f"{round_up(result['epsilon'])} at delta {result['delta']:g}, and nothing else of it "
            f"was kept; {again}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED)


def _expected(search: Search) -> str:
    """How long it may take, by the public law alone."""
    law = search.law
    return (
        f"{len(search.candidates)} candidates, {law.mean:.4g} trials on average, at most "
        f"{law.most(0.99)} in 99 of 100 searches"
    )


def _print(result: Mapping[str, Any]) -> None:
    search, score = result["search"], result["score"]
    name, value = next(iter(score.items()))
    figure = f"{value:.2%}" if name == "accuracy" else f"{value:.4g}"
    noisy = "with noise; may be published" if "held_out_release" in result else "on the held-out"
    pair = f"(epsilon {round_up(result['epsilon'])}, delta {result['delta']:g})"
    law = f"{search['mean_trials']:.4g} trials on average, eta {search['eta']:g}"
    print_pairs(
        [
            ("chosen", in_terminal(", ".join(f"{k} {v}" for k, v in result["chosen"].items()))),
            (name, f"{figure}  {noisy} split; of the best trial, so it flatters"),
            ("privacy", in_terminal(f"{pair}  {result['adjacency']}, {result['accountant']}")),
            ("search", f"{law}, {len(search['candidates'])} candidates: all of it is in epsilon"),
            ("one trial", f"epsilon {round_up(search['epsilon_of_one_trial'])}: not a claim"),
            ("noise", f"multiplier {result['noise_multiplier']:.4g}, {result['steps']} steps"),
            *(("note", in_terminal(caveat)) for caveat in result["caveats"]),
        ]
    )
    typer.echo(f"run folder  {printable(result['folder'])}")  # never wrapped: to be copied
