"""Looks of all arms of all experiments: each has one, and what is compared can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.experiments import REPORT_TOY, made_rows, report_toy
from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab.plots import Style, looks, reference
from vestige.lab.report.experiment_plots import plots
from vestige.lab.report.styles import common_name, fair_styles_of, styles_of
from vestige.lab.summary import summarised

TRAINING = [name for name in catalogue.names() if catalogue.find(name).kind == "training"]
COLOURS = {style["color"] for style in looks()}


def coloured(styles: Mapping[str, Style]) -> list[str]:
    """The labels that are drawn in a colour, the reference among them."""
    return [label for label, style in styles.items() if style["color"] in COLOURS]


@pytest.mark.parametrize("name", ["fo-tab3", "fo-readings"])
def test_three_lines_of_the_crowded_ones_are_named(name: str) -> None:
    experiment = catalogue.find(name)
    styles = styles_of(experiment)
    named = {arm.label: arm for arm in experiment.arms if arm.label in experiment.coloured}
    assert len(named) == 3
    assert coloured(styles) == [
        label for label in styles if label in {*named, experiment.reference}
    ]
    if name == "fo-tab3":
        slow = [arm.method for arm in named.values() if arm.values.get("lr") == 0.2]
        assert sorted(slow) == ["dp-sgd", "fo"]


@pytest.mark.parametrize("name", TRAINING)
def test_every_definition_can_be_drawn(name: str) -> None:
    experiment = catalogue.find(name)
    columns = (
        (styles_of(experiment), experiment.arms),
        (
            fair_styles_of(experiment),
            experiment.fair.arms if experiment.fair else [],
        ),
    )
    for styles, arms in columns:
        assert list(styles) == [arm.label for arm in arms]
        chosen = [tuple(sorted(styles[label].items())) for label in coloured(styles)]
        assert len(set(chosen)) == len(chosen) <= 7
        assert len(arms) > 6 or len(chosen) == len(arms)
    if experiment.reference:
        assert columns[0][0][experiment.reference] == reference()
    assert plots(experiment, [], summarised(experiment, []))


def test_more_fair_arms_than_looks_are_drawn() -> None:
    experiment = catalogue.find("scatter-memory").quickened()
    assert experiment.fair is not None and len(experiment.fair.arms) > len(looks())
    labels = [arm.label for arm in experiment.fair.arms]
    styles = fair_styles_of(experiment)
    in_colour = coloured(styles)
    assert in_colour == ["DP-SGD, averaged", *(label for label in labels if label[:2] in "FO SMA")]
    assert len(in_colour) == 5 and styles[labels[0]] == reference()
    rows = made_rows(experiment)
    (fair,) = [p for p in plots(experiment, rows, summarised(experiment, rows)) if p.svg]
    assert fair.name == "fair-accuracy" and all(label in fair.svg for label in labels)


def test_an_experiment_names_what_is_coloured(tmp_path: Path) -> None:
    arms = "".join(
        f'[[arm]]\nlabel = "lr {rate}"\nmethod = "fo"\nlr = {rate}\n' for rate in range(1, 16)
    )
    named = 'coloured = ["lr 3", "lr 7"]\n'
    text = REPORT_TOY.replace("[[absent]]", arms + "[[absent]]")
    plain = report_toy(tmp_path, text)
    chosen = report_toy(tmp_path, text.replace("seeds = 3", f"seeds = 3\n{named}"))
    assert coloured(styles_of(chosen)) == ["DP-SGD", "lr 3", "lr 7"]
    assert coloured(styles_of(plain)) == ["DP-SGD"]
    assert (common_name(plain), common_name(chosen)) == ("the other 17", "the other 15")
    rows = made_rows(chosen)
    (drawn,) = [
        p for p in plots(chosen, rows, summarised(chosen, rows)) if p.name == "accuracy-by-epoch"
    ]
    assert ">the other 15<" in drawn.svg and ">lr 7<" in drawn.svg and ">lr 8<" not in drawn.svg
    with pytest.raises(ConfigError, match=r"coloured has 'lr 99', the label of no arm"):
        report_toy(tmp_path, text.replace("seeds = 3", 'seeds = 3\ncoloured = ["lr 99"]'))
