"""What one run has reserved on a ledger file, and how much of that it has used.

Guarantee: `Account.cover` returns when the cost of a release is on the disk, and what a run gives
back was never used.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vestige.privacy.events import Event, Key, counts, from_counts
from vestige.privacy.ledger_format import VERSION

if TYPE_CHECKING:
    from vestige.privacy.ledger_file import LedgerFile

Forecast = Callable[[int], Sequence[Event]]


class Account:
    """The account of a run.

    `block` is the most releases that are reserved at a time. `forecast(n)` may tell the events of
    the next n lots; without it blocks of equal events grow as they are used up.
    """

    def __init__(
        self,
        file: LedgerFile,
        run: str,
        about: dict[str, Any],
        block: int,
        forecast: Forecast | None,
        session: str | None = None,
    ) -> None:
        self.file, self.run, self.about = file, run, about
        # Two copies of a run that both go on must not look like one.
        self.session = session or secrets.token_hex(8)
        self.block, self.forecast = block, forecast
        self._left: Counter[Key] = Counter()
        self._used: Counter[Key] = Counter()
        self._block = ""  # the hash of the line that reserved what is left
        self._reserved: Counter[Key] = Counter()
        self._last_key: Key | None = None
        self._last_size = 0
        self._opened = False

    def open(self) -> None:
        """Have the name of the run on the disk."""
        self.file.check()
        if not self._opened:
            self._append([])

    def cover(self, event: Event) -> None:
        """Return when the cost of `event` is on the disk. Called before its noise is drawn."""
        self.file.check()
        if self._left[event.key] < 1:
            self._reserve(event.key)
        self._left[event.key] -= 1
        self._used[event.key] += 1
        self._last_key = event.key

    def settle(self) -> None:
        """Give back what is left of the open block."""
        self.file.check()
        lines = self._spent()
        self._left = Counter()  # first: whatever interrupts this, nothing is used any more
        if lines:
            self._append(lines)

    def rename(self, run: str) -> None:
        """Go on as another run, of which nothing was charged here yet."""
        self.settle()
        self.run, self._opened = run, False

    def forget(self) -> None:
        """All of the open block counts as used."""
        self._left, self._used = Counter(), Counter()

    def note(self, of: str, digest: str) -> None:
        """Remember the digest of something that was released."""
        line = {"kind": "digest", "run": self.run, "of": of, "hash": digest}
        self._append([line], durable=False)

    def digest(self, of: str) -> str | None:
        """The digest of what was released under that name, if something was."""
        return self.file.content.digests.get(of)

    def opening(self) -> dict[str, Any]:
        """The line that begins a session of the run."""
        names = {"run": self.run, "session": self.session, "about": self.about}
        return {"kind": "open", "version": VERSION, **names}

    def reserving(self, counted: Mapping[Key, int]) -> dict[str, Any]:
        """The line that charges so many of each event."""
        return {"kind": "reserve", "run": self.run, "events": _rows(counted)}

    def _reserve(self, key: Key) -> None:
        """Put a block that holds `key` on the disk."""
        block = counts(self.forecast(self.block)) if self.forecast else Counter()
        if not block[key]:
            # Nobody foresaw it: twice as many as last time, where it was the same again.
            self._last_size = 2 * self._last_size if key == self._last_key else 1
            self._last_size = min(self._last_size, self.block)
            block = Counter({key: self._last_size})
        lines = [*self._spent(), self.reserving(block)]
        self._left = Counter()
        self._block = self._append(lines)
        self._used, self._reserved = Counter(), block.copy()
        self._left = block

    def _spent(self) -> list[dict[str, Any]]:
        """The line that gives back what is left, if anything is."""
        if not self._opened or not +self._left or not self._used <= self._reserved:
            return []  # the last: an interrupt has confused the counts, and all of it is charged
        rows = _rows(self._used)
        return [{"kind": "spent", "run": self.run, "block": self._block, "events": rows}]

    def _append(self, lines: Sequence[Mapping[str, Any]], durable: bool = True) -> str:
        if self._opened:
            return self.file.append(lines, durable)
        last = self.file.append([self.opening(), *lines])
        self._opened = True
        return last


def _rows(counted: Mapping[Key, int]) -> list[list[Any]]:
    return [event.as_row() for event in from_counts(counted)]
