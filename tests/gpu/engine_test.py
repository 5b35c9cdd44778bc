"""The engine's options on a GPU: compiled steps, a batch size found by trial, narrow weights.

CI has no GPU and skips.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.compiled_runs import N, apart, lots
from tests.support.hard_layers import tensor_cores
from vestige import PrivacyEngine
from vestige.gradients.kernels import fused

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")


class Texts(nn.Module):
    """A block of a language model, and the mean over its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        q, k, v = (t.unflatten(2, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.head(F.gelu(x).mean(1))


class Images(nn.Module):
    """Two convolutions and a norm over groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.head = nn.Conv2d(16, 24, 3, stride=2), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))


def inputs(kind):
    generator = torch.Generator().manual_seed(0)
    if kind is Texts:
        return torch.randint(0, 40, (N, 24), generator=generator).to(DEVICE)
    return torch.randn(N, 3, 12, 12, generator=generator).to(DEVICE)


@pytest.mark.parametrize("precision, close", [("fp32", 1e-4), ("tf32", 2e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("kind", [Texts, Images])
def test_compiled_steps_are_those_of_the_eager_engine(kind, clipping, precision, close):
    x = inputs(kind)
    with (
        tensor_cores(precision == "tf32"),
        torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"),
    ):
        one, other = (
            lots(lambda: kind().to(DEVICE), x, clipping=clipping, compile=on)
            for on in (True, False)
        )
    assert one.compiled.why is None and one.by_graph[1:] == [True] * (len(one.by_graph) - 1)
    assert apart(one, other) < close


class Wide(nn.Module):
    """Every row takes 16 MiB of activations, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1).expand(-1, 2**19, -1)
        return self.last(x.tanh().mean(1))


def test_a_batch_size_is_found_where_the_device_says_that_it_is_full():
    """A gibibyte has room for a part of a lot; the lot then runs in batches of what was found."""
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((reserved + 2**30) / whole)
    try:
        x, y = torch.randn(128, 5, device=DEVICE), torch.arange(128, device=DEVICE) % 3
        engine, model = PrivacyEngine("rdp"), Wide().to(DEVICE)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=64),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size="auto",
            self_check=False,
        )
        rows = engine.plan.max_physical_batch_size
        assert rows is not None and 1 <= rows < 64
        assert torch.cuda.memory_allocated() < allocated + 2**24  # the trials hold nothing
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        assert engine.released == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_those_of_float32_rounded(dtype):
    """The same releases, put into a float32 model by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE, dtype)
    twin = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    x, y = torch.randn(24, 5, device=DEVICE, dtype=dtype), torch.arange(24, device=DEVICE) % 3
    engine = PrivacyEngine("rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        master_weights=True,
    )
    by_hand = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    while engine.released < 12:
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            parts = (engine.door.last[0] / 6).split([p.numel() for p in twin.parameters()])
            for parameter, part in zip(twin.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
            by_hand.step()
    for narrow, wide in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(narrow, wide.to(dtype))
