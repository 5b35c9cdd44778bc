"""The model of a run folder: loaded as it was trained, and never as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.own_tables import rows, write_table
from tests.support.training import tiny
from vestige import load
from vestige.errors import ConfigError, VestigeError
from vestige.statement import read
from vestige.train.saved_model import sha256
from vestige.train.training import prepare, resume, train

pytestmark = pytest.mark.usefixtures("empty_folder")


def own(**changes: Any) -> dict[str, Any]:
    values = {"train_size": None, "test_size": None, "steps": 3, "out": Path("run")} | changes
    return train(tiny(dataset="t.csv", model=values.pop("model", "mlp"), **values))


def test_a_loaded_model_gives_the_scores_that_were_measured() -> None:
    config = tiny(out=Path("run"))
    result = train(config)
    model = load("run")
    assert not model.training
    data = prepare(config.changed(out=None)).dataset
    right = (model(data.x_test).argmax(1) == data.y_test).double().mean()
    assert float(right) == result["accuracy"]
    # From pixels as they come, 0 to 16 for digits.
    raw = ((data.x_test * 0.5 + 0.5) * 16).round().to(torch.uint8)[:, 0].numpy()
    torch.testing.assert_close(model.preprocess(raw), data.x_test)
    assert len(model.predict(raw)[0]["probabilities"]) == 10


def test_a_table_is_predicted_for_from_a_file_from_rows_and_from_columns() -> None:
    write_table(Path("t.csv"))
    own()
    model = load("run")
    by_file = model.predict("t.csv")
    columns = {name: [row[name] for row in rows()] for name in rows()[0]}
    assert by_file == model.predict(rows()) == model.predict(columns)
    assert {one["prediction"] for one in by_file} <= {"no", "yes"}
    assert sum(by_file[0]["probabilities"].values()) == pytest.approx(1)
    pandas = pytest.importorskip("pandas")
    assert model.predict(pandas.DataFrame(rows())) == by_file
    with pytest.raises(ConfigError, match="a list of rows, each a mapping"):
        model.predict([1, 2])


def test_labels_and_numbers_are_predicted_in_their_own_terms() -> None:
    write_table(Path("t.csv"), task="multi-label", target='["ill", "tall"]')
    result = own(out=Path("labels"))
    assert result["task"] == "multi-label" and 0 <= result["accuracy"] <= 1
    said = load("labels").predict(rows())[0]
    assert list(said["probabilities"]) == ["ill", "tall"] and isinstance(said["prediction"], list)
    write_table(Path("t.csv"), task="regression", target='"days"')
    result = own(out=Path("numbers"))
    assert result["accuracy"] is None
    days = [one["prediction"]["days"] for one in load("numbers").predict(rows())]
    assert 0 <= min(days) <= max(days) <= 40
    errors = [a - row["days"] for a, row in zip(days, rows(), strict=True)]
    assert 0 < result["metrics"]["rmse"] < 3 * float(np.std(errors)) + 20


def test_the_statement_names_the_weights_by_their_hash_and_the_day() -> None:
    train(tiny(out=Path("run")))
    stated = read(Path("run"))["run"]
    assert stated["weights_sha256"] == sha256(Path("run/model.pt").read_bytes())
    assert len(stated["date"]) == 10
    changed = Path("run/model.pt").read_bytes() + b" "
    assert sha256(changed) != stated["weights_sha256"]


FACTORY = """
from torch import nn
print("imported")
def small(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, outputs))
def broken(shape, outputs):
    raise KeyError("no")
def other(shape, outputs):
    return 3
def batched(shape, outputs):
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], outputs))
"""


def test_a_model_of_ones_own_is_trained_and_loaded_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_table(Path("t.csv"))
    Path("mine_saved.py").write_text(FACTORY)
    result = own(model="mine_saved:small")
    assert result["parameters"] == 8 * 5 + 5 + 5 * 2 + 2
    assert load("run", model="mine_saved:small").predict(rows())
    # A folder that names code is not believed.
    capsys.readouterr()
    __import__("sys").modules.pop("mine_saved")
    with pytest.raises(ConfigError, match=r"not believed when it names code.*mine_saved:small"):
        load("run")
    assert capsys.readouterr().out == ""
    refused = {
        "broken": "raised KeyError",
        "other": "returned a int",
        "batched": r"batched': module '0' .*: let the factory return vestige.fix\(net\)",
    }
    for name, message in refused.items():
        with pytest.raises(VestigeError, match=message):
            own(model=f"mine_saved:{name}", out=Path(name))


def test_a_run_with_a_model_of_ones_own_is_resumed_by_its_name() -> None:
    from tests.support.training import press_at

    write_table(Path("t.csv"))
    Path("mine_resumed.py").write_text(FACTORY)
    config = tiny(
        dataset="t.csv", model="mine_resumed:small", train_size=None, test_size=None,
        out=Path("run"),
    )  # fmt: skip
    assert train(config, progress=press_at(2))["interrupted"]
    with pytest.raises(ConfigError, match="--model mine_resumed:small"):
        resume("run")
    assert not resume("run", model="mine_resumed:small")["interrupted"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "cnn"}, "cnn needs images"),
        ({"outputs": 7, "labels": list("abcdefg")}, "do not belong to the model 'linear'"),
        ({"outputs": 7}, "7 outputs have 10 labels"),
        ({"outputs": "x"}, "is damaged"),
        ({"labels": None}, "is damaged"),
        ({"labels": [[1]] * 10}, r"labels\[0\]"),
        ({"labels": ["a"]}, "10 outputs have 1 labels"),
        ({"ranges": [[0, 1]]}, "10 outputs have 1 ranges"),
        ({"ranges": [[0, "x"]] * 10}, r"ranges\[0\]\[1\]"),
        ({"task": ["x"]}, "task"),
        ({"input_shape": [-64]}, r"input_shape\[0\]"),
        ({"preprocessing": {"kind": "pickle"}}, r"preprocessing\.kind"),
        ({"preprocessing": {"kind": "pixels", "white": "16"}}, r"preprocessing\.white"),
        ({"preprocessing": {"kind": "pixels", "white": 0}}, r"preprocessing\.white"),
        ({"preprocessing": {"kind": "schema", "schema": [1]}}, r"preprocessing\.schema"),
        ({"preprocessing": {"kind": "schema"}, "input_shape": [1, 8, 8]}, "no .columns.NAME"),
        ({"model": "none"}, "Unknown model 'none'"),
    ],
)
def test_a_damaged_description_is_refused(changes: dict[str, Any], message: str) -> None:
    train(tiny(out=Path("run")))
    facts = json.loads(Path("run/model.json").read_text()) | {"input_shape": [64]} | changes
    Path("run/model.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=message):
        load("run")


def test_a_folder_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no model\.json"):
        load("nowhere")
    train(tiny(out=Path("run")))
    Path("run/model.pt").write_bytes(b"none")
    with pytest.raises(ConfigError, match="cannot be read"):
        load("run")


def test_one_record_is_told_to_be_a_list() -> None:
    write_table(Path("t.csv"))
    own(out=Path("run"))
    model, (one, *_) = load("run"), rows()
    with pytest.raises(ConfigError, match=r"a column is .*: for a single record write \[record\]"):
        model.predict(one)
    assert len(model.predict([one])) == 1


def test_records_of_another_shape_are_refused() -> None:
    train(tiny(out=Path("run")))
    np.save("x.npy", np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"shape \(3,\), and the model was trained on \(1, 8, 8"):
        load("run").predict("x.npy")
    Path("x.npz").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"takes an \.npz or \.npy file"):
        load("run").predict("x.npz")
