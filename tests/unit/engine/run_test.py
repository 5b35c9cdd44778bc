"""Steps that fail in the middle, resumed and repeated: no noise twice, no example twice, no charge
too few. Each of these went wrong once."""

from __future__ import annotations

import math
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import LOT, N, closure_of, flat, private, run
from vestige import ConfigError, PrivacyEngine, PrivacyError
from vestige.gradients.clipping import Quantile
from vestige.gradients.collector import Collector
from vestige.methods import (
    DPFTRL,
    DPIS,
    DPSAM,
    DPSAT,
    Disk,
    Doppler,
    DPAdamACPrivate,
    DPSAMPerExample,
    FractionalNoise,
    Kalman,
    planned_charges,
)
from vestige.privacy.accounting import events_of
from vestige.release.door import Door
from vestige.sampling.streams import Randomness
from vestige.updates.adam import AdamBC


class Failing:
    """A closure that raises at some of its calls."""

    def __init__(self, inner, *calls):
        self.inner, self.calls, self.count = inner, calls, 0

    def __call__(self):
        self.count += 1
        if self.count in self.calls:
            raise MemoryError
        return self.inner()


def test_two_first_looks_never_share_their_noise(monkeypatch):
    sums, looks, original = [], [], Door.first_look

    def spy(self, clipped, rate, lot):
        out = original(self, clipped, rate, lot)
        sums.append(clipped._values.clone())
        looks.append(out.values.clone())
        return out

    monkeypatch.setattr(Door, "first_look", spy)
    engine, model, optimizer, loader = private(DPSAM(), noise_multiplier=50.0)
    for x, y in loader:
        closure = Failing(closure_of(model, optimizer, x, y), 2)
        with pytest.raises(MemoryError):
            optimizer.step(closure)
        with pytest.raises(PrivacyError, match=r"not differentiated yet|looked at before"):
            optimizer.step(closure_of(model, optimizer, x, y))
        engine.abandon_lot()
        if len(looks) == 2:
            break
    noises = [look - total for look, total in zip(looks, sums, strict=True)]
    assert float((noises[0] - noises[1]).norm()) > 50
    assert engine.ledger.steps == 2 and engine.released == 0


def test_a_lot_is_looked_at_once():
    engine, model, optimizer, loader = private(DPSAM())
    x, y = next(iter(loader))
    optimizer.step(closure_of(model, optimizer, x, y))
    door = engine._run.door
    with pytest.raises(PrivacyError, match="lot 0 was looked at before"):
        door.first_look(engine._run._clipped_sum(), 0.25, 0)


@pytest.mark.parametrize("method", [DPSAMPerExample(), DPSAM(), Disk(ahead=0.5)], ids=str)
def test_an_interrupt_while_the_sum_is_made_never_counts_an_example_twice(method, monkeypatch):
    """Every place of the collector is interrupted once; then the step is tried again."""
    for name in ("clear", "finish", "_settle"):
        for when in (1, 2, 3):
            _interrupted(method, name, when, monkeypatch)


def _interrupted(method, name, when, monkeypatch):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    engine = PrivacyEngine("rdp", noise_seed=1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(
            TensorDataset(100 * torch.ones(1, 5).double(), torch.tensor([0])), batch_size=1
        ),
        method=method,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="per_layer",
    )
    norms = []
    with monkeypatch.context() as patched:
        for look in ("release", "first_look"):
            original = getattr(Door, look)

            def spy(self, clipped, *args, _original=original, **kwargs):
                norms.append(float(clipped._values.norm()))
                return _original(self, clipped, *args, **kwargs)

            patched.setattr(Door, look, spy)
        count, plain = [0], getattr(Collector, name)

        def once(self, *args):
            count[0] += 1
            if count[0] == when:
                raise KeyboardInterrupt
            return plain(self, *args)

        iterator = iter(loader)
        try:
            x, y = next(iterator)
            patched.setattr(Collector, name, once)
            closure = closure_of(model, optimizer, x, y)
            for _ in range(2):
                try:
                    optimizer.step(closure)
                    break
                except KeyboardInterrupt:
                    continue
        except PrivacyError:
            engine.abandon_lot()
    assert all(norm <= 1 + 1e-9 for norm in norms)
    assert engine.ledger.steps >= engine.released


def test_importance_sampling_draws_at_the_rate_that_it_charges():
    engine, *_ = private(DPIS(floor=0.5), sample_rate=0.01)
    importance = engine.parts["importance"]
    assert engine.plan.sample_rate == 0.02
    for mean_norm, rate in ((0.5, 0.02), (1.0, 0.01)):
        importance.mean_norm = mean_norm
        assert importance.rate == pytest.approx(rate)
    importance.mean_norm = 0.4  # below the floor, as nothing sets it
    assert importance.rate <= engine.plan.sample_rate


def test_records_without_a_finite_gradient_do_not_enter_the_normaliser():
    """They counted as norm 1 of a mean over the rows, which told how many rows there were."""
    totals = []
    for count in (16, 15):
        x = torch.full((count, 5), math.inf, dtype=torch.float64)
        engine = PrivacyEngine("rdp", noise_seed=1)
        model = nn.Linear(5, 3).double()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, torch.zeros(count).long()), batch_size=8),
            method=DPIS(floor=1.0),
            dataset_size=16,
            max_grad_norm=8.0,
            noise_multiplier=1.0,
            self_check=False,
        )
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            totals.append(engine.parts["importance"]._norms)
            optimizer.step()
            break
    assert totals == [0.0, 0.0]


@pytest.mark.parametrize("method", [FractionalNoise(bands=3), DPFTRL()], ids=str)
@pytest.mark.parametrize("seeds", [(1, 2), (None, None)])
def test_a_resumed_stretch_is_charged_again(method, seeds):
    """Whoever resumes may have another key: groups, order and noise are then others."""

    def make(seed):
        model = nn.Linear(5, 3).double()
        engine = PrivacyEngine("rdp", noise_seed=seed)
        x, y = torch.randn(N, 5, dtype=torch.float64), torch.zeros(N).long()
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=LOT),
            method=method,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            steps=8,
        )

    first = make(seeds[0])
    run(*first, 4)
    before = first[0].ledger.steps
    again = make(seeds[1])
    again[0].load_state_dict(first[0].state_dict())
    run(*again, 1)
    assert again[0].ledger.steps == before + 1


def test_a_forked_process_has_no_noise():
    randomness = Randomness()
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child():
        try:
            randomness.uniforms(b"lots", 0, 1)
        except PrivacyError as error:
            send.send(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert receive.poll(1) and "forked after make_private" in receive.recv()


@pytest.mark.parametrize("method", ["dp-sgd", DPSAT(radius=1.0), DPSAM(), Disk(ahead=0.5)], ids=str)
def test_an_interrupt_inside_the_model_can_be_abandoned(method):
    class Stopping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.stop = nn.Linear(5, 3), False

        def forward(self, x):
            h = self.inner(x)
            if self.stop:
                raise KeyboardInterrupt
            return h

    engine, model, optimizer, loader = private(method, model=Stopping().double())
    run(engine, model, optimizer, loader, 3)
    home = flat(model.parameters())
    for x, y in loader:
        calls = [0]

        def closure(x=x, y=y, calls=calls):
            calls[0] += 1
            model.stop = calls[0] == (2 if engine._run.passes else 1)
            closure_of(model, optimizer, x, y)()

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        break
    model.stop = False
    engine.abandon_lot()
    assert engine.ledger.steps == 4
    assert torch.equal(flat(model.parameters()), home)
    run(engine, model, optimizer, loader, 1)
    assert engine.ledger.steps == 5


def test_a_loop_that_was_left_does_not_disturb_the_next():
    engine, model, optimizer, loader = private("dp-sgd")
    left = iter(loader)
    x, y = next(left)
    optimizer.step(closure_of(model, optimizer, x, y))
    current = iter(loader)
    x, y = next(current)
    optimizer.step(closure_of(model, optimizer, x, y))
    with pytest.raises(PrivacyError, match="iterated again"):
        next(left)
    for x, y in current:
        assert engine._run.capture.batch.rows == len(x)
        optimizer.step(closure_of(model, optimizer, x, y))
    assert engine.released == 1 + len(loader)


def test_an_interrupted_climb_comes_home(monkeypatch):
    engine, model, optimizer, loader = private(DPSAT(radius=1.0))
    run(engine, model, optimizer, loader, 2)
    home, moved = flat(model.parameters()), []
    add = torch.Tensor.add_

    def fails(self, *args, **kwargs):
        if isinstance(self, nn.Parameter):
            moved.append(self)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return add(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "add_", fails)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    engine.abandon_lot()
    assert torch.equal(flat(model.parameters()), home)


def test_a_failed_step_leaves_the_learning_rate_as_it_was():
    engine, model, optimizer, loader = private("dp-adam-ac-private", clipping=Quantile(target=0.8))
    run(engine, model, optimizer, loader, 3)
    engine.parts["rate"].multiplier = 2.0

    def fails(*_):
        raise MemoryError

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(MemoryError):
        run(engine, model, optimizer, loader, 1)
    hook.remove()
    next(iter(loader))
    assert optimizer.param_groups[0]["lr"] == 0.05
    engine.abandon_lot()


def test_schedulers_and_tails_follow_the_moves_of_the_weights():
    engine, model, optimizer, loader = private(
        DPSAM(sample="fresh"), averaging="uniform-tail", steps=20
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    run(engine, model, optimizer, loader, 20, after=lambda: scheduler.step())
    assert scheduler.last_epoch == 10
    averaged = engine.averaged_state_dict()
    assert not torch.equal(flat(averaged.values()), flat(model.parameters()))


def test_what_does_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"history_dtype=.* does nothing"):
        private(Kalman(beta=0.5), history_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"sample_rate=.* does nothing"):
        private(DPFTRL(), sample_rate=0.1, steps=4)
    with pytest.raises(ConfigError, match="filters or scales its releases"):
        private(DPIS(), denoiser=Doppler())
    with pytest.raises(ConfigError, match="AdamBC cannot know"):
        private(FractionalNoise(bands=3), lambda p: AdamBC(p, lr=0.1), denoiser=Doppler(), steps=4)


def test_quantile_clipping_starts_within_its_range():
    for bound in (50.0, 0.01):
        with pytest.raises(ConfigError, match=r"quantile clipping's range \[0.1, 10.0\]"):
            private("dp-adam-ac-private", max_grad_norm=bound)


def test_adaptive_clipping_aims_at_what_it_is_told():
    assert DPAdamACPrivate(clipped=0.5).clipping.target == 0.5
    assert DPAdamACPrivate().clipping.target == pytest.approx(0.8)
    charges = planned_charges(DPAdamACPrivate(clipped=0.4), "quantile", 1, N, LOT, LOT / N, 3)
    assert sum(e.count for e in events_of(charges, 1.0)) == 3


def test_the_adjacency_is_told_where_it_is_another():
    engine, *_ = private(DPFTRL(), steps=4)
    assert any("zero out one record" in caveat for caveat in engine.caveats())
    engine, *_ = private("dp-sgd")
    assert not any("adjacency" in caveat for caveat in engine.caveats())


def test_parameters_without_axes_and_elementwise_ones_in_bfloat16():
    class Scaled(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.inner, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(shape))

        def forward(self, x):
            return self.inner(x) * self.scale

    for shape, dtype in (((), torch.float64), ((3,), torch.bfloat16)):
        model = Scaled(shape).to(dtype)
        x = torch.randn(N, 5).to(dtype)
        engine = PrivacyEngine("rdp", noise_seed=1)
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, torch.zeros(N).long()), batch_size=LOT),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        run(engine, *made, 3)
        assert torch.isfinite(flat(model.parameters()).float()).all()
