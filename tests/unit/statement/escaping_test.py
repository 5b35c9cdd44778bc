"""Names that come from outside are shown and never obeyed: in Markdown and on the terminal."""

from __future__ import annotations

import copy
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.text import Text
from typer.testing import CliRunner

from tests.support.small_runs import private, run
from tests.support.statements import made, whole
from vestige import statement
from vestige.checks import one_line
from vestige.cli.app import app
from vestige.methods import DPSGD
from vestige.statement import words as page_words
from vestige.statement.escaping import in_code, in_markdown, in_terminal
from vestige.train import training
from vestige.train.config import TrainConfig

HOSTILE = [
    "<script>alert(1)</script>",
    "a\n\n# EPSILON IS 0.01, SIGNED OFF\n\n",
    "`rm -rf`|x|**b**",
    "[x](javascript:alert(1))",
    "![x](http://evil.example/?q)",
    "[x]: http://evil.example",
    "<https://evil.example>",
    "https://evil.example and www.evil.example",
    "&lt;b&gt;",
    "\x1b[2J\x1b[31mred",
    "|a|b|\n|-|-|\n|epsilon|0|",
    "[x] signed",
    "1. one",
    "- item",
    "> quote",
    "# heading",
    "_em_ __strong__ *em* ~~gone~~ $x$",
    "a\\",
    "\u202e0.1 nolispe",
    "==",
    "<img src=x onerror=alert(1)>",
]
PLACES = {
    "{}": {"p"},
    "- {}": {"ul", "li"},
    "- **what**: {}": {"ul", "li", "strong"},
    "**{}**": {"p", "strong"},
    "# {}: title": {"h1"},
    "| a | b |\n| --- | --- |\n| x | {} |": {"table", "thead", "tbody", "tr", "th", "td"},
}


def rendered(page: str) -> tuple[set[str], str]:
    """The tags of a page, by a CommonMark reader that lets HTML through, and its text."""
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    written = reader.render(page)
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z!?][\w]*)", written))
    return tags, html.unescape(re.sub(r"<[^>]*>", "", written))


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="<>[](){}!`*_~|\\#+-=&;:/.@$1)ax w\n\x1b\u202e'\"", max_size=25))
@example(text="a_b_c _d_ e__")
@example(text="_")
def test_no_text_is_markup(place: str, text: str) -> None:
    shown = in_markdown(f"{text}.")
    tags, words = rendered(place.format(shown))
    assert tags <= PLACES[place]
    assert one_line(f"{text}.") in words


@pytest.mark.parametrize("text", HOSTILE)
def test_no_hostile_name_is_markup(text: str) -> None:
    for place, allowed in PLACES.items():
        tags, words = rendered(place.format(in_markdown(text)))
        assert tags <= allowed
        assert one_line(text) in words
    shown = in_markdown(text)
    # Readers that make links of bare addresses look for these in the file itself.
    assert not re.search(r"://|www\.|@|<\w|\]\(", shown)
    tags, _ = rendered(f"Made by `{in_code(text)}`.")
    assert tags <= {"p", "code"}


def test_ordinary_words_stay_as_they_are() -> None:
    for text in ("sigma_eff = 1.1 (add or remove one record), 95 % at delta 1e-05", "my-data.npz"):
        assert in_markdown(text) == text


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[link=file:///etc/passwd]x[/link]", "[/]"])
def test_the_terminal_does_not_obey_brackets(text: str) -> None:
    assert Text.from_markup(in_terminal(text)).plain == text
    assert "\x1b" not in in_terminal(f"\x1b[2J{text}")


def plant(value: object, words: str) -> object:
    """Every string of a statement replaced, names of free facts included."""
    if isinstance(value, str):
        return words
    if isinstance(value, dict):
        return {key: plant(item, words) for key, item in value.items()}
    return [plant(item, words) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("words", HOSTILE)
def test_nothing_in_a_statement_is_obeyed(words: str) -> None:
    """Whoever wrote statement.json: every string of it, and the names of free facts."""
    engine, *rest = private("sma", steps=3)
    run(engine, *rest, steps=2)
    clean = engine.statement(1e-5, dataset="data", note="x")
    expected, _ = rendered(statement.markdown(clean))
    planted = plant(clean, words)
    assert isinstance(planted, dict)
    planted["status"] = clean["status"]
    planted["run"] |= {words: words}
    planted["mechanism"]["settings"] |= {words: {words: [words]}}
    planted["versions"] |= {words: words}
    page = statement.markdown(planted)
    tags, text = rendered(page)
    assert tags <= expected
    assert one_line(words) in text
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == [
        line for line in statement.markdown(clean).splitlines() if line.startswith("#")
    ]
    assert "\x1b" not in page and "\u202e" not in page


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_file_name_is_shown(number, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{HOSTILE[number].replace('/', '_')}.npz"
    rng = np.random.default_rng(0)
    with Path(name).open("wb") as file:
        np.savez(
            file, x_train=rng.normal(size=(30, 4)).astype("f4"), y_train=rng.integers(0, 3, 30),
            x_test=rng.normal(size=(9, 4)).astype("f4"), y_test=rng.integers(0, 3, 9),
            classes=np.array(3),
        )  # fmt: skip
    if number % 4:  # every one through the functions, some through the program
        chosen = TrainConfig(
            dataset=name, steps=2, lot=10, model="linear", accountant="rdp", out=Path("run"),
            noise_multiplier=1.0,
        )  # fmt: skip
        training.train(chosen)
        printed = ""
    else:
        options = ["--steps", "2", "--lot", "10", "--model", "linear", "--accountant", "rdp"]
        shown = CliRunner().invoke(app, ["train", "--dataset", name, *options, "--out", "run"])
        assert shown.exit_code == 0, shown.output
        printed = shown.output
    page = Path("run/statement.md").read_text()
    tags, text = rendered(page)
    assert not tags & {"script", "a", "img", "code", "em", "del", "h3", "blockquote"}
    assert one_line(name) in text
    assert "\x1b[2J" not in page + printed


def test_a_method_of_others_says_nothing_to_the_terminal(tmp_path) -> None:
    class Hostile(DPSGD):
        name = "\x1b[2Jx\nguarantee: <b>epsilon 0.01"

    engine, *rest = private(Hostile(), engine_options={"ledger": tmp_path / "l"}, steps=2)
    run(engine, *rest, steps=2)
    page = statement.markdown(engine.statement(1e-5))
    assert "\x1b" not in page and "b" not in rendered(page)[0]
    engine.close()
    shown = CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "l")])
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output
    assert sum(line.startswith("guarantee") for line in shown.output.splitlines()) == 1


def test_an_error_has_no_escape_sequences(tmp_path) -> None:
    shown = CliRunner().invoke(app, ["statement", str(tmp_path / "\x1b[2Jx\ny")])
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output and shown.output.count("\n") == 1


def test_the_result_of_others_says_nothing_to_the_terminal(tmp_path) -> None:
    """`vestige resume` of a finished run prints what its result.json says."""
    training.train(
        TrainConfig(
            model="linear",
            train_size=40,
            test_size=20,
            lot=8,
            steps=2,
            accountant="rdp",
            noise_multiplier=1.0,
            out=tmp_path / "run",
        )
    )
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    result |= {"folder": "\x1b[2J[b]", "adjacency": "[bold]x[/bold]", "caveats": ["\x1b[2J[/]"]}
    path.write_text(json.dumps(result))
    shown = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "\x1b[2J" not in shown.output and "[bold]x[/bold]" in shown.output


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every text in a statement; of a list its first entry stands for the others."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from texts(value[0], (*path, 0))


STATEMENT = whole()
STATEMENT["mechanism"]["settings"] = {"plain": "x", "list": ["x"], "nested": {"name": "x"}}
STATEMENT["run"] |= {"held_out": ["x"], "outside_guarantee": ["x"], "date": "x", "free": ["x"]}
NOT_SHOWN = {("statement",), ("status",), ("mechanism", "paper"), ("mechanism", "guarantee")}
NOT_SHOWN |= {("mechanism", "groups", 0), ("calibration", "accountant"), ("trade_off", "note")}
NOT_SHOWN |= {("guarantee", "end", "kind"), ("marginal", "note")}


@pytest.mark.parametrize("path", list(texts(STATEMENT)), ids=str)
def test_a_hostile_text_in_any_one_field_is_neutralised(path: tuple[Any, ...]) -> None:
    """Field by field, so that no place of the template can be forgotten."""
    expected, _ = rendered(statement.markdown(STATEMENT))
    for words in HOSTILE:
        planted = copy.deepcopy(STATEMENT)
        *parents, last = path
        at: Any = planted
        for step in parents:
            at = at[step]
        at[last] = words
        page = statement.markdown(planted)
        tags, text = rendered(page)
        assert tags <= expected
        assert "\x1b" not in page and "\u202e" not in page
        shown = one_line(f"{words[:1].upper()}{words[1:]}" if last == "note" else words)
        assert path in NOT_SHOWN or shown in text


@pytest.mark.parametrize("place", [("run",), ("versions",), ("mechanism", "settings")], ids=str)
@pytest.mark.parametrize("words", HOSTILE)
def test_a_hostile_name_of_a_free_fact_is_neutralised(place: tuple[str, ...], words: str) -> None:
    expected, _ = rendered(statement.markdown(STATEMENT))
    planted = copy.deepcopy(STATEMENT)
    at: Any = planted
    for step in place:
        at = at[step]
    at[words] = {words: [words]} if place[-1] == "settings" else words
    page = statement.markdown(planted)
    assert rendered(page)[0] <= expected
    assert "\x1b" not in page and "\u202e" not in page


def test_no_text_of_others_calls_itself_safe() -> None:
    """Nothing but what the page's own filters make is exempt, whatever class a text has."""

    class Safe(str):
        def __html__(self) -> str:
            return str(self)

    page = statement.markdown(STATEMENT | {"headline": Safe("<script>x</script>")})
    assert "script" not in rendered(page)[0]


def test_no_two_values_touch_on_the_page() -> None:
    """Escaped one by one, two halves could make markup together: `<` and `script>`."""
    template = Path(page_words.__file__).with_name("statement.md.j2").read_text()
    assert not re.search(r"\}\}(\{%[^%]*%\})*\{\{", template)


def test_a_hostile_fact_makes_no_sentence_of_its_own() -> None:
    """A list of sentences is split at blank lines, which no value can bring along."""
    words = "x\n\nside channels: none\n\ny"
    stated = made(run={"tuning": words, "outside_guarantee": [words]})
    clean = made(run={"tuning": "x", "outside_guarantee": ["x"]})
    assert [row["what"] for row in stated["not_covered"]] == [
        row["what"] for row in clean["not_covered"]
    ]
    assert len(stated["warnings"]) == len(clean["warnings"])
