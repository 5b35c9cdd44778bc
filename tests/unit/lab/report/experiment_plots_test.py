"""The plots of an experiment as files of their own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.experiments import REPORT_TOY, made_rows, report_files, report_toy
from vestige.lab import catalogue, wording
from vestige.lab.plots import quiet, reference
from vestige.lab.report.experiment_plots import plots
from vestige.lab.summary import summarised


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    return report_files(report_toy(folder), folder / "results" / "toy")


def test_plot_files_are_well_formed_and_need_nothing(files: dict[str, str]) -> None:
    for name, content in files.items():
        if name.endswith(".svg"):
            root = ET.fromstring(content)
            assert root.tag.endswith("svg") and "viewBox" in root.attrib
            described = [
                part.text for part in root.iter() if part.tag.endswith(("title", "description"))
            ]
            assert len(described) >= 2 and all(described)
            assert "<image" not in content and "dc:date" not in content
            # Namespaces and the document type are names, not addresses to be loaded.
            addresses = set(re.findall(r'href="([^"]*)"', content))
            assert all(address.startswith("#") for address in addresses)
            assert "SMA" in content or name in ("stages.svg", "fair-accuracy.svg")


def test_replacing_an_experiment_keeps_its_plots(tmp_path: Path) -> None:
    """An experiment that names no figure still gets one."""
    experiment = report_toy(tmp_path, REPORT_TOY).model_copy(update={"figures": ()})
    assert set(report_files(experiment, tmp_path / "toy")) == {
        "table.md",
        "table.json",
        "accuracy-by-epoch.svg",
        "report.html",
    }


def test_among_many_arms_the_papers_methods_and_the_reference_have_colours(tmp_path: Path) -> None:
    arms = "".join(
        f'[[arm]]\nlabel = "DP-SGD, lr {rate}"\nmethod = "dp-sgd"\nlr = {rate}\n'
        for rate in (0.1, 0.2, 0.3, 0.4, 0.6)
    )
    crowded = report_toy(tmp_path, REPORT_TOY.replace("[[absent]]", arms + "[[absent]]"))
    rows = made_rows(crowded)
    made = plots(crowded, rows, summarised(crowded, rows))
    (figure,) = [one for one in made if one.name == "accuracy-by-epoch"]
    assert "without their bands" in figure.caption
    assert reference()["color"].lower() in figure.svg
    assert all(quiet(number)["color"] in figure.svg for number in (3, 4, 5))


def test_the_accuracy_without_privacy_is_a_line_of_every_accuracy_plot(tmp_path: Path) -> None:
    toy = report_toy(tmp_path, REPORT_TOY)
    rows = made_rows(toy)
    data = toy.datasets[0]
    for levels, shown, noted in (
        ({}, False, False),
        ({"without privacy": {data: 0.9}, "another": {data: 0.91}}, True, False),
        ({"without privacy": {data: 0.9}, "another": {data: 9.87}}, True, True),
    ):
        for one in plots(toy, rows, summarised(toy, rows, levels)):
            if "accuracy" in one.name and one.svg:
                assert (">without privacy<" in one.svg) is shown, one.name  # in the legend
                assert ("another" in one.svg) is shown, one.name
                assert ("9.870: another" in one.svg) is noted, one.name


def test_titles_promise_the_papers_values_where_there_are_some(tmp_path: Path) -> None:
    for name, content in (("with", REPORT_TOY), ("without", re.sub("paper = {.*", "", REPORT_TOY))):
        toy = report_toy(tmp_path / name, content)
        rows = made_rows(toy)
        made = plots(toy, rows, summarised(toy, rows))
        (title,) = [figure.title for figure in made if figure.name == "final-accuracy"]
        assert ("the paper's" in title) == (name == "with")


def test_a_note_on_a_dataset_is_said_wherever_it_is_named(tmp_path: Path) -> None:
    content = REPORT_TOY.replace("[protocol]", "[notes]\nmnist = 'the half'\n[protocol]")
    made = report_files(report_toy(tmp_path, content), tmp_path / "toy")
    assert "mnist (the half)" in made["table.md"]
    assert not re.findall(r"mnist(?! \(the half\)), ", made["table.md"])
    for name, content in made.items():
        if name not in ("stages.svg", "table.json", "table.md"):
            assert "MNIST (the half)" in content, name
            assert name == "report.html" or "MNIST<" not in content


@pytest.mark.parametrize("name", ["geodp-fig3", "geodp-fig4"])
def test_panels_of_a_study_say_what_is_fixed_in_full(name: str) -> None:
    study = catalogue.find(name).quickened()
    rows = made_rows(study)
    for figure in plots(study, rows, summarised(study, rows)):
        assert figure.svg and "\N{HORIZONTAL ELLIPSIS}" not in figure.svg
        for sweep in study.sweeps:
            assert f"{sweep.name}: " in figure.svg
            for panel in (">DP-SGD<", ">GeoDP as published (not private)<"):
                assert panel in figure.svg
            assert ">bounding<" not in figure.svg  # the axis says the paper's letter


def test_titles_and_labels_fit_their_plots() -> None:
    """A panel is 470 points wide and 300 high, its axes 230: more characters would be cut off."""
    experiments = [catalogue.find(name).quickened() for name in ("sma-fig3", "sma-fig5")]
    for experiment in experiments:
        rows = made_rows(experiment)
        for figure in plots(experiment, rows, summarised(experiment, rows)):
            assert len(figure.title) <= 70, figure.title
    assert len(wording.PAPERS_FIGURE) <= 40
