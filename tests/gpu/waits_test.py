"""How often the host waits for the device in a step, method by method: counted by torch itself.

CI has no GPU and skips.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.gradients.kernels import fused
from vestige.methods import FO, SMA, resolve

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")
STEPS = 6


def waits(method, dtype=torch.float32, **options):
    """The waits in forward pass, backward pass and step of each step but the first two."""
    torch.manual_seed(0)
    layers = (nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    model = nn.Sequential(*layers).to("cuda", dtype)
    x, y = torch.randn(32, 40, device="cuda", dtype=dtype), torch.arange(32, device="cuda") % 5
    method = resolve(method)
    model, optimizer, loader = PrivacyEngine("rdp").make_private(
        module=model,
        optimizer=method.make_optimizer(model.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        method=method,
        **options,
    )
    found = []
    for _ in range(STEPS):
        for inputs, labels in loader:
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            found.append(sum("synchronizing CUDA operation" in str(w.message) for w in seen))
    return found[2:]


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-adambc", "disk", "doppler"])
def test_what_has_no_memory_never_waits(method):
    assert max(waits(method)) == 0


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("history", [None, torch.bfloat16])
@pytest.mark.parametrize("method", [FO(window=3), SMA(window=3, refresh=100)])
def test_a_memory_waits_once_for_its_products(method, history, clipping):
    assert waits(method, clipping=clipping, history_dtype=history) == [1] * (STEPS - 2)


def test_the_exponents_of_one_step_are_read_in_that_step_alone():
    each = waits(SMA(window=3, refresh=3))  # of steps 2 to 5; those for step 4 at the end of 3
    assert each == [1, each[1], 1, 1] and each[1] > 1


def test_master_weights_wait_once():
    options = {"dtype": torch.bfloat16, "master_weights": True}
    assert waits("dp-sgd", **options) == [1] * (STEPS - 2)
    assert waits("dp-adam", **options) == [1] * (STEPS - 2)


def test_moving_bounds_wait_once_for_their_counts():
    assert waits("dp-sgd", clipping="quantile") == [1] * (STEPS - 2)
