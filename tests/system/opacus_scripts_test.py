"""The runner of Opacus' scripts swaps imports, counts lines, and the page has its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools.opacus_scripts import SCRIPTS, Script, cells_of, edited, outcome, replaced, swapped

PAGE = (Path(__file__).parents[2] / "docs" / "from-opacus.md").read_text()
SOURCE = """import opacus
from opacus.utils.batch_memory_manager import BatchMemoryManager  # of opacus
    from opacus import PrivacyEngine
import opacusother
name = "from opacus"
"""


def test_nothing_but_the_import_is_swapped():
    assert swapped([SOURCE])[0] == (
        "import vestige\n"
        "from vestige.utils.batch_memory_manager import BatchMemoryManager  # of opacus\n"
        "    from vestige import PrivacyEngine\n"
        "import opacusother\n"
        'name = "from opacus"\n'
    )


def test_lines_are_counted_that_are_changed_added_or_taken_away(tmp_path):
    cells = [{"cell_type": "code", "source": ["a = 1\n", "b = 2\n", "c = 3"]}]
    cells += [
        {"cell_type": "markdown", "source": ["a = 1"]},
        {"cell_type": "code", "source": ["d"]},
    ]
    (tmp_path / "some.ipynb").write_text(json.dumps({"cells": cells}))
    assert cells_of(tmp_path / "some.ipynb") == ["a = 1\nb = 2\nc = 3", "d"]
    edits = {"a = 1": "a = 7", "b = 2\n": "", "d": "d\ne\nf"}
    assert edited(Script("some.ipynb", edits=edits), tmp_path) == 4
    assert edited(Script("some.ipynb", short={"a = 1": "a = 0"}), tmp_path) == 0
    with pytest.raises(SystemExit, match="'z' is not in the script"):
        replaced(["a"], {"z": ""})


def test_an_outcome_tells_refusals_from_failures():
    run = {"cells": 1, "caveats": [], "problem": None}
    assert outcome(run) == "runs"
    assert outcome(run | {"caveats": ["rows differ: pad them"]}) == "runs; caveat: rows differ"
    problem = {"cell": 1, "line": 7, "said": "ConfigError: x=1 is refused: why. What to do."}
    assert outcome(run | {"problem": problem}) == "line 7 refused: x=1 is refused"
    problem = {"cell": 3, "line": 7, "said": "TypeError: no"}
    assert (
        outcome({"cells": 4, "caveats": [], "problem": problem})
        == "cell 3 fails with TypeError: no"
    )


def test_the_page_has_a_row_for_every_script_and_they_run():
    rows = dict(re.findall(r"^\| ([\w -]+?) \| (?=.* \| \d+ \|)(.*) \|$", PAGE, re.M))
    assert rows.keys() == SCRIPTS.keys()
    for name, row in rows.items():
        first, count, last = (part.strip() for part in row.split("|"))
        assert (last or first).startswith("runs"), name
        assert bool(int(count)) == bool(SCRIPTS[name].edits) == bool(last), name
