"""Two public tables with their schemas, as somebody's own: breast cancer and wine.

    python examples/tables.py cancer.csv
    vestige train --data cancer.csv --recipe tabular --epsilon 3

Writes the records that scikit-learn comes with into a CSV file, and beside it the public schema.
The ranges are what a codebook would say, in round numbers: no minimum or maximum is read off the
records. `wine.csv` makes the other table.

Guarantee: a run on such a table protects each row of its training split. The schema is published,
and is outside of it, as are the held-out rows and their exact figures. These tables are public and
small: their figures show that training works, and are no measure of what a table of yours allows.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer, load_wine

# Largest plausible value of each measurement of a cell nucleus; all begin at 0.
NUCLEUS = {
    "radius": (30, 3, 40),
    "texture": (40, 5, 50),
    "perimeter": (200, 22, 260),
    "area": (2600, 550, 4300),
    "smoothness": (0.2, 0.04, 0.25),
    "compactness": (0.4, 0.14, 1.1),
    "concavity": (0.5, 0.4, 1.3),
    "concave points": (0.25, 0.06, 0.3),
    "symmetry": (0.4, 0.08, 0.7),
    "fractal dimension": (0.1, 0.03, 0.21),
}
CANCER = {
    name: (0, largest[place])
    for place, form in enumerate(("mean {}", "{} error", "worst {}"))
    for name, largest in ((form.format(name), bounds) for name, bounds in NUCLEUS.items())
}
WINE = {
    "alcohol": (11, 15),
    "malic_acid": (0, 6),
    "ash": (1, 4),
    "alcalinity_of_ash": (10, 30),
    "magnesium": (70, 170),
    "total_phenols": (0, 4),
    "flavanoids": (0, 6),
    "nonflavanoid_phenols": (0, 1),
    "proanthocyanins": (0, 4),
    "color_intensity": (0, 14),
    "hue": (0, 2),
    "od280/od315_of_diluted_wines": (1, 4),
    "proline": (200, 1700),
}
# What is public about each: its reader, its ranges, its classes, and how frequent these are.
TABLES = {
    "cancer": (load_breast_cancer, CANCER, ("malignant", "benign"), (0.4, 0.6)),
    "wine": (load_wine, WINE, ("class_0", "class_1", "class_2"), (0.3, 0.4, 0.3)),
}


def write(path: Path) -> Path:
    """The table that `path` is named after, and its schema beside it; returns the schema's path."""
    reader, ranges, classes, frequencies = TABLES[path.stem]
    records = reader()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*records.feature_names, "class"])
        for row, label in zip(records.data, records.target, strict=True):
            writer.writerow([*row, classes[label]])
    lines = ['target = "class"', f"frequencies = {list(frequencies)}", ""]
    for name, (low, high) in ranges.items():
        lines += [f'[columns."{name}"]', 'kind = "number"', f"range = [{low}, {high}]", ""]
    lines += ["[columns.class]", 'kind = "category"', f"categories = {list(classes)}", ""]
    schema = path.with_name(f"{path.stem}.schema.toml")
    schema.write_text("\n".join(lines))
    return schema


if __name__ == "__main__":
    print(f"wrote {sys.argv[1]} and {write(Path(sys.argv[1]))}")
