"""Normal numbers by their place: the same in every part of a vector, and normal far out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from vestige.sampling.normals import BLOCK, BoxMuller32, Held, whole
from vestige.sampling.streams import NOISE, Randomness

LENGTH = 2 * BLOCK + 1001


def noise(held=None, length=LENGTH, dtype=torch.float32, step=3):
    """The noise of one step, put together from its pieces, and that every place was made once."""
    source = Randomness(5)
    source.held = held
    count = length if held is None else sum(stop - start for start, stop in held.ranges)
    like, made = torch.full((count,), float("nan"), dtype=dtype), torch.zeros(count)
    for at, part in source.normal_blocks(like, step):
        like[at], made[at] = part, made[at] + 1
    assert torch.equal(made, torch.ones(count))
    return like


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "ranges",
    [
        ((0, LENGTH),),
        ((0, BLOCK), (2 * BLOCK, LENGTH)),
        ((7, 8), (BLOCK - 1, BLOCK + 1), (LENGTH - 3, LENGTH)),
        ((1, 2 * BLOCK + 5),),
        (),
    ],
)
def test_a_part_of_a_vector_has_the_noise_of_the_whole(ranges, dtype):
    everything = noise(dtype=dtype)
    expected = torch.cat([everything[a:b] for a, b in ranges] or [everything[:0]])
    assert torch.equal(noise(Held(LENGTH, ranges), dtype=dtype), expected)


def test_every_division_between_processes_adds_up_to_one_vector():
    everything = noise()
    for world in (2, 3, 4):
        cuts = [LENGTH * k // world for k in range(world + 1)]
        parts = [noise(Held(LENGTH, (pair,))) for pair in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), everything)


def test_blocks_have_bits_of_their_own():
    source, everything = Randomness(5), noise(length=3 * BLOCK)
    first, second, third = everything.view(3, BLOCK)
    assert not any(torch.equal(a, b) for a, b in ((first, second), (second, third)))
    # Blocks lie on one counter, far apart: the stream of one does not run into the next.
    streams = [source.stream(NOISE, 3, block).update(bytes(4096)) for block in range(3)]
    assert len({stream[k : k + 16] for stream in streams for k in range(0, 4096, 16)}) == 3 * 256
    correlation = np.corrcoef(everything.view(3, BLOCK).numpy())[np.triu_indices(3, 1)]
    assert np.abs(correlation).max() < 7 / BLOCK**0.5


def test_the_first_block_is_that_of_a_shorter_vector():
    assert torch.equal(noise(length=BLOCK), noise(length=LENGTH)[:BLOCK])


def test_nobody_holds_more_than_the_whole():
    assert [block[1:3] for block in whole(BLOCK + 1).blocks()] == [(0, BLOCK), (1, 1)]


class Words:
    """Gives the bytes that it was made of, again and again."""

    def __init__(self, words):
        self._words = words.tobytes()

    def update_into(self, zeros, out):
        out[: len(zeros)] = self._words[: len(zeros)]

    def update(self, zeros):
        return self._words[: len(zeros)]


def test_the_largest_words_give_zero_and_nothing_that_is_no_number():
    """Their logarithm is zero and not above it, where its square root would be no number."""
    ends = np.resize(np.array([-(2**31), 2**31 - 1, 1 - 2**31, 2**31 - 64], dtype=np.int32), 64)
    words = np.concatenate([ends, ends])
    assert BoxMuller32()(Words(words), 64, lambda: Words(words)).abs().max() == 0


def test_float32_noise_does_not_end_where_its_bits_do():
    """A word of zeros is 6.66 standard deviations or beyond, as the bits that follow it say."""
    pairs = 2000
    words = np.full(2 * pairs, 2**30, dtype=np.int32)
    words[:pairs] = np.arange(pairs) % 3 - 1  # -1, 0 and 1
    tails = np.random.default_rng(0).integers(0, 2**64, pairs, dtype=np.uint64)
    numbers = BoxMuller32()(Words(words), pairs, lambda: Words(tails)).double().view(2, pairs)
    uniform = torch.exp(-numbers.square().sum(0) / 2) * 2.0**31
    # |x + w| with x in {-1, 0, 1} and w in (-1/2, 1/2) is uniform in (0, 3/2).
    assert float(numbers.abs().max()) > 6.66
    assert float(uniform.max()) < 1.5 + 1e-4
    assert float(uniform.mean()) == pytest.approx(0.75, abs=0.04)
    assert float((uniform < 0.25).double().mean()) == pytest.approx(1 / 6, abs=0.03)
