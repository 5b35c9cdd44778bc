"""Arms that measure averaged weights, and tuning on images and seeds of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.experiments import FAIR, TOY, quiet, written
from vestige.errors import ConfigError
from vestige.lab.arms import Candidate
from vestige.lab.grid import chosen, tasks_of
from vestige.lab.rows import Rows
from vestige.lab.runner import Request
from vestige.lab.setting import RunSetting, config_hash
from vestige.lab.summary import rows_of, summarised

AVERAGED = """
[[fair.arm]]
label = "DP-SGD, averaged"
method = "dp-sgd"
rates = [0.1, 1.0]
averaged = true
"""


def test_averaged_weights_are_read_from_the_same_runs(tmp_path: Path) -> None:
    text = TOY.replace("lr = 0.5", 'lr = 0.5\naveraging = "ema:0.9"') + FAIR + AVERAGED
    toy = written(tmp_path, text.replace("validation_range", "tuning_seeds = 2\nvalidation_range"))
    assert toy.fair is not None and list(toy.fair.tuned_with) == [100, 101]
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out", column="fair"))
    assert outcome.complete and not outcome.failures
    rows = Rows(tmp_path / "out").refresh()
    tuning = [row for row in rows.values() if row["role"] == "tuning"]
    assert len(tuning) == 8  # two arms, two rates, two seeds: the third arm shares them
    last, averaged = toy.fair.arms[0], toy.fair.arms[-1]
    for arm, figure in ((last, "final_accuracy"), (averaged, "averaged_accuracy")):
        means = {
            rate: sum(r[figure] for r in tuning if r["lr"] == rate and r["label"] == "DP-SGD") / 2
            for rate in (0.1, 1.0)
        }
        best = chosen(toy, "digits", 2.0, arm, rows)
        assert best is not None and means[best.rate] == max(means.values())
        (line,) = [
            line
            for line in summarised(toy, rows_of(toy, rows))["fair"][0]["lines"]
            if line["label"] == arm.label
        ]
        assert line["tuning"] == pytest.approx({str(rate): mean for rate, mean in means.items()})
    read = [row for row in rows_of(toy, rows) if row["label"] == averaged.label]
    assert read
    for row in read:
        assert row["final_accuracy"] == rows[row["hash"]]["averaged_accuracy"]
        assert row["final_accuracy"] != rows[row["hash"]]["final_accuracy"]


def test_tuning_may_train_on_fewer_images_than_the_final_runs(tmp_path: Path) -> None:
    text = (TOY + FAIR).replace("train_range = [0, 300]", "train_range = [0, 500]")
    with pytest.raises(ConfigError, match="overlaps"):
        list(tasks_of(written(tmp_path, text), {}, ("fair",)))
    toy = written(
        tmp_path, text.replace("validation_range", "tuning_range = [0, 300]\nvalidation_range")
    )
    tuning = [task for task in tasks_of(toy, {}, ("fair",)) if task.role == "tuning"]
    assert {tuple(task.config["train_range"]) for task in tuning} == {(0, 300)}


RANGES = """
[ranges.digits]
train_range = [0, 200]
tuning_range = [0, 150]
validation_range = [400, 450]
"""


def test_a_dataset_may_have_images_of_its_own(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + RANGES + FAIR)
    published = toy.run(toy.arms[0], "digits", {}, 0)
    assert (published.train_range, published.test_range) == ([0, 200], [0, 100])
    spans = {
        task.role: (task.config["train_range"], task.config["validation_range"])
        for task in tasks_of(toy, {}, ("fair",))
    }
    assert spans == {"tuning": ([0, 150], [400, 450])}
    assert toy.fair is not None
    final = toy.fair_run(toy.fair.arms[0], "digits", 2.0, Candidate(0.1, {}), 0, tuning=False)
    assert (final.train_range, final.test_range) == ([0, 200], [0, 100])
    smoke = toy.quickened()
    assert smoke.run(smoke.arms[0], "digits", {}, 0).train_range == [0, 300]


def test_ranges_are_of_a_dataset_of_the_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranges has 'mnist'"):
        written(tmp_path, TOY + RANGES.replace("digits", "mnist"))


def test_an_arm_may_solve_for_its_noise(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + "epsilon = 3.0\n")
    first, second = (toy.run(arm, "digits", {}, 0) for arm in toy.arms)
    assert (first.epsilon, first.noise_multiplier) == (None, 1.0)
    assert (second.epsilon, second.noise_multiplier) == (3.0, None)


def test_a_tuning_seed_is_no_reported_one(tmp_path: Path) -> None:
    text = FAIR.replace("tuning_seed = 100", "tuning_seed = 2\nfirst_seed = 3\ntuning_seeds = 2")
    with pytest.raises(ConfigError, match="tuning_seed = 2"):
        written(tmp_path, TOY + text)


def test_what_came_later_changes_no_older_hash() -> None:
    """Rows of the first experiments keep their names."""
    older = RunSetting(
        dataset="digits",
        model="linear",
        method="dp-sgd",
        lr=0.5,
        lot=50,
        epochs=2,
        train_range=[0, 300],
        test_range=[0, 100],
        noise_multiplier=1.0,
    )
    assert not {"averaging", "views", "precision"} & older.config().keys()
    newer = older.model_copy(update={"averaging": "ema"})
    assert newer.config()["averaging"] == "ema"
    assert config_hash(newer.config()) != config_hash(older.config())
