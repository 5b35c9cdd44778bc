"""Checkpointed blocks: the sums are those of the plain model, and nothing inside is kept."""

from __future__ import annotations

import gc
import random
import threading
from functools import partial
from typing import Any

import numpy as np
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
        **{"noise_seed": 3, **options},
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
            with torch._C.DisableTorchFunction():  # an address is a value, which a model is refused
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
        for _ in range(3):
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


class Crafted(nn.Module):
    """A block that `body` makes of a linear layer, the block's input and its count of runs."""

    def __init__(self, body: Any, **options: Any) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.body, self.options, self.runs = body, options, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).mean(1)
        z = h.detach() * 2

        def block(u: Tensor, more: tuple[Tensor, ...]) -> Tensor:
            self.runs += 1
            return self.body(self, u, more[0])

        out = checkpoint(block, h, (z,), use_reentrant=False, **self.options)
        if self.body is unchanged:
            z.copy_(z.flip(0))
        return self.head(out)


def unchanged(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    return torch.tanh(u + model.inner(z))


def flipped(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    own = z * 1
    out = model.inner(own)
    own.copy_(own.flip(0))
    return torch.tanh(u + out)


def flipped_view(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    own = z * 1
    out = model.inner(own)
    own[:, :4].copy_(own[:, :4].flip(0))
    return torch.tanh(u + out)


def other_the_second_time(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    z = z.flip(0).flip(0) if model.runs % 2 else z.flip(0) * 1
    return torch.tanh(u + model.inner(z * 1))


def own_generator(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    mask = torch.rand(u.shape, generator=torch.Generator().manual_seed(1))
    return torch.tanh(u + model.inner(z * mask))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (unchanged, "changed in place between"),
        (flipped, "changes whose rows"),
        (flipped_view, "changes whose rows"),
        (other_the_second_time, "something else when it is run again"),
        (own_generator, "torch.Generator of its own"),
    ],
)
def test_what_would_make_the_second_run_see_other_rows_is_refused(body: Any, expected: str) -> None:
    model = Crafted(body)
    groups = partition(model, "flat")
    capture = Capture(model, groups, Clip.over(1.0, groups.names))
    capture.attach()
    capture.start(Batch(4))
    with pytest.raises((PrivacyError, UnsupportedModel), match=expected):
        model(torch.arange(20).reshape(4, 5) % 11).sum().backward()


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_of_both_runs_are_the_same_and_secret(source: str, preserve: bool) -> None:
    """With public seeds and fresh keys two runs differ; with one key they agree with no block."""

    def body(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
        if source == "torch":
            drawn = torch.rand(u.shape)
        elif source == "numpy":
            drawn = torch.tensor(np.random.random(u.shape), dtype=u.dtype)
        else:
            drawn = torch.tensor([[random.random()] for _ in u], dtype=u.dtype)
        return torch.tanh(u + model.inner(z * drawn))

    def weights(key: int, checkpointed: bool) -> Tensor:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = Crafted(body, preserve_rng_state=preserve)
        if not checkpointed:
            model.forward = lambda x: model.head(  # type: ignore[method-assign]
                body(model, (h := model.words(x).mean(1)), h.detach() * 2)
            )
        return trained(model, self_check=False, noise_seed=key)

    assert torch.equal(weights(1, True), weights(1, False))
    assert not torch.allclose(weights(1, True), weights(2, True))


def test_two_threads_do_not_see_each_other() -> None:
    """Another thread's checkpoints, reentrant ones too, are torch's own while a model runs."""
    inside, outside = threading.Event(), threading.Event()

    class Waiting(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            outside.wait(30)
            return super().forward(x)

    model = Waiting(True)
    groups = partition(model, "flat")
    capture = Capture(model, groups, Clip.over(1.0, groups.names))
    capture.attach()
    capture.start(Batch(2))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(30)
    for reentrant in (True, False):
        x = torch.ones(3, requires_grad=True)
        checkpoint(torch.exp, x, use_reentrant=reentrant).sum().backward()
        assert torch.allclose(x.grad, torch.e * torch.ones(3))
    outside.set()
    thread.join(60)
    assert not failures


def test_after_a_run_checkpoints_are_torchs_own_again() -> None:
    trained(Blocks(True))
    with pytest.raises(ValueError, match="stop"):
        trained(Crafted(_stops), self_check=False)
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
    assert torch.allclose(x.grad, torch.e * torch.ones(3))


def _stops(model: Crafted, u: Tensor, z: Tensor) -> Tensor:
    raise ValueError("stop")
