"""`python -m benchmarks.scaling`: what many GPUs should give, by a model, as the table of
docs/scaling.md, which `python -m benchmarks.page` writes there.

A step on W ranks takes t + 2 (W - 1) / W * bytes / bandwidth: the step of one rank with a lot of
its own, and one ring all_reduce of the flat float32 sum. Nothing overlaps: the sum is complete only
when the lot is. t is measured on one H200 (the newest benchmarks/results/cuda-COMMIT.json that has
it), that of the 7B model follows from GPT-2's rate of arithmetic; the bandwidths are the makers',
of which a share is taken.
"""

from __future__ import annotations

from benchmarks.store import files

FLAT = "vestige flat"

SHARE = 0.8  # of a link's bandwidth that an all_reduce gets: assumed
LINKS = {8: ("NVLink, 450 GB/s", 450e9), 64: ("400 Gb/s a GPU", 50e9)}  # bytes a second, one way
GPT2, TOKENS = 124e6, 32 * 256
LLAMA, ADAPTERS = 7e9, 8.4e6  # rank 16 on two products of 32 layers


def measured(name: str) -> float:
    """Seconds of a private step with flat clipping on one GPU."""
    return next(
        row["milliseconds"] / 1e3
        for file in reversed(files("cuda"))
        for row in file.section("rows")
        if (row["case"], row["engine"]) == (name, FLAT) and "milliseconds" in row
    )


def models() -> list[tuple[str, float, float]]:
    """Name, trained parameters, seconds of a step on one GPU."""
    gpt2 = measured("gpt2-bf16")
    rate = 6 * GPT2 * TOKENS / gpt2  # operations a second
    # A frozen base: forward pass and gradients of the activations, no gradients of its weights.
    return [
        ("ResNet-18, lot 512 a rank, float32", 11.2e6, measured("resnet18-fp32")),
        ("GPT-2 124M, 32 x 256 words a rank, bf16", GPT2, gpt2),
        ("7B with LoRA, 32 x 256 words a rank, bf16", ADAPTERS, 4 * LLAMA * TOKENS / rate),
    ]


def efficiency(ranks: int, parameters: float, seconds: float) -> float:
    """The share of W single GPUs that W ranks give together."""
    _, bandwidth = LINKS[ranks]
    sent = 2 * (ranks - 1) / ranks * 4 * parameters / (SHARE * bandwidth)
    return seconds / (seconds + sent)


def table() -> str:
    """Markdown, a line for each model."""
    heads = [f"{ranks} GPUs, {name}" for ranks, (name, _) in LINKS.items()]
    lines = [f"| model | MB a step | one GPU, ms | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for name, parameters, seconds in models():
        cells = [f"{efficiency(ranks, parameters, seconds):.0%}" for ranks in LINKS]
        size, step = 4 * parameters / 1e6, seconds * 1e3
        lines.append(f"| {name} | {size:.0f} | {step:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
