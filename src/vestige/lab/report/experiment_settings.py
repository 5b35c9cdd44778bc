"""What an experiment runs: its protocol, its methods, and what had to be assumed."""

from __future__ import annotations

from vestige.lab.definition import Experiment
from vestige.lab.report import wording
from vestige.lab.report.markup import Column, Html, bullets, details, element, pairs, prose, table

# What an arm may change, in the order in which it is told.
_TOLD = (
    "model",
    "clip",
    "clipping",
    "noise_multiplier",
    "group_noise_multiplier",
    "lot",
    "momentum",
)


def settings(experiment: Experiment) -> list[Html]:
    """The part of the page that says what was run."""
    shown: list[Html] = []
    if experiment.kind == "direction-error":
        body = [
            [
                sweep.name,
                sweep.varied,
                wording.value(list(sweep.values)),
                wording.settings(sweep.fixed),
            ]
            for sweep in experiment.sweeps
        ]
        columns = [Column(name, number=False) for name in ("panel", "varied", "values", "fixed")]
        shown.append(table("Sweeps", columns, body))
    else:
        shown.append(pairs(_protocol(experiment)))
        shown.append(_arms(experiment))
        if experiment.fair is not None:
            shown.append(_fair_settings(experiment))
    if experiment.assumed:
        shown.append(element("h3", "What the paper leaves open, and what was assumed"))
        shown.append(bullets(prose(sentence) for sentence in experiment.assumed))
    return shown


def _protocol(experiment: Experiment) -> list[tuple[object, object]]:
    values = dict(experiment.protocol) | dict(experiment.grid)
    told: list[tuple[object, object]] = [
        ("data", ", ".join(wording.dataset(name) for name in experiment.datasets)),
        ("seeds", experiment.seeds),
    ]
    names = {
        "train_range": "training images",
        "test_range": "test images",
        "lr": "learning rate",
        "noise_multiplier": "noise multiplier sigma",
        "group_noise_multiplier": "noise multiplier of a group",
        "clip": "clipping norm C",
    }
    for key, value in values.items():
        shown = wording.images(value) if key.endswith("_range") else wording.value(value)
        told.append((names.get(key, key), shown))
    if experiment.reference:
        told.append(("reference", experiment.reference))
    return told


def _arms(experiment: Experiment) -> Html:
    body = []
    for arm in experiment.arms:
        values = arm.values
        own = [
            f"{name} {wording.value(values[name])}"
            for name in ("lr", *_TOLD, "epochs")
            if name in values
        ]
        body.append(
            [
                arm.label,
                element("code", values["method"]),
                wording.settings(values["settings"]),
                ", ".join(own) or "as above",
            ]
        )
    columns = [Column(name, number=False) for name in ("method", "name", "settings", "protocol")]
    return table("Methods", columns, body)


def _fair_settings(experiment: Experiment) -> Html:
    fair = experiment.fair
    assert fair is not None
    body = [
        [
            arm.label,
            element("code", arm.values["method"]),
            wording.settings(arm.values["settings"]),
            f"that of {arm.follows}" if arm.follows else wording.value(list(arm.rates)),
        ]
        for arm in fair.arms
    ]
    columns = [
        Column(name, number=False) for name in ("method", "name", "settings", "learning rates")
    ]
    first = (
        f"Epsilon {wording.value(list(fair.epsilons))}; tuned on training images "
        f"{wording.images(fair.validation_range)} with seed {fair.tuning_seed}; {fair.seeds} seeds."
    )
    return details(
        "The fair column's settings", element("p", first), table("Methods", columns, body)
    )
