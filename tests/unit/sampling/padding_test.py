"""`PadTo`: rows of one public length, whatever the other records of a lot are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vestige import ConfigError, PadTo

ROWS = [(torch.arange(n), n % 2) for n in (1, 3, 2)]


@given(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_a_row_does_not_depend_on_the_others(length: int, sizes: list[int]) -> None:
    pad = PadTo(length, truncate=True)
    rows = [torch.arange(1, size + 1) for size in sizes]
    together = pad(rows)
    assert together.shape == (len(sizes), length)
    for row, alone in zip(together, rows, strict=True):
        assert torch.equal(row, pad([alone])[0])
        kept = min(length, len(alone))
        assert torch.equal(row[:kept], alone[:kept]) and not row[kept:].any()


def test_fields_by_place_and_by_key() -> None:
    x, y = PadTo({0: 4}, value={0: -1})(ROWS)
    assert x.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1], [0, 1, -1, -1]]
    assert y.tolist() == [1, 1, 0]
    batch = PadTo({"ids": 3})([{"ids": [1, 2], "extra": np.ones(2)}])
    assert batch["ids"].tolist() == [[1, 2, 0]]
    assert batch["extra"].shape == (1, 2)


def test_only_the_first_axis_is_padded() -> None:
    made = PadTo(3, value=7)([torch.zeros(2, 2)])
    assert made.shape == (1, 3, 2)
    assert made[0, 2].tolist() == [7, 7]


def test_a_longer_record_is_refused_and_not_cut_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match="more than the 2 positions of PadTo in field 0"):
        PadTo(2)(ROWS)
    assert PadTo(2, truncate=True)(ROWS)[0].shape == (3, 2)


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "3", {"ids": 0}])
def test_the_length_is_a_count(length: object) -> None:
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        PadTo(length)  # type: ignore[arg-type]
