"""What a model, an optimizer and a loss must be for private training, and `fix`, which helps."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from vestige.errors import ConfigError, UnsupportedModel

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_model(module: Any) -> None:
    """Refuse a model whose examples meet in a layer, naming the layer and the remedy."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: pass a torch.nn.Module.")
    if isinstance(module, _WRAPPERS):
        raise UnsupportedModel(
            f"the model is wrapped in {type(module).__name__}, which adds up gradients outside "
            "the clipped sum: pass the module inside it."
        )
    for name, part in module.named_modules():
        where = f"module {name or '(root)'!r} ({type(part).__name__})"
        if isinstance(part, _BatchNorm):
            raise UnsupportedModel(
                f"{where} normalises over the batch, so no example has a gradient of its own and "
                "its running statistics leak: use vestige.fix(model), which puts GroupNorm there, "
                "and build the optimizer from the fixed model."
            )
        if isinstance(part, _InstanceNorm) and part.track_running_stats:
            raise UnsupportedModel(
                f"{where} keeps running statistics of private examples: build it with "
                "track_running_stats=False, or use vestige.fix(model)."
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _check_parameter(name, parameter)
    devices = {p.device for p in module.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"trainable parameters are on several devices ({', '.join(map(str, devices))}): "
            "move the model to one."
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise UnsupportedModel(
            f"parameter {name!r} of a lazy module has no shape yet: run the model once on a batch "
            "of zeros under torch.no_grad(), then build the optimizer."
        )
    if not parameter.is_floating_point():
        raise UnsupportedModel(
            f"parameter {name!r} has dtype {parameter.dtype}: only real floating point "
            "parameters can be trained privately; freeze it."
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedModel(
            f"parameter {name!r} has layout {parameter.layout}: only dense parameters can be "
            "trained privately; use .to_dense(), or freeze it."
        )
    if not torch.isfinite(parameter.detach()).all():
        raise ConfigError(
            f"parameter {name!r} holds NaN or infinity, so that no example has a gradient: "
            "initialise the model again."
        )


def fix(model: nn.Module) -> nn.Module:
    """A copy of the model with BatchNorm replaced by GroupNorm and no running statistics.

    Affine weights are kept. The original is left alone; build the optimizer from the copy. The
    number of groups is the largest common divisor of 32 and the channels (one group where
    the inputs may have no other axis to normalise over: BatchNorm1d, SyncBatchNorm).
    """
    model = copy.deepcopy(model)
    return _fixed(model)


def _fixed(module: nn.Module) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return _group_norm(module)
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    for name, child in module.named_children():
        replacement = _fixed(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    images = isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d)
    groups = math.gcd(32, channels) if images else 1
    replacement = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    for name in ("weight", "bias"):
        old = getattr(norm, name)
        if old is not None:
            setattr(replacement, name, nn.Parameter(old.detach().clone(), old.requires_grad))
    return replacement.train(norm.training)


def check_optimizer(optimizer: Any, module: nn.Module) -> None:
    """The optimizer must move the model's trainable parameters, all of them and nothing else."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch.optim optimizer."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times a step, and each time would be a release of "
            "its own: use a first-order optimizer (SGD, Adam, ...)."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {id(p): name for name, p in module.named_parameters()}
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ConfigError(
            f"the optimizer does not hold trainable parameters of the model: {', '.join(missing)}. "
            "Give them to the optimizer, or freeze them (requires_grad_(False)). If the model was "
            "moved, wrapped or fixed after the optimizer was built, build the optimizer again."
        )
    strangers = len(held - set(named))
    if strangers:
        raise ConfigError(
            f"the optimizer holds {strangers} tensors that are not parameters of the model: their "
            "gradients would bypass the noise. Give the optimizer model.parameters() only."
        )


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """Refuse a loss that visibly couples examples or contradicts the declared reduction."""
    if loss_reduction not in ("mean", "sum"):
        raise ConfigError(
            f"loss_reduction={loss_reduction!r} must be 'mean' (the loss is the average of the "
            "batch's rows) or 'sum'; for one loss per row call engine.backward(losses)."
        )
    if criterion is None:
        return
    name = type(criterion).__name__
    declared = getattr(criterion, "reduction", None)
    averaged = declared in ("mean", "batchmean")
    if declared in ("mean", "sum", "batchmean") and averaged != (loss_reduction == "mean"):
        raise ConfigError(
            f"criterion {name} has reduction={declared!r} but loss_reduction={loss_reduction!r}: "
            "an example's weight would depend on how many others are in its lot. Make them agree."
        )
    counted = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if counted and averaged and criterion.weight is not None:
        raise ConfigError(
            f"criterion {name} divides by the class weights of the whole batch, which couples the "
            "examples: use reduction='sum', or reduction='none' with engine.backward(losses)."
        )
    if counted and averaged and criterion.ignore_index >= 0:
        raise ConfigError(
            f"criterion {name} divides by the number of targets that are not ignore_index="
            f"{criterion.ignore_index}, which couples the examples: use reduction='sum', or "
            "reduction='none' and a mean within each row with engine.backward(losses)."
        )
