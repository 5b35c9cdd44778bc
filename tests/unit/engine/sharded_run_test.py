"""A lot of a sharded model is paid before its sums are shared, and once."""

from __future__ import annotations

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import closure_of, private
from vestige.parallel.meetings import Meetings


def test_a_lot_is_paid_before_its_first_sum_is_shared(tmp_path):
    with one_rank(tmp_path):
        pieces = {"max_physical_batch_size": 4, "self_check": False}
        engine, model, optimizer, loader = private("dp-sgd", model=sharded_net(), **pieces)
        collector, charged = engine._run.capture.collector, []
        share = collector.share
        collector.share = lambda sums: charged.append(engine.ledger.steps) or share(sums)
        for x, y in loader:
            optimizer.step(closure_of(model, optimizer, x, y))
            assert charged[-1] == engine.released + engine.in_lot == engine.ledger.steps
        assert engine.released == len(set(charged)) > 2


def test_a_lot_that_is_given_up_is_paid_once(tmp_path):
    with one_rank(tmp_path):
        engine, model, optimizer, loader = private("fo", model=sharded_net(), self_check=False)
        for number, (x, y) in enumerate(loader):
            if number == 0:
                closure_of(model, optimizer, x, y)()
                engine.abandon_lot()
                assert (engine.ledger.steps, engine.released) == (1, 0)
                continue
            optimizer.step(closure_of(model, optimizer, x, y))
        assert engine.ledger.steps == engine.released + 1


def test_a_model_without_shards_has_no_meetings(tmp_path):
    with one_rank(tmp_path):
        plain, *_ = private("dp-sgd")
        assert plain._run.capture.meet is None
        for full in (False, True):
            model = sharded_net(full)
            engine, *_ = private("dp-sgd", lambda p: _sgd(p), model)
            assert isinstance(engine._run.capture.meet, Meetings)
            assert engine._run.capture.collector.sharded is full


def _sgd(parameters):
    import torch

    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
