"""compile=True: sums and releases are those of the plain run; what does not fit runs plainly."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.compiled_runs import N, apart, lots, private
from vestige import ConfigError, PrivacyError, UnsupportedModel
from vestige.engine import ways
from vestige.gradients import graphs
from vestige.gradients.compiled import Compiled

X = torch.randn(N, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = X[:, :8].reshape(N, 2, 2, 2).repeat(1, 1, 3, 3)
WORDS = torch.randint(0, 11, (N, 5), generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Images(nn.Module):
    """A small CNN with an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.head = nn.Conv2d(4, 3, 3, stride=2), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        return self.head(self.second(x).mean((2, 3)))


class Words(nn.Module):
    """A small transformer: positions that all rows share, a tied head, a learned shift."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.zeros(1, 1, 8))
        self.dropout, self.checkpointed = dropout, checkpointed
        self.double()

    def block(self, h: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (2, 4)).transpose(1, 2)
            for t in self.qkv(self.norms[0](h)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + F.dropout(self.out(a), self.dropout, self.training)
        return h + self.narrow(F.gelu(self.wide(self.norms[1](h))))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.positions(torch.arange(x.shape[1])) + self.shift
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        return F.linear(self.norms[2](h)[:, -1], self.words.weight)[:, :3]


def check_equal(make, x, **options):
    """The same sums and weights, by one graph, which all batches but the first and those of a
    single row run by."""
    plain, fast = lots(make, x, **options), lots(make, x, compile=True, **options)
    assert fast.compiled.why is None
    assert fast.compiled.graphs == 1
    assert fast.by_graph == [step > 0 and rows > 1 for step, rows in enumerate(fast.rows)]
    assert len(set(fast.rows)) > 1
    assert apart(fast, plain) < 1e-10


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_an_mlp_has_the_sums_and_releases_of_the_plain_run(clipping):
    check_equal(mlp, X, clipping=clipping)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_cnn_has_the_sums_and_releases_of_the_plain_run(clipping):
    check_equal(Images, IMAGES, clipping=clipping)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_transformer_has_the_sums_and_releases_of_the_plain_run(clipping):
    check_equal(Words, WORDS, clipping=clipping)


def test_a_checkpointed_block_has_the_sums_of_the_plain_run():
    check_equal(lambda: Words(checkpointed=True), WORDS)


def test_a_lot_in_physical_batches():
    check_equal(mlp, X, max_physical_batch_size=6, steps=8)


def reused() -> nn.Module:
    layer, frozen = nn.Linear(10, 10), nn.Linear(10, 10).requires_grad_(False)
    return nn.Sequential(layer, nn.Tanh(), frozen, layer, nn.Linear(10, 3)).double()


def test_rows_of_users_are_folded_as_in_the_plain_run():
    users = {"units": [row // 3 for row in range(N)], "rows_per_unit": 2}
    plain, compiled = lots(mlp, X, **users), lots(mlp, X, compile=True, **users)
    assert any(compiled.by_graph)
    assert apart(compiled, plain) < 1e-10


def test_a_reused_layer_and_a_frozen_one():
    check_equal(reused, X)


def test_bfloat16_autocast_is_near_the_plain_run():
    with torch.autocast("cpu", torch.bfloat16):
        plain = lots(lambda: mlp().float(), X.float())
        fast = lots(lambda: mlp().float(), X.float(), compile=True)
    assert fast.compiled.graphs == 1
    assert all(fast.by_graph[1:])
    assert apart(fast, plain) < 0.02


# -- attribution --------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize("options", [{}, {"self_check": False}])
def test_a_model_that_mixes_rows_is_refused_as_without_compilation(options):
    said = []
    for compile in (False, True):
        with pytest.raises(PrivacyError) as refusal, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lots(Mixed, X, compile=compile, **options)
        said.append(str(refusal.value))
    assert said[0] == said[1]


class Switched(nn.Module):
    """What it does follows a public flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.flag = nn.Linear(10, 6), nn.Linear(6, 3), False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(h.tanh() if self.flag else h)


def test_another_flag_is_run_plainly_and_checked_before_it_is_compiled(monkeypatch):
    checks = []
    real = ways.self_check
    monkeypatch.setattr(ways, "self_check", lambda *a: checks.append(1) or real(*a))

    def switch(model, step):
        model.flag = step >= 3

    fast = lots(Switched, X, steps=7, before=switch, compile=True)
    assert fast.by_graph == [False, True, True, False, False, True, True]
    assert (fast.compiled.graphs, len(checks)) == (2, 2)
    assert apart(fast, lots(Switched, X, steps=7, before=switch)) < 1e-10


def test_a_flag_that_makes_rows_meet_is_refused_in_the_pass_that_it_is_set():
    class Turns(Switched):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) if self.flag else x)

    def switch(model, step):
        model.flag = step >= 2

    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        lots(Turns, X, before=switch, compile=True)


def test_rows_that_meet_in_a_hook_before_the_graph_are_refused():
    def switch(model, step):
        if step == 3:
            model.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0),))

    with pytest.raises(PrivacyError, match="meet in 'mean'"):
        lots(mlp, X, before=switch, compile=True)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(10, 10), nn.Linear(10, 10)
        self.head = nn.Linear(10, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).tanh()))


def test_a_hook_that_comes_later_is_followed():
    def hook(model, step):
        if step == 2:
            model[0].register_forward_hook(lambda module, args, out: out * 3)

    fast = lots(mlp, X, before=hook, compile=True)
    assert any(fast.by_graph)
    assert apart(fast, lots(mlp, X, before=hook)) < 1e-10


def test_a_forward_of_an_instance_that_comes_later_is_followed():
    def patch(model, step):
        if step == 2:
            model.layer.forward = lambda x: F.linear(x, model.layer.weight) * 3

    fast = lots(Switched, X, before=patch, compile=True)
    assert apart(fast, lots(Switched, X, before=patch)) < 1e-10


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 5).flatten(1))


@pytest.mark.parametrize("what", ["input", "output"])
def test_rows_that_change_between_forward_and_backward_are_refused(what):
    _, model, optimizer, loader = private(Flat(), X, torch.arange(N) % 3, compile=True)
    for step, (x, y) in enumerate(loader):
        out = model(x)
        if step == 2:
            with torch.no_grad():
                (x if what == "input" else out).sub_(1)
            with pytest.raises((PrivacyError, RuntimeError), match=r"in ?place"):
                F.cross_entropy(out, y).backward()
            return
        F.cross_entropy(out, y).backward()
        optimizer.step()
    raise AssertionError("the loader has too few batches")


def test_what_is_written_to_data_in_a_trace_is_not_compiled():
    class Hidden(Flat):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                x = x.clone()
                x.data.add_(1e-7 * x.data.mean(0))
            return super().forward(x)

    with pytest.warns(UserWarning, match=r"writes to \.data"):
        fast = lots(Hidden, X, compile=True)
    assert not any(fast.by_graph)


def test_a_check_that_is_interrupted_is_made_again(monkeypatch):
    stop = []
    real = Compiled._check_rows

    def interrupted(self, *args):
        if stop == [True]:
            stop.append(False)
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Compiled, "_check_rows", interrupted)
    engine, model, _, loader = private(Switched(), X, torch.arange(N) % 3, compile=True)
    compiled = engine._run.ways.compiled
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        for x, _ in batches:
            stop[:] = stop or [True]
            model(x)
    assert compiled.recheck


def test_parameters_that_change_places_are_followed():
    def swap(model, step):
        if step == 3:
            one, two = model.one.weight, model.two.weight
            model.one.weight, model.two.weight = two, one

    plain, fast = (lots(Pair, X, before=swap, compile=c) for c in (False, True))
    assert fast.by_graph[:4] == [False, True, True, False]
    assert apart(fast, plain) < 1e-10


def test_a_graph_that_gives_rows_to_others_is_not_used(monkeypatch):
    together = graphs._Site.put_together

    def rolled(self, tensors, weight):
        return together(self, [t.roll(1, 0) for t in tensors], weight)

    monkeypatch.setattr(graphs._Site, "put_together", rolled)
    with pytest.warns(UserWarning, match="a gradient of one example to another"):
        fast = lots(mlp, X, compile=True)
    assert not any(fast.by_graph)


def test_a_graph_with_other_gradients_is_not_used(monkeypatch):
    together = graphs._Site.put_together

    def doubled(self, tensors, weight):
        return together(self, tensors, 2 * weight)

    monkeypatch.setattr(graphs._Site, "put_together", doubled)
    with pytest.warns(UserWarning, match="other outputs or gradients"):
        fast = lots(mlp, X, compile=True)
    assert not any(fast.by_graph)


def test_backward_of_an_earlier_batch_is_refused():
    layer = nn.Linear(10, 3).double()  # no weight is needed for its gradient, which may move then
    _, model, optimizer, loader = private(layer, X, torch.zeros(N).long(), compile=True)
    with pytest.raises(PrivacyError, match="not the one the private loader handed out last"):
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            if step == 2:
                kept = model(x).sum()
            if step == 3:
                kept.backward()
            loss.backward()
            optimizer.step()


def test_a_second_backward_is_refused():
    _, model, optimizer, loader = private(mlp(), X, torch.zeros(N).long(), compile=True)
    with pytest.raises(PrivacyError, match="a second backward on the same batch"):
        for step, (x, y) in enumerate(loader):
            losses = [F.cross_entropy(model(x), y) for _ in range(1 + step)]
            for loss in losses:
                loss.backward()
            optimizer.step()


# -- what is not compiled -------------------------------------------------------------------------


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sin(self.scale)


class SineInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sine, self.head = Sine(), nn.Linear(10, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sine(x))


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.head(x)


def test_a_parameter_without_a_rule_is_refused_as_without_compilation():
    with pytest.raises(UnsupportedModel, match="parameter 'scale' is used by 'sin'"):
        lots(Sine, X, compile=True)


@pytest.mark.parametrize(
    ("make", "why"), [(SineInside, "runs row by row"), (Breaks, "graph_break")]
)
def test_what_cannot_be_compiled_runs_plainly_and_says_so_once(make, why):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fast = lots(make, X, compile=True)
    assert [why in str(w.message) for w in said if "compile=True" in str(w.message)] == [True]
    assert not any(fast.by_graph)
    assert apart(fast, lots(make, X)) == 0


def test_a_loss_inside_the_model_is_left_to_the_reading_of_its_operations():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 3).double()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y)

    engine, model, optimizer, loader = private(Loss(), X, torch.zeros(N).long(), compile=True)
    with pytest.warns(UserWarning, match="compile=True: the model runs uncompiled"):
        for x, y in loader:
            model(x, y).backward()
            optimizer.step()
    assert not engine._run.losses.unread


def test_what_all_rows_share_is_not_returned_without_its_gradient():
    class Shows(Words):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.out(self.words(x)).sum(1), self.positions(torch.arange(5))

    _, model, _, loader = private(Shows(), WORDS, torch.zeros(N).long(), compile=True)
    with pytest.warns(UserWarning, match="of parameters that all rows share"):
        rows, table = model(next(iter(loader))[0])
    with pytest.raises(PrivacyError, match="that is no parameter of the model"):
        (rows.sum() + table.sum()).backward()


def test_a_model_that_the_user_compiled():
    for model in (torch.compile(mlp()), mlp()):
        model.compile()
        with pytest.raises(UnsupportedModel, match="give make_private compile=True"):
            private(model, X, torch.zeros(N).long())
    wrapper, inner = torch.compile(mlp()), mlp()
    called = inner.compile() or inner._compiled_call_impl
    for model in (wrapper, inner):
        engine, made, optimizer, loader = private(model, X, torch.zeros(N).long(), compile=True)
        by_graph = []
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)  # the wrapper may be called, too
            by_graph.append(bool(engine._run.capture.numbered))
            loss.backward()
            optimizer.step()
        assert all(by_graph[1:])
        engine.detach()
    assert type(made) is nn.Sequential
    assert inner._compiled_call_impl is called


WRAPPERS = {
    "the model": lambda m: torch.compile(m, backend="eager"),
    "in place": lambda m: m.compile(backend="eager") or m,
    "a function": lambda m: torch.compile(lambda x: m(x * 1), backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_comes_after_make_private_runs_the_model_as_it_is(name):
    def step(wrap):
        torch.manual_seed(0)
        _, model, optimizer, loader = private(mlp(), X, torch.zeros(N).long())
        called = wrap(model)
        x, y = next(iter(loader))
        F.cross_entropy(called(x), y).backward()
        optimizer.step()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(step(WRAPPERS[name]), step(lambda m: m))


def test_a_copy_of_the_model_is_a_plain_one():
    _engine, model, optimizer, loader = private(mlp(), X, torch.zeros(N).long(), compile=True)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    assert "forward" not in twin.__dict__
    twin(x).sum().backward()
    assert next(twin.parameters()).grad is not None


# -- chance ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Rows of ones that dropout takes entries from: what is left shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(10, 3).double(), []
        nn.init.zeros_(self.layer.weight)
        nn.init.ones_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x).repeat(1, 8), 0.5, self.training)


def masks(noise_seed, public_seed):
    engine, model, optimizer, loader = private(
        Masked(), X, torch.zeros(N).long(), compile=True, noise_seed=noise_seed
    )
    found = []
    for x, y in loader:
        torch.manual_seed(public_seed)
        out = model(x)
        assert bool(engine._run.capture.numbered) == bool(found)
        found.append(out.detach()[:2] == 0)
        F.cross_entropy(out, y).backward()
        optimizer.step()
    return torch.stack(found[1:])


def test_dropout_draws_from_the_secret_stream():
    one = masks(4, 0)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(one))
    assert 0.3 < one.double().mean() < 0.7
    assert torch.equal(one, masks(4, 1))  # whatever the public seed
    assert not torch.equal(one, masks(5, 0))


def test_the_public_state_of_the_generator_is_untouched():
    _, model, optimizer, loader = private(Masked(), X, torch.zeros(N).long(), compile=True)
    for x, y in loader:
        before = torch.get_rng_state()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert torch.equal(before, torch.get_rng_state())


# -- the public number of rows --------------------------------------------------------------------


def test_graphs_are_made_with_a_public_number_of_rows(monkeypatch):
    seen = []
    backend = Compiled._backend

    def noted(self, gm, inputs):
        seen.append(self._capture.rows)
        return backend(self, gm, inputs)

    monkeypatch.setattr(Compiled, "_backend", noted)
    fast = lots(mlp, X, compile=True)
    assert seen == [11]  # the first prime from the lot's size on, which is no axis' length
    assert 11 not in fast.rows


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="compile"):
        private(mlp(), X, torch.zeros(N).long(), compile="max-autotune")
