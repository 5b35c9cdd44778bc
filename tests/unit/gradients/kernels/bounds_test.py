"""How far rounding can move a norm, and by how much norms of real gradients are overstated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from tests.support.products import exact_norms
from vestige.errors import ConfigError
from vestige.gradients.kernels.bounds import DEEPEST, FLOAT32_UNIT, accumulation, of_looks
from vestige.gradients.kernels.reference import product_norms


def test_an_error_grows_with_the_depth():
    assert accumulation(1, torch.bfloat16) == FLOAT32_UNIT
    assert accumulation(256, torch.float32) == 256 * FLOAT32_UNIT
    assert accumulation(256, torch.float64) < 1e-13
    with pytest.raises(ConfigError, match="too long"):
        accumulation(DEEPEST + 1, torch.float32)


def test_float32_sums_stay_within_their_unit():
    # Terms of one sign that round all one way, one after the other.
    depth = 5000
    terms = torch.full((depth,), 1 + 2.0**-7)
    terms[0] = 2.0**12
    exact, computed = float(terms.double().sum()), torch.zeros(())
    for term in terms:
        computed = computed + term
    assert abs(float(computed) - exact) <= accumulation(depth, torch.float32) * exact


def test_rows_that_are_looked_at_often_are_off_by_more():
    same = torch.tensor([[[1.0, 1, 0], [1, 1, 0], [0, 0, 1]]], dtype=torch.float64)
    lengths = torch.tensor([[3.0, 1.0, 5.0]], dtype=torch.float64)
    off = of_looks(same, lengths, torch.float32) / FLOAT32_UNIT
    assert float(off) == pytest.approx((8**2 + 5**2) ** 0.5)  # 2 (3 + 1) and 1 (5)


def real_gradients(precision):
    """Inputs and output gradients of a convolution (as columns) and an attention's projection."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:64], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels[:64])
    generator = torch.Generator().manual_seed(0)

    def weight(*size):
        values = torch.randn(size, generator=generator) / size[1] ** 0.5
        return values.requires_grad_()

    stem, inner, project, head = weight(32, 9), weight(48, 288), weight(64, 48), weight(10, 64)
    hidden = torch.relu(F.unfold(x, 3, padding=1).transpose(1, 2) @ stem.t())
    columns = F.unfold(hidden.transpose(1, 2).view(-1, 32, 8, 8), 3, padding=1).transpose(1, 2)
    convolved = columns @ inner.t()
    mixed = F.scaled_dot_product_attention(*(torch.tanh(convolved),) * 3)
    projected = mixed @ project.t()
    loss = F.cross_entropy(torch.relu(projected).mean(1) @ head.t(), y)
    gradients = torch.autograd.grad(loss, (convolved, projected))
    pairs = zip((columns, mixed), gradients, strict=True)
    return [(a.detach().to(precision), g.to(precision)) for a, g in pairs]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_norms_of_real_gradients_are_overstated_by_less_than_one_per_cent(precision):
    for (a, g), layer in zip(real_gradients(precision), ("convolution", "attention"), strict=True):
        exact = exact_norms(a, g)
        assert (exact > 0).all()
        over = product_norms(a, g).sqrt() / exact - 1
        print(f"{layer}: median {over.median():.3%}, most {over.max():.3%}")
        assert (over >= 0).all()
        assert over.median() < 0.01
