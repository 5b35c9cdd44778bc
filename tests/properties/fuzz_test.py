"""Damaged and forged files: every reader gives what is right, or one line of ConfigError.

One mutator damages the bytes of a good file (flipped bits, cuts, insertions, swaps, huge numbers,
deep nesting, pickles); a table says what each reader is and how its file is made. Where a checksum
would stop all damage at the door, `sealed` puts it right again, so that the damage gets to what is
behind. Of every mutation the test wants: no exception but those of vestige.errors; no code run (a
pickle inside would make a marker file); no file changed or left behind; and of what is accepted
whatever `accepted` says, such as a ledger that has forgotten nothing. The command line must answer
in one line. `pytest -rP` prints how many mutations each reader has seen.

To add a reader, add a line to READERS.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.program import run as program
from vestige import PrivacyEngine, VestigeError, statement
from vestige.engine import checkpoint
from vestige.lab import catalogue, grid, reading, report
from vestige.lab.report import write_run
from vestige.lab.report.run_data import read_run
from vestige.lab.rows import ROWS, Rows
from vestige.lab.setting import config_hash
from vestige.lab.spectrum_report import Request, examine
from vestige.lab.summary import rows_of
from vestige.privacy import ledger_file, ledger_format
from vestige.train import data, download

FAST, MANY = 300, 5000
KEPT = Path(__file__).parents[2] / "results" / ROWS


# -- damage ---------------------------------------------------------------------------------


class Trap:
    """Makes a marker file when it is unpickled."""

    marker = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (Trap.marker,)


TEXTS = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1",
    b"0",
    b"1e-320",
    b"9" * 400,
    b"9" * 5000,
    b"null",
    b"true",
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"<script>alert(1)</script>"',
    b'"../../../etc/passwd"',
    b"{}",
    b"[]",
    b"[[]]",
    b'{"a": 1}',
    b"[1, 2, 3]",
    b"2020-01-01",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff\xfe",
    b"\x00",
    b"\r\n",
    b"=",
]
NUMBERS = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]
# A number, a text or a word of JSON and TOML.
TOKEN = re.compile(rb'-?\d[\d.eE+_-]*|"(?:[^"\\]|\\.)*"|true|false|null|\w+ =')


def flip(rng: random.Random, raw: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, raw: bytearray) -> None:
    for _ in range(rng.choice([1, 2, 16])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)


def cut(rng: random.Random, raw: bytearray) -> None:
    del raw[rng.randrange(len(raw)) :]


def remove(rng: random.Random, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    del raw[at : at + rng.choice([1, 1, 4, 64])]


def insert(rng: random.Random, raw: bytearray) -> None:
    at = rng.randrange(len(raw) + 1)
    raw[at:at] = rng.choice([rng.randbytes(rng.choice([1, 4, 64])), rng.choice(TEXTS)])


def swap(rng: random.Random, raw: bytearray) -> None:
    size = rng.choice([1, 4, 32])
    a, b = (rng.randrange(len(raw)) for _ in range(2))
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def double(rng: random.Random, raw: bytearray) -> None:
    a, b = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    raw[b:b] = raw[a:b] * rng.choice([1, 1, 50])


def number(rng: random.Random, raw: bytearray) -> None:
    """A size field becomes one of the numbers that sizes stumble over."""
    form = rng.choice(["<H", "<I", "<Q", ">I", ">Q"])
    value = struct.pack(form, rng.choice(NUMBERS) % 256 ** struct.calcsize(form))
    at = rng.randrange(len(raw))
    raw[at : at + len(value)] = value


def token(rng: random.Random, raw: bytearray) -> None:
    """A value in a text becomes another."""
    found = list(TOKEN.finditer(raw))
    if found:
        spot = rng.choice(found)
        new = rng.choice([*TEXTS, rng.choice(found).group()])
        raw[spot.start() : spot.end()] = new


def plant(rng: random.Random, raw: bytearray) -> None:
    """A pickle that would run code, in place of the file or in the middle of it."""
    evil = pickle.dumps(Trap(), protocol=rng.choice([0, 2, 4]))
    if rng.random() < 0.5:
        raw[:] = evil
    else:
        at = rng.randrange(len(raw) + 1)
        raw[at:at] = evil


DAMAGE = [flip, overwrite, cut, remove, insert, swap, double, number, token, token, token, plant]


def damaged(good: bytes, rng: random.Random) -> bytes:
    raw = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if raw:
            rng.choice(DAMAGE)(rng, raw)
    return bytes(raw)


VALUES = [
    None,
    True,
    -1,
    0,
    7,
    10**9,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\ud800",
    [],
    [1, "a"],
    {},
    {"a": None},
    torch.zeros(0),
    torch.zeros(3, 3),
    torch.full((2,), float("nan"), dtype=torch.float64),
]


def mutated_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of nested dicts and lists with one value replaced, removed or added."""
    tree = copy.deepcopy(tree)
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            spots.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(tree)
    node, key = rng.choice(spots)
    what = rng.random()
    if what < 0.15:
        del node[key]
    elif what < 0.3 and isinstance(node, dict):
        node[rng.choice(["x", "", 3])] = rng.choice(VALUES)
    else:
        other, place = rng.choice(spots)
        node[key] = rng.choice([*VALUES, copy.deepcopy(other[place])])
    return tree


# -- readers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A file and what reads it.

    `make` writes a good file into a folder and returns its path; `part` is the bytes of it that are
    damaged and `sealed` puts them back, with checksums that are right. `read` is called with the
    file's path and returns something; `accepted` looks at that.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    part: Callable[[bytes], bytes] = bytes
    sealed: Callable[[bytes, bytes], bytes] = lambda part, whole: part
    accepted: Callable[[Any, Any], None] = lambda found, good: None
    damage: Callable[[bytes, random.Random], bytes] = damaged
    share: float = 1.0  # of the usual number of mutations
    writes: tuple[str, ...] = ()  # files that reading may make beside it
    tolerant: bool = False  # damage is passed over, not refused


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (9, 5, 4), dtype=np.uint8)
    y = np.arange(9, dtype=np.int32) % 3
    return {"x_train": x[:6], "y_train": y[:6], "x_test": x[6:], "y_test": y[6:], "classes": 3}


def make_npz(folder: Path, save: Any = np.savez) -> Path:
    save(folder / "own.npz", **arrays())
    return folder / "own.npz"


def make_compressed(folder: Path) -> Path:
    return make_npz(folder, np.savez_compressed)


def check_dataset(found: Any, good: Any) -> None:
    assert int(found.y_train.max()) < found.classes and found.x_train.isfinite().all()


def member(name: str) -> Callable[[bytes], bytes]:
    def read_member(whole: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            return archive.read(name)

    return read_member


def with_member(name: str) -> Callable[[bytes, bytes], bytes]:
    """The archive with another content of one member, and its checksum."""

    def rewrite(part: bytes, whole: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.namelist():
                new.writestr(entry, part if entry == name else old.read(entry))
        return out.getvalue()

    return rewrite


def make_toml(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        return Path(shutil.copy(catalogue.folder() / f"{name}.toml", folder))

    return make


def read_experiment(path: Path) -> Any:
    """An experiment, its smoke run, and what `vestige reproduce --list` says of both."""
    found = reading.read(path)
    return found, grid.count_of(found), grid.count_of(found.quickened())


def damaged_toml(part: bytes, rng: random.Random) -> bytes:
    """A file that is TOML still, with one value that is not as it was."""
    tree = mutated_tree(tomllib.loads(part.decode()), rng)
    return "\n".join(f"{json.dumps(str(k))} = {as_toml(v)}" for k, v in tree.items()).encode()


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(str(k))} = {as_toml(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value.replace("\ud800", "?") if isinstance(value, str) else value)
    return str(value) if isinstance(value, int | float) else '"?"'


def make_rows(folder: Path) -> Path:
    lines = KEPT.read_bytes().splitlines(keepends=True)[:3]
    (folder / ROWS).write_bytes(b"".join(lines))
    return folder / ROWS


def read_rows(path: Path) -> Any:
    return dict(Rows(path.parent).refresh())


def make_rows_of(name: str) -> Callable[[Path], Path]:
    """The rows of one experiment."""

    def make(folder: Path) -> Path:
        rows = Rows(KEPT.parent).refresh()
        lines = [json.dumps(rows[row["hash"]]) for row in rows_of(catalogue.find(name), rows)]
        (folder / ROWS).write_text("".join(f"{line}\n" for line in lines[:6]))
        return folder / ROWS

    return make


def report_of(name: str) -> Callable[[Path], Any]:
    """What `vestige report RESULTS/NAME` writes."""
    return lambda path: report.report(path.parent / name)


def damaged_json(part: bytes, rng: random.Random) -> bytes:
    """JSON, or lines of it, with one value that is not as it was."""
    lines = part.splitlines() if part.count(b"\n}") == 0 else [part]
    at = rng.randrange(len(lines))
    tree = mutated_tree(json.loads(lines[at]), rng)
    lines[at] = json.dumps(tree, default=lambda value: [str(value)]).encode()
    return b"\n".join(lines) + b"\n"


def sealed_rows(part: bytes, _: bytes) -> bytes:
    """Every line with the hash of the configuration that it now has."""
    lines = []
    for line in part.split(b"\n"):
        try:
            row = json.loads(line)
            row["hash"] = config_hash(row["config"])
            line = json.dumps(row).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        lines.append(line)
    return b"\n".join(lines)


def check_rows_known(found: Any, good: Any) -> None:
    """A damaged line is passed over: no row is there under a wrong hash."""
    for hash_, row in found.items():
        assert config_hash(row["config"]) == hash_ == row["hash"]


RUN: dict[str, bytes] = {}  # the files of a run folder, made once


def run_files() -> dict[str, bytes]:
    """The files of a finished run with memory, and its last checkpoint."""
    if not RUN:
        from vestige.train.config import TrainConfig
        from vestige.train.training import train

        with TemporaryDirectory() as place:
            out = Path(place) / "run"
            config = TrainConfig(
                model="linear",
                method="sma",
                settings={"window": 4},
                steps=4,
                lot=40,
                train_size=120,
                test_size=30,
                accountant="rdp",
                device="cpu",
                noise_seed=1,
                out=out,
            )
            train(config)
            RUN.update({p.name: p.read_bytes() for p in out.iterdir()})
    return RUN


def make_run(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for file, content in run_files().items():
            (folder / file).write_bytes(content)
        return folder / name

    return make


def markdown_of(folder: Path) -> str:
    """What `vestige statement` prints."""
    return statement.markdown(statement.read(folder))


def make_weights(folder: Path) -> Path:
    (folder / "model.pt").write_bytes(run_files()["model.pt"])
    return folder / "model.pt"


def make_ledger(folder: Path) -> Path:
    (folder / "ledger.jsonl").write_bytes(run_files()["ledger.jsonl"])
    return folder / "ledger.jsonl"


def sealed_ledger(part: bytes, _: bytes) -> bytes:
    """Every line with the chain that it now should have."""
    lines, last = [], ""
    for line in part.split(b"\n"):
        try:
            row = json.loads(line)
            del row["chain"]
            last = ledger_format.chain(last, row)
            line = json.dumps(row | {"chain": last}).encode()
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
            pass
        lines.append(line)
    return b"\n".join(lines)


def check_nothing_forgotten(found: Any, good: Any) -> None:
    """A ledger whose lines are all there says what it said; whole lines may be cut off its end."""
    known = {event: event.count for event in good.events}
    if found.length == good.length:
        assert {event: event.count for event in found.events} == known


def small_engine() -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    x, y = torch.ones(12, 4), torch.zeros(12, dtype=torch.int64)
    engine = PrivacyEngine("rdp", noise_seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return engine, *engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method="fo",
        steps=9,
        averaging="ema",
    )


def make_checkpoint(folder: Path) -> Path:
    engine, model, optimizer, loader = small_engine()
    for x, y in loader:
        engine.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
    engine.save_checkpoint(folder / "last.ckpt", epoch=1)
    return folder / "last.ckpt"


def load_checkpoint(path: Path) -> Any:
    """Into a fresh engine, which must be as it was if the checkpoint is refused."""
    engine, model, optimizer, _ = small_engine()
    before = whole_state(engine, model, optimizer)
    random_state = torch.get_rng_state()
    try:
        engine.load_checkpoint(path)
    except VestigeError:
        assert whole_state(engine, model, optimizer) == before, "a refused checkpoint left traces"
        raise
    finally:
        torch.set_rng_state(random_state)
    return engine


def whole_state(engine: PrivacyEngine, model: nn.Module, optimizer: Any) -> str:
    states = (engine.state_dict(), model.state_dict(), optimizer.state_dict())
    torch.set_printoptions(profile="full", precision=17)
    try:
        return repr(states)
    finally:
        torch.set_printoptions(profile="default")


def check_charged(found: Any, good: Any) -> None:
    assert found.ledger.steps >= found.released >= 1


def payload(whole: bytes) -> bytes:
    return whole.split(b"\n", 2)[2]


def sealed_checkpoint(part: bytes, whole: bytes) -> bytes:
    first = whole.split(b"\n", 1)[0]
    return first + b"\n" + hashlib.sha256(part).hexdigest().encode() + b"\n" + part


def damaged_state(part: bytes, rng: random.Random) -> bytes:
    """A checkpoint that torch reads, with one value that is not as it was."""
    state = torch.load(io.BytesIO(part), weights_only=True)
    out = io.BytesIO()
    torch.save(mutated_tree(state, rng), out)
    return out.getvalue()


def make_idx(folder: Path) -> Path:
    raw = bytes([0, 0, 8, 3]) + struct.pack(">III", 3, 4, 5) + bytes(range(60))
    (folder / "images").write_bytes(raw)
    return folder / "images"


def make_mnist(folder: Path) -> Path:
    path = make_idx(folder)
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def make_cifar(folder: Path) -> Path:
    path = folder / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = 3073
            tar.addfile(info, io.BytesIO(bytes(3073)))
    return path


def published(name: str, files: int) -> Callable[[Path], Any]:
    """A publisher's set, one file of which is damaged.

    Its hash is checked before it gets here. SVHN relies on that: scipy's reader of .mat files ends
    the process on some damaged ones.
    """
    return lambda path: download.parsed(name, [path] * files)


def of_folder(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: read(path.parent)


PAGES = ("report.html", "training.svg", "memory.svg", "spectra.svg")
READERS = {
    "npz": Reader(make_npz, data.load, accepted=check_dataset),
    "npz, compressed": Reader(make_compressed, data.load, accepted=check_dataset),
    **{
        f"npz, {name} under a right checksum": Reader(
            make_npz,
            data.load,
            member(f"{name}.npy"),
            with_member(f"{name}.npy"),
            check_dataset,
        )
        for name in ("x_train", "y_train", "classes")
    },
    "idx": Reader(make_idx, lambda path: download.parse_idx(path.read_bytes())),
    "mnist": Reader(make_mnist, published("mnist", 4)),
    "cifar10": Reader(make_cifar, published("cifar10", 1), share=0.5),
    **{
        f"{name}.toml": Reader(make_toml(name), read_experiment)
        for name in ("fo-tab3", "geodp-mnist", "geodp-fig3")
    },
    **{
        f"{name}.toml with other values": Reader(
            make_toml(name), read_experiment, damage=damaged_toml
        )
        for name in ("fo-tab3", "geodp-mnist", "geodp-fig4")
    },
    "rows": Reader(make_rows, read_rows, accepted=check_rows_known, tolerant=True),
    "rows under right hashes": Reader(
        make_rows, read_rows, sealed=sealed_rows, accepted=check_rows_known, tolerant=True
    ),
    **{
        f"report of {name}, rows with other values": Reader(
            make_rows_of(name),
            report_of(name),
            damage=damaged_json,
            share=0.01,
            writes=(name,),
            tolerant=True,
        )
        for name in ("geodp-mnist", "sma-fig4", "geodp-fig4")
    },
    **{
        f"run folder, {name}": Reader(make_run(name), of_folder(read_run))
        for name in ("config.json", "result.json", "metrics.jsonl")
    },
    **{
        f"report of a run, {name} with other values": Reader(
            make_run(name),
            of_folder(write_run),
            damage=damaged_json,
            share=0.01,
            writes=PAGES,
            tolerant=True,
        )
        for name in ("config.json", "result.json", "metrics.jsonl")
    },
    "statement with other values": Reader(
        make_run("statement.json"), of_folder(markdown_of), damage=damaged_json
    ),
    "ledger with other values": Reader(
        make_ledger, ledger_file.read, sealed=sealed_ledger, damage=damaged_json
    ),
    **{
        f"report of a run, {name}": Reader(
            make_run(name), of_folder(write_run), share=0.01, writes=PAGES
        )
        for name in ("config.json", "result.json", "metrics.jsonl")
    },
    "report of a run, model.pt": Reader(  # a page without spectra is better than none
        make_run("model.pt"), of_folder(write_run), share=0.01, writes=PAGES, tolerant=True
    ),
    "statement": Reader(make_run("statement.json"), of_folder(markdown_of)),
    "weights": Reader(make_weights, lambda path: examine(Request(target=str(path))).layers),
    "ledger": Reader(make_ledger, ledger_file.read, accepted=check_nothing_forgotten),
    "ledger under a right chain": Reader(make_ledger, ledger_file.read, sealed=sealed_ledger),
    "checkpoint": Reader(make_checkpoint, checkpoint.read),
    "checkpoint under a right hash": Reader(
        make_checkpoint, load_checkpoint, payload, sealed_checkpoint, check_charged, share=0.5
    ),
    "checkpoint with other values": Reader(
        make_checkpoint,
        load_checkpoint,
        payload,
        sealed_checkpoint,
        check_charged,
        damaged_state,
        share=0.5,
    ),
}


# -- the test -------------------------------------------------------------------------------


def fuzz(name: str, count: int, folder: Path) -> Counter[str]:
    """Damage the reader's file `count` times; returns how often it was accepted and refused."""
    reader, rng = READERS[name], random.Random(f"{name} {count}")
    place = folder / "place"
    place.mkdir()
    Trap.marker = str(folder / "marker")
    path = reader.make(place)
    whole = path.read_bytes()
    good = reader.read(path)  # the undamaged file is read
    for made in reader.writes:
        if (place / made).is_dir():
            shutil.rmtree(place / made)
        else:
            (place / made).unlink(missing_ok=True)
    there = {p.name: p.read_bytes() for p in place.iterdir()}
    seen: Counter[str] = Counter()
    for trial in range(count):
        content = reader.sealed(reader.damage(reader.part(whole), rng), whole)
        path.write_bytes(content)
        where = f"{name}, mutation {trial} of {count}"
        try:
            found = reader.read(path)
        except VestigeError as error:
            seen[type(error).__name__] += 1
            assert str(error), where
        except BaseException as error:
            kept = Path(gettempdir()) / f"vestige-fuzz-{re.sub(r'[^a-z0-9]+', '-', name)}"
            kept.write_bytes(content)
            error.add_note(f"{where}; the file is kept as {kept}")
            raise
        else:
            seen["accepted"] += 1
            reader.accepted(found, good)
        assert not Path(Trap.marker).exists(), f"{where} ran code"
        now = {p.name: p.read_bytes() for p in place.iterdir() if p.name not in reader.writes}
        assert now == there | {path.name: content}, f"{where} changed a file"
    seen["mutations"] = count
    return seen


def check(name: str, count: int, folder: Path) -> None:
    seen = fuzz(name, max(3, int(count * READERS[name].share)), folder)
    print(f"fuzz {name}: {', '.join(f'{n} {what}' for what, n in sorted(seen.items()))}")
    # Damage is noticed; a few mutations may all be harmless.
    assert READERS[name].tolerant or seen["accepted"] < seen["mutations"] or count < 20
    assert seen["ConfigError"] + seen["PrivacyError"] + seen["accepted"] == seen["mutations"]


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    check(name, FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_many_times(name: str, tmp_path: Path) -> None:
    check(name, MANY, tmp_path)


def test_the_trap_works(tmp_path: Path) -> None:
    """What no reader may do: unpickle it."""
    Trap.marker = str(tmp_path / "marker")
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize("ending", ["as it was closed", "as a crash leaves it"])
def test_a_ledger_never_says_less_than_it_did(ending: str, tmp_path: Path) -> None:
    """Every single byte changed, the last line's end too: refused, or the same spending."""
    path, rng = make_ledger(tmp_path), random.Random(0)
    if ending == "as a crash leaves it":  # its last line reserves a block
        lines = path.read_bytes().splitlines(keepends=True)
        last = max(i for i, line in enumerate(lines) if b'"reserve"' in line)
        path.write_bytes(b"".join(lines[: last + 1]))
    whole, spent = path.read_bytes(), ledger_file.read(path).events
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        try:
            found = ledger_file.read(path).events
        except VestigeError:
            continue
        assert found == spent, f"byte {at} of {len(whole)}"


@pytest.mark.parametrize("kind", ["object array", "member", "torch file", "checkpoint"])
def test_no_pickle_is_run(kind: str, tmp_path: Path) -> None:
    Trap.marker = str(tmp_path / "marker")
    path = tmp_path / "file"
    if kind == "object array":
        np.savez(path.open("wb"), **arrays() | {"y_train": np.array([Trap()] * 6, dtype=object)})
    elif kind == "member":
        evil = pickle.dumps(Trap())
        path.write_bytes(with_member("x_train.npy")(evil, make_npz(tmp_path).read_bytes()))
    else:
        torch.save(Trap(), path)
    if kind == "checkpoint":
        whole = make_checkpoint(tmp_path).read_bytes()
        path.write_bytes(sealed_checkpoint(path.read_bytes(), whole))
    readers = {
        "torch file": lambda: examine(Request(target=str(path))),
        "checkpoint": lambda: checkpoint.read(path),
    }
    with pytest.raises(VestigeError):
        readers.get(kind, lambda: data.load(path))()
    assert not (tmp_path / "marker").exists()


COMMANDS = {
    "npz": "train --dataset {file} --steps 1 --lot 2 --accountant rdp --out {folder}/out --json",
    "fo-tab3.toml": "reproduce {file} --seeds 0 --out {folder}/out",
    "weights": "spectrum {file} --json",
    "ledger": "ledger show {file} --json",
    "statement": "statement {parent}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_answers_damage_with_one_line(name: str, tmp_path: Path) -> None:
    reader, rng = READERS[name], random.Random(name)
    path = reader.make(tmp_path)
    whole = path.read_bytes()
    refused = 0
    for _ in range(12):
        path.write_bytes(damaged(whole, rng))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        line = COMMANDS[name].format(file=path, folder=tmp_path, parent=path.parent)
        result = program(line)
        if result.exit_code:
            refused += 1
            assert result.exit_code == 2 and result.stderr.startswith("vestige: error:")
            assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert refused > 2
