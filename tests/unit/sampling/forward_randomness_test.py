"""Random numbers inside a step: secret, never shared by two rows, and the user's own untouched."""

from __future__ import annotations

import copy
import functools
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vestige import ConfigError, PrivacyEngine, PrivacyError
from vestige.gradients.loss_watch import LossWatch
from vestige.sampling.forward_randomness import LotStream, explicit_generators, untouched
from vestige.sampling.streams import Randomness

ROWS, WIDTH = 24, 16
NAMED = np.random.default_rng(0)  # as at the top of a notebook


def by_dropout(rows):
    return F.dropout(torch.ones(rows, WIDTH), 0.5) / 2


def by_torch(rows):
    return torch.rand(rows, WIDTH)


def by_numpy(rows):
    return torch.tensor(np.random.rand(rows, WIDTH))


def by_random(rows):
    return torch.tensor([[random.random() for _ in range(WIDTH)] for _ in range(rows)])


def by_named(rows):
    return torch.tensor(NAMED.random((rows, WIDTH)))


def by_local(rows):
    return torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(0))


DRAWS = [by_dropout, by_torch, by_numpy, by_random, by_named, by_local]


def holding(make, draw):
    """A way to draw from a generator that the model holds."""
    holder = type("Holder", (), {})()
    holder.generator = make()

    def from_holder(rows):
        return draw(holder.generator, rows)

    return from_holder


HELD = {
    "torch": lambda: holding(
        lambda: torch.Generator().manual_seed(0), lambda g, n: torch.rand(n, WIDTH, generator=g)
    ),
    "Generator": lambda: holding(
        lambda: np.random.default_rng(0), lambda g, n: torch.tensor(g.random((n, WIDTH)))
    ),
    "Philox": lambda: holding(
        lambda: np.random.Generator(np.random.Philox(0)),
        lambda g, n: torch.tensor(g.random((n, WIDTH))),
    ),
    "RandomState": lambda: holding(
        lambda: np.random.RandomState(0), lambda g, n: torch.tensor(g.rand(n, WIDTH))
    ),
    "Random": lambda: holding(
        lambda: random.Random(0),
        lambda g, n: torch.tensor([[g.random() for _ in range(WIDTH)] for _ in range(n)]),
    ),
}


class Masked(nn.Module):
    """Multiplies by random numbers, and shows them to the test."""

    def __init__(self, draw=by_dropout, show=None):
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.draw, self.show = draw, show or (lambda mask: None)

    def forward(self, x):
        mask = self.draw(len(x)).to(x.dtype) if self.training else torch.ones(len(x), WIDTH)
        self.show(mask)
        return self.last(self.first(x) * mask)


def data(rows=ROWS):
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, generator=made)[:rows], torch.arange(rows) % 2


def private(model, noise_seed=None, rows=ROWS, loader=None, method="dp-sgd", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine("rdp", noise_seed=noise_seed)
    loader = loader or DataLoader(TensorDataset(*data(rows)), batch_size=8)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        **{"sample_rate": 1.0, "self_check": False} | options,
    )
    return engine, model, optimizer, loader


def masks(draw=by_dropout, noise_seed=None, steps=2, seed=0, between=lambda: None, **options):
    """The random numbers of every forward pass of a short run, after seeding all generators."""
    seen = []
    torch.manual_seed(5)
    engine, model, optimizer, loader = private(Masked(draw, seen.append), noise_seed, **options)
    seen.clear()  # of a self-check
    seed_all(seed)
    done = 0
    while done < steps:
        for x, y in loader:
            between()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            done = engine.released
            if done == steps:
                break
    engine.detach()
    return seen


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_of_all():
    """The user's generators, bit for bit."""
    kind, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, words.tolist(), *rest)


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


# -- secret ---------------------------------------------------------------------------------


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


# -- no two rows share a mask ---------------------------------------------------------------


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
    drawn = torch.cat(masks(steps=400, noise_seed=3, max_physical_batch_size=8)) * 2 - 1
    count = drawn.numel()
    rows = drawn.view(400, ROWS, WIDTH)
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


# -- given back -----------------------------------------------------------------------------


class Failing(Masked):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        torch.rand(3), np.random.randn(), random.gauss(0, 1)
        if self.error and len(x) == ROWS:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("check", [False, True])
def test_generators_are_given_back(error, held, check):
    seed_all(3)
    if held:  # a normal number that waits for the next call
        np.random.randn(), random.gauss(0, 1), torch.randn(1)
    engine, model, _, loader = private(Failing(error), self_check=check)
    for x, _y in loader:
        before, seed = state_of_all(), torch.initial_seed()
        if error:
            with pytest.raises(type(error)):
                model(x)
        else:
            model(x)
        assert state_of_all() == before
        assert torch.initial_seed() == seed
        break
    engine.detach()


def test_a_self_check_before_the_first_batch_leaves_the_generators_alone():
    _, model, _, _ = private(Failing(None), self_check=True)
    model.train(False)
    seed_all(3)
    x, before = data()[0], state_of_all()
    model(x)  # no lot is at hand: what the pass itself draws is the user's
    after = state_of_all()
    seed_all(3)
    torch.rand(3), np.random.randn(), random.gauss(0, 1)
    assert after == state_of_all() != before


def test_generators_of_a_model_are_given_back():
    class Own(Masked):
        def __init__(self):
            super().__init__(self.numbers)
            self.one, self.two = torch.Generator().manual_seed(0), np.random.default_rng(0)
            self.three, self.four = random.Random(0), np.random.RandomState(0)

        def numbers(self, rows):
            noise = self.two.random((rows, WIDTH)) + self.three.random() + self.four.randn()
            return torch.rand(rows, WIDTH, generator=self.one) + torch.tensor(noise).float()

    model = Own()

    def states():
        return str((model.one.get_state().tolist(), model.two.bit_generator.state)) + str(
            (model.three.getstate(), model.four.get_state(legacy=False))
        )

    engine, _, _, loader = private(model)
    for x, _y in loader:
        before = states()
        model(x)
        assert states() == before
        with untouched(engine._run.capture.batch.stream):  # as a self-check does
            model.numbers(2)
        assert states() == before
        break


def test_global_generators_that_a_model_holds_are_given_back():
    """sklearn's check_random_state(None) is numpy's global generator."""
    held = np.random.rand.__self__, random.random.__self__, torch.default_generator
    seed_all(0)
    before = state_of_all()
    stream = LotStream(Randomness(1), 0, explicit=(*held, held[0]._bit_generator))
    with stream.installed():
        assert state_of_all() != before
        np.random.randn()
    assert state_of_all() == before
    np.random.randn()
    before = state_of_all()
    with untouched(stream):
        np.random.randn()
    assert state_of_all() == before


def test_numpys_other_bit_generators_are_given_back():
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        np.random.randn()
        before = str(np.random.get_state(legacy=False))
        stream = LotStream(Randomness(1), 0)
        with stream.installed():
            first = np.random.randn(4)
        with LotStream(Randomness(1), 0).installed():
            assert (np.random.randn(4) == first).all()
        assert str(np.random.get_state(legacy=False)) == before
    finally:
        np.random.set_bit_generator(original)


def test_ctrl_c_leaves_nothing_on(recwarn):
    engine, model, _, loader = private(Failing(KeyboardInterrupt()))
    for x, _y in loader:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        left = torch.overrides._get_current_function_mode_stack()
        # Watches of losses of other loops that broke off go with the next one.
        assert not [mode for mode in left if not isinstance(mode, LossWatch)]
        break
    engine.abandon_lot()


def test_copies_of_the_model_know_nothing_of_the_engine():
    _, model, _, _ = private(nn.Sequential(nn.Linear(3, 2)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._compiled_call_impl is None
        twin(torch.ones(1, 3)).sum().backward()
    engine, model, _, _ = private(nn.Sequential(nn.Linear(3, 2)))
    engine.detach()
    assert model._compiled_call_impl is None


def test_streams_within_each_other_are_given_back_in_order():
    seed_all(0)
    before = state_of_all()
    one, other = LotStream(Randomness(1), 0), LotStream(Randomness(2), 0)
    with one.installed():
        inside = state_of_all()
        with other.installed(), one.installed():
            assert state_of_all() != inside
        assert state_of_all() == inside
    assert state_of_all() == before


def test_a_checkpoint_holds_the_users_states_and_not_the_stream(tmp_path):
    engine, model, optimizer, loader = private(Masked(by_torch))
    inside = []
    model.draw = lambda rows: inside.append(torch.get_rng_state()) or by_torch(rows)
    seed_all(4)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    engine.save_checkpoint(tmp_path / "c")
    (secret,) = tmp_path.glob("*.secret")
    written = (tmp_path / "c").read_bytes(), bytes.fromhex(secret.read_text().split('"')[3])
    assert torch.get_rng_state().numpy().tobytes() == written[1]
    for words in (inside[0].numpy().tobytes()[24:64],):
        assert not any(words in file for file in written)


# -- what the model does to its own generators ----------------------------------------------


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


def seeded(rows):
    torch.manual_seed(0)
    return by_dropout(rows)


def seeded_aside(rows):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return by_dropout(rows)


def put_back(rows, state=torch.Generator().manual_seed(0).get_state()):  # noqa: B008
    torch.set_rng_state(state)
    return by_dropout(rows)


def seeded_own(rows, own=torch.Generator()):  # noqa: B008
    own.manual_seed(0)
    return torch.rand(rows, WIDTH, generator=own)


@pytest.mark.parametrize("draw", [seeded, seeded_aside, put_back, seeded_own])
def test_a_model_that_seeds_a_generator_is_refused(draw):
    engine, model, _, loader = private(Masked(draw))
    seed_all(0)
    before = state_of_all()
    for x, _y in loader:
        with pytest.raises(PrivacyError, match="seeds a torch generator inside its forward"):
            model(x)
        break
    assert state_of_all() == before
    engine.detach()


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


# -- reading --------------------------------------------------------------------------------


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


# -- mutants --------------------------------------------------------------------------------


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
    patch.setattr(
        Randomness,
        "stream",
        lambda self, purpose, step: stream(self, purpose, 0 if b"forward" in purpose else step),
    )


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
