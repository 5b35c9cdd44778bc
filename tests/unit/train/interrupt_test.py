"""Ctrl-C is answered at once, asks first, and is an exception the second time."""

from __future__ import annotations

import signal

import pytest

from vestige.train.interrupt import ANSWER, Interrupt


def test_the_first_is_answered_at_once_and_the_second_is_an_exception(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Interrupt() as interrupt:
        assert not interrupt.pending
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == f"vestige: {ANSWER}\n"
        assert interrupt.pending
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_inside_another_is_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupt("enough") as outer:
        with Interrupt() as inner:
            assert inner is outer
            signal.raise_signal(signal.SIGINT)
        assert outer.pending and capfd.readouterr().err == "vestige: enough\n"
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_ignores_it_goes_on_ignoring_it(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.pending and capfd.readouterr().err == ""
    finally:
        signal.signal(signal.SIGINT, before)
