"""The registry's entry of a statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import tiny
from vestige.errors import ConfigError
from vestige.statement import read
from vestige.statement.registry import TO_COMPLETE, Entry, entry, yaml
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_an_entry_has_what_the_statement_says_and_leaves_the_rest_to_a_person() -> None:
    reader = pytest.importorskip("yaml")
    result = train(tiny(out=Path("run"), delta=1e-7, tuning="two rates"))
    stated = read(Path("run"))
    made = entry(stated)
    text = yaml(made)
    facts = reader.safe_load(text)
    assert Entry(**facts) == made
    parameters = facts["privacy_loss"]["privacy_parameters"]
    assert parameters["delta"] == 1e-7
    assert result["epsilon"] <= parameters["epsilon"] < result["epsilon"] + 0.001
    assert facts["tier"] == 3 and "tier 3" in text
    assert facts["dp_variant"] == {"variant_name": "Approximate DP"}
    assert len(facts["unprotected_quantities"]) == len(stated["not_covered"])
    tuning = facts["implementation"]["preprocessing_and_hyperparameter_tuning"]
    assert "Declared: two rates" in tuning
    left = [name for name, value in facts.items() if value == TO_COMPLETE]
    persons = "name data_curators intended_use region sector actors registry_authors"
    assert left == [*persons.split(), "publication_date"]
    assert all(name in text.splitlines()[1] for name in left)
    assert str(result["accuracy"]) not in text


@pytest.mark.parametrize("changes", [{"noise_seed": 1}, {"noise_multiplier": 0.0}])
def test_without_a_guarantee_there_is_no_entry(changes: dict[str, object]) -> None:
    train(tiny(out=Path("run"), **changes))
    with pytest.raises(ConfigError, match="no guarantee to register"):
        entry(read(Path("run")))
