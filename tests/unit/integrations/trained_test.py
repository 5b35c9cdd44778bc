"""What trainers share: the state beside a checkpoint, and parameters without a part."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.support.loops import epoch, mlp, private, records
from vestige import ConfigError, PrivacyError
from vestige.integrations.trained import (
    PrivacyArguments,
    check_reached,
    epsilon,
    make_private,
    save_beside,
    saved_beside,
)

PRIVACY = PrivacyArguments(
    max_grad_norm=1.0, delta=1e-3, target_epsilon=3.0, noise_seed=1, accountant="rdp"
)


def made(folder, saved=None, privacy=PRIVACY):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.utils.data.DataLoader(records(), batch_size=6)
    given = {"module": model, "optimizer": optimizer, "data_loader": source, "steps": 8}
    engine, loader = make_private(privacy, folder, saved, **given, max_physical_batch_size=2)
    return engine, model, optimizer, loader


def test_a_run_goes_on_with_the_noise_that_was_solved_for(tmp_path):
    engine, *rest = made(tmp_path)
    epoch(*rest)
    save_beside(engine, PRIVACY, tmp_path / "checkpoint")
    engine.close()
    saved = saved_beside(tmp_path / "checkpoint")
    again, *rest = made(tmp_path, saved)
    again.load_state_dict(saved)
    assert again.plan == engine.plan
    epoch(*rest)
    assert again.released == again.ledger.steps == 8
    assert 2.5 < epsilon(again, PRIVACY) <= 3.0 and epsilon(again, PRIVACY) >= again.get_epsilon(
        1e-3
    )
    stated = json.loads((tmp_path / "checkpoint" / "statement.json").read_text())
    assert stated["guarantee"]["delta"] == 1e-3
    assert "epsilon" in (tmp_path / "checkpoint" / "statement.md").read_text()


def test_the_noise_is_given_in_one_way_and_a_missing_state_is_named(tmp_path):
    with pytest.raises(ConfigError, match="exactly one of them"):
        PrivacyArguments(max_grad_norm=1.0, delta=1e-3)
    with pytest.raises(ConfigError, match=r"has no privacy.pt"):
        saved_beside(tmp_path)


def test_options_go_to_the_engine_and_a_wanted_loss_is_a_caveat(tmp_path):
    privacy = PrivacyArguments(
        max_grad_norm=1.0,
        delta=1e-3,
        noise_multiplier=1.0,
        train_loss=True,
        ledger=tmp_path / "elsewhere" / "l.jsonl",
        options={"clipping": "per_layer"},
    )
    engine, *rest = made(tmp_path, privacy=privacy)
    epoch(*rest)
    assert engine.plan.clipping == "per_layer"
    assert sum("training loss" in caveat for caveat in engine.caveats()) == 1
    assert (tmp_path / "elsewhere" / "l.jsonl").exists()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_parameters_without_a_part_are_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.idle = mlp(), nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    engine, model, optimizer, loader = private(Idle())
    assert len(engine.untrained()) == 6
    epoch(model, optimizer, loader, limit=1)
    assert engine.untrained() == ["idle.weight", "idle.bias"]
    with pytest.raises(PrivacyError, match=r"'idle.weight' and 1 more had no part"):
        check_reached(engine)
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader, limit=1)
    check_reached(engine)
