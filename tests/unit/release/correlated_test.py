"""Correlated noise and the lots that go with it: exact matrices, sensitivities, interruptions.

The noise is linear in its fresh draws. Where `fresh` gives unit vectors, `at` gives the rows of the
matrix itself, so that laws and privacy arguments are checked exactly and not by sampling. Each
test that does sample raises a false alarm in at most one run in 10^7 (`FALSE_ALARM`, shared among
the comparisons that it makes).
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import block_diag, toeplitz

from tests.support.dense_noise import (
    ORDERS_AND_BANDS,
    dense,
    empty,
    matrix,
    node_index,
    rows_of,
    tree_matrix,
)
from vestige.errors import ConfigError
from vestige.privacy.factorisation import (
    coefficients,
    inverse_root,
    norm,
    tree_sensitivity,
)
from vestige.release.correlated import Banded, Moving, Tree
from vestige.sampling.lots import GROUPS, ORDER, CyclicPoisson, FixedOrder
from vestige.sampling.normals import BLOCK
from vestige.sampling.streams import LOTS, NOISE, Randomness

FALSE_ALARM = 1e-7


LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 21]


def vector(index, size):
    return torch.from_numpy(np.random.default_rng([7, index]).standard_normal(size))


class Fresh:
    """Reproducible draws in blocks of odd sizes, that fail when told to; `asked` in order."""

    def __init__(self, size, cuts=(5, 11)):
        self.size, self.edges = size, [0, *(c for c in cuts if c < size), size]
        self.asked, self.fail_after = [], None

    def __call__(self, index):
        self.asked.append(index)
        whole = vector(index, self.size)
        for start, stop in itertools.pairwise(self.edges):
            if self.fail_after is not None:
                if self.fail_after == 0:
                    raise KeyboardInterrupt
                self.fail_after -= 1
            # The block is overwritten after use, as the real one is.
            block = whole[start:stop].clone()
            yield slice(start, stop), block
            block.fill_(math.nan)


def banded(order, bands, fresh, first=0):
    return Banded(empty(fresh.size), fresh, coefficients(order, bands), first=first)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, None])
def test_counts_must_be_counts(count):
    for call in (
        lambda: coefficients(0.5, count),
        lambda: tree_sensitivity(count, 1),
        lambda: tree_sensitivity(1, count),
        lambda: Tree(empty(2), Fresh(2), count),
        lambda: CyclicPoisson(Randomness(1), 9, 0.1, count),
        lambda: FixedOrder(Randomness(1), 9, count),
    ):
        with pytest.raises(ConfigError, match=r"must be a whole number of at least 1"):
            call()


KINDS = [
    lambda f: banded(0.8, 5, f),
    lambda f: Tree(empty(13), f, 6),
    lambda f: moving(f, 6),
]


def moving(fresh, length, momentum=0.9, bands=4, first=0):
    return Moving(empty(fresh.size), fresh, inverse_root(momentum, bands), length, first=first)


def moving_matrix(length, rows, momentum=0.9, bands=4):
    """D: a block of the banded matrix for every `length` rows."""
    column = np.zeros(length)
    column[:bands] = inverse_root(momentum, bands)[:length]
    block = toeplitz(column, np.zeros(length))
    return block_diag(*[block] * -(-rows // length))[:rows, :rows]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 30])
@pytest.mark.parametrize("first", [0, 7])
def test_moving_noise_is_that_of_the_banded_matrix(length, first):
    rows, size = 17, 13
    process = moving(Fresh(size), length, first=first)
    made = rows_of(process, range(first, first + rows))
    z = torch.stack([vector(first + t, size) for t in range(rows)]).numpy()
    weights = moving_matrix(length, rows)
    np.testing.assert_allclose(made, weights @ z, rtol=0, atol=1e-12)
    marginals = [process.marginal(first + t) for t in range(rows)]
    np.testing.assert_allclose(marginals, np.linalg.norm(weights, axis=1), rtol=1e-12)


@pytest.mark.parametrize("bands", [1, 8, 64])
def test_moving_noise_keeps_one_vector_and_draws_what_it_needs(bands):
    fresh = Fresh(13)
    process = moving(fresh, 1000, bands=bands)
    process.at(500)
    assert fresh.asked == [500 - lag for lag in range(bands)]
    kept = [value for value in vars(process).values() if isinstance(value, torch.Tensor)]
    assert [value.numel() for value in kept] == [13]


@pytest.mark.parametrize(("order", "bands"), ORDERS_AND_BANDS)
def test_banded_noise_is_that_of_the_dense_matrix(order, bands):
    steps, size = 60, 17
    made = rows_of(banded(order, bands, Fresh(size)), range(steps))
    z = torch.stack([vector(t, size) for t in range(steps)]).numpy()
    c = np.linalg.norm(dense(order, bands, 40)[:, 0])
    np.testing.assert_allclose(
        made, c * np.linalg.solve(dense(order, bands, steps), z), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_band_is_the_white_draw_bit_by_bit(dtype):
    like, source = empty(BLOCK + 333, dtype), Randomness(4)
    process = Banded(like, lambda t: source.normal_blocks(like, t), coefficients(0.7, 1))
    for row in range(3):
        made = process.at(row)
        assert made.dtype == dtype
        for block, z in Randomness(4).normal_blocks(like, row):
            assert torch.equal(made[block], z)


def test_the_real_stream_in_several_blocks_and_in_single_precision():
    """Blocks come in one buffer that is written again: each must be used up before the next."""
    like, source = empty(2 * BLOCK + 5, torch.float32), Randomness(4)
    process = Banded(like, lambda t: source.normal_blocks(like, t), coefficients(0.8, 4))
    z = np.zeros((6, like.numel()))
    for row in range(6):
        for block, part in Randomness(4).normal_blocks(like, row):
            z[row, block] = part
    c = norm(coefficients(0.8, 4))
    expected = c * np.linalg.solve(dense(0.8, 4, 6), z)
    np.testing.assert_allclose(rows_of(process, range(6)), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("make", KINDS)
def test_rows_that_are_passed_over_leave_the_others_as_they_were(make):
    all_rows = rows_of(make(Fresh(13)), range(30))
    kept = [0, 1, 4, 9, 10, 22, 29]
    assert np.array_equal(rows_of(make(Fresh(13)), kept), all_rows[kept])
    assert len({row.tobytes() for row in all_rows}) == 30


@pytest.mark.parametrize("make", KINDS)
def test_rows_never_go_back(make):
    process = make(Fresh(13))
    process.at(3)
    for row in (3, 2, 0):
        with pytest.raises(RuntimeError, match="never go back"):
            process.at(row)
    expected = rows_of(make(Fresh(13)), [4])
    assert np.array_equal(rows_of(process, [4]), expected)


def test_a_process_begins_with_an_empty_past_and_draws_of_its_own():
    """Restarting makes C block diagonal; the draws are those of the rows, not the first ones."""
    order, bands, first, steps = 0.5, 4, 9, 12
    c = norm(coefficients(order, bands))
    later = rows_of(banded(order, bands, Fresh(13), first), range(first, first + steps))
    z = torch.stack([vector(t, 13) for t in range(first, first + steps)]).numpy()
    np.testing.assert_allclose(
        later, c * np.linalg.solve(dense(order, bands, steps), z), atol=1e-12
    )
    process = banded(order, bands, Fresh(13), first)
    for ask in (process.at, process.marginal):
        with pytest.raises(RuntimeError):
            ask(first - 1)
    assert process.marginal(first) == pytest.approx(c)


@pytest.mark.parametrize(("order", "bands"), [(0.5, 1), (0.5, 4), (0.8, 6), (1.0, 3)])
def test_what_banded_noise_hides_has_sensitivity_one_for_each_cycle(order, bands):
    """From the noise as made, with a restart in mid-cycle: sigma 1 is multiplier 1 per event.

    inverse(M) is what the releases are multiplied by to make the noise white.
    """
    before, after = 2 * bands + 1, 3 * bands
    blocks = [
        matrix(lambda u, f=first: banded(order, bands, u, f), steps, steps, first)
        for first, steps in ((0, before), (before, after))
    ]
    assert len({index for _, indices in blocks for index in indices}) == before + after
    hidden = np.linalg.inv(block_diag(*(made for made, _ in blocks)))
    gram = hidden.T @ hidden
    assert np.diag(gram).max() == pytest.approx(1, rel=1e-12)
    for i, j in itertools.combinations(range(before + after), 2):
        if j - i >= bands or i < before <= j:
            assert abs(gram[i, j]) < 1e-12
    for old, new in itertools.product(range(bands), range(bands)):
        lots = [*range(old, before, bands), *range(before + new, before + after, bands)]
        cycles = -(-before // bands) + after // bands
        moved = np.linalg.norm(hidden[:, lots].sum(1))
        assert moved <= math.sqrt(cycles) * (1 + 1e-12)


@pytest.mark.parametrize(("order", "bands"), ORDERS_AND_BANDS)
def test_marginals_of_banded_noise(order, bands):
    process = banded(order, bands, Fresh(3))
    scaled = norm(coefficients(order, bands)) * np.linalg.inv(dense(order, bands, 50))
    expected = np.linalg.norm(scaled, axis=1)
    np.testing.assert_allclose([process.marginal(t) for t in range(50)], expected, rtol=1e-11)
    # Far beyond what was computed at first, in any order of asking.
    assert process.marginal(5000) >= process.marginal(49) == pytest.approx(expected[49])


def whitened(samples, covariance):
    """The p-values of all variances and covariances of samples that should be white by now."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), samples)
    count = samples.shape[1]
    products = white @ white.T
    squares = stats.chi2(count).cdf(np.diag(products))
    mixed = stats.norm.cdf(products[np.triu_indices(len(white), 1)] / math.sqrt(count))
    both = np.concatenate([squares, mixed])
    return 2 * np.minimum(both, 1 - both)


@pytest.mark.parametrize(
    "make",
    [
        lambda like, fresh: Banded(like, fresh, coefficients(0.8, 4)),
        lambda like, fresh: Tree(like, fresh, 7, honaker=False),
        lambda like, fresh: Tree(like, fresh, 7),
    ],
    ids=["banded", "tree", "honaker"],
)
def test_the_empirical_covariance_of_secret_noise(make):
    rows, like, source = 10, empty(100_000, torch.float32), Randomness()
    samples = rows_of(make(like, lambda t: source.normal_blocks(like, t)), range(rows))
    weights, _ = matrix(lambda units: make(empty(units.size), units), rows, 40)
    exact = weights @ weights.T
    p_values = whitened(samples.astype(np.float64), exact)
    assert p_values.min() > FALSE_ALARM / len(p_values)
    wrong = exact.copy()
    wrong[3, 2] = wrong[2, 3] = exact[3, 2] + 0.05
    assert whitened(samples, wrong).min() < 1e-9


def test_the_empirical_covariance_of_moving_noise():
    """That of D D^T, over the end of a block."""
    rows, like, source = 10, empty(100_000, torch.float32), Randomness()
    process = Moving(like, lambda t: source.normal_blocks(like, t), inverse_root(0.9, 4), 7)
    samples = rows_of(process, range(rows)).astype(np.float64)
    weights = moving_matrix(7, rows)
    p_values = whitened(samples, weights @ weights.T)
    assert p_values.min() > FALSE_ALARM / len(p_values)
    later = moving_matrix(100, rows)  # as if the second block went on with the first one's draws
    assert whitened(samples, later @ later.T).min() < 1e-9


class Reference:
    """A tree as a recursion over its nodes: (noise, variance) of the best estimate of each."""

    def __init__(self, start, length, honaker, size):
        self.start, self.length, self.honaker, self.size = start, length, honaker, size

    def node(self, height, position):
        if position * 2**height >= self.length:
            return np.zeros(self.size), 0.0  # no data: known to be zero
        z = vector(node_index(self.start, self.length, height, position), self.size).numpy()
        if height == 0 or not self.honaker:
            return z, 1.0
        (a, v), (b, w) = (self.node(height - 1, 2 * position + side) for side in (0, 1))
        return (z + (a + b) / (v + w)) / (1 + 1 / (v + w)), 1 / (1 + 1 / (v + w))

    def prefix(self, leaves):
        noise, variance, done = np.zeros(self.size), 0.0, 0
        for height in reversed(range(leaves.bit_length())):
            if leaves >> height & 1:
                value, v = self.node(height, done >> height)
                noise, variance, done = noise + value, variance + v, done + 2**height
        return noise, variance

    def total(self):
        return self.node((self.length - 1).bit_length(), 0)


def reference_rows(length, honaker, rows, size, first=0):
    """The rows, and the variance of the noise of all prefix sums."""
    sums, variances, done, spent = [np.zeros(size)], [], np.zeros(size), 0.0
    for row in range(rows):
        tree = Reference(first + row // length * length, length, honaker, size)
        noise, variance = tree.prefix(row % length + 1)
        sums.append(done + noise)
        variances.append(spent + variance)
        if row % length == length - 1:
            noise, variance = tree.total()
            done, spent = done + noise, spent + variance
    return np.diff(sums, axis=0), np.array(variances)


@pytest.mark.parametrize("honaker", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("first", [0, 5])
def test_a_tree_is_that_of_the_recursion(length, honaker, first):
    size, rows = 13, 3 * length + 2
    process = Tree(empty(size), Fresh(size), length, honaker, first=first)
    made = rows_of(process, range(first, first + rows))
    expected, _ = reference_rows(length, honaker, rows, size, first)
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("honaker", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_variances_of_trees(length, honaker):
    """Of prefixes, from the closed form and over restarts; of rows, as `marginal` says."""
    rows = 3 * length + 2
    weights, _ = tree_matrix(length, honaker, rows)
    prefixes = (np.cumsum(weights, axis=0) ** 2).sum(1)
    closed = [
        sum(1 / (2 - 2.0**-h) if honaker else 1 for h in range(20) if t >> h & 1)
        for t in range(1, length + 1)
    ]
    np.testing.assert_allclose(prefixes[:length], closed, rtol=1e-12)
    np.testing.assert_allclose(
        prefixes, reference_rows(length, honaker, rows, 1)[1], rtol=1e-12, atol=0
    )
    process = Tree(empty(2), Fresh(2), length, honaker, first=4)
    marginals = [process.marginal(4 + t) for t in range(rows)]
    np.testing.assert_allclose(marginals, np.linalg.norm(weights, axis=1), rtol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_completed_tree_leaves_less_noise_behind(length):
    """The next tree begins on the total's noise: 1 at most, and less with Honaker's estimate."""
    for honaker in (False, True):
        weights, _ = tree_matrix(length, honaker, length + 1)
        after = (weights.sum(0) ** 2).sum() - 1  # less the new leaf's own
        levels = (length - 1).bit_length()
        if not honaker:
            assert after == pytest.approx(1)
        elif length == 2**levels:
            assert after == pytest.approx(1 / (2 - 0.5**levels))
        else:
            assert 1 / (2 - 0.5**levels) - 1e-12 > after > 0.3


@pytest.mark.parametrize("honaker", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_all_that_trees_release_is_made_of_noisy_nodes(length, honaker):
    """releases = weights (nodes' sums + z): the weights take the nodes' sums to the sums of lots.

    And the nodes' sums have the squared sensitivity that is charged for each tree.
    """
    rows = 2 * length + length // 2 + 1
    weights, indices = tree_matrix(length, honaker, rows)
    completed = 2 ** (length - 1).bit_length()
    leaves = np.zeros((len(indices), rows))  # which lots are in which node
    for node, index in enumerate(indices):
        start, inorder = divmod(index, 2 * completed)
        height = (~inorder & inorder + 1).bit_length() - 1
        begin = (inorder - 2**height + 1) // 2
        assert start % length == 0
        leaves[node, start + begin : min(start + begin + 2**height, start + length)] = 1
    np.testing.assert_allclose(weights @ leaves, np.eye(rows), atol=1e-12)
    for period in range(1, length + 2):
        exact = max((leaves[:, first:length:period].sum(1) ** 2).sum() for first in range(period))
        assert exact <= tree_sensitivity(length, period)
        if honaker:  # all nodes are drawn, the root at the restart
            assert exact == tree_sensitivity(length, period)


def test_a_tree_needs_few_draws_and_few_vectors():
    fresh = Fresh(2)
    process = Tree(empty(2), fresh, 1000, honaker=True)
    process.at(2999)
    assert len(set(fresh.asked)) == len(fresh.asked) < 2 * 3000 + 2 * 10
    assert process._nodes.shape == (11, 2)
    fresh.asked.clear()
    plain = Tree(empty(2), fresh, 1000, honaker=False)
    plain.at(2999)
    assert len(fresh.asked) == 3000 + 2


PROCESSES = {
    "banded": lambda f: banded(0.8, 4, f),
    "white": lambda f: banded(0.8, 1, f),
    "tree": lambda f: Tree(empty(13), f, 5, honaker=False),
    "honaker": lambda f: Tree(empty(13), f, 5),
    "whole tree": lambda f: Tree(empty(13), f, 4),
    "odd tree": lambda f: Tree(empty(13), f, 7),
    "moving": lambda f: moving(f, 5),
    "moving, one block": lambda f: moving(f, 100),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_an_interrupted_row_can_be_made_again(name):
    """Interrupted at every block of every row, restarts of trees included."""
    expected = rows_of(PROCESSES[name](Fresh(13)), range(18))
    fresh = Fresh(13)
    process = PROCESSES[name](fresh)
    interrupted = 0
    for row in range(18):
        for after in itertools.count():
            fresh.fail_after = after
            try:
                made = process.at(row).clone()
                break
            except KeyboardInterrupt:
                interrupted += 1
        assert after >= 3
        assert np.array_equal(made.numpy(), expected[row])
    assert interrupted >= 18 * 3


@pytest.mark.parametrize("name", PROCESSES)
def test_an_interruption_in_rows_that_are_passed_over(name):
    expected = rows_of(PROCESSES[name](Fresh(13)), range(18))
    for after in range(9 if name.startswith("moving") else 30):  # which draws fewer rows again
        fresh = Fresh(13)
        process = PROCESSES[name](fresh)
        process.at(1)
        fresh.fail_after = after
        with pytest.raises(KeyboardInterrupt):
            process.at(12)
        fresh.fail_after = None
        assert np.array_equal(rows_of(process, [14, 17]), expected[[14, 17]])


@pytest.mark.parametrize("name", PROCESSES)
def test_noise_cannot_be_saved_or_copied(name):
    process = PROCESSES[name](Fresh(13))
    process.at(2)
    for save in (
        *(functools.partial(pickle.dumps, protocol=p) for p in range(6)),
        copy.copy,
        copy.deepcopy,
        lambda p: torch.save(p, io.BytesIO()),
        lambda p: p.__getstate__(),
    ):
        with pytest.raises(TypeError, match="secret"):
            save(process)
    assert not any(str(float(x)) in repr(process) for x in process.at(3))


def test_groups_order_lots_and_noise_have_streams_of_their_own():
    streams = [Randomness(1).uniforms(name, 0, 4) for name in (GROUPS, ORDER, LOTS, NOISE)]
    assert len({stream.tobytes() for stream in streams}) == 4
