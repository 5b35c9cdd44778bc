"""What a model, an optimizer and a loss must be for private training."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from vestige.engine.fixing import is_frozen
from vestige.engine.shard_checks import check_shards
from vestige.errors import ConfigError, UnsupportedModel
from vestige.gradients.shards import own_part

_MANY = 1000
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(module: Any, optimizer: Any) -> tuple[Any, Any]:
    """The model and the optimizer inside the wrappers of Accelerate and Fabric, which call them."""
    if type(module).__module__ == "lightning.fabric.wrappers":
        module = module.module
    while type(optimizer).__module__.partition(".")[0] in ("accelerate", "lightning"):
        optimizer = optimizer.optimizer
    return module, optimizer


def uncompiled(module: Any, compile: bool) -> Any:
    """The model inside torch.compile's wrapper, to be compiled with the rules for its gradients.

    What `module.compile()` left is put aside when the engine hooks into the model.
    """
    parts = list(module.named_modules()) if isinstance(module, nn.Module) else []
    for name, part in parts:
        wrapped = type(part).__name__ == "OptimizedModule"
        in_place = getattr(part._compiled_call_impl, "__module__", "").startswith("torch.")
        if (wrapped or in_place) and not (compile and part is module):
            name = name.replace("_orig_mod", "").strip(".") or "(root)"
            raise UnsupportedModel(
                f"module {name!r} was compiled by torch.compile, which hides its operations from "
                "the rules for per-example gradients: leave it as it was, and give make_private "
                "compile=True, which compiles the whole model with them."
            )
    return module._orig_mod if parts and type(module).__name__ == "OptimizedModule" else module


def check_model(module: Any) -> None:
    """Refuse a model whose examples meet in a layer, naming the layer and the remedy."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}: pass a torch.nn.Module.")
    for name, part in module.named_modules():
        if isinstance(part, _WRAPPERS) or type(part).__name__ == "FullyShardedDataParallel":
            where = f"module {name!r}" if name else "the model"
            raise UnsupportedModel(
                f"{where} is wrapped in {type(part).__name__}, which adds up gradients outside "
                "the clipped sum: pass the module inside it."
            )
    check_shards(module)
    for name, part in module.named_modules():
        where = f"module {name or '(root)'!r} ({type(part).__name__})"
        trained = any(p.requires_grad for p in part.parameters())
        if isinstance(part, torch.jit.ScriptModule) and trained:
            raise UnsupportedModel(
                f"module {name or '(root)'!r} is TorchScript, which hides its operations from the "
                "rules for per-example gradients: pass the module that it was made from."
            )
        if isinstance(part, _BatchNorm) and not is_frozen(part):
            raise UnsupportedModel(
                f"{where} normalises over the batch, so no example has a gradient of its own and "
                "its running statistics leak: use vestige.fix(model), which puts GroupNorm there, "
                "and build the optimizer from the fixed model, or freeze it: "
                ".eval().requires_grad_(False)."
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
    if not torch.isfinite(own_part(parameter)).all():
        raise ConfigError(
            f"parameter {name!r} holds NaN or infinity, so that no example has a gradient: "
            "initialise the model again."
        )


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


def check_criterion(criterion: Any, loss_reduction: str, module: nn.Module | None = None) -> None:
    """Refuse a loss that visibly couples examples, trains something of its own besides `module`,
    or contradicts the declared reduction."""
    if loss_reduction not in ("mean", "sum"):
        raise ConfigError(
            f"loss_reduction={loss_reduction!r} must be 'mean' (the loss is the average of the "
            "batch's rows) or 'sum'; for one loss per row call engine.backward(losses)."
        )
    if criterion is None:
        return
    declared = getattr(criterion, "reduction", None)
    averaged = declared in ("mean", "batchmean")
    if declared in ("mean", "sum", "batchmean") and averaged != (loss_reduction == "mean"):
        raise ConfigError(
            f"criterion {type(criterion).__name__} has reduction={declared!r} but loss_reduction="
            f"{loss_reduction!r}: an example's weight would depend on how many others are in its "
            "lot. Make them agree."
        )
    known = {id(part) for part in (*module.modules(), *module.parameters())} if module else set()
    for part in _parts(criterion, known):
        _check_part(part)


def _parts(criterion: Any, seen: set[int]) -> Iterator[Any]:
    """The criterion, and what can be seen inside: submodules, partials, closures, attributes."""
    todo = [criterion]
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, Mapping | list | tuple) and len(part) > _MANY:
            continue  # data, not settings
        if isinstance(part, nn.Module):
            todo += part.modules()
        elif isinstance(part, functools.partial):
            todo += (part.func, *part.args, *part.keywords.values())
        elif isinstance(part, Mapping):
            todo += part.values()
        elif isinstance(part, list | tuple):
            todo += part
        if callable(part):
            todo += [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
            todo += [getattr(part, name, None) for name in ("__self__", "__wrapped__")]
            todo += getattr(part, "__defaults__", None) or ()
            todo += vars(part).values() if hasattr(part, "__dict__") else ()


def _check_part(part: Any) -> None:
    """Refuse one part of a criterion that couples examples or trains something of its own."""
    name = type(part).__name__
    if isinstance(part, nn.Module):
        trained = [key for key, p in part.named_parameters() if p.requires_grad]
        if trained:
            raise ConfigError(
                f"criterion {name} trains parameters of its own ({', '.join(trained)}), whose "
                "gradients are raw sums over private rows: freeze them (requires_grad_(False)), or "
                "make them parameters of the model."
            )
    elif isinstance(part, Tensor) and part.requires_grad:
        raise ConfigError(
            f"criterion trains a tensor of shape {tuple(part.shape)}, whose gradient is a raw sum "
            "over private rows: freeze it (requires_grad_(False)), or make it a parameter of the "
            "model."
        )
    settings = vars(part) if isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss) else None
    weight = getattr(part, "weight", None) if settings else None
    if isinstance(part, functools.partial) and part.func in (F.cross_entropy, F.nll_loss):
        name, settings = f"partial({part.func.__name__})", part.keywords
        weight = settings.get("weight", part.args[2] if len(part.args) > 2 else None)
    if settings is None or settings.get("reduction", "mean") != "mean":
        return
    if weight is not None:
        raise ConfigError(
            f"criterion {name} divides by the class weights of the whole batch, which couples the "
            "examples: use reduction='sum', or reduction='none' with engine.backward(losses)."
        )
    ignored = settings.get("ignore_index", -100)
    if ignored >= 0:
        raise ConfigError(
            f"criterion {name} divides by the number of targets that are not ignore_index="
            f"{ignored}, which couples the examples: use reduction='sum', or "
            "reduction='none' and a mean within each row with engine.backward(losses)."
        )
