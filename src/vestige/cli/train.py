"""`vestige train`: a private run, and its folder. Every option is a field of `TrainConfig`."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import Display, print_run, write_pages
from vestige.errors import ConfigError
from vestige.train import training
from vestige.train.config import DATASETS, TrainConfig
from vestige.train.ranks import leads


def parse_settings(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """The settings of a method from KEY=VALUE, each given once."""
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, sign, text = (part.strip() for part in pair.partition("="))
        if not key or not sign or not text:
            raise ConfigError(f"{option} {pair!r} is not of the form KEY=VALUE.")
        if key in settings:
            raise ConfigError(f"{option} {key} is given twice: give it once.")
        settings[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    """A setting's value: true, false, none, a number, several of these with commas, or text."""
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(","))
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def parse_clip(text: str) -> float | tuple[float, ...]:
    """One clipping norm, or several with commas."""
    try:
        bounds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--clip {text!r} is not a number, nor several with commas: for example 1.0 or 1,0.5."
        ) from None
    return bounds if len(bounds) > 1 else bounds[0]


def parse_names(text: str | None) -> tuple[str, ...]:
    """Names with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


# How the fields about somebody's own data are written.
OWN_DATA = {
    "dataset": Form(name="--dataset --data"),
    "target": Form(str | None, parse_names, metavar="COLUMN"),
    "schema_file": Form(name="--schema"),
}


@options_of(
    TrainConfig,
    without=("group_noise_multiplier",),
    forms={
        "settings": Form(list[str] | None, parse_settings, name="--set", metavar="KEY=VALUE"),
        "clip": Form(str, parse_clip),
        **OWN_DATA,
    },
)
def train(
    config: TrainConfig,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard scalars too: public numbers only."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train as the options say, and print the result."""
    if config.dataset in DATASETS and config.dataset != "digits":
        # pooch announces every download on stderr, in the middle of the progress bar.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("pooch").get_logger().setLevel("ERROR")
    # Read when torch is loaded. Threads that spin while they wait make a step up to a hundred
    # times slower on a machine that has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with contextlib.ExitStack() as entered:
        listeners: list[Callable[[training.Progress], None]] = []
        if leads():
            listeners.append(entered.enter_context(Display(quiet=as_json)))
        if tensorboard and leads():
            from vestige.train.tensorboard import Scalars

            listeners.append(entered.enter_context(Scalars()))

        def tell(progress: training.Progress) -> None:
            for listener in listeners:
                listener(progress)

        result = training.train(config, progress=tell)
    if leads():
        write_pages(Path(result["folder"]))
        print_run(result, as_json, config.ledger)
