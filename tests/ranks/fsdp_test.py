"""Models in shards (FSDP2) release what one process with the whole model does."""

from __future__ import annotations

import functools
import math
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.fsdp_program import CASES, IN_SHARDS
from tests.support.inclusion import check_poisson
from tests.support.ranks import finish, start, together

WALK = "frozen,full,tiny_lots,noise,spectra"
SAME = "apart,charges,own_records,half,messages,inclusion"
MORE = {0: "straight", 2: f"saved,unfit,{SAME}", 4: SAME}


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """What a process group of that size brings, which walks through everything once."""
    folder = tmp_path_factory.mktemp("shards")

    def walk(world):
        return together(f"{WALK},{MORE[world]}", world, folder / str(world), "fsdp_program")

    with ThreadPoolExecutor() as pool:  # one process waits beside two
        first = {world: pool.submit(walk, world) for world in (0, 2)}
        yield functools.cache(lambda world: (first.get(world) or pool.submit(walk, world)).result())


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(request, walked):
    return walked(request.param)


@pytest.fixture(scope="module")
def alone(walked):
    """One process with the whole model."""
    return walked(0)[0]


def same(ours, theirs):
    return float((ours - theirs).abs().max()) <= 1e-12 * float(ours.abs().max())


def check_equal(expected, found, name):
    assert found["counts"] == expected["counts"], name
    assert found["caveats"] == expected["caveats"], name
    assert len(found["releases"]) == len(expected["releases"]) > 3, name
    assert all(map(same, expected["releases"], found["releases"])), name
    assert same(expected["weights"], found["weights"]), name


@pytest.mark.parametrize("kind", ["frozen", "full"])
def test_shards_change_no_release(kind, alone, world):
    for name in CASES:
        for rank in world:
            check_equal(alone[kind][name], rank[kind][name], name)


@pytest.mark.slow
def test_every_method_that_takes_shards_is_the_same_in_them(tmp_path):
    (expected,) = together("every_method", 0, tmp_path / "0", program="fsdp_program")
    for rank in together("every_method", 2, tmp_path / "2", program="fsdp_program"):
        for name in IN_SHARDS:
            check_equal(expected[name], rank[name], name)


@pytest.mark.parametrize("kind", ["frozen", "full"])
def test_the_self_check_has_run(kind, world):
    for rank in world:
        assert rank[kind]["checked"]["caveats"] == rank[kind]["flat"]["caveats"] - 1


@pytest.mark.parametrize("kind", ["frozen", "full"])
def test_every_rank_has_the_same_bits(kind, world):
    for name in CASES:
        for rank in world[1:]:
            assert torch.equal(rank[kind][name]["weights"], world[0][kind][name]["weights"])


def test_a_whole_matrix_is_on_one_rank_at_most(alone, world):
    """Every rank finds the spectra of its share, and is told those of all."""
    for number, rank in enumerate(one["spectra"] for one in world):
        for own, every in zip(rank["shapes"], alone["spectra"]["shapes"], strict=True):
            assert own == every[number :: len(world)]
        assert rank["told"] == world[0]["spectra"]["told"]
    for ours, theirs in zip(alone["spectra"]["told"], world[0]["spectra"]["told"], strict=True):
        assert ours == tuple(rho and pytest.approx(rho, rel=1e-12) for rho in theirs)


def test_most_shares_may_be_empty(alone, world):
    for rank in world:
        for full in (False, True):
            check_equal(alone["tiny_lots"][full], rank["tiny_lots"][full], "tiny lots")


def has_variance_one(values):
    """Five standard errors: one false alarm in two million."""
    return abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / values.numel())


@pytest.mark.parametrize("kind", ["frozen", "full"])
def test_the_noise_has_its_variance_once(kind, alone, world):
    for rank in world:
        assert has_variance_one(rank["noise"][kind])
        assert same(alone["noise"][kind], rank["noise"][kind])


def test_noise_on_every_rank_would_be_seen(world):
    for rank in world:
        assert not has_variance_one(rank["noise"]["everywhere"])


def test_noise_from_the_wrong_place_would_be_seen(alone, world):
    for rank in world:
        wrong = rank["noise"]["from zero"]
        assert has_variance_one(wrong)  # by its law alone it would not be
        assert not same(alone["noise"]["full"], wrong)


def test_every_rank_makes_its_own_part_of_the_noise_in_single_precision(world):
    """Of parameters in bfloat16; the parts are as long as one release."""
    parts = [rank["half"]["own"] for rank in world]
    assert sum(map(len, parts)) == world[0]["half"]["size"]
    for part in parts:
        assert part.dtype == torch.float32
        assert float((part == part.bfloat16().float()).float().mean()) < 0.1


def test_every_gradient_is_added_up_once_with_flat_clipping(world):
    """One reduce_scatter a parameter and physical batch: none for norms, whose sums are dropped."""
    for rank in (rank["messages"] for rank in world):
        assert len(rank["sent"]) > 1
        for sent in rank["sent"]:
            assert sent["c10d::_reduce_scatter_base_"] == rank["parameters"]
            assert not any("all_reduce" in name and "c10d" in name for name in sent)


def test_lots_of_a_sharded_model_are_poisson_lots(world):
    check_poisson(list(zip(*(rank["inclusion"]["lots"] for rank in world), strict=True)))


def test_a_lot_is_charged_once_before_its_first_sum_is_shared(world):
    for rank in world:
        assert rank["charges"] == {"seen": [1, 2], "charged": 2}


def test_ranks_with_records_of_their_own_run_as_many_batches(world):
    for rank in world:
        assert rank["own_records"]["released"] == 3
        assert torch.equal(rank["own_records"]["weights"], world[0]["own_records"]["weights"])


def test_a_rank_that_runs_another_pass_stops_all(world):
    for rank in (rank["apart"] for rank in world):
        for said in rank.values():
            assert said["released"] == 1
            assert "a sharded model needs all ranks for every pass" in said["error"]
        assert "runs the model without gradients" in rank["evaluates"]["error"]
        assert "begins a backward pass (lot 1" in rank["gives up"]["error"]


def test_a_rank_that_is_killed_in_a_pass_is_named(tmp_path):
    """The messages are FSDP's own; the lot that was open is charged."""
    first, second = start("killed", 2, tmp_path, "fsdp_program")
    finish([first], tmp_path)
    second.join()
    assert second.exitcode == -signal.SIGKILL
    told = torch.load(tmp_path / "killed.0.pt")
    assert "run a pass of the sharded model: rank 1 (process" in told["error"]
    assert "go on from the last checkpoint" in told["error"]
    assert (told["released"], told["charged"]) == (2, 3)
    assert told["seconds"] < 30  # the group itself would wait for 300


def test_what_does_not_go_with_shards_is_refused_by_its_reason(walked):
    for said in ({k: v["error"] for k, v in rank["unfit"].items()} for rank in walked(2)):
        assert "'0.a' is trained in shards and '3.weight' as a whole" in said.pop("half")
        assert "'3.weight' is a DTensor that no fully_shard manages" in said.pop("strange")
        assert re.search("parameter '0.weight' is sharded as .* dimension 0", said.pop("columns"))
        assert "'auto' does not go with parameters in shards" in said.pop("rows")
        assert "averaging='ema' keeps copies" in said.pop("average")
        assert "looks at the whole gradient" in said["geodp-box"]
        assert "looks at a batch twice" in said["dp-sam"]
        assert "climbs by the norm of a whole release" in said["dp-sat"]
        assert "keeps the noise of whole releases" in said["dp-ftrl"]
        for name, error in said.items():
            assert error.startswith(f"parameters are trained in shards, and method {name!r}"), name
            assert "ignored_params" in error


def test_a_checkpoint_goes_on_with_and_without_shards(alone, walked, tmp_path):
    (folder,) = {rank["saved"]["folder"] for rank in walked(2)}
    for path in Path(folder).glob("checkpoint*"):
        shutil.copy(path, tmp_path)
    turns = [
        [rank["saved"] for rank in walked(2)],
        together("saved", 0, tmp_path, program="fsdp_program"),
        together("saved", 1, tmp_path, program="fsdp_program"),
    ]
    for turn, ranks in enumerate(turns):
        for rank in ranks:
            for full in (False, True):
                assert same(alone["straight"][full][turn], rank[full])
