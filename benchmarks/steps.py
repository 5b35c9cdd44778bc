"""`python -m benchmarks.steps`: whole training steps on a GPU, ordinary and private, interleaved.

    python -m benchmarks.steps --rows gpt2-bf16 vit-bf16      some rows; the others stay as they are
    python -m benchmarks.steps --rows gpt2-bf16 --profile     where a private step's time goes

A round runs one step of each engine in turn; milliseconds are medians over the rounds, ratios
medians of a round's private over its ordinary step. Memory is the allocator's peak over three steps
of an engine that is alone on the device. Every row says which device and commit it was measured on,
and rows that are not measured again keep theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import CLASSES, GPT2, PIXELS, WORDS, ViT
from vestige import PrivacyEngine
from vestige.train.models import build

Lot = tuple[nn.Module, Tensor, Tensor]


def gpt2() -> Lot:
    """32 texts of 256 words."""
    words = torch.randint(0, WORDS, (32, 257))
    return GPT2(), words[:, :-1], words[:, 1:]


def vit() -> Lot:
    """64 images."""
    return ViT(), torch.randn(64, 3, PIXELS, PIXELS), torch.randint(0, CLASSES, (64,))


def images(name: str, lot: int) -> Callable[[], Lot]:
    """A model of the command line on 3x32x32 images."""

    def make() -> Lot:
        model = build(name, (3, 32, 32), 10, seed=0)
        return model, torch.randn(lot, 3, 32, 32), torch.randint(0, 10, (lot,))

    return make


@dataclass(frozen=True)
class Row:
    """A model, a lot and a precision: bf16 autocast, TF32 products, or torch's own defaults."""

    make: Callable[[], Lot]
    precision: str = "fp32"

    def lot(self) -> Lot:
        """The same model and numbers every time, on the device."""
        torch.manual_seed(0)
        model, x, y = self.make()
        return model.cuda(), x.cuda(), y.cuda()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward pass runs in."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16")


ROWS = {
    "gpt2-bf16": Row(gpt2, "bf16"),
    "gpt2-tf32": Row(gpt2, "tf32"),
    "gpt2-fp32": Row(gpt2),
    "vit-bf16": Row(vit, "bf16"),
    "vit-tf32": Row(vit, "tf32"),
    "resnet18-fp32": Row(images("resnet18", 512)),
    "resnet18-bf16": Row(images("resnet18", 512), "bf16"),
    "cnn-fp32": Row(images("cnn", 1024)),
    "mlp-fp32": Row(images("mlp", 4096)),
}
ENGINES = {"ordinary": None, "per layer": "per_layer", "flat": "flat"}


def steps(row: Row, clipping: str | None) -> Iterator[None]:
    """A training loop that pauses before and after every step; lots are drawn untimed."""
    model, x, y = row.lot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = [(x, y)]
    if clipping is not None:
        model, optimizer, loader = PrivacyEngine("rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=1.0,
            clipping=clipping,
        )
    while True:
        for inputs, labels in loader:
            yield
            optimizer.zero_grad()
            with row.autocast():
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            yield


def timed(row: Row, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every step, engine by engine."""
    loops = {name: steps(row, clipping) for name, clipping in ENGINES.items()}
    spent: dict[str, list[float]] = {name: [] for name in loops}
    for r in range(rounds + 3):  # three rounds of warming up
        for name, loop in loops.items():
            next(loop)
            torch.cuda.synchronize()
            start = time.perf_counter()
            next(loop)
            torch.cuda.synchronize()
            if r >= 3:
                spent[name].append(1e3 * (time.perf_counter() - start))
    return spent


def peak(row: Row, clipping: str | None) -> float:
    """MiB at the fullest moment of the third step, of an engine that is alone."""
    free()
    loop = steps(row, clipping)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        next(loop)
        next(loop)
    return torch.cuda.max_memory_allocated() / 2**20


def free() -> None:
    """Give back what the last engine held."""
    gc.collect()
    torch.cuda.empty_cache()


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Milliseconds, ratios and memory of every engine."""
    spent = timed(row, rounds)
    found: dict[str, Any] = {}
    for name, clipping in ENGINES.items():
        pairs = zip(spent[name], spent["ordinary"], strict=True)
        found[name] = {
            "milliseconds": round(median(spent[name]), 3),
            "over_ordinary": round(median(a / b for a, b in pairs), 3),
            "peak_mib": round(peak(row, clipping)),
        }
        free()
    return found


def profile(row: Row, clipping: str) -> str:
    """The operations of three private steps that take longest, on the device and on the host."""
    loop = steps(row, clipping)
    for _ in range(6):
        next(loop)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(3):
            next(loop)
            next(loop)
        torch.cuda.synchronize()
    averages = seen.key_averages()
    launches = sum(e.count for e in averages if e.key == "cudaLaunchKernel")
    device = averages.table("self_cuda_time_total", row_limit=30, max_name_column_width=60)
    host = averages.table("self_cpu_time_total", row_limit=25, max_name_column_width=50)
    return f"{device}\n{host}\n{launches} launches in three steps"


def machine() -> dict[str, str]:
    """What a row was measured on; a copy without a repository says its commit in COMMIT."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    commit = os.environ.get("COMMIT") or done.stdout.strip()
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}


def line(name: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    cells = (
        f"{v['milliseconds']:.2f} ms, {v['over_ordinary']:.2f}x, {v['peak_mib']} MiB"
        for v in (found[engine] for engine in ENGINES)
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Parse, measure, print the table, merge the rows into the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", choices=["per_layer", "flat"])
    default = Path(__file__).parent / "results" / "steps-cuda.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    print(f"| model, precision | {' | '.join(ENGINES)} |\n{'|---' * (len(ENGINES) + 1)}|")
    for name in options.rows:
        torch.backends.cuda.matmul.allow_tf32 = ROWS[name].precision == "tf32"
        if options.profile:
            print(profile(ROWS[name], options.profile))
            continue
        found = measure(ROWS[name], options.rounds)
        print(line(name, found), flush=True)
        rows[name] = {**found, "rounds": options.rounds, "machine": machine()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
