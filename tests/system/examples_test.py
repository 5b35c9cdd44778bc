"""The examples run as they stand, and what they teach is true."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

import vestige
from tests.support.ranks import together
from tests.support.small_runs import SIGMA, private, run
from vestige.audit.verify.verdict import verify
from vestige.methods import METHODS
from vestige.statement import read
from vestige.train.config import TrainConfig
from vestige.train.training import train


@pytest.fixture
def last_two():
    """The method of examples/own_method.py, registered for one test."""
    method = importlib.import_module("examples.own_method").LastTwo
    yield method
    METHODS.pop("last-two")
    sys.modules.pop("examples.own_method")


def test_a_method_of_ones_own_is_known_by_its_name_and_charged_like_every_memory(last_two):
    assert METHODS["last-two"].load() is last_two
    engine, *rest = private("last-two", steps=4)
    run(engine, *rest, 4)
    (event,) = engine.ledger.merged()
    assert math.isclose(event.noise_multiplier, SIGMA / 0.9) and event.count == 4
    assert engine.diagnostics()["weights"][0][:2] == pytest.approx([0.7, 0.3])
    assert "as for FO-DP-SGD" in engine.statement(1e-5)["mechanism"]["text"]


def test_it_passes_every_check(last_two):
    assert verify(last_two(), seed=1, quick=True).passed


def check_said(printed, epsilon):
    (said,) = re.findall(r"2 ranks: accuracy (\S+), epsilon (\S+)", printed)
    assert float(said[0]) > 0.4 and epsilon - 0.1 < float(said[1]) <= epsilon


def test_two_processes_under_torchrun():
    script = Path(__file__).parents[2] / "examples" / "ddp.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(script)]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "EPOCHS": "2"}
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check_said(done.stdout, epsilon=3)


def test_two_processes_with_a_base_in_shards(tmp_path):
    """Forked: three more starts of torch would take longer than the training."""
    first, second = together("fsdp_lora", 2, tmp_path, program="torchrun_program")
    check_said(first["printed"], epsilon=8)
    assert not second["printed"]


def spent(result, lot, records):
    """Epsilon of Poisson-sampled Gaussian releases, by the accountant's own library alone."""
    release = PoissonSampledDpEvent(lot / records, GaussianDpEvent(result["noise_multiplier"]))
    return RdpAccountant().compose(release, result["steps"]).get_epsilon(1e-5)


@pytest.mark.parametrize(("name", "columns", "records"), [("cancer", 30, 462), ("wine", 13, 147)])
def test_the_tables_train_by_the_recipe_with_a_statement(name, columns, records, tmp_path):
    tables = importlib.import_module("examples.tables")
    tables.write(tmp_path / f"{name}.csv")
    made = {"recipe": "tabular", "epsilon": 8.0, "accountant": "rdp", "noise_seed": 1}
    out = tmp_path / "run"
    result = train(TrainConfig(dataset=str(tmp_path / f"{name}.csv"), out=out, **made))
    assert result["accuracy"] > 0.85 and 7.9 < result["epsilon"] <= 8
    stated = read(out)
    assert stated["mechanism"]["method"] == "dp-sgd"
    assert stated["guarantee"]["epsilon"] == result["epsilon"]
    assert result["epsilon"] == pytest.approx(spent(result, 128, records), rel=2e-3)
    assert vestige.load(out).facts["input_shape"] == [columns]


@pytest.mark.parametrize(
    ("data", "lot", "parameters"),
    [("digits", 1024, 32 * 25 + 129 * 10), ("mnist", 100, 32 * 25 + 513 * 10)],
)
def test_a_probe_learns_on_the_frozen_features_with_a_statement(data, lot, parameters, tmp_path):
    if data == "mnist" and not Path(os.environ.get("VESTIGE_DATA", ""), "mnist.npz").is_file():
        pytest.skip("VESTIGE_DATA names no folder with mnist.npz")
    name, out = "examples.frozen_features:random_convolutions", tmp_path / "run"
    made = {"recipe": "probe", "epsilon": 8.0, "accountant": "rdp", "noise_seed": 1, "lot": lot}
    sizes = {"train_size": 1000, "test_size": 300} if data == "mnist" else {}
    result = train(TrainConfig(dataset=data, features=name, out=out, epochs=10, **made, **sizes))
    assert result["accuracy"] > 0.8, result
    assert result["parameters"] == parameters
    stated = json.loads((out / "statement.json").read_text())
    assert stated == read(out)
    records = sizes.get("train_size", 1437)
    assert stated["guarantee"]["epsilon"] == pytest.approx(spent(result, lot, records), rel=2e-3)
    assert 7.9 < stated["guarantee"]["epsilon"] == result["epsilon"] <= 8
    assert stated["run"]["features"] == name
    assert any(f"those of {name}, frozen" in caveat for caveat in stated["caveats"])
