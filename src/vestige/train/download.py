"""Benchmark sets from their publishers: downloaded with pooch, checked by hash, parsed to arrays.

Only the formats that need no pickle are used: MNIST's idx files, CIFAR's binary version, SVHN's
.mat files. Every set comes back in one layout: uint8 arrays x_train, y_train, x_test, y_test,
colour images NHWC and grey images NHW, in the official order.
"""

import gzip
import io
import math
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vestige.errors import ConfigError

Arrays = dict[str, NDArray[Any]]
Pixels = NDArray[np.uint8]
ENTRIES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Source:
    """One file of a publisher and the md5 that is published for it."""

    url: str
    md5: str

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"

# The publishers give md5 sums and nothing stronger: they find damage, not forgery.
SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        Source(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Source(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        Source(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        Source(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "cifar10": (Source(_CIFAR + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar100": (Source(_CIFAR + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    "svhn": (
        Source(_SVHN + "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Source(_SVHN + "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
}


def cache_folder() -> Path:
    """The folder of the user's cache that keeps the downloaded files."""
    return Path(_pooch().os_cache("vestige"))


def _pooch() -> Any:
    """The library that downloads, which is no part of the core."""
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise not_installed("pooch", "the download of a benchmark set") from error
    return pooch


def not_installed(package: str, what: str) -> ConfigError:
    """What to do where a package is not there that the core does without."""
    return ConfigError(
        f"{what} needs {package}, which is not installed: pip install 'vestige-dp[cli]', or give "
        "your data as the path of an .npz file."
    )


def fetch(name: str, download: bool = True) -> Arrays:
    """The arrays of a benchmark set, from the cache or else from its publisher.

    With ``download=False`` only the cache is read. The hash is checked each time.
    """
    return parsed(name, [_retrieve(name, source, download) for source in SOURCES[name]])


def parsed(name: str, files: Sequence[Path]) -> Arrays:
    """The arrays in the publisher's files; ConfigError where one is damaged."""
    try:
        return dict(zip(ENTRIES, READERS[name](files), strict=True))
    except ConfigError:
        raise
    except Exception as error:  # gzip, tarfile and zlib raise a dozen kinds on damaged bytes
        raise ConfigError(
            f"{name}: {files[0].parent} holds a damaged file ({_reason(error)}); delete it to "
            "fetch it again."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _retrieve(name: str, source: Source, download: bool) -> Path:
    pooch = _pooch()
    # A folder for each set: the publishers' file names alone do not say what they belong to.
    folder = cache_folder() / name
    remedy = (
        f"put {name}.npz (uint8 arrays x_train, y_train, x_test, y_test; colour images NHWC, grey "
        "NHW) into a folder and name that folder by --data-dir or VESTIGE_DATA"
    )
    try:
        cached = folder / source.filename
        if not download:
            if cached.is_file() and pooch.file_hash(str(cached), alg="md5") == source.md5:
                return cached
            raise ConfigError(
                f"{name}: {source.filename} is not in the cache {folder} and downloading is "
                f"switched off; allow it, or {remedy}."
            )
        return Path(
            pooch.retrieve(
                source.url, known_hash=f"md5:{source.md5}", fname=source.filename, path=folder
            )
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        # No network, a refused request, a wrong hash, an unwritable cache: one remedy for all.
        raise ConfigError(
            f"{name}: could not download {source.url} ({_reason(error)}). Try again, or {remedy}."
        ) from error


def parse_idx(raw: bytes) -> Pixels:
    """The array in an (uncompressed) idx file of unsigned bytes, the format of MNIST."""
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ConfigError("Not an idx file of unsigned bytes: it must begin with 00 00 08.")
    ndim = raw[3]
    start = 4 + 4 * ndim
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    # A file that ends inside its header has a negative rest, which no shape has.
    if len(raw) - start != math.prod(shape):
        raise ConfigError(
            f"Damaged idx file: its header announces the shape {shape}, but {len(raw)} bytes are "
            "there; fetch it again."
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()


def parse_cifar(raw: bytes, label_bytes: int) -> tuple[Pixels, Pixels]:
    """Images (NHWC) and labels of a CIFAR binary file.

    A record is ``label_bytes`` labels (CIFAR-100 has two, coarse then fine; the last is taken),
    then the red, green and blue planes of 32 x 32 bytes.
    """
    record = label_bytes + 3 * 32 * 32
    if not raw or len(raw) % record:
        raise ConfigError(
            f"Damaged CIFAR file: {len(raw)} bytes are not a whole number of records of {record} "
            "bytes; fetch it again."
        )
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, record)
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, label_bytes - 1].copy()


def parse_svhn(raw: bytes) -> tuple[Pixels, Pixels]:
    """Images (NHWC) and labels of an SVHN .mat file; its label 10 is the digit 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(io.BytesIO(raw), variable_names=["X", "y"])
        images, labels = content["X"], content["y"].ravel()
    except Exception as error:  # scipy raises many kinds on damaged bytes
        raise ConfigError("Not an SVHN .mat file with X and y; fetch it again.") from error
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] != len(labels):
        raise ConfigError(
            f"Not an SVHN .mat file: X is {images.dtype} of shape {images.shape} for {len(labels)} "
            "labels, where uint8 of shape (32, 32, 3, labels) is expected."
        )
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), (labels % 10).astype(np.uint8)


def _read_mnist(files: Sequence[Path]) -> list[Pixels]:
    return [parse_idx(gzip.decompress(file.read_bytes())) for file in files]


def _read_svhn(files: Sequence[Path]) -> list[Pixels]:
    return [part for file in files for part in parse_svhn(file.read_bytes())]


def _read_cifar(
    train: Sequence[str], test: str, label_bytes: int, files: Sequence[Path]
) -> list[Pixels]:
    def member(tar: tarfile.TarFile, name: str) -> bytes:
        file = tar.extractfile(name)
        if file is None:
            raise ConfigError(f"{files[0]} holds no file {name}; delete it to fetch it again.")
        return file.read()

    # Members are read in memory, so that no path written in the archive is ever created.
    with tarfile.open(files[0]) as tar:
        splits = (b"".join(member(tar, name) for name in train), member(tar, test))
    return [part for split in splits for part in parse_cifar(split, label_bytes)]


_CIFAR10, _CIFAR100 = "cifar-10-batches-bin", "cifar-100-binary"
_BATCHES = [f"{_CIFAR10}/data_batch_{i}.bin" for i in range(1, 6)]

# How the files of a set become x_train, y_train, x_test and y_test.
READERS: dict[str, Callable[[Sequence[Path]], Sequence[Pixels]]] = {
    "mnist": _read_mnist,
    "cifar10": partial(_read_cifar, _BATCHES, f"{_CIFAR10}/test_batch.bin", 1),
    "cifar100": partial(_read_cifar, [f"{_CIFAR100}/train.bin"], f"{_CIFAR100}/test.bin", 2),
    "svhn": _read_svhn,
}
