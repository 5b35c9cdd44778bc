"""What cannot be trained privately is refused before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.loops import epoch, lot_sum, mlp, private, records, step, weights
from vestige import ConfigError, PrivacyEngine, PrivacyError, UnsupportedModel


class OddRoot(nn.Module):
    """A parameter of the root itself, used in a way that no rule covers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.mix = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return self.inner(x) @ torch.softmax(self.mix, dim=0)


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
}  # fmt: skip


def test_unsuitable_models_are_refused_with_the_module_and_the_remedy():
    norm = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(UnsupportedModel, match=r"'1' \(BatchNorm1d\).*vestige\.fix"):
        private(norm)
    with pytest.raises(UnsupportedModel, match="track_running_stats"):
        private(nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(5, 3)))
    with pytest.raises(UnsupportedModel, match="DataParallel"):
        private(nn.DataParallel(mlp()))
    with pytest.raises(ConfigError, match="no trainable parameter"):
        private(mlp().requires_grad_(False))
    with pytest.raises(ConfigError, match=r"nn\.Module"):
        engine, model = PrivacyEngine(), mlp()
        engine.make_private(
            module=lambda x: x,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records(), 6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 5))]
)
def test_torchscript_is_refused_by_name(made):
    with pytest.raises(UnsupportedModel, match=r"'\(root\)'.*TorchScript.*made from"):
        private(made(mlp()))
    with pytest.raises(UnsupportedModel, match=r"'0'.*TorchScript"):
        private(nn.Sequential(made(mlp()), nn.Linear(3, 3)))


def test_an_uncovered_parameter_of_the_root_is_refused_by_name():
    _, model, _, loader = private(OddRoot())
    x, _ = next(iter(loader))
    with pytest.raises(UnsupportedModel, match=r"'mix'.*softmax.*OddRoot"):
        model(x)


def test_an_uncovered_layer_that_is_the_root_itself_is_run_row_by_row_or_refused():
    """The generic rule covers any module; at the root it must not end in an internal error."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(1, 2, 3)
    dataset = TensorDataset(torch.randn(6, 1, 5), torch.randn(6, 2, 7))

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().flatten(1).sum(1).mean()

    expected = lot_sum(nn.Sequential(layer), dataset, loss)
    try:
        got = lot_sum(layer, dataset, loss)
    except UnsupportedModel:
        return
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer_takes_the_release(name):
    """It must do with the released gradient what it does with any other gradient."""
    model = mlp()
    twin = copy.deepcopy(model)
    ours = OPTIMIZERS[name](model.parameters(), lr=0.01)
    theirs = OPTIMIZERS[name](twin.parameters(), lr=0.01)
    engine, model, optimizer, loader = private(model, optimizer=ours)
    for x, y in loader:
        step(model, optimizer, x, y)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        theirs.step()
    assert engine.released == len(loader)
    assert torch.equal(weights(model), weights(twin))


def test_frozen_parameters_stay_put_and_are_not_counted():
    model = mlp()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    engine, model, optimizer, loader = private(model, optimizer=optimizer, clipping="per_layer")
    assert engine.plan.group_names == ("2",)
    epoch(model, optimizer, loader)
    assert all(torch.equal(before[k], v) for k, v in model[0].state_dict().items())
    assert all(p.grad is None for p in model[0].parameters())


def test_the_trainable_set_may_not_change():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    model[0].bias.requires_grad_(False)
    with pytest.raises(PrivacyError, match=r"no longer trainable: 0\.bias"):
        optimizer.step()

    model = mlp()
    model[0].bias.requires_grad_(False)
    _, model, optimizer, loader = private(model)
    x, y = next(iter(loader))
    model[0].bias.requires_grad_(True)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match=r"newly trainable: 0\.bias"):
        optimizer.step()

    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    model[1].extra = nn.Linear(3, 3)  # in the tanh, which does not use it
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match=r"newly trainable: 1\.extra\.weight"):
        optimizer.step()


def test_a_parameter_group_added_later_is_refused():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ConfigError, match="not parameters of the model"):
        optimizer.step()


def test_one_of_several_processes_is_refused(monkeypatch):
    """Started by torchrun, with no process group: each would report an epsilon of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = mlp()
    with pytest.raises(ConfigError, match=r"one of 2 processes \(WORLD_SIZE\) without a process"):
        private(model)
    assert not model._forward_hooks and not model._forward_pre_hooks
    monkeypatch.setenv("WORLD_SIZE", "1")
    private(model)
