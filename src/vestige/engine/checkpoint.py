"""Checkpoints: everything a run needs to go on, in a file that appears whole or not at all.

    first line    "vestige checkpoint 1"
    second line   the SHA-256 of the rest
    the rest      plain numbers, strings and tensors, by torch.save; read with weights_only=True

The file holds weights, the optimizer's state, past releases and the ledger: all of it is public.
The state of torch's generators as the user's loop sees them, and in test mode the noise seed, are
kept apart, in a file NAME.DIGEST.secret beside it, which only its owner can read and nobody should
share. Keys of noise, lots and masks, what the model's own dropout drew, and vectors of correlated
noise, are in neither: a run that goes on has a new key, so a checkpoint that is continued twice
never draws the same noise twice.

Guarantee: no example is in either file. A crash at any moment leaves the earlier checkpoint or the
new one, with its secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from vestige.errors import ConfigError, StorageError
from vestige.files import write_whole

_FIRST = b"vestige checkpoint 1\n"
_PARTS = {"engine", "model", "optimizer", "optimizer_class", "data", "others"}


def write(path: Path, state: Mapping[str, Any], secret: Mapping[str, Any]) -> None:
    """Put a checkpoint and its secrets in place of the one that is there."""
    payload = io.BytesIO()
    torch.save(_portable(state, "checkpoint"), payload)
    digest = hashlib.sha256(payload.getvalue()).hexdigest()
    beside = _secret_path(path, digest)
    try:
        # The secrets first: a checkpoint that is there has its secrets.
        write_whole(beside, json.dumps(secret).encode(), mode=0o600)
        write_whole(path, _FIRST + digest.encode() + b"\n" + payload.getvalue())
    except OSError as error:
        raise StorageError(
            f"the checkpoint {str(path)!r} cannot be written ({error.strerror}): the earlier one, "
            "if there is one, is intact. Make room, or make the folder writable, and resume."
        ) from error
    for old in _secrets_of(path):
        if old != beside:
            old.unlink(missing_ok=True)


def _portable(value: Any, name: str) -> Any:
    """`value` out of what weights_only=True reads back; ConfigError for anything else."""
    if value is None or isinstance(value, Tensor | torch.dtype | torch.device):
        return value
    if type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        kept = {
            _portable(key, f"a key of {name}"): _portable(item, f"{name}[{key!r}]")
            for key, item in value.items()
        }
        return Counter(kept) if isinstance(value, Counter) else kept
    if isinstance(value, list | tuple | set) and not hasattr(value, "_fields"):
        return type(value)(_portable(item, name) for item in value)
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, "
        "strings, tensors, and lists or dictionaries of them."
    )


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A checkpoint and its secrets, None where they are not there; ConfigError if damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the checkpoint {str(path)!r} cannot be read ({error.strerror}): give a file that "
            "save_checkpoint wrote, or a run folder to `vestige resume`."
        ) from error
    first, rest = data[: len(_FIRST)], data[len(_FIRST) :]
    if first != _FIRST:
        raise ConfigError(
            f"{str(path)!r} is no checkpoint of this version of Vestige: it begins with "
            f"{first[:24]!r}, not with {_FIRST.decode().strip()!r}."
        )
    said, payload = rest[:64], rest[65:]
    digest = hashlib.sha256(payload).hexdigest()
    if rest[:65] != digest.encode() + b"\n":
        raise ConfigError(
            f"the checkpoint {str(path)!r} is damaged: its hash is {digest[:12]}, not "
            f"{said[:12].decode(errors='replace')}. Use an earlier copy."
        )
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"the checkpoint {str(path)!r} holds something else than numbers and tensors "
            f"({type(error).__name__}): it was not written by save_checkpoint."
        ) from error
    parts = set(state) if isinstance(state, dict) else set()
    mappings = parts >= _PARTS and all(
        isinstance(state[name], Mapping) for name in _PARTS - {"optimizer_class"}
    )
    if not mappings:
        raise ConfigError(
            f"the checkpoint {str(path)!r} lacks parts of a run: it was not written by "
            "save_checkpoint."
        )
    return state, _read_secret(_secret_path(path, digest))


def saved_noise(path: Path) -> Any:
    """The noise multiplier of the run that was saved; ConfigError where there is none."""
    plan = read(path)[0]["engine"].get("plan")
    if not isinstance(plan, Mapping) or "noise_multiplier" not in plan:
        raise ConfigError(
            f"the checkpoint {str(path)!r} has no noise multiplier: it was not written by "
            "save_checkpoint."
        )
    noise = plan["noise_multiplier"]
    return tuple(noise) if isinstance(noise, list) else noise


def remove(path: Path) -> None:
    """Delete a checkpoint and its secrets, if they are there."""
    for file in (*_secrets_of(path), path, path.with_name(f".{path.name}.partial")):
        file.unlink(missing_ok=True)


def check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse weights of another model, naming what differs."""
    ours = {k: _shape(v) for k, v in model.state_dict().items()}
    theirs = {k: _shape(v) for k, v in saved.items()}
    different = sorted(
        (k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)), key=str
    )
    if different:
        shown = "; ".join(
            f"{k}: {theirs.get(k, 'absent')} -> {ours.get(k, 'absent')}" for k in different[:4]
        )
        more = f" and {len(different) - 4} more" if len(different) > 4 else ""
        raise ConfigError(
            f"the checkpoint is of another model ({shown}{more}): build the model that it was "
            "saved from."
        )


def check_optimizer(saved: Mapping[str, Any], name: str, optimizer: Optimizer) -> None:
    """Refuse the state of another optimizer."""
    if name != type(optimizer).__name__:
        raise ConfigError(
            f"the checkpoint is of the optimizer {name}, not of {type(optimizer).__name__}: use "
            "the same one."
        )
    groups = saved.get("param_groups")
    theirs = [
        len(group["params"])
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
    ]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ConfigError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this one of {ours}: "
            "build it in the same way."
        )


def check_data(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with other data, as far as its public facts tell."""
    different = sorted(
        (k for k in saved.keys() | ours.keys() if not same(saved.get(k), ours.get(k))), key=str
    )
    if different:
        shown = "; ".join(f"{k}: {saved.get(k)} -> {ours.get(k)}" for k in different)
        raise ConfigError(
            f"the checkpoint is about other data ({shown}): go on with the data that the run began "
            "with."
        )


def same(saved: Any, ours: Any) -> bool:
    """Whether two plain values are equal; what cannot be compared (a tensor) is not."""
    try:
        return bool(saved == ours)
    except (RuntimeError, ValueError):
        return False


def row_facts(dataset: Any) -> dict[str, Any]:
    """The public shape of a row, where it is known without looking at one."""
    if type(dataset) is not TensorDataset:
        return {}
    return {"rows": [f"{list(t.shape[1:])} {t.dtype}" for t in dataset.tensors]}


def generators() -> dict[str, Any]:
    """The state of torch's generators between two lots, for what the user's loop draws itself.

    Masks inside the model are a function of the key and the lot, and need no state.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
    }


def restore_generators(secret: Mapping[str, Any]) -> None:
    """Set torch's generators as they were; those of GPUs only where there are as many."""
    torch.set_rng_state(_tensor(secret["torch"]))
    cuda = secret["cuda"]
    if cuda and torch.cuda.is_available() and torch.cuda.device_count() == len(cuda):
        with contextlib.suppress(RuntimeError):  # of another kind of GPU
            torch.cuda.set_rng_state_all([_tensor(state) for state in cuda])


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _shape(value: Any) -> str:
    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{shape} {getattr(value, 'dtype', '')}".strip()


def _secret_path(path: Path, digest: str) -> Path:
    return path.with_name(f"{path.name}.{digest[:12]}.secret")


def _secrets_of(path: Path) -> list[Path]:
    """The secrets of this checkpoint's files, also those that a crash has left half written."""
    name = re.compile(rf"\.?{re.escape(path.name)}\.[0-9a-f]{{12}}\.secret(\.partial)?")
    return sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))


def _read_secret(path: Path) -> dict[str, Any] | None:
    try:
        secret = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(secret, dict) or set(secret) != {"torch", "cuda", "noise_seed"}:
        return None
    states = [secret["torch"], *(secret["cuda"] if isinstance(secret["cuda"], list) else [None])]
    hexadecimal = all(isinstance(s, str) and re.fullmatch("([0-9a-f]{2})*", s) for s in states)
    seed = secret["noise_seed"] is None or type(secret["noise_seed"]) is int
    whole = hexadecimal and len(secret["torch"]) == 2 * torch.get_rng_state().numel()
    return secret if whole and seed else None
