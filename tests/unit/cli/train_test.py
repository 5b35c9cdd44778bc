"""`vestige train`: its options, its output, Ctrl-C, and one line for each bad input."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch

from tests.support.program import TINY, check_refused, plain, run, run_json, weights
from vestige import methods
from vestige.engine.caveats import REPEATABLE
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import config as settings

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_help_names_every_dataset_model_and_accountant() -> None:
    text = plain(run("train --help").stdout)
    for names in (settings.DATASETS, settings.MODELS, accounting.ACCOUNTANTS):
        assert ", ".join(names) in text


def test_train_prints_accuracy_privacy_and_the_folder() -> None:
    result = run(TINY)
    assert result.exit_code == 0
    folder = result.stdout.splitlines()[-1].removeprefix("run folder  ")
    written = json.loads((Path(folder) / "result.json").read_text())
    text = plain(result.stdout)
    assert f"accuracy {written['accuracy']:.2%} on the held-out split" in text
    bound = float(re.findall(r"epsilon ([\d.]+), delta 1e-05", text)[0])
    assert written["epsilon"] <= bound < written["epsilon"] + 0.01
    assert "training loss" not in text
    lines = result.stderr.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["epoch 1/2", "step 5/7"],
        ["epoch 2/2", "step 7/7"],
    ]
    assert all(re.search(r"epsilon [\d.]+  loss [\d.]+  accuracy [\d.]+%$", s) for s in lines)


def test_train_json_is_result_json_alone_on_stdout() -> None:
    report = run_json(TINY)
    assert json.loads((Path(report["folder"]) / "result.json").read_text()) == report


def test_on_a_terminal_there_is_a_live_bar_on_stderr() -> None:
    result = run(TINY, FORCE_COLOR="1", COLUMNS="120")
    assert result.exit_code == 0
    assert "\x1b[" in result.stderr
    last = plain(result.stderr).split("training")[-1]
    assert re.search(r"7/7 epsilon [\d.]+ loss [\d.]+ accuracy [\d.]+%", last)
    assert "training" not in result.stdout
    as_json = run(TINY, "--json", FORCE_COLOR="1", COLUMNS="120")
    assert json.loads(as_json.stdout)["steps"] == 7
    assert "7/7" in plain(as_json.stderr)


def test_every_option_reaches_the_run(tmp_path: Path) -> None:
    options = (
        "train --dataset digits --model mlp --method dp-sgd --noise-multiplier 1.5 --delta 1e-4 "
        "--accountant rdp_classic --lot 10 --epochs 2 --clip 1,2,3 --clipping per_layer --lr 0.125 "
        "--seed 9 --noise-seed 77 --device cpu --train-size 45 --test-size 15 --train-loss "
        "--out folder"
    )
    report = run_json(options)
    expected = {
        "dataset": "digits",
        "model": "mlp",
        "method": "dp-sgd",
        "noise_multiplier": 1.5,
        "delta": 1e-4,
        "accountant": "rdp_classic",
        "epsilon": accounting.epsilon([Event(10 / 45, 1.5, 10)], 1e-4, "rdp_classic"),
        "lot": 10,
        "records": 45,
        "steps": 10,
        "epochs": 2.0,
        "clip": [1.0, 2.0, 3.0],
        "clipping": "per_layer",
        "lr": 0.125,
        "seed": 9,
        "repeatable_noise": True,
        "device": "cpu",
        "folder": "folder",
    }
    assert {key: report[key] for key in expected} == expected
    assert report["accuracy"] * 15 == pytest.approx(round(report["accuracy"] * 15))
    assert isinstance(report["train_loss_outside_guarantee"], float)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["train_size"], config["test_size"]) == (45, 15)


def test_the_training_loss_is_marked_on_screen() -> None:
    result = run(TINY, "--train-loss")
    assert result.stderr.count("(outside the guarantee)") == 2
    assert re.search(r"training loss [\d.]+ outside the guarantee", plain(result.stdout))


def test_without_noise_epsilon_is_null() -> None:
    report = run_json(TINY, "--noise-multiplier", "0")
    assert report["epsilon"] is None
    assert report["guarantee"] == "none"
    text = plain(run(TINY, "--noise-multiplier", "0").stdout)
    assert "privacy no guarantee: epsilon is infinite" in text


def test_the_default_noise_multiplier_is_one_and_a_target_is_never_exceeded() -> None:
    report = run_json(TINY)
    assert report["noise_multiplier"] == 1.0
    assert report["delta"] == 1e-5
    assert report["epsilon"] == accounting.epsilon([Event(0.2, 1.0, 7)], 1e-5, "rdp")
    solved = run_json(TINY, "--epsilon", "1.5")
    assert 1.48 < solved["epsilon"] <= solved["target_epsilon"] == 1.5


def test_a_noise_seed_repeats_the_run_and_two_runs_without_it_differ() -> None:
    first, second = (run_json(TINY, "--noise-seed", "918273645") for _ in range(2))
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name])
    assert REPEATABLE in first["caveats"]
    for file in Path("runs").rglob("*.*"):
        assert file.is_dir() or b"918273645" not in file.read_bytes()
    assert REPEATABLE in plain(run(TINY, "--noise-seed", "918273645").stdout)
    third, fourth = (run_json(TINY) for _ in range(2))
    assert not torch.equal(weights(third)["out.weight"], weights(fourth)["out.weight"])


def test_settings_of_a_method_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Settable(methods.Method):
        info = methods.MethodInfo(name="settable", guarantee="proven: for tests")
        whole: int = 0
        real: float = 0.0
        flag: bool = False
        text: str = ""

    row = methods.MethodInfo(name="settable", home=Settable, guarantee="proven: for tests")
    monkeypatch.setitem(methods.METHODS, "settable", row)
    pairs = ("whole=3", "real=1e-3", "flag=True", "text=a=b")
    arguments = [part for pair in pairs for part in ("--set", pair)]
    report = run_json(TINY, "--method", "settable", *arguments)
    assert report["method"] == "settable"
    assert report["settings"] == {"whole": 3, "real": 0.001, "flag": True, "text": "a=b"}
    assert type(report["settings"]["whole"]) is int


def test_a_dataset_of_a_data_folder_and_pooch_keeps_quiet(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "sets").mkdir()
    np.savez(
        tmp_path / "sets" / "mnist.npz",
        x_train=rng.integers(0, 256, (30, 28, 28), dtype=np.uint8),
        y_train=np.arange(30) % 10,
        x_test=rng.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        y_test=np.arange(10) % 10,
    )
    pooch.get_logger().setLevel(logging.INFO)
    tiny = "train --model linear --lot 8 --steps 3 --accountant rdp --device cpu"
    report = run_json(f"{tiny} --dataset mnist --data-dir sets")
    assert (report["dataset"], report["records"], report["parameters"]) == ("mnist", 30, 7850)
    assert not pooch.get_logger().isEnabledFor(logging.WARNING)
    own = run_json(f"{tiny} --dataset sets/mnist.npz")
    assert own["dataset"] == "sets/mnist.npz"


def test_a_long_path_is_printed_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("[bold] " + "long " * 30)
    result = run(TINY, "--out", str(folder))
    assert result.stdout.splitlines()[-1] == f"run folder  {folder}"


def test_ctrl_c_writes_what_was_trained_and_exits_with_130(tmp_path: Path) -> None:
    arguments = (
        "-m vestige train --model linear --train-size 40 --test-size 20 --lot 8 --steps 1000000 "
        "--accountant rdp --device cpu --out out --json"
    )
    program = subprocess.Popen(
        [sys.executable, *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while not (tmp_path / "out" / "metrics.jsonl").exists():
            assert program.poll() is None, program.communicate()
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate()
    finally:
        program.kill()
    assert program.returncode == 130
    report = json.loads(output)
    assert report == json.loads((tmp_path / "out" / "result.json").read_text())
    assert report["interrupted"] is True
    assert 5 <= report["steps"] < 1000000
    planned = accounting.epsilon([Event(0.2, 1.0, 1000000)], 1e-5, "rdp")
    assert report["epsilon"] == planned
    assert weights({"folder": str(tmp_path / "out")}).keys() == {"out.weight", "out.bias"}
    assert errors == (
        "vestige: stopping after this step; Ctrl-C again stops now\n"
        f"vestige: interrupted after {report['steps']} steps; what was trained so far is in out; "
        "go on with: vestige resume out\n"
    )


def test_ctrl_c_before_training_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("vestige.train.data.load", press)
    result = run(TINY)
    assert result.exit_code == 130
    assert result.stderr == "vestige: interrupted\n"
    assert not list(tmp_path.iterdir())


BAD_TRAINING = [
    ("--dataset nope", "dataset 'nope' is neither one of digits"),
    ("--dataset missing.npz", "nor a file or folder of your own"),
    ("--dataset folder", "folder has no public schema"),
    ("--dataset .", ". has no public schema"),
    ("--dataset text.npz", "text.npz is not an .npz file, or it is cut off; own data are CSV"),
    ("--dataset short.npz", "short.npz has no y_train"),
    ("--dataset mnist --data-dir missing", "data_dir 'missing' is no folder"),
    ("--model vgg", "model 'vgg' is unknown"),
    ("--method sgd", "method='sgd' is unknown"),
    ("--set beta=0.9", "method 'dp-sgd' has no setting 'beta'"),
    ("--set beta", "--set 'beta' is not of the form KEY=VALUE"),
    ("--set =1", "--set '=1' is not of the form KEY=VALUE"),
    ("--set beta=", "--set 'beta=' is not of the form KEY=VALUE"),
    ("--set a=1 --set a=2", "--set a is given twice"),
    ("--noise-multiplier -1", "noise_multiplier -1.0 is out of range"),
    ("--noise-multiplier nan", "noise_multiplier nan is out of range"),
    ("--noise-multiplier much", "Invalid value for '--noise-multiplier'"),
    ("--epsilon 0", "epsilon 0.0 is out of range"),
    ("--epsilon 1 --noise-multiplier 1", "both given"),
    ("--epsilon 1e-300 --delta 1e-300", "cannot be reached"),
    ("--delta 1", "delta 1.0 is out of range: give a number strictly between 0 and 1"),
    ("--delta 0", "delta 0.0 is out of range: give a number strictly between 0 and 1"),
    ("--accountant gdp", "accountant 'gdp' is unknown"),
    ("--lot 0", "lot=0 must be a whole number"),
    ("--lot 1438", "lot 1438 is larger than the training data of 1437 records"),
    ("--train-size 50", "lot 64 is larger than the training data of 50 records"),
    ("--train-size 1438", "train_size is 1438, but the train split holds 1437"),
    ("--test-size 361", "test_size is 361, but the test split holds 360"),
    ("--epochs 0", "epochs=0 must be a whole number"),
    ("--epochs 1 --steps 1", "both given"),
    ("--clip 0", "clip 0.0 is out of range"),
    ("--clip one", "--clip 'one' is not a number"),
    ("--clip 1,", "--clip '1,' is not a number"),
    ("--clip 1,2", "clip has 2 numbers for 1 clipping groups"),
    ("--clipping sideways", "clipping 'sideways' is unknown"),
    ("--lr -0.1", "lr -0.1 is out of range"),
    ("--seed -1", "seed=-1 must be a whole number"),
    ("--noise-seed 1.5", "Invalid value for '--noise-seed'"),
    ("--device tpu", "device 'tpu' is unknown"),
    ("--device cuda:99", "device 'cuda:99' is not there"),
    ("--out folder", "out 'folder' is in use"),
    ("--out text.npz", "out 'text.npz' cannot be made"),
    ("--out text.npz/deeper", "out 'text.npz/deeper' cannot be made"),
    ("--no-such-option", "No such option: --no-such-option"),
    ("stray", "unexpected extra argument"),
    ("--lot", "requires an argument"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_TRAINING)
def test_bad_training_input_gets_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    (tmp_path / "text.npz").write_text("no zip file")
    np.savez(tmp_path / "short.npz", x_train=np.zeros((2, 2)))
    before = sorted(tmp_path.rglob("*"))
    check_refused(run(f"train {arguments}"), message)
    check_refused(run(f"train --json {arguments}"), message)
    assert sorted(tmp_path.rglob("*")) == before
