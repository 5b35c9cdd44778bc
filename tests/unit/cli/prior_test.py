"""`vestige prior`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import check_refused, plain, run, run_json

pytestmark = pytest.mark.usefixtures("empty_folder")
TINY = "--steps 2 --batch 4 --side 8 --device cpu"


def test_it_goes_on_until_nothing_is_left() -> None:
    told = run_json(f"prior {TINY} --minutes 1e-9")
    assert (told["file"], told["step"], told["done"]) == ("prior.pt", 1, False)
    train = "train --recipe prior --weights prior.pt --lot 64 --epochs 1 --out run"
    check_refused(run(train), "unfinished, at step 1 of 2")
    assert "nothing is left" in plain(run(f"prior prior.pt {TINY}").stdout)
    check_refused(run("prior --steps 3 --batch 4 --side 8"), "was begun with")
    check_refused(run("prior other.pt --device soup"), "device 'soup' is unknown")
    assert not Path("run").exists() and not Path("other.pt").exists()
