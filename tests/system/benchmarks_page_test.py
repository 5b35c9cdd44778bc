"""docs/benchmarks.md, docs/scaling.md and the plot are what `python -m benchmarks.page` makes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from benchmarks import page, plot, scaling
from torch.profiler import ProfilerActivity, profile

from tests.support.one_rank import one_rank
from tests.support.small_runs import net, private, run


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_page_is_what_its_command_makes(path):
    text = path.read_text()
    assert page.text(text) == text


def test_a_figure_that_was_edited_by_hand_does_not_stay():
    text = page.PAGES[0].read_text()
    figure = re.search(r"\| Vestige per-layer \| ([\d.]+) \|", text)
    edited = text[: figure.start(1)] + "0.01" + text[figure.end(1) :]
    assert edited != text and page.text(edited) == text


def test_every_table_is_on_a_page_and_names_its_commit():
    texts = "".join(path.read_text() for path in page.PAGES)
    assert {name for _, name, _ in page.MARKED.findall(texts)} == set(page.TABLES)
    for name in page.TABLES:
        made = page.TABLES[name]()
        assert name == "scaling" or "Commit " in made or "Not measured yet" in made


def test_the_plot_is_what_its_command_makes():
    assert page.drawing(page.bars()) == page.PICTURE.read_text()
    names = [bar.name for bar in page.bars()]
    assert "ResNet-18, 16 (CPU)" in names and "ResNet-18, 512 (H200)" in names


def test_bars_are_as_long_as_the_logarithm_of_their_ratio():
    tree = ElementTree.fromstring(plot.drawing([plot.Bar("a & b", 2.0, 4.0), plot.Bar("c", 1, 8)]))
    bars = [e for e in tree.iter() if e.get("height") == str(plot.BAR)]
    two, four, one, eight = (float(bar.get("width")) for bar in bars)
    assert four == pytest.approx(2 * two, abs=0.2) and eight == pytest.approx(3 * two, abs=0.2)
    assert one == 1  # still to be seen


def test_a_sum_as_long_as_the_step_halves_what_ranks_give():
    """Eight ranks send 2 * 7 / 8 of the sum at 0.8 of 450 GB/s."""
    seconds = 1.75 * 4 * 1e9 / (0.8 * 450e9)
    assert scaling.efficiency(8, 1e9, seconds) == pytest.approx(0.5)


def test_the_page_has_the_bytes_of_a_release(tmp_path):
    """In a group of one, the numbers beside the sum and the groups are those of one rank."""
    model = net()
    with one_rank(tmp_path):
        made = private("dp-sgd", model=model, clipping="per_layer", self_check=False)
        made[0].ranks.thorough = True
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            run(*made, 1)
    ((numbers,),) = (e.input_shapes[0] for e in seen.events() if e.name == "gloo:all_reduce")
    beside = numbers - sum(p.numel() for p in model.parameters()) - 2
    text = next(path for path in page.PAGES if path.name == "scaling.md").read_text()
    assert f"4 P + 4 groups + {4 * beside} world" in text
