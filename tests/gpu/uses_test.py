"""Uses on a GPU, in the precision of its tensor cores: certified norms and what is added.

CI has no GPU and skips; docs/benchmarks.md says where these ran.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.products import Hard
from vestige import PrivacyEngine
from vestige.gradients.kernels import fused, reference
from vestige.gradients.rules.convolution import Convolved, Geometry
from vestige.gradients.uses import LookedUp, Outer, Tied, Use

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")

PRECISIONS = ["bf16", "tf32"]
HARD = [
    {},
    {"cancel": 0.0},
    {"cancel": 2.0**-7},
    {"cancel": 2.0**-12, "aligned": True},
    {"exponents": (-83, 83)},
    {"exponents": (83, -83), "cancel": 2.0**-7},
    {"exponents": (-148, 120), "cancel": 2.0**-7},
    {"exponents": (45, 45)},
    {"exponents": (-70, -70), "spread": 30},
    {"spread": 120, "zeros": True},
]


@pytest.fixture(autouse=True)
def tf32_products():
    """float32 products on tensor cores."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def convolved(n, precision, shape, generator=None, **settings):
    """A convolution's use, its exact weight gradients, and its weight."""
    generator = generator or torch.Generator().manual_seed(0)
    channels, filters, size, kernel = shape
    axes = len(kernel)
    x = torch.randn(n, channels, *[size] * axes, generator=generator)
    weight = torch.zeros(filters, channels, *kernel)
    run = (F.conv1d, F.conv2d)[axes - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "same" with an even kernel copies its input, on the CPU
        g = torch.randn(run(x, weight, **settings).shape, generator=generator)
    x, g = (narrow(v, precision) for v in (x, g))
    geometry = Geometry.of(weight, **settings)
    return Convolved(x.cuda(), g.cuda(), weight.cuda(), geometry), exact(x, g, weight, geometry)


def narrow(values, precision):
    return values.bfloat16() if precision == "bf16" else reference.round_to_tf32(values.float())


def exact(x, g, weight, geometry):
    x, g = x.double(), g.double()
    return Convolved(x, g, weight.double(), geometry).dense()


def added(use: Use, factors, i):
    """What record i adds by itself."""
    only = torch.zeros_like(factors)
    only[i] = factors[i]
    total = torch.zeros(use.shape, device="cuda")
    use.add_weighted(only, total)
    return total.double().cpu()


def clipped(use: Use, bound):
    squares = use.square_norms()
    bad = ~(squares < torch.inf)
    use.drop(bad)
    return reference.clip_factors(squares, bound)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("shape", [(40, 96, 160), (33, 130, 70), (300, 24, 16), (16, 70, 500)])
def test_no_record_adds_more_than_the_bound(hard, precision, shape):
    t, p, d = shape
    a, g = Hard(n=5, t=t, p=p, d=d, precision=precision, **hard).factors()
    use = Outer(a.cuda(), g.cuda())
    products = torch.bmm(g.double().transpose(1, 2), a.double())
    norms = products.flatten(1).norm(dim=1)
    factors = clipped(use, 1.0)
    for i in range(5):
        if t * (p + d) <= p * d:  # else a rounded product is what is measured and added
            assert float(factors[i]) * float(norms[i]) <= 1 + 1e-6
        assert added(use, factors, i).norm() <= 1 + 1e-6


CONVOLUTIONS = [
    ((3, 16, 12, (3, 3)), {"padding": 1}),  # product
    ((40, 64, 6, (3, 3)), {"padding": 1, "stride": 2}),  # fused, nine positions
    ((64, 48, 9, (3, 3)), {"padding": 2, "dilation": 2}),
    ((24, 70, 7, (2, 3)), {"padding": "same"}),
    ((64, 80, 8, (1, 1)), {"stride": 2}),
    ((50, 60, 19, (5,)), {"padding": 2, "stride": 2}),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape, settings", CONVOLUTIONS)
def test_a_convolution_is_that_of_float64(shape, settings, precision):
    use, dense = convolved(6, precision, shape, **settings)
    norms = dense.flatten(1).norm(dim=1)
    squares = use.square_norms()
    ratio = squares.sqrt().cpu() / norms
    assert (ratio > 1 - 1e-6).all()
    assert (ratio < 1.002).all()
    use.wait()
    factors = torch.rand(6, generator=torch.Generator().manual_seed(1)).cuda()
    total = torch.ones(use.shape, device="cuda")
    use.add_weighted(factors, total)
    expected = 1 + torch.einsum("n,n...->...", factors.double().cpu(), dense)
    assert (total.double().cpu() - expected).norm() < 1e-5 * expected.norm()
    factors = reference.clip_factors(squares, 1.0)
    for i in range(6):
        assert added(use, factors, i).norm() <= 1 + 1e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tied_uses_that_cancel_stay_within_the_bound(precision):
    """The table's row and the head's product undo each other: rounding is all that is left."""
    n, t, words, width = 4, 40, 200, 64
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, words, (n, t), generator=generator)
    looked = torch.randn(n, t, width, generator=generator)
    looked = narrow(looked, precision)
    g = F.one_hot(indices, words).to(looked.dtype)
    for away in (0.0, 1e-5, 1.0):
        head = Outer(looked.cuda(), -g.cuda())
        table = LookedUp(indices.cuda(), looked.float().cuda() * (1 + away), words)
        use = Tied([head, table])
        factors = clipped(use, 1.0)
        dense = torch.zeros(n, words, width, dtype=torch.float64)
        full = indices.unsqueeze(2).expand(-1, -1, width)
        dense.scatter_add_(1, full, looked.float().double() * (1 + away) - looked.double())
        for i in range(n):
            assert float(factors[i]) * float(dense[i].norm()) <= 1 + 1e-6
            assert added(use, factors, i).norm() <= 1 + 1e-6


class Texts(nn.Module):
    """A small language model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(70, 48), nn.LayerNorm(48)
        self.up, self.down = nn.Linear(48, 100), nn.Linear(100, 48)
        self.head = nn.Linear(48, 70, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


class Images(nn.Module):
    """Convolutions of both forms, and a norm over groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.wide, self.head = nn.Conv2d(16, 80, 3, stride=2), nn.Linear(80, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.relu(self.wide(x)).mean((2, 3)))


def texts():
    words = torch.randint(0, 70, (12, 25), generator=torch.Generator().manual_seed(1))
    return Texts(), words[:, :-1], words[:, 1:]


def images():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 12, 12, generator=generator)
    return Images(), x, torch.randint(0, 5, (12,), generator=generator)


def clipped_sum(make, clipping, precision, rows=slice(None), clip=1e-3, spoil=None, scale=1.0):
    """The clipped sum of one step without noise, in float64 on the CPU, and the collector."""
    torch.manual_seed(0)
    model, x, y = make()
    dtype = torch.float64 if precision == "fp64" else torch.float32
    device = "cpu" if precision == "fp64" else "cuda"
    model = model.to(device, dtype)
    x, y = x[rows].to(device), y[rows].to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    engine = PrivacyEngine("rdp", noise_seed=0)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        sample_rate=1.0,
        clipping=clipping,
    )
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    for inputs, labels in loader:
        if spoil is not None:
            inputs = inputs.clone()
            inputs[spoil] = torch.inf
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(inputs)
            losses = F.cross_entropy(logits.flatten(0, -2).float() * scale, labels.flatten())
        losses.backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return (before - after).cpu() * len(x)


@pytest.mark.parametrize("precision, close", [("bf16", 0.06), ("tf32", 0.01)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("make", [texts, images])
def test_a_step_is_that_of_float64_up_to_its_precision(make, clipping, precision, close):
    ours = clipped_sum(make, clipping, precision)
    theirs = clipped_sum(make, clipping, "fp64")
    assert (ours - theirs).norm() < close * theirs.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("make", [texts, images])
def test_one_record_moves_the_weights_by_the_bound_at_most(make, clipping, precision):
    for i in range(3):
        for scale in (1.0, 1e3):
            moved = clipped_sum(
                make, clipping, precision, slice(i, i + 1), clip=1.0, scale=scale
            ).norm()
            # The weights themselves round when they are moved.
            assert moved <= 1 + 1e-4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_record_that_is_not_finite_adds_nothing(clipping, precision):
    with_it = clipped_sum(images, clipping, precision, spoil=3)
    assert with_it.isfinite().all()
    keep = [i for i in range(12) if i != 3]
    without = clipped_sum(images, clipping, precision, rows=keep)
    # Means over eleven and twelve rows round differently.
    assert (with_it - without).norm() < 1e-2 * without.norm()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("make", [texts, images])
def test_the_host_never_waits_in_a_pass(make, clipping):
    model, x, y = make()
    model = model.cuda()
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x.cuda(), y.cuda()), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        clipping=clipping,
    )
    for step in range(3):
        for inputs, labels in loader:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                with torch.autocast("cuda", torch.bfloat16):
                    logits = model(inputs)
                    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
                loss.backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_come_out_of_one_kernel(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 37, 90, generator=generator).to(dtype).cuda()
    g = torch.randn(5, 37, 90, generator=generator).to(dtype).cuda()
    wide, slopes = x.double(), g.double()
    _, mean, scale = torch.native_layer_norm(x.float(), [90], None, None, 1e-5)
    weight, bias = fused.affine_sums(x, g, mean, scale)
    normal = F.layer_norm(wide, [90])
    assert torch.allclose(weight.double(), (slopes * normal).sum(1), rtol=1e-4, atol=1e-4)
    assert torch.allclose(bias.double(), slopes.sum(1), rtol=1e-4, atol=1e-4)
    _, mean, scale = torch.native_group_norm(x.float(), None, None, 5, 37, 90, 1, 1e-5)
    weight, bias = fused.affine_channel_sums(x, g, mean, scale)
    normal = F.group_norm(wide, 1)
    assert torch.allclose(weight.double(), (slopes * normal).sum(2), rtol=1e-4, atol=1e-4)
    assert torch.allclose(bias.double(), slopes.sum(2), rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_finite_are_emptied_by_their_norms():
    values = torch.randn(6, 3, 5000, generator=torch.Generator().manual_seed(0)).cuda()
    exact_squares = values.double().square().sum((1, 2))
    values[1, 0, 7], values[2, 2, 4999], values[3] = torch.nan, -torch.inf, 1e30
    squares = fused.row_squares(values.view(6, -1), empty=True)
    assert squares.isinf().tolist() == [False, True, True, False, False, False]
    assert torch.allclose(squares[[0, 4, 5]], exact_squares[[0, 4, 5]], rtol=1e-12)
    assert values.isfinite().all()
    rows = torch.full((2, 10), 1e19, device="cuda")
    assert fused.row_squares(rows, limited=True).isinf().all()
    assert fused.row_squares(rows).isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "expanded", "sequence"])
def test_a_convolution_never_reads_the_next_record(layout, precision):
    """49 positions are stored as 64 or 49: a record that is not finite stays by itself."""
    random = torch.Generator().manual_seed(0)
    x = narrow(torch.randn(4, 256, 7, 7, generator=random), precision).cuda()
    g = narrow(torch.randn(4, 256, 7, 7, generator=random), precision).cuda()
    weight = torch.zeros(256, 256, 3, 3).cuda()
    geometry = Geometry.of(weight, padding=1)
    if layout == "channels last":
        g = g.contiguous(memory_format=torch.channels_last)
    elif layout == "expanded":
        g = g[..., :1, :1].expand(4, 256, 7, 7)
    elif layout == "sequence":
        g = g.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(4, 256, 7, 7)
    alone = Convolved(x, g, weight, geometry).square_norms()
    bad = g.clone(memory_format=torch.preserve_format) if layout != "expanded" else g.contiguous()
    bad[2] = torch.inf
    use = Convolved(x, bad, weight, geometry)
    squares = use.square_norms()
    others = torch.tensor([0, 1, 3], device="cuda")
    torch.testing.assert_close(squares[others], alone[others], rtol=1e-6, atol=0)
    assert squares[2] == torch.inf
    factors = torch.where(squares < torch.inf, squares.rsqrt(), 0.0).float()
    use.drop(factors == 0)
    total = torch.zeros_like(weight)
    use.add_weighted(factors, total)
    assert total.isfinite().all()


@pytest.mark.parametrize("t", [2, 8, 40])
def test_a_tied_table_meets_the_rounded_numbers(t):
    """Positions that cancel but for what TF32 rounds away, and a table that takes the rest back."""
    random = torch.Generator().manual_seed(0)
    n, words, width = 3, 200, 64
    x = narrow(torch.randn(n, 1, width, generator=random), "tf32").repeat(1, t, 1)
    g = narrow(torch.randn(n, 1, words, generator=random), "tf32").repeat(1, t, 1)
    x[:, 1::2] *= -(1 + 2.0**-12.5)
    back = -torch.bmm(g.double().transpose(1, 2), x.double()).float()
    table = LookedUp(torch.arange(words).expand(n, words).cuda(), back.cuda(), words)
    use = Tied([Outer(x.cuda(), g.cuda()), table])
    use.summed_with(2.0**-9)
    factors = (use.square_norms().rsqrt() * (1 - 2.0**-9)).clamp(max=1e6).float()
    assert max(float(added(use, factors, i).norm()) for i in range(n)) <= 1 + 1e-6
