"""Every number of docs/results.md, computed again from the rows by code that the report has not.

A claim is a function that yields the sentences of the page that it computes (claims_fo.py,
claims_sma.py and claims_others.py). Each must be there, once. What is left of the page without
them, and without the names and settings that no row could tell, has no number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import pytest

from tests.support import claims_fo, claims_others, claims_sma
from tests.support.measured import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text()
CLAIMS: dict[str, Callable[[], Iterator[str]]] = {
    claim.__name__: claim
    for claim in (*claims_fo.CLAIMS, *claims_sma.CLAIMS, *claims_others.CLAIMS)
}
# Numbers of these are names: code, links, data sets, items of the papers.
NAMES = (
    r"`[^`]*`",
    r"\]\([^)]*\)",
    r"^\[[^\]]+\]: \S+$",
    r"^    .*$",
    r"\b(?:fo|sma|geodp)-[a-z0-9-]+",
    r"\[(?:anchor-cifar10|ceiling-scatter)\]",
    r"CIFAR-100?\b|ResNet-18|arXiv \d+\.\d+",
    r"\b(?:[Tt]ables?|[Ff]igures?) \d(?:, \d)*\b",
)
# What no row could tell, each in its sentence.
STATED = (
    "an MLP with 64 and 32 hidden units",
    "SVHN here is not the published 32 x 32 file",
    "CIFAR-10, 95 % intervals",
    "The first 458 rows were made before",
)


def flowing(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@functools.cache
def sentences(name: str) -> list[str]:
    return [flowing(sentence) for sentence in CLAIMS[name]()]


@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_says_what_the_rows_say(name: str) -> None:
    made = sentences(name)
    assert made
    page = flowing(PAGE)
    for sentence in made:
        assert page.count(sentence) == 1, sentence


def test_open_questions_say_what_the_rows_say() -> None:
    page = flowing((ROOT / "docs" / "open-questions.md").read_text())
    for sentence in claims_others.open_questions():
        assert page.count(sentence) == 1, sentence


def without(page: str, known: list[str]) -> str:
    """A page without the sentences that are computed, the names and what no row could tell."""
    for pattern in NAMES[2:4]:
        page = re.sub(pattern, " ", page, flags=re.M)
    page = flowing(page)
    for sentence in sorted(known, key=len, reverse=True):
        page = page.replace(sentence, " ... ")
    for pattern in NAMES:
        page = re.sub(pattern, " ", page)
    return page


def test_no_number_is_left_out() -> None:
    computed = [sentence for name in CLAIMS for sentence in sentences(name)]
    assert all(sentence in flowing(PAGE) for sentence in STATED)
    rest = without(PAGE, [*computed, *STATED])
    assert re.findall(r"[^.|]*\d[^.|]*", rest) == []


def test_a_stale_number_is_found_wherever_it_stands() -> None:
    """Each number of the page, changed: it is missing in its sentence, or left over."""
    known = [*(s for name in CLAIMS for s in sentences(name)), *STATED]
    page = flowing(PAGE)
    for number in ("0.3184", "0.3626", "4.85", "18 of 18", "0.0012", "250 epochs", "1.34"):
        for place in re.finditer(rf"(?<![\d.]){re.escape(number)}(?!\d)", page):
            changed = page[: place.start()] + "9" + page[place.start() :]
            broken = any(sentence not in changed for sentence in known)
            assert broken, page[place.start() - 40 : place.end() + 40]


def test_the_verdicts_can_be_read_in_a_minute() -> None:
    """The page opens with its table of at most fifteen lines, of words and not of lists."""
    head, table, _ = PAGE.split("\n\n", 2)
    assert head.startswith("# ") and "\n" not in head
    lines = table.splitlines()
    assert len(lines) <= 15 and all(line.count("|") == 5 for line in lines)
    read = " ".join(" ".join(line.split("|")[1:4]) for line in lines[2:])  # then comes the command
    assert len(re.sub(r"\]\([^)]*\)|[\[\]`]", " ", read).split()) <= 240


OF_ACCURACY = ("scatter", "wrn", "prior")  # these are docs/accuracy.md's


def test_every_table_is_linked_and_every_link_leads_to_one() -> None:
    links = dict(re.findall(r"^\[([\w-]+)\]: \.\./results/([\w-]+)/table\.md$", PAGE, re.M))
    assert links and all(name == folder for name, folder in links.items())
    made = {path.parent.name for path in (ROOT / "results").glob("*/table.json")}
    assert links.keys() <= made
    assert all(name.startswith(OF_ACCURACY) for name in made - links.keys())
    body = PAGE.partition("\n[fo-tab1]: ")[0]
    for name in links:
        assert f"[{name}]" in body


def main() -> None:
    """Print what the rows say and the page does not, and numbers that no row has said."""
    made = [sentence for name in CLAIMS for sentence in sentences(name)]
    for sentence in made:
        if flowing(PAGE).count(sentence) != 1:
            print("should say:", sentence)
    for rest in re.findall(r"[^.|]*\d[^.|]*", without(PAGE, [*made, *STATED])):
        print("nobody said:", rest.strip())


if __name__ == "__main__":
    main()
