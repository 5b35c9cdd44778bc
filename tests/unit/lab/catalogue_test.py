"""Which experiments there are, and that they are the papers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import run, run_json
from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab.grid import Plan, fair_cells, tasks_of
from vestige.lab.setting import config_hash
from vestige.train.recipes.catalogue import RECIPES

NAMES = [
    "fo-fig1",
    "fo-fig2",
    "fo-fig3",
    "fo-fig4",
    "fo-fig5",
    "fo-fig6",
    "fo-fig7",
    "fo-fig8",
    "fo-tab1",
    "fo-tab2",
    "fo-tab3",
    "fo-alpha",
    "fo-unstated",
    "fo-readings",
    "fo-equal",
    "fo-equal-others",
    "fo-tuned",
    "sma-fig2",
    "sma-fig3",
    "sma-fig4",
    "sma-fig5",
    "sma-tab2",
    "sma-tab3",
    "sma-tab4",
    "sma-alpha",
    "sma-window",
    "sma-shuffled",
    "sma-unstated",
    "sma-equal",
    "sma-equal-others",
    "sma-tuned",
    "sma-cnn",
    "scatter",
    "scatter-mirror",
    "scatter-mirror-memory",
    "scatter-cnn",
    "scatter-memory",
    "scatter-slices",
    "wrn",
    "wrn-memory",
    "sma-tab3-constants",
    "geodp-fig3",
    "geodp-fig4",
    "geodp-mnist",
    "anchor-cifar10",
    "ceiling",
    "ceiling-scatter",
    "prior",
]


def test_every_promised_experiment_is_there() -> None:
    assert catalogue.names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_complete(name: str) -> None:
    experiment = catalogue.find(name)
    assert experiment.title and experiment.paper and experiment.assumed
    tasks = list(tasks_of(experiment, {}))
    assert tasks
    if experiment.kind == "training":
        assert experiment.item and experiment.claim
        assert experiment.reference or not experiment.arms
        assert all(task.run is not None for task in tasks)


def test_the_fo_protocol() -> None:
    run = next(iter(tasks_of(catalogue.find("fo-tab3"), {}, ("published",)))).config
    expected = {
        "dataset": "cifar10",
        "model": "mlp",
        "train_range": [0, 5000],
        "test_range": [0, 2000],
        "clip": 1.0,
        "clipping": "flat",
        "noise_multiplier": 1.1,
        "lot": 200,
        "epochs": 250,
        "delta": 1e-5,
        "lr": 0.8,
    }
    assert {key: run[key] for key in expected} == expected
    assert run["lot"] / 5000 == 0.04
    assert run["settings"]["beta"] == 0.9
    assert run["settings"]["alpha"] == 0.8
    assert run["settings"]["window"] == 8


def grid(name: str, *keys: str) -> set[tuple[Any, ...]]:
    """The values of these keys over an experiment's published rows; settings count as keys."""
    found = set()
    for task in tasks_of(catalogue.find(name), {}, ("published",)):
        values = task.config["settings"] | task.config
        found.add(tuple(_hashable(values.get(key)) for key in keys))
    return found


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_the_printed_grids() -> None:
    assert grid("fo-fig2", "beta") == {(None,), (0.95,), (0.9,), (0.8,), (0.65,)}  # None: DP-SGD
    assert grid("fo-fig2", "dataset") == {("cifar10",), ("cifar100",), ("svhn",)}
    assert grid("fo-fig4", "window") == {(1,), (2,), (8,), (32,)}
    assert grid("fo-alpha", "alpha") == {(0.2,), (0.5,), (0.8,)}
    clips, noises = {0.5, 1.0, 1.5, 2.0}, {1.5, 2.0}
    assert grid("fo-fig7", "clip", "noise_multiplier") == {(c, s) for c in clips for s in noises}
    assert grid("sma-fig3", "beta") == {(None,), (0.9,), (0.7,), (0.5,)}
    intervals = ((1, 3), (2, 4), (2, 6), (3, 5), (4, 6), (5, 7))
    assert grid("sma-tab3", "interval") == {(interval,) for interval in intervals}
    assert grid("sma-tab2", "group_noise_multiplier", "clipping") == {
        (1.1, "per_layer"),
        (None, "flat"),
    }
    assert grid("sma-fig4", "model") == {("resnet18",)}
    assert grid("geodp-mnist", "model") == {("linear",), ("cnn",)}


def test_experiments_share_rows() -> None:
    def hashes(name: str) -> set[str]:
        return {task.hash for task in tasks_of(catalogue.find(name), {})}

    assert hashes("fo-tab1") == hashes("fo-tab2")
    assert hashes("fo-tab1") < hashes("fo-tab3")
    assert hashes("fo-fig3") < hashes("fo-fig2")
    assert hashes("fo-fig5") == hashes("fo-fig6")
    assert hashes("fo-fig1") & hashes("fo-tab3") & hashes("fo-fig2")
    assert len(hashes("sma-tab4") - hashes("sma-tab2")) == 3  # SMA at its runtime setting
    papers = [name for name in NAMES if not name.startswith(("scatter", "prior"))]
    everything = Plan([catalogue.find(name) for name in papers]).tasks({})
    assert len(everything) < 0.75 * sum(len(hashes(name)) for name in papers)


@pytest.mark.parametrize("name", ["fo-tab9", "", "../fo-tab3"])
def test_an_unknown_experiment(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown.*fo-tab3"):
        catalogue.find(name)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        catalogue.find(str(tmp_path / "nothing.toml"))


def test_no_folder_with_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESTIGE_EXPERIMENTS", str(tmp_path))
    with pytest.raises(ConfigError, match="VESTIGE_EXPERIMENTS"):
        catalogue.names()


def test_no_experiment_trains_on_its_validation_images() -> None:
    for name in NAMES:
        experiment = catalogue.find(name)
        if experiment.fair is None:
            continue
        whole = name.startswith(("scatter", "prior"))
        # Recipes have all records, of which their tuning runs leave out some.
        for task in tasks_of(experiment, {}, ("fair",)):
            trained, held_out = task.config["train_range"], task.config["validation_range"]
            assert task.role == "tuning" and task.config["test_range"] is None
            assert trained[0] == 0 and trained[1] <= held_out[0]
            if not whole:
                assert (trained, held_out) == ([0, 5000], [5000, 7000])


def test_svhn_is_said_to_be_cut_again_wherever_it_is_run() -> None:
    named = [e for e in map(catalogue.find, NAMES) if "svhn" in e.datasets + e.fair_datasets]
    assert {"fo-fig1", "ceiling", "scatter-slices"} <= {experiment.name for experiment in named}
    for experiment in named:
        told = " ".join(experiment.assumed)
        assert "SVHN is not the published 32x32 file" in told, experiment.name


@pytest.mark.parametrize(
    "name", ["fo-readings", "ceiling", "fo-unstated", "fo-alpha", "geodp-mnist"]
)
def test_assumed_values_are_not_called_published(name: str) -> None:
    assert "published" not in catalogue.find(name).heading


@pytest.mark.parametrize("name", ["fo-tab3", "fo-fig1", "sma-tab2", "sma-fig2"])
def test_the_fair_columns_have_both_controls(name: str) -> None:
    fair = catalogue.find(name).fair
    assert fair is not None
    assert fair.epsilons == [3.0, 8.0, 17.44]
    assert fair.seeds >= 5
    assert any(arm.values.get("momentum") == 0.9 for arm in fair.arms)
    assert any(arm.follows and arm.values["method"] == "dp-sgd" for arm in fair.arms)


def test_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run_json("reproduce --list")["experiments"]
    assert [line["name"] for line in listed] == sorted(NAMES)
    assert {"title", "paper", "published", "tuning", "fair"} <= listed[0].keys()
    shown = run("reproduce --list").stdout
    assert all(name in shown for name in NAMES)


def runs(name: str, role: str) -> list[tuple[str, dict[str, Any]]]:
    """The arm and the configuration of every fair run; the first rate counts as the best one."""
    experiment = catalogue.find(name)
    assert experiment.fair is not None
    tuning = role == "tuning"
    return [
        (arm.label, experiment.fair_run(arm, data, epsilon, best, seed, tuning).config())
        for data, epsilon, arm in fair_cells(experiment)
        for best in (arm.candidates() if tuning else arm.candidates()[:1])
        for seed in (experiment.fair.tuned_with if tuning else experiment.fair.reported)
    ]


def test_the_question_at_this_level_is_tuned_alike_and_on_other_images_and_seeds() -> None:
    experiment = catalogue.find("scatter-memory")
    assert experiment.fair is not None and experiment.fair.margin
    arms = {arm.label: arm for arm in experiment.fair.arms}
    assert next(iter(arms)) == "DP-SGD, averaged" and arms["DP-SGD, averaged"].averaged
    methods = {"dp-sgd", "fo", "sma", "fractional-noise", "banded-inverse", "disk", "dp-adam"}
    assert {arm.method for arm in arms.values()} == methods
    for label in (name for name in arms if not name.endswith("averaged")):
        assert arms[label].rates == arms[f"{label}, averaged"].rates
    spans = {"cifar10": (50000, 45000, 50000), "mnist": (60000, 50000, 60000)}
    for role, seeds in (("tuning", 5), ("final", 10)):
        made = runs("scatter-memory", role)
        assert len({config_hash(config) for _, config in made}) * 2 == len(made)
        for label, config in made:
            whole, first, end = spans[config["dataset"]]
            assert config["train_range"] == [0, whole if role == "final" else first], label
            if role == "tuning":
                assert config["validation_range"] == [first, end]
            else:
                assert config["test_range"] == [0, 10000]
        assert len({config["seed"] for _, config in made}) == seeds
    tuned, final = ({c["seed"] for _, c in runs("scatter-memory", r)} for r in ("tuning", "final"))
    assert not tuned & final


def test_slices_are_within_what_the_shared_files_hold() -> None:
    for role in ("tuning", "final"):
        for _, config in runs("scatter-slices", role):
            assert config["dataset"] in ("svhn", "cifar100")
            assert config["train_range"][1] <= 10000
            assert (config["test_range"] or config["validation_range"])[1] <= 10000
            assert config["test_range"] is None or config["test_range"][1] <= 5000


def test_wide_networks_are_the_recipes_at_epsilon_8() -> None:
    recipe = RECIPES["wrn"].settings
    for name in ("wrn", "wrn-memory"):
        experiment = catalogue.find(name)
        arms = {arm.label: arm for arm in experiment.arms}
        assert arms[experiment.reference].averaged and experiment.seeds == 3
        for task in tasks_of(experiment, {}):
            assert {key: task.config[key] for key in recipe} == dict(recipe)
            assert task.config["target_epsilon"] == 8.0 and task.config["noise_multiplier"] is None


def test_every_experiment_with_svhn_says_which_svhn() -> None:
    """Beside the name wherever it is, and in a sentence."""
    every = map(catalogue.find, catalogue.names())
    have = [one for one in every if "svhn" in (*one.datasets, *one.fair_datasets)]
    assert len(have) >= 5
    for experiment in have:
        assert experiment.notes == {"svhn": "digits cut again"}, experiment.name
        assert any("not the published 32x32 file" in line for line in experiment.assumed)
