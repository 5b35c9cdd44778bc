"""The command spectrum: its options, table, plot and refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from tests.support import program
from tests.support.program import plain
from vestige.cli.app import app, load
from vestige.lab import spectrum_report
from vestige.memory.spectrum import ESTIMATORS, exponent, fit, tempering
from vestige.train import models
from vestige.train.config import MODELS


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def run(arguments: str, *more: str, **environment: str) -> Result:
    return program.run(f"spectrum {arguments}", *more, **environment)


def run_json(arguments: str, *more: str) -> dict[str, Any]:
    return program.run_json(f"spectrum {arguments}", *more)


command = pytest.mark.usefixtures("empty_folder")


class Dangerous:
    """Unpickled, it would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


def test_the_command_has_exactly_these_options() -> None:
    names = [name for parameter in load("spectrum").params for name in parameter.opts]
    options = ("--estimator", "--tail", "--plot", "--seed", "--json")
    assert sorted(names) == sorted(("target", *options))
    text = plain(run("--help", COLUMNS="200").stdout)
    assert all(word in text for word in (*options, ", ".join(ESTIMATORS), ", ".join(MODELS)))
    assert "Default: 0.5" in text
    assert spectrum_report.DEFAULT_TAIL == 0.5


@command
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_json_of_a_built_in_model(estimator: str, tmp_path: Path) -> None:
    report = run_json(f"mlp --estimator {estimator}")
    model = models.build("mlp", (3, 32, 32), 10, 0)
    weights = {k: v for k, v in model.state_dict().items() if v.ndim > 1}
    layers = report.pop("layers")
    assert report == {
        "target": "mlp",
        "estimator": estimator,
        "tail": 0.5 if estimator == "hill" else None,
        "seed": 0,
        "interval": [2.0, 6.0],
    }
    assert [layer["name"] for layer in layers] == list(weights)
    for layer, w in zip(layers, weights.values(), strict=True):
        found = fit(w, estimator)
        assert found is not None
        assert layer["shape"] == list(w.shape)
        assert layer["exponent"] == found.exponent
        assert layer["xmin"] == found.xmin
        assert layer["tail_size"] == found.tail_size
        assert layer["ks_distance"] == found.ks_distance
        assert layer["eigenvalues"] == len(found.eigenvalues)
        assert layer["tempering"] == tempering(found.exponent)
        inside = 2 <= found.exponent <= 6
        assert (layer["place"] == "inside") == inside == (layer["tempering"] == 0)
    assert not list(tmp_path.iterdir())  # --json alone draws nothing


@command
def test_tail_and_seed_reach_the_fit() -> None:
    report = run_json("mlp --tail 0.25 --seed 7")
    model = models.build("mlp", (3, 32, 32), 10, 7)
    first = exponent(model.get_parameter("hidden1.weight"), tail=0.25)
    assert report["layers"][0]["exponent"] == first
    assert (report["tail"], report["seed"]) == (0.25, 7)


@command
def test_the_table_and_the_plot() -> None:
    result = run("cnn")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cnn: power-law exponents (hill, tail 0.5)")
    assert " ".join(lines[1].split()) == "layer shape n tail xmin KS exponent [2, 6] tempering"
    assert lines[-1] == "plot  spectrum.png"
    assert Path("spectrum.png").read_bytes().startswith(b"\x89PNG")
    layers = run_json("cnn")["layers"]
    for line, layer in zip(lines[3:-1], layers, strict=True):
        cells = line.split()
        assert f"{cells[0]}.weight" == layer["name"]
        assert cells[1] == "x".join(map(str, layer["shape"]))
        assert [int(cells[2]), int(cells[3])] == [layer["eigenvalues"], layer["tail_size"]]
        assert float(cells[4]) == pytest.approx(layer["xmin"], rel=1e-2)
        assert float(cells[5]) == pytest.approx(layer["ks_distance"], abs=1e-3)
        assert float(cells[6]) == pytest.approx(layer["exponent"], abs=1e-3)
        assert cells[7] == layer["place"]
        assert float(cells[8]) == pytest.approx(layer["tempering"], abs=1e-3)


@command
def test_on_a_narrow_terminal_names_are_folded_and_figures_are_whole() -> None:
    result = run("mlp", FORCE_COLOR="1", COLUMNS="64")
    assert "…" not in result.stdout
    for layer in run_json("mlp")["layers"]:
        assert f"{layer['exponent']:.3f}" in plain(result.stdout)


@command
@pytest.mark.parametrize("name", ["out.png", "out.PDF", "deeper/out.svg"])
def test_the_plot_goes_where_it_is_asked_for(name: str) -> None:
    Path("deeper").mkdir()
    report = run_json("linear", "--plot", name)
    assert report["layers"][0]["exponent"] > 6
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    assert Path(name).read_bytes().startswith(starts[Path(name).suffix.lower()])
    assert len([p for p in Path().rglob("*") if p.is_file()]) == 1
    assert run("linear", "--plot", name).stdout.splitlines()[-1] == f"plot  {name}"


@command
def test_a_run_folder_gets_its_plot() -> None:
    train = "train --model linear --train-size 40 --test-size 20 --lot 8 --steps 2 --device cpu"
    line = [*train.split(), "--accountant", "rdp", "--out", "folder"]
    trained = CliRunner().invoke(app, line, catch_exceptions=False, prog_name="vestige")
    assert trained.exit_code == 0
    state = torch.load("folder/model.pt", weights_only=True)
    report = run_json("folder")
    assert report["seed"] is None
    assert [layer["name"] for layer in report["layers"]] == ["out.weight"]
    assert report["layers"][0]["exponent"] == exponent(state["out.weight"])
    assert not Path("folder/spectrum.png").exists()
    assert run("folder").stdout.splitlines()[-1] == f"plot  {Path('folder/spectrum.png')}"
    assert Path("folder/spectrum.png").read_bytes().startswith(b"\x89PNG")
    assert run_json("folder/model.pt")["layers"] == report["layers"]


@command
@pytest.mark.parametrize("key", [None, "model", "model_state_dict", "state_dict"])
def test_a_checkpoint_may_hold_more_than_the_weights(key: str | None) -> None:
    state = {
        "layer.weight": weight(20, 30),
        "layer.bias": weight(20),
        "conv.weight": weight(6, 4, 3, 3).bfloat16(),
        "table": torch.ones(4, 4, dtype=torch.int64),
        "broken": torch.full((9, 9), math.nan),
        "empty": torch.zeros(0, 3),
        "[bold]odd[/bold]": torch.eye(9),
    }
    optimizer = {"state": {0: {"exp_avg": weight(20, 30)}}}
    torch.save(state if key is None else {"epoch": 3, "optimizer": optimizer, key: state}, "it.pt")
    layers = {layer["name"]: layer for layer in run_json("it.pt")["layers"]}
    assert list(layers) == ["layer.weight", "conv.weight", "broken", "empty", "[bold]odd[/bold]"]
    assert layers["layer.weight"]["exponent"] == exponent(state["layer.weight"])
    assert layers["conv.weight"]["exponent"] == exponent(state["conv.weight"])
    for name in ("broken", "empty", "[bold]odd[/bold]"):
        layer = layers[name]
        assert layer.pop("name") == name
        assert layer.pop("shape") == list(state[name].shape)
        assert layer.pop("tempering") == 0
        assert set(layer.values()) == {None}
    result = run("it.pt")
    assert result.exit_code == 0
    assert "[bold]odd[/bold]" in result.stdout
    assert Path("spectrum.png").exists()


@command
def test_a_checkpoint_without_any_exponent_is_drawn_too() -> None:
    torch.save({"zeros": torch.zeros(5, 5)}, "zeros.pt")
    result = run("zeros.pt")
    assert result.exit_code == 0
    assert result.stdout.split().count("-") == 6
    assert Path("spectrum.png").exists()


@command
def test_a_file_with_the_name_of_a_model_is_reached_by_a_path() -> None:
    torch.save({"mine": weight(20, 30)}, "mlp")
    assert len(run_json("mlp")["layers"]) == 3
    assert [layer["name"] for layer in run_json("./mlp")["layers"]] == ["mine"]


@command
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "nope",
            "target 'nope' is neither a built-in model (linear, mlp, cnn, resnet18, wrn",
        ),
        ("nope.pt", "check the name or the path"),
        ("folder", "target 'folder' is a folder without model.pt: give a run folder"),
        ("text.pt", "checkpoint 'text.pt' is not a file of tensors alone"),
        ("empty.pt", "checkpoint 'empty.pt' is not a file of tensors alone"),
        ("object.pt", "write it with torch.save(model.state_dict(), file)"),
        ("list.pt", "checkpoint 'list.pt' holds a list, not a state_dict"),
        ("tensor.pt", "checkpoint 'tensor.pt' holds a Tensor, not a state_dict"),
        ("biases.pt", "target 'biases.pt' holds no weight of two or more dimensions"),
        ("mlp --estimator mle", "estimator 'mle' is unknown: choose one of hill"),
        ("mlp --tail 0", "tail 0.0 is not in (0, 1]"),
        ("mlp --tail 1.5", "tail 1.5 is not in (0, 1]"),
        ("mlp --tail nan", "tail nan is not in (0, 1]"),
        ("mlp --tail much", "Invalid value for '--tail'"),
        ("mlp --estimator clauset --tail 0.3", "tail 0.3 is given for the estimator 'clauset'"),
        ("mlp --seed -1", "seed=-1 must be a whole number"),
        ("good.pt --seed 3", "seed 3 is given for the checkpoint 'good.pt'"),
        ("mlp --plot out.xyz", "plot 'out.xyz' has no known image format"),
        ("mlp --plot out", "let it end in .png, .pdf, .svg"),
        ("mlp --plot missing/out.png", "plot 'missing/out.png' cannot be written"),
        ("mlp --plot folder.png", "give a file in a folder that exists"),
        ("", "Missing argument 'TARGET'"),
        ("mlp cnn", "unexpected extra argument"),
        ("mlp --no-such-option", "No such option: --no-such-option"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    Path("folder").mkdir()
    Path("folder.png").mkdir()
    Path("text.pt").write_text("no checkpoint")
    Path("empty.pt").touch()
    torch.save({"w": weight(9, 9), "more": Dangerous()}, "object.pt")
    torch.save([weight(9, 9)], "list.pt")
    torch.save(weight(9, 9), "tensor.pt")
    torch.save({"bias": weight(9), "count": 3}, "biases.pt")
    torch.save({"w": weight(9, 9)}, "good.pt")
    before = sorted(tmp_path.rglob("*"))
    for more in ((), ("--json",)):
        result = run(arguments, *more)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("vestige: error: ")
        assert message.lower() in result.stderr.lower()
        assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@command
def test_bad_arguments_are_found_before_torch_is_imported() -> None:
    commands = ["nope", "mlp --estimator mle", "mlp --tail 2", "mlp --plot out", "--help"]
    program = (
        "import sys\n"
        "from vestige.cli.app import app\n"
        f"for arguments in {commands!r}:\n"
        "    try:\n"
        "        app(['spectrum', *arguments.split()])\n"
        "    except SystemExit as end:\n"
        "        heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "        print('code', end.code, heavy)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    codes = [line for line in ran.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 2 set()"] * 4 + ["code 0 set()"]


@command
def test_json_imports_no_matplotlib() -> None:
    program = (
        "import sys\n"
        "from vestige.cli.app import app\n"
        "try:\n"
        "    app(['spectrum', 'mlp', '--json'])\n"
        "except SystemExit as end:\n"
        "    sys.exit(end.code or 3 * ('matplotlib' in sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(json.loads(ran.stdout)["layers"]) == 3


@command
def test_a_full_disk_gets_one_line_and_leaves_no_half_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = run("linear")
    assert result.exit_code == 1
    assert result.stderr.startswith("vestige: error: '") and result.stderr.count("\n") == 1
    assert "(No space left on device): make room" in result.stderr
    assert not list(Path().iterdir())
