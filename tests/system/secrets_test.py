"""Nothing that a run leaves behind holds an example, a raw norm, a per-example loss or a seed.

Real runs on records with recognisable numbers; beside them the losses, norms and lots that must
stay inside are written down. Then every byte of every artefact is searched (leak_search.py).
Planted leaks show that the search finds what it looks for.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.leak_search import Secrets
from tests.support.own_tables import rows, write_table
from tests.support.program import run as run_program
from vestige.lab import report
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.run_folder import RunWriter
from vestige.train.training import Progress

TRAIN, TEST, FEATURES, CLASSES, LOT = 47, 13, 10, 7, 8
SEED = 918273645546372819
MARK = "_outside_guarantee"
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "fo": {},
    "sma": {},
    "dp-adam": {},
    "kalman": {},
    "dp-sam": {},
    "dp-is": {},
    "dp-adam-ac-private": {},
    "geodp-tangent": {},
    "fractional-noise": {"bands": 3},
    "dp-ftrl": {},
}


# -- a run and what must stay inside it -----------------------------------------------------


def data_file(path: Path, pixels: bool) -> dict[str, np.ndarray]:
    """Records whose numbers nothing else would have."""
    generator = np.random.default_rng(8)
    shape = (TRAIN + TEST, 4, 4) if pixels else (TRAIN + TEST, FEATURES)
    x = generator.integers(0, 256, shape).astype(np.uint8) if pixels else None
    x = generator.normal(size=shape).astype(np.float32) if x is None else x
    y = generator.integers(0, CLASSES, TRAIN + TEST)
    arrays = {"x_train": x[:TRAIN], "y_train": y[:TRAIN], "x_test": x[TRAIN:], "y_test": y[TRAIN:]}
    np.savez(path, classes=CLASSES, **arrays)
    return arrays


def of_data(arrays: dict[str, np.ndarray], session: training.Session) -> Secrets:
    """Rows and labels, of the training and of the held-out split."""
    secrets = Secrets()
    tensors = [session.train_data[0], session.test_data[0]]
    secrets.rows["example"] = [row.flatten().numpy() for x in tensors for row in x]
    for split in ("train", "test"):
        labels = arrays[f"y_{split}"].tolist()
        secrets.sequences[f"labels {split}"] = [labels[k : k + 11] for k in range(len(labels) - 10)]
    if arrays["x_train"].dtype == np.uint8:
        rows = np.concatenate([arrays["x_train"], arrays["x_test"]])
        secrets.raw["example"] = [row.tobytes() for row in rows]
    return secrets


class Watched:
    """The loader of a session, beside which losses, norms and lots are written down.

    Losses are computed once more, as the loop does and row by row; norms are the engine's own, and
    those of a backward pass for each row: the same numbers may round differently.
    """

    def __init__(self, session: training.Session, secrets: Secrets) -> None:
        self._session, self._loader, self._secrets = session, session.loader, secrets
        self._rows = {row.numpy().tobytes(): i for i, row in enumerate(session.train_data[0])}
        self.norms: list[float] = secrets.numbers.setdefault("norm of an example", [])
        self.losses: list[float] = secrets.numbers.setdefault("loss of an example", [])
        session.loader = self  # type: ignore[assignment]
        assert session.engine._run is not None
        collector: Any = session.engine._run.capture.collector
        self._look_of_engine, collector._look = collector._look, self._norms_of_engine

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._loader:
            self.look(x, y)
            yield x, y

    def _norms_of_engine(self, square_norms: torch.Tensor, group: int) -> None:
        self.norms += square_norms.sqrt().tolist() + square_norms.tolist()
        self._look_of_engine(square_norms, group)

    def look(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write down what the loop is about to compute on a batch."""
        model = copy.deepcopy(self._session.model)
        self.losses += cross_entropy(model(x), y, reduction="none").tolist()
        lot = [
            self._rows[row.numpy().tobytes()] for row in x if row.numpy().tobytes() in self._rows
        ]
        if 5 < len(lot) < TRAIN:
            self._secrets.sequences.setdefault("lot", []).append(lot)
        for row, label in zip(x, y, strict=True):
            model.zero_grad()
            loss = cross_entropy(model(row[None]), label[None])
            loss.backward()
            norms = [
                p.grad.double().norm().item() for p in model.parameters() if p.grad is not None
            ]
            self.losses.append(loss.item())
            self.norms += [*norms, float(np.linalg.norm(norms))]


def trained_figures(session: training.Session) -> dict[str, float]:
    """Loss and accuracy over the training records, with the weights as they are now."""
    model = copy.deepcopy(session.model).eval()
    with torch.no_grad():
        scores, labels = model(session.train_data[0]), session.train_data[1]
        right = (scores.argmax(1) == labels).double().mean().item()
        return {"loss": cross_entropy(scores, labels).item(), "accuracy": right}


@dataclass
class Ran:
    """A finished run: its session, its secrets, its folder and copies of it from on the way."""

    session: training.Session
    secrets: Secrets
    result: dict[str, Any]
    folder: Path
    snapshots: list[Path]
    figures: list[dict[str, float]]

    def files(self) -> Iterator[Path]:
        """Every file of the folder, at its end and at the end of each epoch."""
        for place in (self.folder, *self.snapshots):
            yield from (path for path in sorted(place.rglob("*")) if path.is_file())


def ran(path: Path, pixels: bool = False, **settings: Any) -> Ran:
    """Train on a small file and keep what must not come out."""
    arrays = data_file(path / "data.npz", pixels)
    values: dict[str, Any] = {
        "dataset": str(path / "data.npz"),
        "model": "mlp",
        "lot": LOT,
        "epochs": 2,
        "noise_multiplier": 1.0,
        "accountant": "rdp",
        "device": "cpu",
        "out": path / "run",
    }
    session = training.prepare(TrainConfig(**values | settings))
    secrets = of_data(arrays, session)
    Watched(session, secrets)
    snapshots: list[Path] = []
    figures: list[dict[str, float]] = []

    def tell(progress: Progress) -> None:
        if progress.metrics is not None:
            figures.append(trained_figures(session))
            snapshots.append(path / f"snapshot{len(snapshots)}")
            shutil.copytree(path / "run", snapshots[-1])

    result = RunWriter(session).run(tell)
    secrets.raw["key"] = forms_of_key(session)
    if session.config.noise_seed is not None:
        secrets.raw["seed"] = forms_of_seed(session.config.noise_seed)
    return Ran(session, secrets, result, path / "run", snapshots, figures)


def forms_of_key(session: training.Session) -> list[bytes]:
    run = session.engine._run
    assert run is not None
    key = run.door.randomness._key
    return [key, key.hex().encode(), base64.b64encode(key)[:40]]


def forms_of_seed(seed: int) -> list[bytes]:
    numbers = [seed.to_bytes(8, order) for order in ("little", "big")]
    return [*numbers, str(seed).encode(), f"{seed:x}".encode(), b"noise_seed"]


def may_hold(path: Path) -> set[str]:
    """The secrets file beside a checkpoint may hold the seed of test mode, and nothing else."""
    return {"seed"} if path.name.endswith(".secret") else set()


def printed(things: list[Any]) -> bytes:
    return "\n".join(text(thing) for thing in things for text in (repr, str)).encode()


def saved(model: nn.Module, optimizer: Any) -> Iterator[bytes]:
    """A model and its optimizer in the ways that people save them."""
    for thing in (model, copy.deepcopy(model), model.state_dict(), optimizer.state_dict()):
        yield pickle.dumps(thing)
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        yield buffer.getvalue()


# -- runs -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("noise_seed", [None, SEED], ids=["fresh", "seeded"])
@pytest.mark.parametrize("method", list(METHODS))
def test_no_artefact_of_a_run_holds_a_secret(
    method: str,
    noise_seed: int | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    averaging = "ema" if method in ("dp-sgd", "sma") else None
    done = ran(
        tmp_path,
        method=method,
        settings=METHODS[method],
        noise_seed=noise_seed,
        averaging=averaging,
        train_loss=method == "fo",
    )
    made = {"report.html"} if method in ("fo", "sma") else set()
    if made:
        report.write_run(done.folder)  # takes a second or two
    session, secrets = done.session, done.secrets
    assert min(len(values) for values in secrets.numbers.values()) > 2 * TRAIN
    assert secrets.sequences["lot"]
    names = {path.name for path in done.files()}
    assert {"config.json", "metrics.jsonl", "model.pt", "result.json"} | made <= names
    assert {"model.json", "statement.json", "statement.md"} <= names
    assert {"checkpoint.pt", "ledger.jsonl"} <= names
    for path in done.files():
        assert secrets.found_in(path.read_bytes()) <= may_hold(path), path.name
    for content in saved(session.model, session.optimizer):
        assert secrets.found_in(content) == set()
    engine = session.engine
    told = [engine, engine.plan, engine.ledger, session.loader._loader, session.config, session]  # type: ignore[attr-defined]
    output = capfd.readouterr()
    logs = [
        caplog.text,
        output.out,
        output.err,
        done.result,
        engine.diagnostics(),
        engine.caveats(),
    ]
    assert secrets.found_in(printed([*told, *logs]).replace(b"noise_seed", b"")) == set()


def test_pixels_stay_inside_too(tmp_path: Path) -> None:
    done = ran(tmp_path, pixels=True, method="dp-sgd", model="linear", noise_seed=SEED)
    for path in done.files():
        assert done.secrets.found_in(path.read_bytes()) <= may_hold(path), path.name
    assert done.secrets.found_in((tmp_path / "data.npz").read_bytes()) >= {"example"}


def test_secrets_files_are_for_their_owner_and_hold_no_example(tmp_path: Path) -> None:
    done = ran(tmp_path, method="fractional-noise", settings={"bands": 3}, noise_seed=SEED)
    secret = [path for path in done.files() if path.name.endswith(".secret")]
    assert secret
    for path in secret:
        assert done.secrets.found_in(path.read_bytes()) == {"seed"}
        assert path.stat().st_mode & 0o777 == 0o600  # copies keep the mode


def test_the_program_prints_no_secret(tmp_path: Path) -> None:
    arrays = data_file(tmp_path / "data.npz", pixels=False)
    options = f"--lot {LOT} --epochs 2 --accountant rdp --device cpu --noise-seed {SEED}"
    result = run_program(f"train --dataset data.npz {options} --train-loss --out run")
    assert result.exit_code == 0
    session = training.prepare(TrainConfig(dataset="data.npz", lot=LOT, device="cpu", out=None))
    secrets = of_data(arrays, session)
    secrets.raw["seed"] = forms_of_seed(SEED)
    key = hashlib.sha256(b"vestige test mode " + str(SEED).encode()).digest()
    secrets.raw["key"] = [key, key.hex().encode()]
    assert secrets.found_in((result.stdout + result.stderr).encode()) == set()
    assert "outside the guarantee" in result.stdout
    for path in sorted(Path("run").rglob("*")):
        if path.is_file():
            assert secrets.found_in(path.read_bytes()) <= may_hold(path), path.name


def test_a_run_on_somebodys_own_table_holds_no_cell_of_it(tmp_path: Path) -> None:
    records = rows()
    write_table(Path("t.csv"), records)
    options = "--lot 8 --epochs 2 --accountant rdp --device cpu --evaluate-epsilon 1 --out run"
    result = run_program(f"train --data t.csv {options}")
    assert result.exit_code == 0, result.output
    secrets = Secrets()
    for name in ("age", "days"):
        secrets.raw[name] = [str(row[name]).encode() for row in records]
    assert secrets.found_in(Path("t.csv").read_bytes()) >= {"age", "days"}
    assert secrets.found_in((result.stdout + result.stderr).encode()) == set()
    names = {path.name for path in Path("run").iterdir()}
    assert {"model.json", "report.html", "statement.html", "ledger.held-out.jsonl"} <= names
    for path in sorted(Path("run").rglob("*")):
        if path.is_file():
            assert secrets.found_in(path.read_bytes()) == set(), path.name
    # How many records are held out is as private as they are.
    opened = json.loads(Path("run/ledger.held-out.jsonl").read_text().splitlines()[0])
    assert opened["about"]["data"] == {"name": "t.csv", "part": "held-out"}


# -- figures on training records ------------------------------------------------------------


def numbers_in(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON value with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_in(item, f"{place}/{key}")
    elif isinstance(value, list):
        for item in value:
            yield from numbers_in(item, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)


def json_of(path: Path) -> list[Any]:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("train_loss", [True, False], ids=["asked", "unasked"])
def test_numbers_computed_on_training_records_are_marked_or_absent(
    train_loss: bool, tmp_path: Path
) -> None:
    done = ran(tmp_path, method="sma", train_loss=train_loss)
    losses = [figure["loss"] for figure in done.figures]
    # An accuracy of 8 in 47 is the sampling rate as well, and proves nothing.
    accuracies = {figure["accuracy"] for figure in done.figures} - {LOT / TRAIN, 1.0}
    private = losses + sorted(accuracies)
    assert all(0.01 < value < 100 for value in losses)
    marked = set()
    for path in done.files():
        if path.suffix not in (".json", ".jsonl"):
            continue
        for place, number in (hit for value in json_of(path) for hit in numbers_in(value)):
            if any(abs(number - value) <= 2e-6 * value for value in private if value):
                assert place.endswith(MARK), (path.name, place)
                marked.add(path.name)
            assert not re.search(r"train\w*(loss|acc)|per_example|lot_size|norms", place) or (
                place.endswith(MARK)
            ), place
    assert marked == ({"metrics.jsonl", "result.json"} if train_loss else set())


def test_a_statement_names_the_figures_outside_its_guarantee(tmp_path: Path) -> None:
    done = ran(tmp_path, train_loss=True)
    statement = json.loads((done.folder / "statement.json").read_text())
    assert statement["run"]["outside_guarantee"] == [f"train_loss{MARK}"]
    assert f"train_loss{MARK}" in (done.folder / "statement.md").read_text()


# -- planted leaks --------------------------------------------------------------------------


def archive(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def compressed(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, array)
    return buffer.getvalue()


Leak = Callable[[np.ndarray, list[float], list[int]], bytes]
LEAKS: dict[str, tuple[str, Leak]] = {
    "a view keeps the storage": ("example", lambda x, n, y: archive(torch.from_numpy(x)[:0])),
    "a hook keeps the input": ("example", lambda x, n, y: pickle.dumps({"input": x[3]})),
    "doubles": ("example", lambda x, n, y: x[5].astype(np.float64).tobytes()),
    "behind odd bytes": ("example", lambda x, n, y: b"abc" + x[5].tobytes()),
    "compressed": ("example", lambda x, n, y: compressed(x[2])),
    "json": ("example", lambda x, n, y: json.dumps({"row": x[7].tolist()}).encode()),
    "one number": ("example", lambda x, n, y: f"largest {float(x[1].max())}".encode()),
    "a printed tensor": ("example", lambda x, n, y: str(torch.from_numpy(x[4])).encode()),
    "in a page": ("example", lambda x, n, y: b"data:;base64," + base64.b64encode(x[:2])),
    "labels as bytes": ("labels train", lambda x, n, y: np.array(y, np.int64).tobytes()),
    "labels as text": ("labels train", lambda x, n, y: str(y).encode()),
    "a norm in a log": ("norm", lambda x, n, y: f"clipped {n[3]!r} to 1.0".encode()),
    "norms of a lot": ("norm", lambda x, n, y: archive(torch.tensor(n[2:9]))),
    "the seed": ("seed", lambda x, n, y: json.dumps({"args": [SEED]}).encode()),
    "the seed in hex": ("seed", lambda x, n, y: hex(SEED).encode()),
}


@pytest.mark.parametrize("name", list(LEAKS))
def test_a_planted_leak_is_found(name: str) -> None:
    """A search that could not fail would show nothing."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(12, FEATURES)).astype(np.float32)
    labels, norms = generator.integers(0, CLASSES, 20).tolist(), generator.gamma(2, size=12)
    secrets = Secrets(
        numbers={"norm": norms.tolist()},
        rows={"example": list(x)},
        sequences={"labels train": [labels[:11], labels[9:20]]},
        raw={"seed": forms_of_seed(SEED)},
    )
    kind, leak = LEAKS[name]
    assert secrets.found_in(leak(x, norms.tolist(), labels)) == {kind}
    other = generator.normal(size=(12, FEATURES)).astype(np.float32)
    clean = leak(other, generator.gamma(2, size=12).tolist(), list(reversed(labels)))
    assert secrets.found_in(clean) == ({"seed"} if kind == "seed" else set())


def test_the_norms_written_down_are_the_engines_own(tmp_path: Path) -> None:
    """What quantile clipping would let out without its noise is found in a log line."""
    done = ran(tmp_path, method="dp-sgd", clipping="quantile")
    assert done.session.engine._run is not None
    collector = done.session.engine._run.capture.collector
    collector.norms = []
    collector._look(torch.tensor([2.345678912345]).square(), 0)
    (leaked,) = collector.norms
    assert done.secrets.found_in(f"norm {leaked!r}".encode()) == {"norm of an example"}


def test_a_leak_in_a_real_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same search over a run whose metrics tell the largest loss of a lot."""
    largest: list[float] = []
    measure = training.Session._measure

    def telling(self: training.Session) -> dict[str, Any]:
        return measure(self) | {"largest": max(largest)}

    original = Watched.look

    def look(self: Watched, x: torch.Tensor, y: torch.Tensor) -> None:
        original(self, x, y)
        largest.append(max(self.losses[-len(y) :]))

    monkeypatch.setattr(training.Session, "_measure", telling)
    monkeypatch.setattr(Watched, "look", look)
    done = ran(tmp_path)
    found = done.secrets.found_in((done.folder / "metrics.jsonl").read_bytes())
    assert found == {"loss of an example"}
