"""Labels: where the rows are in a tensor of any shape, and how they are put first."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vestige import UnsupportedModel
from vestige.gradients.rows import Meeting, Rows

SIZES = st.lists(st.integers(1, 4), max_size=2)


def numbered(before: list[int], count: int, inner: int, after: list[int]) -> torch.Tensor:
    """Every entry has the number of its row; `inner` neighbours on the axis share one."""
    axis = torch.arange(count).repeat_interleave(inner)
    axis = axis.view(*[1] * len(before), -1, *[1] * len(after))
    return axis.expand(*before, count * inner, *after).clone()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(before=SIZES, count=st.integers(2, 5), inner=st.integers(1, 3), after=SIZES)
def test_rows_are_found_and_put_first_wherever_they_are(before, count, inner, after):
    value = numbered(before, count, inner, after)
    rows = Rows(1, count).at(value.shape, len(before), inner)
    axis, width = rows.place(value.shape)
    assert torch.equal(
        rows.owners(value.shape, axis, width, value.device),
        value.movedim(axis, 0).reshape(count * inner, -1)[:, 0],
    )
    first = rows.first(value).reshape(count, -1)
    assert torch.equal(first, torch.arange(count)[:, None].expand(first.shape))
    summed = rows.summed(torch.ones(value.shape))
    assert torch.equal(summed, torch.full((count, *before, *after), float(inner)))


def test_an_order_is_undone_and_a_choice_of_rows_is_refused():
    order = torch.tensor([2, 0, 1])
    value = order[:, None].expand(3, 4)
    assert torch.equal(Rows(4, 3, order).first(value)[:, 0], torch.arange(3))
    with pytest.raises(UnsupportedModel, match="rows were picked"):
        Rows(4, 3, torch.tensor([2, 0, 0])).first(value)


def test_a_single_row_is_everywhere_and_an_empty_batch_where_something_is_empty():
    assert Rows(1, 1).place((1, 3)) is None
    assert Rows(1, 0).place((2, 0, 3)) == (1, 1)


def test_rows_are_the_same_where_stride_count_and_order_are():
    order = torch.tensor([1, 0])
    assert Rows(3, 2).same(Rows(3, 2))
    assert not Rows(3, 2).same(Rows(1, 2))
    assert not Rows(3, 2).same(Rows(3, 2, order))
    assert Rows(3, 2, order).same(Rows(3, 2, order.clone()))


def test_labels_do_not_outlast_a_forward_pass():
    for label in (Rows(1, 2), Meeting("'mean'")):
        assert copy.deepcopy(label) is None
        assert pickle.loads(pickle.dumps(label)) is None
