"""Words that come from outside (names of data, methods, files, classes), shown and never obeyed.

For Markdown and for the terminal: HTML pages are templates, which escape by themselves.
"""

from __future__ import annotations

import re

from vestige.checks import one_line

# What Markdown, GitHub's form of it included, could take for markup. An underscore inside a word is
# none, nor are brackets that neither link, nor define, nor tick a box, nor a lone < or >.
_MARKUP = re.compile(
    r"[&`*\\~$#@]|<(?=[^\W\d_]|[/!?])"  # entities, code, emphasis, formulas, mentions, HTML
    r"|\](?=[(\[])|^\[(?=[ x]\]|.*\]:)"  # links, images, boxes, definitions and footnotes
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis
    r"|^[-+=>]|(?<=^\d)[.)](?=\s|$)|(?<=^\d\d)[.)](?=\s|$)"  # lists, lines and quotes
    r"|:(?=//)|(?<=mailto):|(?<=xmpp):|(?<=www)\.",  # addresses that become links by themselves
    re.IGNORECASE,
)


def in_markdown(value: object) -> str:
    """Text that any Markdown reader shows as it is.

    Character references, since a backslash leaves the markup in the file for other readers; the
    bar of a table is the exception that its readers expect.
    """
    text = _MARKUP.sub(lambda found: f"&#{ord(found[0])};", one_line(value))
    return text.replace("|", "\\|")


def in_code(value: object) -> str:
    """Text between backticks, where nothing but a backtick is markup."""
    return one_line(value).replace("`", "'")


def in_terminal(value: object) -> str:
    """Text for a table or a bar of rich, which would obey [brackets]."""
    from rich.markup import escape  # rich comes with the command line alone

    return escape(one_line(value))
