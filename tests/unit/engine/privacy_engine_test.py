"""The engine around a user's own loop: the documented loop, every refusal, and every wrong turn."""

from __future__ import annotations

import copy
import html
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.loops import N, epoch, lot_sum, mean_loss, mlp, private, records, step, weights
from tests.support.reference import clip_and_sum
from vestige import ConfigError, PrivacyError
from vestige.checks import round_up
from vestige.engine.caveats import REPEATABLE
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.privacy.accounting import epsilon
from vestige.privacy.ledger import Event
from vestige.sampling.streams import Randomness

# -- the loop -------------------------------------------------------------------------------


def test_the_documented_loop_runs_and_learns():
    torch.manual_seed(0)
    x = torch.randn(400, 5)
    y = (x[:, 0] > 0).long()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    engine = PrivacyEngine(noise_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    spent = [engine.get_epsilon(delta=1e-5)]
    for _ in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            criterion(model(a), b).backward()
            optimizer.step()
        spent.append(engine.get_epsilon(delta=1e-5))

    assert engine.released == engine.ledger.steps == 3 * 8
    assert spent[0] == 0.0
    assert spent == sorted(set(spent))
    assert spent[-1] == epsilon([Event(50 / 400, 1.1, 24)], 1e-5, "pld")
    with torch.no_grad():
        assert (model(x).argmax(1) == y).float().mean() > 0.8


def test_opacus_names_are_accepted():
    model = mlp()
    engine = PrivacyEngine(accountant="prv", secure_mode=True)
    assert engine.accountant == "pld"
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records(), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batch_first=True,
        loss_reduction="mean",
        poisson_sampling=True,
        clipping="flat",
        noise_generator=None,
    )
    epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) > 0
    assert engine.get_epsilon(1e-5, accountant="rdp") >= engine.get_epsilon(1e-5)


def test_the_model_and_the_optimizer_are_the_users_own():
    model = mlp()
    keys, kind = list(model.state_dict()), type(model)
    optimizer = torch.optim.Adam(model.parameters())
    _, same, also, loader = private(model, optimizer=optimizer, engine=PrivacyEngine())
    assert same is model
    assert also is optimizer
    assert type(model) is kind
    epoch(model, optimizer, loader)
    assert list(model.state_dict()) == keys
    assert mlp().load_state_dict(model.state_dict())
    assert not [k for k in vars(model) if "vestige" in k or k == "forward"]


def test_no_raw_gradient_is_ever_visible():
    """Between backward and step there is none at all; after it, the noisy one."""
    _, model, optimizer, loader = private(max_physical_batch_size=2)
    released = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        peeked = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert peeked == (None,) * 4
        break
    engine, model, optimizer, loader = private(max_physical_batch_size=2)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        visible = [p.grad is not None for p in model.parameters()]
        assert len(set(visible)) == 1
        released += visible[0]
    assert released == engine.plan.lots_per_epoch < len(loader)


def test_other_uses_of_the_model_are_free_under_no_grad():
    engine, model, optimizer, loader = private()
    for x, y in loader:
        with torch.no_grad():
            model(torch.randn(100, 5))
            model(x)
        model.eval()
        step(model, optimizer, x, y)
        model.train()
    assert engine.released == len(loader)


def test_forward_passes_in_between_change_nothing():
    """With gradients enabled, on other rows, on as many rows, before and after the private one."""
    sums = []
    for noisy in (False, True):

        def loss(model, batch, noisy=noisy):
            if noisy:
                model(torch.randn_like(batch[0]))
            found = mean_loss(model, batch)
            if noisy:
                model(torch.randn(3, 5))
                model(torch.randn_like(batch[0]))
            return found

        sums.append([lot_sum(mlp(), records(), loss, clipping=c) for c in ("flat", "per_layer")])
    for a, b in zip(*sums, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# -- settings -------------------------------------------------------------------------------


def test_one_engine_guards_one_run():
    engine, *_ = private()
    with pytest.raises(ConfigError, match="one engine guards one run"):
        private(engine=engine)
    for call in (
        lambda e: e.plan,
        lambda e: e.state_dict(),
        lambda e: e.backward(torch.zeros(1)),
        lambda e: e.abandon_lot(),
    ):
        with pytest.raises(ConfigError, match="make_private"):
            call(PrivacyEngine())


def test_unknown_accountants_are_refused():
    with pytest.raises(ConfigError, match="gdp"):
        PrivacyEngine(accountant="gdp")
    engine, *_ = private()
    with pytest.raises(ConfigError, match="gdp"):
        engine.get_epsilon(1e-5, accountant="gdp")
    for delta in (0.0, 1.0, -1e-5):
        with pytest.raises(ConfigError, match="delta"):
            engine.get_epsilon(delta)


def test_caveats_say_what_the_reader_of_epsilon_must_know():
    assert private()[0].caveats() == [REPEATABLE, private()[0].caveats()[1]]
    assert "24" in private()[0].caveats()[1]
    clean, *_ = private(engine=PrivacyEngine(), dataset_size=30)
    assert clean.caveats() == []
    silent, *_ = private(engine=PrivacyEngine(), dataset_size=30, noise_multiplier=0.0)
    assert "infinite" in silent.caveats()[0]


# -- the state machine ----------------------------------------------------------------------


def test_step_without_backward_is_refused():
    engine, model, optimizer, loader = private()
    with pytest.raises(PrivacyError, match="without a fresh backward"):
        optimizer.step()
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError, match="without a fresh backward"):
        optimizer.step()
    mean_loss(model, (x, y))
    with pytest.raises(PrivacyError, match="without a fresh backward"):
        optimizer.step()
    step(model, optimizer, x, y)
    with pytest.raises(PrivacyError, match="without a fresh backward"):
        optimizer.step()
    assert engine.released == engine.ledger.steps == 1


def test_a_second_backward_is_refused():
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(PrivacyError, match="second backward"):
        loss.backward(retain_graph=True)
    with pytest.raises(PrivacyError, match="second backward"):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(PrivacyError, match="not the one"):
        loss.backward()
    assert engine.released == 1


def test_a_lot_that_is_drawn_must_be_stepped():
    _, model, _, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match=r"every drawn lot must be released"):
        next(batches)
    _, _, _, loader = private()
    with pytest.raises(PrivacyError, match=r"every drawn lot must be released"):
        list(loader)


def test_skipping_a_lot_is_refused_in_the_next_epoch_too():
    _, model, optimizer, loader = private()
    for last in range(len(loader)):
        x, y = next(iter(loader))
        if last < len(loader) - 1:
            step(model, optimizer, x, y)
    with pytest.raises(PrivacyError, match="every drawn lot must be released"):
        next(iter(loader))


def test_two_lots_in_hand_are_refused():
    _, _, _, loader = private()
    with pytest.raises(PrivacyError, match="every drawn lot must be released"):
        for _ in zip(loader, loader, strict=True):
            pass


def test_a_batch_from_elsewhere_is_refused():
    _, model, _, loader = private()
    other = torch.randn(7, 5)
    with pytest.raises(PrivacyError, match="not the one the private loader handed out"):
        model(other).sum().backward()
    x, y = next(iter(loader))
    for wrong in (torch.cat([x, x]), torch.randn(len(x) + 1, 5)):
        with pytest.raises(PrivacyError, match="not the one the private loader handed out"):
            model(wrong).sum().backward()
    with pytest.raises(PrivacyError, match="not the one the private loader handed out"):
        (F.cross_entropy(model(x), y) + model(torch.randn(len(x) + 1, 5)).sum()).backward()


def test_a_graph_of_an_earlier_lot_is_refused():
    _, model, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    kept = F.cross_entropy(model(x), y)
    step(model, optimizer, x, y)
    x, y = next(batches)
    with pytest.raises(PrivacyError, match="not the one the private loader handed out"):
        (kept + F.cross_entropy(model(x), y)).backward()


def test_a_failed_lot_can_be_given_up_and_is_charged():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(model(x), y[:0]).backward()
    engine.abandon_lot()
    assert (engine.released, engine.ledger.steps) == (0, 1)
    for x, y in batches:
        step(model, optimizer, x, y)
    assert (engine.released, engine.ledger.steps) == (len(loader) - 1, len(loader))
    engine.abandon_lot()
    assert engine.ledger.steps == len(loader)


class Trips(nn.Module):
    """Fails on demand in the middle of its forward or of its backward."""

    def __init__(self):
        super().__init__()
        self.body, self.odd, self.head = nn.Linear(5, 4), nn.Bilinear(4, 4, 4), nn.Linear(4, 3)
        self.fail = ""

    def forward(self, x):
        h = torch.tanh(self.body(x))
        if self.fail == "backward":
            h.register_hook(self.trip)
        h = self.odd(h, h)
        if self.fail == "forward":
            self.trip()
        return self.head(h)

    def trip(self, *_):
        raise FloatingPointError("tripped")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_an_exception_in_the_middle_leaves_nothing_behind(where, clipping):
    """After abandon_lot the next lot's sum is what it would have been without the accident."""
    torch.manual_seed(0)
    start, sums = Trips(), []
    for accident in (False, True):
        engine, model, optimizer, loader = private(
            copy.deepcopy(start), noise_multiplier=0.0, clipping=clipping, sample_rate=1.0
        )
        batches = iter(loader)
        step(model, optimizer, *next(batches))
        x, y = next(batches)
        if accident:
            model.fail = where
            with pytest.raises(FloatingPointError):
                F.cross_entropy(model(x), y).backward()
            with pytest.raises(PrivacyError, match="fresh backward"):
                optimizer.step()
            model.fail = ""
        engine.abandon_lot()
        step(model, optimizer, *next(batches))
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert (engine.released, engine.ledger.steps) == (2, 3)
        assert not torch.overrides._get_current_function_mode_stack()
        assert not [m for m in model.modules() if "forward" in vars(m)]
    assert torch.equal(*sums)


def test_an_interrupted_forward_pass_is_left_at_the_next_lot():
    class Interrupted(nn.Linear):
        stop = False

        def forward(self, x):
            out = super().forward(x)
            if self.stop:
                raise KeyboardInterrupt
            return out

    engine, model, optimizer, loader = private(Interrupted(5, 3))
    batches = iter(loader)
    step(model, optimizer, *next(batches))
    x, y = next(batches)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.stop = False
    engine.abandon_lot()
    assert not torch.overrides._get_current_function_mode_stack()
    for x, y in batches:
        step(model, optimizer, x, y)
    assert engine.released == len(loader) - 1


def test_detaching_gives_the_model_back():
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    engine.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    F.cross_entropy(model(torch.randn(7, 5)), torch.zeros(7, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    # The loader does not go on feeding an ordinary loop under the old epsilon.
    with pytest.raises(PrivacyError):
        for x, y in loader:
            step(model, optimizer, x, y)


# -- the sum and its divisor ----------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 3])
def test_the_divisor_is_the_batch_size_and_not_the_lot(physical):
    """Equal records with huge gradients: the sum of a lot of r rows is r C, whatever r is."""
    x, y = torch.full((N, 5), 100.0), torch.zeros(N, dtype=torch.long)
    _, model, optimizer, loader = private(
        nn.Linear(5, 3, bias=False),
        TensorDataset(x, y),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        max_physical_batch_size=physical,
        optimizer=None,
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    sizes, rows = set(), 0
    for a, b in loader:
        step(model, optimizer, a, b)
        rows += len(a) if a.any() else 0
        if model.weight.grad is not None:
            assert float(model.weight.grad.norm()) == pytest.approx(rows * 0.3 / 6, rel=1e-5)
            sizes.add(rows)
            rows = 0
            optimizer.zero_grad()
    assert len(sizes) > 1


@pytest.mark.parametrize("physical", [1, 2, 5, 23, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_physical_batches_give_one_release_of_the_same_sum(reduction, clipping, physical):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    model, dataset = mlp(dtype=torch.float64), records(scale=4.0, dtype=torch.float64)
    got = lot_sum(
        model,
        dataset,
        loss,
        clipping=clipping,
        max_grad_norm=0.7,
        loss_reduction=reduction,
        max_physical_batch_size=physical,
    )
    assert torch.allclose(got, by_hand(model, dataset, clipping, 0.7), atol=1e-12)


class Logarithms(nn.Module):
    """Not a number on a row of zeros, nor has it a gradient there."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.inner(x.abs().log() / x.abs())


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "quantile"])
def test_spare_batches_add_nothing_even_where_their_gradient_is_no_number(clipping):
    """0 * inf would: the row is left out before anything is multiplied."""
    model, dataset = Logarithms(), records(scale=4.0, dtype=torch.float64)
    spare = []

    def loss(model, batch):
        found = F.cross_entropy(model(batch[0]), batch[1])
        spare.append(not torch.isfinite(found))
        return found

    options = {"clipping": clipping, "max_physical_batch_size": 7, "max_grad_norm": 0.7}
    got = lot_sum(model, dataset, loss, **options)
    assert len(spare) == 8 and sum(spare) == 4  # ceil((24 + 6 sqrt(24)) / 7), of which 4 are full
    parts = clipping if clipping != "quantile" else "flat"
    assert torch.allclose(got, by_hand(model, dataset, parts, 0.7), atol=1e-12)


def test_the_number_of_batches_is_the_same_on_neighbours():
    """And so is all that a trainer counts on the way: batches, steps and the end of each lot."""
    x, y = records(24).tensors
    seen = []
    for kept in (24, 23):
        engine, model, optimizer, loader = private(
            dataset=TensorDataset(x[:kept].clone(), y[:kept].clone()),
            dataset_size=24,
            batch_size=4,
            max_physical_batch_size=1,
        )
        turns = []
        for inputs, labels in loader:
            step(model, optimizer, inputs, labels)
            turns.append(engine.released)
        shown = [(repr(each), each._repr_html_()) for each in (engine, engine.plan, loader)]
        facts = str(engine.plan.as_dict()), engine.caveats(), shown
        seen.append((turns, len(loader), *facts))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == seen[0][1] == 6 * 16  # 4 + 6 sqrt(4) rows, one at a time


def test_an_engine_shows_what_it_has_spent_and_what_to_know():
    engine = PrivacyEngine()
    assert "nothing is private yet" in repr(engine) and "make_private" in engine._repr_html_()
    engine, model, optimizer, loader = private(steps=9, delta=1e-4)
    for inputs, labels in loader:
        step(model, optimizer, inputs, labels)
    assert repr(engine).startswith(f"PrivacyEngine: releases {engine.released} of 9 planned; ")
    assert "\n" not in repr(engine)
    page = engine._repr_html_()
    assert f">{round_up(engine.get_epsilon(1e-4))} at delta 0.0001<" in page
    for note in engine.caveats():
        assert html.escape(note) in page
    nameless = private(steps=9)[0]
    shown = f">{round_up(nameless.get_epsilon(1e-5))} at delta 1e-05; engine.get_epsilon(DELTA)<"
    assert shown in nameless._repr_html_()
    assert "epsilon" not in repr(engine)  # a debugger asks for it often, and it takes long
    assert repr(loader).startswith(f"PrivateLoader: lots of an epoch {len(loader)}; batches ")
    assert "releases 9 planned" in repr(engine.plan)


def by_hand(model, dataset, clipping, bound):
    """The clipped sum by a plain loop."""
    model = copy.deepcopy(model)
    groups = partition(model, clipping)
    rows = []
    for x, y in dataset:
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return clip_and_sum(torch.stack(rows), groups, Clip.over(bound, groups.names))


def test_a_lot_left_before_its_last_batch_is_refused():
    engine, model, optimizer, loader = private(max_physical_batch_size=2, batch_size=12)
    assert epoch(model, optimizer, loader, limit=1) == 1
    assert engine.released == 0
    with pytest.raises(PrivacyError, match="left before its last physical batch"):
        next(iter(loader))
    engine.abandon_lot()
    assert engine.ledger.steps == 1
    assert epoch(model, optimizer, loader) == len(loader)
    assert engine.released == engine.plan.lots_per_epoch


def test_a_partial_step_moves_nothing():
    """Weight decay and momentum included, even if the loop puts a gradient there itself."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.5)
    engine, model, optimizer, loader = private(
        model, optimizer=optimizer, max_physical_batch_size=2, batch_size=12
    )
    moved = []
    for x, y in loader:
        before, released = weights(model), engine.released
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e6)
        optimizer.step()
        moved.append(not torch.equal(before, weights(model)))
        assert moved[-1] == (engine.released > released)
        assert (weights(model) - before).norm() < 1e3
    assert sum(moved) == engine.plan.lots_per_epoch < len(moved) == len(loader)


@pytest.mark.parametrize("physical", [None, 5])
def test_losses_by_row_need_no_reduction(physical):
    model, dataset = mlp(dtype=torch.float64), records(scale=4.0, dtype=torch.float64)
    for reduction in ("mean", "sum"):
        run = copy.deepcopy(model)
        engine, run, optimizer, loader = private(
            run,
            dataset,
            1,
            noise_multiplier=0.0,
            sample_rate=1.0,
            loss_reduction=reduction,
            max_physical_batch_size=physical,
        )
        for x, y in loader:
            engine.backward(F.cross_entropy(run(x), y, reduction="none"))
            optimizer.step()
            if engine.released:
                break
        got = torch.cat([p.grad.flatten() for p in run.parameters()])
        assert torch.allclose(got, by_hand(model, dataset, "flat", 1.0), atol=1e-12)
        # What was declared holds again for the next plain backward.
        if physical is None:
            x, y = next(iter(loader))
            twin = copy.deepcopy(run)
            F.cross_entropy(run(x), y, reduction=reduction).backward()
            optimizer.step()
            got = torch.cat([p.grad.flatten() for p in run.parameters()])
            assert torch.allclose(got, by_hand(twin, dataset, "flat", 1.0), atol=1e-12)


def test_losses_that_are_not_one_per_row_are_refused():
    engine, model, _, loader = private()
    x, y = next(iter(loader))
    out = model(x)
    wrong = [
        F.cross_entropy(out, y),
        out,
        F.cross_entropy(out, y, reduction="none")[:-1],
        F.cross_entropy(out, y).expand(len(x) + 1),
        1.0,
    ]
    for losses in wrong:
        with pytest.raises(PrivacyError, match="one loss per row"):
            engine.backward(losses)
    engine.backward(F.cross_entropy(out, y, reduction="none"))


# -- groups ---------------------------------------------------------------------------------


def test_each_group_reaches_its_own_bound():
    """One record with huge gradients everywhere: group g's part of the sum has norm C_g."""
    dataset = TensorDataset(torch.full((1, 5), 1e4), torch.tensor([0]))
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))

    def loss(model, batch):
        return 100 * model(batch[0]).sum(1).mean()

    total = lot_sum(model, dataset, loss, clipping="per_layer", max_grad_norm=[0.5, 2.0])
    assert float(total[:48].norm()) == pytest.approx(0.5, rel=1e-5)
    assert float(total[48:].norm()) == pytest.approx(2.0, rel=1e-5)


def test_group_noise_multipliers_are_accounted_jointly():
    engine, model, optimizer, loader = private(
        clipping="per_layer", max_grad_norm=[3.0, 4.0], group_noise_multipliers=[2.0, 1.0]
    )
    joint = 1 / math.sqrt(1 / 4 + 1)
    assert engine.plan.noise_multiplier == pytest.approx(joint)
    assert engine.plan.noise_stds == (6.0, 4.0)
    epoch(model, optimizer, loader)
    (event,) = engine.ledger.events
    assert event.noise_multiplier == pytest.approx(joint)
    assert (event.sample_rate, event.count) == (0.25, 4)


def test_a_group_without_noise_has_no_privacy():
    engine, model, optimizer, loader = private(
        clipping="per_layer", group_noise_multipliers=[2.0, 0.0]
    )
    epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) == math.inf


# -- what users bring along -----------------------------------------------------------------


@pytest.mark.parametrize("form", ["argument", "keyword"])
def test_a_closure_is_one_release(form):
    engine, model, optimizer, loader = private(optimizer=None)
    losses = []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        out = optimizer.step(closure) if form == "argument" else optimizer.step(closure=closure)
        losses.append(out.item())
    assert engine.released == len(losses) == len(loader)
    with pytest.raises(PrivacyError, match=r"not the one|fresh backward"):
        optimizer.step(closure)


def test_a_copied_model_is_an_ordinary_model():
    """deepcopy and torch.save work in the middle of a lot, and leave the hooks behind."""
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert list(twin.state_dict()) == list(model.state_dict())
        assert torch.equal(weights(twin), weights(model))
        F.cross_entropy(twin(x), y).backward()
        assert all(p.grad is not None for p in twin.parameters())
    optimizer.step()
    assert engine.released == 1


def test_weights_are_saved_and_loaded_as_ever(tmp_path):
    _, model, optimizer, loader = private(optimizer=None)
    epoch(model, optimizer, loader)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin = mlp(seed=5)
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(weights(twin), weights(model))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.load(tmp_path / "optimizer.pt", weights_only=True)


def test_bfloat16_parameters_get_bfloat16_gradients_from_a_float32_sum():
    engine, model, optimizer, loader = private(
        mlp(dtype=torch.bfloat16), records(dtype=torch.bfloat16)
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert engine.released == len(loader)


def test_models_may_take_and_give_dicts_and_tuples():
    class Fancy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, *, inputs):
            out = self.body(inputs["x"])
            return {"logits": out, "parts": (out, [out])}

    rows = [{"x": x, "y": y} for x, y in records()]
    engine, model, optimizer, loader = private(Fancy(), rows, dataset_size=N)
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs=batch)["logits"], batch["y"]).backward()
        optimizer.step()
    assert engine.released == len(loader)


class CallsItself(nn.Module):
    """A model whose forward runs the whole model again for a target, without gradients."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x, deep=True):
        h = torch.tanh(self.body(x))
        if deep:
            with torch.no_grad():
                target = self(x, deep=False)
            return self.head(h) + target
        return self.head(h)


def test_a_model_may_call_itself_without_gradients():
    engine, model, optimizer, loader = private(CallsItself())
    epoch(model, optimizer, loader)
    assert engine.released == len(loader)


def test_a_small_argument_that_is_not_a_batch_is_not_taken_for_one():
    """Three numbers for every row, as many as the self-check has rows: no false alarm."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 3)

        def forward(self, x, weights):
            return self.body(x) * weights

    def loss(model, batch):
        return F.cross_entropy(model(batch[0], torch.tensor([1.0, 2.0, 3.0])), batch[1])

    assert lot_sum(Weighted(), records(), loss).norm() > 0


def test_inputs_without_rows_are_said_to_be_public_and_their_shapes_are_not_told():
    class Flat(nn.Linear):
        def forward(self, x, words):
            return super().forward(x)

    engine, model, _, loader = private(Flat(5, 3))
    x, _ = next(iter(loader))
    model(x, torch.zeros(8191))
    said = [caveat for caveat in engine.caveats() if "without the batch's rows" in caveat]
    assert len(said) == 1 and "8191" not in said[0]
    engine.abandon_lot()


def test_sequences_may_have_the_batch_second():
    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.cell(x)[0])

    torch.manual_seed(0)
    model = Second()
    x, y = torch.randn(6, 7, 5), torch.randint(0, 3, (6,))
    total = 0
    for i in range(6):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1].transpose(0, 1))[-1], y[i : i + 1]).backward()
        grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        total = total + grad / max(1.0, float(grad.norm()) / 0.1)
    model.zero_grad()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0].transpose(0, 1))[-1], batch[1])

    got = lot_sum(model, TensorDataset(x, y), loss, batch_first=False, max_grad_norm=0.1)
    assert torch.allclose(got, total, atol=1e-6)


# -- saving and going on --------------------------------------------------------------------


# -- epsilon --------------------------------------------------------------------------------


def test_no_noise_means_infinite_epsilon():
    engine, model, optimizer, loader = private(noise_multiplier=0.0)
    assert engine.get_epsilon(1e-5) == 0.0
    epoch(model, optimizer, loader, limit=1)
    for accountant in ("pld", "rdp", "rdp_classic"):
        assert engine.get_epsilon(1e-5, accountant) == math.inf


def test_noise_draws_charges_and_releases_are_counted_alike(monkeypatch):
    draws = []
    blocks = Randomness.normal_blocks

    def counted(self, like, step, *purpose):
        draws.append(step)
        return blocks(self, like, step, *purpose)

    monkeypatch.setattr(Randomness, "normal_blocks", counted)
    engine, model, optimizer, loader = private(max_physical_batch_size=2, batch_size=1)
    for _ in range(2):
        epoch(model, optimizer, loader)
    assert draws == list(range(2 * N))
    assert engine.released == engine.ledger.steps == 2 * N
