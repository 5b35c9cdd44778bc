"""Values as a statement holds them: strict JSON types, and ranges where a setting is a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vestige.checks import as_json
from vestige.errors import PrivacyError
from vestige.privacy.ledger import Event

# What a statement must never hold, whoever hands it over.
_SECRET = ("noise_seed", "key", "generator_state")


def plain(value: Any) -> Any:
    """`value` as strict JSON: no infinity, no arrays, no objects; a path is its last part."""
    return as_json(value, _described)


def _described(value: Any) -> str:
    # A representation may hold anything; the name of a class holds nothing.
    return value.name if isinstance(value, Path) else f"<{type(value).__name__}>"


def public_facts(run: Mapping[str, Any] | None) -> dict[str, Any]:
    """The facts of a run as JSON; where its files lay is nobody's business."""
    facts = plain(run or {})
    for name in _SECRET:
        if name in facts:
            raise PrivacyError(
                f"run facts hold {name!r}, which is a secret of the run: a statement is made to be "
                "published. Leave it out."
            )
    if isinstance(facts.get("dataset"), str):
        facts["dataset"] = Path(facts["dataset"]).name
    assert isinstance(facts, dict)
    return facts


def span(values: float | Sequence[float]) -> dict[str, float]:
    """The smallest and the largest value of a number or of a schedule."""
    many = values if isinstance(values, list | tuple) else (values,)
    return {"smallest": float(min(many)), "largest": float(max(many))}


def charged_span(events: Sequence[Event]) -> dict[str, float] | None:
    """The smallest and the largest finite multiplier that was charged."""
    known = [e.noise_multiplier for e in events if math.isfinite(e.noise_multiplier)]
    return span(known) if known else None


def event_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Events as the ledger's own JSON writes them."""
    return [
        {
            "sample_rate": event.sample_rate,
            "noise_multiplier": (
                event.noise_multiplier if math.isfinite(event.noise_multiplier) else "inf"
            ),
            "count": event.count,
        }
        for event in events
    ]


def shown(bounds: Mapping[str, float], digits: int = 6) -> str:
    """A range in words."""
    low, high = f"{bounds['smallest']:.{digits}g}", f"{bounds['largest']:.{digits}g}"
    return low if low == high else f"between {low} and {high}"
