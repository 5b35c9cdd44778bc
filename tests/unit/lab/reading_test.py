"""What is wrong with a file is said by its name, its key and the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.experiments import FAIR, TOY
from tests.support.program import run
from vestige.errors import ConfigError
from vestige.lab.reading import read

BAD = {
    "an unknown key": (TOY + "\ncolour = 1\n", "'colour'"),
    "an unknown key at the top": ("colour = 1\n" + TOY, "top level.*'colour'"),
    "an unknown key of the protocol": (TOY.replace("lot = 50", "lots = 50"), "protocol.*'lots'"),
    "an unknown key of an arm": (TOY + 'lerning_rate = 1\n', "arm 2.*'lerning_rate'"),
    "an unknown method": (TOY.replace('"fo"', '"foo"'), r"arm 2 \(FO\).*'foo'.*did you mean fo"),
    "an ambiguous method": (TOY.replace('"fo"', '"sa-dp-sgd"'), "arm 2.*sharpness"),
    "an unknown setting": (TOY.replace("window", "widow"), "arm 2.*'widow'"),
    "a bad setting": (TOY.replace("beta = 0.8", "beta = 2.0"), "arm 2.*beta"),
    "an unknown dataset": (TOY.replace("digits", "digit"), "'digit'"),
    "no dataset": (TOY.replace('["digits"]', "[]").replace("digits = 0.2", ""), "datasets"),
    "an unknown model": (TOY.replace('"linear"', '"lineal"'), "'lineal'"),
    "a bad range": (TOY.replace("[0, 300]", "[300, 0]"), "train_range.*first, end"),
    "a lot above the data": (TOY.replace("lot = 50", "lot = 500"), "lot 500"),
    "no noise": (TOY.replace("noise_multiplier = 1.0", ""), "exactly one of noise_multiplier"),
    "an unknown kind": (TOY.replace('name = "toy"', 'name = "toy"\nkind = "odd"'), "kind.*'odd'"),
    "an unknown table": (TOY.replace('"runtime"', '"runtimes"'), "'runtimes'"),
    "an unknown reference": (TOY.replace('= "DP-SGD"\ntables', '= "SGD"\ntables'), "'SGD'"),
    "another name": (TOY.replace('"toy"', '"boy"'), "'boy' is not the file's name"),
    "no title": (TOY.replace('title = "A toy"', ""), "'title' is missing"),
    "a text for a number": (TOY.replace("lr = 0.5", 'lr = "fast"'), "fast"),
    "two arms of one label": (TOY.replace('"FO"', '"DP-SGD"'), "two arms"),
    "a word of the paper": (TOY.replace("std = 0.1", "sdt = 0.1"), "paper.*'sdt'"),
    "no arm": (TOY[: TOY.index("[[arm]]")], "no .*arm"),
    "no TOML": ("name = ", "no valid TOML"),
    "an overlap": (TOY + FAIR.replace("[300, 500]", "[299, 500]"), "overlaps"),
    "a leader that is not there": (TOY + FAIR.replace('= "FO"\n', '= "Fo"\n', 1), "'FO'"),
    "uneven tuning": (TOY + FAIR.replace("[0.1, 1.0]", "[0.1]", 1), "alike"),
    "a reported tuning seed": (TOY + FAIR.replace("seed = 100", "seed = 1"), "tuning_seed = 1"),
    "an unknown key of the fair column": (TOY + FAIR.replace("epsilons", "epsilon"), "epsilon"),
    "an unknown quick key": (TOY + "\n[quick]\nepoch = 1\n", "quick.*'epoch'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_by_name_and_key(case: str, tmp_path: Path) -> None:
    text, expected = BAD[case]
    path = tmp_path / "toy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_bad_file_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(TOY.replace('"fo"', '"foo"'))
    result = run("reproduce", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "'foo'" in result.stderr and "toy.toml" in result.stderr
    assert not (tmp_path / "out").exists()
