"""Which weight matrices a process looks at in a run of SMA, and which exponents it is told."""

from __future__ import annotations

from unittest import mock

import torch

from tests.support.small_runs import closure_of, private
from vestige.memory import spectrum
from vestige.memory.recall import WeightSpectra
from vestige.methods import SMA


def looked_at(model, changes=True, steps=4, **options):
    """The shapes and exponents of every read: one after each step, and one more where somebody
    `changes` the weights before the last."""
    shapes, told = [], []
    find, read = spectrum.exponents, WeightSpectra.read

    def finding(weights, **how):
        shapes[-1] += [tuple(weight.shape) for weight in weights]
        return find(weights, **how)

    def reading(self, again=False):
        shapes.append([])
        read(self, again)
        told.append(self.exponents)

    trained = [p for p in model.parameters() if p.requires_grad]
    with (
        mock.patch.object(spectrum, "exponents", finding),
        mock.patch.object(WeightSpectra, "read", reading),
    ):
        engine, model, optimizer, loader = private(
            SMA(), lambda _: torch.optim.SGD(trained, 0.05), model, steps=steps, **options
        )
        lots = iter(lot for _ in range(steps) for lot in loader)
        for step in range(steps):
            if changes and step == steps - 1:
                with torch.no_grad():
                    trained[0].mul_(2)
            x, y = next(lots)
            optimizer.step(closure_of(model, optimizer, x, y))
    assert engine.released == steps
    return {"shapes": shapes, "told": told}
