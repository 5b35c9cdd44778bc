"""The numbers of a report as Markdown: the same bytes for the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vestige.checks import round_up
from vestige.lab.definition import Experiment
from vestige.lab.summary import Numbers
from vestige.statement.escaping import all_in_markdown, in_code, in_markdown

MARGINAL = "the paper's epsilon"
Column = tuple[str, Callable[[Numbers], str]]


def markdown(experiment: Experiment, numbers: Numbers, command: str, rows: str) -> str:
    """The report of an experiment as a Markdown page; `command` is what made it."""
    numbers = all_in_markdown(numbers)
    origin = ", ".join(part for part in (experiment.paper, experiment.item) if part)
    parts = [
        f"# {in_markdown(experiment.name)}: {in_markdown(experiment.title)}",
        f"{in_markdown(origin)}.",
    ]
    if experiment.quick:
        parts.append(
            "**This is a smoke run: few epochs and seeds. Its numbers only show that everything "
            "runs.**"
        )
    if experiment.claim:
        parts.append(f"The paper: {in_markdown(experiment.claim)}")
    if experiment.kind == "direction-error":
        parts += _panels(numbers)
    else:
        parts += _published(experiment, numbers)
        parts += _fair(experiment, numbers)
    if experiment.assumed:
        parts.append("## What the paper leaves open, and what was assumed")
        parts.append("\n".join(f"- {in_markdown(sentence)}" for sentence in experiment.assumed))
    parts.append(
        f"Made by `{in_code(command)}` from {in_markdown(rows)}; the rows by `vestige reproduce "
        f"{in_code(experiment.name)}"
        f"{' --quick' if experiment.quick else ''}`."
    )
    return "\n\n".join(parts) + "\n"


def _published(experiment: Experiment, numbers: Numbers) -> list[str]:
    parts = ["## As published"]
    parts.append(
        f"The reference is {in_markdown(experiment.reference or 'no method')}. epsilon is the "
        f"formal one of all that is released (joint, PLD); {MARGINAL} is the RDP figure at "
        "sigma/beta of one group alone, which is a diagnostic, not a guarantee, where there is "
        "more than one. "
        f"{_statistics(numbers['published'])}"
    )
    for cell in numbers["published"]:
        title = _cell_title(cell["cell"])
        for name in experiment.tables:
            columns = _COLUMNS[name]
            lines = cell["lines"]
            if name == "targets" and not any("target" in line for line in lines):
                continue
            parts.append(f"### {title}{_SUBTITLES[name]}")
            parts.append(_table(columns, lines))
        parts += [
            f"{line['label']} is not run: {line['reason']}"
            for line in cell["lines"]
            if "reason" in line
        ]
    return parts


def _fair(experiment: Experiment, numbers: Numbers) -> list[str]:
    fair = experiment.fair
    if fair is None:
        return []
    first, end = fair.validation_range
    parts = [
        "## Fair",
        "The same formal epsilon (joint, PLD) for every method, its learning rate the best of "
        f"{max(len(arm.rates) for arm in fair.arms)} on the training images {first:,} to "
        f"{end - 1:,}, which no run trains on, with seed {fair.tuning_seed}, which is not "
        f"reported; last epoch. {_statistics(numbers['fair'])}",
    ]
    for cell in numbers["fair"]:
        parts.append(f"### {_cell_title(cell['cell'])}")
        parts.append(_table(_FAIR, cell["lines"]))
        tuned = [line for line in cell["lines"] if line["tuning"]]
        if tuned:
            tried = "; ".join(
                f"{line['label']}: "
                + ", ".join(
                    f"{rate} -> {accuracy:.4f}" for rate, accuracy in line["tuning"].items()
                )
                for line in tuned
            )
            parts.append(f"Validation accuracy by learning rate. {tried}.")
    return parts


def _statistics(cells: Iterable[Numbers]) -> str:
    tests = [
        line["against_reference"]
        for cell in cells
        for line in cell["lines"]
        if "against_reference" in line
    ]
    count = tests[0]["comparisons"] if tests else 0
    return (
        "Mean ± sample standard deviation, two-sided 95 % Student-t interval; p of a paired t test "
        f"against the reference, and after Holm's correction for {count} comparisons."
    )


def _panels(numbers: Numbers) -> list[str]:
    parts = []
    for panel in numbers["panels"]:
        fixed = ", ".join(f"{name} {value:g}" for name, value in panel["fixed"].items())
        parts.append(f"## Panel {panel['panel']}: {panel['varied']} varies")
        parts.append(f"{fixed}. {len(panel['points'])} of {panel['expected']} points.")
        names = [name for name in (panel["points"] or [{}])[0] if name != "value"]
        for measure in ("direction_mse", "gradient_mse", "cosine"):
            methods = [name.removesuffix(f"_{measure}") for name in names if name.endswith(measure)]
            columns: list[Column] = [(panel["varied"], lambda p: f"{p['value']:g}")]
            columns += [(method, _measured(f"{method}_{measure}")) for method in methods]
            parts.append(f"{measure.replace('_', ' ')}:")
            parts.append(_table(columns, panel["points"]))
    return parts


def _measured(name: str) -> Callable[[Numbers], str]:
    return lambda point: f"{point[name]:.4g}"


def _cell_title(cell: dict[str, Any]) -> str:
    return ", ".join(
        str(value)
        if name == "dataset"
        else f"{_NAMES.get(name, name)} {value:g}"
        if isinstance(value, int | float)
        else f"{name} {value}"
        for name, value in cell.items()
    )


def _table(columns: Sequence[Column], lines: Sequence[Numbers]) -> str:
    head = f"| {' | '.join(name for name, _ in columns)} |"
    rule = f"|{'|'.join('---' for _ in columns)}|"
    body = [f"| {' | '.join(show(line) for _, show in columns)} |" for line in lines]
    return "\n".join([head, rule, *body])


def _seeds(line: Numbers) -> str:
    count, expected = line.get("count", 0), line.get("expected")
    return "-" if expected is None else str(count) if count >= expected else f"{count}/{expected}"


def _spread(name: str, places: int = 4) -> Callable[[Numbers], str]:
    def show(line: Numbers) -> str:
        values = line.get(name)
        if values is None:
            return "-"
        std = "" if values["std"] is None else f" ± {values['std']:.{places}f}"
        return f"{values['mean']:.{places}f}{std}"

    return show


def _interval(line: Numbers) -> str:
    values = line.get("accuracy")
    if values is None or values["low"] is None:
        return "-"
    return f"[{values['low']:.4f}, {values['high']:.4f}]"


def _epsilon(name: str) -> Callable[[Numbers], str]:
    def show(line: Numbers) -> str:
        if not line.get("count"):
            return "-"
        value = line[name]
        if value is None:
            return "no guarantee" if name == "epsilon" else "-"
        return round_up(value)

    return show


def _number(name: str, form: str) -> Callable[[Numbers], str]:
    return lambda line: "-" if line.get(name) is None else format(line[name], form)


def _test(name: str) -> Callable[[Numbers], str]:
    def show(line: Numbers) -> str:
        test = line.get("against_reference")
        if test is None or test[name] is None:
            return "-"
        return f"{test[name]:+.4f}" if name == "difference" else f"{test[name]:.3g}"

    return show


def _inner(table: str, name: str, form: str) -> Callable[[Numbers], str]:
    def show(line: Numbers) -> str:
        value = line.get(table, {}).get(name)
        return "-" if value is None else format(value, form)

    return show


def _paper_accuracy(line: Numbers) -> str:
    paper = line["paper"]
    if "accuracy" not in paper:
        return "-"
    return f"{paper['accuracy']:.4f} ± {paper['std']:.4f} [{paper['low']:.4f}, {paper['high']:.4f}]"


def _reached(line: Numbers) -> str:
    target = line.get("target")
    return "-" if target is None else f"{target['reached']}/{target['count']}"


_LABEL: Column = ("method", lambda line: line["label"])
_TESTS: list[Column] = [
    ("difference", _test("difference")),
    ("p", _test("p")),
    ("p (Holm)", _test("p_holm")),
]
_ACCURACY: list[Column] = [
    _LABEL,
    ("lr", _number("lr", "g")),
    ("seeds", _seeds),
    ("final accuracy", _spread("accuracy")),
    ("95 % interval", _interval),
    ("best accuracy", _spread("best_accuracy")),
    ("epsilon", _epsilon("epsilon")),
]
_COLUMNS: dict[str, list[Column]] = {
    "accuracy": [
        *_ACCURACY,
        (MARGINAL, _epsilon("epsilon_marginal")),
        *_TESTS,
        ("paper", _paper_accuracy),
    ],
    "runtime": [
        _LABEL,
        ("seeds", _seeds),
        ("seconds", _spread("seconds", 1)),
        ("relative", _number("relative_seconds", ".2f")),
        ("paper, seconds", _inner("paper", "seconds", "g")),
        ("paper, relative", _inner("paper", "relative", ".2f")),
    ],
    "memory": [
        _LABEL,
        ("seeds", _seeds),
        ("mean depth", _inner("memory", "depth", ".4f")),
        ("mean memory ratio", _inner("memory", "memory_ratio", ".4f")),
        ("mean exponent", _inner("memory", "rho", ".3f")),
        ("mean tempering", _inner("memory", "tempering", ".4f")),
        ("paper, depth", _inner("paper", "depth", ".4f")),
        ("paper, ratio", _inner("paper", "memory_ratio", ".4f")),
    ],
    "targets": [
        _LABEL,
        ("target accuracy", _inner("target", "target", "g")),
        ("runs that reach it", _reached),
        ("epochs to it", _inner("target", "epochs", ".1f")),
        ("epsilon to it", _inner("target", "epsilon", ".2f")),
    ],
}
_FAIR: list[Column] = [*_ACCURACY, ("sigma", _number("noise_multiplier", ".4f")), *_TESTS]
_SUBTITLES = {
    "accuracy": "",
    "runtime": ": time",
    "memory": ": memory",
    "targets": ": how soon a target is reached",
}
_NAMES = {"noise_multiplier": "sigma", "clip": "C", "epsilon": "epsilon"}
