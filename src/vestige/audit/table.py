"""The audit table: every registered method, attacked at the same claim.

With so many bounds a few at 95 % would exceed the truth by chance, so the free and the family
bounds of all methods hold together: each has the confidence 1 - 0.05 / (number of bounds). The
one-run bounds are at 95 % each: their correction for delta, 2 m delta, leaves no room for more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vestige.audit.attack import audit
from vestige.audit.attack.rows import TRIALS as ROWS_TRIALS
from vestige.audit.attack.rows import audit_rows
from vestige.audit.plot import write
from vestige.audit.result import AuditResult
from vestige.checks import round_down, round_up
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.methods import METHODS
from vestige.methods.method import refuse_unknown
from vestige.statement.escaping import in_code
from vestige.statement.table import Table

TEETH = (("dp-sgd", "fo", "sma"), ((1.0, 20_000), (2.0, 4000), (4.0, 4000)))
PUBLISHED_TRIALS = 4000  # each is a whole run
ONE_RUN_TRIALS = 1000
JOINT_CONFIDENCE = 0.95
BOUNDS = 2  # of a method: free and family
_ROWS = "Rows attributed to the wrong record"  # begins that part of the page
_PLOTTED = ("fo", "geodp", "dp-adam-ac")


Row = tuple[AuditResult, AuditResult]
"""One method at one claim: the attacks on the releases and on the final model."""


def rows(methods: Sequence[str], epsilon: float, trials: int, seed: int | None) -> list[Row]:
    """Every method at `epsilon`, with both attacks."""
    table = []
    confidence = 1 - (1 - JOINT_CONFIDENCE) / (BOUNDS * max(1, len(methods)))
    for number, name in enumerate(methods):
        if name not in METHODS:
            refuse_unknown(name)
        count = trials if METHODS[name].private else min(trials, PUBLISHED_TRIALS)
        options: dict[str, Any] = {"epsilon": epsilon, "seed": _own_seed(seed, number)}
        canary = _said(audit(name, trials=count, confidence=confidence, **options))
        fewer = min(trials, ONE_RUN_TRIALS)
        table.append((canary, audit(name, mode="one-run", trials=fewer, **options)))
    return table


def teeth(seed: int | None, methods: Sequence[str]) -> list[AuditResult]:
    """DP-SGD, FO and SMA at the claims where the audit must have teeth."""
    results: list[AuditResult] = []
    for name in (name for name in TEETH[0] if name in methods):
        for epsilon, trials in TEETH[1]:
            own = _own_seed(seed, len(METHODS) + len(results))
            results.append(_said(audit(name, epsilon=epsilon, trials=trials, seed=own)))
    return results


def misattributed(trials: int, seed: int | None) -> list[AuditResult]:
    """The engine with its rows misread, and the engine as it is, under the same attack."""
    count = min(trials, ROWS_TRIALS)
    return [_said(audit_rows(broken, trials=count, seed=seed)) for broken in (True, False)]


def write_rows(folder: Path, trials: int, seed: int | None, command: str) -> list[Path]:
    """Attack mis-attributed rows again and write them into a table that is there.

    ConfigError if there is none. Nothing else in it changes.
    """
    written = [folder / "audit.json", folder / "table.md"]
    missing = [path for path in written if not path.is_file()]
    if missing:
        raise ConfigError(f"{str(missing[0])!r} is not there: make the whole table first.")
    wrong = misattributed(trials, seed)
    numbers = json.loads(written[0].read_text()) | _rows_numbers(wrong, command)
    text = written[1].read_text().partition(f"\n{_ROWS}")[0]
    write_whole(written[0], _json(numbers))
    write_whole(written[1], text + _rows_markdown(wrong, command))
    return written


def write_table(
    out: Path, methods: Sequence[str], epsilon: float, trials: int, seed: int | None, command: str
) -> list[Path]:
    """Audit, and write what `out` asks for: a folder with everything, or one .json or .md file."""
    if out.suffix not in ("", ".json", ".md"):
        raise ConfigError(
            f"table {str(out)!r} must be a folder, or a file that ends in .json or .md."
        )
    folder = out if not out.suffix else out.parent
    folder.mkdir(parents=True, exist_ok=True)
    every, sharp = rows(methods, epsilon, trials, seed), teeth(seed, methods)
    wrong = misattributed(trials, seed)
    numbers = _json(_numbers(every, sharp, command) | _rows_numbers(wrong, command))
    text = markdown(every, sharp, command) + _rows_markdown(wrong, command)
    files = {".json": numbers, ".md": text}
    if out.suffix:
        write_whole(out, files[out.suffix])
        return [out]
    written = [folder / "audit.json", folder / "table.md"]
    for path in written:
        write_whole(path, files[path.suffix])
    for one, _ in every:
        if one.method in _PLOTTED:
            written.append(folder / f"{one.method}.png")
            write(one, written[-1])
    return written


def _json(numbers: Any) -> str:
    return json.dumps(numbers, indent=2, allow_nan=False) + "\n"


def _numbers(every: Sequence[Row], sharp: Sequence[AuditResult], command: str) -> dict[str, object]:
    methods = [
        canary.as_dict()
        | {f"{name}_one_run": alone.as_dict()[name] for name in ("epsilon_lower", "trials")}
        | {"seconds_one_run": alone.seconds}
        for canary, alone in every
    ]
    return {"command": command, "methods": methods, "teeth": [one.as_dict() for one in sharp]}


def _rows_numbers(wrong: Sequence[AuditResult], command: str) -> dict[str, object]:
    return {"rows_command": command, "rows": [one.as_dict() for one in wrong]}


def _rows_markdown(wrong: Sequence[AuditResult], command: str) -> str:
    words = (
        f"\n{_ROWS}: one release of a time-major token model, at a sampling rate of 1.\n"
        f"Each bound is at 95 % confidence. Made by `{in_code(command)}`."
    )
    lines = [
        [one.method, _claim(one), _bound(one.epsilon_lower, one.limit), *one.notes, *_effort(one)]
        for one in wrong
    ]
    return _page(words, ("engine", "claimed", "free", "seen", "runs", "seconds"), lines)


def markdown(every: Sequence[Row], sharp: Sequence[AuditResult], command: str) -> str:
    """The two tables, with the command that made them."""
    words = (
        f"Made by `{in_code(command)}`. Lower bounds are rounded down, claims up. *free*: free "
        "of assumptions; *family*: through the mechanism's family; *one run*: from the losses "
        f"of the final model, {ONE_RUN_TRIALS:,} canaries at most. Seconds are those of the "
        "canary audit. The free and family bounds of all methods hold together at "
        f"{JOINT_CONFIDENCE:.0%} confidence, the one-run bounds at 95% each."
    )
    lines = []
    for one, alone in every:
        bounds = one.epsilon_lower, one.epsilon_lower_family, alone.epsilon_lower
        cells = [_bound(bound, one.limit) for bound in bounds]
        lines.append([one.method, _claim(one), *cells, *_effort(one)])
    headings = ("method", "claimed", "free", "family", "one run", "canaries", "seconds")
    text = _page(words, headings, lines)
    if sharp:
        words = "\nHow much of the claim the family bound reaches, each bound at 95 % confidence:"
        headings = ("method", "claimed", "free", "family", "family / claimed", *headings[-2:])
        text += _page(words, headings, [_sharp_line(one) for one in sharp])
    return text


def _page(words: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A paragraph and a table below it."""
    return f"{words}\n\n{Table(headings, lines).markdown()}\n"


def _claim(one: AuditResult) -> str:
    if one.epsilon_claimed is None:
        return f"none; published {round_up(one.epsilon_published)}"
    return round_up(one.epsilon_claimed)


def _sharp_line(one: AuditResult) -> Sequence[str]:
    claimed, family = one.epsilon_claimed, one.epsilon_lower_family
    assert claimed is not None and family is not None
    reached = f"{int(100 * family / claimed)} %"
    bounds = round_down(one.epsilon_lower), round_down(family)
    return [one.method, _claim(one), *bounds, reached, *_effort(one)]


def _effort(one: AuditResult) -> tuple[str, str]:
    return f"{one.trials:,}", f"{one.seconds:.1f}"


def _own_seed(seed: int | None, row: int) -> int | None:
    """Rows have noise of their own: the same luck in all of them would say less."""
    return None if seed is None else seed + row


def _bound(value: float | None, limit: float | None) -> str:
    exceeds = value is not None and limit is not None and value > limit
    return f"**{round_down(value)}**, violated" if exceeds else round_down(value, none="")


def _said(one: AuditResult) -> AuditResult:
    """The result, told on stderr."""
    free, family = round_down(one.epsilon_lower), round_down(one.epsilon_lower_family, none="-")
    line = f"{one.method}: claim {round_up(one.limit)}, free {free}, family {family}"
    print(f"{line}, {one.seconds:.1f} s", file=sys.stderr, flush=True)
    return one
