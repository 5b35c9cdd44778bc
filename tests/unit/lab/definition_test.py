"""An experiment as data: its runs, its smoke run, and what may follow what."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.experiments import FAIR, TOY, written
from vestige.errors import ConfigError
from vestige.lab.arms import Candidate

STUDY = """
name = "study"
title = "A study"
paper = "none"
kind = "direction-error"
[[sweep]]
name = "a"
varied = "dimension"
values = [100, 200]
fixed = { batch = 64, sigma = 1.0, trials = 8 }
[quick]
divide = { dimension = 10, trials = 8 }
set = { batch = 2 }
"""


def test_an_arm_wins_over_the_protocol_and_one_noise_takes_the_place_of_another(
    tmp_path: Path,
) -> None:
    toy = written(tmp_path, TOY + "group_noise_multiplier = 2.0\nlr = 0.1\n")
    first, second = (toy.run(arm, "digits", {}, 3) for arm in toy.arms)
    assert (first.noise_multiplier, first.group_noise_multiplier, first.lr) == (1.0, None, 0.5)
    assert (second.noise_multiplier, second.group_noise_multiplier, second.lr) == (None, 2.0, 0.1)
    assert second.seed == 3 and second.settings == {"beta": 0.8, "window": 3}
    assert toy.run(toy.arms[0], "digits", {"lot": 20}, 0).lot == 20


def test_a_fair_run_is_tuned_on_validation_images(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    assert toy.fair is not None and toy.fair_datasets == ["digits"] and toy.fair.most_rates == 2
    tuning = toy.fair_run(toy.fair.arms[0], "digits", 2.0, Candidate(0.1, {}), 100, tuning=True)
    final = toy.fair_run(toy.fair.arms[0], "digits", 2.0, Candidate(0.1, {}), 0, tuning=False)
    assert (tuning.test_range, tuning.validation_range) == (None, [300, 500])
    assert (final.test_range, final.validation_range) == ([0, 100], None)
    assert (final.epsilon, final.noise_multiplier) == (2.0, None)


def test_a_smoke_run_is_smaller_and_says_so(tmp_path: Path) -> None:
    quick = "\n[quick]\ntrain_range = [0, 200]\nseeds = 1\n"
    toy = written(tmp_path, TOY + FAIR + quick)
    small = toy.quickened()
    assert small.quick and not toy.quick and small.path == toy.path
    assert small.seeds == 1 and small.fair is not None and small.fair.seeds == 1
    run = small.run(small.arms[0], "digits", {}, 0)
    assert (run.epochs, run.train_range) == (2, [0, 200])
    assert toy.run(toy.arms[0], "digits", {}, 0).train_range == [0, 300]


def test_a_smoke_run_of_a_study_divides_and_sets(tmp_path: Path) -> None:
    study = written(tmp_path, STUDY, "study")
    (sweep,) = study.quickened().sweeps
    assert sweep.values == [10, 20]
    assert sweep.fixed == {"batch": 2, "sigma": 1.0, "trials": 2}
    assert study.seeds == 1 and study.tables == []
    assert sweep.points()[0] == {"kind": "direction-error", "dimension": 10, **sweep.fixed}


def test_other_seeds(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    more = toy.with_seeds(7)
    assert more.seeds == 7 and more.fair is not None and more.fair.seeds == 7
    assert toy.with_seeds(None) is toy
    for wrong in (0, 1001, True):
        with pytest.raises(ConfigError, match="from 1 to 1000"):
            toy.with_seeds(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STUDY + "\n[protocol]\ndatasets = []\n", "'protocol'.*'direction-error'"),
        (TOY + "\n[quick]\ndivide = { batch = 2 }\n", "'divide'.*'training'"),
        (STUDY.replace("divide", "epochs = 1\ndivide"), "'epochs'.*'direction-error'"),
        (STUDY.replace("batch = 64", "dimension = 64"), "'dimension', which varies"),
        (STUDY.replace("dimension = 10", "dimension = 0"), "greater than or equal to 1"),
        (STUDY.replace("[100, 200]", "[]"), "values"),
        (STUDY.replace("[100, 200]", '["a"]'), "must be a number"),
    ],
)
def test_what_belongs_to_the_other_kind_is_refused(
    text: str, expected: str, tmp_path: Path
) -> None:
    name = "study" if text.startswith(STUDY[:20]) else "toy"
    with pytest.raises(ConfigError, match=expected):
        written(tmp_path, text, name)
