"""What is drawn while a batch is read: secret, shared by no two rows, from every generator."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.masks import (
    NAMED,
    ROWS,
    Masked,
    by_torch,
    private,
    seed_all,
    state_of_all,
)
from vestige import ConfigError
from vestige.sampling.forward_randomness import explicit_generators


class Augmented(Dataset):
    def __init__(self, own=False):
        self.own = np.random.default_rng(0) if own else None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), np.random.rand(), random.random(), NAMED.random()]
        if self.own is not None:
            drawn.append(self.own.random())
        return torch.tensor(drawn, dtype=torch.float64), index % 2


def jittered(examples):
    x, y = torch.utils.data.default_collate(examples)
    return torch.cat([x, torch.rand(len(x), 1), torch.tensor(np.random.rand(len(x), 1))], 1), y


def seeding(worker):
    seed_all(0)


def read(noise_seed=None, epochs=1, own=False, seed=0, **options):
    """All rows as they were read, one row of random numbers per record."""
    source = DataLoader(Augmented(own), batch_size=8, collate_fn=jittered, **options)
    engine, _, _, loader = private(
        Masked(), noise_seed, loader=source, max_physical_batch_size=5, sample_rate=0.9
    )
    seed_all(seed)
    before, rows = state_of_all(), []
    for _ in range(epochs):
        for x, _y in loader:
            rows.append(x)
            engine.abandon_lot()
            assert state_of_all() == before
    engine.detach()
    return torch.cat(rows)


WORKERS = {
    "here": {},
    "workers": {"num_workers": 2},
    "workers that are seeded": {"num_workers": 2, "worker_init_fn": seeding},
    "workers of a seeded loader": {"num_workers": 2},
}


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("own", [False, True])
def test_what_is_drawn_while_a_batch_is_read_is_secret_and_shared_by_no_two_rows(options, own):
    def again(noise_seed=None):
        generator = torch.Generator().manual_seed(0) if options.get("num_workers") else None
        return read(noise_seed, 2, own, generator=generator, **options)

    first, second = again(), again()
    everything = torch.cat([first, second])
    for column in everything.T:
        assert len(column.unique()) == len(everything)
    assert torch.equal(again(7), again(7))


def test_a_failing_read_gives_the_generators_back():
    class Broken(Augmented):
        def __getitem__(self, index):
            super().__getitem__(index)
            raise self.error

    for error, raised in ((OSError("gone"), ConfigError), (KeyboardInterrupt(), KeyboardInterrupt)):
        Broken.error = error
        engine, _, _, loader = private(Masked(), loader=DataLoader(Broken(), batch_size=8))
        seed_all(0)
        before = state_of_all()
        with pytest.raises(raised):
            next(iter(loader))
        assert state_of_all() == before
        engine.detach()


def test_seeding_while_reading_is_taken_at_its_word():
    """The two transforms of an image and of its mask are seeded alike, from a drawn number."""

    class Pairs(Augmented):
        def __getitem__(self, index):
            seed = int(torch.randint(2**31, ()))
            torch.manual_seed(seed)
            one = torch.rand(3)
            torch.manual_seed(seed)
            assert torch.equal(one, torch.rand(3))
            return one, index % 2

    _, _, _, loader = private(Masked(), loader=DataLoader(Pairs(), batch_size=8))
    seed_all(0)
    before = state_of_all()
    x, _ = next(iter(loader))
    assert len(x.unique()) == x.numel()
    assert state_of_all() == before


def test_generators_are_found_where_they_are_held():
    one, two, three = np.random.default_rng(1), random.Random(1), torch.Generator()
    bits, four = np.random.PCG64(1), np.random.RandomState(1)

    class Transform:
        common = four

        def __init__(self, generator):
            self.generator = generator

        def __call__(self, x):
            return NAMED.random()

    class Whole(Augmented):
        def __init__(self):
            super().__init__()
            inner = functools.partial(by_torch, generator=three)
            self.transforms = [Transform(one), {"later": lambda x: two.random() + inner(x)}]
            self.entropy = random.SystemRandom()
            self.records = [np.random.default_rng(i) for i in range(1000)]  # no such list is held
            self.bits, self.itself = bits, self

    found = explicit_generators(torch.utils.data.Subset(Whole(), [0]), jittered, None)
    assert {id(g) for g in found} == {id(g) for g in (one, two, three, four, bits, NAMED)}
