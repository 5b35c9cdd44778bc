"""The noisy figure of the held-out records: sensitivity, noise, and its own ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy import stats

from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.privacy.ledger import Event
from vestige.release import door as doors
from vestige.train import evaluation
from vestige.train.evaluation import ledger_of_held_out, released_share

ABOUT = {"name": "d.csv", "part": "held-out"}


def released(hits: torch.Tensor, path: Path, seed: int | None = None, epsilon: float = 1.0):
    return released_share(hits, epsilon, 1e-5, path, ABOUT, seed)


def sums(hits: torch.Tensor, monkeypatch: pytest.MonkeyPatch, path: Path) -> torch.Tensor:
    """What arrives at the door, with the bound that it claims."""
    seen: list[torch.Tensor] = []

    class Watched(doors.ClippedSum):
        def __init__(self, values: torch.Tensor, bounds: tuple[float, ...]) -> None:
            super().__init__(values, bounds)
            assert bounds == (1.0,)
            seen.append(values.clone())

    monkeypatch.setattr(evaluation, "ClippedSum", Watched)
    released(hits, path)
    return seen[0]


@pytest.mark.parametrize("hit", [0.0, 0.25, 0.5, 1.0, 7.0, -3.0, float("nan"), float("inf")])
def test_one_record_moves_the_sums_by_at_most_the_bound(
    hit: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = torch.rand(30, generator=torch.Generator().manual_seed(0))
    with_it = sums(torch.cat([others, torch.tensor([hit])]), monkeypatch, tmp_path / "a.jsonl")
    without = sums(others, monkeypatch, tmp_path / "b.jsonl")
    assert float((with_it - without).norm()) <= 1 + 1e-12


def test_the_noise_has_the_law_that_the_ledger_is_charged_for(tmp_path: Path) -> None:
    hits = torch.ones(200)
    found = released(hits, tmp_path / "l.jsonl", seed=0)
    std = found["noise_std"]
    assert found["epsilon"] <= 1.0
    assert found["epsilon"] == accounting.epsilon([Event(1.0, std)], 1e-5)
    # The mean of ones with noise: its distribution follows from two normal numbers.
    shares = [released(hits, tmp_path / f"{s}.jsonl", seed=s)["share"] for s in range(300)]
    clipped = [share for share in shares if share < 1]
    z = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(1)).double() * std
    expected = ((200 + z[0]) / (200 + z[0] + z[1])).clamp(0, 1)
    assert stats.ks_2samp(clipped, expected[expected < 1]).pvalue > 1e-3
    narrow = ((200 + z[0] / 2) / (200 + z[0] / 2 + z[1] / 2)).clamp(0, 1)
    assert stats.ks_2samp(clipped, narrow[narrow < 1]).pvalue < 1e-3


def test_the_standard_error_is_that_of_the_noise(tmp_path: Path) -> None:
    hits = torch.cat([torch.ones(700), torch.zeros(300)])
    found = [released(hits, tmp_path / f"{seed}.jsonl", seed=seed) for seed in range(300)]
    shares, errors = (
        torch.tensor([one[name] for one in found]) for name in ("share", "standard_error")
    )
    squares = float(((shares - 0.7) / errors).square().sum())  # chi square of 300 normal numbers
    low, high = stats.chi2(300).ppf([1e-3, 1 - 1e-3])
    assert low < squares < high
    assert squares * 1.2**2 > high and squares / 1.2**2 < low


def test_every_release_is_on_the_ledger_of_the_held_out_records(tmp_path: Path) -> None:
    path = ledger_of_held_out(tmp_path / "ledger.jsonl")
    assert path.name == "ledger.held-out.jsonl"
    hits = torch.full((50,), 0.5)
    first, second = released(hits, path), released(hits, path)
    assert first["share"] != second["share"]
    content = ledger_file.read(path)
    assert sum(event.count for event in content.events) == 2
    assert first["epsilon_of_ledger"] == first["epsilon"] < second["epsilon_of_ledger"]
    assert second["epsilon_of_ledger"] == accounting.epsilon(content.events, 1e-5)
    assert not content.facts.test_mode


def test_two_figures_of_one_seed_on_one_ledger_have_noise_of_their_own(tmp_path: Path) -> None:
    """Else their difference would be the exact one, to whoever sees both."""
    hits = torch.full((50,), 0.5)
    path = tmp_path / "l.jsonl"
    first, second = released(hits, path, seed=1), released(hits, path, seed=1)
    assert first["share"] != second["share"]
    assert released(hits, tmp_path / "other.jsonl", seed=1)["share"] == first["share"]


def test_the_ledger_is_charged_before_the_noise_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = tmp_path / "l.jsonl", []

    def drawn(self: object, *_: object) -> None:
        held.append(sum(event.count for event in ledger_file.read(path).events))
        raise KeyboardInterrupt

    monkeypatch.setattr(doors.Door, "_noise", drawn)
    with pytest.raises(KeyboardInterrupt):
        released(torch.ones(9), path)
    assert held == [1]
    assert sum(event.count for event in ledger_file.read(path).events) == 1


def test_test_mode_repeats_and_says_so(tmp_path: Path) -> None:
    hits = torch.ones(50)
    first, second = (released(hits, tmp_path / f"{n}.jsonl", seed=4) for n in "ab")
    assert first == second
    assert ledger_file.read(tmp_path / "a.jsonl").facts.test_mode


def test_a_ledger_of_other_data_is_refused(tmp_path: Path) -> None:
    released(torch.ones(9), tmp_path / "l.jsonl")
    other = {"name": "other.csv", "part": "held-out"}
    with pytest.raises(ConfigError, match="different data"):
        released_share(torch.ones(9), 1.0, 1e-5, tmp_path / "l.jsonl", other, None)
