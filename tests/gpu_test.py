"""Methods with memory on a GPU: the CPU's numbers, autocast around the whole step, bf16 history.

CI has no GPU and skips; docs/benchmarks.md says where these ran.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.small_runs import closure_of, small
from vestige import PrivacyEngine
from vestige.methods import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trained(name, device, dtype=torch.float64, autocast=None, hidden=12, clip=1.0, **options):
    """The weights after 12 steps, and the engine."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(36, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 3),
        ).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 1, 5, 5, generator=generator).to(device, dtype)
    y = torch.randint(0, 3, (40,), generator=generator).to(device)
    engine = PrivacyEngine("rdp", noise_seed=3)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=small(name).make_optimizer(model.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=0.7,
        max_grad_norm=clip,
        method=small(name),
        steps=12,
        **{"secure_noise": True} | options,
    )
    while engine.released < 12:
        for a, b in loader:
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                optimizer.step(closure_of(model, optimizer, a, b))
            if engine.released == 12:
                break
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()]), engine


@pytest.mark.parametrize("name", METHODS)
def test_secure_noise_gives_the_numbers_of_the_cpu(name):
    ours, _ = trained(name, "cuda")
    theirs, _ = trained(name, "cpu")
    assert (ours - theirs).abs().max() < 1e-9


@pytest.mark.parametrize("hidden, clip", [(64, 10.0), (4096, 1.0)])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_inside_autocast_keeps_its_precision(name, autocast, hidden, clip):
    """Inner products in half precision overflow, and one NaN in a memory stays for ever."""
    weights, engine = trained(
        name, "cuda", torch.float32, autocast=autocast, hidden=hidden, clip=clip
    )
    assert torch.isfinite(weights).all()
    assert "nan" not in str(engine.diagnostics())


@pytest.mark.parametrize("options", [{"history_dtype": torch.bfloat16}, {"secure_noise": False}])
@pytest.mark.parametrize("name", METHODS)
def test_other_histories_and_noises_run(name, options):
    weights, _ = trained(name, "cuda", torch.float32, **options)
    assert torch.isfinite(weights).all()
