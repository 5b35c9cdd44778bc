"""`vestige export`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import TINY, check_refused, run

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_each_form_names_what_it_has_written() -> None:
    assert run(f"{TINY} --out run").exit_code == 0
    assert run("export run --torch-export").stdout == "wrote run/model.pt2\n"
    assert "wrote run/hf/README.md" in run("export run --hf").stdout
    assert "wrote hub/README.md" in run("export run --hf --out hub").stdout
    check_refused(run("export run"), "give one of --torch-export, --onnx and --hf")
    check_refused(run("export run --onnx --hf"), "give one of")
    check_refused(run("export nowhere --hf"), "is no folder")
    Path("run/model.json").unlink()
    check_refused(run("export run --hf"), "has no model.json")
