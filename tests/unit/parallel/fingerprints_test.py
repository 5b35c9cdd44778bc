"""Fingerprints notice every bit, at every size, and are functions of the values alone."""

from __future__ import annotations

import pytest
import torch
from benchmarks.release_costs import Calls

from vestige.parallel.fingerprints import DIGITS, fingerprints

LIKE = torch.zeros(1)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.bool]


def number(seen):
    return [int(digit) for digit in fingerprints([seen], LIKE)]


@pytest.mark.parametrize("count", [1, 5, 2**20, 2**20 + 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_changes_with_every_bit(dtype, count):
    values = (torch.arange(count) % 2).to(dtype)
    for byte in (0, count * values.element_size() - 1):
        other = values.clone()
        other.view(torch.uint8)[byte] ^= 1
        assert number([values]) != number([other])
        assert number([LIKE, values]) != number([LIKE, other])


def test_it_is_the_sum_of_all_words_of_eight_bytes():
    tensors = [torch.randn(n).to(dtype) for n in (3, 10, 2**18 + 2) for dtype in DTYPES[:3]]
    words = 0
    for tensor in tensors:
        data = bytes(tensor.view(torch.uint8).numpy())
        data += bytes(-len(data) % 8)
        words += sum(memoryview(data).cast("Q"))
    assert sum(d << (16 * i) for i, d in enumerate(number(tensors))) == words % 2**64


def test_how_the_values_lie_in_memory_does_not_matter():
    values = torch.randn(700, 800)
    moved = torch.empty(values.numel() + 1)[1:].view_as(values).copy_(values)
    strided = values.t().contiguous().t()
    assert moved.storage_offset() % 2 and not strided.is_contiguous()
    assert number([values]) == number([moved]) == number([strided])
    assert number(values[:7]) == number([values[:7]])


def test_two_numbers_that_have_changed_places_are_seen_in_one_word():
    assert number([torch.tensor([1.0, 2.0])]) != number([torch.tensor([2.0, 1.0])])


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, -1, -(2**63), 0x0123_4567_89AB_CDEF])
def test_digits_are_exact_in_single_precision(value):
    digits = fingerprints([7, value], LIKE)
    assert len(digits) == 2 * DIGITS and int(digits[0]) == 7
    assert digits.float().long().equal(digits)
    assert sum(int(d) << (16 * i) for i, d in enumerate(digits[DIGITS:])) == value % 2**64


def operations(tensors):
    with Calls() as calls:
        fingerprints([tensors], LIKE)
    return calls.count


def test_many_small_tensors_are_read_in_a_few_operations():
    """Each is a launch on a GPU: a loop over ResNet-18's 62 tensors had over a hundred."""
    assert operations([torch.ones(64)] * 100) == operations([torch.ones(64)]) < 12
    assert number([]) == [0] * DIGITS
