"""Before anything is charged: one noise for all, every candidate built, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.searches import search
from vestige.errors import ConfigError
from vestige.methods import METHODS
from vestige.privacy import accounting
from vestige.train.tune import trial
from vestige.train.tune.prepared import Plan, planned


def plan_of(tmp_path: Path, **options: Any) -> Plan:
    asked = search(**options)
    return planned(asked.base, asked.candidates, asked.law, tmp_path / "l", lambda _: None)


def test_lots_and_lengths_of_candidates_make_the_common_curve(tmp_path: Path) -> None:
    rows = ({"lot": 20}, {"lot": 60, "steps": 5}, {"lr": 1.0, "lot": 20})
    plan = plan_of(tmp_path, rows=rows, noise_multiplier=2.0)
    assert plan.bill.event.selection is not None and len(plan.bill.event.selection.trials) == 2
    assert len({setup.config.noise_multiplier for setup in plan.setups}) == 1
    assert [setup.known.steps for setup in plan.setups] == [2, 5, 2]
    own = plan_of(tmp_path, rows=({"noise_multiplier": 2.0}, {"noise_multiplier": 3.0, "lot": 60}))
    assert [setup.known.noise for setup in own.setups] == [2.0, 3.0]
    one = accounting.epsilon(own.setups[0].session().engine.ledger.merged(), 1e-5)
    assert one == 0 and own.held_out is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lot": 121}, "lot 121"),
        ({"noise_multiplier": 0.0}, "no Rényi curve"),
        ({"rows": ({"clip": (1.0, 2.0)}, {"clip": 1.0})}, "clip has 2 numbers"),
    ],
)
def test_what_no_trial_could_do_is_refused_unspent(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, **options)
    assert not list(tmp_path.iterdir())


ODD = ["dp-is", "fractional-noise", "dp-sam", "dp-ftrl", "sma", "disk"]


@pytest.mark.parametrize("name", ODD)
def test_methods_spend_what_their_search_was_charged_for(name: str, tmp_path: Path) -> None:
    """Of every kind of charge one; a trial that spent more would end the search."""
    assert METHODS[name].private
    settings = {"bands": 2} if name == "fractional-noise" else {}
    plan = plan_of(tmp_path, method=name, settings=settings, noise_multiplier=3.0, steps=3)
    outcome = trial.run(plan.setups[0], 3, lambda: False)
    assert outcome is not None and outcome.failure == "" and 0 <= outcome.score <= 1
