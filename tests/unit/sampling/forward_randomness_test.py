"""Random numbers inside a step: secret, never shared by two rows, and the user's own untouched."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.masks import (
    DRAWS,
    HELD,
    ROWS,
    WIDTH,
    Masked,
    by_dropout,
    by_numpy,
    by_torch,
    data,
    equal,
    masks,
    private,
    seed_all,
    state_of_all,
)
from vestige import PrivacyError
from vestige.sampling.forward_randomness import LotStream
from vestige.sampling.streams import Randomness


@pytest.mark.parametrize("draw", DRAWS)
def test_a_known_seed_does_not_determine_the_numbers(draw):
    first, second = masks(draw), masks(draw)
    assert not any(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", HELD)
def test_generators_that_a_model_holds_are_covered(kind):
    first, second = masks(HELD[kind]()), masks(HELD[kind]())
    assert not any(map(torch.equal, first, second))
    assert equal(masks(HELD[kind](), 7), masks(HELD[kind](), 7))


@pytest.mark.parametrize("draw", DRAWS)
def test_test_mode_repeats_them_whatever_the_user_seeds_and_draws(draw):
    def disturb():
        torch.rand(5), random.gauss(0, 1), np.random.randn()

    first = masks(draw, noise_seed=7, seed=0)
    assert equal(first, masks(draw, noise_seed=7, seed=1, between=disturb))
    assert not equal(first, masks(draw, noise_seed=8, seed=0))


def test_a_pass_without_gradients_is_covered_while_a_batch_is_at_hand():
    """A teacher under no_grad enters the loss as the model itself does."""
    seen = []
    for _ in range(2):
        engine, model, _, loader = private(Masked(by_dropout, seen.append))
        seed_all(0)
        for x, _y in loader:
            with torch.no_grad():
                model(x)
            break
        engine.detach()
    assert not torch.equal(*seen)


def test_outside_of_a_lot_the_users_generator_is_used():
    seen = []
    model = private(Masked(by_dropout, seen.append))[1]
    for _ in range(2):
        seed_all(0)
        with torch.no_grad():
            model(data()[0])
    assert torch.equal(*seen)


@pytest.mark.parametrize("method", ["dp-sam", "dp-sam-per-example"])
def test_both_passes_of_a_closure_are_covered(method):
    def run():
        seen, ordinary = (
            [],
            nn.Sequential(nn.Linear(3, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2)),
        )
        torch.manual_seed(5)
        for p in ordinary.parameters():
            nn.init.normal_(p)
        engine, model, optimizer, loader = private(ordinary, method=method)
        seed_all(0)
        for x, y in loader:

            def closure(x=x, y=y):
                out = model(x)
                seen.append(out.detach().clone())
                loss = F.cross_entropy(out, y)
                loss.backward()
                return loss

            optimizer.step(closure)
            break
        engine.detach()
        return seen

    first, second = run(), run()
    assert len(first) == 2
    assert not any(map(torch.equal, first, second))


def test_the_loop_can_draw_from_the_stream_as_well():
    def run(noise_seed=None):
        engine, _, _, loader = private(Masked(), noise_seed)
        seed_all(0)
        before = state_of_all()
        with pytest.raises(PrivacyError, match="no batch"), engine.secret_randomness():
            pass
        for _ in loader:
            with engine.secret_randomness():
                drawn = torch.rand(3), torch.tensor(np.random.rand(3)), random.random()
            break
        assert state_of_all() == before
        engine.detach()
        return torch.cat([drawn[0].double(), drawn[1], torch.tensor([drawn[2]])])

    assert not (run() == run()).any()
    assert torch.equal(run(7), run(7))


@pytest.mark.parametrize("draw", DRAWS)
def test_physical_batches_and_lots_never_share_their_numbers(draw):
    seen = masks(draw, max_physical_batch_size=8, steps=3)
    assert len(seen) == 3 * 3
    rows = torch.cat(seen)
    if draw is by_dropout:  # 16 coins can agree by chance; 128 of a batch cannot
        rows = torch.stack([mask.flatten() for mask in seen])
    assert len(rows.unique(dim=0)) == len(rows)


def test_two_forward_passes_of_a_batch_have_numbers_of_their_own():
    seen = []
    _, model, _, loader = private(Masked(by_torch, seen.append))
    for x, _y in loader:
        model(x), model(x)
        break
    assert not torch.equal(*seen)


def test_masks_are_fair_and_independent_over_rows():
    """Each of 4 figures is a standard normal number: beyond 4.5 with a chance of 7e-6."""
    drawn = torch.cat(masks(steps=200, noise_seed=3, max_physical_batch_size=8)) * 2 - 1
    count = drawn.numel()
    rows = drawn.view(200, ROWS, WIDTH)
    for figure in (
        drawn.sum(),
        (rows[:, 1:] * rows[:, :-1]).sum(),  # neighbours in a lot
        (rows[:, 8:] * rows[:, :-8]).sum(),  # the same place in the next physical batch
        (rows[1:] * rows[:-1]).sum(),  # the same place in the next lot
    ):
        assert abs(float(figure)) < 4.5 * count**0.5


def test_neighbours_coupled_by_equal_masks_differ_by_one_clipped_gradient():
    """In test mode all records but the last keep their masks when the last one is gone."""

    def total(rows):
        torch.manual_seed(5)
        engine, model, _, loader = private(
            Masked(), 7, rows, sample_rate=1.0, dataset_size=ROWS, max_physical_batch_size=None
        )
        for x, y in loader:
            (1e3 * F.cross_entropy(model(x), y)).backward()
            break
        found = engine._run.capture.collector.total.clone()
        engine.detach()
        return found

    assert 0.5 < float((total(ROWS) - total(ROWS - 1)).norm()) <= 1 + 1e-6


def test_the_words_are_where_torch_keeps_them():
    """torch's numbers are those of numpy's twister with the same 624 words."""
    theirs = np.random.MT19937(0)
    state = theirs.state
    with LotStream(Randomness(1), 0).installed():
        words = torch.get_rng_state()[24 : 24 + 8 * 624].numpy().view(np.uint64)
        ours = torch.randint(0, 1000, (2000,))
    state["state"] = {"key": words.astype(np.uint32), "pos": 624}
    theirs.state = state
    assert len(np.unique(words)) > 600
    assert (theirs.random_raw(2000) % 1000 == ours.numpy()).all()


def test_numpys_words_are_where_it_keeps_them():
    with LotStream(Randomness(1), 0).installed():
        _, words, position, held, _ = np.random.get_state()
    assert (position, held) == (624, 0)
    assert len(np.unique(words)) > 600


def test_a_recomputed_forward_has_the_masks_of_its_first():
    """Activation checkpointing of a frozen part: the gradient is the one without it."""

    class Deep(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
            self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5))
            self.frozen.requires_grad_(False)
            self.again = again

        def forward(self, x):
            h = self.first(x)
            if self.again:
                return self.last(checkpoint(self.frozen, h, use_reentrant=False))
            return self.last(self.frozen(h))

    def gradient(again):
        torch.manual_seed(5)
        engine, model, optimizer, loader = private(Deep(again), 7)
        seed_all(0)
        before = state_of_all()
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            assert state_of_all() == before
            optimizer.step()
            break
        engine.detach()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(gradient(True), gradient(False))


def restarted(patch):
    """Every use of the stream begins at its beginning."""
    installed = LotStream.installed

    def again(self):
        self._cipher = Randomness(1).stream(b"restarted", 0)
        return installed(self)

    patch.setattr(LotStream, "installed", again)


def of_the_user(patch):
    """The generators are kept and given back, and not seeded."""
    patch.setattr("vestige.sampling.forward_randomness._seed", lambda generator, take: None)


def of_every_lot(patch):
    """The lot is no part of the address."""
    stream = Randomness.stream

    def without_lot(self, purpose, step, *block):
        return stream(self, purpose, 0 if b"forward" in purpose else step, *block)

    patch.setattr(Randomness, "stream", without_lot)


def torch_alone(patch):
    """random and numpy are forgotten."""
    patch.setattr(
        "vestige.sampling.forward_randomness._all", lambda explicit: iter([torch.default_generator])
    )


MUTANTS = {
    restarted: [test_physical_batches_and_lots_never_share_their_numbers],
    of_every_lot: [test_physical_batches_and_lots_never_share_their_numbers],
    of_the_user: [test_a_known_seed_does_not_determine_the_numbers],
    torch_alone: [test_a_known_seed_does_not_determine_the_numbers],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_mutant_is_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(by_numpy)
