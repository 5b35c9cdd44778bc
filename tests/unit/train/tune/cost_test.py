"""The bill of a search: solved for, put on every ledger, and what a trial may spend."""

from __future__ import annotations

from pathlib import Path

import pytest

from vestige.errors import ConfigError
from vestige.plan import ADJACENCY, USER
from vestige.privacy import accounting, ledger_file
from vestige.privacy.accounting import Charge
from vestige.privacy.events import Event
from vestige.privacy.ledger import Facts
from vestige.privacy.ledger_file import LedgerFile
from vestige.privacy.selection import Law
from vestige.train.tune.cost import (
    Bill,
    bill,
    charge_of,
    charged,
    releases,
    search_event,
    stays_within,
)

LAW, DATA = Law.with_mean(5, 0), {"name": "d", "records": 100}
SMALL, LARGE = {Charge(0.02): 300}, {Charge(0.1, 0.8): 30, Charge(1.0, 0.1): 1}


def charge(bills: list[Bill]) -> None:
    with charged(bills):
        pass


def test_the_noise_is_the_least_that_keeps_the_search_within_its_target(tmp_path: Path) -> None:
    whole = charge_of(LAW, [SMALL, LARGE, SMALL])
    made, noise = bill(tmp_path / "l", DATA, Facts(), 1e-5, None, (3.0, whole))
    assert 2.98 < made.epsilon == made.alone <= 3.0
    assert made.event == whole.event(noise) and made.of_one_trial < 2.5
    assert made.event.selection is not None
    assert len(made.event.selection.trials) == 2  # equal kinds are one
    for kind in (SMALL, LARGE):  # each alone costs no more
        alone = charge_of(LAW, [kind]).event(noise)
        assert accounting.epsilon([alone], 1e-5) <= made.epsilon
    looser = accounting.epsilon([whole.event(noise * 0.99)], 1e-5)
    assert looser > 3.0


def test_every_ledger_is_charged_or_none(tmp_path: Path) -> None:
    event = search_event(LAW, [((0.1, 2.0, 10),)])
    first, _ = bill(tmp_path / "a", DATA, Facts(), 1e-5, event)
    second, _ = bill(tmp_path / "b", DATA, Facts(), 1e-5, event)
    charge([first])
    with pytest.raises(ConfigError, match="charged by another run"):
        charge([second, first])  # what the second knows of the first's ledger is old
    assert ledger_file.read(tmp_path / "b").events == ()
    again, _ = bill(tmp_path / "a", DATA, Facts(), 1e-5, event)
    assert again.earlier == (event,) and again.epsilon > again.alone == first.epsilon
    charge([again, second])
    assert ledger_file.read(tmp_path / "a").events == (event.times(2),)
    assert ledger_file.read(tmp_path / "b").events == (event,)


def test_other_data_other_units_and_no_noise_are_refused(tmp_path: Path) -> None:
    event = search_event(LAW, [((0.1, 2.0, 10),)])
    first, _ = bill(tmp_path / "a", DATA, Facts(), 1e-5, event)
    charge([first])
    with pytest.raises(ConfigError, match="different data"):
        bill(tmp_path / "a", DATA | {"records": 99}, Facts(), 1e-5, event)
    users = Facts(ADJACENCY.replace("one record", USER))
    of_users, _ = bill(tmp_path / "a", DATA, users, 1e-5, event)
    with pytest.raises(ConfigError, match="protects users"):
        charge([of_users])
    with pytest.raises(ConfigError, match="no Rényi curve"):
        bill(tmp_path / "b", DATA, Facts(), 1e-5, search_event(LAW, [((0.1, 0.0, 10),)]))
    file = LedgerFile(tmp_path / "a")
    with pytest.raises(ConfigError, match="in use"):
        charge([bill(tmp_path / "a", DATA, Facts(), 1e-5, event)[0]])
    file.close()


def test_a_trial_may_spend_what_one_of_the_curves_allows() -> None:
    event = search_event(LAW, [((0.1, 2.0, 10),), ((1.0, 9.0, 2),)])
    assert stays_within([Event(0.1, 2.0, 4), Event(0.1, 2.0, 6)], event)
    assert stays_within([Event(1.0, 9.0, 2)], event) and stays_within([], event)
    assert not stays_within([Event(0.1, 2.0, 11)], event)
    assert not stays_within([Event(0.1, 1.9, 10)], event)
    assert releases([Event(0.1, 2.0, 4), Event(0.1, 2.0, 6)]) == ((0.1, 2.0, 10),)
