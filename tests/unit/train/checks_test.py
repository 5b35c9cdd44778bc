"""Settings that do not go together are refused in one line each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
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


@pytest.mark.parametrize(
    "settings",
    [{"train_size": 20}, {"train_size": 20, "dataset_size": 30}, {"test_size": 3}],
)
def test_the_first_records_of_own_data_are_refused(tmp_path, settings):
    """One record less among them lets another in: a neighbouring file moves the sum by two."""
    write_table(tmp_path / "t.csv", of_users(40))
    np.savez(tmp_path / "d.npz", x_train=np.zeros((4, 2)))
    for name in ("t.csv", "d.npz"):
        with pytest.raises(ConfigError, match=r"_size (20|3) takes the first (20|3) rec"):
            TrainConfig(dataset=str(tmp_path / name), evaluate_epsilon=1.0, lot=1, **settings)
    # Exact figures of held-out records are not private anyway, and a benchmark set is public.
    TrainConfig(dataset=str(tmp_path / "t.csv"), test_size=3, lot=1)
    TrainConfig(dataset="digits", train_size=20, test_size=3, evaluate_epsilon=1.0, lot=1)
