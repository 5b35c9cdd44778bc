"""Several processes make the release of one: the same key, the same lots, the same noise, once."""

from __future__ import annotations

import functools
import json
import math
import re
import signal

import pytest
import torch

from tests.support.experiments import wait_for
from tests.support.inclusion import check_poisson
from tests.support.rank_faults import MOMENTS
from tests.support.rank_program import VARIANTS
from tests.support.ranks import finish, start, together
from vestige.methods import METHODS
from vestige.privacy import ledger_file

ALL = "methods,tiny_lots,spectra"
REFUSED = (
    "other_order,other_settings,other_generator,other_parameters,refused_on_one,other_noise,forgotten,"
    "same_shards,split_users,late_group,exhausted,apart,apart_spectra,wrapped,wrapped_later"
)
WORLDS = {
    1: ALL,
    2: f"{ALL},own_seeds,noise,inclusion,sharded,pieces,as_many_as_fit,masks,dropout,resumed,"
    f"key_apart,{REFUSED},default_backend",
    4: f"{ALL},inclusion,sharded,subgroup",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return together("methods", 0, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """What a process group of that size brings, which walks through everything once."""
    folder = tmp_path_factory.mktemp("worlds")
    return functools.cache(lambda count: together(WORLDS[count], count, folder / str(count)))


@pytest.fixture(scope="module", params=WORLDS)
def world(request, walked):
    return walked(request.param)


@pytest.fixture(scope="module")
def two(walked):
    return walked(2)


def test_every_method_releases_what_one_process_does(alone, world):
    assert len(alone) == len(METHODS) + len(VARIANTS)
    for name, expected in alone.items():
        first = world[0]["methods"][name]
        assert first["counts"] == expected["counts"], name
        pairs = [
            *zip(expected["releases"], first["releases"], strict=True),
            (expected["weights"], first["weights"]),
        ]
        for ours, theirs in pairs:
            assert float((ours - theirs).abs().max()) <= 1e-12 * float(ours.abs().max()), name


def test_every_rank_has_the_same_bits(world):
    for name, first in world[0]["methods"].items():
        for other in world[1:]:
            values = other["methods"][name]
            assert torch.equal(first["weights"], values["weights"]), name
            assert all(map(torch.equal, first["releases"], values["releases"])), name


def test_most_shares_may_be_empty(world):
    for rank in world:
        for method, reached in rank["tiny_lots"].items():
            assert reached["released"] == 200
            assert torch.equal(reached["weights"], world[0]["tiny_lots"][method]["weights"])


def test_every_rank_finds_the_spectra_of_its_share_of_the_matrices(world):
    """All have the bits that each has found; weights that somebody changed are read on all."""
    every = world[0]["spectra"]["shapes"][3]
    assert len(every) == 3
    for number, rank in enumerate(one["spectra"] for one in world):
        own = every[number :: len(world)]
        assert rank["shapes"] == [own, own, own, every, own]
        assert rank["told"] == world[0]["spectra"]["told"]


def test_whatever_seeds_and_weights_the_ranks_began_with(two):
    assert torch.equal(*(rank["own_seeds"]["weights"] for rank in two))


def test_the_noise_has_its_variance_once_whatever_seeds_are_set(two):
    """12,000 numbers of variance 1: five standard errors, one false alarm in two million."""
    drawn = two[0]["noise"]["values"]
    for values, others in zip(drawn, two[1]["noise"]["values"], strict=True):
        assert torch.equal(values, others)
        assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / values.numel())
    between = float(torch.corrcoef(torch.stack(drawn))[0, 1])  # rank 0's seed was 0 in both
    assert abs(between) < 5 / math.sqrt(len(drawn[0]))


@pytest.mark.parametrize(
    "count, task",
    [(2, "inclusion"), (2, "sharded"), (2, "pieces"), (4, "inclusion"), (4, "sharded")],
)
def test_every_record_is_on_one_rank_and_in_a_quarter_of_the_lots(walked, count, task):
    world = walked(count)
    lots = list(zip(*(rank[task]["lots"] for rank in world), strict=True))
    assert all(torch.equal(rank[task]["weights"], world[0][task]["weights"]) for rank in world)
    check_poisson(lots)
    for sizes in ([len(share) for share in shares] for shares in lots):
        assert task == "sharded" or max(sizes) - min(sizes) <= 1
    if task == "sharded":  # shards draw independently of each other
        first, second = (
            torch.tensor([len(shares[rank]) for shares in lots]).double() for rank in (0, 1)
        )
        between = torch.corrcoef(torch.stack([first, second]))[0, 1]
        assert abs(float(between)) < 5 / math.sqrt(len(lots))


@pytest.mark.parametrize("task", ["key_apart", "default_backend"])
def test_the_key_is_never_in_the_store(task, two):
    """It travels from rank to rank; what is put into the store would be found there."""
    for rank in (rank[task] for rank in two):
        assert rank["found"] == []
        assert rank["seen"] == ["raw", "hex", "base64", "repr"]
    assert task == "key_apart" or two[0][task]["backend"] != "gloo"


def test_ranks_take_as_many_rows_as_fit_on_each(two):
    for rank in (rank["as_many_as_fit"] for rank in two):
        assert rank["rows"] == 5
        assert torch.equal(rank["weights"], two[0]["as_many_as_fit"]["weights"])


def test_no_two_ranks_draw_the_same_masks(two):
    drawn = [numbers for rank in two for numbers in rank["masks"]["drawn"]]
    assert len(drawn) == 6 == len(set(drawn))


def excess(drawn):
    """How far what was kept is from its mean and variance under one fair coin for every record and
    input, in standard errors of 6,000 numbers."""
    kept, records = drawn["kept"], drawn["records"].round()[:, None]
    assert len(kept) == 150 and float((records - drawn["records"][:, None]).abs().max()) < 1e-5
    # A binomial number's fourth moment is 3 - 2 / n, n about 12: the error is a little too large.
    z = ((kept - records / 2) / (records / 4).sqrt())[records[:, 0] > 0]
    return float(z.sum()) / z.numel() ** 0.5, (float(z.square().mean()) - 1) * (
        z.numel() / 2
    ) ** 0.5


def test_dropout_keeps_what_independent_coins_would(two):
    """Five standard errors; masks that ranks share would double the variance."""
    for rank in two:
        mean, variance = excess(rank["dropout"]["own"])
        assert abs(mean) < 5 and abs(variance) < 5
        assert excess(rank["dropout"]["same"])[1] > 20


def test_a_group_of_some_ranks_trains_alone(alone, walked):
    outside, *members = (rank["subgroup"] for rank in walked(4)[1:])
    assert "this process is not one of process_group" in outside["error"]
    expected = alone["fo"]
    for rank in members:
        assert rank["counts"] == expected["counts"]
        for ours, theirs in zip(rank["releases"], expected["releases"], strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-12 * float(ours.abs().max())
        assert torch.equal(rank["weights"], members[0]["weights"])


def test_ranks_that_resume_have_a_new_key_each_time(two):
    """Two runs from one checkpoint share neither noise nor lots; the ranks of each agree."""
    first, second = (rank["resumed"] for rank in two)
    assert first["released"] == second["released"] == [4, 4]
    assert all(map(torch.equal, first["firsts"], second["firsts"]))
    one, other = first["firsts"]
    assert not (one == other).any()


def test_a_model_inside_distributed_data_parallel_is_refused(two):
    for rank in two:
        whole, inner = rank["wrapped"]["errors"]
        assert whole.startswith("the model is wrapped in DistributedDataParallel, which adds up")
        assert inner.startswith("module '0' is wrapped in DistributedDataParallel")
        assert "pass the module inside it" in whole and "pass the module inside it" in inner


def test_a_model_that_was_put_into_it_later_is_refused_in_training(two):
    for rank in (rank["wrapped_later"] for rank in two):
        assert all("call the module inside it" in said for said in rank["errors"])
        assert rank["released"] == [0, 1]


def test_ranks_with_records_in_another_order_are_refused(two):
    for rank in (rank["other_order"] for rank in two):
        for said in rank["errors"]:
            assert said.startswith("the ranks have different records, or the same in another")


def test_a_schedule_on_one_rank_alone_lets_nothing_out(two):
    """Two releases of one sum with one noise at two scales would give the sum away."""
    for rank in (rank["other_noise"] for rank in two):
        assert "rank 1 has come apart from rank 0: its noise or bounds differ" in rank["error"]
        assert rank["released"] == 0


def test_charges_of_one_rank_are_not_forgotten(two):
    for number, rank in enumerate(rank["forgotten"] for rank in two):
        assert "the ledger of rank 1 holds 1 releases that rank 0's does not" in rank["error"]
        assert rank["left"] == number


def test_shards_that_are_the_same_are_refused(two):
    for rank in (rank["same_shards"] for rank in two):
        assert "two ranks have the same records: each would count twice" in rank["error"]


def test_users_on_two_ranks_are_refused(two):
    for rank in (rank["split_users"] for rank in two):
        assert "a user of units=... has records on two ranks" in rank["errors"][0]
        assert "the ranks were given different units" in rank["errors"][1]


def test_a_group_that_comes_too_late_is_noticed(two):
    for rank in (rank["late_group"] for rank in two):
        assert "a process group was made after make_private" in rank["error"]
        assert rank["released"] == 0


def test_a_rank_that_has_come_apart_stops_all(two):
    for rank in (rank["apart"] for rank in two):
        assert rank["error"].startswith("rank 1 has come apart from rank 0: its weights differ.")
        assert rank["released"] == 1


def test_a_rank_that_reads_its_spectra_again_alone_stops_all(two):
    for rank in (rank["apart_spectra"] for rank in two):
        assert "rank 1 has come apart from rank 0: its weights" in rank["error"]


def test_ranks_with_other_settings_are_refused(two):
    for rank in (rank["other_settings"] for rank in two):
        assert re.match("ranks [01] and [01] were given different settings", rank["error"])
        assert re.search(r"noise_multiplier: 0.7?5 and 0.7?5", rank["error"])


def test_ranks_that_make_their_noise_in_other_ways_are_refused(two):
    """Two draws of noise on one sum would be half of its variance to whoever sees both."""
    for rank in (rank["other_generator"] for rank in two):
        secure, torches = rank["errors"]
        assert re.search(r"secure_mode: (True|False) and (True|False)", secure)
        assert re.search(r"noise made by: torch 0.1.* and torch|torch .* and torch 0.1", torches)


def test_ranks_that_train_other_parameters_are_refused(two):
    """Sums of different lengths would be added up to nonsense, or end the process."""
    for rank in (rank["other_parameters"] for rank in two):
        assert "parameter 0.bias: (8,) torch.float64, trained and (8,)" in rank["error"] or (
            "parameter 0.bias: (8,) torch.float64, frozen and (8,)" in rank["error"]
        )
        assert len(rank["error"]) < 400


def test_what_one_rank_is_refused_all_are_told(two):
    first, second = (rank["refused_on_one"]["errors"] for rank in two)
    assert first[0] == f"rank 1 was refused: {second[0]}" and "(BatchNorm1d)" in second[0]
    assert second[1] == f"rank 0 was refused: {first[1]}" and "steps" in first[1]


def test_a_budget_ends_on_every_rank_at_once(two):
    first, second = (rank["exhausted"] for rank in two)
    assert first["file"] and not second["file"]
    assert first["released"] == second["released"] > 0
    assert first["epsilon"] == second["epsilon"] <= 6


def test_two_ranks_resume_as_one_and_as_four(tmp_path):
    reached = []
    for world in (2, 0, 4):
        ranks = together("saved", world, tmp_path)
        assert all(rank["charged"] == rank["released"] for rank in ranks)
        assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
        reached.append(ranks[0])
    assert [one["released"] for one in reached] == [3, 6, 9]
    (straight,) = together("straight", 0, tmp_path / "alone")
    for one, weights in zip(reached, straight["weights"], strict=True):
        assert float((one["weights"] - weights).abs().max()) <= 1e-12 * float(weights.abs().max())


def check_told(brought):
    """The rank is named within seconds, and the lot that was open is charged."""
    assert "rank 1 (process" in brought["error"], brought["error"]
    assert "go on from the last checkpoint" in brought["error"]
    assert brought["charged"] == 3
    assert brought["seconds"] < 30  # the group itself would wait for 300


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    first, second = start("killed", 2, tmp_path)
    wait_for((tmp_path / "waiting").exists)
    second.kill()
    finish([first], tmp_path)
    check_told(torch.load(tmp_path / "killed.0.pt"))
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_whichever_rank_is_killed_and_when_the_other_is_told(moment, victim, tmp_path):
    """What was added up is on the ledger in its file, whoever is left to write it."""
    task, other = f"killed_in_{moment}_{victim}", 1 - victim
    ranks = start(task, 2, tmp_path)
    finish([ranks[other]], tmp_path)
    ranks[victim].join()
    assert ranks[victim].exitcode == -signal.SIGKILL
    told = torch.load(tmp_path / f"{task}.{other}.pt")
    assert f"rank {victim} (process" in told["error"]
    assert told["seconds"] < 30  # the group itself would wait for 300
    complete = moment in ("update", "checkpoint")
    assert told["released"] == 2 + complete and told["charged"] == told["released"] + 1
    on_file = sum(event.count for event in ledger_file.read(tmp_path / "ledger.jsonl").events)
    # Rank 0 charges a lot when it steps; one that it was killed before has added up nothing.
    assert on_file == told["charged"] - (victim == 0 and moment != "all_reduce")
    assert (tmp_path / "checkpoint").exists() == (complete and victim == 1)


def test_an_exception_on_one_rank_ends_the_others(tmp_path):
    first, second, third = start("raises", 3, tmp_path)
    finish([first, third], tmp_path)
    second.join()
    assert second.exitcode == 1
    assert "the third batch was too much" in (tmp_path / "errors.1").read_text()
    for rank in (0, 2):
        check_told(torch.load(tmp_path / f"raises.{rank}.pt"))
