"""`python -m benchmarks`: step times of every engine, interleaved in one process, and peak memory.

    python -m benchmarks                                            all sections on a CPU
    python -m benchmarks --device cuda --section rows --minutes 8   and once more, until it says
                                                                    that nothing is left
    python -m benchmarks --device cuda --section rows --cases gpt2-bf16 --profile "vestige flat"

What is measured already is not measured again, so that a section that takes longer than the time at
hand is gone on with by the same command; an engine that did not run says why in its row, and is
tried once more by --again. All sections of a device lie in one file, which is named by the commit:
figures of two commits or machines are never in one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cases import Case, sections
from benchmarks.engines import ENGINES, PLAIN, Engine
from benchmarks.memory import peak_mebibytes
from benchmarks.profile import profile
from benchmarks.store import RESULTS, OtherMachineError, Results, Row, machine
from benchmarks.timing import Deadline, race


class Session:
    """One call of the command: where results go, and what is asked for."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results = options, results
        self._deadline = Deadline(options.minutes)

    def run(self, section: str, case: Case) -> list[Row]:
        """Measure what is missing of a case; the rows are in the file afterwards."""
        chosen = [n for n in case.engines if not self._options.engines or n in self._wanted]
        wanted = chosen
        if not self._options.again:
            wanted = self._results.missing(section, case.name, chosen)
        if not wanted or self._deadline.passed:
            return []
        print(f"{section}, {case.name}: {', '.join(wanted)} ...", file=sys.stderr, flush=True)
        beside = {PLAIN, *(ENGINES[name].base for name in wanted)}
        engines: dict[str, Engine] = {
            name: ENGINES[name] for name in case.engines if name in wanted or name in beside
        }
        device, rounds = self._options.device, self._options.rounds or case.rounds
        rows = [
            {"section": section, "case": case.name, **row}
            for row in race(case.workload, device, engines, rounds, self._deadline)
            if row["engine"] in wanted
        ]
        if device == "cpu" and not self._options.no_memory:
            for row in rows:
                if "failed" not in row:
                    row["peak_mib"] = peak_mebibytes(section, case.name, row["engine"])
        self._results.put(rows)
        return rows

    def left(self, section: str, case: Case) -> list[str]:
        """What has no figures yet, of what was asked for."""
        chosen = [n for n in case.engines if not self._options.engines or n in self._wanted]
        return self._results.missing(section, case.name, chosen)

    @property
    def _wanted(self) -> set[str]:
        return {PLAIN, *self._options.engines}


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | engine | step, ms | over ordinary | over its base | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | {row['engine']} | {row['failed']} | | | |")
            continue
        over, more, peak = row["ratio"], row["over_base"], row["peak_mib"]
        cells = ("" if over is None else f"{over:.2f}", "" if more is None else f"{more:.3f}")
        last = "" if peak is None else f"{peak:.0f}"
        lines.append(
            f"| {row['case']} | {row['engine']} | {row['milliseconds']:.2f} | {cells[0]} "
            f"| {cells[1]} | {last} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--section", nargs="*", help="only these (see benchmarks/cases.py)")
    made.add_argument("--cases", nargs="*", help="only these")
    made.add_argument("--engines", nargs="*", help="only these (plain is always run)")
    made.add_argument("--rounds", type=int, help="rounds of a case (default: by size)")
    made.add_argument("--minutes", type=float, help="begin nothing more after so many")
    made.add_argument("--again", action="store_true", help="measure again what has figures")
    made.add_argument("--profile", metavar="ENGINE", help="print where its time goes instead")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--no-memory", action="store_true", help="no peaks (on a CPU)")
    made.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-COMMIT.json")
    return made


def chosen_cases(
    made: argparse.ArgumentParser, options: argparse.Namespace
) -> list[tuple[str, Case]]:
    """What is asked for, or an error with what there is."""
    there = sections(options.device)
    cases = [(name, case) for name, some in there.items() for case in some]
    known = {
        "section": set(there),
        "cases": {case.name for _, case in cases},
        "engines": {name for _, case in cases for name in case.engines},
    }
    for what, names in known.items():
        unknown = set(getattr(options, what) or ()) - names
        if unknown:
            made.error(
                f"--{what} {', '.join(sorted(unknown))}: there is none on a {options.device}; "
                f"there are {', '.join(sorted(names))}."
            )
    return [
        (name, case)
        for name, case in cases
        if (not options.section or name in options.section)
        and (not options.cases or case.name in options.cases)
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print the table; rows are in the JSON as soon as they are measured."""
    made = parser()
    options = made.parse_args(words)
    cases = chosen_cases(made, options)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    if options.profile:
        for _, case in cases:
            print(profile(case.workload, options.device, ENGINES[options.profile]))
        return
    try:
        on = machine(options.device)
        path = options.out or RESULTS / f"{options.device}-{on['commit']}.json"
        session = Session(options, Results(path, on))
    except OtherMachineError as error:
        made.error(str(error))
    rows = [row for section, case in cases for row in session.run(section, case)]
    print(table(rows))
    left = [f"{section}, {case.name}" for section, case in cases if session.left(section, case)]
    print(f"\n{len(rows)} rows written to {path}", file=sys.stderr)
    if left:
        print(f"the same command goes on with: {'; '.join(left)}", file=sys.stderr)
    else:
        print("nothing is left of what was asked for", file=sys.stderr)


if __name__ == "__main__":
    main()
