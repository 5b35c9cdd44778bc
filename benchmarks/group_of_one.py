"""One process in a group of its own, over nccl on a GPU and over gloo on a CPU:

    torchrun --standalone --nproc-per-node 1 -m benchmarks.group_of_one --device cuda

Its releases must be those of the process without a group, to 1e-12 in float64. Then the section
`group` is timed, and `over its base` is what the group costs. Further words go to
`python -m benchmarks`. Nothing is needed but what `import vestige` needs.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.__main__ import main as measure
from benchmarks.engines import join, leave
from vestige import PrivacyEngine
from vestige.methods import resolve

METHODS, STEPS = ("dp-sgd", "fo", "sma", "dp-is"), 8


def releases(method: str, device: str) -> tuple[list[Tensor], bool]:
    """The values of every release, and the weights after them; whether a group was there."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(device, torch.float64)
    data = TensorDataset(torch.randn(24, 5).double(), torch.randint(0, 3, (24,)))
    engine, chosen, seen = PrivacyEngine("rdp", noise_seed=4), resolve(method), []
    model, optimizer, loader = engine.make_private(
        module=layers,
        optimizer=chosen.make_optimizer(layers.parameters(), lr=0.05),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=chosen,
        steps=STEPS,
        max_physical_batch_size=4,
    )
    engine.ranks.thorough = True
    while engine.released < STEPS:
        for x, y in loader:
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            if len(seen) < engine.released:
                seen.append(engine.door.last[0].clone())
    return [*seen, *(p.detach() for p in model.parameters())], engine.ranks.group is not None


def difference(device: str) -> float:
    """The largest between a run in a group and one without, relative to the largest number."""
    alone = [releases(method, device) for method in METHODS]
    join("gloo" if device == "cpu" else "nccl")
    grouped = [releases(method, device) for method in METHODS]
    leave()
    assert [there for _, there in (*alone, *grouped)] == [False] * 4 + [True] * 4
    pairs = [
        (one, other)
        for (ours, _), (theirs, _) in zip(alone, grouped, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)


def main(words: list[str]) -> None:
    """Compare, then measure."""
    device = words[words.index("--device") + 1] if "--device" in words else "cpu"
    apart = difference(device)
    print(f"{', '.join(METHODS)} in a group of one differ from none by {apart:.1e}", flush=True)
    if not apart <= 1e-12:
        raise SystemExit(f"a group of one changes releases by {apart:.1e}")
    measure(["--section", "group", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
