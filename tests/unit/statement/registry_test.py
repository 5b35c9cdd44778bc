"""The registry's entry of a statement."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from yaml import safe_load

from tests.support.statements import whole
from tests.support.training import tiny
from vestige.errors import ConfigError
from vestige.statement import read
from vestige.statement.registry import SCHEMA_FILE, TO_COMPLETE, Entry, check_against, entry, yaml
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_an_entry_has_what_the_statement_says_and_leaves_the_rest_to_a_person() -> None:
    result = train(tiny(out=Path("run"), delta=1e-7, tuning="two rates"))
    stated = read(Path("run"))
    made = entry(stated)
    text = yaml(made)
    facts = safe_load(text)
    assert Entry(**facts) == made
    about = facts["deployment"]
    parameters = about["privacy_loss"]["privacy_parameters"]
    assert parameters["delta"] == 1e-7
    assert result["epsilon"] <= parameters["epsilon"] < result["epsilon"] + 0.001
    assert facts["tier"] == 3 and "tier 3" in text
    assert about["dp_variant"]["variant_name"] == "Approximate DP"
    open_parts = about["dp_variant"]["unprotected_quantities"]
    assert len(open_parts.splitlines()) == len(stated["not_covered"])
    tuning = about["implementation"]["preprocessing_and_hyperparameter_tuning"]
    assert "Declared: two rates" in tuning
    assert stated["run"]["weights_sha256"] in about["administrative"]["notes"]
    head = " ".join(line[2:] for line in text.splitlines() if line.startswith("#"))
    persons = "name data_curators intended_use data_product_region publication_date".split()
    left = ["url_slug", *(f"basic.{name}" for name in (*persons, "data_product_sector"))]
    left += ["deployment_model.actors", "deployment_model.release_type_details"]
    left += ["implementation.justification", "administrative.registry_authors"]
    assert head.endswith(f"completed: {', '.join(left)}.")
    assert text.count(TO_COMPLETE) == len(left)
    assert not re.search(rf"(?<![\w.]){re.escape(str(result['accuracy']))}(?![\w.])", text)


# A small schema in the form of the registry's, for the words that an entry must get right.
SCHEMA = """
type: object
additionalProperties: false
required: [url_slug, status, tier, deployment]
properties:
  url_slug: {type: string}
  status: {enum: [Draft, Approved]}
  tier: {enum: [1, 2, 3]}
  deployment:
    type: object
    properties:
      basic:
        properties:
          publication_date: {type: string, format: date}
          data_product_sector: {enum: [Health, Finance]}
      deployment_model:
        properties:
          release_type: {enum: [One release, Many releases]}
"""


def test_an_entry_is_checked_against_a_schema_that_is_named() -> None:
    text = yaml(entry(whole()))
    Path("schema.yaml").write_text(SCHEMA)
    check_against(text, Path("schema.yaml"))  # date and sector are left to a person
    Path("checkout/schemas").mkdir(parents=True)
    Path("checkout", SCHEMA_FILE).write_text(SCHEMA.replace("One release", "Once"))
    told = r"deployments-schema.yaml: at deployment.deployment_model.release_type, 'One release'"
    with pytest.raises(ConfigError, match=told):
        check_against(text, Path("checkout"))
    with pytest.raises(ConfigError, match=r"at the entry, Additional properties .*'more'"):
        check_against(f"{text}more: 1\n", Path("schema.yaml"))
    dated = text.replace(f'date: "{TO_COMPLETE}"', 'date: "1/2/2026"')
    with pytest.raises(ConfigError, match=r"publication_date, '1/2/2026' is not a 'date'"):
        check_against(dated, Path("schema.yaml"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("[", "no schema that can be read"),
        ("properties: {a: {type: nothing}}", "no schema that can be read"),
        ("just text", "is no schema of the registry"),
    ],
)
def test_what_is_no_schema_is_one_line(content: str | None, told: str) -> None:
    if content is not None:
        Path("schema.yaml").write_text(content)
    with pytest.raises(ConfigError, match=told) as raised:
        check_against("a: 1", Path("schema.yaml"))
    assert "\n" not in str(raised.value)


@pytest.mark.skipif("VESTIGE_REGISTRY" not in os.environ, reason="needs a checkout of the registry")
def test_an_entry_fits_the_registry_s_own_schema() -> None:
    check_against(yaml(entry(whole())), Path(os.environ["VESTIGE_REGISTRY"]))


def test_names_from_outside_are_shown_and_not_obeyed() -> None:
    stated = whole()
    stated["run"] |= {"dataset": "[x](http://e.org)", "model": "<b>x</b>"}
    text = yaml(entry(stated))
    assert "](" not in text and "<b>" not in text


@pytest.mark.parametrize("changes", [{"noise_seed": 1}, {"noise_multiplier": 0.0}])
def test_without_a_guarantee_there_is_no_entry(changes: dict[str, object]) -> None:
    train(tiny(out=Path("run"), **changes))
    with pytest.raises(ConfigError, match="no guarantee to register"):
        entry(read(Path("run")))
