"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vestige.files import write_whole


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@settings(max_examples=30, deadline=None)
@given(content=st.binary(max_size=4000) | st.text())
def test_what_was_written_is_read_back(
    content: bytes | str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("whole") / "file"
    for _ in range(2):
        write_whole(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_named_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match=r"is a folder, name.*there'$"):
        write_whole(folder, "text")
    assert list(tmp_path.iterdir()) == [folder]


def test_the_mode_is_kept_or_as_asked(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        new, kept, secret = (tmp_path / name for name in ("new", "kept", "secret"))
        write_whole(new, b"1")
        kept.write_bytes(b"1")
        kept.chmod(0o640)
        write_whole(kept, b"2")
        write_whole(secret, b"2", mode=0o600)
        assert [mode(path) for path in (new, kept, secret)] == [0o644, 0o640, 0o600]
    finally:
        os.umask(umask)


def test_a_secret_file_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: (seen.append(os.fstat(f).st_mode), fsync(f)))
    write_whole(tmp_path / "secret", b"2", mode=0o600)
    assert stat.S_IMODE(seen[0]) == 0o600


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_an_error_leaves_the_earlier_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"earlier")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "replace") if call == "replace" else (os, call)), full)
    with pytest.raises(OSError, match="No space left") as error:
        write_whole(path, b"new")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, pathlib, sys
from vestige import files
def die(*_):
    os._exit(9)
pathlib.Path.replace = die
files.write_whole(pathlib.Path(sys.argv[1]), b"new")
"""


def test_a_crash_between_write_and_replace_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"earlier")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == 9
    assert path.read_bytes() == b"earlier"
    write_whole(path, b"newer")  # what the crash left behind is in nobody's way
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_synced_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    fsync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def replaced(self: Path, target: Path) -> Path:
        order.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_whole(tmp_path / "file", b"1")
    assert order == ["file", "replace", "folder"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
