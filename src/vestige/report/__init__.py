"""Plots and self-contained HTML pages of experiments and runs. (Being built.)"""


def write(experiment, rows, folder):  # type: ignore[no-untyped-def]
    return []
