"""docs/scaling.md has the table that its command prints, and the table is its own formula."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import scaling
from torch.profiler import ProfilerActivity, profile

from tests.support.one_rank import one_rank
from tests.support.small_runs import net, private, run

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_page_has_the_table_of_its_command():
    assert scaling.table() in PAGE.read_text()


def test_the_page_has_the_bytes_of_a_release(tmp_path):
    """In a group of one, the numbers beside the sum and the groups are those of one rank."""
    model = net()
    with one_rank(tmp_path):
        made = private("dp-sgd", model=model, clipping="per_layer", self_check=False)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            run(*made, 1)
    ((numbers,),) = (e.input_shapes[0] for e in seen.events() if e.name == "gloo:all_reduce")
    beside = numbers - sum(p.numel() for p in model.parameters()) - 2
    assert f"4 P + 4 groups + {4 * beside} world" in PAGE.read_text()


def test_a_sum_as_long_as_the_step_halves_what_ranks_give():
    """Eight ranks send 2 * 7 / 8 of the sum at 0.8 of 450 GB/s."""
    seconds = 1.75 * 4 * 1e9 / (0.8 * 450e9)
    assert scaling.efficiency(8, 1e9, seconds) == pytest.approx(0.5)
