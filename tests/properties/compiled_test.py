"""Compiled graphs of every rule's model against a loop over single examples."""

from __future__ import annotations

import pytest
import torch

from tests.support.reference import call, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE, cast, zoo
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.compiled import Compiled
from vestige.gradients.groups import partition
from vestige.sampling.loader import Batch

ROW_BY_ROW = {*BY_RULE["fallback"]}
UNROLLED = {*BY_RULE["recurrent"]}  # Dynamo takes cells, and no recurrent layers


@pytest.mark.filterwarnings("ignore:compile=True")
@pytest.mark.parametrize("name", list(zoo()))
def test_a_graph_gives_the_sum_of_a_loop_over_examples(name):
    model, x, pick = zoo()[name]
    model, x = model.double(), cast(x, torch.float64)
    given = x if isinstance(x, tuple) else (x,)
    groups = partition(model, "flat")
    cotangent = torch.randn_like(pick(call(model, x)))
    gradients = loop_gradients(model, x, cotangent, groups, pick=pick)
    bound = float(gradients.norm(dim=1).median())  # about half of the examples are clipped
    clip = Clip.over(bound, groups.names)
    capture = Capture(model, groups, clip)
    capture.mean_loss, compiled = False, Compiled(capture, 5)
    capture.compiled = compiled
    capture.attach()
    try:
        compiled.prepare(given, {})
        for _ in range(2):  # the first pass after a check runs by itself
            capture.collector.clear()
            capture.start(Batch(len(given[0])))
            (pick(call(model, x)) * cotangent).sum().backward()
        by_graph = bool(capture.numbered)
    finally:
        capture.detach()
    expected = clip_and_sum(gradients, groups, clip)
    assert (capture.collector.total - expected).norm() <= 1e-10 * expected.norm()
    assert by_graph == (compiled.why is None)
    assert by_graph or name in ROW_BY_ROW | UNROLLED
