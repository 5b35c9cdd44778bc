"""The privacy statement of a run: what is promised, to whom, at which cost, and what is not.

`build` makes it from the public facts of a run (plan, ledger events, settings) as strict JSON
types, `markdown` writes it for the person who has to sign it, `check` compares it with the model
that is also its JSON schema. Nothing here looks at data, weights or random numbers.

Guarantee: every epsilon in a statement is an upper bound and every false-negative rate a lower
bound, by the accountant that made the claim; the mu of Gaussian DP and the figure of one group
alone are marked as what they are, an approximation and a diagnostic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vestige.statement.claim import build, without
    from vestige.statement.model import (
        HTML_FILE,
        JSON_FILE,
        MARKDOWN_FILE,
        check,
        json_schema,
        read,
    )
    from vestige.statement.page import html
    from vestige.statement.printed import pdf
    from vestige.statement.words import markdown, model_card, nist_map

__all__ = [
    "HTML_FILE",
    "JSON_FILE",
    "MARKDOWN_FILE",
    "build",
    "check",
    "html",
    "json_schema",
    "markdown",
    "model_card",
    "nist_map",
    "pdf",
    "read",
    "without",
]
# Of the others: model.
_HOMES = dict.fromkeys(("markdown", "model_card", "nist_map"), "words") | {
    "build": "claim",
    "without": "claim",
    "html": "page",
    "pdf": "printed",
}


def __getattr__(name: str) -> Any:
    """Import on first use: whoever escapes a name, or reads a statement, needs no accountant."""
    if name not in __all__:
        raise AttributeError(f"module 'vestige.statement' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'model')}"), name)
