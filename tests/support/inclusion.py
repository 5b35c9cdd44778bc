"""Whether the lots that ranks were handed are Poisson lots of a quarter of the records."""

from __future__ import annotations

import torch

from tests.support.small_runs import LOT, N


def check_poisson(lots):
    """Every record is in a quarter of the lots, on one rank; `lots` has the share of each rank."""
    assert len(lots) >= 150
    counts, sizes = torch.zeros(N), []
    for shares in lots:
        rows = [row for share in shares for row in share]
        assert len(set(rows)) == len(rows)
        counts[rows] += 1
        sizes.append(len(rows))
    rate = LOT / N
    error = (rate * (1 - rate) / len(lots)) ** 0.5
    assert float((counts / len(lots) - rate).abs().max()) < 5 * error
    # Chi-square of 24 counts: above 60 once in 20,000.
    assert float(((counts / len(lots) - rate) / error).square().sum()) < 60
    # Lots of a fixed size have no variance; a binomial one's is known to 11 % here.
    spread = float(torch.tensor(sizes).double().var()) / (N * rate * (1 - rate))
    assert abs(spread - 1) < 5 * (2 / len(lots)) ** 0.5
