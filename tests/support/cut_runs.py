"""Short runs of the command's loop, and such that are cut off in the middle."""

from __future__ import annotations

import os

import pytest
import torch

from vestige.privacy.ledger_file import read
from vestige.release.door import Door
from vestige.train import training
from vestige.train.config import TrainConfig

STEPS = 17


SMALL = {
    "model": "linear",
    "train_size": 40,
    "test_size": 20,
    "lot": 8,
    "steps": STEPS,
    "accountant": "rdp",
    "device": "cpu",
    "noise_multiplier": 1.0,
    "checkpoint_every": 3,
}


def config(folder, **changes):
    return TrainConfig(**{**SMALL, "noise_seed": 5, "out": folder, **changes})


class Cut(Exception):  # noqa: N818
    """Stands for a crash: nothing after it is tidied up."""


def cut_off(folder, at, monkeypatch, **changes):
    """A run whose process dies in step `at`, after its noise was drawn."""
    release = Door.release

    def dying(door, *args, **kwargs):
        made = release(door, *args, **kwargs)
        if door.steps > at:
            os.close(door.ledger.file._file)
            door.ledger.file._closed = True
            raise Cut
        return made

    monkeypatch.setattr(Door, "release", dying)
    with pytest.raises(Cut):
        training.train(config(folder, **changes))
    monkeypatch.setattr(Door, "release", release)
    return folder


def weights(folder):
    return torch.cat([v.flatten() for v in torch.load(folder / "model.pt").values()])


def charged(folder):
    return sum(event.count for event in read(folder / "ledger.jsonl").events)


TRAIN = "train --model linear --train-size 40 --test-size 20 --lot 8 --accountant rdp"
