"""What a terminal of 80 columns shows while a run trains."""

from __future__ import annotations

import re

import pytest

from vestige.cli.render import Display
from vestige.train.training import Progress

LINE = {"epoch": 3, "epsilon": 12.3456, "test_loss": 0.6931}
CLOCK = r"\d:\d\d:\d\d"


def frame(
    progress: list[Progress],
    width: int,
    patched: pytest.MonkeyPatch,
    capture: pytest.CaptureFixture[str],
) -> str:
    """The last line of a bar on a terminal of this width."""
    for name, value in {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        patched.setenv(name, value)
    patched.delenv("NO_COLOR", raising=False)
    with Display(quiet=False) as display:
        for one in progress:
            display(one)
    drawn = capture.readouterr().err.split("\x1b[2K")[-1]
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", drawn).strip()


@pytest.mark.parametrize("figure", [{"test_accuracy": 0.912}, {"test_accuracy": None}])
@pytest.mark.parametrize("width", [80, 120])
def test_steps_figures_and_time_left_fit(width, figure, monkeypatch, capsys) -> None:
    metrics = LINE | figure | {"test_mae": 0.1234, "train_loss_outside_guarantee": 0.5}
    steps = [Progress("training", step, 12000, 30) for step in (0, 400, 1200)]
    last = Progress("training", 1200, 12000, 30, metrics)
    shown = frame([*steps, last], width, monkeypatch, capsys)
    assert len(shown) <= width
    assert "…" not in shown
    said = "accuracy 91.2%" if metrics["test_accuracy"] else "mean error 0.1234"
    assert re.search(rf" 1200/12000 .*epsilon 12.35 .*{said} .*{CLOCK} left$", shown)
    assert ("loss 0.6931" in shown) == (width == 120)


def test_time_left_is_shown_once_it_is_known(monkeypatch, capsys) -> None:
    for stage in (Progress("loading digits"), Progress("training", 0, 12000, 30)):
        shown = frame([stage], 80, monkeypatch, capsys)
        assert re.search(rf"{CLOCK} passed$", shown)
        assert "left" not in shown


def test_a_stage_with_brackets_is_shown_as_it_is(monkeypatch, capsys) -> None:
    assert "[/bold]" in frame([Progress("loading [/bold]")], 80, monkeypatch, capsys)
