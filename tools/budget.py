"""`make budget`: the lines of every room beside its budget, and the files and functions too large.

A room is a folder of src/vestige; the modules of the root are the room "base". Lines are lines of
Python, docstrings and blanks included. What is over its budget is printed, not refused.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "vestige"
BUDGETS = {
    "base": 400,
    "privacy": 1_400,
    "sampling": 500,
    "gradients": 3_000,
    "release": 650,
    "memory": 1_000,
    "updates": 620,
    "methods": 1_700,  # with geometry
    "parallel": 700,
    "engine": 1_500,
    "statement": 800,
    "audit": 2_800,
    "train": 1_350,
    "lab": 3_700,
    "cli": 750,
    "integrations": 600,
    "compat": 500,  # with the names that Opacus' users import
    "kernels": 700,  # gradients/kernels, counted apart
}
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 7
EXCUSED = {
    "programs.py": "Triton programs take every stride as an argument",
    "privacy_engine.py": "the public class: arguments by name, and docstrings with guarantees",
    "catalogue.py": "a table, one row per method",
    "door.py": "one mechanism: every setting of the noise by name",
}
OPACUS = (
    *("accountants", "data_loader", "distributed", "dp_model_inspector", "grad_sample"),
    *("layers", "lightning"),
    *("optimizers", "privacy_analysis", "privacy_engine", "schedulers", "utils", "validators"),
)
TOGETHER = {"geometry": "methods", **dict.fromkeys(OPACUS, "compat")}


def room_of(path: Path) -> str:
    """The room that a file of the source belongs to."""
    parts = path.relative_to(SOURCE).parts
    if parts[:2] == ("gradients", "kernels"):
        return "kernels"
    return TOGETHER.get(parts[0], parts[0]) if len(parts) > 1 else "base"


def lines_of(path: Path) -> int:
    """The number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def large(path: Path) -> list[str]:
    """What is too large in a file, in words."""
    found = []
    name = path.relative_to(SOURCE)
    if lines_of(path) > FILE_LINES:
        found.append(f"{name}: {lines_of(path)} lines")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
            count += len(node.args.kwonlyargs)
            if length > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name}: {length} lines")
            if count > PARAMETERS:
                found.append(f"{name}:{node.lineno} {node.name}: {count} parameters")
    return found


def main() -> None:
    """Print the table and what is too large."""
    files = sorted(SOURCE.rglob("*.py"))
    rooms: dict[str, int] = dict.fromkeys(BUDGETS, 0)
    for path in files:
        rooms[room_of(path)] = rooms.get(room_of(path), 0) + lines_of(path)
    print(f"{'room':<12}{'lines':>8}{'budget':>8}")
    for room, lines in rooms.items():
        budget = BUDGETS.get(room, 0)
        print(f"{room:<12}{lines:>8,}{budget:>8,}{'  over' if lines > budget else ''}")
    print(f"{'all':<12}{sum(rooms.values()):>8,}{sum(BUDGETS.values()):>8,}")
    median = statistics.median(lines_of(path) for path in files if path.name != "__init__.py")
    print(f"{len(files)} files, median {median:.0f} lines")
    too_large = [words for path in files if path.name not in EXCUSED for words in large(path)]
    print("\n".join(["", "Too large:", *too_large]) if too_large else "\nNothing is too large.")


if __name__ == "__main__":
    main()
