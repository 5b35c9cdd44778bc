"""Checkpointed blocks: the sums are those of the plain model, and nothing inside is kept."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import call, captured_sum, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE, cast, zoo
from vestige import PrivacyEngine, PrivacyError, UnsupportedModel
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.sampling.loader import Batch


class Checkpointed(nn.Module):
    """A model inside a checkpoint; twice: one inside the other."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, *x: Any) -> Any:
        def run(depth: int, *x: Any) -> Any:
            if depth == 0:
                return self.inner(*x)
            return checkpoint(run, depth - 1, *x, use_reentrant=False)

        return run(self.times, *x)


class Blocks(nn.Module):
    """Two blocks between an embedding and a head, checkpointed or not."""

    def __init__(self, on: bool, dropout: float = 0.0, reentrant: bool = False) -> None:
        super().__init__()
        self.on, self.reentrant = on, reentrant
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=self.reentrant) if self.on else block
            h = h + run(h)
        return self.head(h.mean(1))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", list(zoo()))
def test_sums_are_those_of_a_loop_over_single_examples(name: str, times: int) -> None:
    torch.manual_seed(0)
    inner, x, pick = zoo()[name]
    model, x = Checkpointed(inner.double(), times), cast(x, torch.float64)
    groups = partition(model, "flat")
    cotangent = torch.randn_like(pick(call(model, x)))
    gradients = loop_gradients(model, x, cotangent, groups, pick=pick)
    bound = float(gradients.norm(dim=1).median())
    expected = clip_and_sum(gradients, groups, Clip.over(bound, groups.names))
    if name in BY_RULE["fallback"]:  # they run row by row
        with pytest.raises(UnsupportedModel, match="for the first time"):
            captured_sum(model, x, cotangent, pick=pick)
        model.times = 0
    got, _ = captured_sum(model, x, cotangent, "flat", bound, 3, pick=pick)
    assert (got - expected).norm() <= 1e-9 * expected.norm()


def trained(model: nn.Module, **options: Any) -> Tensor:
    """The weights after an epoch, in test mode."""
    data = TensorDataset(torch.arange(64 * 5).reshape(64, 5) % 11, torch.arange(64) % 3)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_seed=3,
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 5}, {"method": "fo"}])
def test_training_is_bit_for_bit_that_of_the_plain_model(
    dropout: float, options: dict[str, Any]
) -> None:
    """Dropout draws the same masks again: they come from the lot's secret stream both times."""
    weights = []
    for on in (False, True):
        torch.manual_seed(0)
        weights.append(trained(Blocks(on, dropout), **options))
    assert torch.equal(*weights)


def test_what_is_inside_a_block_is_not_kept_until_the_backward_pass() -> None:
    """Else checkpointing would save nothing: inputs that rules need are recomputed, too."""
    for on in (True, False):
        kept: list[StorageWeakRef] = []
        model = Blocks(on)

        def note(_: nn.Module, __: Any, out: Tensor, kept: list[Any] = kept) -> None:
            kept.append(StorageWeakRef(out.untyped_storage()))

        for block in model.blocks:
            block[2].register_forward_hook(note)  # what the second linear layer is given
        data = TensorDataset(torch.zeros(4, 5, dtype=torch.long), torch.zeros(4))
        model, _, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        x, _ = next(iter(loader))
        model(x)  # the self-check
        kept.clear()
        out = model(x)
        gc.collect()
        alive = [ref for ref in kept if not ref.expired()]
        assert len(kept) == 2 and bool(alive) is not on
        out.sum(1).mean().backward()


def test_the_reentrant_form_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedModel, match="use_reentrant=False"):
        trained(Blocks(True, reentrant=True))


def test_a_checkpoint_around_the_whole_model_is_refused_with_the_remedy() -> None:
    model = Blocks(False)
    groups = partition(model, "flat")
    capture = Capture(model, groups, Clip.over(1.0, groups.names))
    capture.attach()
    capture.start(Batch(2))
    with pytest.raises(UnsupportedModel, match="blocks inside its forward"):
        checkpoint(model, torch.zeros(2, 5, dtype=torch.long), use_reentrant=False)


def test_a_block_of_an_earlier_batch_is_not_run_again() -> None:
    model = Blocks(True)
    groups = partition(model, "flat")
    capture = Capture(model, groups, Clip.over(1.0, groups.names))
    capture.attach()
    capture.start(Batch(2))
    loss = model(torch.zeros(2, 5, dtype=torch.long)).sum()
    capture.start(Batch(2))
    with pytest.raises(PrivacyError, match="handed out last"):
        loss.backward()


def test_rows_that_meet_inside_a_block_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(11, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            def block(h: Tensor) -> Tensor:
                return self.inner(h - h.mean(0))

            return checkpoint(block, self.words(x).mean(1), use_reentrant=False)

    with pytest.raises(PrivacyError):
        trained(Mixing())


def test_torch_is_left_as_it_was() -> None:
    from torch.utils import checkpoint as module

    before = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    trained(Blocks(True))
    assert (module._checkpoint_without_reentrant_generator, module.CheckpointFunction) == before
