"""The plots of a direction study: errors of directions and gradients, panel by panel."""

from __future__ import annotations

from vestige.audit.palette import REFERENCE, style
from vestige.lab.report.panels import Line, LinePanel, Panel, Plot
from vestige.lab.summary import Numbers

_MEASURES = {
    "direction_mse": ("direction-error", "mean squared error of the direction"),
    "gradient_mse": ("gradient-error", "mean squared error of the gradient"),
}


def direction_plots(numbers: Numbers) -> list[Plot]:
    """One plot for each measure."""
    made = []
    for measure, (name, label) in _MEASURES.items():
        panels = [panel for one in numbers["panels"] if (panel := _panel(one, measure, label))]
        caption = "Synthetic gradients; both axes are logarithmic."
        made.append(
            Plot(name, label.capitalize(), caption if panels else "No point is done.", panels)
        )
    return made


def _panel(panel: Numbers, measure: str, label: str) -> Panel | None:
    points = panel["points"]
    ends = f"_{measure}"
    names = [name for name in (points[0] if points else {}) if name.endswith(ends)]
    if not names:
        return None
    lines = [
        Line(
            name.removesuffix(ends).replace("_", "-"),
            REFERENCE if name.startswith("dp_sgd") else style(i),
            [point["value"] for point in points],
            [point[name] for point in points],
        )
        for i, name in enumerate(names)
    ]
    title = f"{panel['panel']}: {panel['varied']} varies"
    return LinePanel(title, panel["varied"], label, lines, x_log=True, y_log=True)
