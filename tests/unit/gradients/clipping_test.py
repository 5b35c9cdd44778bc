"""Automatic clipping: every example is normalised, none is longer than the bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import call, captured_sum, loop_gradients, take
from tests.support.small_runs import closure_of
from tests.support.zoo import zoo
from vestige import ConfigError, PrivacyEngine
from vestige.gradients.clipping import Auto
from vestige.gradients.groups import partition
from vestige.methods import METHODS


def normalise_and_sum(gradients, groups, bound, stability):
    """The papers' formula, row by row and group by group."""
    total = torch.zeros_like(gradients[0])
    for row in gradients:
        for segment in groups.segments():
            part = row[segment]
            length = float(part.norm()) + stability
            if length > 0:
                total[segment] += bound / groups.count**0.5 * part / length
    return total


def double(x):
    if isinstance(x, tuple):
        return tuple(double(t) for t in x)
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("stability", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("physical", [1, None])
def test_the_sum_equals_a_loop_over_examples(clipping, physical, stability):
    torch.manual_seed(0)
    for name, (model, x, pick) in zoo().items():
        model, x = model.double(), double(x)
        groups = partition(model, clipping)
        cotangent = torch.randn_like(pick(call(model, x)))
        gradients = loop_gradients(model, x, cotangent, groups, pick=pick)
        expected = normalise_and_sum(gradients, groups, 0.7, stability)
        found, _ = captured_sum(
            model, x, cotangent, clipping, 0.7, physical, pick=pick, stability=stability
        )
        assert (found - expected).norm() <= 1e-8 * expected.norm(), name


def test_no_example_is_longer_than_the_bound_at_any_scale():
    """Without a stability every gradient is stretched, so norms must be right at every scale."""
    torch.manual_seed(1)
    for name, (model, x, pick) in zoo().items():
        for scale in (1e-25, 1e-12, 1e-3, 1.0, 1e6):
            cotangent = scale * torch.randn_like(pick(call(model, x)))
            for i in range(2):
                one = slice(i, i + 1)
                total, _ = captured_sum(
                    model, take(x, one), cotangent[one], bounds=0.5, pick=pick, stability=0.0
                )
                assert torch.isfinite(total).all(), (name, scale)
                assert total.norm() <= 0.5 * (1 + 1e-6), (name, scale, float(total.norm()))


@pytest.mark.parametrize("stability", [0.0, 1e-25, 1e-18, 0.01])
@pytest.mark.parametrize("bound", [1.0, 1e3, 1e9])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_tiny_inputs_with_huge_gradients_are_not_stretched_to_infinity(clipping, bound, stability):
    """A factor of C / norm times an output gradient may overflow before it meets the input."""
    model = nn.Linear(6, 4, bias=False)
    for size in (1e-44, 1e-39, 1e-36, 1e-32, 1e-20):
        for push in (1.0, 1e10, 1e15, 1e19):
            x, cotangent = torch.full((1, 6), size), torch.full((1, 4), push)
            total, _ = captured_sum(model, x, cotangent, clipping, bound, stability=stability)
            assert torch.isfinite(total).all(), (size, push)
            assert total.double().norm() <= bound * (1 + 1e-6), (size, push)


@pytest.mark.parametrize("stability", [0.0, 0.01])
def test_an_example_without_a_gradient_contributes_nothing(stability):
    model = nn.Linear(4, 2)
    x, cotangent = torch.randn(3, 4), torch.randn(3, 2)
    cotangent[1] = 0
    found, _ = captured_sum(model, x, cotangent, stability=stability)
    rows = torch.tensor([0, 2])
    without, _ = captured_sum(model, x[rows], cotangent[rows], stability=stability)
    assert torch.allclose(found, without)


@pytest.mark.parametrize("wrong", [None, "5", "none", [], ["a"]])
def test_a_bound_that_is_no_number_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=r"max_grad_norm=.* must be a positive number, which"):
        private("flat", max_grad_norm=wrong)


def private(clipping, method="dp-sgd", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=generator)
    engine = PrivacyEngine("rdp", noise_seed=2)
    made = engine.make_private(
        module=model,
        optimizer=METHODS[method].load()().make_optimizer(model.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        method=method,
        clipping=clipping,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options,
    )
    return engine, *made


def run(engine, model, optimizer, loader, steps=6, reduction="mean"):
    while engine.released < steps:
        for x, y in loader:
            optimizer.step(closure_of(model, optimizer, x, y, reduction))
            if engine.released == steps:
                break
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("stability", [0.0, 0.01])
def test_the_loss_reduction_does_not_matter(stability):
    """The stability is added to the norm of the example's own loss, under a mean too."""
    mean = run(*private(Auto(stability=stability)))
    total = run(*private(Auto(stability=stability), loss_reduction="sum"), reduction="sum")
    physical = run(*private(Auto(stability=stability), max_physical_batch_size=2))
    assert torch.allclose(mean, total, atol=1e-12) and torch.allclose(mean, physical, atol=1e-12)


def test_empty_lots_are_noise_alone():
    for stability in (0.0, 0.01):
        engine, *rest = private(Auto(stability=stability), sample_rate=1e-12, noise_multiplier=0.0)
        before = torch.cat([p.detach().flatten() for p in rest[0].parameters()]).clone()
        assert torch.equal(run(engine, *rest), before)


def test_names_and_settings():
    assert private("auto")[0].plan.clipping == "auto, flat, stability 0.01"
    assert private(Auto("per_layer", 0))[0].plan.group_names == ("0", "2")
    for bad in (-1.0, float("nan"), True, "much"):
        with pytest.raises(ConfigError, match="stability="):
            Auto(stability=bad)
