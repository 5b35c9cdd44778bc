"""Settings that do not go together are refused in one line each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.own_tables import of_users, write_table
from vestige import ConfigError
from vestige.train.checks import check_lot, check_one_of, check_out
from vestige.train.config import TrainConfig


def test_of_settings_that_follow_from_each_other_one_is_given():
    check_one_of(SimpleNamespace(epochs=3, steps=None), "epochs", "steps")
    with pytest.raises(ConfigError, match="epochs 3 and steps 4 are both given"):
        check_one_of(SimpleNamespace(epochs=3, steps=4), "epochs", "steps")


def test_a_lot_is_at_most_the_data():
    check_lot(5, 5)
    with pytest.raises(ConfigError, match="lot 6 is larger than the training data of 5 records"):
        check_lot(6, 5)


def test_a_folder_in_use_is_refused(tmp_path):
    check_out(tmp_path / "new" / "run", fresh=True)
    (tmp_path / "file").write_text("")
    check_out(tmp_path, fresh=False)
    with pytest.raises(ConfigError, match="is in use"):
        check_out(tmp_path, fresh=True)
    with pytest.raises(ConfigError, match="is not a folder"):
        check_out(tmp_path / "file" / "run", fresh=True)


@pytest.mark.parametrize("setting", [{"train_size": 2}, {"evaluate_epsilon": 1.0}])
def test_what_goes_by_records_does_not_go_with_users(tmp_path, setting):
    write_table(tmp_path / "t.csv", of_users(40))
    with pytest.raises(ConfigError, match="goes by records, and units who protects users"):
        TrainConfig(dataset=str(tmp_path / "t.csv"), units="who", rows_per_unit=2, lot=1, **setting)
