"""A frozen base in shards, adapters trained privately:
torchrun --nproc-per-node 2 examples/fsdp_lora.py

The weights of the transformer's base are random and lie in shards on the ranks (FSDP2). Low-rank
adapters and the head are trained; every rank has them whole.

Guarantee: the epsilon that is printed holds for every sequence, whatever the number of processes.
The data are made up: a sequence's label is whether it has more of the first half of the tokens.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import vestige

TOKENS, LENGTH, WIDTH, HEADS, RANK = 32, 12, 32, 4, 4


class Adapted(nn.Module):
    """A frozen layer beside a trained product of two thin matrices, which begins at zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.between = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.mixed, self.out = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, WIDTH)
        self.wide, self.narrow = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mixed(self.before(x)).unflatten(2, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    x = torch.randint(TOKENS, (2200, LENGTH), device=device)
    y = ((x < TOKENS // 2).sum(1) > LENGTH // 2).long()
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=200)
    model = Classifier().to(device)
    trained = {p for p in model.parameters() if p.requires_grad}
    for block in model.blocks:
        fully_shard(block, ignored_params=trained)
    fully_shard(model, ignored_params=trained)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p in trained], lr=0.01)
    engine = vestige.PrivacyEngine()
    epochs = int(os.environ.get("EPOCHS", "6"))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=64,
    )
    for _ in range(epochs):
        for sequences, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(sequences), labels).backward()
            optimizer.step()
    with torch.no_grad():  # a pass of a sharded model is one of all ranks
        right = (model(x[2000:]).argmax(1) == y[2000:]).float().mean()
    if dist.get_rank() == 0:
        spent = engine.get_epsilon(1e-5)
        print(f"{dist.get_world_size()} ranks: accuracy {right:.3f}, epsilon {spent:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
