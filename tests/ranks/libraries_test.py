"""Two processes under torchrun whose optimizer Accelerate or Fabric prepares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.library_program import LIBRARIES, trained

EXTRAS = {"accelerate": "hf", "lightning": "lightning"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=LIBRARIES)
def two(request, tmp_path_factory):
    name = request.param
    pytest.importorskip(name, reason=f"needs the extra: pip install -e '.[{EXTRAS[name]}]'")
    folder = tmp_path_factory.mktemp(name)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "tests.support.library_program", name, str(folder)]
    done = subprocess.run(
        [sys.executable, *start, *program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_train_as_one_process_without_the_library(two):
    alone = trained(None)
    for rank in two:
        assert rank["ranks"] == 2
        assert rank["counts"] == alone["counts"]
        assert torch.allclose(rank["weights"], alone["weights"], rtol=1e-12, atol=0)
        assert torch.equal(rank["weights"], two[0]["weights"])


def test_the_library_neither_shards_nor_draws_the_private_lots(two):
    """Every record of a lot is on one rank, and the ranks have no others."""
    alone, (first, second) = trained(None)["lots"], (rank["lots"] for rank in two)
    assert all(rank["same loader"] for rank in two)
    assert sum(map(len, alone.values())) > 0
    for lot, rows in alone.items():
        assert sorted(first.get(lot, []) + second.get(lot, [])) == sorted(rows)


def test_what_the_library_wraps_is_refused_with_the_remedy(two):
    for rank in two:
        assert "give it the loader from before Accelerate's prepare" in rank["loader"]
        assert re.search("DistributedDataParallel.*(pass|call) the module inside it", rank["model"])
