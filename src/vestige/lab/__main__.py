"""`python -m vestige.lab`: the runner where there is neither typer nor rich.

python -m vestige.lab fo-tab3 fo-fig1 --workers 16 --out results --minutes 20
python -m vestige.lab --merge elsewhere/rows.jsonl --out results
python -m vestige.lab --report results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vestige.errors import VestigeError
from vestige.lab import catalogue
from vestige.lab.progress import best_display
from vestige.lab.runner import RESULTS, Request, RunOptions, reproduce, what_next


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vestige.lab", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="experiments, or all")
    parser.add_argument("--list", action="store_true", help="the experiments and their rows")
    for name, field in RunOptions.model_fields.items():
        told = {"help": field.description, "default": field.default}
        if field.annotation is bool:
            parser.add_argument(f"--{name}", action="store_true", **told)
        else:
            kind = {"seeds": int, "workers": int, "out": Path, "minutes": float}.get(name, str)
            parser.add_argument(f"--{name}", type=kind, **told)
    parser.add_argument("--merge", type=Path, help="add the rows of another rows.jsonl to OUT")
    parser.add_argument("--report", type=Path, help="make the tables of a results folder again")
    return parser.parse_args()


def main() -> int:
    """Returns the exit code: 0, 1 where rows are missing, 2 for bad input, 130 after Ctrl-C."""
    arguments = _arguments()
    try:
        return _answer(arguments)
    except VestigeError as error:
        print(f"vestige: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"vestige: error: {error}", file=sys.stderr)
        return 1


def _answer(arguments: argparse.Namespace) -> int:
    if arguments.list:
        for line in catalogue.described():
            counts = f"{line['published']} published, {line['tuning']} tuning, {line['fair']} fair"
            print(f"{line['name']:14} {counts:40} {line['title']}")
        return 0
    if arguments.merge is not None:
        from vestige.lab.rows import RowStore, merge

        added, known = merge(RowStore(arguments.out or RESULTS), arguments.merge)
        print(f"{added} rows added, {known} were there")
        return 0
    if arguments.report is not None:
        from vestige.lab.report import report

        for path in report(arguments.report):
            print(path)
        return 0
    options = {name: getattr(arguments, name) for name in RunOptions.model_fields}
    request = Request(experiments=tuple(catalogue.chosen(arguments.names)), **options)
    outcome = reproduce(request, best_display())
    for sentence in what_next(request, outcome):
        print(sentence, file=sys.stderr)
    if outcome.interrupted:
        return 130
    return 0 if outcome.complete or outcome.deadline else 1


if __name__ == "__main__":
    sys.exit(main())
