"""Private training in several processes: torchrun --nproc-per-node 2 examples/ddp.py

Guarantee: the epsilon that is printed holds for every record, whatever the number of processes. The
data are scikit-learn's digits, which are public.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    y = torch.tensor(digits.target, device=device)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=100)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = vestige.PrivacyEngine()
    epochs = int(os.environ.get("EPOCHS", "10"))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
        spent = engine.get_epsilon(1e-5)
        print(f"{dist.get_world_size()} ranks: accuracy {right:.3f}, epsilon {spent:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
