"""`vestige statement`: the page, the JSON, or one line about what is wrong."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from tests.support.program import TINY, check_refused, run
from tests.support.statements import whole
from vestige import statement


def call(*arguments: str) -> Result:
    return run("statement", *arguments)


def folder_with(path: Path, content: bytes | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    if content is not None:
        (path / "statement.json").write_bytes(content)
    return path


def test_the_command_prints_the_page_or_the_json(tmp_path: Path) -> None:
    found = whole()
    run = folder_with(tmp_path / "run", json.dumps(found).encode())
    page = call(str(run))
    assert (page.exit_code, page.stdout) == (0, statement.markdown(found))
    printed = call(str(run), "--json")
    assert json.loads(printed.stdout) == found
    written = call(str(run), "--out", str(tmp_path / "signed.md"))
    assert (written.exit_code, written.stdout) == (0, f"wrote {tmp_path / 'signed.md'}\n")
    assert (tmp_path / "signed.md").read_text() == statement.markdown(found)
    call(str(run), "--json", "--out", str(tmp_path / "copy.json"))
    assert json.loads((tmp_path / "copy.json").read_text()) == found


def test_a_file_is_what_its_ending_says(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "run", json.dumps(whole()).encode())
    refused = one_line(call(str(run), "--out", str(tmp_path / "signed.doc")))
    assert "--out with the ending .doc: a statement is written as .html, .pdf or .md" in refused
    assert not (tmp_path / "signed.doc").exists()


def one_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("vestige: error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_folder_without_a_statement_is_told_in_one_line(tmp_path: Path) -> None:
    assert "is no folder" in one_line(call(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    assert "no other file of a run" in one_line(call(str(tmp_path / "empty")))
    killed = one_line(call(str(folder_with(tmp_path / "killed"))))
    assert "has no statement.json" in killed and "config.json" in killed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b"null",
        b'{"guarantee": NaN}',
        b"[" * 100_000,
        b'{"statement": "vestige privacy statement"}',
    ],
    ids=["empty", "bytes", "cut", "list", "null", "nan", "deep", "short"],
)
def test_a_damaged_statement_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    told = one_line(call(str(folder_with(tmp_path / "run", content))))
    assert "is damaged" in told and len(told) < 400


def test_mutated_statements_are_printed_or_refused_and_never_raise(tmp_path: Path) -> None:
    """Single bytes of a real file changed at random: a page, or one line, and nothing else."""
    good = json.dumps(whole()).encode()
    generator = np.random.default_rng(0)
    run = folder_with(tmp_path / "run")
    codes = set()
    for _ in range(150):
        broken = bytearray(good)
        for place in generator.integers(0, len(good), 1 + generator.integers(0, 3)):
            broken[place] = generator.integers(0, 256)
        (run / "statement.json").write_bytes(bytes(broken))
        result = call(str(run))
        if result.exit_code:
            one_line(result)
        codes.add(result.exit_code)
    assert codes == {0, 2}


def test_reading_and_printing_need_no_torch(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "run", json.dumps(whole()).encode())
    code = (
        "import sys, pathlib\n"
        "from vestige import statement\n"
        f"print(len(statement.markdown(statement.read(pathlib.Path({str(run)!r})))))\n"
        "assert 'torch' not in sys.modules and 'dp_accounting' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("empty_folder")
def test_a_statement_is_signed_checked_and_written_in_its_other_forms() -> None:
    assert run(f"{TINY} --out run").exit_code == 0
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem"], check=True)
    subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "pub.pem"], check=True)
    assert run("statement run --sign key.pem").stdout == "wrote run/statement.json.sig\n"
    assert "the signature fits" in run("statement run --verify pub.pem").stdout
    # What another program checks: the bytes of the file, and a signature in base64.
    signature = base64.b64decode(Path("run/statement.json.sig").read_bytes())
    Path("raw.sig").write_bytes(signature)
    subprocess.run(
        "openssl pkeyutl -verify -pubin -inkey pub.pem -rawin -in run/statement.json "
        "-sigfile raw.sig".split(),
        check=True,
    )
    assert "tier: 3" in run("statement run --registry").stdout
    Path("schema.yaml").write_text("properties: {tier: {enum: [2]}}")
    check_refused(run("statement run --registry --checkout schema.yaml"), "at tier, 3 is not one")
    check_refused(run("statement run --checkout schema.yaml"), "give --registry too")
    assert "| top | privacy parameters | guarantee, curve | epsilon " in (
        run("statement run --nist").stdout
    )
    assert run("statement run --out page.html").exit_code == 0
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    assert run("statement run --out page.pdf").exit_code == 0
    assert Path("page.pdf").read_bytes() == statement.pdf(statement.read(Path("run")))
    check_refused(run("statement run --nist --out map.pdf"), "give --out another ending")
    check_refused(run("statement run --registry --nist"), "give one of --json")
    check_refused(run("statement run --verify key.pem"), "is no public key")
