"""The experiments: what their files say, the runner that survives kills, and honest tuning."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.program import plain, run, run_json
from vestige.errors import ConfigError
from vestige.lab import catalogue, comparison, reporting
from vestige.lab.definition import Experiment, read
from vestige.lab.grid import Plan, Task, chosen_rate, tasks_of
from vestige.lab.progress import Display
from vestige.lab.rows import ROWS, TORN, Rows, RowStore, merge, parsed
from vestige.lab.runner import Request, reproduce, what_next
from vestige.lab.setting import RunSetting, config_hash
from vestige.lab.spending import epsilon_curve
from vestige.lab.summary import rows_of, summarised
from vestige.lab.training_row import make_row
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train.config import TrainConfig
from vestige.train.data import load_ranges

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
    "geodp-fig3",
    "geodp-fig4",
    "geodp-mnist",
]
QUICK = ("fo-fig8", "sma-tab3", "fo-tab3", "geodp-fig4")  # both columns, memory, no training

needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("VESTIGE_DATA", "")) / "cifar10.npz").is_file()
    or not os.environ.get("VESTIGE_DATA"),
    reason="the benchmark sets are not here: name their folder in VESTIGE_DATA",
)

TOY = """
name = "toy"
title = "A toy"
paper = "none"
item = "Table 0"
claim = "Nothing."
seeds = 2
reference = "DP-SGD"
tables = ["accuracy", "runtime", "memory", "targets"]
assumed = ["Everything."]

[targets]
digits = 0.2

[protocol]
datasets = ["digits"]
model = "linear"
train_range = [0, 300]
test_range = [0, 100]
lot = 50
epochs = 2
lr = 0.5
noise_multiplier = 1.0

[[arm]]
label = "DP-SGD"
method = "dp-sgd"
paper = { accuracy = 0.5, std = 0.1, low = 0.3, high = 0.7 }

[[arm]]
label = "FO"
method = "fo"
settings = { beta = 0.8, window = 3 }
"""

FAIR = """
[fair]
epsilons = [2.0]
validation_range = [300, 500]
tuning_seed = 100
seeds = 2

[[fair.arm]]
label = "DP-SGD"
method = "dp-sgd"
rates = [0.1, 1.0]

[[fair.arm]]
label = "FO"
method = "fo"
rates = [0.1, 1.0]

[[fair.arm]]
label = "control"
method = "dp-sgd"
follows = "FO"
"""


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def written(folder: Path, text: str, name: str = "toy") -> Experiment:
    """The experiment that a text describes."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return read(path)


def quiet(request: Request) -> Any:
    return reproduce(request, Display(quiet=True))


def stored(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / ROWS).read_text().splitlines()]


# -- what the files say ---------------------------------------------------------------------------


def test_every_promised_experiment_is_there() -> None:
    assert catalogue.names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_complete(name: str) -> None:
    experiment = catalogue.find(name)
    assert experiment.title and experiment.paper and experiment.assumed
    tasks = list(tasks_of(experiment, {}))
    assert tasks
    if experiment.kind == "training":
        assert experiment.item and experiment.claim and experiment.reference
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
    everything = Plan([catalogue.find(name) for name in NAMES]).tasks({})
    assert len(everything) < 0.7 * sum(len(hashes(name)) for name in NAMES)


def test_the_hash_is_of_what_changes_the_numbers(toy: Experiment) -> None:
    task = next(iter(tasks_of(toy, {})))
    assert config_hash(dict(reversed(task.config.items()))) == task.hash
    assert task.run is not None
    renamed = replace(toy, name="other", title="other", device="cuda")
    assert next(iter(tasks_of(renamed, {}))).hash == task.hash
    for change in ({"seed": 1}, {"lr": 0.4}, {"epochs": 3}, {"method": "fo"}, {"clip": 0.5}):
        assert config_hash(task.run.changed(**change).config()) != task.hash
    whole = replace(task.run, method="fo", settings={"beta": 1, "window": 3}, clip=1)
    spelled = replace(task.run, method="fo", settings={"beta": 1.0, "window": 3}, clip=1.0)
    assert config_hash(whole.config()) == config_hash(spelled.config())


BAD = {
    "an unknown key": (TOY + "\ncolour = 1\n", "'colour'"),
    "an unknown key at the top": ("colour = 1\n" + TOY, "top level.*'colour'"),
    "an unknown key of the protocol": (TOY.replace("lot = 50", "lots = 50"), "protocol.*'lots'"),
    "an unknown key of an arm": (TOY + 'lerning_rate = 1\n', "arm 2.*'lerning_rate'"),
    "an unknown method": (TOY.replace('"fo"', '"foo"'), r"arm 2 \(FO\).*'foo'.*choose"),
    "an ambiguous method": (TOY.replace('"fo"', '"sa-dp-sgd"'), "arm 2.*sharpness"),
    "an unknown setting": (TOY.replace("window", "widow"), "arm 2.*'widow'"),
    "a bad setting": (TOY.replace("beta = 0.8", "beta = 2.0"), "arm 2.*beta"),
    "an unknown dataset": (TOY.replace("digits", "digit"), "'digit'"),
    "no dataset": (TOY.replace('["digits"]', "[]").replace("digits = 0.2", ""), "datasets"),
    "an unknown model": (TOY.replace('"linear"', '"lineal"'), "'lineal'"),
    "a bad range": (TOY.replace("[0, 300]", "[300, 0]"), "train_range.*first, end"),
    "a lot above the data": (TOY.replace("lot = 50", "lot = 500"), "lot 500"),
    "no noise": (TOY.replace("noise_multiplier = 1.0", ""), "exactly one of noise_multiplier"),
    "an unknown kind": (TOY.replace('name = "toy"', 'name = "toy"\nkind = "odd"'), "kind.*'odd'"),
    "an unknown table": (TOY.replace('"runtime"', '"runtimes"'), "'runtimes'"),
    "an unknown reference": (TOY.replace('= "DP-SGD"\ntables', '= "SGD"\ntables'), "'SGD'"),
    "another name": (TOY.replace('"toy"', '"boy"'), "'boy' is not the file's name"),
    "no title": (TOY.replace('title = "A toy"', ""), "'title' is missing"),
    "a text for a number": (TOY.replace("lr = 0.5", 'lr = "fast"'), "fast"),
    "two arms of one label": (TOY.replace('"FO"', '"DP-SGD"'), "two arms"),
    "a word of the paper": (TOY.replace("std = 0.1", "sdt = 0.1"), "paper.*'sdt'"),
    "no arm": (TOY[: TOY.index("[[arm]]")], "no .*arm"),
    "no TOML": ("name = ", "no valid TOML"),
    "an overlap": (TOY + FAIR.replace("[300, 500]", "[299, 500]"), "overlaps"),
    "a leader that is not there": (TOY + FAIR.replace('= "FO"\n', '= "Fo"\n', 1), "'FO'"),
    "uneven tuning": (TOY + FAIR.replace("[0.1, 1.0]", "[0.1]", 1), "alike"),
    "a reported tuning seed": (TOY + FAIR.replace("seed = 100", "seed = 1"), "tuning_seed = 1"),
    "an unknown key of the fair column": (TOY + FAIR.replace("epsilons", "epsilon"), "epsilon"),
    "an unknown quick key": (TOY + "\n[quick]\nepoch = 1\n", "quick.*'epoch'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_by_name_and_key(case: str, tmp_path: Path) -> None:
    text, expected = BAD[case]
    path = tmp_path / "toy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_bad_file_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(TOY.replace('"fo"', '"foo"'))
    result = run("reproduce", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "'foo'" in result.stderr and "toy.toml" in result.stderr
    assert not (tmp_path / "out").exists()


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


# -- one row --------------------------------------------------------------------------------------


def test_a_row_holds_everything_and_can_be_made_again(toy: Experiment) -> None:
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    row = make_row(task)
    expected = {
        "hash", "experiment", "column", "role", "label", "config", "dataset", "model", "method",
        "settings", "seed", "lr", "final_accuracy", "best_accuracy", "final_loss", "epsilon",
        "epsilon_marginal", "delta", "noise_multiplier", "steps", "epochs", "seconds", "curve",
        "diagnostics", "versions", "hardware",
    }  # fmt: skip
    assert expected <= row.keys()
    assert parsed(json.dumps(row).encode()) == row
    assert row["steps"] == 12 and row["epochs"] == 2
    assert row["curve"]["epoch"] == [1, 2]
    assert row["curve"]["accuracy"][-1] == row["final_accuracy"]
    assert row["best_accuracy"] == max(row["curve"]["accuracy"])
    again = make_row(task)
    for changing in ("seconds",):
        row.pop(changing), again.pop(changing)
    assert row == again


def test_a_row_has_the_formal_epsilon_and_the_papers(toy: Experiment) -> None:
    row = make_row(next(t for t in tasks_of(toy, {}) if t.label == "FO"))
    event = Event(50 / 300, 1.0 / 0.8, 12)
    assert row["epsilon"] == accounting.epsilon([event], 1e-5, "pld")
    assert row["epsilon_marginal"] == accounting.epsilon([event], 1e-5, "rdp_classic")
    curve = row["curve"]["epsilon_marginal"]
    half = accounting.epsilon([replace(event, count=6)], 1e-5, "rdp_classic")
    assert curve == pytest.approx([half, row["epsilon_marginal"]], rel=1e-3)


def test_the_papers_noise_is_in_every_group(toy: Experiment) -> None:
    """sigma_g in each of the MLP's three groups, each clipped at the whole C."""
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    assert task.run is not None
    run_ = task.run.changed(
        model="mlp", clipping="per_layer", noise_multiplier=None, group_noise_multiplier=1.1
    )
    from vestige.train import training

    session = training.prepare(run_.train_config(), dataset=load_ranges("digits", (0, 300), (0, 9)))
    plan = session.engine.plan
    assert plan.bounds == (1.0, 1.0, 1.0)
    assert plan.noise_multiplier == pytest.approx(1.1 / 3**0.5)
    row = make_row(replace(task, run=run_, config=run_.config()))
    marginal = accounting.epsilon([Event(50 / 300, 1.1 / 0.8, 12)], 1e-5, "rdp_classic")
    assert row["epsilon_marginal"] == marginal
    joint = accounting.epsilon([Event(50 / 300, 1.1 / 3**0.5 / 0.8, 12)], 1e-5, "pld")
    assert row["epsilon"] == pytest.approx(joint, rel=1e-9)
    assert row["epsilon"] > marginal


def test_group_noise_excludes_other_noise() -> None:
    with pytest.raises(ConfigError, match="group_noise_multiplier"):
        TrainConfig(group_noise_multiplier=1.0, epsilon=1.0)


def test_memory_diagnostics_are_means_over_groups_and_steps(toy: Experiment) -> None:
    """Against the numbers of every step: the mean over groups and steps t >= window - 1."""
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    assert task.run is not None
    settings = {"beta": 0.8, "window": 4, "alpha": 0.9, "interval": [2.0, 2.5]}
    run_ = task.run.changed(model="mlp", method="sma", settings=settings, epochs=3)
    row = make_row(replace(task, run=run_, config=run_.config()))

    from vestige.train import training

    lines: list[Any] = []
    session = training.prepare(run_.train_config(), dataset=load_ranges("digits", (0, 300), (0, 9)))
    session.run(lambda p: lines.append(p.metrics) if p.metrics else None)
    for name in ("depth", "memory_ratio", "rho", "tempering"):
        values = [
            value
            for line in lines
            for step, groups in zip(
                line["diagnostics"]["step"], line["diagnostics"][name], strict=True
            )
            if step >= 3
            for value in groups
        ]
        assert len(values) == 3 * (18 - 3)
        mean = row["diagnostics"]["mean"][name]
        assert mean == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert row["diagnostics"]["epoch"] == [1, 2, 3]
    assert row["diagnostics"]["steps"] == [3, 6, 6]
    assert len(row["diagnostics"]["depth"][0]) == len(row["diagnostics"]["groups"]) == 3


def test_the_epsilon_curve_is_a_close_upper_bound() -> None:
    """Between the epochs that PLD was asked for, too."""
    epochs = 250
    for noise in (0.7, 1.2222, 4.5):
        spent = [[Event(0.04, noise, 25 * epoch)] for epoch in range(1, epochs + 1)]
        final = accounting.epsilon(spent[-1], 1e-5)
        curve = [e for e in epsilon_curve(spent, 1e-5, final) if e is not None]
        assert len(curve) == epochs
        assert curve == sorted(curve)
        for epoch in (1, 4, 11, 26, 61, 100, 137, 199, 222, 250):
            exact = accounting.epsilon(spent[epoch - 1], 1e-5)
            asked = min(epochs, -(-epoch // 8) * 8)
            assert exact <= curve[epoch - 1]
            assert curve[epoch - 1] <= accounting.epsilon(spent[asked - 1], 1e-5) * (1 + 1e-4)
            assert curve[epoch - 1] <= accounting.epsilon(spent[epoch - 1], 1e-5, "rdp") * 1.0001


@pytest.mark.parametrize(("rate", "noise", "per"), [(0.01, 1.0, 10), (0.005, 0.7, 2), (0.02, 1, 1)])
def test_the_epsilon_curve_is_no_chord(rate: float, noise: float, per: int) -> None:
    """Early epochs of a small rate: epsilon is concave there, and a chord lies below it."""
    spent = [[Event(rate, noise, per * epoch)] for epoch in range(1, 61)]
    curve = epsilon_curve(spent, 1e-5, accounting.epsilon(spent[-1], 1e-5))
    for events, shown in zip(spent, curve, strict=True):
        assert shown is not None and shown >= accounting.epsilon(events, 1e-5)


def test_the_epsilon_curve_without_a_guarantee() -> None:
    assert epsilon_curve([[Event(0.1, 0.0, 1)]], 1e-5, None) == [None]


def test_momentum_is_the_optimizers(toy: Experiment) -> None:
    task = next(iter(tasks_of(toy, {})))
    assert task.run is not None
    run_ = task.run.changed(momentum=0.9)
    row = make_row(replace(task, run=run_, config=run_.config(), hash=config_hash(run_.config())))
    assert row["optimizer"] == "SGD"
    assert row["final_loss"] != make_row(task)["final_loss"]


# -- rows that survive ----------------------------------------------------------------------------


def fake_row(task: Task) -> dict[str, Any]:
    return {"hash": task.hash, "config": task.config, "seconds": 0.0}


def filled(root: Path, experiment: Experiment) -> list[Task]:
    tasks = list(tasks_of(experiment, {}, ("published",)))
    with RowStore(root) as store:
        for task in tasks:
            store.append(fake_row(task))
    return tasks


def test_rows_are_read_as_they_come(tmp_path: Path, toy: Experiment) -> None:
    first, second, *_ = tasks_of(toy, {})
    reader = Rows(tmp_path)
    assert reader.refresh() == {}
    with RowStore(tmp_path) as store:
        store.append(fake_row(first))
        assert set(reader.refresh()) == {first.hash}
        with (tmp_path / ROWS).open("ab") as file:  # somebody is in the middle of a line
            line = json.dumps(fake_row(second)).encode() + b"\n"
            file.write(line[:30])
            file.flush()
            assert set(reader.refresh()) == {first.hash}
            file.write(line[30:])
            file.flush()
            assert set(reader.refresh()) == {first.hash, second.hash}
    assert reader.complaints == []


@pytest.mark.parametrize("cut", [1, 20, -2])
def test_a_cut_last_line_is_set_aside(tmp_path: Path, toy: Experiment, cut: int) -> None:
    tasks = filled(tmp_path, toy)
    whole = (tmp_path / ROWS).read_bytes()
    lines = whole.splitlines(keepends=True)
    torn = lines[-1][:cut]
    (tmp_path / ROWS).write_bytes(b"".join(lines[:-1]) + torn)
    with RowStore(tmp_path) as store:
        assert set(store.refresh()) == {task.hash for task in tasks[:-1]}
        assert "cut" in store.complaints[0] and TORN in store.complaints[0]
        store.append(fake_row(tasks[-1]))
    assert (tmp_path / ROWS).read_bytes() == whole
    assert (tmp_path / TORN).read_bytes() == torn + b"\n"


def test_a_row_that_lost_its_line_end_is_kept(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path, toy)
    whole = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(whole[:-1])
    with RowStore(tmp_path) as store:
        assert set(store.refresh()) == {task.hash for task in tasks}
        assert store.complaints == []
    assert (tmp_path / ROWS).read_bytes() == whole
    assert not (tmp_path / TORN).exists()


def test_damaged_lines_in_the_middle_are_set_aside(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path, toy)
    lines = (tmp_path / ROWS).read_bytes().splitlines(keepends=True)
    edited = lines[1].replace(b'"seed":1', b'"seed":7').replace(b'"seed": 1', b'"seed": 7')
    assert edited != lines[1]
    (tmp_path / ROWS).write_bytes(lines[0] + edited + b"garbage\n" + b"".join(lines[2:]))
    assert tasks[1].hash not in Rows(tmp_path).refresh()  # reading alone changes nothing
    with RowStore(tmp_path) as store:
        assert set(store.refresh()) == {t.hash for t in tasks} - {tasks[1].hash}
        assert "2 cut or damaged" in store.complaints[0]
    assert (tmp_path / TORN).read_bytes() == edited + b"garbage\n"


def test_a_line_that_another_process_tore_does_not_spoil_the_next(
    tmp_path: Path, toy: Experiment
) -> None:
    first, second, *_ = tasks_of(toy, {})
    with RowStore(tmp_path) as store:
        store.append(fake_row(first))
        with (tmp_path / ROWS).open("ab") as file:
            file.write(b'{"hash": "dead')
        store.append(fake_row(second))
        assert set(store.refresh()) == {first.hash, second.hash}
    assert (tmp_path / TORN).read_bytes() == b'{"hash": "dead\n'


def test_a_full_disk_keeps_every_finished_row(tmp_path: Path, toy: Experiment) -> None:
    """A limit on the size of files stands in for the disk: writes stop in the middle of a row."""
    script = """
        import resource, signal, sys
        from pathlib import Path
        from tests.unit.lab.runner_test import fake_row
        from vestige.lab.definition import read
        from vestige.lab.grid import tasks_of
        from vestige.lab.rows import RowStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tasks = list(tasks_of(read(Path(sys.argv[1])), {}, ("published",)))
        with RowStore(Path(sys.argv[2])) as store:
            store.append(fake_row(tasks[0]))
            size = (Path(sys.argv[2]) / "rows.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
            try:
                store.append(fake_row(tasks[1]))
            except OSError as error:
                print(error)
    """
    done = python(script, str(toy.path), str(tmp_path / "out"))
    assert "could not be added" in done and "is kept" in done and "same command" in done
    assert [row["hash"] for row in stored(tmp_path / "out")] == [next(iter(tasks_of(toy, {}))).hash]
    assert (tmp_path / "out" / ROWS).read_bytes().endswith(b"\n")


def test_a_full_disk_is_one_line_on_the_command_line(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = os.write, tmp_path / "out"

    def full(file: int, data: Any) -> int:
        if len(stored(out)) >= 2:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("vestige.lab.rows.os.write", full)
    monkeypatch.setattr("vestige.lab.training_row.make_row", lambda t, *_: full_row(t))
    result = run("reproduce", str(toy.path), "--out", str(out))
    assert result.exit_code == 1
    assert "No space left" in plain(result.stderr) and "free some space" in plain(result.stderr)
    assert "2 of 4 rows" in plain(result.stdout) and "continue with" in plain(result.stdout)
    monkeypatch.setattr("vestige.lab.rows.os.write", real)
    assert run("reproduce", str(toy.path), "--out", str(out)).exit_code == 0
    assert Counter(row["hash"] for row in stored(out)).most_common(1)[0][1] == 1
    assert len(stored(out)) == 4


def test_an_unwritable_folder(tmp_path: Path, toy: Experiment) -> None:
    (tmp_path / "file").write_text("")
    result = run("reproduce", str(toy.path), "--out", str(tmp_path / "file" / "results"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr and "--out" in result.stderr


def python(script: str, *arguments: str) -> str:
    """What a Python process prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    return done.stdout


def test_a_claim_excludes_other_processes_and_dies_with_its_own(
    tmp_path: Path, toy: Experiment
) -> None:
    task = next(iter(tasks_of(toy, {})))
    script = """
        import sys, time
        from pathlib import Path
        from vestige.lab.rows import RowStore
        with RowStore(Path(sys.argv[1])) as store, store.claim(sys.argv[2]) as mine:
            print(mine, flush=True)
            time.sleep(600)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), task.hash],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with RowStore(tmp_path) as store:
        with store.claim(task.hash) as mine:
            assert not mine
        with store.claim("0" * 16) as other:
            assert other
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with store.claim(task.hash) as mine:
            assert mine
    holder.stdout.close()


WORKER = """
    import random, sys, time
    from pathlib import Path
    from tests.unit.lab.runner_test import fake_row
    from vestige.lab.definition import read
    from vestige.lab.grid import Plan
    from vestige.lab.rows import RowStore
    from vestige.lab.worker import work
    out = Path(sys.argv[2])
    def make(task):
        with (out / "started.txt").open("a") as file:
            file.write(task.hash + "\\n")
        time.sleep(random.uniform(0, 0.02))
        return fake_row(task)
    with RowStore(out) as store:
        work(Plan([read(Path(sys.argv[1]))]), store, make, lambda event: None)
"""


def workers(path: Path, out: Path, count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that share the rows of an experiment, as two commands would."""
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(path), str(out)]
    root = Path(__file__).parents[3]
    return [subprocess.Popen(command, cwd=root) for _ in range(count)]


def test_workers_share_a_grid_and_run_no_row_twice(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 60"))
    for worker in workers(toy.path, tmp_path, 3):
        assert worker.wait(timeout=300) == 0
    hashes = {task.hash for task in tasks_of(toy, {})}
    assert len(hashes) == 120
    assert Counter(row["hash"] for row in stored(tmp_path)) == Counter(hashes)
    assert Counter((tmp_path / "started.txt").read_text().split()) == Counter(hashes)


def test_killed_workers_lose_and_double_no_row(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 60"))
    kept: list[bytes] = []
    for goal in (10, 40, 80):
        running = workers(toy.path, tmp_path, 2)
        wait_for(lambda goal=goal: len(Rows(tmp_path).refresh()) >= goal)  # type: ignore[misc]
        for worker in running:
            worker.kill()
            worker.wait()
        now = (tmp_path / ROWS).read_bytes()
        assert now.startswith(b"".join(kept))  # nothing that was there is gone or changed
        kept = now[: now.rfind(b"\n") + 1].splitlines(keepends=True)
    (last,) = workers(toy.path, tmp_path, 1)
    assert last.wait(timeout=300) == 0
    assert Counter(row["hash"] for row in stored(tmp_path)) == Counter(
        task.hash for task in tasks_of(toy, {})
    )


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; no test measures how long that takes."""
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to pass")


def command(experiment: Experiment, out: Path, *more: str) -> subprocess.Popen[str]:
    """The real runner in a process of its own."""
    line = [sys.executable, "-m", "vestige.lab", str(experiment.path), "--out", str(out)]
    return subprocess.Popen([*line, *more], stderr=subprocess.PIPE, text=True)


def test_the_runner_killed_in_the_middle_continues(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 4"))
    out = tmp_path / "out"
    first = command(toy, out, "--workers", "2")
    wait_for(lambda: len(Rows(out).refresh()) >= 1)
    first.kill()
    first.communicate()
    before = (out / ROWS).read_bytes()
    assert first.returncode == -signal.SIGKILL
    second = command(toy, out, "--workers", "2")
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert "8 of 8 rows" in said
    whole = before[: before.rfind(b"\n") + 1]
    assert (out / ROWS).read_bytes().startswith(whole)
    assert Counter(row["hash"] for row in stored(out)) == Counter(
        task.hash for task in tasks_of(toy, {})
    )


def test_ctrl_c_keeps_rows_and_says_how_to_continue(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY.replace("seeds = 2", "seeds = 200"))
    running = command(toy, tmp_path / "out", "--workers", "2")
    wait_for(lambda: len(Rows(tmp_path / "out").refresh()) >= 1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130
    assert f"continue with `vestige reproduce {toy.path}" in said and "--workers 2" in said
    assert "interrupted" in said
    assert len(stored(tmp_path / "out")) >= 1


# -- the runner -----------------------------------------------------------------------------------


def test_finished_rows_are_not_run_again(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request((toy,), out=tmp_path / "out")
    outcome = quiet(request)
    assert (outcome.total, outcome.finished, outcome.made, outcome.failures) == (4, 4, 4, [])
    before = (tmp_path / "out" / ROWS).read_bytes()

    def never(*_: Any) -> None:
        raise AssertionError("a finished row was run again")

    monkeypatch.setattr("vestige.lab.training_row.make_row", never)
    again = quiet(request)
    assert (again.finished, again.made, again.failures) == (4, 0, [])
    other = written(tmp_path, TOY.replace('"toy"', '"twin"'), "twin")
    shared = quiet(Request((other,), out=tmp_path / "out"))
    assert (shared.finished, shared.made) == (4, 0)
    assert (tmp_path / "out" / ROWS).read_bytes() == before


def test_more_seeds_add_rows(tmp_path: Path, toy: Experiment) -> None:
    quiet(Request((toy,), out=tmp_path / "out", seeds=1))
    assert len(stored(tmp_path / "out")) == 2
    quiet(Request((toy,), out=tmp_path / "out", seeds=3))
    assert len(stored(tmp_path / "out")) == 6
    reporting.write(toy, Rows(tmp_path / "out").refresh(), tmp_path / "out" / "toy")
    numbers = json.loads((tmp_path / "out" / "toy" / "table.json").read_text())
    assert [line["count"] for line in numbers["published"][0]["lines"]] == [3, 3]


def test_a_row_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_row

    def fragile(task: Task, *more: Any) -> Any:
        if task.label == "FO":
            raise ConfigError("this one cannot be made.")
        return real(task, *more)

    monkeypatch.setattr("vestige.lab.training_row.make_row", fragile)
    outcome = quiet(Request((toy,), out=tmp_path / "out"))
    assert (outcome.total, outcome.finished) == (4, 2)
    assert len(outcome.failures) == 2 and "this one cannot be made" in outcome.failures[0]
    assert "continue with" in " ".join(what_next(Request((toy,)), outcome))


def test_a_deadline_starts_no_more_rows(tmp_path: Path, toy: Experiment) -> None:
    outcome = quiet(Request((toy,), out=tmp_path / "out", minutes=1e-9))
    assert (outcome.finished, outcome.deadline, outcome.failures) == (0, True, [])


def test_smoke_runs_are_kept_apart(tmp_path: Path, toy: Experiment) -> None:
    request = Request((toy,), out=tmp_path / "out", quick=True)
    quiet(request)
    assert request.root == tmp_path / "out" / "quick"
    assert not (tmp_path / "out" / ROWS).exists()
    assert Request((toy,), quick=True).root == Path("runs/quick")
    real = {task.hash for task in tasks_of(replace(toy, protocol=toy.protocol | {"epochs": 9}), {})}
    assert not real & {row["hash"] for row in stored(request.root)}
    assert "smoke run" in " ".join(what_next(request, quiet(request)))


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"seeds": 0}, {"column": "middle"}, {"minutes": 0.0}]
)
def test_bad_requests(toy: Experiment, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Request((toy,), **options)


def test_rows_made_elsewhere_are_merged(tmp_path: Path, toy: Experiment) -> None:
    tasks = filled(tmp_path / "there", toy)
    with (tmp_path / "there" / ROWS).open("a") as file:
        file.write('{"hash": "cut')
    with RowStore(tmp_path / "here") as store:
        store.append(fake_row(tasks[0]))
        assert merge(store, tmp_path / "there" / ROWS) == (3, 1)
        assert merge(store, tmp_path / "there" / ROWS) == (0, 4)
        assert set(store.refresh()) == {task.hash for task in tasks}
        with pytest.raises(ConfigError, match="no file"):
            merge(store, tmp_path / "nothing")


def test_the_runner_needs_neither_typer_nor_rich() -> None:
    """Nor matplotlib, pooch or scikit-learn: what has to be there is torch and the accountant."""
    script = """
        import runpy, sys
        for name in ("typer", "rich", "matplotlib", "pooch", "sklearn", "vestige.cli.app"):
            sys.modules[name] = None
        sys.argv = ["vestige.lab", "--list"]
        try:
            runpy.run_module("vestige.lab", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
        import vestige.lab.worker, vestige.lab.training_row
    """
    assert "fo-tab3" in python(script)


# -- the fair column ------------------------------------------------------------------------------


def test_the_fair_column_tunes_then_runs(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    outcome = quiet(Request((toy,), out=tmp_path / "out", column="fair"))
    assert outcome.complete and not outcome.failures
    rows = Rows(tmp_path / "out").refresh()
    tuning = [row for row in rows.values() if row["role"] == "tuning"]
    finals = [row for row in rows.values() if row["role"] == "final"]
    assert len(tuning) == 4 and {row["seed"] for row in tuning} == {100}
    assert {row["seed"] for row in finals} == {0, 1}
    for row in finals:
        assert row["epsilon"] <= 2.0
        assert row["epsilon"] == pytest.approx(2.0, rel=2e-3)
        assert row["config"]["test_range"] == [0, 100]
    assert toy.fair is not None
    for arm in toy.fair.arms[:2]:
        own = [row for row in tuning if row["label"] == arm.label]
        best = max(own, key=lambda row: (row["final_accuracy"], -row["final_loss"]))
        assert chosen_rate(toy, arm, "digits", 2.0, rows) == best["lr"]
    control = rows_of(toy, rows)
    rates = {row["label"]: row["lr"] for row in control if row["role"] == "final"}
    assert rates["control"] == rates["FO"]


def test_the_same_epsilon_means_each_methods_own_noise(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    tasks = {task.label: task for task in tasks_of(toy, {}, ("fair",))}
    plain_, memory = make_row(tasks["DP-SGD"]), make_row(tasks["FO"])
    assert plain_["epsilon"] == pytest.approx(memory["epsilon"], rel=1e-3)
    assert memory["noise_multiplier"] == pytest.approx(0.9 * plain_["noise_multiplier"], rel=1e-3)


def images(folder: Path, spoilt: bool) -> None:
    """A small mnist.npz; if `spoilt`, its test images cannot be read."""
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(0, 256, (500, 28, 28), dtype=np.uint8),
        "y_train": np.arange(500, dtype=np.uint8) % 10,
        "x_test": generator.integers(0, 256, (100, 28, 28), dtype=np.uint8),
        "y_test": np.arange(100, dtype=np.uint8) % 10,
    }
    folder.mkdir()
    np.savez(folder / "mnist.npz", **arrays)
    if spoilt:
        with zipfile.ZipFile(folder / "mnist.npz") as whole:
            members = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(folder / "mnist.npz", "w") as file:
            for name, content in members.items():
                file.writestr(name, b"not an array" if "test" in name else content)


def test_tuning_never_reads_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test set raises when it is touched: all tuning is done before the first final row is."""
    images(tmp_path / "data", spoilt=True)
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "data"))
    text = (TOY + FAIR).replace('"digits"', '"mnist"').replace("digits = 0.2", "mnist = 0.2")
    toy = written(tmp_path, text)
    outcome = quiet(Request((toy,), out=tmp_path / "out", column="fair"))
    rows = Rows(tmp_path / "out").refresh()
    assert Counter(row["role"] for row in rows.values()) == {"tuning": 4}
    assert outcome.finished == 4 and len(outcome.failures) == outcome.total - 4
    assert all("mnist.npz" in failure for failure in outcome.failures)
    assert toy.fair is not None
    assert chosen_rate(toy, toy.fair.arms[0], "mnist", 2.0, rows) in (0.1, 1.0)
    # Mended, the command goes on where it was.
    shutil.rmtree(tmp_path / "data")
    images(tmp_path / "data", spoilt=False)
    again = quiet(Request((toy,), out=tmp_path / "out", column="fair"))
    assert again.complete and again.made == again.total - 4


def test_ranges_are_of_the_split_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(tmp_path / "data", spoilt=False)
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "data"))
    held_out = load_ranges("mnist", (0, 300), (20, 40))
    tuning = load_ranges("mnist", (0, 300), (300, 340), validation=True)
    with np.load(tmp_path / "data" / "mnist.npz") as file:
        scaled = {name: (file[name] / 255 - 0.5) / 0.5 for name in ("x_train", "x_test")}
    assert np.allclose(held_out.x_test[:, 0], scaled["x_test"][20:40], atol=1e-6)
    assert np.allclose(tuning.x_test[:, 0], scaled["x_train"][300:340], atol=1e-6)
    assert held_out.y_test.tolist() == [i % 10 for i in range(20, 40)]
    for split, span in (("train", {"train": (0, 501)}), ("test", {"held_out": (0, 101)})):
        with pytest.raises(ConfigError, match=split):
            load_ranges("mnist", **({"train": (0, 300), "held_out": (0, 9)} | span))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Unknown dataset"):
        load_ranges("nist", (0, 1), (0, 1))


def test_no_experiment_trains_on_its_validation_images() -> None:
    for name in NAMES:
        experiment = catalogue.find(name)
        if experiment.fair is None:
            continue
        assert experiment.fair.validation_range == (5000, 7000)
        for task in tasks_of(experiment, {}, ("fair",)):
            assert task.config["train_range"] == [0, 5000]
            if task.role == "tuning":
                assert task.config["test_range"] is None
                assert task.config["validation_range"] == [5000, 7000]


@pytest.mark.parametrize("name", ["fo-tab3", "fo-fig1", "sma-tab2", "sma-fig2"])
def test_the_fair_columns_have_both_controls(name: str) -> None:
    fair = catalogue.find(name).fair
    assert fair is not None
    assert fair.epsilons == (3.0, 8.0, 17.44)
    assert fair.seeds >= 5
    assert any(arm.values.get("momentum") == 0.9 for arm in fair.arms)
    assert any(arm.follows and arm.values["method"] == "dp-sgd" for arm in fair.arms)


# -- reports --------------------------------------------------------------------------------------


def full_row(task: Task) -> dict[str, Any]:
    """A row with made-up numbers that depend on the task alone."""
    assert task.run is not None
    luck = int(task.hash, 16) % 1000 / 20000
    epochs = task.run.epochs
    return {
        **fake_row(task),
        "experiment": task.experiment,
        "column": task.column,
        "role": task.role,
        "label": task.label,
        "dataset": task.run.dataset,
        "model": task.run.model,
        "method": task.run.method,
        "settings": task.config["settings"],
        "seed": task.run.seed,
        "lr": task.run.lr,
        "final_accuracy": 0.3 + luck,
        "best_accuracy": 0.35 + luck,
        "final_loss": 2.0,
        "epsilon": 3.0,
        "epsilon_marginal": 4.0,
        "delta": 1e-5,
        "noise_multiplier": 1.1,
        "steps": 10,
        "epochs": epochs,
        "seconds": 10 + luck,
        "curve": {
            "epoch": list(range(1, epochs + 1)),
            "accuracy": [0.3 + luck] * epochs,
            "loss": [2.0] * epochs,
            "epsilon": [3.0] * epochs,
        },
        "diagnostics": None,
        "versions": {},
        "hardware": {"processor": "none", "workers": 1, "device": "cpu"},
    }


def pretend(experiment: Experiment, root: Path) -> None:
    """Fill a results folder with made-up rows of both columns."""
    with RowStore(root) as store:
        for _ in range(2):  # the second time, the rates are chosen
            for task in tasks_of(experiment, store.refresh()):
                if task.hash not in store.refresh():
                    store.append(full_row(task))


def test_reports_come_from_rows_alone_and_are_the_same_bytes(tmp_path: Path) -> None:
    experiment = catalogue.find("fo-tab3")
    for place in ("a/results", "b/results"):
        pretend(experiment, tmp_path / place)
        rows = (tmp_path / place / ROWS).read_text().splitlines()
        if place.startswith("b"):  # the order in which workers finished does not matter
            (tmp_path / place / ROWS).write_text("\n".join(reversed(rows)) + "\n")
        result = run("report", str(tmp_path / place / "fo-tab3"))
        assert result.exit_code == 0, result.output
    for name in ("table.md", "table.json"):
        first = (tmp_path / "a/results/fo-tab3" / name).read_bytes()
        assert first == (tmp_path / "b/results/fo-tab3" / name).read_bytes()
        run("report", str(tmp_path / "a/results"))
        assert first == (tmp_path / "a/results/fo-tab3" / name).read_bytes()
    page = (tmp_path / "a/results/fo-tab3/table.md").read_text()
    assert "`vestige report results/fo-tab3`" in page
    assert "`vestige reproduce fo-tab3`" in page
    assert "0.3654 ± 0.0075 [0.3560, 0.3748]" in page
    assert "Holm's correction for 10 comparisons" in page
    assert "## Fair" in page and "epsilon 17.44" in page
    assert all(sentence in page for sentence in experiment.assumed)
    json.loads((tmp_path / "a/results/fo-tab3/table.json").read_text(), parse_constant=pytest.fail)


def test_a_report_says_what_is_missing(tmp_path: Path, toy: Experiment) -> None:
    pretend(toy, tmp_path)
    whole = (tmp_path / ROWS).read_bytes().splitlines(keepends=True)
    (tmp_path / ROWS).write_bytes(b"".join(whole[:-1]))
    rows = Rows(tmp_path).refresh()
    reporting.write(toy, rows, tmp_path / "toy")
    assert "| 1/2 |" in (tmp_path / "toy" / "table.md").read_text()
    numbers = summarised(toy, rows_of(toy, rows))
    assert [line["count"] for line in numbers["published"][0]["lines"]] == [2, 1]


def test_the_numbers_of_a_report_by_hand(tmp_path: Path, toy: Experiment) -> None:
    quiet(Request((toy,), out=tmp_path / "out"))
    rows = stored(tmp_path / "out")
    numbers = summarised(toy, rows_of(toy, Rows(tmp_path / "out").refresh()))
    first, second = numbers["published"][0]["lines"]
    accuracies = {
        label: [row["final_accuracy"] for row in rows if row["label"] == label]
        for label in ("DP-SGD", "FO")
    }
    assert first["accuracy"]["mean"] == pytest.approx(np.mean(accuracies["DP-SGD"]))
    assert first["accuracy"]["std"] == pytest.approx(np.std(accuracies["DP-SGD"], ddof=1))
    assert first["relative_seconds"] == pytest.approx(1.0)
    difference = np.mean(accuracies["FO"]) - np.mean(accuracies["DP-SGD"])
    assert second["against_reference"]["difference"] == pytest.approx(difference)
    assert second["against_reference"]["comparisons"] == 1
    assert second["memory"]["depth"] > 0
    assert first["paper"]["accuracy"] == 0.5


@pytest.mark.parametrize("place", ["nowhere", "results", "results/fo-tab9"])
def test_report_of_no_results(tmp_path: Path, place: str) -> None:
    (tmp_path / "results").mkdir()
    if place.endswith("9"):
        (tmp_path / "results" / ROWS).write_text("")
    result = run("report", str(tmp_path / place))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_report_of_an_experiment_without_rows(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("")
    result = run("report", str(tmp_path / "fo-tab3"))
    assert result.exit_code == 2
    assert "vestige reproduce fo-tab3" in plain(result.stderr)


def test_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run_json("reproduce --list")["experiments"]
    assert [line["name"] for line in listed] == sorted(NAMES)
    assert {"title", "paper", "published", "tuning", "fair"} <= listed[0].keys()
    shown = run("reproduce --list").stdout
    assert all(name in shown for name in NAMES)


def test_reproduce_as_json(tmp_path: Path, toy: Experiment) -> None:
    report = run_json("reproduce", str(toy.path), "--out", str(tmp_path / "out"))
    assert (report["total"], report["finished"], report["smoke_run"]) == (4, 4, False)
    assert (tmp_path / "out" / "toy" / "table.md").is_file()


# -- a user's own data ----------------------------------------------------------------------------


@pytest.fixture
def study() -> comparison.Study:
    base = TrainConfig(dataset="digits", model="linear", lot=100, epochs=2, train_size=400)
    return comparison.Study(("dp-sgd", "fo"), epsilon=2.0, base=base, seeds=2)


def test_compare_states_the_cost_of_the_whole_study(study: comparison.Study) -> None:
    report = comparison.compare(study)
    assert report["study_runs"] == 4
    events = []
    for line in report["methods"]:
        sigma = line["noise_multiplier"] / (0.9 if line["method"] == "fo" else 1.0)
        events.append(Event(0.25, sigma, 2 * 8))
        assert line["epsilon"] == pytest.approx(2.0, rel=2e-3)
    assert report["study_epsilon"] == pytest.approx(accounting.epsilon(events, 1e-5), rel=1e-6)
    assert report["study_epsilon"] > 2.0
    assert report["reference"] == "dp-sgd"
    assert report["methods"][1]["against_reference"]["comparisons"] == 1
    assert any("whole study" in sentence for sentence in comparison.words(report))


def test_compare_draws_fresh_noise_on_paired_starts(study: comparison.Study) -> None:
    first, second = comparison.compare(study), comparison.compare(study)
    assert [r["loss"] for r in first["runs"]] != [r["loss"] for r in second["runs"]]
    assert [(r["method"], r["seed"]) for r in first["runs"]] == [
        ("dp-sgd", 0), ("dp-sgd", 1), ("fo", 0), ("fo", 1)
    ]  # fmt: skip


def test_compare_tunes_on_records_that_no_run_trains_on(
    study: comparison.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vestige.train import training

    seen: list[Any] = []
    real = training.prepare

    def watching(config: Any, **options: Any) -> Any:
        seen.append(options["dataset"])
        return real(config, **options)

    monkeypatch.setattr("vestige.lab.comparison.training.prepare", watching)
    report = comparison.compare(replace(study, tune=True, seeds=1))
    assert report["validation_records"] == 80 and report["records"] == 320
    assert Counter(run["role"] for run in report["runs"]) == {"tuning": 8, "final": 2}
    assert report["study_runs"] == 10
    tuned = [d for d, run in zip(seen, report["runs"], strict=True) if run["role"] == "tuning"]
    final = [d for d, run in zip(seen, report["runs"], strict=True) if run["role"] == "final"]
    assert all(len(d.x_test) == 80 for d in tuned)
    assert all(len(d.x_test) == 360 for d in final)
    rows = {tuple(x.flatten().tolist()) for x in tuned[0].x_train}
    assert not rows & {tuple(x.flatten().tolist()) for x in final[0].x_test}
    assert tuned[0].x_train.equal(final[0].x_train)
    assert any("80 training records" in sentence for sentence in comparison.words(report))


def test_compare_at_equal_noise(study: comparison.Study) -> None:
    report = comparison.compare(replace(study, match="sigma", seeds=1))
    first, second = report["methods"]
    assert first["noise_multiplier"] == second["noise_multiplier"]
    assert first["epsilon"] == pytest.approx(2.0, rel=2e-3)
    assert second["epsilon"] < 1.95  # accounted at sigma/beta


def test_compare_after_an_interrupt_states_what_was_spent(
    study: comparison.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vestige.train import training

    real, runs = training.Session.run, []

    def broken_off(self: Any, tell: Any) -> dict[str, Any]:
        runs.append(self)
        result = real(self, tell)
        return result | {"interrupted": len(runs) == 2}

    monkeypatch.setattr(training.Session, "run", broken_off)
    report = comparison.compare(study)
    assert report["interrupted"] and len(runs) == 2
    assert [line["accuracy"]["count"] for line in report["methods"]] == [1]
    spent = accounting.epsilon(
        [Event(0.25, report["runs"][0]["noise_multiplier"], 2 * 8)], 1e-5
    )  # both runs, although only one is reported
    assert report["study_epsilon"] == pytest.approx(spent, rel=1e-6)


def test_compare_on_the_command_line() -> None:
    options = "--dataset digits --model linear --lot 100 --epochs 1 --train-size 300 --seeds 2"
    shown = plain(run(f"compare --methods dp-sgd,fo --epsilon 2 {options}").stdout)
    assert "whole study" in shown and "p (Holm)" in shown
    report = run_json(f"compare --methods dp-sgd,fo --epsilon 2 {options}")
    assert report["study_epsilon"] > 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--methods dp-sgd --epsilon 1", "at least two"),
        ("--methods dp-sgd,dp-sgd --epsilon 1", "different"),
        ("--methods dp-sgd,foo --epsilon 1", "'foo'"),
        ("--methods dp-sgd,fo --epsilon 0", "epsilon"),
        ("--methods dp-sgd,fo --epsilon 1 --match noise", "'noise'"),
        ("--methods dp-sgd,fo --epsilon 1 --seeds 0", "seeds"),
        ("--methods dp-sgd,fo --epsilon 1 --tune --lr 1", "tune"),
        ("--methods dp-sgd,fo --epsilon 1 --dataset nothing.npz", "nothing.npz"),
    ],
)
def test_bad_comparisons(options: str, expected: str) -> None:
    result = run(f"compare {options}")
    assert result.exit_code == 2
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_study_of_methods_for_two_relations_claims_the_weaker_one(
    study: comparison.Study,
) -> None:
    report = comparison.compare(replace(study, methods=("dp-sgd", "dp-ftrl"), seeds=1))
    assert "zero out one record" in report["guarantee"]
    assert "add or remove" not in report["guarantee"]


def test_a_study_with_a_method_that_is_not_private_has_no_guarantee(
    study: comparison.Study,
) -> None:
    with pytest.raises(ConfigError, match=r"no guarantee.*match sigma"):
        replace(study, methods=("dp-sgd", "dp-adam-ac"))
    report = comparison.compare(
        replace(study, methods=("dp-sgd", "dp-adam-ac"), match="sigma", seeds=1)
    )
    assert report["study_epsilon"] is None and report["guarantee"] == "none"
    assert report["not_private"] == ["dp-adam-ac"]
    assert "no guarantee" in comparison.words(report)[0]


# -- smoke runs of the real experiments -----------------------------------------------------------


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared, as rows are."""
    yield tmp_path_factory.mktemp("quick")


def smoke(name: str, out: Path) -> None:
    report = run_json(f"reproduce {name} --quick --out {out}")
    assert report["failures"] == []
    assert report["finished"] == report["total"] > 0
    assert report["smoke_run"]
    assert "smoke run" in (out / "quick" / name / "table.md").read_text()
    numbers = json.loads((out / "quick" / name / "table.json").read_text())
    cells = [*numbers.get("published", []), *numbers.get("fair", [])]
    assert all(line["count"] == line["expected"] for cell in cells for line in cell["lines"])
    assert all(len(p["points"]) == p["expected"] for p in numbers.get("panels", []))
    assert cells or numbers["panels"]
    before = {path: path.read_bytes() for path in (out / "quick" / name).glob("table.*")}
    assert run("report", str(out / "quick" / name)).exit_code == 0
    assert {path: path.read_bytes() for path in before} == before


@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, quick_results: Path) -> None:
    smoke(name, quick_results)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_quick_of_the_others(name: str, quick_results: Path) -> None:
    smoke(name, quick_results)


def test_run_settings_refuse_what_contradicts_itself() -> None:
    good: dict[str, Any] = {
        "dataset": "digits", "model": "linear", "method": "dp-sgd", "lr": 0.1, "lot": 10,
        "epochs": 1, "train_range": (0, 100), "test_range": (0, 10), "noise_multiplier": 1.0,
    }  # fmt: skip
    RunSetting(**good)
    for change, expected in (
        ({"epsilon": 1.0}, "exactly one of noise_multiplier"),
        ({"validation_range": (100, 200)}, "exactly one of test_range"),
        ({"momentum": 1.0}, "momentum"),
        ({"dataset": "file.npz"}, "unknown"),
    ):
        with pytest.raises(ConfigError, match=expected):
            RunSetting(**(good | change))
