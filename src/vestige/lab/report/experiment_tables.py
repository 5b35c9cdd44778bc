"""The tables of an experiment's page: every number with its interval, the paper's beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vestige.checks import round_up
from vestige.lab.definition import Experiment
from vestige.lab.report import wording
from vestige.lab.report.glyphs import Interval, Strips
from vestige.lab.report.markup import Column, Html, bullets, details, element, join, prose, table
from vestige.lab.summary import Numbers

Line = Mapping[str, Any]
_STATISTICS = (
    "Mean and sample standard deviation over the seeds, with the two-sided 95 % Student-t "
    "interval. p: paired t test against the reference, seed by seed"
)


def published_tables(experiment: Experiment, numbers: Numbers) -> list[Html]:
    """The column "as published": the tables that the experiment asks for, cell by cell."""
    cells = numbers["published"]
    reference = experiment.reference or "no method"
    shown = [
        element("p", f"{_STATISTICS}{_comparisons(cells)}. The reference is {reference}."),
    ]
    makers = {"accuracy": _accuracy, "runtime": _runtime, "memory": _memory, "targets": _targets}
    for cell in cells:
        title = wording.cell(cell["cell"])
        for name in experiment.tables:
            made = makers[name](title, cell["lines"], experiment.reference)
            if made is not None:
                shown.append(made)
    reasons = {
        line["label"]: line["reason"]
        for cell in cells
        for line in cell["lines"]
        if "reason" in line
    }
    if reasons:
        shown.append(bullets(join([f"{k} is not run: ", prose(v)]) for k, v in reasons.items()))
    return shown


def fair_tables(experiment: Experiment, numbers: Numbers) -> list[Html]:
    """The fair column, cell by cell, with the learning rates that were tried."""
    fair = experiment.fair
    assert fair is not None
    cells = numbers["fair"]
    reference = fair.arms[0].label
    shown = [
        element(
            "p",
            "The same formal epsilon for every method (joint, PLD). Each learning rate is the best "
            f"of its grid on training images {wording.images(fair.validation_range)}, which no run "
            f"trains on. Last epoch. {_STATISTICS}{_comparisons(cells)}. The reference is "
            f"{reference}.",
        )
    ]
    if not any(line.get("count") for cell in cells for line in cell["lines"]):
        return [*shown, element("p", "The fair column has not been run yet.", class_="note")]
    for cell in cells:
        title = wording.cell(cell["cell"])
        made = _accuracy(title, cell["lines"], reference, fair=True)
        if made is None:
            continue
        shown.append(made)
        tried = [
            join([element("strong", line["label"]), ": ", _rates(line["tuning"])])
            for line in cell["lines"]
            if line["tuning"]
        ]
        if tried:
            shown.append(details("Validation accuracy by learning rate", bullets(tried)))
    return shown


def _rates(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{rate}: {accuracy:.4f}" for rate, accuracy in tried.items())


def _comparisons(cells: Sequence[Numbers]) -> str:
    counts = [
        line["against_reference"]["comparisons"]
        for cell in cells
        for line in cell["lines"]
        if "against_reference" in line
    ]
    return f"; Holm's correction is for {counts[0]} comparisons" if counts else ""


def _accuracy(title: str, lines: Sequence[Line], reference: str, fair: bool = False) -> Html | None:
    if not any(line.get("count") for line in lines):
        return None
    ours = [_interval(line.get("accuracy"), "mean") for line in lines]
    papers = [_interval(line.get("paper"), "accuracy") for line in lines]
    base = next(
        (o.value for o, l in zip(ours, lines, strict=True) if o and l["label"] == reference), None
    )
    strips = Strips([*ours, *papers], base)
    paired = any(papers)
    scale = f"{strips.low:.3f} to {strips.high:.3f}"
    key = "ours \N{BLACK CIRCLE}, paper \N{WHITE DIAMOND}" if paired else "ours \N{BLACK CIRCLE}"
    columns = [
        Column("method", number=False),
        Column("final accuracy, 95 % interval"),
        Column(join([key, element("br"), element("span", scale, class_="soft")]), number=False),
        *([Column("paper's accuracy")] if paired else []),
        Column("difference to the reference"),
        Column("p, and after Holm"),
        Column("formal epsilon"),
        *([Column("sigma")] if fair else [Column("papers' figure (diagnostic)")]),
        Column("best accuracy"),
        Column("learning rate"),
        Column("seeds"),
    ]
    body = []
    for line, own, paper in zip(lines, ours, papers, strict=True):
        body.append(
            [
                _label(line, reference),
                _below(_spread(line.get("accuracy")), _ends(own)),
                strips.strip(own, paper) if own or paper else wording.NONE,
                *([_paper(line["paper"])] if paired else []),
                _test(line, "difference", "+.4f"),
                _below(_test(line, "p", ".3g"), _test(line, "p_holm", ".3g")),
                _epsilon(line),
                _sigma(line) if fair else _marginal(line),
                _spread(line.get("best_accuracy"), std=False),
                wording.number(line.get("lr")),
                _seeds(line),
            ]
        )
    return table(title, columns, body)


def _interval(values: Mapping[str, Any] | None, name: str) -> Interval | None:
    if not values or values.get(name) is None:
        return None
    return Interval(values[name], values.get("low"), values.get("high"))


def _label(line: Line, reference: str) -> Html:
    if line["label"] != reference:
        return join([line["label"]])
    return join([line["label"], " ", element("span", "reference", class_="soft")])


def _below(first: object, second: str) -> object:
    """Two lines in one cell, where there is a second."""
    if second == wording.NONE:
        return first
    return join([first, element("span", second, class_="soft below")])


def _spread(values: Mapping[str, Any] | None, places: int = 4, std: bool = True) -> object:
    if values is None:
        return wording.NONE
    mean = f"{values['mean']:.{places}f}"
    if values["std"] is None or not std:
        return mean
    return join([mean, element("span", f" ± {values['std']:.{places}f}", class_="soft")])


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None:
        return wording.NONE
    return f"[{interval.low:.4f}, {interval.high:.4f}]"


def _paper(paper: Mapping[str, float]) -> object:
    if "accuracy" not in paper:
        return wording.NONE
    std = f" ± {paper['std']:.4f}" if "std" in paper else ""
    first = join([f"{paper['accuracy']:.4f}", element("span", std, class_="soft")])
    whole = "low" in paper and "high" in paper
    return _below(first, f"[{paper['low']:.4f}, {paper['high']:.4f}]" if whole else wording.NONE)


def _test(line: Line, name: str, form: str) -> str:
    test = line.get("against_reference")
    return wording.number(None if test is None else test[name], form)


def _epsilon(line: Line) -> object:
    if not line.get("count"):
        return wording.NONE
    if line["epsilon"] is None:
        return element("span", "no guarantee", class_="warn")
    return round_up(line["epsilon"])


def _marginal(line: Line) -> object:
    value = line.get("epsilon_marginal")
    if value is None:
        return wording.NONE
    return element("span", round_up(value), class_="soft")


def _sigma(line: Line) -> str:
    value = line.get("noise_multiplier")
    return wording.number(value, ".4f") if isinstance(value, int | float) else wording.NONE


def _seeds(line: Line) -> str:
    count, expected = line.get("count", 0), line.get("expected")
    if expected is None:
        return "not run"
    return str(count) if count >= expected else f"{count} of {expected}"


def _runtime(title: str, lines: Sequence[Line], reference: str) -> Html | None:
    columns = [
        Column("method", number=False),
        Column("seconds"),
        Column(f"relative to {reference}" if reference else "relative"),
        Column("paper, relative"),
        Column("paper, seconds"),
        Column("seeds"),
    ]
    body = [
        [
            _label(line, reference),
            _spread(line.get("seconds"), 1),
            wording.number(line.get("relative_seconds"), ".2f"),
            wording.number(line["paper"].get("relative"), ".2f"),
            wording.number(line["paper"].get("seconds"), "g"),
            _seeds(line),
        ]
        for line in lines
    ]
    return table(f"{title}: time", columns, body)


def _memory(title: str, lines: Sequence[Line], reference: str) -> Html | None:
    columns = [
        Column("method", number=False),
        Column("mean depth"),
        Column("paper, depth"),
        Column("mean memory ratio"),
        Column("paper, ratio"),
        Column("mean exponent"),
        Column("mean tempering"),
        Column("seeds"),
    ]
    body = []
    for line in lines:
        memory, paper = line.get("memory", {}), line["paper"]
        body.append(
            [
                _label(line, reference),
                wording.number(memory.get("depth"), ".4f"),
                wording.number(paper.get("depth"), ".4f"),
                wording.number(memory.get("memory_ratio"), ".4f"),
                wording.number(paper.get("memory_ratio"), ".4f"),
                wording.number(memory.get("rho"), ".3f"),
                wording.number(memory.get("tempering"), ".4f"),
                _seeds(line),
            ]
        )
    return table(f"{title}: memory", columns, body)


def _targets(title: str, lines: Sequence[Line], reference: str) -> Html | None:
    known = [line for line in lines if "target" in line]
    if not known:
        return None
    columns = [
        Column("method", number=False),
        Column("runs that reach it"),
        Column("epochs to it"),
        Column("formal epsilon to it"),
    ]
    body = [
        [
            _label(line, reference),
            f"{line['target']['reached']} of {line['target']['count']}",
            wording.number(line["target"]["epochs"], ".1f"),
            wording.number(line["target"]["epsilon"], ".2f"),
        ]
        for line in known
    ]
    target = known[0]["target"]["target"]
    return table(f"{title}: how soon accuracy {target:g} is reached", columns, body)


def panel_tables(numbers: Numbers) -> list[Html]:
    """The points of a direction study, panel by panel and measure by measure."""
    shown: list[Html] = []
    for panel in numbers["panels"]:
        points = panel["points"]
        names = [name for name in (points or [{}])[0] if name != "value"]
        tables = []
        for measure in ("direction_mse", "gradient_mse", "cosine"):
            own = [name for name in names if name.endswith(f"_{measure}")]
            if not own:
                continue
            columns = [Column(panel["varied"])]
            columns += [Column(name.removesuffix(f"_{measure}").replace("_", "-")) for name in own]
            body = [[f"{p['value']:g}", *(f"{p[name]:.4g}" for name in own)] for p in points]
            tables.append(table(measure.replace("_", " "), columns, body))
        head = f"Panel {panel['panel']}: {panel['varied']} varies"
        fixed = element("p", wording.settings(panel["fixed"]), class_="note")
        shown.append(details(head, fixed, *tables))
    return shown
