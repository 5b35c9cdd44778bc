"""Recipes: settings that go together, each by one name. Nothing here imports torch.

A recipe fills in what is not given, so every value of it can be changed. All of its values are
public: they were chosen on the benchmark named with them, or are its paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """What a name stands for: settings of `TrainConfig`, and where they come from."""

    about: str
    settings: Mapping[str, Any]


RECIPES: Mapping[str, Recipe] = {
    "scatter": Recipe(
        "a linear model on scattering features of images (Tramer and Boneh, arXiv 2011.11660)",
        {"model": "scatter", "lot": 8192, "epochs": 60, "lr": 0.1, "momentum": 0.9},
    ),
    "scatter-mirror": Recipe(
        "the same for photographs, on features that an image shares with its mirror image",
        {"model": "scatter-mirror", "lot": 8192, "epochs": 60, "lr": 0.1, "momentum": 0.9},
    ),
    "scatter-cnn": Recipe(
        "a small CNN on scattering features of images, for a GPU",
        {"model": "scatter-cnn", "lot": 8192, "epochs": 60, "lr": 1.0, "momentum": 0.9},
    ),
    "probe": Recipe(
        "a linear model on frozen features that you name with --features",
        {"model": "linear", "lot": 1024, "epochs": 40, "lr": 0.5, "momentum": 0.9},
    ),
    "prior": Recipe(
        "a linear model on features that vestige prior has learned from images of a random process",
        {"features": "prior", "model": "linear", "lot": 8192, "epochs": 60, "lr": 0.5}
        | {"momentum": 0.9},
    ),
    "least-squares": Recipe(
        "one release of second moments, solved in closed form, of inputs or of --features",
        {"model": "least-squares"},
    ),
    "tabular": Recipe(
        "a linear model on your own table; --model mlp for more",
        {"model": "linear", "lot": 128, "epochs": 20, "lr": 2.0},
    ),
    "wrn": Recipe(
        "WRN-16-4 from scratch on images, four views of each, for a GPU (De et al., arXiv "
        "2204.13650)",
        {
            "model": "wrn",
            "lot": 4096,
            "epochs": 200,
            "lr": 2.0,
            "views": 4,
            "averaging": "ema:0.999",
            "precision": "bfloat16",
        },
    ),
}


def filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of their recipe where none is given."""
    name = str(values.get("recipe"))
    if name not in RECIPES:  # an unknown name is refused with the other settings
        return dict(values)
    chosen = {key: value for key, value in values.items() if value is not None}
    length = {"epochs", "steps"} & chosen.keys()
    taken = RECIPES[name].settings
    return dict(values) | {
        key: value
        for key, value in taken.items()
        if key not in chosen and not (key == "epochs" and length)
    }
