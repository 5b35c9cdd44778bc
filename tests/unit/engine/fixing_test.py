"""`vestige.fix`: the fixed model is the same function with another norm, or the norm is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from tests.support.loops import private
from tests.support.reference import captured_sum, clip_and_sum, loop_gradients
from vestige import UnsupportedModel, fix
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition


class NormThenActivation(nn.BatchNorm2d):
    """Batch norm, dropout and an activation in one layer, as libraries of image models have it."""

    def __init__(self, features, act=None, drop=None):
        super().__init__(features)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class Named(nn.BatchNorm2d):
    """Another name for batch norm."""


class HiddenActivation(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class ActivationFirst(NormThenActivation):
    def forward(self, x):
        return nn.BatchNorm2d.forward(self, self.act(x))


class ActivationInTraining(NormThenActivation):
    def forward(self, x):
        out = nn.BatchNorm2d.forward(self, x)
        return self.act(out) if self.training else out


class Gained(nn.BatchNorm2d):
    """A parameter of its own, which starts without an effect."""

    def __init__(self, features):
        super().__init__(features)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * super().forward(x)


def image(channels=16, size=4):
    return torch.randn(5, channels, size, size, generator=torch.Generator().manual_seed(0))


def images(n=12):
    return TensorDataset(torch.randn(n, 3, 4, 4), torch.randint(0, 3, (n,)))


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU(), nn.Identity()])
def test_the_activation_of_a_subclass_is_kept(act):
    norm = NormThenActivation(16, act)
    nn.init.zeros_(norm.weight)  # as residual blocks start: its output does not show the activation
    nn.init.normal_(norm.bias)
    fixed = fix(nn.Sequential(norm))[0]
    nn.init.normal_(fixed.weight)
    assert not isinstance(fixed, nn.BatchNorm2d)
    x = image()
    expected = act(F.group_norm(x, fixed.num_groups, fixed.weight, fixed.bias, norm.eps))
    assert torch.equal(fixed(x), expected)
    assert torch.equal(fixed.bias, norm.bias)


def test_dropout_inside_a_subclass_is_kept_too():
    fixed = fix(nn.Sequential(NormThenActivation(16, drop=nn.Dropout(0.9))))[0]
    zeros = (fixed(image()) == 0).float().mean()
    assert zeros > 0.9 and (fixed.eval()(image()) == 0).float().mean() < 0.7


def test_names_of_the_kept_weights_do_not_change():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), NormThenActivation(16, nn.PReLU()))
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    kept = [key for key in model.state_dict() if not key.endswith(statistics)]
    assert sorted(fix(model).state_dict()) == sorted(kept)


def test_a_subclass_that_only_has_another_name_becomes_a_group_norm():
    assert type(fix(nn.Sequential(Named(16)))[0]) is nn.GroupNorm


@pytest.mark.parametrize(
    "norm",
    [
        HiddenActivation(16),
        ActivationFirst(16),
        ActivationInTraining(16),
        Gained(16),
        parametrizations.weight_norm(nn.BatchNorm2d(16), dim=None),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_subclass_that_does_something_else_is_refused(norm):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), norm)
    with pytest.raises(
        UnsupportedModel, match=rf"'1' \({type(norm).__name__}\).*GroupNorm"
    ) as told:
        fix(model)
    assert "\n" not in str(told.value)


def test_a_lazy_norm_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedModel, match="run the model once"):
        fix(nn.Sequential(nn.LazyBatchNorm2d()))


def test_comparing_leaves_no_trace():
    """Statistics, flags and the random numbers of the caller are as before."""
    model = nn.Sequential(NormThenActivation(16), Named(16))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    fix(model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model[0].training


@pytest.mark.parametrize("channels", [3, 8, 16, 24, 32, 40, 64, 96, 320, 1000])
def test_no_norm_is_constant_on_a_map_of_one_place(channels):
    """One value in a group would give the bias; two give a sign, which has no gradient."""
    norm = fix(nn.Sequential(nn.BatchNorm2d(channels)))[0].double()
    assert channels // norm.num_groups >= min(8, channels) and norm.num_groups <= 32
    x = image(channels, 1).double().requires_grad_()
    out = norm(x)
    assert (out[0] - out[1]).abs().max() > 0.1
    (out * torch.randn_like(out)).sum().backward()
    assert (x.grad.abs().amax(dim=(1, 2, 3)) > 1e-3).all()


def test_a_group_norm_of_one_value_is_refused_and_says_so():
    model = nn.Sequential(nn.Conv2d(3, 8, 4), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(8, 3))
    _, model, _, loader = private(model, images())
    with pytest.raises(UnsupportedModel, match=r"GroupNorm.*'1\.weight'.*one value.*fewer groups"):
        for x, _ in loader:
            model(x)


def frozen_backbone():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.eval().requires_grad_(False)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def test_a_frozen_batch_norm_is_a_constant_map_and_works():
    model = frozen_backbone().double()
    x, cotangent = torch.randn(5, 3, 4, 4).double(), torch.randn(5, 3).double()
    groups = partition(model, "flat")
    expected = clip_and_sum(loop_gradients(model, x, cotangent, groups), groups, Clip((1.0,)))
    got, _ = captured_sum(model, x, cotangent)
    assert torch.allclose(got, expected, rtol=1e-10)


def test_a_frozen_batch_norm_is_left_alone_by_fix_and_taken_by_the_engine():
    model = fix(frozen_backbone())
    assert type(model[1]) is nn.BatchNorm2d
    engine, model, optimizer, loader = private(model, images())
    before = copy.deepcopy(model[1].state_dict())
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.released == len(loader)
    assert all(torch.equal(before[k], v) for k, v in model[1].state_dict().items())


@pytest.mark.parametrize("gradients", [True, False])
def test_a_frozen_batch_norm_that_is_put_into_training_is_refused(gradients):
    """Also without gradients: its statistics would follow the private rows."""
    _, model, _, loader = private(frozen_backbone(), images())
    model.train()
    before = copy.deepcopy(model[1].state_dict())
    told = pytest.raises(UnsupportedModel, match=r"BatchNorm2d.*train\(\).*\.eval\(\)")
    with told, torch.set_grad_enabled(gradients):
        for x, _ in loader:
            model(x)
    assert all(torch.equal(before[k], v) for k, v in model[1].state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.train(),
        lambda norm: norm.requires_grad_(True),
        lambda norm: setattr(norm, "running_mean", None) or setattr(norm, "running_var", None),
    ],
    ids=["training", "trainable", "no statistics"],
)
def test_a_batch_norm_that_is_not_frozen_is_still_refused(change):
    model = frozen_backbone()
    change(model[1])
    with pytest.raises(UnsupportedModel, match=r"'1' \(BatchNorm2d\).*fix"):
        private(model, images())
