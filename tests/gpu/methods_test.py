"""Methods with memory on a GPU: the CPU's numbers, autocast around the whole step, bf16 history.

CI has no GPU and skips; docs/benchmarks.md says where these ran.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_runs import closure_of, small
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


def test_dropout_on_the_gpu_is_secret_and_its_generator_is_given_back():
    """A known seed does not determine masks; two physical batches share none; test mode repeats."""

    def masks(noise_seed=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2)).cuda()
        seen = []
        model[1].register_forward_hook(lambda module, given, out: seen.append((out != 0).cpu()))
        x, y = torch.ones(16, 3).cuda(), torch.zeros(16, dtype=torch.long).cuda()
        engine = PrivacyEngine("rdp", noise_seed=noise_seed)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=8,
            self_check=False,
        )
        torch.manual_seed(0)
        before = torch.cuda.get_rng_state()
        for a, b in loader:
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            assert torch.equal(torch.cuda.get_rng_state(), before)
        engine.detach()
        return seen

    first, second = masks(), masks()
    for one, other in ((first[0], first[1]), (first[0], second[0]), (first[1], second[1])):
        assert not torch.equal(one, other)
    assert all(map(torch.equal, masks(7), masks(7)))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_checkpointed_blocks_on_a_gpu_give_the_plain_model_s_weights(autocast):
    """There the backward pass, and so the second run of a block, has a thread of its own."""

    class Blocks(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.on = on
            self.first, self.last = nn.Linear(25, 32), nn.Linear(32, 3)
            self.inner = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))

        def forward(self, x):
            h = self.first(x)
            run = partial(checkpoint, self.inner, use_reentrant=False) if self.on else self.inner
            return self.last(run(h))

    weights = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Blocks(on).cuda()
        x, y = torch.randn(40, 25, device="cuda"), torch.arange(40, device="cuda") % 3
        model, optimizer, loader = PrivacyEngine("rdp", noise_seed=3).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
            noise_multiplier=0.7,
            max_grad_norm=1.0,
        )
        for a, b in loader:
            with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
                loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-5, atol=1e-6)
