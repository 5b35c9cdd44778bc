"""`python -m vestige.audit --table OUT`: the audit table of all methods.

A folder gets audit.json (every result), table.md (what docs show) and plots of three methods.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from vestige.errors import VestigeError
from vestige.methods import METHODS


def main(arguments: list[str] | None = None) -> int:
    """Parse, audit, write; 2 for bad input."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m vestige.audit", description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="a folder, or OUT.json or OUT.md")
    parser.add_argument("--epsilon", type=float, default=2.0, help="the claim of every method")
    parser.add_argument("--trials", type=int, default=20_000, help="canaries")
    parser.add_argument("--seed", type=int, default=None, help="repeatable; default: fresh noise")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas; default: all")
    parser.add_argument(
        "--only-rows",
        action="store_true",
        help="make only the part on mis-attributed rows anew, in a folder that has a table",
    )
    options = parser.parse_args(given)
    from vestige.audit.table import write_rows, write_table

    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    command = shlex.join(["python", "-m", "vestige.audit", *given])
    try:
        if options.only_rows:
            written = write_rows(options.table, options.trials, options.seed, command)
        else:
            written = write_table(
                options.table, names, options.epsilon, options.trials, options.seed, command
            )
    except VestigeError as error:
        print(f"vestige: error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
