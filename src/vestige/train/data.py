"""Datasets: scikit-learn's digits, four benchmark sets, or the user's own .npz file.

Whatever shapes the data here is a public constant. Pixels are scaled by (x / 255 - 0.5) / 0.5 and
never by a mean or deviation of the data, and the number of classes of a known set comes from a
table. A user's file may state its number of classes; where it is read off the labels instead,
``Dataset.classes_inferred`` says so, and the privacy statement has to.
"""

import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vestige.checks import check_count, is_whole
from vestige.errors import ConfigError
from vestige.train.array_targets import class_count, columns, labels_of, outputs, stated_classes
from vestige.train.dataset import PLAIN, Dataset
from vestige.train.download import ENTRIES, Arrays, fetch, not_installed

__all__ = ["DATASETS", "Dataset", "inputs", "load", "load_ranges", "read_npz"]


@dataclass(frozen=True)
class _Facts:
    """What is public about a known set: its classes, the shape of an image, the whitest pixel."""

    classes: int
    shape: tuple[int, ...]
    white: int = 255


_KNOWN = {
    "digits": _Facts(10, (1, 8, 8), white=16),
    "mnist": _Facts(10, (1, 28, 28)),
    "cifar10": _Facts(10, (3, 32, 32)),
    "cifar100": _Facts(100, (3, 32, 32)),
    "svhn": _Facts(10, (3, 32, 32)),
}

DATASETS = tuple(_KNOWN)
"""The names that ``load`` knows; anything else is taken as the path of an .npz file."""


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
    download: bool = True,
    task: str = "classification",
) -> Dataset:
    """The dataset of that name, or the one in the .npz file at that path.

    A benchmark set is looked for as NAME.npz in ``data_dir``, then in the folder that the
    environment variable VESTIGE_DATA names, then in the download cache; at last it is downloaded,
    unless ``download`` is False. ``train_size`` and ``test_size`` keep the first examples of each
    split. ``seed`` fixes the split of digits (80 to 20), the only set without an official one; the
    split is public. ``task`` says what the y of an .npz file are.
    """
    for option, size in (("train_size", train_size), ("test_size", test_size)):
        if size is not None:
            check_count(option, size)
    if not is_whole(seed) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; it must be a whole number of at least 0.")

    facts = _KNOWN.get(name) if isinstance(name, str) else None
    if facts:
        arrays = _known_arrays(str(name), seed, data_dir, download)
    else:
        arrays = read_npz(_user_file(name))
    read = labels_of if task == "classification" else partial(columns, task=task)
    labels = {split: read(arrays, split) for split in ("train", "test")}
    stated = facts.classes if facts else stated_classes(arrays)
    if task == "classification":
        classes = class_count(labels, stated)
    else:
        classes = stated = outputs(labels)
    white = facts.white if facts else 255
    x_train, y_train = _first(arrays, labels["train"], "train", train_size, white)
    x_test, y_test = _first(arrays, labels["test"], "test", test_size, white)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ConfigError(
            f"x_train holds examples of shape {tuple(x_train.shape[1:])} and x_test of shape "
            f"{tuple(x_test.shape[1:])}; both splits must have the same."
        )
    if facts and (arrays["x_train"].dtype != np.uint8 or tuple(x_train.shape[1:]) != facts.shape):
        raise ConfigError(
            f"{name}.npz holds {arrays['x_train'].dtype} examples of shape "
            f"{tuple(x_train.shape[1:])}, but {name} is uint8 images of shape {facts.shape} "
            "(stored NHWC or NHW); for other data give the path of the .npz file as the dataset."
        )
    pixels = arrays["x_train"].dtype == np.uint8
    return Dataset(
        str(name),
        *(x_train, y_train, x_test, y_test),
        classes,
        classes_inferred=stated is None,
        task=task,
        preprocessing={"kind": "pixels", "white": white} if pixels else PLAIN,
        own=facts is None,
    )


def load_ranges(
    name: str,
    train: tuple[int, int],
    held_out: tuple[int, int],
    *,
    validation: bool = False,
    data_dir: str | Path | None = None,
    download: bool = True,
) -> Dataset:
    """The examples first, ..., end - 1 of a known set: `train` of its training split, and
    `held_out` of its test split as what is measured on.

    With `validation` the held-out examples are of the training split too, and the test split is not
    read from the file: what is tuned on such a dataset cannot have seen the test set.
    """
    if name not in _KNOWN:
        raise ConfigError(f"Unknown dataset {name!r}; choose one of {', '.join(DATASETS)}.")
    facts, other = _KNOWN[name], "train" if validation else "test"
    entries = tuple(entry for entry in ENTRIES if entry.endswith(("_train", f"_{other}")))
    arrays = _known_arrays(name, 0, data_dir, download, entries)

    def part(split: str, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
        first, end = span
        y = labels_of(arrays, split)
        if not 0 <= first < end <= len(y):
            raise ConfigError(
                f"the examples {first} to {end} of {name} are asked for, but its {split} split "
                f"holds {len(y)} examples; ask for fewer."
            )
        return inputs(arrays[f"x_{split}"][first:end], f"x_{split}", facts.white), y[first:end]

    x_train, y_train = part("train", train)
    x_other, y_other = part(other, held_out)
    return Dataset(name, x_train, y_train, x_other, y_other, facts.classes)


def read_npz(path: Path, entries: tuple[str, ...] = ENTRIES) -> Arrays:
    """The arrays x_train, y_train, x_test, y_test (and classes, if there) of an .npz file.

    Only `entries` are read and have to be there.
    """
    if not _holds(path.is_file):
        raise ConfigError(f"There is no readable file {path}; check the path of the dataset.")
    if not zipfile.is_zipfile(path):
        raise ConfigError(
            f"{path} is not an .npz file, or it is cut off; own data are CSV or parquet files, "
            "folders of images, or what numpy.savez(path, x_train=..., y_train=..., x_test=..., "
            "y_test=...) writes."
        )
    arrays: Arrays = {}
    try:
        _check_room(path, (*entries, "classes"))
        # Without pickle a data file cannot run code.
        with np.load(path, allow_pickle=False) as file:
            missing = [entry for entry in entries if entry not in file.files]
            if missing:
                raise ConfigError(
                    f"{path} has no {', '.join(missing)}; an .npz dataset must hold "
                    f"{', '.join(ENTRIES)}."
                )
            for entry in (*entries, "classes"):
                if entry in file.files:
                    arrays[entry] = file[entry]
    except ConfigError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds on damaged bytes
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(
            f"{path} cannot be read ({reason}); write it again with numpy.savez, with plain "
            "number arrays and no object arrays."
        ) from error
    for entry, value in arrays.items():
        # numpy hands back raw bytes for a member that does not begin as an array.
        if not isinstance(value, np.ndarray):
            raise ConfigError(f"{entry} in {path} is not an array; write it with numpy.savez.")
    return arrays


def _check_room(path: Path, entries: tuple[str, ...]) -> None:
    """Refuse arrays that unpack to more than the memory: a small file can hold many zeros."""
    with zipfile.ZipFile(path) as archive:
        sizes = {member.filename: member.file_size for member in archive.infolist()}
    needed = sum(sizes.get(name, 0) for entry in entries for name in (entry, f"{entry}.npy"))
    room = _memory()
    if needed > room:
        raise ConfigError(
            f"the arrays in {path} take {needed / 2**30:.1f} GiB, more than the {room / 2**30:.1f} "
            "GiB of this machine's memory, which a dataset has to fit into: write fewer examples."
        )


def _memory() -> float:
    """The machine's memory in bytes; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _holds(test: Callable[[], bool]) -> bool:
    """A question about a path, answered no where the system refuses to answer it."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _user_file(name: str | Path) -> Path:
    path = Path(name)
    is_path = path.suffix == ".npz" or len(path.parts) > 1 or _holds(path.exists)
    if not is_path:
        raise ConfigError(
            f"Unknown dataset {str(name)!r}; choose one of {', '.join(DATASETS)}, or give the "
            "path of an .npz file."
        )
    return path


def _split_digits(seed: int) -> Arrays:
    # Imported here because scikit-learn takes a second to start, and is no part of the core.
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise not_installed("scikit-learn", "the dataset digits") from error

    digits = load_digits()
    # The legacy generator: numpy promises that its shuffles stay the same in later versions.
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    order = generator.permutation(len(digits.target))
    images, labels = digits.images[order].astype(np.uint8), digits.target[order]
    cut = len(order) * 4 // 5
    parts = (images[:cut], labels[:cut], images[cut:], labels[cut:])
    return dict(zip(ENTRIES, parts, strict=True))


def _known_arrays(
    name: str,
    seed: int,
    data_dir: str | Path | None,
    download: bool,
    entries: tuple[str, ...] = ENTRIES,
) -> Arrays:
    if name == "digits":
        return _split_digits(seed)
    named = {"data_dir": data_dir, "VESTIGE_DATA": os.environ.get("VESTIGE_DATA") or None}
    folders = {option: Path(folder) for option, folder in named.items() if folder is not None}
    for option, folder in folders.items():
        if not _holds(folder.is_dir):
            raise ConfigError(
                f"{option} is {str(folder)!r}, which is no folder that can be read; name the "
                f"folder that holds {name}.npz, or leave it out."
            )
    for folder in folders.values():
        path = folder / f"{name}.npz"
        if _holds(path.is_file):
            return read_npz(path, entries)
    try:
        return fetch(name, download)
    except ConfigError as error:
        tried = [f"{o} is {str(f)!r}, which has no {name}.npz; " for o, f in folders.items()]
        raise ConfigError(f"{''.join(tried)}{error}") from error


def _first(
    arrays: Arrays, y: Tensor, split: str, size: int | None, white: int
) -> tuple[Tensor, Tensor]:
    """The first ``size`` examples of a split, ready for a model."""
    x = arrays[f"x_{split}"]
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise ConfigError(
            f"x_{split} has the shape {x.shape}; it must be (examples, features) or images, with "
            "no empty axis."
        )
    if len(x) != len(y):
        raise ConfigError(
            f"x_{split} holds {len(x)} examples and y_{split} {len(y)} labels; there must be one "
            "label for each example."
        )
    if size is not None and size > len(x):
        raise ConfigError(
            f"{split}_size is {size}, but the {split} split holds {len(x)} examples; ask for at "
            f"most {len(x)}."
        )
    # Cut before the conversion: float32 takes four times the room of the pixels.
    return inputs(x[:size], f"x_{split}", white), y[:size].clone()


def inputs(x: NDArray[Any], entry: str, white: int) -> Tensor:
    """Inputs ready for a model: pixels scaled by ``white``, numbers as they are."""
    if x.dtype == np.uint8:
        pixels = torch.from_numpy(np.ascontiguousarray(_channels_first(x, entry)))
        return pixels.to(torch.float32).div_(white).sub_(0.5).div_(0.5)
    if x.dtype.kind != "f":
        raise ConfigError(
            f"{entry} is {x.dtype}; it must be uint8 (pixels 0 to 255, scaled to -1 to 1) or "
            "floating point (taken as it is): convert with x.astype('uint8') or "
            "x.astype('float32')."
        )
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ConfigError(
            f"{entry} holds values that are not finite in float32; replace or remove NaN and "
            "infinity."
        )
    return torch.from_numpy(values)


def _channels_first(x: NDArray[Any], entry: str) -> NDArray[Any]:
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4):
        return x.transpose(0, 3, 1, 2)
    raise ConfigError(
        f"{entry} is uint8 of shape {x.shape}; images must be stored as (examples, height, width) "
        "or (examples, height, width, channels) with 1, 3 or 4 channels: move the channels last "
        "with x.transpose(0, 2, 3, 1)."
    )
