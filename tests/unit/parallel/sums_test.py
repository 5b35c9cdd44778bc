"""Sums over ranks with shards; several ranks add up in tests/ranks/fsdp_test.py."""

from __future__ import annotations

import torch

from tests.support.one_rank import one_rank
from vestige.parallel.ranks import Ranks
from vestige.parallel.sums import Sums


def test_one_rank_has_the_whole_sum(tmp_path):
    with one_rank(tmp_path):
        sums = Sums(Ranks.found())
        whole = torch.randn(5, 3)
        assert torch.equal(sums.share(whole), whole)
        assert torch.equal(sums.total(whole.clone()), whole)


def test_what_is_found_of_a_matrix_may_be_nothing(tmp_path):
    with one_rank(tmp_path):
        matrices = [torch.full((n, 2), float(n)) for n in (1, 2, 3)]
        found = Sums(Ranks.found()).divided(
            matrices, lambda some: [None if len(m) == 2 else float(m.sum()) for m in some]
        )
        assert found == [2.0, None, 18.0]
        assert Sums(Ranks.found()).divided([], list) == []
