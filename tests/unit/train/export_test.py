"""Exports give the same scores, and the card says the guarantee and no exact figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.own_tables import write_table
from tests.support.training import tiny
from vestige import load
from vestige.errors import ConfigError
from vestige.train.export import checked, to_hub, to_onnx, to_torch
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")
RUN = Path("run")


def trained(**changes: Any) -> dict[str, Any]:
    write_table(Path("t.csv"))
    values = {"train_size": None, "test_size": None, "model": "mlp", "out": RUN}
    return train(tiny(dataset="t.csv", **values | changes))


def test_a_program_of_torch_export_gives_the_same_scores() -> None:
    trained()
    model, _ = checked(RUN)
    program = torch.export.load(to_torch(model, Path("model.pt2"))).module()
    for rows in (1, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("name", ["linear", "cnn"])
def test_models_of_images_are_exported_too(name: str) -> None:
    train(tiny(model=name, steps=1, out=RUN))
    model, _ = checked(RUN)
    program = torch.export.load(to_torch(model, Path("model.pt2"))).module()
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(program(x), model(x))


def test_onnx_gives_the_same_scores() -> None:
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    trained()
    model, _ = checked(RUN)
    path = to_onnx(model, Path("model.onnx"))
    assert [one.name for one in Path().glob("model.onnx*")] == ["model.onnx"]  # weights and all
    x = torch.randn(3, 8)
    session = ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_onnx_without_its_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ONNX needs onnx.*pip install 'vestige-dp\[export\]'"):
        to_onnx(load(RUN), Path("model.onnx"))


def test_the_card_has_the_guarantee_in_its_front_matter_and_no_exact_figure() -> None:
    reader = pytest.importorskip("yaml")
    result = trained(delta=1e-6, evaluate_epsilon=1.0)
    model, stated = checked(RUN)
    names = {path.name for path in to_hub(RUN, model, stated, Path("hub"))}
    assert names == {
        "README.md",
        "model.json",
        "model.safetensors",
        "statement.json",
        "statement.md",
    }
    card = Path("hub/README.md").read_text()
    facts = reader.safe_load(card.split("---")[1])
    claim = facts["differential_privacy"]
    assert facts["tags"] == ["vestige", "differential_privacy", "dp-sgd"]
    assert claim["delta"] == 1e-6
    assert result["epsilon"] <= claim["epsilon"] <= result["epsilon"] * 1.00001
    assert claim["weights_sha256"] == stated["run"]["weights_sha256"]
    assert "record-level differential privacy, where a record is one row" in card
    noisy = f"{result['held_out_release']['accuracy']:.4g}"
    assert f"Held-out accuracy {noisy}" in card
    numbers = set(re.findall(r"\d+(?:\.\d+)?", card)) - {noisy}  # which may be right by chance
    exact = {f"{(result | result['metrics'])[n]:.4g}" for n in ("accuracy", "loss", "auc")}
    assert not {figure for figure in exact if "." in figure} & numbers
    x = torch.randn(2, 8)
    torch.testing.assert_close(load("hub")(x), model(x))


def test_the_card_says_how_to_load_it() -> None:
    pytest.importorskip("safetensors")
    Path("mine_exported.py").write_text(
        "from torch import nn\ndef small(shape, outputs):\n    return nn.Linear(*shape, outputs)\n"
    )
    for number, name in enumerate(("mlp", "mine_exported:small")):
        out = Path(f"run{number}")
        trained(model=name, out=out)
        to_hub(out, *checked(out, None if number == 0 else name), Path(f"hub{number}"))
        card = Path(f"hub{number}/README.md").read_text()
        (line,) = [line.strip() for line in card.splitlines() if "vestige.load(" in line]
        space: dict[str, Any] = {}
        exec(f"import vestige\n{line.replace('FOLDER', f'hub{number}')}", space)
        assert len(space["model"].predict("t.csv")) == 80
        assert "Inputs have the shape (8)" in card


@pytest.mark.parametrize(
    ("changes", "status"), [({"noise_multiplier": 0.0}, "none"), ({"noise_seed": 1}, "test mode")]
)
def test_a_card_without_a_guarantee_claims_none(changes: dict[str, Any], status: str) -> None:
    reader = pytest.importorskip("yaml")
    trained(**changes)
    to_hub(RUN, *checked(RUN), Path("hub"))
    card = Path("hub/README.md").read_text()
    facts = reader.safe_load(card.split("---")[1])
    assert facts["tags"] == ["vestige"] and facts["differential_privacy"]["status"] == status
    assert "There is no privacy guarantee" in card and "record-level" not in card
    assert "None were released" in card


def test_weights_of_another_run_are_refused() -> None:
    trained()
    state = torch.load(RUN / "model.pt", weights_only=True)
    torch.save({name: value + 1 for name, value in state.items()}, RUN / "model.pt")
    with pytest.raises(ConfigError, match="is not the model of the statement"):
        checked(RUN)
