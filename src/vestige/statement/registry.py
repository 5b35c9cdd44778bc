"""An entry for the registry of DP deployments (OpenDP), from a statement.

The model has the registry's fields that a run knows, and names those that a person has to add. An
entry that is completed describes its deployment at the registry's most detailed level, tier 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vestige.checks import round_up
from vestige.errors import ConfigError
from vestige.statement.model import check
from vestige.statement.words import yaml_number

TO_COMPLETE = "TO BE COMPLETED BY A PERSON"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Variant(_Part):
    variant_name: Literal["Approximate DP"] = "Approximate DP"


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
    release_type: Literal["One-time"] = "One-time"
    data_source_type: Literal["Static"] = "Static"
    access_type: Literal["Non-interactive"] = "Non-interactive"


class Accounting(_Part):
    post_processing: str
    composition: str


class Mechanisms(_Part):
    mechanism: str
    library: str
    version: str
    floating_point: str
    timing: str
    security: str


class Implementation(_Part):
    preprocessing_and_hyperparameter_tuning: str
    mechanisms: Mechanisms
    justification: str = TO_COMPLETE


class Entry(_Part):
    """One deployment. What is TO_COMPLETE is not known to a run."""

    tier: Literal[3] = 3
    name: str = TO_COMPLETE
    data_curators: str = TO_COMPLETE
    intended_use: str = TO_COMPLETE
    region: str = TO_COMPLETE
    sector: str = TO_COMPLETE
    actors: str = TO_COMPLETE
    registry_authors: str = TO_COMPLETE
    publication_date: str = TO_COMPLETE
    training_date: str
    data_domain: str
    dp_variant: Variant = Variant()
    privacy_loss: PrivacyLoss
    deployment_model: DeploymentModel = DeploymentModel()
    unprotected_quantities: list[str]
    accounting: Accounting
    implementation: Implementation


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
    aside = {row["what"]: row["text"] for row in statement["not_covered"]}
    mechanism, ledger = statement["mechanism"], statement["ledger"]
    before = sum(event["count"] for event in ledger["earlier"])
    return Entry(
        training_date=run.get("date") or TO_COMPLETE,
        data_domain=f"{run.get('dataset') or 'the data set'}: {statement['sampler']['records']} "
        "training records (a public number)",
        privacy_loss=PrivacyLoss(
            privacy_unit="Record",
            privacy_unit_details=f"{unit['record']}. Neighbouring data: {unit['adjacency']}.",
            privacy_parameters=Parameters(
                epsilon=float(round_up(guarantee["epsilon"], 3)), delta=guarantee["delta"]
            ),
            privacy_parameters_details=f"Upper bound by accountant {guarantee['accountant']}. "
            f"{guarantee['end']['text']}",
        ),
        unprotected_quantities=[f"{what}: {text}" for what, text in aside.items()],
        accounting=Accounting(
            post_processing="Whatever is computed from releases, weights and public settings: "
            "optimizer, memory of releases, filters, averages.",
            composition=f"{ledger['charged']} charges of this run and {before} of earlier runs on "
            "the same ledger, composed as subsampled Gaussian releases.",
        ),
        implementation=Implementation(
            preprocessing_and_hyperparameter_tuning=f"{aside.get('preprocessing', '')} "
            f"{aside.get('hyper-parameter tuning', '')}".strip(),
            mechanisms=Mechanisms(
                mechanism=mechanism["text"],
                library="vestige-dp",
                version=statement["versions"]["vestige"],
                floating_point=aside.get("floating point", ""),
                timing=aside.get("side channels", ""),
                security=aside.get("seeds", ""),
            ),
        ),
    )


def yaml(made: Entry) -> str:
    """The entry as YAML, with a comment about what a person has to add."""
    left = [name for name, value in made if value == TO_COMPLETE]
    head = (
        "# Entry for the registry of differential privacy deployments, at tier 3 once these are\n"
        f"# completed: {', '.join(left)}, implementation.justification.\n"
    )
    return head + "\n".join(_lines(made.model_dump())) + "\n"


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
