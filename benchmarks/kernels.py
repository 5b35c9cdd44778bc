"""`python -m benchmarks.kernels`: norms and clipped sums of single layers on a GPU, path by path.

Every round runs each path in turn, so that a slow moment of the machine hits all of them; figures
are medians over the rounds. A path is timed by device events around calls that wait in the queue
while the device is busy, so that the device's own time is seen; `host_ms` is what launching takes.
Inputs alternate between two sets, which together do not fit in the device's cache.

`today` is what gradients/uses.py does: under autocast it widens bf16 to float32 first. `ordinary`
is the weight gradient of a loop without privacy. Every fused figure includes `arranging`, the copy
that rounds float32 to TF32 and mends strides; `both` needs it once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.store import machine
from vestige.gradients.kernels import fused, reference
from vestige.gradients.uses import Outer

CALLS = 4  # in one timed stretch
BUSY_CYCLES = 4_000_000  # about two milliseconds in which launches queue up
LARGEST_PRODUCT = 2**33  # numbers; above it a form is left out

Path_ = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Layer:
    """A weight (p, d) with t positions in each of n records."""

    model: str
    layer: str
    n: int
    t: int
    p: int
    d: int
    columns: bool = False  # of a convolution: positions last in memory

    def factors(self, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
        """Random factors as the layer has them."""
        generator = torch.Generator("cuda").manual_seed(seed)

        def made(width: int) -> Tensor:
            size = (self.n, width, self.t) if self.columns else (self.n, self.t, width)
            values = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
            values = values.to(dtype)
            return values.transpose(1, 2) if self.columns else values

        return made(self.d), made(self.p)


LAYERS = [
    Layer("gpt2", "attention in", 32, 256, 2304, 768),
    Layer("gpt2", "attention out", 32, 256, 768, 768),
    Layer("gpt2", "mlp up", 32, 256, 3072, 768),
    Layer("gpt2", "mlp down", 32, 256, 768, 3072),
    Layer("gpt2", "head, 50304 words", 32, 256, 50304, 768),
    Layer("gpt2", "head, 50257 words", 32, 256, 50257, 768),
    Layer("vit-b/16", "attention in", 64, 197, 2304, 768),
    Layer("vit-b/16", "attention out", 64, 197, 768, 768),
    Layer("vit-b/16", "mlp up", 64, 197, 3072, 768),
    Layer("vit-b/16", "mlp down", 64, 197, 768, 3072),
    Layer("vit-b/16", "patches", 64, 196, 768, 768, columns=True),
    Layer("resnet18", "stem", 512, 1024, 64, 27, columns=True),
    Layer("resnet18", "stage 1", 512, 1024, 64, 576, columns=True),
    Layer("resnet18", "stage 2", 512, 256, 128, 1152, columns=True),
    Layer("resnet18", "stage 3", 512, 64, 256, 2304, columns=True),
    Layer("resnet18", "stage 4", 512, 16, 512, 4608, columns=True),
]


def paths(layer: Layer, dtype: torch.dtype) -> dict[str, Path_]:
    """What is timed: norms alone, sums alone, and both as a step needs them."""
    total = torch.zeros(layer.p, layer.d, device="cuda")
    factors = torch.rand(layer.n, device="cuda")

    def today(a: Tensor, g: Tensor) -> Outer:
        return Outer(a.float(), g.float())

    def today_both(a: Tensor, g: Tensor) -> None:
        use = today(a, g)
        use.add_weighted(use.square_norms().rsqrt().clamp(max=1).float(), total)

    def ours(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return fused.arranged_pair(a, g)

    def fused_both(a: Tensor, g: Tensor) -> None:
        a, g = ours(a, g)
        fused.add_weighted(a, g, reference.clip_factors(fused.square_norms(a, g), 1.0), total)

    def ordinary(a: Tensor, g: Tensor) -> Tensor:
        return g.flatten(0, 1).t() @ a.flatten(0, 1)

    every: dict[str, Path_] = {
        "ordinary weight gradient": ordinary,
        "norms, today": lambda a, g: today(a, g).square_norms(),
        "norms, product": reference.product_norms,
        "arranging, fused": ours,
        "norms, fused": lambda a, g: fused.square_norms(*ours(a, g)),
        "sum, fused": lambda a, g: fused.add_weighted(*ours(a, g), factors, total),
        "both, today": today_both,
        "both, fused": fused_both,
    }
    if layer.n * layer.p * layer.d > LARGEST_PRODUCT:
        del every["norms, product"]
    return every


def measure(layer: Layer, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One row per path."""
    inputs = [layer.factors(dtype, seed) for seed in (0, 1)]
    every = paths(layer, dtype)
    device: dict[str, list[float]] = {name: [] for name in every}
    host: dict[str, list[float]] = {name: [] for name in every}
    for r in range(rounds + 1):  # one round of warming up
        for name, path in every.items():
            on_device, on_host = _timed(path, inputs)
            if r:
                device[name].append(on_device)
                host[name].append(on_host)
    plain = median(device["ordinary weight gradient"])
    shape = {"model": layer.model, "layer": layer.layer, "n": layer.n, "t": layer.t}
    return [
        {
            **shape,
            "p": layer.p,
            "d": layer.d,
            "precision": "bf16" if dtype == torch.bfloat16 else "tf32",
            "path": name,
            "device_ms": round(median(device[name]), 5),
            "host_ms": round(median(host[name]), 5),
            "over_ordinary": round(median(device[name]) / plain, 3),
        }
        for name in every
    ]


def _timed(path: Path_, inputs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Milliseconds of one call, on the device and on the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    began = time.perf_counter()
    for i in range(CALLS):
        path(*inputs[i % 2])
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS, 1e3 * host / CALLS


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, one line per layer and precision."""
    names = list(dict.fromkeys(row["path"] for row in rows))
    lines = [f"| layer, precision | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    by_layer: dict[str, dict[str, float]] = {}
    for row in rows:
        size = f"{row['n']} x {row['t']}, {row['p']} x {row['d']}"
        title = f"{row['model']} {row['layer']} ({size}), {row['precision']}"
        by_layer.setdefault(title, {})[row["path"]] = row["device_ms"]
    for title, cells in by_layer.items():
        shown = (f"{cells[name]:.3f}" if name in cells else "" for name in names)
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32"])
    default = Path(__file__).parent / "results" / "kernels-cuda.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    rows: list[dict[str, Any]] = []
    for name in options.precisions:
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        for layer in LAYERS:
            if not options.models or layer.model in options.models:
                rows += measure(layer, dtype, options.rounds)
                torch.cuda.empty_cache()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine("cuda"), "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
