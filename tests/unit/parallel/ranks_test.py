"""One process alone, and what does not need others; tests/ranks has the processes."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.one_rank import one_rank
from tests.support.small_runs import private, run
from vestige.errors import ConfigError, PrivacyError
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.groups import partition
from vestige.parallel import faults
from vestige.parallel.ranks import Ranks


def test_one_process_alone_says_nothing_to_anybody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.found()
    assert (ranks.rank, ranks.world, ranks.leads, ranks.group) == (0, 1, True, None)
    assert ranks.key(b"own") == b"own" and ranks.key(None) is None
    assert ranks.sent("this") == "this" and ranks.decided(lambda: 3) == 3
    with pytest.raises(ConfigError, match="no"):
        ranks.decided(_refuse)
    number = torch.tensor([2.0])
    ranks.add_number(number, (1, 2))
    assert number.item() == 2


def _refuse():
    raise ConfigError("no")


LAUNCHERS = {
    "torchrun": {"WORLD_SIZE": "3"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "3"},
    "MPICH": {"PMI_SIZE": "3"},
    "srun": {"SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
    "a step of an allocation": {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "2",
    },
}
ALONE = {
    "an allocation in which nothing was started": {"SLURM_NTASKS": "3"},
    "one task": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "one task of an allocation": {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
    },
    "a process that says so": {"WORLD_SIZE": "1", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
}


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment of a launcher, and of no other."""
    for known in (*LAUNCHERS.values(), *ALONE.values()):
        for name in known:
            monkeypatch.delenv(name, raising=False)

    def launch(environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_without_a_group_are_noticed(launcher, launched):
    launched(LAUNCHERS[launcher])
    (told, *_) = LAUNCHERS[launcher]
    with pytest.raises(ConfigError, match=rf"one of 3 processes \({told}\) .*init_process_group"):
        Ranks.found()


@pytest.mark.parametrize("case", ALONE)
def test_a_process_alone_in_an_allocation_is_not_taken_for_one_of_several(case, launched):
    launched(ALONE[case])
    assert Ranks.found().world == 1


def released_in(folder, thorough):
    """Releases in a group of one, and how often ranks have spoken of them."""
    with one_rank(folder):
        engine, *rest = private("dp-is", max_epsilon=50.0, delta=1e-3)
        engine.ranks.thorough = thorough
        with ExitStack() as entered:
            mocks = [
                entered.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in ("all_reduce", "all_gather_object", "broadcast_object_list")
            ]
            run(engine, *rest, 4)
        return engine.door.last[0].clone(), [message.call_count for message in mocks]


def test_a_group_of_one_says_nothing_about_a_release_unless_it_is_to_do_as_several_do(tmp_path):
    """The sums of a measurement travel beside those of the four releases."""
    (quiet, silent), (thorough, spoken) = (released_in(tmp_path, kind) for kind in (False, True))
    assert silent == [0, 0, 0] and spoken[0] == 4 and spoken[1] > 0 and spoken[2] >= 4
    assert torch.equal(quiet, thorough)


def test_ranks_that_differ_are_named_with_what_differs():
    same = [1.0] * 16
    Ranks()._compare([same, same])
    with pytest.raises(PrivacyError, match=r"rank 2 has come apart .* its last release and place"):
        Ranks()._compare([same, same, [*same[:5], 2.0, *same[6:11], 9.0, *same[12:]]])


def test_a_collector_keeps_its_sum_where_it_is_told_to():
    model = torch.nn.Linear(3, 2)
    collector = Collector(partition(model, "flat"), Clip((1.0,)))
    message = torch.zeros(collector.total.numel() + 5)
    collector.keep_in(message[:-5])
    collector.add(torch.ones(2, 8), 1.0)
    assert torch.allclose(message[:8], torch.full((8,), 2 / 8**0.5), rtol=1e-4)
    assert not message[8:].any()


def test_an_error_of_a_rank_itself_is_not_taken_for_a_message(monkeypatch):
    """Memory that ends is torch's RuntimeError, and what was told once is not told again."""
    monkeypatch.setattr(faults, "_PATIENCE", 0.2)
    ranks, charged = Ranks(), []
    ranks.fault = lambda: charged.append(1)
    for error in (torch.OutOfMemoryError("full"), PrivacyError("rank 1 has gone")):
        for within in (ranks.together("meet"), ranks.passing()):
            with pytest.raises(type(error), match=r"full|has gone") as told, within:
                raise error
            assert told.value is error
    with pytest.raises(RuntimeError, match="twice") as told, ranks.passing():
        raise RuntimeError("backward through the graph twice")
    assert type(told.value) is RuntimeError and not charged


@pytest.mark.parametrize("name", ["together", "passing"])
def test_a_message_that_fails_charges_the_lot_at_hand(name, monkeypatch):
    monkeypatch.setattr(faults, "_PATIENCE", 0.2)
    ranks, charged = Ranks(), []
    ranks.fault = lambda: charged.append(1)
    within = ranks.together("meet") if name == "together" else ranks.passing()
    with pytest.raises(PrivacyError, match=r"every rank still runs.* What was"), within:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert charged == [1]
