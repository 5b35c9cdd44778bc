"""The statement as a PDF, read back by another library."""

from __future__ import annotations

import io
import re
import sys
from functools import cache
from typing import Any

import pytest
from pypdf import PdfReader

from tests.support.statements import whole as made
from vestige.errors import ConfigError
from vestige.statement import markdown, pdf

whole = cache(made)  # nothing here changes it


def read(statement: dict[str, Any]) -> tuple[PdfReader, str]:
    reader = PdfReader(io.BytesIO(pdf(statement)))
    return reader, squeezed("".join(page.extract_text() for page in reader.pages))


def squeezed(text: str) -> str:
    """Without spaces and line ends, which depend on where a line was wrapped."""
    return re.sub(r"\s", "", text)


def test_it_says_what_the_statement_says_on_numbered_pages_with_an_outline() -> None:
    stated = whole()
    reader, text = read(stated)
    headings = re.findall(r"^#+ (.*)$", markdown(stated), re.MULTILINE)
    top, below = reader.outline
    assert [top.title, *(entry.title for entry in below)] == headings
    said = [stated["headline"], *stated["covered"], *stated["assumptions"], *stated["caveats"]]
    said += [row["text"] for row in stated["not_covered"]] + [stated["mechanism"]["text"]]
    for number in range(1, len(reader.pages) + 1):
        said.append(f"page {number} of {len(reader.pages)}")
    # A paragraph that goes on over a page has the foot of the page inside.
    unbroken = re.sub(r"Privacystatement,page\d+of\d+", "", text)
    for sentence in said[: -len(reader.pages)]:
        assert squeezed(sentence) in unbroken, sentence
    assert all(squeezed(foot) in text for foot in said[-len(reader.pages) :])


def with_charges(count: int) -> dict[str, Any]:
    charged = {"sample_rate": 0.1, "count": 4}
    events = [charged | {"noise_multiplier": 2 + step / 1000} for step in range(count)]
    return whole() | {"ledger": whole()["ledger"] | {"events": events}}


def test_a_long_table_goes_on_with_its_headings_and_loses_no_row() -> None:
    reader, text = read(with_charges(40))
    assert all(f"0.1{2 + step / 1000:g}4" in text for step in range(40))
    heads = [page.extract_text().count("effective noise multiplier") for page in reader.pages]
    assert sum(heads) == 3  # of the long table on two pages, and of the earlier charges


def test_no_heading_ends_a_page() -> None:
    """That of the mechanism would: the list before it fills a page."""
    stated = whole()
    headings = re.findall(r"^## (.*)$", markdown(stated), re.MULTILINE)
    for page in PdfReader(io.BytesIO(pdf(stated))).pages:
        lines = [line.strip() for line in page.extract_text().splitlines() if line.strip()]
        *_, last = (line for line in lines if not line.startswith("Privacy statement, page"))
        assert last not in headings


def test_what_comes_from_outside_is_shown_and_never_obeyed() -> None:
    name = "<b>x</b> [click](http://e.org) **loud** Ωμέγα " + "long" * 60
    stated = whole() | {"run": {"owner": name}}
    reader, text = read(stated)
    assert squeezed(name) in text
    assert all("/Annots" not in page for page in reader.pages)
    assert b"/URI" not in pdf(stated) and b"/JavaScript" not in pdf(stated)


def test_the_same_statement_gives_the_same_bytes() -> None:
    assert pdf(whole()) == pdf(whole())


def test_without_its_writer_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fpdf", None)
    with pytest.raises(ConfigError, match=r"fpdf2.*pip install 'vestige-dp\[cli,pdf\]'"):
        pdf(whole())
