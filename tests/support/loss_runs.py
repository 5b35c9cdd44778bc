"""Runs of the engine on token sequences, as many positions as rows, for tests of losses."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine

ROWS, LENGTH, WORDS = 16, 16, 7  # as many positions as rows: no shape tells them apart

NO_NOISE = "no noise: nothing is private, epsilon is infinite"

BOUND = 2.0  # between the gradients of short records in a whole batch and alone


class Tokens(nn.Module):
    """Scores (rows, positions, words); with labels the loss, too, as Hugging Face models do."""

    def __init__(self, own_loss=None):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.own_loss = own_loss

    def forward(self, tokens, labels=None):
        scores = self.out(self.embed(tokens))
        if labels is None:
            return scores
        return {"loss": self.own_loss(scores, labels), "logits": scores}


def data(ignored=True):
    """One long record, all others with one target each. All are alike, so that their gradients
    add up: a weight that one record moves shows in all others at once."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (1, LENGTH), generator=generator).repeat(ROWS, 1)
    labels = torch.randint(0, WORDS, (1, LENGTH), generator=generator).repeat(ROWS, 1)
    if ignored:
        labels[1:, 1:] = -100
    return tokens, labels


def clipped_sum(records, loss, model=None, reduction="mean", bound=BOUND, **options):
    """The clipped sum of all records in one lot, without noise, and the engine."""
    torch.manual_seed(1)
    model = (model or Tokens)()
    engine = PrivacyEngine(accountant="rdp")
    dataset = records if isinstance(records, list) else TensorDataset(*records)
    units = options.pop("dataset_size", ROWS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the self-check was skipped")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(dataset, batch_size=units, collate_fn=options.pop("pad", None)),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            sample_rate=1.0,
            dataset_size=units,
            loss_reduction=reduction,
            clipping="flat",
            **options,
        )
        for batch in loader:
            value = loss(model, *batch)
            engine.backward(value) if value.ndim else value.backward()
            optimizer.step()
            break
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return gradient * ROWS, engine


def ratio(records, loss, drop=0, **options):
    """|q(D) - q(D without a record)| / C."""
    fewer = tuple(t[[i for i in range(len(t)) if i != drop]] for t in records)
    whole, part = (clipped_sum(some, loss, **options)[0] for some in (records, fewer))
    return float((whole - part).norm()) / options.get("bound", BOUND)


def flat(scores, labels, **options):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def by_position(scores, labels):
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def masked(scores, labels):
    """A mean by hand over what is not ignored."""
    return by_position(scores, labels).sum() / (labels != -100).sum()


def first(m, x):
    """Scores (rows, words)."""
    return m(x)[:, 0]


def of_first_position(m, x, y):
    """An ordinary classification loss."""
    return F.cross_entropy(first(m, x), y[:, 0])


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, scores, y):
        return F.cross_entropy(scores * self.log.exp(), y)


WEIGHTS = torch.tensor([1.0, 1000.0] + [1.0] * (WORDS - 2))
