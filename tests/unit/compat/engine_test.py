"""A run through Opacus' names makes the same releases as the plain loop: compat translates."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import vestige
from tests.support.loops import mlp, private, records, step
from vestige.data_loader import DPDataLoader
from vestige.engine.privacy_engine import PrivacyEngine as Plain
from vestige.errors import ConfigError, PrivacyError, UnsupportedModel


def releases(engine, model, optimizer, loader, loss=nn.functional.cross_entropy):
    """The weights after every step of an epoch."""
    weights = []
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(weights)


def of_plain(**options):
    return releases(*private(engine=Plain(noise_seed=11), **options))


def make(**options):
    """make_private of the public engine, with arguments as Opacus' users give them."""
    model = options.pop("model", None) or mlp()
    engine = vestige.PrivacyEngine(noise_seed=11)
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(records(), batch_size=6),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    return engine, engine.make_private(**arguments | options)


@pytest.mark.parametrize(
    ("things", "options"),
    [
        ((nn.Linear(2, 2),), {}),
        ((nn.Linear(2, 2), 64, 6000), {"alphas": [2, 3]}),
        ((nn.Linear(2, 2),), {"sample_rate": 0.1, "noise_multiplier": 1.3, "max_grad_norm": 1.0}),
        ((), {"module": nn.Linear(2, 2), "batch_size": 64, "sample_size": 6000}),
    ],
)
def test_an_engine_as_before_opacus_1_is_told_the_call_of_today(things, options):
    with pytest.raises(PrivacyError, match=r"PrivacyEngine\(model.* is refused: .*make_private\("):
        vestige.PrivacyEngine(*things, **options)


def test_names_of_before_opacus_1_say_what_takes_their_place():
    engine, (_, optimizer, _) = make()
    old = [
        (engine, "attach", r"\.make_private\("),
        (engine, "get_privacy_spent", r"get_epsilon\(delta\)"),
        (engine.accountant, "get_privacy_spent", r"get_epsilon\(delta\)"),
        (vestige.accountants.RDPAccountant(), "get_privacy_spent", r"get_epsilon\(delta\)"),
        (optimizer, "privacy_engine", r"get_epsilon\(delta\)"),
        (optimizer, "virtual_step", "max_physical_batch_size="),
        (optimizer, "pre_step", "per-example gradients never leave the engine"),
    ]
    for thing, name, words in old:
        assert not hasattr(thing, name)
        with pytest.raises(PrivacyError, match=rf"{name} is refused: .*{words}"):
            getattr(thing, name)


def test_an_unknown_option_of_the_engine_is_an_ordinary_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        vestige.PrivacyEngine(colour=1)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_every_way_to_gradients_is_the_same_run(mode):
    engine, made = make(grad_sample_mode=mode, poisson_sampling=True, wrap_model=True)
    assert torch.equal(releases(engine, *made), of_plain())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ghost_mode_returns_the_criterion_third_and_makes_the_same_releases(reduction):
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    engine, made = make(grad_sample_mode="ghost", criterion=criterion)
    model, optimizer, loss, loader = made
    assert torch.equal(releases(engine, model, optimizer, loader, loss), of_plain())


def test_ghost_mode_with_a_target_returns_four_as_well():
    model = mlp()
    engine = vestige.PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=6),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    assert len(made) == 4 and isinstance(made[2], nn.CrossEntropyLoss)
    releases(engine, made[0], made[1], made[3], made[2])
    assert engine.get_epsilon(1e-5) <= 3.0
    assert made[1].noise_multiplier == engine.plan.noise_multiplier


def test_a_bound_per_parameter_is_a_group_per_parameter_of_the_same_sensitivity():
    bounds = [0.1, 0.2, 0.3, 0.4]
    engine, made = make(clipping="per_layer", max_grad_norm=bounds)
    names = [name for name, _ in made[0].named_parameters()]
    assert engine.plan.group_names == tuple(names)
    assert engine.plan.sensitivity == pytest.approx(sum(c * c for c in bounds) ** 0.5)
    partition = {name: [name] for name in names}
    expected = of_plain(clipping=partition, max_grad_norm=bounds)
    assert torch.equal(releases(engine, *made), expected)
    # One number, or one per layer, means what it means without Opacus' names.
    assert make(clipping="per_layer", max_grad_norm=1.0)[0].plan.group_names == ("0", "2")


def test_adaptive_clipping_is_quantile_clipping_with_its_own_numbers():
    settings = {"target_unclipped_quantile": 0.4, "clipbound_learning_rate": 0.3}
    settings |= {"unclipped_num_std": 2.0, "min_clipbound": 0.1, "max_clipbound": 9.0}
    engine, _ = make(clipping="adaptive", **settings)
    words = "quantile, flat, target 0.4, rate 0.3, count_noise 2.0, in [0.1, 9.0]"
    assert engine.plan.clipping == words


@pytest.mark.parametrize("mode", ["no_op", "ghost_fsdp", "magic"])
def test_a_way_to_gradients_that_would_go_around_the_engine_is_refused(mode):
    with pytest.raises(PrivacyError, match=f"grad_sample_mode='{mode}' is refused: .* [A-Z].*"):
        make(grad_sample_mode=mode)


def test_lots_that_are_not_poisson_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="poisson_sampling=False is refused: the accountants"):
        make(poisson_sampling=False)


def test_a_private_loader_that_is_given_again_stands_for_its_source():
    engine, (_, _, loader) = make()
    again, made = make(data_loader=loader)
    assert torch.equal(releases(again, *made), of_plain())
    assert engine.released == 0


def test_the_accountant_answers_for_the_ledger_and_cannot_be_stepped():
    engine, model, optimizer, loader = private()
    assert engine.accountant == "pld" and engine.accountant.history == []
    for x, y in loader:
        step(model, optimizer, x, y)
    assert engine.accountant.history == [(1.0, 0.25, 4)]
    assert engine.accountant.get_epsilon(delta=1e-5) == engine.get_epsilon(1e-5)
    assert (len(engine.accountant), engine.accountant.mechanism()) == (1, "pld")
    before = engine.ledger.events
    engine.accountant.history.clear()
    for call in (
        lambda: engine.accountant.step(noise_multiplier=9.0, sample_rate=0.1),
        lambda: engine.accountant.load_state_dict({"history": [], "mechanism": "rdp"}),
        lambda: engine.accountant.get_optimizer_hook_fn(sample_rate=0.1),
    ):
        with pytest.raises(PrivacyError, match=r"engine\.accountant\..* is refused: "):
            call()
    assert engine.ledger.events == before


class Pooled(nn.Module):
    """Averages over positions, padding included."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1))


def test_an_epsilon_that_padding_weakens_is_warned_of_once():
    rows = [(torch.arange(1 + i % 7), i % 3) for i in range(24)]

    def to_the_longest(batch):
        x = nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
        return x, torch.tensor([label for _, label in batch])

    loader = DataLoader(rows, batch_size=3, collate_fn=to_the_longest)
    engine, made = make(model=Pooled(), data_loader=loader)
    releases(engine, *made)
    with pytest.warns(UserWarning, match="epsilon has a caveat: the rows of different lots"):
        told = engine.accountant.get_epsilon(delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(1e-5) == told


def test_gdp_is_refused_with_what_to_use_instead():
    with pytest.raises(PrivacyError, match=r"no guarantee\. Use accountant='prv'"):
        vestige.PrivacyEngine(accountant="gdp")


def test_a_refused_run_leaves_model_and_optimizer_as_they_were():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        make(model=model, optimizer=optimizer, max_grad_norm=-1.0)
    assert type(model) is nn.Sequential and type(optimizer) is torch.optim.SGD
    assert not hasattr(optimizer, "noise_multiplier")
    # One that is private already stays so, with the numbers of its own run.
    _, (model, optimizer, _) = make()
    with pytest.raises(ConfigError):
        make(model=model, optimizer=optimizer, max_grad_norm=-1.0)
    assert optimizer.noise_multiplier == 1.0


def test_a_method_with_an_optimizer_of_its_own_takes_a_private_one_again():
    model = mlp()
    optimizer = vestige.methods.resolve("dp-adambc").make_optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        make(model=model, optimizer=optimizer, method="dp-adambc")
    assert optimizer.noise_multiplier == 1.0


def test_checkpoints_take_opacus_arguments(tmp_path):
    engine, model, optimizer, loader = private()
    for x, y in loader:
        step(model, optimizer, x, y)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1}
    )
    again, other, its, _ = private()
    saved = again.load_checkpoint(path=path, module=other, optimizer=its)
    assert saved == {"epoch": 1} and again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    with pytest.raises(ConfigError, match="module is not the one of this engine"):
        engine.save_checkpoint(path=path, module=mlp())


def test_models_are_checked_and_fixed_by_the_engine():
    engine, bad = vestige.PrivacyEngine(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert not engine.is_compatible(module=bad, optimizer=None, data_loader=None)
    with pytest.raises(UnsupportedModel, match="BatchNorm2d"):
        engine.validate(module=bad, optimizer=None, data_loader=None)
    assert isinstance(engine.get_compatible_module(bad)[1], nn.GroupNorm)


def test_signatures_are_those_of_the_engine():
    for name in ("__init__", "make_private", "make_private_with_epsilon"):
        ours, plain = (getattr(kind, name) for kind in (vestige.PrivacyEngine, Plain))
        assert inspect.signature(ours) == inspect.signature(plain)
        assert ours.__doc__ == plain.__doc__


def test_the_loader_that_was_given_hands_out_the_lots():
    given = DPDataLoader.from_data_loader(DataLoader(records(), batch_size=6))
    engine, (model, optimizer, loader) = make(data_loader=given)
    assert isinstance(loader, DPDataLoader) and len(given) == 4
    assert torch.equal(releases(engine, model, optimizer, given), of_plain())
