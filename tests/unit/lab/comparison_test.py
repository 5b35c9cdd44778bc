"""Methods on a user's own data, and what the whole study costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from vestige.errors import ConfigError
from vestige.lab import comparison, comparison_report
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import training
from vestige.train.config import TrainConfig


@pytest.fixture
def study() -> comparison.Study:
    base = TrainConfig(dataset="digits", model="linear", lot=100, epochs=2, train_size=400)
    return comparison.Study(("dp-sgd", "fo"), epsilon=2.0, base=base, seeds=2)


def test_compare_states_the_cost_of_the_whole_study(study: comparison.Study) -> None:
    report = comparison.compare(study)
    assert report["study_runs"] == 4
    events = []
    for line in report["methods"]:
        sigma = line["noise_multiplier"] / (0.9 if line["method"] == "fo" else 1.0)
        events.append(Event(0.25, sigma, 2 * 8))
        assert line["epsilon"] == pytest.approx(2.0, rel=2e-3)
    assert report["study_epsilon"] == pytest.approx(accounting.epsilon(events, 1e-5), rel=1e-6)
    assert report["study_epsilon"] > 2.0
    assert report["reference"] == "dp-sgd"
    assert report["methods"][1]["against_reference"]["comparisons"] == 1
    assert any("whole study" in sentence for sentence in comparison_report.words(report))


def test_compare_draws_fresh_noise_on_paired_starts(study: comparison.Study) -> None:
    first, second = comparison.compare(study), comparison.compare(study)
    assert [r["loss"] for r in first["runs"]] != [r["loss"] for r in second["runs"]]
    assert [(r["method"], r["seed"]) for r in first["runs"]] == [
        ("dp-sgd", 0), ("dp-sgd", 1), ("fo", 0), ("fo", 1)
    ]  # fmt: skip


def test_compare_tunes_on_records_that_no_run_trains_on(
    study: comparison.Study, monkeypatch: pytest.MonkeyPatch
) -> None:

    seen: list[Any] = []
    real = training.prepare

    def watching(config: Any, **options: Any) -> Any:
        seen.append(options["dataset"])
        return real(config, **options)

    monkeypatch.setattr("vestige.lab.comparison.training.prepare", watching)
    report = comparison.compare(replace(study, tune=True, seeds=1))
    assert report["validation_records"] == 80 and report["records"] == 320
    assert Counter(run["role"] for run in report["runs"]) == {"tuning": 8, "final": 2}
    assert report["study_runs"] == 10
    tuned = [d for d, run in zip(seen, report["runs"], strict=True) if run["role"] == "tuning"]
    final = [d for d, run in zip(seen, report["runs"], strict=True) if run["role"] == "final"]
    assert all(len(d.x_test) == 80 for d in tuned)
    assert all(len(d.x_test) == 360 for d in final)
    rows = {tuple(x.flatten().tolist()) for x in tuned[0].x_train}
    assert not rows & {tuple(x.flatten().tolist()) for x in final[0].x_test}
    assert tuned[0].x_train.equal(final[0].x_train)
    assert any("80 training records" in sentence for sentence in comparison_report.words(report))


def test_compare_at_equal_noise(study: comparison.Study) -> None:
    report = comparison.compare(replace(study, match="sigma", seeds=1))
    first, second = report["methods"]
    assert first["noise_multiplier"] == second["noise_multiplier"]
    assert first["epsilon"] == pytest.approx(2.0, rel=2e-3)
    assert second["epsilon"] < 1.95  # accounted at sigma/beta


def test_compare_after_an_interrupt_states_what_was_spent(
    study: comparison.Study, monkeypatch: pytest.MonkeyPatch
) -> None:

    real, runs = training.Session.run, []

    def broken_off(self: Any, tell: Any) -> dict[str, Any]:
        runs.append(self)
        result = real(self, tell)
        return result | {"interrupted": len(runs) == 2}

    monkeypatch.setattr(training.Session, "run", broken_off)
    report = comparison.compare(study)
    assert report["interrupted"] and len(runs) == 2
    assert [line["accuracy"]["count"] for line in report["methods"]] == [1]
    spent = accounting.epsilon(
        [Event(0.25, report["runs"][0]["noise_multiplier"], 2 * 8)], 1e-5
    )  # both runs, although only one is reported
    assert report["study_epsilon"] == pytest.approx(spent, rel=1e-6)


def test_a_study_of_methods_for_two_relations_claims_the_weaker_one(
    study: comparison.Study,
) -> None:
    report = comparison.compare(replace(study, methods=("dp-sgd", "dp-ftrl"), seeds=1))
    assert "zero out one record" in report["guarantee"]
    assert "add or remove" not in report["guarantee"]


def test_a_study_with_a_method_that_is_not_private_has_no_guarantee(
    study: comparison.Study,
) -> None:
    with pytest.raises(ConfigError, match=r"no guarantee.*match sigma"):
        replace(study, methods=("dp-sgd", "dp-adam-ac"))
    report = comparison.compare(
        replace(study, methods=("dp-sgd", "dp-adam-ac"), match="sigma", seeds=1)
    )
    assert report["study_epsilon"] is None and report["guarantee"] == "none"
    assert report["not_private"] == ["dp-adam-ac"]
    assert "no guarantee" in comparison_report.words(report)[0]
