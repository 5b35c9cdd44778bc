"""Ledger files for tests: opened, charged, and left as a killed process leaves them."""

from __future__ import annotations

import os

from vestige.privacy.ledger import Ledger
from vestige.privacy.ledger_file import LedgerFile


def opened(path, block=4, run="one", data="digits", forecast=None):
    """An account on the ledger file at `path`."""
    return LedgerFile(path).account(run, {"data": data}, block, forecast)


def charging(path, **options):
    """A ledger with a file, and a function that charges it."""
    account = opened(path, **options)
    ledger = Ledger(account.file)
    return ledger, lambda rate, noise: ledger.charge(rate, noise, account)


def end(account):
    account.file.close()


def crash(account):
    """What a killed process leaves: nothing is given back."""
    os.close(account.file._file)
    account.file._closed = True
