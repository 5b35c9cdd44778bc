"""Datasets: shapes, public scaling, lookup, and every refusal."""

import io
import os
import random
import zipfile
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vestige.errors import ConfigError
from vestige.train import data, download
from vestige.train.data import DATASETS, Dataset, load

SHARED = Path(os.environ.get("VESTIGE_DATA", ""))


BENCHMARKS = ("mnist", "cifar10", "cifar100", "svhn")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the machine's cache or VESTIGE_DATA unless it asks for it."""
    monkeypatch.delenv("VESTIGE_DATA", raising=False)
    monkeypatch.setattr(download, "cache_folder", lambda: tmp_path / "cache")


def arrays(**changes: Any) -> dict[str, Any]:
    """A small valid dataset of 6 + 4 rows; a change to None removes the entry."""
    rng = np.random.default_rng(0)
    entries: dict[str, Any] = {
        "x_train": rng.normal(size=(6, 5)).astype(np.float32),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.normal(size=(4, 5)).astype(np.float32),
        "y_test": np.array([0, 1, 2, 1]),
    }
    entries |= changes
    return {key: value for key, value in entries.items() if value is not None}


def write(path: Path, **changes: Any) -> Path:
    np.savez(path, **arrays(**changes))
    return path


def write_benchmark(folder: Path, name: str, shape: tuple[int, ...], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    x = np.arange(6 * np.prod(shape)).reshape(6, *shape).astype(np.uint8)
    return write(folder / f"{name}.npz", **({"x_train": x, "x_test": x[:4]} | changes))


def test_digits_is_embedded_scaled_and_split_80_to_20() -> None:
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert digits.name == "digits"
    assert (digits.classes, digits.classes_inferred) == (10, False)
    assert digits.input_shape == (1, 8, 8)
    assert digits.x_train.shape == (1437, 1, 8, 8)
    assert digits.x_test.shape == (360, 1, 8, 8)
    assert digits.x_train.dtype == torch.float32
    assert digits.y_train.dtype == torch.int64
    # The scaling is the fixed map of 0..16 to -1..1, and every image is there exactly once.
    everything = torch.cat([digits.x_train, digits.x_test]).reshape(-1, 64)
    labels = torch.cat([digits.y_train, digits.y_test])
    original = load_digits()
    expected = torch.from_numpy((original.images / 16 - 0.5) / 0.5).float().reshape(-1, 64)

    def rows(x: torch.Tensor, y: torch.Tensor) -> list[list[float]]:
        return sorted(torch.cat([x, y[:, None].float()], dim=1).tolist())

    assert rows(everything, labels) == rows(expected, torch.from_numpy(original.target))


def test_digits_split_depends_on_the_seed_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = load("digits"), load("digits", seed=0), load("digits", seed=1)
    assert torch.equal(first.x_train, again.x_train)
    assert torch.equal(first.y_test, again.y_test)
    assert not torch.equal(first.y_train, other.y_train)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    # The split is public and part of every published result: it may never change.
    assert first.y_train[:10].tolist() == [5, 3, 0, 4, 7, 4, 4, 9, 3, 6]
    assert load("digits", seed=2**70).x_train.shape == (1437, 1, 8, 8)


def test_sizes_take_the_first_examples() -> None:
    full, part = load("digits"), load("digits", train_size=100, test_size=7)
    assert (len(part.x_train), len(part.x_test)) == (100, 7)
    assert torch.equal(part.x_train, full.x_train[:100])
    assert torch.equal(part.y_test, full.y_test[:7])
    # No view: the rest of the data is not kept alive or saved along.
    assert part.y_test.untyped_storage().nbytes() == 7 * 8
    assert part.x_test.untyped_storage().nbytes() == 7 * 64 * 4
    assert len(load("digits", train_size=1437).x_train) == 1437


def test_dataset_is_frozen() -> None:
    digits = load("digits", train_size=2, test_size=2)
    with pytest.raises(FrozenInstanceError):
        digits.classes = 3  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "10"])
@pytest.mark.parametrize("option", ["train_size", "test_size"])
def test_bad_sizes_are_refused(option: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{option}=.*at least 1"):
        load("digits", **{option: size})


def test_sizes_beyond_the_data_name_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"train_size is 1438.*holds 1437"):
        load("digits", train_size=1438)
    with pytest.raises(ConfigError, match=r"test_size is 361.*holds 360"):
        load("digits", test_size=361)


@pytest.mark.parametrize("seed", [-1, 1.0, True, None])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed is"):
        load("digits", seed=seed)


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match="Unknown dataset 'imagenet'") as error:
        load("imagenet")
    assert all(name in str(error.value) for name in DATASETS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_real_benchmark_sets(name: str) -> None:
    if not (SHARED / f"{name}.npz").is_file():
        pytest.skip(f"VESTIGE_DATA names no folder with {name}.npz")
    loaded = load(name, data_dir=SHARED, train_size=500, test_size=200)
    grey = name == "mnist"
    assert loaded.input_shape == ((1, 28, 28) if grey else (3, 32, 32))
    assert (loaded.classes, loaded.classes_inferred) == (100 if name == "cifar100" else 10, False)
    assert (loaded.x_train.min(), loaded.x_train.max()) == (-1.0, 1.0)
    assert loaded.x_train.is_contiguous()
    # Pixel by pixel from the stored image, to find a mixed-up axis.
    raw = np.load(SHARED / f"{name}.npz")["x_train"][3]
    image = loaded.x_train[3].numpy()
    for row, column in ((0, 5), (9, 2), (20, 11)):
        stored = np.atleast_1d(raw[row, column]).astype(np.float64)
        np.testing.assert_allclose(image[:, row, column], (stored / 255 - 0.5) / 0.5, atol=1e-6)


def test_data_dir_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_benchmark(tmp_path / "env", "mnist", (28, 28))
    write_benchmark(tmp_path / "env", "svhn", (32, 32, 3))
    write_benchmark(tmp_path / "dir", "mnist", (28, 28), y_train=np.full(6, 7))
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "env"))
    assert load("mnist").y_train.tolist() == [0, 1, 2, 0, 1, 2]
    assert load("mnist", data_dir=tmp_path / "dir").y_train.tolist() == [7] * 6
    # Not in data_dir, so the environment's folder is next.
    assert load("svhn", data_dir=str(tmp_path / "dir")).input_shape == (3, 32, 32)


def test_known_sets_take_their_classes_from_the_table(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "d", "cifar100", (32, 32, 3))
    loaded = load("cifar100", data_dir=tmp_path / "d")
    assert (loaded.classes, loaded.classes_inferred) == (100, False)
    write_benchmark(tmp_path / "d", "mnist", (28, 28), y_test=np.array([0, 1, 2, 10]))
    with pytest.raises(ConfigError, match=r"label 10, but there are 10 classes.*0 to 9"):
        load("mnist", data_dir=tmp_path / "d")


def test_a_known_name_with_other_content_is_refused(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "d", "mnist", (8, 8))
    with pytest.raises(ConfigError, match=r"shape \(1, 8, 8\), but mnist .*\(1, 28, 28\)"):
        load("mnist", data_dir=tmp_path / "d")
    x = np.zeros((6, 1, 28, 28), dtype=np.float32)
    write_benchmark(tmp_path / "d", "mnist", (28, 28), x_train=x, x_test=x[:4])
    with pytest.raises(ConfigError, match="holds float32"):
        load("mnist", data_dir=tmp_path / "d")


def test_data_dir_must_be_a_folder(tmp_path: Path) -> None:
    for bad in (tmp_path / "absent", write(tmp_path / "file.npz"), "x" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="data_dir is"):
            load("mnist", data_dir=bad)


def test_flat_float_file_is_taken_as_it_is(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "own.npz"))
    assert loaded.name == str(tmp_path / "own.npz")
    assert loaded.input_shape == (5,)
    assert (loaded.classes, loaded.classes_inferred) == (3, True)
    np.testing.assert_array_equal(loaded.x_train.numpy(), arrays()["x_train"])
    assert loaded.y_test.tolist() == [0, 1, 2, 1]
    assert torch.equal(load(str(tmp_path / "own.npz")).x_train, loaded.x_train)


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4", ">f8"])
def test_every_float_type_becomes_float32(tmp_path: Path, dtype: str) -> None:
    x = np.asfortranarray(arrays()["x_train"].astype(dtype))
    loaded = load(write(tmp_path / "own.npz", x_train=x))
    assert loaded.x_train.dtype == torch.float32
    assert loaded.x_train.is_contiguous()
    np.testing.assert_array_equal(loaded.x_train.numpy(), x.astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5,), (5,)),
        ((4, 7), (1, 4, 7)),
        ((4, 7, 1), (1, 4, 7)),
        ((4, 7, 3), (3, 4, 7)),
        ((4, 7, 4), (4, 4, 7)),
    ],
)
def test_uint8_is_scaled_and_channels_come_first(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x = np.random.default_rng(1).integers(0, 256, size=(6, *shape), dtype=np.uint8)
    x.flat[:2] = 0, 255
    loaded = load(write(tmp_path / "own.npz", x_train=x, x_test=x[:4]))
    assert loaded.input_shape == expected
    assert (loaded.x_train.min(), loaded.x_train.max()) == (-1.0, 1.0)
    moved = np.moveaxis(x, -1, 1) if len(shape) == 3 else x
    wanted = (moved.reshape(6, *expected) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(loaded.x_train.numpy(), wanted, atol=1e-6)


def test_scaling_of_one_example_ignores_the_others(tmp_path: Path) -> None:
    x = np.random.default_rng(1).integers(0, 100, size=(6, 4, 4), dtype=np.uint8)
    first = load(write(tmp_path / "a.npz", x_train=x, x_test=x[:4])).x_train
    x[5] = 255
    second = load(write(tmp_path / "b.npz", x_train=x, x_test=x[:4])).x_train
    assert torch.equal(first[:5], second[:5])


def test_stated_classes(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "own.npz", classes=7))
    assert (loaded.classes, loaded.classes_inferred) == (7, False)
    # One class in the data is fine once the number is stated.
    one = write(tmp_path / "one.npz", y_train=np.zeros(6, int), y_test=np.zeros(4, int), classes=2)
    assert load(one).classes == 2


def test_inferred_classes_do_not_depend_on_the_size(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", y_test=np.array([0, 1, 2, 8]))
    assert load(path, train_size=1, test_size=1).classes == 9


@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i8", "uint64", "bool"])
def test_integer_labels_of_any_type(tmp_path: Path, dtype: str) -> None:
    y = np.array([0, 1, 1, 0, 1, 0]).astype(dtype)
    loaded = load(write(tmp_path / "own.npz", y_train=y, y_test=y[:4]))
    assert loaded.y_train.dtype == torch.int64
    assert loaded.y_train.tolist() == [0, 1, 1, 0, 1, 0]


def full(value: float, dtype: str = "float32") -> np.ndarray:
    x = np.zeros((6, 5), dtype=dtype)
    x[2, 3] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": full(np.nan)}, "x_train holds values that are not finite"),
        ({"x_test": full(-np.inf)[:4]}, "x_test holds values that are not finite"),
        ({"x_train": full(1e300, "float64")}, "not finite in float32"),
        ({"x_train": full(1, "int64")}, "x_train is int64; it must be uint8"),
        ({"x_train": full(1, "uint16")}, r"uint16; .*x\.astype\('float32'\)"),
        ({"x_train": full(1, "bool")}, "x_train is bool"),
        ({"x_train": full(1, "complex64")}, "x_train is complex64"),
        ({"x_train": np.full((6, 5), "a")}, "x_train is <U1"),
        ({"x_train": np.zeros(6)}, r"x_train has the shape \(6,\)"),
        ({"x_train": np.float32(1)}, r"x_train has the shape \(\)"),
        ({"x_train": np.zeros((6, 0))}, "no empty axis"),
        ({"x_train": np.zeros((6, 3, 8, 8), "uint8")}, "move the channels last"),
        ({"x_train": np.zeros((6, 8, 8, 3, 2), "uint8")}, "images must be stored as"),
        ({"x_train": np.zeros((6, 4))}, r"shape \(4,\) and x_test of shape \(5,\)"),
        ({"x_train": np.zeros((7, 5))}, "x_train holds 7 examples and y_train 6 labels"),
        ({"y_test": np.zeros(5, int)}, "x_test holds 4 examples and y_test 5 labels"),
        ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "y_train holds the label -1"),
        ({"y_train": np.full(6, 2**63, "uint64")}, f"y_train holds the label {2**63}"),
        ({"y_train": np.full(6, 123_456)}, "123457 classes; number the classes from 0"),
        ({"y_train": np.zeros((6, 1), int)}, r"shape \(6, 1\); .*take the one column"),
        ({"y_train": np.zeros((6, 2), int)}, r"shape \(6, 2\); .*--task multi-label"),
        ({"y_train": np.linspace(0, 1, 6)}, r"float64 .*--task regression"),
        ({"y_train": np.array(["a"] * 6)}, r"by a public list of their names"),
        ({"y_train": np.zeros(6)}, "y_train is float64"),
        ({"x_train": np.zeros((0, 5)), "y_train": np.zeros(0, int)}, "y_train is empty"),
        ({"y_train": np.zeros(6, int), "y_test": np.zeros(4, int)}, "classes is 1; .*at least 2"),
        ({"classes": 0}, "classes is 0"),
        ({"classes": -5}, "classes is -5"),
        ({"classes": 2}, "y_train holds the label 2, but there are 2 classes"),
        ({"classes": 10.0}, "entry classes is float64"),
        ({"classes": np.array([3, 4])}, r"entry classes is int64 of shape \(2,\)"),
        ({"x_test": None}, "has no x_test; an .npz dataset must hold x_train, y_train"),
        ({"x_train": None, "y_test": None}, "has no x_train, y_test"),
        ({"x_train": np.full((6, 5), None)}, "cannot be read .*no object arrays"),
    ],
)
def test_bad_content_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "own.npz", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_object_labels_never_run_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("a data file ran code",)

    path = tmp_path / "own.npz"
    labels = np.array([Trap() for _ in range(6)], dtype=object)
    np.savez(path, **arrays(y_train=labels))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "array.npy", np.zeros(3))
    whole = write(tmp_path / "own.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("text.npz", "empty.npz", "array.npy", "cut.npz"):
        with pytest.raises(ConfigError, match=r"is not an \.npz file, or it is cut off"):
            load(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        for entry in data.ENTRIES:
            archive.writestr(f"{entry}.npy", b"no array")
    with pytest.raises(ConfigError, match=r"x_train in .* is not an array"):
        load(tmp_path / "raw.npz")
    (tmp_path / "folder.npz").mkdir()
    for absent in ("absent.npz", "folder.npz", "x" * 5000 + ".npz", "a\0b.npz"):
        with pytest.raises(ConfigError, match="There is no readable file"):
            load(tmp_path / absent)


def test_a_path_needs_no_suffix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "own.npz").rename(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    assert load("own").classes == 3
    assert load("./own").classes == 3
    with pytest.raises(ConfigError, match="There is no readable file"):
        load("folder/other")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_files_load_or_are_refused(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "own.npz"
    save(path, **arrays(classes=3))
    whole = path.read_bytes()
    rng = random.Random(5)
    outcomes = {"loaded": 0, "refused": 0}
    for trial in range(250):
        damaged = bytearray(whole)
        for _ in range(1 + trial % 4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if trial % 10 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            assert isinstance(load(path), Dataset)
            outcomes["loaded"] += 1
        except ConfigError:
            outcomes["refused"] += 1
    # Both happen, so the loop really walks both ways out.
    assert min(outcomes.values()) > 5


def test_damaged_arrays_load_or_are_refused(tmp_path: Path) -> None:
    """Damage under a correct checksum, so that it reaches numpy's header and our own checks."""
    rng = random.Random(6)
    members = {}
    for entry, value in arrays(classes=3).items():
        buffer = io.BytesIO()
        np.save(buffer, value)
        members[entry] = buffer.getvalue()
    for trial in range(250):
        path = tmp_path / "own.npz"
        victim = rng.choice(list(members))
        with zipfile.ZipFile(path, "w") as archive:
            for entry, content in members.items():
                damaged = bytearray(content)
                if entry == victim:
                    for _ in range(1 + trial % 3):
                        damaged[rng.randrange(min(len(damaged), 160))] = rng.randrange(256)
                archive.writestr(f"{entry}.npy", bytes(damaged))
        try:
            loaded = load(path)
        except ConfigError:
            continue
        assert int(loaded.y_train.max()) < loaded.classes
        assert loaded.x_train.isfinite().all()


def test_a_wrong_vestige_data_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"VESTIGE_DATA is .*nowhere.*mnist\.npz"):
        load("mnist")


def test_a_vestige_data_without_the_file_is_named_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        load("mnist", download=False)
    assert str(refused.value).startswith(
        f"VESTIGE_DATA is {str(tmp_path)!r}, which has no mnist.npz; mnist: "
    )
    both = r"^data_dir is .*no svhn\.npz; VESTIGE_DATA is .*no svhn"
    with pytest.raises(ConfigError, match=both):
        load("svhn", data_dir=tmp_path, download=False)
