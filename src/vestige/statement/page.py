"""The statement as a page: its Markdown, made into HTML by markdown-it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.statement.words import markdown

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Privacy statement</title>
<style>
body {{ max-width: 46rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 sans-serif; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #999; padding: .2rem .6rem; }}
thead:not(:has(th:not(:empty))) {{ display: none; }}
</style>
</head>
<body>
<p><a href="report.html">The page of the run</a></p>
{body}</body>
</html>
"""


def html(statement: Mapping[str, Any]) -> str:
    """The statement as one HTML file that loads nothing and runs no script.

    Guarantee: nothing in the statement is obeyed, as in its Markdown; HTML in it is text.
    """
    return _PAGE.format(body=reader().render(markdown(statement)))


def reader() -> MarkdownIt:
    """What reads the Markdown of a statement: tables, and no HTML."""
    try:
        from markdown_it import MarkdownIt
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the page of a statement needs markdown-it-py, which is not installed: pip install "
            "'vestige-dp[cli]', or take statement.md."
        ) from error
    return MarkdownIt("commonmark", {"html": False}).enable("table")
