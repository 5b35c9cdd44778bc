"""`python -m benchmarks.noise`: what the noise of a step costs on a CPU, whatever the model is.

CPU seconds of one thread (not of the clock, so that other programs hardly matter), medians over the
steps, for a vector of a million numbers in float32; and the vectors that are kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from vestige.privacy.factorisation import coefficients, inverse_root
from vestige.release.correlated import Banded, Fresh, Moving, NoiseProcess
from vestige.sampling.streams import Randomness

SIZE, STEPS, WARM = 10**6, 20, 40


def fresh(like: Tensor) -> Fresh:
    """Draws under a key of their own."""
    streams = Randomness()
    return lambda row: streams.normal_blocks(like, row)


def processes(like: Tensor) -> Iterator[tuple[str, NoiseProcess]]:
    """White noise, as one band, and both kinds of bands."""
    yield "white (dp-sgd keeps none)", Banded(like, fresh(like), coefficients(0.8, 1))
    for bands in (8, 16, 32):
        c, d = coefficients(0.8, bands), inverse_root(0.0, bands)
        yield f"fractional-noise, {bands} bands", Banded(like, fresh(like), c)
        yield f"banded-inverse, {bands} bands", Moving(like, fresh(like), d, 10**6)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    like = torch.zeros(SIZE)
    print(f"{'method':28}{'ms a step':>10}{'vectors kept':>14}")
    for name, process in processes(like):
        seconds = []
        for row in range(WARM, WARM + STEPS):
            start = time.process_time()
            process.at(row)
            seconds.append(time.process_time() - start)
        kept = sum(v.numel() for v in vars(process).values() if isinstance(v, Tensor)) // SIZE
        print(f"{name:28}{1e3 * statistics.median(seconds):10.1f}{kept:14}")


if __name__ == "__main__":
    main()
