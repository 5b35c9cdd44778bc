"""Half-precision weights that are moved in float32, against a loop with the same releases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.loops import epoch, private, records
from vestige import PrivacyEngine
from vestige.errors import ConfigError

DTYPES = [torch.bfloat16, torch.float16]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
}


def narrow(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype):
    x, y = records().tensors
    return torch.utils.data.TensorDataset(x.to(dtype), y)


def run(dtype, name="sgd", engine=None, epochs=3, model=None, path=None, **options):
    """A run with master weights: the engine, the model, and every release over the lot."""
    model = model or narrow(dtype)
    optimizer, gradients = OPTIMIZERS[name](model.parameters()), []
    engine, *rest = private(
        model, data(dtype), 6, optimizer, engine, master_weights=True, **options
    )
    if path is not None and path.exists():
        engine.load_checkpoint(path)

    def after():
        gradients.append(engine.door.last[0].clone() / 6)

    for _ in range(epochs):
        epoch(*rest, after)
    return engine, model, gradients


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_float32_rounded(dtype, name):
    """The same releases, put into a float32 model by hand."""
    engine, model, gradients = run(dtype, name)
    twin = narrow(dtype).float()
    optimizer = OPTIMIZERS[name](twin.parameters())
    for gradient in gradients:
        parts = gradient.split([p.numel() for p in twin.parameters()])
        for parameter, part in zip(twin.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
    masters = engine.parts["master_weights"].masters
    for (slot, ours), theirs, master in zip(
        model.named_parameters(), twin.parameters(), masters.values(), strict=True
    ):
        assert ours.dtype == dtype and torch.equal(ours, theirs.to(dtype)), slot
        assert torch.equal(master, theirs)


def test_without_them_small_steps_are_lost():
    start = narrow(torch.bfloat16)
    _, kept, _ = run(torch.bfloat16)
    model = narrow(torch.bfloat16)
    _, *rest = private(model, data(torch.bfloat16), 6, torch.optim.SGD(model.parameters(), lr=1e-5))
    epoch(*rest)
    assert torch.equal(model[2].weight, start[2].weight)  # below the last bit
    assert not torch.equal(kept[2].weight, start[2].weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_keeps_both(tmp_path, name):
    whole, straight, _ = run(torch.bfloat16, name, PrivacyEngine(noise_seed=3), epochs=4)
    path = tmp_path / "run.pt"
    first, _, _ = run(torch.bfloat16, name, PrivacyEngine(noise_seed=3), epochs=2)
    first.save_checkpoint(path)
    second, resumed, _ = run(
        torch.bfloat16, name, PrivacyEngine(noise_seed=3), 2, narrow(torch.bfloat16, 9), path
    )
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    one, other = (e.parts["master_weights"].masters for e in (whole, second))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_weights_that_somebody_loads_are_gone_on_from():
    engine, model, _ = run(torch.bfloat16, epochs=1)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    part = engine.parts["master_weights"]
    part.released(None, _Moves())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    part.stepped()
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 0.5))
    assert torch.equal(part.masters["0.weight"], model[0].weight.detach().float())


@pytest.mark.parametrize("value", [0.5, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_weights_that_were_loaded_are_copied(dtype, value):
    """Written through .data, which no version counts."""
    engine, model, _ = run(dtype, epochs=2)
    part = engine.parts["master_weights"]
    kept = {name: master.clone() for name, master in part.masters.items()}
    model[2].bias.data[1] = value
    part.released(None, _Moves())
    part.stepped()
    for name, master in part.masters.items():
        if name == "2.bias":
            assert torch.equal(master.nan_to_num(9), model[2].bias.float().nan_to_num(9))
            assert model[2].bias.dtype == dtype and model[2].bias[1].isnan() == (value != value)
        else:
            assert torch.equal(master, kept[name])
            assert not torch.equal(master, master.to(dtype).float())


class _Moves:
    withheld = False


def test_a_step_that_fails_leaves_the_models_own_tensors():
    model = narrow(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _, loader = private(model, data(torch.bfloat16), 6, optimizer, master_weights=True)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = "broken"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    x, y = next(batches)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.released == 2


def test_a_model_in_single_precision_needs_none():
    with pytest.raises(ConfigError, match=r"master_weights=True for a model without .* bfloat16"):
        private(master_weights=True)
