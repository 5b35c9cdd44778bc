"""What is written of a winner: at the cost of the search, and with one time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import torch

from tests.support.searches import RATES, content, search, times_in
from vestige.statement import read
from vestige.statement.registry import entry, yaml
from vestige.train.run_folder import ExistingFolder
from vestige.train.saved_model import load
from vestige.train.tune import tune
from vestige.train.tune.writing import settle_times


def test_the_folder_of_a_winner_is_that_of_a_run(tmp_path: Path) -> None:
    result = tune(search(out=tmp_path / "a", trials=2))
    folder = tmp_path / "a"
    assert content(folder) == {**result, "folder": str(folder)}
    config = content(folder, "config.json")
    assert config["lr"] == result["chosen"]["lr"] and config["search"] == result["search"]
    assert config["planned_epsilon"] == result["epsilon"]
    model = load(folder)
    assert model(torch.zeros(1, *model.facts["input_shape"])).shape == (1, 10)
    assert result["search"]["candidates"] == [dict(row) for row in RATES]
    # A trial's own epsilon never stands alone.
    assert result["search"]["epsilon_of_one_trial"] < result["search"]["epsilon"]
    assert any("epsilon is that of the whole search" in caveat for caveat in result["caveats"])
    stated = read(folder)
    assert stated["ledger"]["charged"] == 1 and stated["calibration"]["sigma_eff"] == {
        "smallest": 1.0,
        "largest": 1.0,
    }
    assert "and private searches" in yaml(entry(stated))


def test_files_have_the_time_at_which_the_search_began(tmp_path: Path) -> None:
    (tmp_path / "result.json").touch()
    settle_times(ExistingFolder(tmp_path), datetime(2020, 1, 2))
    assert times_in(tmp_path) == {int(datetime(2020, 1, 2).timestamp() * 1e9)}
