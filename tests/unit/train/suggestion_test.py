"""Suggestions: within epsilon, from public facts alone, with a reason for each setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_tables import rows, write_table
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train.config import TrainConfig
from vestige.train.suggestion import LEAST_STEPS, public_facts, suggest

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("records", [500, 60_000, 2_000_000])
def test_a_suggestion_keeps_its_epsilon_and_its_own_rules(records: int) -> None:
    write_table(Path("t.csv"))
    found = suggest(TrainConfig(dataset="t.csv", dataset_size=records), 3.0)
    event = Event(found.lot / records, found.noise_multiplier, found.steps)
    assert 2.9 < accounting.epsilon([event], found.delta) <= 3.0
    assert found.delta <= 1 / (10 * records)
    assert found.lot <= records / 4 and found.steps >= LEAST_STEPS
    names = "epsilon delta epochs lot clip noise_multiplier lr".split()
    assert list(found.reasons) == names
    assert f"--dataset-size {records}" in found.command


def test_too_few_records_are_refused_without_a_lot_that_nobody_chose() -> None:
    write_table(Path("t.csv"))
    with pytest.raises(ConfigError, match=r"^3 training records are too few to hide one among"):
        suggest(TrainConfig(dataset="t.csv", dataset_size=3), 3.0)


@pytest.mark.parametrize(("epsilon", "word"), [(1, "strong"), (10, "reasonable"), (300, "weak")])
def test_what_an_epsilon_is_worth_is_said(epsilon: float, word: str) -> None:
    write_table(Path("t.csv"))
    found = suggest(TrainConfig(dataset="t.csv", dataset_size=5000), epsilon)
    assert found.reasons["epsilon"].startswith(f"{word} by the measure of a guide")


def test_declared_facts_leave_the_data_unread() -> None:
    write_table(Path("t.csv"))
    config = TrainConfig(dataset="t.csv", dataset_size=5000)
    declared = public_facts(config)
    Path("t.csv").write_text("damaged")
    assert public_facts(config) == declared
    assert declared.parameters == 8 * 64 + 64 + 64 * 32 + 32 + 32 * 2 + 2
    with pytest.raises(ConfigError):
        public_facts(TrainConfig(dataset="t.csv"))


def test_no_value_of_a_record_has_a_part_in_it() -> None:
    path = write_table(Path("t.csv"), rows(400))
    first = suggest(TrainConfig(dataset="t.csv"), 2.0)
    others = [row | {"age": 50, "days": 1e9, "ill": "no"} for row in rows(400)]
    write_table(path, others)
    # The split goes by each record, so the number of training records may differ a little.
    second = suggest(TrainConfig(dataset="t.csv", dataset_size=first.facts.records), 2.0)
    assert (first.lot, first.lr, first.noise_multiplier) == (
        second.lot,
        second.lr,
        second.noise_multiplier,
    )


def test_the_command_trains_as_it_says() -> None:
    from tests.support.program import run_json

    write_table(Path("t.csv"), rows(400))
    found = suggest(TrainConfig(dataset="t.csv", target=("ill",)), 3.0)
    result = run_json(
        f"{found.command.removeprefix('vestige ')} --accountant rdp --device cpu --out run"
    )
    assert result["epsilon"] <= 3.0
    assert (result["lot"], result["steps"]) == (found.lot, found.steps)


def test_too_few_records_are_refused() -> None:
    write_table(Path("t.csv"))
    with pytest.raises(ConfigError, match="too few to hide one among"):
        suggest(TrainConfig(dataset="t.csv", dataset_size=64 - 1, lot=8), 3.0)
