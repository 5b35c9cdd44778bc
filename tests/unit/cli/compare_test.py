"""The command compare."""

from __future__ import annotations

import pytest

from tests.support.program import plain, run, run_json


def test_compare_on_the_command_line() -> None:
    options = "--dataset digits --model linear --lot 100 --epochs 1 --train-size 300 --seeds 2"
    shown = plain(run(f"compare --methods dp-sgd,fo --epsilon 2 {options}").stdout)
    assert "whole study" in shown and "p (Holm)" in shown
    report = run_json(f"compare --methods dp-sgd,fo --epsilon 2 {options}")
    assert report["study_epsilon"] > 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--methods dp-sgd --epsilon 1", "at least two"),
        ("--methods dp-sgd,dp-sgd --epsilon 1", "different"),
        ("--methods dp-sgd,foo --epsilon 1", "'foo'"),
        ("--methods dp-sgd,fo --epsilon 0", "epsilon"),
        ("--methods dp-sgd,fo --epsilon 1 --match noise", "'noise'"),
        ("--methods dp-sgd,fo --epsilon 1 --seeds 0", "seeds"),
        ("--methods dp-sgd,fo --epsilon 1 --tune --lr 1", "tune"),
        ("--methods dp-sgd,fo --epsilon 1 --dataset nothing.npz", "nothing.npz"),
    ],
)
def test_bad_comparisons(options: str, expected: str) -> None:
    result = run(f"compare {options}")
    assert result.exit_code == 2
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
