"""Downloads: the publishers' formats, a server of our own, the cache, and every refusal."""

import functools
import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from vestige.errors import ConfigError
from vestige.train import download
from vestige.train.data import DATASETS, load

BENCHMARKS = ("mnist", "cifar10", "cifar100", "svhn")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the machine's cache or VESTIGE_DATA unless it asks for it."""
    monkeypatch.delenv("VESTIGE_DATA", raising=False)
    monkeypatch.setattr(download, "cache_folder", lambda: tmp_path / "cache")


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def test_parse_idx() -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(5, 4, 3), dtype=np.uint8)
    np.testing.assert_array_equal(download.parse_idx(idx(images)), images)
    np.testing.assert_array_equal(download.parse_idx(idx(images[:, 0, 0])), images[:, 0, 0])
    whole = idx(images)
    for bad in (b"", b"\0\0\x08", b"\0\0\x0d\1" + whole[4:], b"\1" + whole[1:]):
        with pytest.raises(ConfigError, match="Not an idx file"):
            download.parse_idx(bad)
    for cut in (4, 7, 12, 16, len(whole) - 1):
        with pytest.raises(ConfigError, match="Damaged idx file"):
            download.parse_idx(whole[:cut])
    with pytest.raises(ConfigError, match="Damaged idx file"):
        download.parse_idx(whole + b"\0")


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_parse_cifar(label_bytes: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(4, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, size=(4, label_bytes), dtype=np.uint8)
    raw = b"".join(
        y.tobytes() + x.transpose(2, 0, 1).tobytes() for x, y in zip(images, labels, strict=True)
    )
    parsed, fine = download.parse_cifar(raw, label_bytes)
    np.testing.assert_array_equal(parsed, images)
    np.testing.assert_array_equal(fine, labels[:, -1])
    for bad in (b"", raw[:-1], raw + b"\0"):
        with pytest.raises(ConfigError, match="Damaged CIFAR file"):
            download.parse_cifar(bad, label_bytes)


def mat(**entries: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, entries)
    return buffer.getvalue()


def test_parse_svhn() -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(3, 32, 32, 3), dtype=np.uint8)
    labels = np.array([[10], [1], [9]], dtype=np.uint8)
    parsed, digits = download.parse_svhn(mat(X=images.transpose(1, 2, 3, 0), y=labels))
    np.testing.assert_array_equal(parsed, images)
    assert digits.tolist() == [0, 1, 9]
    for bad in (b"", b"hello", mat(X=images)):
        with pytest.raises(ConfigError, match=r"Not an SVHN \.mat file with X and y"):
            download.parse_svhn(bad)
    for x in (images[0], images, images.transpose(1, 2, 3, 0).astype(float)):
        with pytest.raises(ConfigError, match="uint8 of shape"):
            download.parse_svhn(mat(X=x[..., :2], y=labels))


def tarball(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def cifar(labels: list[int], label_bytes: int) -> bytes:
    return b"".join(bytes([99] * (label_bytes - 1) + [y]) + bytes([y] * 3072) for y in labels)


def published() -> dict[str, bytes]:
    """Every file of the publishers, with a handful of examples: image i is full of its label."""
    labels = np.array([1, 2, 3, 4, 9], dtype=np.uint8)
    grey = labels[:, None, None] * np.ones((1, 28, 28), dtype=np.uint8)
    colour = labels * np.ones((32, 32, 3, 1), dtype=np.uint8)
    return {
        "train-images-idx3-ubyte.gz": gzip.compress(idx(grey)),
        "train-labels-idx1-ubyte.gz": gzip.compress(idx(labels)),
        "t10k-images-idx3-ubyte.gz": gzip.compress(idx(grey[:3])),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(idx(labels[:3])),
        "cifar-10-binary.tar.gz": tarball(
            {
                f"cifar-10-batches-bin/data_batch_{i}.bin": cifar([y], 1)
                for i, y in enumerate(labels.tolist(), start=1)
            }
            | {"cifar-10-batches-bin/test_batch.bin": cifar([1, 2, 3], 1)}
        ),
        "cifar-100-binary.tar.gz": tarball(
            {
                "cifar-100-binary/train.bin": cifar(labels.tolist(), 2),
                "cifar-100-binary/test.bin": cifar([1, 2, 3], 2),
            }
        ),
        "train_32x32.mat": mat(X=colour, y=labels[:, None]),
        "test_32x32.mat": mat(X=colour[..., :3], y=labels[:3, None]),
    }


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """No lines on the test's output."""


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder served on this machine in place of the publishers' addresses."""
    folder = tmp_path / "publisher"
    folder.mkdir()
    files = published()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sources = {
        name: tuple(
            download.Source(
                f"http://127.0.0.1:{server.server_port}/{source.filename}",
                hashlib.md5(files[source.filename]).hexdigest(),
            )
            for source in parts
        )
        for name, parts in download.SOURCES.items()
    }
    monkeypatch.setattr(download, "SOURCES", sources)
    yield folder
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_download_then_cache(publisher: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"not in the cache .* switched off"):
        load(name, download=False)
    fresh = load(name)
    assert fresh.y_train.tolist() == [1, 2, 3, 4, 9]
    assert fresh.y_test.tolist() == [1, 2, 3]
    assert fresh.input_shape == ((1, 28, 28) if name == "mnist" else (3, 32, 32))
    for x, y in zip(fresh.x_train, fresh.y_train, strict=True):
        torch.testing.assert_close(x, torch.full_like(x, (float(y) / 255 - 0.5) / 0.5))
    for file in publisher.iterdir():
        file.unlink()
    assert torch.equal(load(name).x_train, fresh.x_train)
    assert torch.equal(load(name, download=False).x_train, fresh.x_train)


def test_damaged_cache_is_found(publisher: Path, tmp_path: Path) -> None:
    load("cifar10")
    cached = tmp_path / "cache" / "cifar10" / "cifar-10-binary.tar.gz"
    cached.write_bytes(cached.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="switched off"):
        load("cifar10", download=False)
    assert len(load("cifar10").x_train) == 5


def test_failed_downloads_say_where_to_put_the_file(publisher: Path, tmp_path: Path) -> None:
    remedy = r"put svhn\.npz .*--data-dir or VESTIGE_DATA"
    (publisher / "test_32x32.mat").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=rf"could not download http.*{remedy}"):
        load("svhn")
    (publisher / "test_32x32.mat").unlink()
    with pytest.raises(ConfigError, match=rf"404.*{remedy}") as error:
        load("svhn")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("test_32x32.mat*"))


def test_no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Port 9 of this machine refuses, as an unplugged network would.
    closed = (download.Source("http://127.0.0.1:9/mnist.gz", "0" * 32),)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "SOURCES", {"mnist": closed})
    with pytest.raises(ConfigError, match=r"could not download .*put mnist\.npz"):
        load("mnist")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(download, "cache_folder", lambda: tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="could not download"):
        load("mnist")


def test_sources_cover_the_benchmarks_and_need_no_pickle() -> None:
    assert (*download.SOURCES,) == BENCHMARKS
    assert set(DATASETS) == {"digits", *BENCHMARKS}
    sources = [source for parts in download.SOURCES.values() for source in parts]
    assert all(len(bytes.fromhex(source.md5)) == 16 for source in sources)
    assert len({source.md5 for source in sources}) == len(sources) == 8
    assert not any("python" in source.url for source in sources)


def test_a_cifar_archive_without_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        folder = tarfile.TarInfo("cifar-100-binary/train.bin")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    with pytest.raises(ConfigError, match=r"holds no file .*train\.bin"):
        download.READERS["cifar100"]([path])
