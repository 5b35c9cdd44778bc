"""Attention: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest

from tests.support.reference import check_sum_of_zoo
from tests.support.zoo import BY_RULE


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["attention"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)
