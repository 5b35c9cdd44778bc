"""The watch over losses: it sees every loss before backward, and what it cannot read it says."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.data import DataLoader, TensorDataset

import vestige
from tests.support.loss_runs import (
    ROWS,
    WEIGHTS,
    WORDS,
    Tokens,
    by_position,
    clipped_sum,
    data,
    first,
    flat,
    of_first_position,
)
from vestige import ConfigError, PrivacyEngine, PrivacyError
from vestige.gradients.loss_watch import LossWatch


def test_the_trainers_count_of_tokens_is_refused():
    class Counts(Tokens):
        def forward(self, tokens, num_items_in_batch=None):
            return super().forward(tokens)

    with pytest.raises(PrivacyError, match="num_items_in_batch"):
        clipped_sum(
            data(), lambda m, x, y: flat(m(x, num_items_in_batch=9), y), model=lambda: Counts()
        )


def test_a_refused_loss_leaves_the_batch_for_a_better_one():
    tokens, labels = data()
    model = Tokens()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(tokens, labels), batch_size=ROWS),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
    )
    x, y = next(iter(loader))
    values = by_position(model(x), y)
    with pytest.raises(PrivacyError, match="applies Log"):
        values.mean().log().backward()
    engine.backward(values.mean(1))
    optimizer.step()
    assert engine.released == 1 and engine.ledger.steps == 1
    assert not function_modes()


def test_a_loss_that_cannot_be_read_is_a_caveat():
    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            ctx.shape, ctx.name, ctx.variable = scores.shape, "mine", None
            return scores.mean()

        @staticmethod
        def backward(ctx, g):
            return g.expand(ctx.shape) / ctx.shape.numel()

    for loss in (
        lambda m, x, y: Unknown.apply(m(x)),
        lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]).add(Unknown.apply(m(x))),
    ):
        _, engine = clipped_sum(data(), loss)
        assert any("could not be read" in caveat for caveat in engine.caveats())
        stated = engine.statement(1e-5)
        assert any("could not be read" in caveat for caveat in stated["caveats"])


def test_inputs_that_could_not_be_followed_are_a_caveat():
    """Rows that meet where no function mode sees it: nobody knows, and the statement says so."""

    def caveats(preprocess):
        model = nn.Linear(3, 2)
        engine = PrivacyEngine(accountant="rdp")
        x, y = torch.rand(ROWS, 3), torch.arange(ROWS) % 2
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=1.0,
        )
        for x, y in loader:
            F.cross_entropy(model(preprocess(x)), y).backward()
            optimizer.step()
        return [c for c in engine.caveats() if "could not be followed" in c]

    def standardised(column):
        return column - column.mean()

    for hidden in (
        lambda x: torch.vmap(standardised, 1, 1)(x),
        lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0)),
        torch.jit.script(centred),
    ):
        assert len(caveats(hidden)) == 1
    for seen in (lambda x: x, lambda x: (x * 2).flip(1).clamp(0, 1), lambda x: x + torch.randn(3)):
        assert caveats(seen) == []


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def test_blocks_of_the_loop_close_as_if_nobody_watched():
    """A mode around the model alone; torch.device, which takes away whatever is on top; and a
    device context that was entered as a default device is, which insists on the bottom."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def device():
        return torch.device("cpu")

    for blocks in ([Mode, device], [device, Mode], [device], [device, device]):

        def loss(m, x, y, blocks=blocks):
            with contextlib.ExitStack() as around:
                for block in blocks:
                    around.enter_context(block())
                scores = m(x)
            assert not [m for m in function_modes() if not isinstance(m, LossWatch)]
            with device():
                return F.cross_entropy(scores[:, 0], y[:, 0], weight=WEIGHTS)

        with pytest.raises(PrivacyError, match="class-weighted"):
            clipped_sum(data(), loss)
        plain, _ = clipped_sum(data(), of_first_position)
        assert plain.norm() > 0
        assert not function_modes()


def test_a_collector_at_work_moves_no_mode():
    """Torch looks whether there is a mode, and takes it a moment later: GC may begin in between."""
    tokens, labels = data()

    def broken_off(cycle):
        model, engine = Tokens(), PrivacyEngine(accountant="rdp")
        _, _, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(tokens, labels), batch_size=ROWS),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=1.0,
        )
        kept = list(next(iter(loader)))
        if cycle:
            kept.append(kept)
        assert len(function_modes()) == 1
        return engine

    made = broken_off(cycle=False)
    assert not function_modes()  # the loop has let go of the batch: nothing is left on
    del made
    gc.disable()
    try:
        engine = broken_off(cycle=True)
        (left,) = function_modes()
        gc.collect()
        assert function_modes() == [left]
        assert (torch.ones(2) + 1).sum() == 4
    finally:
        gc.enable()
    engine.abandon_lot()
    assert not function_modes()


def test_a_default_device_is_set_and_taken_back_around_the_watch():
    def loss(m, x, y):
        torch.set_default_device("cpu")
        try:
            scores = m(x)
        finally:
            torch.set_default_device(None)
        return F.cross_entropy(scores[:, 0], y[:, 0], weight=WEIGHTS)

    with pytest.raises(PrivacyError, match="class-weighted"):
        clipped_sum(data(), loss)
    torch.set_default_device("cpu")
    try:
        with pytest.raises(PrivacyError, match="class-weighted"):
            clipped_sum(
                data(), lambda m, x, y: F.cross_entropy(m(x)[:, 0], y[:, 0], weight=WEIGHTS)
            )
        plain, _ = clipped_sum(data(), of_first_position)
        assert plain.norm() > 0
    finally:
        torch.set_default_device(None)
    assert not function_modes()


def test_losses_of_two_engines_are_told_apart():
    """Each engine reads the loss of its own model, also while both have a batch in hand."""
    tokens, labels = data()
    made = []
    for rows in (ROWS, ROWS // 2):
        model, engine = Tokens(), PrivacyEngine(accountant="rdp")
        made.append((engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(tokens[:rows], labels[:rows]), batch_size=rows),
            noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0,
        )))  # fmt: skip
    batches = [next(iter(loader)) for _, _, _, loader in made]
    both = [flat(m(x), y) for (_, m, _, _), (x, y) in zip(made, batches, strict=True)]
    for loss in both:
        loss.backward()
    for engine, _, optimizer, _ in made:
        optimizer.step()
        assert engine.released == 1
        assert not any("read" in caveat for caveat in engine.caveats())
    assert not function_modes()


class Pooled(nn.Module):
    """A mean over the padded length, as in many text classifiers."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


def texts():
    """One long text and many short ones, with a class each."""
    generator = torch.Generator().manual_seed(2)
    lengths = [60] + [3 + i % 3 for i in range(ROWS)]
    return [
        (torch.randint(1, WORDS, (n,), generator=generator), i % 3) for i, n in enumerate(lengths)
    ]


def to_the_longest(rows):
    return pad_sequence([r for r, _ in rows], batch_first=True), torch.tensor([k for _, k in rows])


def class_losses(m, x, y):
    return 100 * F.cross_entropy(m(x), y, reduction="none")


def test_padding_to_a_public_length_keeps_the_bound():
    """The same records, padded to the longest of the lot, move all others."""

    def moved(pad):
        whole, _ = clipped_sum(texts(), class_losses, model=Pooled, pad=pad, bound=1.0)
        part, _ = clipped_sum(texts()[1:], class_losses, model=Pooled, pad=pad, bound=1.0)
        return float((whole - part).norm())

    assert moved(vestige.PadTo({0: 64})) <= 1 + 1e-6
    assert moved(to_the_longest) > 1.5


def test_shapes_that_follow_the_lot_are_a_caveat_and_in_the_statement():
    for pad, padded in ((to_the_longest, True), (vestige.PadTo({0: 64}), False)):
        model = Pooled()
        engine = PrivacyEngine(accountant="rdp", noise_seed=3)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(texts(), batch_size=4, collate_fn=pad),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=3,
        )
        for x, y in loader:
            engine.backward(class_losses(model, x, y))
            optimizer.step()
        assert any("PadTo" in caveat for caveat in engine.caveats()) == padded
        stated = engine.statement(1e-5)["caveats"]
        assert any("padded to the longest" in caveat for caveat in stated) == padded


def test_pad_to_fills_cuts_and_refuses():
    rows = [
        {"ids": torch.tensor([1, 2, 3]), "labels": [4, 5], "kind": 1},
        {"ids": torch.tensor([6]), "labels": [7], "kind": 0},
    ]
    pad = vestige.PadTo({"ids": 3, "labels": 4}, value={"labels": -100})
    batch = pad(rows)
    assert batch["ids"].tolist() == [[1, 2, 3], [6, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, -100, -100], [7, -100, -100, -100]]
    assert batch["kind"].tolist() == [1, 0]
    images = vestige.PadTo(3, value=-1)([torch.ones(2, 2), torch.ones(3, 2)])
    assert images[0].tolist() == [[1, 1], [1, 1], [-1, -1]]
    with pytest.raises(ConfigError, match="more than the 2 positions of PadTo in field 'ids'"):
        vestige.PadTo({"ids": 2})(rows)
    cut = vestige.PadTo({"ids": 2, "labels": 2}, truncate=True)(rows)
    assert cut["ids"].tolist() == [[1, 2], [6, 0]]
    for length in (0, -1, 2.5, True, {"ids": 0}):
        with pytest.raises(ConfigError, match="whole number above 0"):
            vestige.PadTo(length)
