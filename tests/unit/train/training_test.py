"""The training loop behind the command line: settings, files, seeds, interrupts, epsilon."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from vestige import files, methods
from vestige.engine import checkpoint
from vestige.engine.caveats import REPEATABLE, PrivacyEngine
from vestige.errors import ConfigError
from vestige.methods import MethodInfo
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import config as settings
from vestige.train import data, models
from vestige.train import loop as session
from vestige.train import run_folder as runfolder
from vestige.train.config import TrainConfig
from vestige.train.training import Progress, prepare, train

LINE = {"step", "epoch", "epsilon", "test_loss", "test_accuracy"}
RESULT: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "settings": dict,
    "dataset": str,
    "model": str,
    "accuracy": float,
    "loss": float,
    "measured_on": str,
    "epsilon": float,
    "delta": float,
    "target_epsilon": type(None),
    "accountant": str,
    "guarantee": str,
    "adjacency": str,
    "beta": float,
    "noise_multiplier": float,
    "sample_rate": float,
    "lot": int,
    "records": int,
    "steps": int,
    "epochs": float,
    "clip": float,
    "clipping": str,
    "optimizer": str,
    "lr": float,
    "parameters": int,
    "seed": int,
    "repeatable_noise": bool,
    "interrupted": bool,
    "max_epsilon": type(None),
    "budget_spent": bool,
    "lost_releases": int,
    "earlier_releases": int,
    "caveats": list,
    "device": str,
    "folder": str,
    "versions": dict,
}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tiny(**changes: Any) -> TrainConfig:
    """A run of a few milliseconds: 40 records, 5 lots an epoch."""
    values: dict[str, Any] = {
        "model": "linear",
        "train_size": 40,
        "test_size": 20,
        "lot": 8,
        "steps": 7,
        "accountant": "rdp",
        "device": "cpu",
        "noise_multiplier": None if "epsilon" in changes else 1.0,
    }
    return TrainConfig(**values | changes)


def weights(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    loaded = torch.load(Path(result["folder"]) / "model.pt", weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def read(result: dict[str, Any], name: str) -> Any:
    return json.loads((Path(result["folder"]) / name).read_text())


def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    text = (Path(result["folder"]) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# -- settings -------------------------------------------------------------------------------


def test_names_are_those_of_the_rooms_that_need_torch() -> None:
    assert settings.DATASETS == data.DATASETS
    assert settings.MODELS == models.MODELS
    assert set(session._ROWS) == set(models.MODELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "nope"}, "dataset 'nope' is neither"),
        ({"dataset": "no/such.npz"}, "nor an .npz file that can be read"),
        ({"dataset": "."}, "nor an .npz file that can be read"),
        ({"dataset": "a" * 300}, "nor an .npz file that can be read"),
        ({"model": "vgg"}, "model 'vgg' is unknown"),
        ({"method": "sgd"}, "method='sgd' is unknown"),
        ({"settings": {"beta": 0.9}}, "no setting 'beta'"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "both given"),
        ({"noise_multiplier": -1.0}, "noise_multiplier -1.0 is out of range"),
        ({"noise_multiplier": math.nan}, "noise_multiplier nan is out of range"),
        ({"noise_multiplier": math.inf}, "noise_multiplier inf is out of range"),
        ({"noise_multiplier": True}, "noise_multiplier True is out of range"),
        ({"epsilon": 0.0}, "epsilon 0.0 is out of range"),
        ({"epsilon": math.inf}, "epsilon inf is out of range"),
        ({"delta": 1.0}, "delta 1.0 is out of range: give a number strictly between 0 and 1"),
        ({"delta": 0.0}, "delta 0.0 is out of range: give a number strictly between 0 and 1"),
        ({"delta": math.nan}, "delta nan is out of range: give a number strictly between 0 and 1"),
        ({"accountant": "gdp"}, "accountant 'gdp' is unknown"),
        ({"lot": 0}, "lot=0 must be a whole number"),
        ({"lot": 2.5}, "lot=2.5 must be a whole number"),
        ({"lot": 41}, "lot 41 is larger than the training data of 40 records"),
        ({"epochs": 0, "steps": None}, "epochs=0 must be a whole number"),
        ({"steps": -3}, "steps=-3 must be a whole number"),
        ({"epochs": 2}, "both given"),
        ({"train_size": 0}, "train_size=0 must be a whole number"),
        ({"test_size": 0}, "test_size=0 must be a whole number"),
        ({"clip": 0.0}, "clip 0.0 is out of range"),
        ({"clip": (1.0, -1.0)}, "clip -1.0 is out of range"),
        ({"clipping": "by_moon"}, "clipping 'by_moon' is unknown"),
        ({"lr": 0.0}, "lr 0.0 is out of range"),
        ({"lr": math.nan}, "lr nan is out of range"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"seed": 2**63}, "must be a whole number"),
        ({"noise_seed": 1.5}, "noise_seed must be a whole number"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"device": "cuda:x"}, "device 'cuda:x' is unknown"),
        ({"data_dir": Path("nowhere")}, "data_dir 'nowhere' is no folder"),
    ],
)
def test_a_bad_setting_is_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(**changes)
    assert message in str(caught.value)


def test_an_out_folder_in_use_or_out_of_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out in ("full", "full/file", "full/file/deeper", "a" * 300):
        with pytest.raises(ConfigError, match=r"^out "):
            tiny(out=tmp_path / out)
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match="'runs' is not a folder"):
        tiny()


def test_what_the_data_decide_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Found after loading: nothing was calibrated, trained or written by then."""
    cases = [
        (tiny(train_size=None, lot=1438), "lot 1438 is larger than the training data of 1437"),
        (tiny(train_size=1438), "train_size is 1438"),
        (tiny(test_size=361), "test_size is 361"),
        (tiny(clip=(1.0, 2.0)), "clip has 2 numbers for 1 clipping groups"),
        (tiny(model="mlp", clip=(1.0, 2.0), clipping="per_layer"), "hidden1, hidden2, out"),
        (tiny(device="cuda:99"), "device 'cuda:99' is not there"),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError) as caught:
            train(config)
        assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_defaults_follow_the_dataset_and_the_method(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=np.zeros((2, 3)))
    for dataset, model, lot in [
        ("digits", "mlp", 64),
        ("own.npz", "mlp", 64),
        ("svhn", "cnn", 512),
    ]:
        config = TrainConfig(dataset=dataset)
        assert (config.chosen_model, config.chosen_lot) == (model, lot)
    assert TrainConfig().chosen_clipping == methods.DPSGD.clipping
    assert TrainConfig(clipping="per_layer").chosen_clipping == "per_layer"
    assert TrainConfig().planned_steps(1437) == 30 * 23
    assert TrainConfig(epochs=2).planned_steps(1437) == 2 * 23
    assert TrainConfig(steps=5).planned_steps(1437) == 5


def test_the_noise_seed_is_in_no_representation() -> None:
    config = tiny(noise_seed=918273645)
    assert "918273645" not in repr(config) + str(config.public())
    assert config.public()["repeatable_noise"] is True
    with pytest.raises(ValidationError, match="frozen"):
        config.lot = 3  # type: ignore[misc]


# -- files ----------------------------------------------------------------------------------


def test_the_run_folder_holds_these_files_with_these_fields() -> None:
    result = train(tiny())
    folder = Path(result["folder"])
    assert folder.parent == Path("runs")
    assert {f.name for f in folder.iterdir()} == {
        "config.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "model.pt",
        "result.json",
        "statement.json",
        "statement.md",
    }
    assert read(result, "result.json") == result
    assert {key: type(value) for key, value in result.items()} == RESULT
    assert [line["step"] for line in lines(result)] == [5, 7]
    assert [line["epoch"] for line in lines(result)] == [1, 2]
    assert all(set(line) == LINE for line in lines(result))
    assert lines(result)[-1]["test_accuracy"] == result["accuracy"]
    config = read(result, "config.json")
    assert config["planned_epsilon"] == result["epsilon"]
    assert (config["planned_steps"], config["lot"], config["noise_multiplier"]) == (7, 8, 1.0)
    assert "noise_seed" not in config


def test_the_result_says_what_was_run() -> None:
    result = train(tiny(steps=None, epochs=2, clip=0.5, clipping="per_layer", lr=0.25, seed=3))
    expected = {
        "method": "dp-sgd",
        "dataset": "digits",
        "model": "linear",
        "accountant": "rdp",
        "sample_rate": 0.2,
        "lot": 8,
        "records": 40,
        "steps": 10,
        "epochs": 2.0,
        "clip": 0.5,
        "clipping": "per_layer",
        "lr": 0.25,
        "seed": 3,
        "parameters": 650,
        "optimizer": "SGD",
        "repeatable_noise": False,
        "interrupted": False,
        "guarantee": accounting.GUARANTEE,
    }
    assert {key: result[key] for key in expected} == expected


def test_the_weights_are_the_model_that_was_measured() -> None:
    result = train(tiny(steps=20))
    model = models.build("linear", (1, 8, 8), 10)
    model.load_state_dict(weights(result))
    test = data.load("digits", train_size=40, test_size=20)
    with torch.no_grad():
        scores = model(test.x_test)
    assert result["accuracy"] == (scores.argmax(1) == test.y_test).double().mean().item()
    loss = torch.nn.functional.cross_entropy(scores, test.y_test).item()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_config_is_written_before_the_first_lot() -> None:
    seen: list[list[str]] = []

    def watch(progress: Progress) -> None:
        if progress.stage == "training" and progress.step == 0:
            seen.append(sorted(f.name for f in Path("out").iterdir()))

    train(tiny(out=Path("out")), progress=watch)
    (names,) = seen
    assert names[0] == "checkpoint.pt"
    assert names[1].endswith(".secret")
    assert names[2:] == ["config.json", "ledger.jsonl"]


def test_runs_of_the_same_second_get_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(runfolder.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Stopped:
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runfolder, "datetime", Stopped)
    names = [Path(train(tiny(steps=1))["folder"]).name for _ in range(3)]
    first = "digits-linear-dp-sgd-20300102-030405"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_out_may_be_new_nested_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "some" / "new"):
        assert train(tiny(out=out, steps=1))["folder"] == str(out)
        assert (out / "result.json").is_file()


def test_a_failure_before_the_first_release_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: PrivacyEngine, losses: torch.Tensor) -> None:
        raise RuntimeError("broken")

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(PrivacyEngine, "backward", broken)
    for out in (None, tmp_path / "a" / "b", tmp_path / "empty"):
        with pytest.raises(RuntimeError, match="broken"):
            train(tiny(out=out))
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_failure_after_a_release_keeps_the_whole_files() -> None:
    def fail(progress: Progress) -> None:
        if progress.step == 6:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(tiny(out=Path("out")), progress=fail)
    assert public_files(Path("out")) == {
        "config.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "checkpoint.pt",
    }


def test_a_full_disk_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole = files.write_whole

    def full(path: Path, content: bytes, mode: int | None = None) -> None:
        if path.name == "metrics.jsonl" and path.exists():  # the second epoch's
            monkeypatch.setattr(os, "fsync", no_space)
        write_whole(path, content, mode)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runfolder, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny(out=Path("out")))
    assert public_files(Path("out")) == {
        "config.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "checkpoint.pt",
    }
    text = (Path("out") / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [5]


def public_files(folder: Path) -> set[str]:
    """The names in a run folder, without the secrets."""
    return {f.name for f in folder.iterdir() if f.suffix != ".secret"}


# -- privacy --------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_epsilon_is_that_of_the_releases_that_were_made(accountant: str) -> None:
    result = train(tiny(accountant=accountant, noise_multiplier=1.3, delta=1e-4))
    expected = accounting.epsilon([Event(8 / 40, 1.3, 7)], 1e-4, accountant)
    assert result["epsilon"] == expected
    live = [line["epsilon"] for line in lines(result)]
    assert 0 < live[0] <= live[1] <= expected


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("target", [0.7, 4.0])
def test_a_target_is_reached_and_never_exceeded(accountant: str, target: float) -> None:
    result = train(tiny(epsilon=target, accountant=accountant))
    assert result["target_epsilon"] == target
    assert 0.99 * target < result["epsilon"] <= target
    recomputed = accounting.epsilon(
        [Event(result["sample_rate"], result["noise_multiplier"], result["steps"])],
        result["delta"],
        accountant,
    )
    assert recomputed == result["epsilon"]
    assert all(line["epsilon"] <= target for line in lines(result))


def test_without_noise_epsilon_is_null_and_the_guarantee_none() -> None:
    result = train(tiny(noise_multiplier=0.0))
    assert result["epsilon"] is None
    assert result["guarantee"] == "none"
    assert any("no noise" in caveat for caveat in result["caveats"])
    assert all(line["epsilon"] is None for line in lines(result))
    assert read(result, "config.json")["planned_epsilon"] is None


def test_a_loss_that_is_not_finite_is_null() -> None:
    result = train(tiny(noise_multiplier=1e30, lr=1e30))
    assert result["loss"] is None
    assert lines(result)[-1]["test_loss"] is None


def test_lots_noise_and_clip_bounds_are_handed_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[Any] = []
    original = PrivacyEngine.make_private

    def keep(self: PrivacyEngine, **options: Any) -> Any:
        made = original(self, **options)
        plans.append(self.plan)
        return made

    monkeypatch.setattr(PrivacyEngine, "make_private", keep)
    bounds = (0.5, 1.0, 2.0)
    train(tiny(model="mlp", clip=bounds, clipping="per_layer", noise_multiplier=0.7))
    plan = plans[0]
    assert plan.bounds == bounds
    assert plan.noise_multiplier == 0.7
    assert (plan.batch_size, plan.dataset_size, plan.steps) == (8, 40, 7)
    assert plan.noise_stds == pytest.approx([0.7 * math.sqrt(5.25)] * 3)


def test_the_settings_of_a_method_reach_it_and_its_accounting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Tempered(methods.Method):
        info = MethodInfo(name="tempered")
        clipping = "per_layer"
        beta: float = 1.0

        @property
        def query_weight(self) -> float:
            return self.beta

    monkeypatch.setitem(methods.METHODS, "tempered", MethodInfo(name="tempered", home=Tempered))
    result = train(tiny(method="tempered", settings={"beta": 0.5}))
    assert result["settings"] == {"beta": 0.5}
    assert result["clipping"] == "per_layer"
    assert result["epsilon"] == accounting.epsilon([Event(0.2, 2.0, 7)], 1e-5, "rdp")
    assert result["epsilon"] == read(result, "config.json")["planned_epsilon"]
    target = train(tiny(method="tempered", settings={"beta": 0.5}, epsilon=1.0))
    assert 0.99 < target["epsilon"] <= 1.0


def test_the_training_loss_is_written_on_request_only_and_marked() -> None:
    key = "train_loss_outside_guarantee"
    result = train(tiny(train_loss=True))
    assert set(result) == RESULT.keys() | {key}
    assert all(set(line) == LINE | {key} for line in lines(result))
    assert any("outside the guarantee" in caveat for caveat in result["caveats"])
    model = models.build("linear", (1, 8, 8), 10)
    model.load_state_dict(weights(result))
    split = data.load("digits", train_size=40, test_size=20)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(split.x_train), split.y_train).item()
    assert result[key] == pytest.approx(loss, rel=1e-5)


def test_what_is_treated_as_public_is_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(30, 4)).astype(np.float32),
        "y_train": np.arange(30) % 3,
        "x_test": rng.normal(size=(9, 4)).astype(np.float32),
        "y_test": np.arange(9) % 3,
    }
    np.savez(tmp_path / "own data.npz", **arrays)
    config = tiny(dataset="own data.npz", train_size=None, test_size=None, delta=0.05)
    result = train(config)
    assert Path(result["folder"]).name.startswith("own_data-linear-dp-sgd-")
    text = "\n".join(result["caveats"])
    assert "the number of records, 30, is treated as public" in text
    assert "the number of classes, 3, was read off the labels" in text
    assert "delta 0.05 is above 1 / records" in text
    np.savez(tmp_path / "stated.npz", classes=3, **arrays)
    stated = train(config.changed(dataset="stated.npz", delta=0.01))
    assert "classes" not in "\n".join(stated["caveats"])
    assert "delta" not in "\n".join(stated["caveats"])


# -- seeds ----------------------------------------------------------------------------------


def test_a_noise_seed_repeats_the_run_bit_for_bit_and_is_written_nowhere() -> None:
    first, second = (train(tiny(noise_seed=918273645, train_loss=True)) for _ in range(2))
    assert equal(weights(first), weights(second))
    assert first["repeatable_noise"] is True
    assert REPEATABLE in first["caveats"]
    for file in Path(first["folder"]).iterdir():
        assert b"918273645" not in file.read_bytes()
        assert b"noise_seed" not in file.read_bytes()
    other = train(tiny(noise_seed=918273646))
    assert not equal(weights(first), weights(other))


def test_a_noise_seed_asks_for_repeatable_convolutions_while_it_trains() -> None:
    seen: list[bool] = []
    for noise_seed in (1, None):
        config = tiny(noise_seed=noise_seed, steps=1)
        train(config, progress=lambda p: seen.append(torch.backends.cudnn.deterministic))
    assert seen == [False, False, True, True, True] + [False] * 5
    assert not torch.backends.cudnn.deterministic


def test_without_a_noise_seed_no_two_runs_agree() -> None:
    first, second = (train(tiny(seed=1)) for _ in range(2))
    assert first["repeatable_noise"] is False
    assert REPEATABLE not in first["caveats"]
    assert not equal(weights(first), weights(second))


def test_the_seed_fixes_initial_weights_and_split() -> None:
    """A learning rate next to zero leaves the initial weights, and the split shows in the loss."""
    still = {"lr": 1e-30, "noise_multiplier": 0.0}
    first, second, other = (train(tiny(seed=seed, **still)) for seed in (4, 4, 5))
    assert equal(weights(first), weights(second))
    assert first["loss"] == second["loss"]
    assert not equal(weights(first), weights(other))
    model = models.build("linear", (1, 8, 8), 10, seed=4)
    assert equal(weights(first), dict(model.state_dict()))


# -- the loop -------------------------------------------------------------------------------


def test_private_training_learns() -> None:
    """The settings of the demo, shorter: far above the 10 % of guessing."""
    result = train(TrainConfig(epochs=4, accountant="rdp", device="cpu", noise_seed=1))
    assert result["steps"] == 4 * 23
    assert result["accuracy"] > 0.6


def test_a_lot_in_pieces_is_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(noise_seed=5)
    whole = train(config)
    monkeypatch.setitem(session._ROWS, "linear", 3)
    steps: list[int] = []
    pieces = train(config, progress=lambda p: steps.append(p.step))
    assert pieces["steps"] == whole["steps"] == 7
    assert steps == [0, 0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 7]
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(pieces)[name], value, rtol=1e-5, atol=1e-6)


def test_another_optimizer_can_be_given() -> None:
    result = train(tiny(noise_seed=5), optimizer=torch.optim.Adam)
    assert result["optimizer"] == "Adam"
    assert not equal(weights(result), weights(train(tiny(noise_seed=5))))


def test_progress_tells_stages_lots_and_epochs() -> None:
    told: list[Progress] = []
    result = train(tiny(), progress=told.append)
    stages = list(dict.fromkeys(p.stage for p in told))
    assert stages == ["loading digits", "accounting", "training"]
    assert [p.metrics for p in told if p.metrics] == lines(result)
    assert {(p.steps, p.epochs) for p in told if p.stage == "training"} == {(7, 2)}


# -- interrupts -----------------------------------------------------------------------------


def press_at(step: int, times: int = 1) -> Callable[[Progress], None]:
    """A callback that presses Ctrl-C when the lot of that number is done."""

    def press(progress: Progress) -> None:
        if progress.stage == "training" and progress.step == step and not progress.metrics:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return press


def test_nothing_that_is_written_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes follows the size of its lot, which is secret."""
    written = []
    for pace in (0.001, 977.13):
        clock = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(session.time, "perf_counter", lambda c=clock, p=pace: next(c) * p)
            out = Path(f"run-{pace}")
            made = prepare(tiny(steps=12, noise_seed=3, checkpoint_every=1, out=out))
            runfolder.RunWriter(made).run(lambda _: None)
        assert made.seconds > pace  # it was measured all the same
        result = json.loads((out / "result.json").read_text())
        del result["folder"]
        names = ("metrics.jsonl", "config.json", "statement.json", "statement.md")
        written.append([result, *((out / name).read_text() for name in names)])
    assert written[0] == written[1]


def test_a_checkpoint_holds_no_time() -> None:
    train(tiny(steps=100, epsilon=2.0, out=Path("out")), progress=press_at(7))
    state, _ = checkpoint.read(Path("out/checkpoint.pt"))
    assert set(state["others"]) == {"config", "prepared", "ending", "lines", "noted"}


def test_ctrl_c_ends_after_the_lot_with_everything_written() -> None:
    result = train(tiny(steps=100, epsilon=2.0), progress=press_at(7))
    assert result["interrupted"] is True
    assert result["steps"] == 7
    assert read(result, "result.json") == result
    spent = accounting.epsilon([Event(0.2, result["noise_multiplier"], 7)], 1e-5, "rdp")
    assert lines(result)[-1]["epsilon"] == spent < 1.0
    # Whoever pressed it may have looked: the claim keeps all planned steps.
    assert result["epsilon"] == read(result, "config.json")["planned_epsilon"] <= 2.0
    assert any("7 of 100 planned releases were made" in caveat for caveat in result["caveats"])
    stated = read(result, "statement.json")
    assert stated["guarantee"]["epsilon"] == result["epsilon"]
    assert stated["guarantee"]["end"]["kind"] == "planned releases"
    assert [line["step"] for line in lines(result)] == [5, 7]
    assert weights(result).keys() == {"out.weight", "out.bias"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_lot_reports_nothing_spent() -> None:
    result = train(tiny(), progress=press_at(0))
    assert (result["interrupted"], result["steps"], result["epsilon"]) == (True, 0, 0.0)


def test_ctrl_c_on_the_last_lot_is_no_interrupt() -> None:
    result = train(tiny(), progress=press_at(7))
    assert result["interrupted"] is False


def test_a_second_ctrl_c_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(out=Path("out")), progress=press_at(3, times=2))
    assert public_files(Path("out")) == {"config.json", "ledger.jsonl", "checkpoint.pt"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_loading_writes_nothing(tmp_path: Path) -> None:
    def press(progress: Progress) -> None:
        if progress.stage == "accounting":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), progress=press)
    assert not list(tmp_path.iterdir())


def test_training_works_outside_the_main_thread() -> None:
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(train(tiny())))
    thread.start()
    thread.join()
    assert results[0]["steps"] == 7
