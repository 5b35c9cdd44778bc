"""Features that were learned from images of a random process, and their making.

A WRN-16-4 learns to tell dead-leaves images apart, whatever part of one it is shown and in whatever
light: views of one image are to lie together on the sphere, and those of different ones apart
(Wang and Isola, arXiv 2005.10242). Baradad et al. (arXiv 2106.05963) learn so from noise, and Tang
et al. (DP-RandP, arXiv 2306.06076) put private training behind it.

Guarantee: the weights are a function of public settings: no data have a part in them. A run that
learns on the features is charged for its own head alone.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.train.interrupt import Interrupt
from vestige.train.recipes.dead_leaves import dead_leaves, two_views
from vestige.train.recipes.pretraining import PRIOR_FILE, Pretraining
from vestige.train.recipes.wide_resnet import wide_resnet

_GRID = 2  # what is learned on: means of the last maps over a grid
_RATE, _DECAY, _WARM = 1e-3, 1e-2, 0.05
_KEPT_EVERY = 60.0  # seconds
_VERSION = 1


class Prior(nn.Module):
    """The trunk of WRN-16-4 on images of any size, colour or grey, with pixels in [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*list(wide_resnet((3, 32, 32), 1).children())[:-3])

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 1024): the mean of each map in each quarter of the image."""
        maps: Tensor = self.trunk(x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x)
        return F.adaptive_avg_pool2d(maps, _GRID).flatten(1)


def pretrained(file: Path | None, data_dir: Path | None) -> dict[str, Tensor]:
    """The weights of the features: those in `file`, or in prior.pt where benchmark sets lie."""
    folders = [data_dir, os.environ.get("VESTIGE_DATA") or None]
    places = [file] if file else [Path(folder) / PRIOR_FILE for folder in folders if folder]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = ", ".join(repr(str(place)) for place in places) or "no folder of data is named"
        raise ConfigError(
            f"the features prior have no weights ({looked}): make them once with vestige prior "
            f"{PRIOR_FILE}, which needs no data, and give the file as weights."
        )
    held = _read(path)
    if held["learner"] is not None:
        raise ConfigError(
            f"{str(path)!r} is unfinished, at step {held['step']} of {held['settings']['steps']}: "
            "give the command that began it again, until it is done."
        )
    weights: dict[str, Tensor] = held["weights"]
    return weights


def begin_from(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a WRN-16-4 these weights in all layers but the last, to go on learning from there."""
    own = {name.removeprefix("trunk."): value for name, value in weights.items()}
    try:
        missing, _ = model.load_state_dict(own, strict=False)
    except RuntimeError as error:
        raise ConfigError(
            "the weights of vestige prior are for RGB images: leave them out, or take --features "
            "prior, which takes grey ones too."
        ) from error
    assert len(missing) == 2, missing  # the head


def pretrain(settings: Pretraining, tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Begin, go on, or say that nothing is left. `tell` hears the steps that are done, and all."""
    from vestige.train.training import device_of

    device, path = device_of(settings.device), settings.file
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        learner = _Learner(settings).to(device)
    held = _read(path) if path.exists() else None
    step = 0
    if held is not None:
        if held["settings"] != settings.public:
            raise ConfigError(
                f"{str(path)!r} was begun with {held['settings']}: give these, or another file."
            )
        step = held["step"]
        learner.restore(held)
    began = kept = time.monotonic()
    with Interrupt() as interrupt:
        while step < settings.steps:
            learner.learn(step)
            step += 1
            tell(step, settings.steps)
            now = time.monotonic()
            late = settings.minutes is not None and now - began > 60 * settings.minutes
            if step == settings.steps or late or interrupt.pending or now - kept > _KEPT_EVERY:
                _write(path, learner, settings, step)
                kept = now
            if late or interrupt.pending:
                break
    done, pressed = step == settings.steps, interrupt.pending
    return {"file": str(path), "step": step, **settings.public, "done": done} | {
        "interrupted": pressed and not done
    }


class _Learner(nn.Module):
    """The features with the head and the optimizer that only their making needs."""

    def __init__(self, settings: Pretraining) -> None:
        super().__init__()
        self.prior = Prior()
        width = 256
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=_RATE, weight_decay=_DECAY)
        self._settings = settings

    def learn(self, step: int) -> None:
        """One step on images that are a function of seed and step."""
        settings = self._settings
        device = next(self.parameters()).device
        seed = (settings.seed << 32) + 2 * step
        images = dead_leaves(settings.batch, settings.side * 3 // 2, seed, str(device))
        views = 2 * two_views(images, settings.side, seed + 1) - 1
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            points = self.head(self.prior.trunk(views).mean((2, 3)))
        points = F.normalize(points.float(), dim=1)
        one, other = points.chunk(2)
        together = (one - other).square().sum(1).mean()
        apart = sum(torch.pdist(half).square().mul(-2).exp().mean().log() for half in (one, other))
        warm, whole = _WARM * settings.steps, settings.steps
        for group in self.optimizer.param_groups:
            group["lr"] = (
                _RATE * min(1, (step + 1) / warm) * (1 + math.cos(math.pi * step / whole)) / 2
            )
        self.optimizer.zero_grad()
        (together + apart / 2).backward()
        self.optimizer.step()

    def restore(self, held: dict[str, Any]) -> None:
        """Take up what a file holds; of a finished one there is nothing to go on with."""
        if held["learner"] is not None:
            self.prior.load_state_dict(held["weights"])
            self.head.load_state_dict(held["learner"]["head"])
            self.optimizer.load_state_dict(held["learner"]["optimizer"])


def _write(path: Path, learner: _Learner, settings: Pretraining, step: int) -> None:
    left = {"head": learner.head.state_dict(), "optimizer": learner.optimizer.state_dict()}
    content = io.BytesIO()
    weights = {name: value.cpu() for name, value in learner.prior.state_dict().items()}
    torch.save(
        {
            "version": _VERSION,
            "settings": settings.public,
            "step": step,
            "weights": weights,
            "learner": None if step == settings.steps else left,
        },
        content,
    )
    write_whole(path, content.getvalue())


def _read(path: Path) -> dict[str, Any]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        Prior().load_state_dict(held["weights"])
        if held["version"] != _VERSION or not {"step", "settings", "learner"} <= held.keys():
            raise ValueError("of another version")
    except Exception as error:  # torch raises a dozen kinds on damaged bytes
        raise ConfigError(
            f"{str(path)!r} is no file of vestige prior ({type(error).__name__}): give another, or "
            "remove it and make it again."
        ) from error
    found: dict[str, Any] = held
    return found
