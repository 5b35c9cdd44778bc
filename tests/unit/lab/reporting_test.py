"""Reports: plots and pages that are complete, safe, readable by everyone, and always the same."""

from __future__ import annotations

import base64
import csv
import gzip
import importlib.util
import io
import itertools
import json
import math
import random
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import run, run_json
from vestige.audit import palette
from vestige.checks import round_up
from vestige.errors import ConfigError
from vestige.lab import catalogue, report
from vestige.lab.definition import Experiment, read
from vestige.lab.grid import Task, tasks_of
from vestige.lab.report import svg
from vestige.lab.report.files import write_text
from vestige.lab.report.markup import element, prose, text
from vestige.lab.report.page import page
from vestige.lab.report.run_data import read_run
from vestige.lab.report.run_page import train_command
from vestige.lab.report.seeds import MOST_POINTS, Series, mean_line, thinned
from vestige.lab.report.stages import stages_of
from vestige.lab.report.tensorboard import Scalars, scalars
from vestige.lab.report.wording import weak
from vestige.lab.rows import ROWS
from vestige.lab.summary import rows_of
from vestige.train.training import Progress

HOSTILE = "<script>alert('x')</script> & \"quoted\" $\\frac{1"

TOY = """
name = "toy"
title = "A toy"
paper = "Nobody, arXiv 2605.09890"
claim = "Everything is better."
seeds = 3
reference = "DP-SGD"
tables = ["accuracy", "runtime", "memory", "targets"]
figures = [
    "accuracy-by-epoch", "accuracy-by-epsilon", "epsilon-by-epoch", "depth-by-interval", "stages",
    "runtime", "final-accuracy",
]
assumed = ["Something, see `fo-unstated`."]
[targets]
mnist = 0.5
[protocol]
datasets = ["mnist"]
model = "mlp"
train_range = [0, 100]
test_range = [0, 50]
noise_multiplier = 1.1
lot = 20
epochs = 6
lr = 0.5
[[arm]]
label = "DP-SGD"
method = "dp-sgd"
paper = { accuracy = 0.71, std = 0.01, low = 0.70, high = 0.72, seconds = 3.0, relative = 1.0 }
[[arm]]
label = "SMA"
method = "sma"
paper = { depth = 3.2, memory_ratio = 0.0133, accuracy = 0.8 }
[[arm]]
label = "GeoDP"
method = "geodp"
[[absent]]
label = "Another"
reason = "nobody knows what it is."
paper = { accuracy = 0.6, std = 0.01, low = 0.59, high = 0.61 }
"""
FAIR = """
[fair]
epsilons = [3.0, 8.0]
validation_range = [100, 150]
tuning_seed = 100
seeds = 2
[[fair.arm]]
label = "DP-SGD"
method = "dp-sgd"
rates = [0.1, 0.5]
[[fair.arm]]
label = "Followed"
method = "sma"
follows = "DP-SGD"
"""


# -- made-up rows ---------------------------------------------------------------------------------


def made_row(task: Task) -> dict[str, Any]:
    """A row as the runner makes them, with numbers that depend on the task alone."""
    machine = {"processor": "a machine", "cores": 2, "threads": 1, "workers": 1, "device": "cpu"}
    row: dict[str, Any] = {
        "hash": task.hash,
        "experiment": task.experiment,
        "column": task.column,
        "role": task.role,
        "label": task.label,
        "config": task.config,
        "seconds": 3 + int(task.hash, 16) % 100 / 50,
        "versions": {"vestige": "0.1.0", "torch": "2.13.0"},
        "hardware": machine,
    }
    if task.run is None:
        size = float(dict(task.cell)[list(dict(task.cell))[1]])
        errors = {
            f"{method}_{measure}": (i + 1) * 1e-3 * (size + 1) ** 0.5
            for i, method in enumerate(("dp_sgd", "geodp", "tangent"))
            for measure in ("direction_mse", "gradient_mse", "cosine")
        }
        return row | {"errors": errors}
    setting, luck = task.run, random.Random(task.hash)
    epochs = setting.epochs
    top = 0.6 + 0.2 * luck.random()
    accuracy = [round(top * (1 - math.exp(-(e + 1) / 3)), 4) for e in range(epochs)]
    private = setting.method not in ("geodp", "dp-adam-ac")
    last = (setting.epsilon or 9.0) if private else None
    curve = {
        "epoch": list(range(1, epochs + 1)),
        "accuracy": accuracy,
        "loss": [round(2 - a, 4) for a in accuracy],
        "epsilon": [last and round(last * ((e + 1) / epochs) ** 0.5, 4) for e in range(epochs)],
    }
    if task.role == "tuning":
        curve = {name: values[-1:] for name, values in curve.items()}
    return row | {
        "dataset": setting.dataset,
        "model": setting.model,
        "method": setting.method,
        "settings": task.config["settings"],
        "seed": setting.seed,
        "lr": float(setting.lr),
        "final_accuracy": accuracy[-1],
        "best_accuracy": max(accuracy),
        "final_loss": 1.2,
        "epsilon": last,
        "epsilon_marginal": 5.0 if private and setting.epsilon is None else None,
        "delta": setting.delta,
        "guarantee": "(epsilon, delta)-DP, add or remove one record" if private else "none",
        "noise_multiplier": 1.1,
        "steps": 5 * epochs,
        "epochs": epochs,
        "curve": curve,
        "diagnostics": _memory(setting.model, epochs, luck) if setting.method == "sma" else None,
    }


def _memory(model: str, epochs: int, luck: random.Random) -> dict[str, Any]:
    groups = ["hidden1", "hidden2", "out"]
    if model == "resnet18":
        groups = [
            "conv",
            "norm",
            *(f"blocks.{i}.{n}" for i in range(8) for n in ("conv1", "norm1")),
        ]
    facts: dict[str, Any] = {
        "groups": groups,
        "epoch": list(range(1, epochs + 1)),
        "steps": [5] * epochs,
    }
    for name in ("rho", "tempering", "depth", "memory_ratio"):
        facts[name] = [
            [None if "norm" in g and name == "rho" else round(luck.random() * 4, 4) for g in groups]
            for _ in range(epochs)
        ]
    return facts | {"mean": dict.fromkeys(("rho", "tempering", "depth", "memory_ratio"), 1.5)}


def made_rows(experiment: Experiment, make: Callable[[Task], Any] = made_row) -> list[Any]:
    """All rows of an experiment, as `rows_of` gives them."""
    rows: dict[str, Any] = {}
    while new := [task for task in tasks_of(experiment, rows) if task.hash not in rows]:
        rows |= {task.hash: made for task in new if (made := make(task)) is not None}
        if any(task.hash not in rows for task in new):
            break
    return rows_of(experiment, rows)


def toy(folder: Path, content: str = TOY + FAIR) -> Experiment:
    """The experiment of a TOML text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy.toml").write_text(content)
    return read(folder / "toy.toml")


def written(experiment: Experiment, folder: Path, rows: list[Any] | None = None) -> dict[str, str]:
    """The report's files by name."""
    made = report.write(experiment, made_rows(experiment) if rows is None else rows, folder)
    return {path.name: path.read_text(encoding="utf-8") for path in made}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    return written(toy(folder), folder / "results" / "toy")


# -- looking at pages -----------------------------------------------------------------------------


class Reader(HTMLParser):
    """Elements with their attributes, texts, and whether every element was closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "br", "wbr", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(content: str) -> Reader:
    """What must be true of every page."""
    reader = Reader(content)
    assert not reader.open
    # Everybody can read it.
    for tag, attributes in reader.elements:
        if tag in ("svg", "img"):
            described = attributes.get("alt") or attributes.get("aria-label")
            assert described and attributes.get("role", "img") == "img", attributes
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    assert reader.all("html")[0]["lang"] == "en"
    assert len(reader.all("h1")) == len(reader.all("main")) == len(reader.all("title")) == 1
    assert len(reader.all("table")) == len(reader.all("caption"))
    figures = [tag for tag, _ in reader.elements if tag in ("figure", "figcaption")]
    assert figures == ["figure", "figcaption"] * (len(figures) // 2)
    # It needs nothing else: no script, nothing from the network.
    tags = {tag for tag, _ in reader.elements}
    assert not tags & {"script", "iframe", "object", "embed", "form", "base", "audio", "video"}
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            address = attributes.get(name, "#")
            paper = tag == "a" and re.fullmatch(r"https://arxiv\.org/abs/[\d.]+", address)
            assert paper or address.startswith(("#", "data:")), (tag, address)
    assert not re.search(r"@import|url\((?!#)", content)
    outside = set(re.findall(r"https?://[^\s\"'<>]*", content))
    assert all(address.startswith("https://arxiv.org/abs/") for address in outside), outside
    policies = [m["content"] for m in reader.all("meta") if "http-equiv" in m]
    assert policies and "default-src 'none'" in policies[0] and "script" not in policies[0]
    # Its links lead somewhere, and its names are its own.
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    local = {a["href"][1:] for _, a in reader.elements if a.get("href", "").startswith("#")}
    local |= set(re.findall(r"url\(#([^)]*)\)", content))
    assert local <= set(ids)
    # matplotlib's numbers are all there: a NaN would be a hole in a line.
    assert not re.search(r'd="[^"]*nan', content)
    return reader


def order(content: str, *names: str) -> None:
    """The sections come in this order."""
    places = [content.index(f'<section id="{name}"') for name in names]
    assert places == sorted(places)


def downloads(reader: Reader) -> dict[str, bytes]:
    found = {}
    for link in reader.all("a"):
        if "download" in link:
            found[link["download"]] = base64.b64decode(link["href"].partition("base64,")[2])
    return found


# -- experiments ----------------------------------------------------------------------------------


def test_a_page_is_complete_and_safe(files: dict[str, str]) -> None:
    assert set(files) == {
        "fair-accuracy.svg",
        "accuracy-by-epoch.svg",
        "accuracy-by-epsilon.svg",
        "epsilon-by-epoch.svg",
        "depth-by-interval.svg",
        "stages.svg",
        "runtime.svg",
        "final-accuracy.svg",
        "report.html",
    }
    reader = check_page(files["report.html"])
    order(
        files["report.html"],
        *("guarantee", "settings", "plots", "memory", "published", "fair", "rows"),
    )
    for words in (
        "epsilon 3.00 to 9.00 at delta 1e-05",
        "add or remove one record",
        "PLD",
        "no guarantee",
        "papers' figure (diagnostic)",
        "a diagnostic, not a guarantee",
        "test mode",
        "The paper says: Everything is better.",
        "What the paper leaves open",
        "Another is not run: nobody knows what it is.",
        "vestige reproduce toy vestige report results/toy",
        "Not drawn, since their epsilon is infinite: GeoDP.",
        "0.7100 ± 0.0100 [0.7000, 0.7200]",  # the paper's value beside ours
    ):
        assert words in reader.text, words
    assert "Unfinished" not in reader.text and "smoke" not in reader.text


def test_plot_files_are_well_formed_and_need_nothing(files: dict[str, str]) -> None:
    for name, content in files.items():
        if name.endswith(".svg"):
            root = ET.fromstring(content)
            assert root.tag.endswith("svg") and "viewBox" in root.attrib
            described = [part.text for part in root if part.tag.endswith(("title", "desc"))]
            assert len(described) == 2 and all(described)
            assert "<image" not in content and "dc:date" not in content
            # Namespaces and the document type are names, not addresses to be loaded.
            addresses = set(re.findall(r'href="([^"]*)"', content))
            assert all(address.startswith("#") for address in addresses)
            assert "SMA" in content or name in ("stages.svg", "fair-accuracy.svg")


def test_the_same_rows_give_the_same_bytes_whatever_is_configured(
    tmp_path: Path, files: dict[str, str]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.hashsalt": None}):
        again = written(toy(tmp_path), tmp_path / "elsewhere" / "results" / "toy")
    assert again == files


def test_rows_are_in_the_page(files: dict[str, str], tmp_path: Path) -> None:
    rows = made_rows(toy(tmp_path))
    found = downloads(Reader(files["report.html"]))
    assert set(found) == {"toy.csv", "toy.jsonl.gz"}
    lines = gzip.decompress(found["toy.jsonl.gz"]).decode().splitlines()
    assert [json.loads(line) for line in lines] == rows
    table = list(csv.DictReader(io.StringIO(found["toy.csv"].decode())))
    assert [line["hash"] for line in table] == [row["hash"] for row in rows]
    assert float(table[-1]["final_accuracy"]) == rows[-1]["final_accuracy"]


def test_intervals_by_hand(tmp_path: Path) -> None:
    # Three seeds 0.50, 0.60, 0.70: mean 0.6, std 0.1, t(0.975, 2) = 4.302653.
    def make(task: Task) -> dict[str, Any]:
        row = made_row(task)
        if task.label == "DP-SGD" and task.column == "published":
            row["final_accuracy"] = 0.5 + 0.1 * row["seed"]
        return row

    experiment = replace(toy(tmp_path, TOY), figures=("final-accuracy",))
    reader = check_page(
        written(experiment, tmp_path / "r", made_rows(experiment, make))["report.html"]
    )
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert f"0.6000 ± 0.1000 [{0.6 - half:.4f}, {0.6 + half:.4f}]" in reader.text


def test_whatever_a_label_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    hostile = TOY + FAIR
    for old in ("A toy", "Everything is better.", "nobody knows", "Something, see"):
        hostile = hostile.replace(old, json.dumps(HOSTILE)[1:-1])
    hostile = hostile.replace('label = "SMA"', f"label = {json.dumps(HOSTILE)}")
    hostile = hostile.replace('label = "GeoDP"', 'label = "_hidden\\u0007"')
    hostile = hostile.replace('label = "Followed"', 'label = "=1+1"')

    def make(task: Task) -> dict[str, Any]:
        row = made_row(task)
        row["hardware"] = row["hardware"] | {"processor": HOSTILE}
        if row["diagnostics"]:
            row["diagnostics"]["groups"] = [HOSTILE, "_b", "</svg>"]
        return row

    experiment = toy(tmp_path, hostile)
    made = written(experiment, tmp_path / "toy", made_rows(experiment, make))
    reader = check_page(made["report.html"])
    assert "<script" not in made["report.html"]
    assert HOSTILE in reader.text and "_hidden" in reader.text
    assert "\x07" not in "".join(made.values())
    for name, content in made.items():
        if name.endswith(".svg"):
            assert "<script" not in content
            ET.fromstring(content)
    shown = "".join(ET.fromstring(made["accuracy-by-epoch.svg"]).itertext())
    assert HOSTILE in shown and "_hidden" in shown
    table = list(csv.DictReader(io.StringIO(downloads(reader)["toy.csv"].decode())))
    assert {row["label"] for row in table if "1+1" in row["label"]} == {"'=1+1"}


def only(**wanted: Any) -> Callable[[Task], Any]:
    """Rows of some tasks only."""

    def make(task: Task) -> Any:
        known = {
            "seed": task.run.seed if task.run else None,
            "label": task.label,
            "column": task.column,
            "role": task.role,
        }
        return made_row(task) if all(known[name] == v for name, v in wanted.items()) else None

    return make


def forgetful(task: Task) -> dict[str, Any]:
    return made_row(task) | ({"diagnostics": None} if task.run else {})


def unprotected(task: Task) -> dict[str, Any]:
    row = made_row(task)
    row |= {"epsilon": None, "epsilon_marginal": None, "guarantee": "none"}
    row["curve"] = row["curve"] | {"epsilon": [None] * len(row["curve"]["epoch"])}
    return row


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (only(seed=0), "Unfinished: 3 of "),
        (only(label="DP-SGD"), "of 3"),
        (only(label="GeoDP"), "No guarantee"),
        (only(role="tuning"), "The fair column has not been run yet"),
        (only(column="published"), "The fair column has not been run yet"),
        (forgetful, "no run has recorded its memory"),
        (unprotected, "epsilon is infinite for every method"),
    ],
    ids=["one seed", "one method", "not private", "tuning", "published", "no memory", "infinite"],
)
def test_what_is_missing_is_said(make: Callable[[Task], Any], words: str, tmp_path: Path) -> None:
    experiment = toy(tmp_path)
    made = written(experiment, tmp_path / "toy", made_rows(experiment, make))
    assert words in check_page(made["report.html"]).text


def test_diverged_losses_and_smoke_runs(tmp_path: Path) -> None:
    def make(task: Task) -> dict[str, Any]:
        row = made_row(task) | {"final_loss": None}
        row["curve"] = row["curve"] | {"loss": [None] * len(row["curve"]["epoch"])}
        return row

    experiment = replace(toy(tmp_path).quickened(), figures=("accuracy-by-epoch", "stages"))
    made = written(experiment, tmp_path / "toy", made_rows(experiment, make))
    assert "This is a smoke run" in check_page(made["report.html"]).text
    assert "vestige reproduce toy --quick" in made["report.html"]


QUICK = ["fo-tab3", "sma-fig4", "sma-tab3", "geodp-fig4", "geodp-mnist"]


@pytest.mark.parametrize("name", QUICK)
def test_experiments_of_the_papers(name: str, tmp_path: Path) -> None:
    experiment = catalogue.find(name).quickened()
    made = written(experiment, tmp_path / name)
    reader = check_page(made["report.html"])
    assert experiment.title in reader.text
    assert len(made) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(catalogue.names()) - set(QUICK)))
def test_every_experiment_of_the_papers(name: str, tmp_path: Path) -> None:
    test_experiments_of_the_papers(name, tmp_path)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.pop(name)


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update({name: value})


def within(name: str, inner: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update({name: row[name] | {inner: value}})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("curve"), "curve is no table"),
        (without("final_accuracy"), "final_accuracy is None"),
        (changed("final_accuracy", "high"), "final_accuracy is 'high', not a finite number"),
        (changed("final_accuracy", math.nan), "final_accuracy is nan"),
        (changed("seconds", True), "seconds is True"),
        (changed("seed", "0"), "seed is '0', not a whole number"),
        (changed("epsilon", "small"), "epsilon is 'small', neither"),
        (without("epsilon_marginal"), "epsilon_marginal is None"),
        (changed("method", None), "method is None, not a text"),
        (changed("hardware", []), "hardware is no table"),
        (within("curve", "accuracy", [0.1]), "do not belong together"),
        (within("curve", "epoch", "1, 2"), "curve.epoch is no list of numbers"),
        (within("curve", "epoch", [None] * 6), "do not belong together"),
        (within("diagnostics", "rho", [[1.0]]), "diagnostics.rho has not one number"),
        (within("diagnostics", "groups", None), "lacks its groups"),
        (within("diagnostics", "mean", None), "mean is no table"),
    ],
)
def test_a_broken_row_is_named(
    damage: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    experiment = toy(tmp_path)
    rows = made_rows(experiment)
    broken = next(i for i, row in enumerate(rows) if row["label"] == "SMA")
    rows[broken] = dict(rows[broken])
    damage(rows[broken])
    with pytest.raises(ConfigError, match=r"cannot be reported.*take its line out") as caught:
        report.write(experiment, rows, tmp_path / "toy")
    assert words in str(caught.value) and rows[broken]["hash"] in str(caught.value)
    assert not (tmp_path / "toy").exists()


def test_a_broken_point_of_a_study_is_named(tmp_path: Path) -> None:
    experiment = catalogue.find("geodp-fig4").quickened()
    rows = made_rows(experiment)
    rows[0] = rows[0] | {"errors": {"geodp_cosine": None}}
    with pytest.raises(ConfigError, match="not a table of finite numbers"):
        report.write(experiment, rows, tmp_path)


def test_report_of_results_from_the_command_line(tmp_path: Path) -> None:
    experiment = catalogue.find("sma-tab3")
    root = tmp_path / "results"
    root.mkdir()
    lines = [json.dumps(made_row(task)) for task in tasks_of(experiment, {})]
    (root / ROWS).write_text("".join(f"{line}\n" for line in lines))
    found = run_json("report", str(root / "sma-tab3"))
    names = [Path(name).name for name in found["files"]]
    assert found["kind"] == "experiments"
    assert names == ["table.md", "table.json", "depth-by-interval.svg", "report.html"]
    first = {name: (root / "sma-tab3" / name).read_bytes() for name in names}
    assert run("report", str(root / "sma-tab3")).exit_code == 0
    assert first == {name: (root / "sma-tab3" / name).read_bytes() for name in names}
    broken = json.loads(lines[0])
    broken["curve"].pop("accuracy")
    (root / ROWS).write_text("".join(f"{line}\n" for line in [json.dumps(broken), *lines[1:]]))
    result = run("report", str(root / "sma-tab3"))
    assert result.exit_code == 2
    assert f"the row {broken['hash']} ([1, 3]) cannot be reported" in result.stderr


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written.*untouched"):
        write_text(tmp_path / "file" / "report.html", "")


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on digits: with memory, and with a method that is not private."""
    root = tmp_path_factory.mktemp("runs")
    more = "--epochs 2 --noise-seed 271828182 --json --out"
    assert run(f"train --method sma --set alpha=0.6 {more}", str(root / "sma")).exit_code == 0
    assert run(f"train --method geodp --train-loss {more}", str(root / "geodp")).exit_code == 0
    return root


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run folder that may be damaged."""
    return Path(shutil.copytree(runs / "sma", tmp_path / "runs" / "sma"))


def test_the_page_of_a_run(runs: Path) -> None:
    found = run_json("report", str(runs / "sma"))
    assert found["kind"] == "run"
    names = [Path(name).name for name in found["files"]]
    assert names == ["training.svg", "memory.svg", "spectra.svg", "report.html"]
    content = (runs / "sma" / "report.html").read_text()
    reader = check_page(content)
    order(content, "guarantee", "settings", "curves", "memory", "numbers")
    result = json.loads((runs / "sma" / "result.json").read_text())
    assert f"epsilon {round_up(result['epsilon'])}, delta 1e-05" in reader.text
    for words in (
        *result["caveats"],
        "add or remove one record",
        "Accountant: PLD",
        "papers' figure (diagnostic)",
        f"{result['accuracy']:.2%}",
        "hidden1",
        "Power-law exponents of the trained weights",
    ):
        assert words in reader.text, words
    # Where it lay is not told, and neither is the secret seed.
    everything = content + "".join(v.decode() for v in downloads(reader).values())
    assert str(runs) not in everything and "271828182" not in everything


def test_reports_of_a_run_are_the_same_bytes(runs: Path, folder: Path) -> None:
    first = {path.name: path.read_bytes() for path in report.write_run(folder)}
    other = Path(shutil.copytree(folder, folder.parent.parent / "else" / "runs" / "sma"))
    assert first == {path.name: path.read_bytes() for path in report.write_run(other)}
    for path in runs.joinpath("sma").iterdir():  # nothing else was touched
        if path.name in ("config.json", "metrics.jsonl", "result.json", "model.pt"):
            assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_run_without_a_guarantee(runs: Path) -> None:
    assert run("report", str(runs / "geodp")).exit_code == 0
    reader = check_page((runs / "geodp" / "report.html").read_text())
    assert "No guarantee Epsilon is infinite" in reader.text
    assert "training loss, outside the guarantee" in reader.text
    assert "There is no epsilon to draw" in reader.text
    assert "papers' figure" not in reader.text


def test_the_command_in_the_page_trains_the_same(runs: Path, tmp_path: Path) -> None:
    command = train_command(read_run(runs / "sma"))
    assert command is not None and "--set alpha=0.6" in command and "interval" not in command
    words = shlex.split(command)[1:]
    again = run_json(
        words[0], *words[1:], "--noise-seed", "271828182", "--out", str(tmp_path / "again")
    )
    result = json.loads((runs / "sma" / "result.json").read_text())
    changing = ("folder", "seconds")
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in result.items() if k not in changing
    }


def test_a_run_that_was_interrupted(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text()) | {"interrupted": True}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("")
    (folder / "model.pt").unlink()
    report.write_run(folder)
    reader = check_page((folder / "report.html").read_text())
    assert "This run was interrupted" in reader.text
    assert "ended before its first epoch did" in reader.text


def test_a_run_with_a_hostile_dataset(folder: Path) -> None:
    for name in ("result.json", "config.json"):
        values = json.loads((folder / name).read_text())
        values |= {"dataset": f"/secret/place/{HOSTILE}", "method": "none of ours"}
        values["caveats"] = [HOSTILE]
        (folder / name).write_text(json.dumps(values))
    (folder / "model.pt").write_bytes(b"no weights")
    report.write_run(folder)
    content = (folder / "report.html").read_text()
    assert HOSTILE in check_page(content).text and "<script" not in content


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("result.json", None, "has no result.json: the run did not finish"),
        ("metrics.jsonl", None, "has no metrics.jsonl"),
        ("result.json", "{", "this is no JSON; train again, or restore the file"),
        ("result.json", "[]", "this is no JSON object"),
        ("result.json", "{}", "method is missing"),
        ("config.json", "\x00", "this is no JSON"),
        ("metrics.jsonl", '{"step": 1', "line 1: this is no JSON"),
        ("metrics.jsonl", '{"step": 1}', "line 1: epoch is missing"),
        (
            "metrics.jsonl",
            '{"step": 1, "epoch": "one", "epsilon": 1, "test_loss": 1, "test_accuracy": 1}',
            "epoch is 'one'",
        ),
        (
            "metrics.jsonl",
            '{"step": 1, "epoch": 1, "epsilon": 1, "test_loss": 1, "test_accuracy": 1, '
            '"diagnostics": {"groups": ["a"], "rho": [1.0]}}',
            "its diagnostics are not one number for each step and group",
        ),
    ],
)
def test_a_damaged_run_folder_is_named(
    name: str, content: str | None, words: str, folder: Path
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    result = run("report", str(folder))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert words in result.stderr and "vestige: error" in result.stderr


# -- parts ----------------------------------------------------------------------------------------


def test_markup_escapes_everything_that_is_not_markup() -> None:
    assert text("<&\"'>") == "&lt;&amp;&quot;&#x27;&gt;"
    assert text(text("<b>")) == "&lt;b&gt;"
    made = element("p", "<i>", element("b", "&"), title='"><script>', hidden=True, id=None)
    assert made == '<p title="&quot;&gt;&lt;script&gt;" hidden>&lt;i&gt;<b>&amp;</b></p>'
    assert prose("see `a<b` and arXiv 2605.09890.") == (
        'see <code>a&lt;b</code> and <a href="https://arxiv.org/abs/2605.09890" rel="noreferrer">'
        "arXiv 2605.09890</a>."
    )
    assert text("a\x00b\ud800") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


def test_lines_over_seeds_by_hand() -> None:
    style = palette.style(0)
    runs = [Series([1, 2], [1, 2], [0.1, 0.2]), Series([1, 2, 3], [1, 2, 3], [0.3, None, 0.5])]
    line = mean_line("a", style, runs)
    assert line is not None
    assert line.x == [1, 2, 3] and line.y == pytest.approx([0.2, 0.2, 0.5])
    std = math.sqrt(2) * 0.1
    assert line.low == pytest.approx([0.2 - std, 0.2, 0.5])
    assert line.high == pytest.approx([0.2 + std, 0.2, 0.5])
    alone = mean_line("a", style, runs[:1])
    assert alone is not None and alone.low is None
    assert mean_line("a", style, [Series([1], [1], [None])]) is None


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 250, 251, 1000])
def test_thinned_lines_keep_their_ends(count: int) -> None:
    positions = [float(i) for i in range(1, count + 1)]
    kept = thinned(positions)
    assert kept[0] == 1 and kept[-1] == count and kept == sorted(set(kept))
    assert len(kept) <= MOST_POINTS + 1


def test_stages_of_networks() -> None:
    assert stages_of(["hidden1", "out"]) == ["hidden1", "out"]
    many = ["conv", "norm", *(f"blocks.{i}.conv1" for i in range(8)), "out"]
    assert stages_of(many) == [
        *("stem", "stem"),
        *(f"stage {i // 2 + 1}" for i in range(8)),
        "head",
    ]
    assert (
        stages_of([f"a.{i}" for i in range(5)] + [f"b.{i}" for i in range(5)])
        == ["a"] * 5 + ["b"] * 5
    )


def test_a_large_epsilon_is_said_to_protect_little() -> None:
    assert weak(9.99) is None and weak(None) is None and "protects little" in str(weak(17.44))


def test_series_can_be_told_apart_without_colours() -> None:
    styles = [palette.REFERENCE, *(palette.style(i) for i in range(12))]
    assert len(set(styles)) == len({(s.line, s.marker, s.colour) for s in styles}) == 13
    for one, other in itertools.pairwise(styles):
        assert (one.line, one.marker) != (other.line, other.marker)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_texts_have_enough_contrast() -> None:
    sheet = page("kind", "title", "", [], [])
    light, dark = re.findall(r":root\{([^}]*)\}", sheet)
    for scheme in (light, dark):
        colours: Mapping[str, str] = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", scheme))
        for ground in ("paper", "shade"):
            for ink in ("ink", "muted", "accent", "warning"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground, scheme)


def test_inline_plots_wear_the_page_colours() -> None:
    from matplotlib.figure import Figure

    with svg.settings():
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot([1, 2], [1, 2], color=palette.SERIES[0])
        inline = svg.inline(figure, "name", 'say "this"')
    assert "var(--series-0)" in inline and palette.SERIES[0] not in inline
    assert "<style" not in inline and 'aria-label="say &quot;this&quot;"' in inline


# -- TensorBoard ----------------------------------------------------------------------------------


def test_scalars_are_public_numbers_only() -> None:
    line = {
        "step": 4,
        "epoch": 1,
        "epsilon": 2.0,
        "test_loss": None,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "diagnostics": {
            "groups": ["a", "b"],
            "step": [0, 1],
            "rho": [[None, 2.0], [None, 4.0]],
            "depth": [[1.0, 1.0], [2.0, 2.0]],
            "weights": [[[1.0], [1.0]]],
        },
    }
    assert scalars(line) == {
        "held_out/accuracy": 0.5,
        "privacy/epsilon": 2.0,
        "rho/b": 3.0,
        "depth/a": 1.5,
        "depth/b": 1.5,
    }
    asked = scalars(line | {"train_loss_outside_guarantee": 0.3})
    assert asked.keys() - scalars(line).keys() == {"outside_the_guarantee/train_loss"}


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("train --tensorboard --out", str(tmp_path / "run"))
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "pip install 'vestige-dp[tensorboard]'" in result.stderr


class Writer:
    """What torch's SummaryWriter is used for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.seen.append((tag, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_scalars_are_written_at_the_end_of_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    writer = Writer()
    with Scalars() as listener:
        monkeypatch.setattr(listener, "_writer", writer)
        listener(Progress("training", 3, 10, 2))
        listener(Progress("training", 5, 10, 2, {"test_accuracy": 0.5}, tmp_path))
    assert writer.seen == [("held_out/accuracy", 0.5, 5)] and writer.closed


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = tmp_path / "run"
    assert run("train --epochs 2 --tensorboard --json --out", str(place)).exit_code == 0
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "held_out/accuracy",
        "held_out/loss",
        "privacy/epsilon",
    }
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert {e.wall_time for e in events.Scalars("held_out/accuracy")} == {0.0}
    found = [(e.step, e.value) for e in events.Scalars("held_out/accuracy")]
    assert found == [(line["step"], pytest.approx(line["test_accuracy"])) for line in lines]


def test_replacing_an_experiment_keeps_its_plots(tmp_path: Path) -> None:
    """An experiment that names no figure still gets one."""
    experiment = replace(toy(tmp_path, TOY), figures=())
    assert set(written(experiment, tmp_path / "toy")) == {"accuracy-by-epoch.svg", "report.html"}
