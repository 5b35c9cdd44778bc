"""What a command shows while rows are made."""

from __future__ import annotations

import pytest

from vestige.lab.progress import Bar, Display, best_display


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = best_display()
    display.begin(1, 3)
    display.show(1, 3, "a row")
    display.done("a row")
    display.say("read this")
    display.end()
    said = capsys.readouterr()
    assert (
        said.err == ("1 of 3 rows are there, 2 are left\ndone: a row\nvestige: read this\n")
        and not said.out
    )


def test_a_quiet_display_says_only_what_must_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(quiet=True)
    display.begin(1, 3)
    display.done("a row")
    display.say("read this")
    assert capsys.readouterr().err == "vestige: read this\n"


def test_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar()
    bar.begin(0, 2)
    bar.show(1, 2, "a [bold]row")
    bar.say("read [this]")
    bar.end()
    assert "read [this]" in capsys.readouterr().err
