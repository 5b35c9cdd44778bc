"""An entry for the registry of DP deployments (OpenDP), from a statement.

The model has the registry's fields (its schema of July 2026) that a run knows, and names those that
a person has to add. An entry that is completed describes its deployment at the registry's most
detailed level, tier 3. `check_against` compares an entry with the schema of a checkout.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vestige.checks import round_up
from vestige.errors import ConfigError
from vestige.statement.escaping import in_markdown
from vestige.statement.model import check
from vestige.statement.words import yaml_number

TO_COMPLETE = "TO BE COMPLETED BY A PERSON"
SCHEMA_FILE = "schemas/deployments-schema.yaml"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Basic(_Part):
    name: str = TO_COMPLETE
    data_curators: list[str] = [TO_COMPLETE]
    intended_use: str = TO_COMPLETE
    data_product_type: Literal["Machine learning model"] = "Machine learning model"
    data_product_region: str = TO_COMPLETE
    description: str
    publication_date: str = TO_COMPLETE
    data_product_sector: str = TO_COMPLETE


class Variant(_Part):
    variant_name: Literal["Approximate DP"] = "Approximate DP"
    data_domain: str
    unprotected_quantities: str


class Parameters(_Part):
    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)


class PrivacyLoss(_Part):
    privacy_unit: str
    privacy_unit_details: str
    privacy_parameters: Parameters
    privacy_parameters_details: str


class DeploymentModel(_Part):
    model_name: Literal["Central"] = "Central"
    model_name_details: str = "The holder of the records trains and is trusted with them."
    actors: str = TO_COMPLETE
    release_type: Literal["One release"] = "One release"
    release_type_details: str = TO_COMPLETE
    data_source_type: Literal["Static"] = "Static"
    access_type: Literal["Non-interactive"] = "Non-interactive"


class Accounting(_Part):
    post_processing: str
    composition: str


class Implementation(_Part):
    preprocessing_and_hyperparameter_tuning: str
    mechanisms: str
    justification: str = TO_COMPLETE


class Administrative(_Part):
    notes: str
    registry_authors: list[str] = [TO_COMPLETE]


class Deployment(_Part):
    basic: Basic
    dp_variant: Variant
    privacy_loss: PrivacyLoss
    deployment_model: DeploymentModel = DeploymentModel()
    accounting: Accounting
    implementation: Implementation
    administrative: Administrative


class Entry(_Part):
    """One deployment. What is TO_COMPLETE is not known to a run."""

    url_slug: str = TO_COMPLETE
    status: Literal["Draft"] = "Draft"
    tier: Literal[3] = 3
    deployment: Deployment


def entry(statement: Mapping[str, Any]) -> Entry:
    """The entry of a statement; ConfigError where it has no guarantee to register.

    Guarantee: epsilon is rounded up. Exact held-out figures are in no statement, nor in an entry.
    """
    check(statement)
    if statement["status"] != "private":
        raise ConfigError(
            f"the status of this statement is {statement['status']!r}: there is no guarantee to "
            "register."
        )
    guarantee, unit, run = statement["guarantee"], statement["unit"], statement["run"]
    who = "user" if unit["record"].startswith("one user") else "record"
    aside = {row["what"]: row["text"] for row in statement["not_covered"]}
    ledger, method = statement["ledger"], statement["mechanism"]["method"]
    before = sum(event["count"] for event in ledger["earlier"])
    searched = " and private searches" * ("selection" in str(ledger))
    deployment = Deployment(
        basic=Basic(
            description=f"The weights of a model ({in_markdown(run.get('model') or 'PyTorch')}), "
            f"trained by {in_markdown(method)} on {run.get('date') or TO_COMPLETE}."
        ),
        dp_variant=Variant(
            data_domain=f"{in_markdown(run.get('dataset') or 'the data set')}: "
            f"{statement['sampler']['records']} training {who}s (a public number)",
            unprotected_quantities=_listed(aside),
        ),
        privacy_loss=PrivacyLoss(
            privacy_unit=f"{who}-level",
            privacy_unit_details=f"{unit['record']}. Neighbouring data: {unit['adjacency']}.",
            privacy_parameters=Parameters(
                epsilon=float(round_up(guarantee["epsilon"], 3)), delta=guarantee["delta"]
            ),
            privacy_parameters_details=f"Upper bound by accountant {guarantee['accountant']}. "
            f"{guarantee['end']['text']}",
        ),
        accounting=Accounting(
            post_processing="Whatever is computed from releases, weights and public settings: "
            "optimizer, memory of releases, filters, averages.",
            composition=f"{ledger['charged']} charges of this run and {before} of earlier runs on "
            f"the same ledger, composed as subsampled Gaussian releases{searched}.",
        ),
        implementation=Implementation(
            preprocessing_and_hyperparameter_tuning=f"{aside.get('preprocessing', '')} "
            f"{aside.get('hyper-parameter tuning', '')}".strip(),
            mechanisms=_listed(
                {
                    "mechanism": statement["mechanism"]["text"],
                    "library": f"vestige-dp {statement['versions']['vestige']}",
                    "floating point": aside.get("floating point", ""),
                    "timing and platform": aside.get("side channels", ""),
                    "security": aside.get("seeds", ""),
                }
            ),
        ),
        administrative=Administrative(
            notes=f"SHA-256 of the weights: {run.get('weights_sha256') or TO_COMPLETE}"
        ),
    )
    return Entry(deployment=deployment)


def _listed(texts: Mapping[str, str]) -> str:
    """Markdown, which the registry shows its texts as."""
    return "\n".join(f"- {in_markdown(what)}: {in_markdown(text)}" for what, text in texts.items())


def check_against(written: str, checkout: Path) -> None:
    """Compare an entry, as YAML, with the registry's own schema; ConfigError where it does not fit.

    `checkout` is a checkout of the registry's data, or its schema file. What is left to a person
    has no right form yet, and is passed over.
    """
    from jsonschema import Draft7Validator, SchemaError
    from yaml import YAMLError, safe_load

    path = checkout / SCHEMA_FILE if checkout.is_dir() else checkout
    try:
        schema = safe_load(path.read_bytes())
        if not isinstance(schema, dict) or "properties" not in schema:
            raise ConfigError(f"{path} is no schema of the registry: name its {SCHEMA_FILE}.")
        Draft7Validator.check_schema(schema)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give a checkout of the registry's data, "
            "or its schema file."
        ) from error
    except (YAMLError, SchemaError) as error:
        raise ConfigError(f"{path} is no schema that can be read: restore the checkout.") from error
    validator = Draft7Validator(schema, format_checker=Draft7Validator.FORMAT_CHECKER)
    for wrong in validator.iter_errors(safe_load(written)):
        if wrong.instance != TO_COMPLETE:
            place = ".".join(map(str, wrong.absolute_path)) or "the entry"
            raise ConfigError(
                f"the entry does not fit the registry's schema, {path}: at {place}, "
                f"{wrong.message[:200]}. Mend that by hand, or take the schema of July 2026."
            )


def yaml(made: Entry) -> str:
    """The entry as YAML, with a comment about what a person has to add."""
    left = ", ".join(_left("", made.model_dump()))
    head = textwrap.fill(
        "Entry for the registry of differential privacy deployments, at tier 3 once these are "
        f"completed: {left}.",
        width=98,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )
    return "\n".join([head, *_lines(made.model_dump())]) + "\n"


def _left(place: str, value: Any) -> list[str]:
    """The places that a person has to complete, without the name that all of them begin with."""
    if isinstance(value, Mapping):
        return [each for name, item in value.items() for each in _left(f"{place}.{name}", item)]
    return [place.removeprefix(".").removeprefix("deployment.")] * (TO_COMPLETE in str(value))


def _lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """Plain YAML: nested mappings, lists of texts, and scalars as JSON writes them."""
    lines = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}:", *_lines(item, f"{indent}  ")]
        elif isinstance(item, list):
            lines += [f"{indent}{name}:", *(f"{indent}  - {json.dumps(text)}" for text in item)]
        else:
            scalar = yaml_number(item) if isinstance(item, float) else json.dumps(item)
            lines.append(f"{indent}{name}: {scalar}")
    return lines
