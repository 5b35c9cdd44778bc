"""Features learned from random images: no data, gone on with bit for bit, frozen in a run."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import vestige
from tests.support.training import press_at
from vestige import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.models import build, on_features
from vestige.train.recipes.features import check_rows
from vestige.train.recipes.pretraining import Pretraining
from vestige.train.recipes.prior import Prior, begin_from, pretrained
from vestige.train.training import resume, train

STEPS = 4
TINY = {"steps": STEPS, "batch": 8, "side": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prior") / "prior.pt"
    heard: list[tuple[int, int]] = []
    told = Pretraining(file=file, **TINY).run(lambda done, steps: heard.append((done, steps)))
    assert told["done"] and not told["interrupted"]
    assert heard == [(step, STEPS) for step in range(1, STEPS + 1)]
    return file


def test_a_file_holds_weights_and_public_settings_alone(made: Path) -> None:
    held = torch.load(made, weights_only=True)
    assert held.keys() == {"version", "settings", "step", "weights", "learner"}
    assert held["settings"] == {"steps": STEPS, "batch": 8, "side": 8, "seed": 0}
    assert (held["step"], held["learner"]) == (STEPS, None)
    assert held["weights"].keys() == Prior().state_dict().keys()


def test_a_run_in_pieces_is_the_whole_run(made: Path, tmp_path: Path) -> None:
    settings = Pretraining(file=tmp_path / "prior.pt", minutes=1e-9, **TINY)  # a step each time
    for step in range(1, STEPS):
        told = settings.run()
        assert (told["step"], told["done"]) == (step, False)
        with pytest.raises(ConfigError, match=f"unfinished, at step {step} of {STEPS}"):
            pretrained(settings.file, None)
    assert settings.run()["done"]
    whole, pieces = pretrained(made, None), pretrained(settings.file, None)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    before = settings.file.read_bytes()
    assert settings.run()["done"]  # nothing is left
    assert settings.file.read_bytes() == before


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    settings = Pretraining(file=tmp_path / "prior.pt", **TINY)
    told = settings.run(lambda done, steps: signal.raise_signal(signal.SIGINT))
    assert (told["step"], told["done"], told["interrupted"]) == (1, False, True)
    assert torch.load(settings.file, weights_only=True)["step"] == 1


def test_it_learns_to_tell_images_apart(tmp_path: Path) -> None:
    """Views of one image come nearer to each other than views of different ones."""
    from vestige.train.recipes.dead_leaves import dead_leaves, two_views

    settings = Pretraining(file=tmp_path / "prior.pt", **{**TINY, "steps": 15, "batch": 16})
    settings.run()
    torch.manual_seed(0)
    random, learned = Prior(), Prior()
    learned.load_state_dict(pretrained(settings.file, None))
    views = 2 * two_views(dead_leaves(64, 12, seed=10**6), 8, seed=1) - 1

    def found(model: Prior) -> float:
        """The share of views whose nearest is the other one of the same image."""
        with torch.no_grad():
            points = torch.nn.functional.normalize(model(views) - model(views).mean(0), dim=1)
        like = points @ points.T
        like.fill_diagonal_(-2)
        return float((like.argmax(1) == (torch.arange(128) + 64) % 128).float().mean())

    assert found(learned) > found(random)


def test_other_settings_and_other_files_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was begun with .*'seed': 0"):
        Pretraining(file=made, **TINY, seed=1).run()
    other = tmp_path / "other.pt"
    other.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"no file of vestige prior.*make it again"):
        Pretraining(file=other, **TINY).run()
    with pytest.raises(ConfigError, match="no file of vestige prior"):
        pretrained(other, None)
    with pytest.raises(ConfigError, match="side"):
        Pretraining(side=4)


def test_weights_are_found_where_data_lie(made, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("VESTIGE_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"no folder of data is named.*vestige prior prior\.pt"):
        pretrained(None, None)
    monkeypatch.setenv("VESTIGE_DATA", str(made.parent))
    assert pretrained(None, None).keys() == pretrained(made, None).keys()
    assert pretrained(None, tmp_path).keys() == pretrained(made, None).keys()
    with pytest.raises(ConfigError, match="no weights"):
        pretrained(tmp_path / "nothing.pt", None)


def test_weights_are_for_the_features_prior(made: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights .* are for the features prior"):
        TrainConfig(weights=made)
    with pytest.raises(ConfigError, match=r"weights .* are for the features prior"):
        TrainConfig(weights=made, model="wrn", features="scatter")
    with pytest.raises(ConfigError, match=r"grey or RGB"):
        on_features("prior", "linear", (2, 8, 8), 10)


def test_a_wide_residual_network_begins_with_them(made: Path) -> None:
    model, fresh = (build("wrn", (3, 8, 8), 10, seed=0) for _ in range(2))
    begin_from(model, pretrained(made, None))
    x, prior = torch.randn(3, 3, 8, 8), Prior()
    prior.load_state_dict(pretrained(made, None))
    assert torch.equal(model[:-3](x), prior.trunk(x))
    assert torch.equal(model[-1].weight, fresh[-1].weight)
    with pytest.raises(ConfigError, match="RGB"):
        begin_from(build("wrn", (1, 8, 8), 10), pretrained(made, None))


def test_a_run_of_the_whole_network_says_where_it_began(made: Path, tmp_path: Path) -> None:
    images = torch.rand(12, 8, 8, 3).mul(255).byte().numpy()
    labels = torch.arange(12).numpy() % 3
    data = {"x_train": images, "y_train": labels, "x_test": images[:3], "y_test": labels[:3]}
    np.savez(tmp_path / "own.npz", **data, classes=3)
    result = train(
        TrainConfig(
            dataset=str(tmp_path / "own.npz"), model="wrn", weights=made, lot=4, steps=1, lr=1e-9,
            noise_multiplier=1.0, out=tmp_path / "run", device="cpu",
        )
    )  # fmt: skip
    assert any("vestige prior has made it" in caveat for caveat in result["caveats"])
    held, weights = torch.load(tmp_path / "run/model.pt"), pretrained(made, None)
    for name in weights:
        assert held[name.removeprefix("trunk.")].allclose(weights[name], atol=1e-5)


def test_the_features_of_a_row_are_its_own() -> None:
    check_rows(on_features("prior", "linear", (1, 8, 8), 10, seed=0), "prior", (1, 8, 8))


def config(made: Path, out: Path) -> TrainConfig:
    return TrainConfig(
        recipe="prior", weights=made, out=out, train_size=120, test_size=30, lot=60, epochs=4,
        noise_multiplier=1.0, seed=0, noise_seed=3,
    )  # fmt: skip


def test_a_run_learns_the_head_alone_and_its_model_takes_images(made: Path, tmp_path: Path) -> None:
    result = train(config(made, tmp_path / "run"))
    assert result["steps"] == 8
    said = (tmp_path / "run/statement.md").read_text()
    assert "from no data, is taken on trust" in " ".join(said.split())
    model = vestige.load(tmp_path / "run")  # no file but the folder's own
    weights = pretrained(made, None)
    held = model.module.features[0].state_dict()
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert json.loads((tmp_path / "run/model.json").read_text())["features"] == "prior"
    assert str(made) not in (tmp_path / "run/config.json").read_text()


def test_other_weights_end_a_resume(made: Path, tmp_path: Path) -> None:
    """A head must not go on with features that it has not begun with."""
    file = tmp_path / "prior.pt"
    shutil.copy(made, file)
    assert train(config(file, tmp_path / "run"), progress=press_at(3))["interrupted"]
    held = torch.load(file, weights_only=True)
    name = next(iter(held["weights"]))
    torch.save({**held, "weights": {**held["weights"], name: held["weights"][name] + 1}}, file)
    with pytest.raises(ConfigError, match=r"features 'prior' have other weights"):
        resume(tmp_path / "run")
    shutil.copy(made, file)
    assert resume(tmp_path / "run")["steps"] == 8
