"""Small models and data for trainers of other libraries, and what goes through an engine's door."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

from vestige.release.observer import Observer

N, LENGTH, VOCABULARY = 24, 7, 50
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


class Sentences(Dataset):
    """Records of tokens with padding, and a class, or the tokens themselves, to be told."""

    def __init__(self, records=N, tokens=False, seed=1):
        made = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, VOCABULARY, (N, LENGTH), generator=made)
        lengths = torch.randint(2, LENGTH + 1, (N, 1), generator=made)
        mask = (torch.arange(LENGTH) < lengths).long()
        labels = torch.randint(0, 2, (N,), generator=made)
        if tokens:
            labels = ids.masked_fill(mask == 0, -100)
        columns = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
        self.columns = {name: values[:records].clone() for name, values in columns.items()}

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


class Releases(Observer):
    """Writes down every release of an engine."""

    def __init__(self):
        self.values = []

    def released(self, passage):
        self.values.append(passage.values.clone())


def equal(some, others):
    """Whether two lists of tensors are the same, bit for bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def seeded(make, seed=0):
    """A model with weights that are the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def flat(model: nn.Module):
    """The trainable weights of a model."""
    kept = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(kept)
