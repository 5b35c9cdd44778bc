"""What a statement is: its parts, their types and ranges, declared once.

The model is the JSON schema (`json_schema`, draft 2020-12, for any validator), the check (`check`)
and the way back from a run folder (`read`). Null stands for an infinite epsilon.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from vestige.errors import ConfigError

JSON_FILE, MARKDOWN_FILE, HTML_FILE = "statement.json", "statement.md", "statement.html"
_LARGEST_FILE = 64 * 2**20  # bytes; a schedule of a million steps stays below
_RUN_FILES = ("config.json", "result.json", "metrics.jsonl", "ledger.jsonl")
_LONGEST_VALUE = 60  # characters of a wrong value that an error repeats


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 3.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(expected: bool) -> BeforeValidator:
    """Python takes True for 1; JSON does not."""

    def checked(value: Any) -> Any:
        if isinstance(value, bool) is not expected:
            raise ValueError(f"it should be a {'truth value' if expected else 'number'}")
        return value

    return BeforeValidator(checked)


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity, wherever they stand."""
    json.dumps(value, allow_nan=False)
    return value


Free = Annotated[JsonValue, AfterValidator(_strict)]
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(ge=0, lt=1e300)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Integer = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Epsilon = Annotated[Number | None, Field(description="An upper bound; null is infinite.")]
Accountant = Literal["pld", "rdp", "rdp_classic"]
Status = Literal["private", "test mode", "none"]
End = Literal["as planned", "budget guard", "planned releases", "renyi filter", "open"]
SamplerKind = Literal[
    "poisson", "cyclic poisson", "groups in turn", "fixed order", "importance", "of the method"
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Span(_Part):
    """The smallest and the largest value of a number or of a schedule."""

    smallest: Number
    largest: Number


class HowItEnded(_Part):
    kind: End
    text: Text


class Guarantee(_Part):
    kind: Text = Field(description="The guarantee in words, or none.")
    epsilon: Epsilon
    delta: Delta
    accountant: Accountant
    by_accountant: dict[Accountant, Epsilon] = Field(min_length=3)
    this_run_alone: Number | None = Field(
        description="Without what the ledger held before; the claim is epsilon."
    )
    end: HowItEnded
    reason: str | None = Field(description="Why there is no guarantee.")
    meaning: list[Text]


class Group(_Part):
    records: Annotated[int, Field(ge=2), BeforeValidator(_whole)]
    delta: Delta
    epsilon: Epsilon


class Unit(_Part):
    record: Text
    adjacency: Text
    compared: Text
    several_records: Text
    groups: list[Group]


class NotCovered(_Part):
    what: Text
    text: Text


class Calibration(_Part):
    how: Text
    target_epsilon: Number | None
    max_epsilon: Number | None
    planned_epsilon: Number | None
    planned_steps: Positive | None
    accountant: Accountant
    noise_multiplier: Span
    beta: Span
    sigma_eff: Span | None = Field(
        description="The effective multipliers that releases were charged at."
    )


class CurvePoint(_Part):
    delta: Delta
    epsilon: Epsilon


class Curve(_Part):
    """Epsilon at many deltas; all hold at the same time."""

    accountant: Accountant
    points: list[CurvePoint] = Field(min_length=2)


class TradeOffPoint(_Part):
    """The least rate of misses of a test with this rate of false alarms."""

    false_alarms: Share
    misses_at_least: Share


class TradeOff(_Part):
    note: Text
    points: list[TradeOffPoint]


class GaussianDP(_Part):
    """The Gaussian mechanism that matches: an approximation."""

    mu: Number | None
    approximate: Annotated[Literal[True], _flag(True)]
    at_delta: Delta
    over_curve: Span | None
    note: Text


class Mechanism(_Part):
    method: Text
    paper: str | None
    private: bool
    guarantee: Text
    settings: dict[str, Free]
    clipping: Text
    groups: list[Text] = Field(min_length=1)
    clip_bounds: list[Number] = Field(min_length=1)
    noise_stds: Span
    count_noise: Number | None
    text: Text


class Sampler(_Part):
    kind: SamplerKind
    text: Text
    expected_lot: Positive
    sample_rate: Span
    records: Positive
    records_declared: bool


class Searched(_Part):  # what a kind of trial releases: [rate, multiplier, count]
    eta: float
    gamma: Rate
    trials: list[list[list[Number | Literal["inf"]]]] = Field(min_length=1)


class Charged(_Part):
    """Subsampled Gaussian releases; the multiplier is the effective one, inf reveals nothing."""

    sample_rate: Rate
    noise_multiplier: Number | Literal["inf"]
    count: Positive
    selection: Searched | None = Field(default=None, description="A private search instead.")


class Charges(_Part):
    events: list[Charged]
    earlier: list[Charged]
    unmade: list[Charged] = Field(
        description="Planned and not made; part of the claim, since the end may have been chosen."
    )
    charged: Count
    released: Count
    over_reported: Count = Field(description="Releases that were charged and lost in a crash.")


class GroupAlone(_Part):
    group: Text
    sigma_eff: Span | None
    epsilon: Epsilon


class Marginal(_Part):
    """What one group alone would cost: a diagnostic, not a guarantee."""

    note: Literal["diagnostic, not a guarantee"]
    accountant: Accountant
    groups: list[GroupAlone] = Field(min_length=2)


class Run(_Part):
    """Public facts of the run, each where it is known; others are kept as they are.

    What is named in outside_guarantee was computed on training records without noise.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Free]

    dataset: str = ""
    model: str = ""
    parameters: Free = None
    optimizer: Free = None
    lr: Free = None
    seed: Integer | None = None
    device: Free = None
    interrupted: bool = False
    classes: Integer | None = None
    classes_inferred: bool = False
    held_out: list[str] = []
    outside_guarantee: list[str] = []
    stopped_by: Free = None
    date: str = ""
    weights_sha256: str = ""
    held_out_release: Free = Field(
        default=None, description="A figure of the held-out records with noise, and its cost."
    )


class RunFacts(Run):
    """What a run may tell for its statement: `Run`, and facts that have another place in it."""

    tuning: Free = Field(default=None, description="A sentence about earlier runs.")
    target_epsilon: Number | None = None
    max_epsilon: Number | None = None
    planned_epsilon: Number | None = None
    versions: dict[str, Text] = {}


class Versions(_Part):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Text]

    vestige: Text
    python: Text


class Statement(_Part):
    """What a differentially private training run promises, by which accountant, and what it does
    not cover. Epsilons are upper bounds; null is infinite, that is, no guarantee.
    """

    model_config = ConfigDict(
        title="Privacy statement of a Vestige run",
        json_schema_extra={
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "urn:vestige:privacy-statement:1",
        },
    )

    statement: Literal["vestige privacy statement"]
    version: Annotated[Literal[1], _flag(False)]
    status: Status = Field(
        description=(
            "private: the guarantee holds. test mode: it does not hold towards anyone who knows "
            "the seed. none: there is no guarantee."
        )
    )
    headline: Text
    warnings: list[Text]
    guarantee: Guarantee
    unit: Unit
    covered: list[Text]
    not_covered: list[NotCovered] = Field(min_length=1)
    assumptions: list[Text] = Field(min_length=1)
    calibration: Calibration
    curve: Curve
    trade_off: TradeOff
    gaussian_dp: GaussianDP
    mechanism: Mechanism
    sampler: Sampler
    ledger: Charges
    marginal: Marginal | None
    caveats: list[Text]
    run: Run
    versions: Versions

    @model_validator(mode="after")
    def _a_guarantee_has_an_epsilon(self) -> Self:
        claim, private = self.guarantee, self.status != "none"
        finite = claim.epsilon is not None
        if not finite == private == (claim.kind != "none") == (claim.reason is None):
            raise ValueError(
                f"status {self.status!r} contradicts guarantee {claim.kind!r} with epsilon "
                f"{claim.epsilon!r}"
            )
        return self


def json_schema() -> dict[str, Any]:
    """The JSON schema of a statement."""
    return Statement.model_json_schema()


def check(statement: Any) -> Statement:
    """The statement as its model; ConfigError with the place, the value and the rule if it is none.

    Beyond the schema: a guarantee is there exactly where its epsilon is finite.
    """
    remedy = "Use a statement as engine.statement() made it."
    try:
        text = json.dumps(statement, ensure_ascii=False)
        # The name of a file may be no text.
        return Statement.model_validate_json(text.encode(errors="replace"))
    except ValidationError as error:
        raise ConfigError(f"{told(error)}. {remedy}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the statement is no JSON ({error}). {remedy}") from error


def read(folder: Path) -> dict[str, Any]:
    """The checked statement of a run folder; ConfigError where there is none or it is damaged."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder: give a run folder of vestige train.")
    path = folder / JSON_FILE
    if not path.is_file():
        there = [name for name in _RUN_FILES if (folder / name).is_file()]
        why = (
            f": it holds {', '.join(there)}, so the run was killed before its end or was made by "
            "an earlier version"
            if there
            else ", and no other file of a run: give a run folder of vestige train"
        )
        raise ConfigError(f"the folder {str(folder)!r} has no {JSON_FILE}{why}.")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it is larger than {_LARGEST_FILE >> 20} MiB")
        return Statement.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from error
    except ValueError as error:
        what = told(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} is damaged ({what}): restore it, or train again.") from error


def told(error: ValidationError) -> str:
    """The first thing that a model has refused: its place, its value and the rule."""
    first: ErrorDetails = error.errors(include_url=False)[0]
    # A place such as ledger.events[0].count, without the branch of a union.
    steps = [step for step in first["loc"] if step != "constrained-float"]
    names = (f"[{s}]" if isinstance(s, int) else f".{s[:_LONGEST_VALUE]}" for s in steps)
    place, value = "".join(names).removeprefix("."), first["input"]
    rule = first["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
    match first["type"]:
        case "json_invalid":
            return "it is no JSON"
        case "missing":
            return f"{place} is missing"
        case "extra_forbidden":
            return f"{place} is not part of a statement"
        case "string_too_short":
            rule = "it must not be empty"
        case "value_error" if not place:
            return rule
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return f"{place or 'the statement'} is {text}: {rule}"
