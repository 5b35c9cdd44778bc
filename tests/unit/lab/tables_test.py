"""Tables of a report: the same for Markdown and for the page, whatever is missing."""

from __future__ import annotations

from pathlib import Path

from tests.support.experiments import made_rows, only, report_toy
from vestige.lab import catalogue, wording
from vestige.lab.summary import summarised
from vestige.lab.tables import cells_of, comparisons, markdown, panel_tables


def test_the_tables_that_an_experiment_asks_for(tmp_path: Path) -> None:
    toy = report_toy(tmp_path)
    numbers = summarised(toy, made_rows(toy))
    (cell,) = cells_of(numbers["published"], toy.tables, wording.cell)
    captions = [table.caption for table in cell.tables]
    assert captions == [
        "MNIST",
        "MNIST: time",
        "MNIST: memory",
        "MNIST: how soon a target is reached",
    ]
    assert cell.absent == [("Another", "nobody knows what it is.")]
    lines = {
        line[0]: dict(zip(cell.tables[0].headings, line, strict=True))
        for line in cell.tables[0].lines
    }
    assert lines["GeoDP"]["epsilon"] == "no guarantee" and lines["DP-SGD"]["epsilon"] == "9.00"
    assert lines["DP-SGD"]["paper"] == "0.7100 ± 0.0100 [0.7000, 0.7200]"
    assert lines["SMA"]["paper"] == "0.8000" and lines["Another"]["final accuracy"] == "-"
    test = next(ln for ln in numbers["published"][0]["lines"] if ln["label"] == "SMA")
    test = test["against_reference"]
    between = f"[{test['low']:.4f}, {test['high']:.4f}]"
    assert lines["SMA"]["95 % interval of the difference"] == between
    assert lines["SMA"]["detectable"] == f"{test['detectable']:.4f}"
    assert lines["DP-SGD"]["detectable"] == "-"
    assert comparisons(numbers["published"]) == 2
    fair = cells_of(numbers["fair"], ["fair"], wording.cell)
    assert [label for label, _ in fair[0].tried] == ["DP-SGD"]
    assert fair[0].tried[0][1].startswith("0.1: ")


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    toy = report_toy(tmp_path)
    numbers = summarised(toy, made_rows(toy, only(seed=0)))
    (cell,) = cells_of(numbers["published"], toy.tables, wording.cell)
    seeds = {line[0]: line[2] for line in cell.tables[0].lines}
    assert seeds == {"DP-SGD": "1/3", "SMA": "1/3", "GeoDP": "1/3", "Another": "-"}


def test_the_page_of_a_study() -> None:
    study = catalogue.find("geodp-fig4").quickened()
    numbers = summarised(study, made_rows(study))
    tables = panel_tables(numbers["panels"][0])
    assert [table.caption for table in tables] == ["direction mse", "gradient mse", "cosine"]
    page = markdown(study, numbers, "vestige report results/x", "results/rows.jsonl")
    assert "smoke run" in page and "## Panel" in page and "Made by `vestige report" in page


def test_a_column_is_called_what_the_experiment_calls_it() -> None:
    for name, heading in (("fo-tab3", "As published"), ("sma-tab3", "Our reading of the paper")):
        experiment = catalogue.find(name)
        page = markdown(experiment, summarised(experiment, []), "vestige report x", "rows.jsonl")
        assert f"\n## {heading}\n" in page and page.count("## Our reading") == ("sma" in name)
