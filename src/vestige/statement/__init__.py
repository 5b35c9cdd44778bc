"""The privacy statement of a run: what is promised, to whom, at which cost, and what is not.

`build` makes it from the public facts of a run (plan, ledger events, settings) as strict JSON
types, `markdown` writes it for the person who has to sign it, `check` compares it with the JSON
schema that ships with the package. Nothing here looks at data, weights or random numbers.

Guarantee: every epsilon in a statement is an upper bound and every false-negative rate a lower
bound, by the accountant that made the claim; the mu of Gaussian DP and the figure of one group
alone are marked as what they are, an approximation and a diagnostic.
"""

from __future__ import annotations

from vestige.statement.files import JSON_FILE, MARKDOWN_FILE, read
from vestige.statement.making import build, without
from vestige.statement.schema import check, json_schema
from vestige.statement.text import markdown

__all__ = [
    "JSON_FILE",
    "MARKDOWN_FILE",
    "build",
    "check",
    "json_schema",
    "markdown",
    "read",
    "without",
]
