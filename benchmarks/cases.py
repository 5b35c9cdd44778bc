"""The sections of the benchmark, and their cases: which engines run on which workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines import (
    ENGINES,
    FLAT,
    GROUP,
    PER_LAYER,
    PLAIN,
    THOROUGH,
    TURNS,
    TWICE,
    UPDATES,
)
from benchmarks.workloads import CPU, CUDA, Workload

BOTH = (PLAIN, "plain, compiled", PER_LAYER, FLAT, f"{PER_LAYER}, compiled", f"{FLAT}, compiled")
RIVALS = ("opacus hooks flat", "opacus ghost")
MEMORY = (PLAIN, FLAT, "vestige fo", PER_LAYER, "vestige sma")
SHORT = (PLAIN, FLAT, "opacus hooks flat")
WORDS = 8192  # in a lot, whatever the length of its texts


@dataclass(frozen=True)
class Case:
    """A workload and the engines that are timed on it together."""

    name: str
    workload: Workload
    engines: Sequence[str]
    rounds: int = 15


def _rows() -> list[Case]:
    """The rows of the goals: a model in a precision."""
    workloads = {
        "gpt2": (32, ("bf16", "tf32", "fp32")),
        "vit": (64, ("bf16", "tf32")),
        "resnet18": (512, ("fp32", "bf16")),
        "cnn": (1024, ("fp32",)),
        "mlp": (4096, ("fp32",)),
    }
    return [
        Case(f"{model}-{precision}", Workload(model, lot, precision), (*BOTH, *RIVALS))
        for model, (lot, precisions) in workloads.items()
        for precision in precisions
    ]


def _methods() -> list[Case]:
    """Memory over own DP-SGD, and views on the same number of rows."""
    resnet, gpt2 = Workload("resnet18", 512), Workload("gpt2", 32, "bf16")
    views = ("vestige flat, 1 view", "vestige flat, 16 views")
    return [
        Case("resnet18 memory", resnet, MEMORY, 25),
        Case("gpt2 memory", gpt2, MEMORY, 25),
        Case("resnet18 views", resnet, (PLAIN, *views)),
    ]


def _group(device: str) -> list[Case]:
    """A group of one process over none: as it is, and adding up and comparing as several do."""
    engines = (PLAIN, FLAT, GROUP, THOROUGH)
    if device == "cpu":
        return _on_a_cpu(engines, {"mlp": 1000, "cnn": 60, "resnet18": 25})
    some = [*CUDA, Workload("gpt2", 32, "bf16")]
    return [Case(f"{w.model} group", w, engines, 50) for w in some]


def _workloads() -> list[Case]:
    """Models that people train privately, beside the rows."""
    return [
        Case("wrn-16-4-fp32", Workload("wrn-16-4", 512), (*BOTH, *RIVALS)),
        Case("wrn-16-4-bf16", Workload("wrn-16-4", 512, "bf16"), (*BOTH, *RIVALS)),
        Case("llama-lora-bf16", Workload("llama-lora", 16, "bf16"), (*BOTH, *RIVALS)),
    ]


def _growth() -> list[Case]:
    """How a step grows with the lot, the width, the length, the window and the groups."""
    lots = [Case(f"lot {n}", Workload("resnet18", n), SHORT, 9) for n in (64, 256, 1024, 4096)]
    widths = [
        Case(f"width {n}", Workload("perceptron", 1024, sizes={"width": n}), SHORT, 9)
        for n in (256, 1024, 4096, 8192)
    ]
    lengths = [
        Case(
            f"length {n}",
            Workload("gpt2", WORDS // n, "bf16", {"length": n}),
            (PLAIN, "vestige flat, no self-check"),
            9,
        )
        for n in (128, 256, 512, 1024, 2048, 4096, 8192)
    ]
    resnet = Workload("resnet18", 512)
    windows = [f"vestige fo, window {n}" for n in (2, 16, 64)]
    groups = [f"vestige flat, {n} groups" for n in (2, 4, 16)]
    return [
        *lots,
        *widths,
        *lengths,
        Case("window", resnet, (PLAIN, FLAT, *windows), 9),
        Case("groups", resnet, (PLAIN, FLAT, *groups, PER_LAYER), 9),
    ]


def _on_a_cpu(engines: Sequence[str], rounds: dict[str, int]) -> list[Case]:
    return [Case(w.model, w, engines, rounds[w.model]) for w in CPU if w.model in rounds]


def sections(device: str) -> dict[str, list[Case]]:
    """Those of a device, in the order in which they run."""
    if device == "cuda":
        return {
            "rows": _rows(),
            "methods": _methods(),
            "workloads": _workloads(),
            "growth": _growth(),
            "group": _group(device),
        }
    memory = (PLAIN, PER_LAYER, FLAT, "vestige fo", "vestige fo, bf16 history", "vestige sma")
    opacus = tuple(name for name in ENGINES if name.startswith("opacus"))
    updates = (PLAIN, FLAT, *(f"vestige {name}" for name in UPDATES))
    twice = (PLAIN, FLAT, *(f"vestige {name}" for name in TWICE), "vestige quantile")
    bands = (PLAIN, TURNS, "vestige fractional-noise", *BANDED)
    return {
        "models": _on_a_cpu((*memory, *opacus), {"mlp": 150, "cnn": 15, "resnet18": 15}),
        "updates": _on_a_cpu(updates, {"cnn": 15}),
        "twice": _on_a_cpu(twice, {"cnn": 9}),
        "bands": _on_a_cpu(bands, {"mlp": 9, "cnn": 9}),
        "group": _group(device),
    }


BANDED = tuple(name for name in ENGINES if name.startswith("vestige banded"))
