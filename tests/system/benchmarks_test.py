"""The benchmark command in a small form: what runs, what is kept, what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from benchmarks import group_of_one, neighbours
from benchmarks.__main__ import main
from benchmarks.cases import sections
from benchmarks.engines import ENGINES, FLAT, PER_LAYER, PLAIN, Engine, plain
from benchmarks.models import GPT2Size, Llama, LlamaSize, ViT
from benchmarks.profile import launches, profile
from benchmarks.store import OtherMachineError, Results, machine
from benchmarks.timing import LEAST_ROUNDS, Deadline, race
from benchmarks.workloads import Workload

SMALL = Workload("mlp", 32)
TEXTS = {"length": 12, "size": GPT2Size(words=60, length=16, width=24, heads=2, depth=2)}
LLAMA = {
    "length": 12,
    "size": LlamaSize(words=60, width=32, depth=2, heads=4, groups=2, inner=40, rank=3),
}
MEASURED = [PLAIN, FLAT]


def raced(workload, names, rounds=1, deadline=None):
    engines = {name: ENGINES[name] for name in names}
    rows = race(workload, "cpu", engines, rounds, deadline or Deadline())
    return {row["engine"]: row for row in rows}


def every_engine():
    found = {name for device in ("cpu", "cuda") for some in sections(device).values()
             for case in some for name in case.engines}  # fmt: skip
    return sorted(found)


@pytest.mark.parametrize("name", [n for n in every_engine() if "compiled" not in n])
def test_every_engine_of_a_section_runs(name):
    if name.startswith("opacus") and find_spec("opacus") is None:
        pytest.skip("Opacus is not installed")
    base = ENGINES[name].base
    rows = raced(SMALL, dict.fromkeys([PLAIN, *filter(None, [base]), name]))
    assert "failed" not in rows[name], rows[name]["failed"]
    assert rows[name]["milliseconds"] > 0 and rows[name]["ratio"] > 0
    assert (rows[name]["over_base"] is None) == (base is None)


def test_a_group_of_one_releases_the_same_and_a_change_is_told(monkeypatch):
    assert group_of_one.difference("cpu") <= 1e-12
    monkeypatch.setattr(group_of_one, "measure", lambda words: words)
    monkeypatch.setattr(group_of_one, "difference", lambda device: 1e-9)
    with pytest.raises(SystemExit, match=r"changes releases by 1\.0e-09"):
        group_of_one.main(["--device", "cpu"])


@pytest.mark.slow
def test_compiled_steps_run_and_are_compiled():
    names = [PLAIN, "plain, compiled", f"{PER_LAYER}, compiled", f"{FLAT}, compiled"]
    rows = raced(SMALL, names)
    assert all("failed" not in row and "note" not in row for row in rows.values()), rows
    assert rows[f"{FLAT}, compiled"]["base"] == "plain, compiled"


@pytest.mark.parametrize(
    "workload",
    [
        Workload("gpt2", 4, "bf16", TEXTS),
        Workload("llama-lora", 4, "bf16", LLAMA),
        Workload("wrn-16-4", 2, sizes={"blocks": 1, "width": 1}),
        Workload("perceptron", 4, sizes={"width": 16}),
    ],
    ids=lambda workload: workload.model,
)
def test_workloads_are_trained_privately(workload):
    rows = raced(workload, [PLAIN, FLAT])
    assert [row for row in rows.values() if "failed" in row] == []


def test_texts_of_every_length_have_as_many_words():
    cases = [case for case in sections("cuda")["growth"] if case.name.startswith("length")]
    lengths = [case.workload.sizes["length"] for case in cases]
    assert lengths == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert {case.workload.lot * case.workload.sizes["length"] for case in cases} == {8192}


def test_the_rows_are_the_nine_of_the_goals():
    cases = sections("cuda")["rows"]
    assert len(cases) == 9
    for case in cases:
        assert {PLAIN, "plain, compiled", PER_LAYER, FLAT} <= set(case.engines)
        assert f"{FLAT}, compiled" in case.engines and "opacus ghost" in case.engines


def test_the_llama_has_more_than_a_billion_parameters_of_which_few_are_trained():
    with torch.device("meta"):
        model = Llama()
        out = model(torch.zeros(2, 5, dtype=torch.long))
    assert out.shape == (2, 5, 128_256) and out.dtype == torch.bfloat16
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 1.0e9 < total < 1.3e9 and 1e6 < trained < 1e7


def test_places_of_a_vit_begin_around_zero():
    places = ViT().places
    assert abs(float(places.detach().mean())) < 1e-3
    assert float(places.detach().std()) == pytest.approx(0.02, rel=0.02)


# -- what is kept ---------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command on one case, writing to a file of its own, at a commit that can be changed."""
    monkeypatch.setenv("COMMIT", "first")
    threads = torch.get_num_threads()

    def run(*words):
        main(["--section", "models", "--cases", "mlp", "--engines", FLAT, "--rounds", "1",
              "--threads", "1", "--no-memory", "--out", str(out), *words])  # fmt: skip
        return json.loads(out.read_text()) if out.exists() else None

    out = tmp_path / "results" / "cpu.json"
    yield run
    torch.set_num_threads(threads)


def test_what_is_measured_is_kept_and_not_measured_again(command, capsys):
    first = command()
    assert [row["engine"] for row in first["rows"]] == MEASURED
    assert first["machine"]["commit"] == "first"
    assert command() == first
    assert "0 rows written" in capsys.readouterr().err
    again = command("--again")
    assert [row["engine"] for row in again["rows"]] == MEASURED
    assert again["rows"] != first["rows"] and again["machine"] == first["machine"]


def test_a_file_of_another_commit_is_refused_and_stays(command, monkeypatch, capsys):
    first = command()
    monkeypatch.setenv("COMMIT", "second")
    with pytest.raises(SystemExit):
        command("--again")
    assert "commit first, now second" in capsys.readouterr().err
    monkeypatch.setenv("COMMIT", "first")
    assert command() == first


def test_a_file_of_another_device_is_refused(tmp_path):
    here = {"device": "one", "commit": "a", "measured": "today"}
    path = tmp_path / "x.json"
    Results(path, here).put([{"section": "s", "case": "c", "engine": "e"}])
    assert Results(path, here | {"measured": "tomorrow"}).machine == here
    with pytest.raises(OtherMachineError, match="device one, now two"):
        Results(path, here | {"device": "two"})


def test_no_time_measures_nothing_and_says_what_is_left(command, capsys):
    assert command("--minutes", "0") is None
    assert "goes on with: models, mlp" in capsys.readouterr().err
    command()
    assert "nothing is left" in capsys.readouterr().err


def test_when_the_time_is_over_the_engines_that_run_are_measured():
    rows = raced(SMALL, MEASURED, rounds=50, deadline=Deadline(0))
    assert list(rows) == [PLAIN]
    assert rows[PLAIN]["rounds"] == LEAST_ROUNDS


def test_an_unknown_name_is_refused_with_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main(["--section", "row"])
    assert "there are bands, group, models, twice, updates" in capsys.readouterr().err


def test_results_belong_to_the_code_that_was_measured(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    assert len(machine("cpu")["commit"].removesuffix("-changed")) >= 7


# -- what goes wrong ------------------------------------------------------------------------


def test_an_engine_that_does_not_run_says_why_and_the_others_are_measured():
    def never(workload, device):
        raise RuntimeError("no such layer\nand more")

    def twice(workload, device):
        loop = plain()(workload, device)
        for _ in range(8):
            yield next(loop)
        raise torch.OutOfMemoryError("full")

    engines = {PLAIN: ENGINES[PLAIN], "never": Engine(never), "twice": Engine(twice)}
    rows = {row["engine"]: row for row in race(SMALL, "cpu", engines, 3, Deadline())}
    assert rows["never"]["failed"] == "RuntimeError: no such layer"
    assert rows["twice"]["failed"] == "OutOfMemoryError: full"
    assert rows[PLAIN]["rounds"] == 3


def test_every_kind_of_launch_counts():
    names = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx",
             "cudaGraphLaunch", "cudaMemcpyAsync", "aten::add")  # fmt: skip
    assert launches(SimpleNamespace(key=name, count=2) for name in names) == 10
    assert "aten::" in profile(SMALL, "cpu", ENGINES[PLAIN])


# -- one row more ---------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model, sizes", [("gpt2", TEXTS), ("cnn", {})])
def test_one_more_record_moves_a_sum_of_one_shape_by_the_bound(model, sizes, precision, clipping):
    row = neighbours.measure(Workload(model, 6, precision, sizes), "cpu", clipping)
    assert 0.999 < row["padded"] <= 1 + 1e-3  # the record is clipped, and moves by all of it
    assert abs(row["r"] - row["padded"]) <= row["others"] + 1e-9
    assert row["others"] < 1e-4


def test_neighbours_are_merged_and_printed(tmp_path, monkeypatch, capsys):
    tiny = Workload("gpt2", 3, "bf16", TEXTS)
    monkeypatch.setattr(neighbours, "workloads", lambda device: [tiny])
    for _ in range(2):
        neighbours.main(["--out", str(tmp_path / "n.json")])
    rows = json.loads((tmp_path / "n.json").read_text())["rows"]
    assert [(row["case"], row["engine"]) for row in rows] == [
        ("gpt2-bf16, 2", "flat"),
        ("gpt2-bf16, 2", "per_layer"),
    ]
    assert "| gpt2, bf16 | per_layer | 2 |" in capsys.readouterr().out
