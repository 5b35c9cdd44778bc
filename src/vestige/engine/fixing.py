"""`fix`: a model in which examples meet in a batch norm, as one in which they do not.

Guarantee: what a norm's class does beside normalising is kept or refused, never dropped. A class
derived from torch's is compared with it on random numbers, in training and in evaluation.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from vestige.errors import UnsupportedModel

_GROUPS = 32
_TOGETHER = 8  # channels at least: a map of one place has no other values to normalise over
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_PROBES: dict[Any, tuple[int, ...]] = {  # what a norm of each class is given beside its channels
    nn.BatchNorm1d: (5,),
    nn.BatchNorm2d: (3, 2),
    nn.BatchNorm3d: (3, 2, 2),
    nn.SyncBatchNorm: (3, 2),
}


def fix(model: nn.Module) -> nn.Module:
    """A copy of the model with BatchNorm replaced by GroupNorm and no running statistics.

    Affine weights keep their values and names. The original is left alone; build the optimizer
    from the copy. Groups have at least eight channels, because on a 1x1 map a channel by itself
    would become its bias; there are at most 32 (one for BatchNorm1d and SyncBatchNorm, whose
    inputs may have no other axis to normalise over). A batch norm with an activation inside keeps
    it; one that does anything else is refused. One that is frozen (`is_frozen`) is a constant map
    of every row, and stays.
    """
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UnsupportedModel(
            "the model has lazy modules without a shape: run the model once on a batch of zeros "
            "under torch.no_grad(), then fix it."
        )
    return _fixed(copy.deepcopy(model), "", {})


def is_frozen(norm: _BatchNorm) -> bool:
    """Whether it normalises by fixed numbers: in eval(), with statistics, and nothing to train."""
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    trained = any(p.requires_grad for p in norm.parameters())
    return has_statistics and not norm.training and not trained


def _fixed(module: nn.Module, name: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:  # a layer that is used in two places is still one layer
        return done[module]
    done[module] = module
    if isinstance(module, _BatchNorm):
        if not is_frozen(module):
            done[module] = _replacement(module, name)
        return done[module]
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    for key, child in module._modules.items():
        if child is not None:
            module._modules[key] = _fixed(child, f"{name}.{key}".lstrip("."), done)
    return module


class GroupNormThen(nn.GroupNorm):
    """A GroupNorm, then the modules that the batch norm had inside, under the names they had."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise, and hand it on from module to module."""
        out = super().forward(input)
        for module in self.children():
            out = module(out)
        return out


def _replacement(norm: _BatchNorm, name: str) -> nn.GroupNorm:
    where = f"module {name or '(root)'!r} ({type(norm).__name__})"
    if type(norm) not in _PROBES and not _normalises_first(norm):
        raise UnsupportedModel(
            f"{where} is a batch norm that does something of its own, which a GroupNorm in its "
            "place would drop: replace it by nn.GroupNorm and the rest yourself, or freeze it "
            "(.eval().requires_grad_(False))."
        )
    channels = norm.num_features
    images = isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d)
    groups = math.gcd(_GROUPS, channels) if images else 1
    while groups > 1 and channels // groups < _TOGETHER:
        groups //= 2
    made = GroupNormThen if norm._modules else nn.GroupNorm
    replacement = made(groups, channels, eps=norm.eps, affine=norm.affine)
    for key in ("weight", "bias"):
        old = getattr(norm, key)
        if old is not None:
            setattr(replacement, key, nn.Parameter(old.detach().clone(), old.requires_grad))
    replacement._modules.update(norm._modules)
    replacement.training = norm.training
    return replacement


def _normalises_first(norm: _BatchNorm) -> bool:
    """Whether a class derived from torch's normalises, applies its modules in order, and no more.

    Tried on a copy with random weights: those of a new model may hide what is there.
    """
    base = next((kind for kind in type(norm).__mro__ if kind in _PROBES), None)
    ours = set(norm._parameters) <= {"weight", "bias"} and set(norm._buffers) <= _STATISTICS
    if base is None or not ours:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        twin = copy.deepcopy(norm).to_empty(device="cpu").double()
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_() if tensor.dtype == torch.long else tensor.uniform_(0.5, 2)
        x = 3 * torch.randn(4, norm.num_features, *_PROBES[base], dtype=torch.float64)
        # SyncBatchNorm waits for other processes in training, where it has them.
        modes = (False,) if base is nn.SyncBatchNorm else (False, True)
        return all(_agree(twin.train(mode), base, x) for mode in modes)


def _agree(norm: _BatchNorm, base: Any, x: Tensor) -> bool:
    """Whether the norm gives what its base and its modules give one after the other."""
    try:
        torch.manual_seed(0)
        given = norm.forward(x.clone())
        torch.manual_seed(0)
        expected = base.forward(norm, x.clone())
        for module in norm.children():
            expected = module(expected)
    except Exception:  # whatever its own code raises: it is not understood
        return False
    same = isinstance(given, Tensor) and given.shape == expected.shape
    return same and torch.allclose(given, expected, rtol=1e-6, atol=1e-6)
