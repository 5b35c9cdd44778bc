"""A statement for people: Markdown that a privacy officer can read from the top and sign.

Epsilons are rounded up and lower bounds down, so that no printed figure claims more than the JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vestige.checks import digits_up, round_down, round_up
from vestige.statement.escaping import all_in_markdown

_MOST_EVENTS = 40  # rows of the ledger's table; the JSON holds them all
_MOST_GROUPS = 12
_MOST_VALUES = 8  # of a list in a cell
_NO_GUARANTEE = "no guarantee"


def markdown(statement: Mapping[str, Any]) -> str:
    """The statement as Markdown.

    Guarantee: nothing in the statement is obeyed: no HTML, no link, no heading or table of its own.
    """
    statement = all_in_markdown(statement)
    parts = [
        ["# Privacy statement", f"**{statement['headline']}**"],
        _bullets("Warnings", statement["warnings"]),
        _claim(statement),
        _unit(statement["unit"]),
        _bullets("What is covered", statement["covered"]),
        _not_covered(statement["not_covered"]),
        _bullets("What has to be true", statement["assumptions"]),
        ["## Mechanism", statement["mechanism"]["text"]],
        _sampler(statement["sampler"]),
        _calibration(statement["calibration"]),
        _curve(statement),
        _trade_off(statement["trade_off"]),
        _gaussian(statement["gaussian_dp"]),
        _ledger(statement["ledger"]),
        _marginal(statement["marginal"]),
        _settings(statement),
        _bullets("Notes of the run", statement["caveats"]),
        _versions(statement["versions"]),
        _signature(statement),
    ]
    return "\n\n".join(block for part in parts for block in part) + "\n"


def _claim(statement: Mapping[str, Any]) -> list[str]:
    guarantee = statement["guarantee"]
    rows = [
        ("guarantee", guarantee["kind"]),
        ("epsilon", _epsilon(guarantee["epsilon"])),
        ("delta", f"{guarantee['delta']:g}"),
        ("accountant of the claim", guarantee["accountant"]),
    ]
    if statement["ledger"]["earlier"]:
        rows.append(("epsilon of this run alone", _epsilon(guarantee["this_run_alone"])))
    rows += [
        (f"epsilon by {name}", _epsilon(value))
        for name, value in guarantee["by_accountant"].items()
    ]
    found = ["## The guarantee", _table(("", ""), rows), guarantee["end"]["text"]]
    if guarantee["reason"] is not None:
        found.append(f"There is no guarantee because {guarantee['reason']}.")
    return found + list(guarantee["meaning"])


def _unit(unit: Mapping[str, Any]) -> list[str]:
    rows = [
        (group["records"], _epsilon(group["epsilon"], "no bound"), f"{group['delta']:g}")
        for group in unit["groups"]
    ]
    return [
        "## Whom it protects",
        f"Unit of privacy: {unit['record']}. Neighbouring data: "
        f"{unit['adjacency']}. {unit['compared']}",
        unit["several_records"],
        _table(("records of one person", "epsilon at most", "delta"), rows),
    ]


def _not_covered(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"- **{row['what']}**: {row['text']}" for row in rows]
    return ["## What is not covered", "\n".join(lines)]


def _sampler(sampler: Mapping[str, Any]) -> list[str]:
    declared = "declared" if sampler["records_declared"] else "read off the data"
    rows = [
        ("sampler", sampler["kind"]),
        ("expected lot", sampler["expected_lot"]),
        ("sampling rate of the plan", _range(sampler["sample_rate"])),
        ("records", f"{sampler['records']} ({declared}, public)"),
    ]
    return ["## Sampler", sampler["text"], _table(("", ""), rows)]


def _calibration(facts: Mapping[str, Any]) -> list[str]:
    rows = [
        ("noise multiplier (joint)", _range(facts["noise_multiplier"])),
        ("beta", _range(facts["beta"])),
        ("effective multiplier charged (sigma_eff)", _range(facts["sigma_eff"])),
        ("planned releases", _value(facts["planned_steps"])),
        ("epsilon of all planned releases", _optional(facts["planned_epsilon"])),
        ("target epsilon", _value(facts["target_epsilon"])),
        ("budget guard (max_epsilon)", _value(facts["max_epsilon"])),
    ]
    return ["## Calibration", facts["how"], _table(("", ""), rows)]


def _curve(statement: Mapping[str, Any]) -> list[str]:
    curve, claimed = statement["curve"], statement["guarantee"]["delta"]
    rows = [
        (
            f"{point['delta']:g}" + (" (claimed)" if point["delta"] == claimed else ""),
            _epsilon(point["epsilon"]),
        )
        for point in curve["points"]
    ]
    return [
        "## Epsilon for every delta",
        f"Upper bounds by accountant {curve['accountant']}. All rows hold at the same time.",
        _table(("delta", "epsilon at most"), rows),
    ]


def _trade_off(trade_off: Mapping[str, Any]) -> list[str]:
    if not trade_off["points"]:
        return []
    rows = [
        (f"{point['false_alarms']:g}", round_down(point["misses_at_least"], 4))
        for point in trade_off["points"]
    ]
    return [
        "## Trade-off curve",
        "Whoever tests whether a given record was used makes two kinds of errors: false alarms "
        "(it was not used) and misses (it was). With at most this rate of false alarms, at least "
        "this rate of misses, whatever the test and whatever is known of the other records.",
        _table(("false alarms", "misses at least"), rows),
    ]


def _gaussian(facts: Mapping[str, Any]) -> list[str]:
    if facts["mu"] is None:
        return []
    over = facts["over_curve"]
    reach = "" if over is None else f" ({_range(over, 4)} over the curve)"
    return [
        "## Gaussian DP equivalent (approximate)",
        f"mu = {facts['mu']:.4g}{reach}. {_sentence(facts['note'])}",
    ]


def _ledger(ledger: Mapping[str, Any]) -> list[str]:
    lost = ledger["over_reported"]
    words = (
        f"{ledger['charged']} charges for {ledger['released']} releases. Each row is a Gaussian "
        "release on a lot drawn with that rate, composed with itself that often."
    )
    if lost:
        words += (
            f" {lost} of the charged releases were lost in a crash: they are counted all the same, "
            "so epsilon can only be too large."
        )
    found = ["## Ledger", words, _events(ledger["events"])]
    if ledger["earlier"]:
        found += [
            "Charged before this run, by other runs in the same ledger; part of the claim:",
            _events(ledger["earlier"]),
        ]
    if ledger["unmade"]:
        found += ["Planned and not made; part of the claim:", _events(ledger["unmade"])]
    return found


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (f"{event['sample_rate']:.6g}", _number(event["noise_multiplier"]), event["count"])
        for event in events[:_MOST_EVENTS]
    ]
    text = _table(("sampling rate", "effective noise multiplier", "count"), rows)
    more = len(events) - _MOST_EVENTS
    return f"{text}\n\nand {more} more rows, all in statement.json." if more > 0 else text


def _marginal(marginal: Mapping[str, Any] | None) -> list[str]:
    if marginal is None:
        return []
    groups = marginal["groups"]
    rows = [
        (group["group"], _range(group["sigma_eff"]), _epsilon(group["epsilon"]))
        for group in groups[:_MOST_GROUPS]
    ]
    more = len(groups) - _MOST_GROUPS
    return [
        "## One group alone (diagnostic, not a guarantee)",
        "What the release of one group of parameters would cost if nobody saw the others, by "
        f"{marginal['accountant']}: the figure that papers on group-wise noise plot. A reader of "
        "the model sees all groups, so this is not the cost of the model.",
        _table(("group", "multiplier", "diagnostic"), rows)
        + (f"\n\nand {more} more groups, all in statement.json." if more > 0 else ""),
    ]


def _settings(statement: Mapping[str, Any]) -> list[str]:
    facts = statement["mechanism"]
    rows: list[tuple[Any, ...]] = [("method", facts["method"]), ("clipping", facts["clipping"])]
    rows += [(f"{facts['method']}: {name}", _value(v)) for name, v in facts["settings"].items()]
    rows += [(name.replace("_", " "), _value(v)) for name, v in statement["run"].items()]
    return ["## Settings", _table(("", ""), rows)]


def _versions(versions: Mapping[str, Any]) -> list[str]:
    return ["## Software", ", ".join(f"{k} {v}" for k, v in versions.items())]


def _signature(statement: Mapping[str, Any]) -> list[str]:
    if statement["status"] != "private":
        return [
            "## Signature",
            "Not for signature: this run gives no privacy guarantee that could be signed.",
        ]
    guarantee = statement["guarantee"]
    boxes = [
        "One row of the data is all that one person contributed, or the table for several records "
        "was read instead of the headline.",
        "Preprocessing and tuning on this data are accounted for elsewhere, or did not happen.",
        "Other releases from the same data are in the ledger, or were added up by hand.",
        "What is published is in the list of what is covered, and nothing else.",
    ]
    lines = ["name and role", "date", "signature"]
    return [
        "## Signature",
        f"I have read this statement of epsilon {_epsilon(guarantee['epsilon'])} at delta "
        f"{guarantee['delta']:g} and confirm:",
        "\n".join(f"- [ ] {box}" for box in boxes),
        _table(("", ""), [(line, "_" * 30) for line in lines]),
    ]


def _bullets(title: str, lines: Sequence[Any]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(value) for value in line)} |" for line in lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _epsilon(value: float | None, without: str = _NO_GUARANTEE) -> str:
    if value is not None and value >= 1e6:
        return f"{digits_up(value, 4):.4g}"
    return round_up(value, 3, without)


def _optional(value: float | None) -> str:
    return "-" if value is None else _epsilon(value)


def _number(value: float | str) -> str:
    return str(value) if isinstance(value, str) else f"{value:.6g}"


def _range(bounds: Mapping[str, float] | None, digits: int = 6) -> str:
    if bounds is None:
        return "-"
    low, high = f"{bounds['smallest']:.{digits}g}", f"{bounds['largest']:.{digits}g}"
    return low if low == high else f"{low} to {high}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(_value(item) for item in value[:_MOST_VALUES])
        return f"{shown}, ... ({len(value)} values)" if len(value) > _MOST_VALUES else shown
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    return str(value)
