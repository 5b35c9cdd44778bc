"""Checkpoints and resuming: what goes on bit for bit, what is charged, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.cut_runs import STEPS, charged, config, cut_off, weights
from tests.support.program import run, run_json
from tests.support.small_runs import private
from tests.support.small_runs import run as steps_of
from vestige import ConfigError, PrivacyEngine, PrivacyError, StorageError
from vestige.engine import checkpoint
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.privacy.ledger_file import read
from vestige.sampling.streams import Randomness
from vestige.train import training

pytestmark = pytest.mark.usefixtures("empty_folder")


# -- going on -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-adam", "dp-sam", "dp-ftrl"])
def test_in_test_mode_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch, method):
    whole = training.train(config(tmp_path / "whole", method=method))
    cut_off(tmp_path / "cut", 10, monkeypatch, method=method)
    result = training.resume(tmp_path / "cut")
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert result["steps"] == STEPS
    assert result["epsilon"] >= whole["epsilon"]
    lines = [
        [json.loads(line) for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines()]
        for f in ("whole", "cut")
    ]
    kept = ("step", "epoch", "test_loss", "test_accuracy")
    assert [[e[k] for k in kept] for e in lines[0]] == [[e[k] for k in kept] for e in lines[1]]


def test_otherwise_lost_steps_stay_charged_and_noise_is_new(tmp_path, monkeypatch):
    drawn = []
    normal_blocks = Randomness.normal_blocks

    def watched(self, like, step, purpose=b"noise"):
        for at, noise in normal_blocks(self, like, step, purpose):
            drawn.append(noise.clone())
            yield at, noise

    monkeypatch.setattr(Randomness, "normal_blocks", watched)
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=None)
    shutil.copytree(tmp_path / "cut", tmp_path / "fork")
    results = [training.resume(tmp_path / name) for name in ("cut", "fork")]
    for result in results:
        assert result["steps"] == STEPS
        assert result["lost_releases"] == 2  # steps 9 and 10, after the checkpoint at 9
        spent = accounting.epsilon(read(tmp_path / "cut" / "ledger.jsonl").events, 1e-5, "rdp")
        assert result["epsilon"] == spent
    assert charged(tmp_path / "cut") == charged(tmp_path / "fork") == 11 + (STEPS - 9)
    assert not torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "fork"))
    assert len({noise.numpy().tobytes() for noise in drawn}) == len(drawn) == 11 + 2 * (STEPS - 9)
    # Both went on, so both count, and what they share counts once.
    run(f"ledger merge {tmp_path}/cut {tmp_path}/fork --out {tmp_path}/all")
    assert sum(e.count for e in read(tmp_path / "all").events) == 11 + 2 * (STEPS - 9)


def test_a_crash_charges_the_whole_open_block(tmp_path, monkeypatch):
    """800 planned steps are reserved 16 at a time."""
    cut_off(tmp_path / "cut", 2, monkeypatch, steps=800, checkpoint_every=800)
    assert charged(tmp_path / "cut") == 16


def test_the_default_is_a_checkpoint_every_epoch(tmp_path, monkeypatch):
    saved = []
    write = checkpoint.write
    monkeypatch.setattr(
        checkpoint,
        "write",
        lambda path, state, secret: (
            saved.append(state["engine"]["released"]),
            write(path, state, secret),
        ),
    )
    training.train(config(tmp_path / "run", checkpoint_every=None))
    assert saved == [0, 5, 10, 15]


# -- secrets --------------------------------------------------------------------------------


def test_secrets_are_apart_and_only_their_owner_reads_them(tmp_path, monkeypatch):
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=987654321)
    (secret,) = (tmp_path / "cut").glob("*.secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "987654321" in secret.read_text()
    state = torch.get_rng_state().numpy().tobytes()
    for file in (tmp_path / "cut").iterdir():
        if file != secret:
            assert b"987654321" not in file.read_bytes()
            assert state[:64].hex().encode() not in file.read_bytes()
    secret.unlink()
    with pytest.raises(ConfigError, match=r"test mode.*noise_seed"):
        training.resume(tmp_path / "cut")
    assert training.resume(tmp_path / "cut", noise_seed=987654321)["steps"] == STEPS
    assert not list((tmp_path / "cut").glob("*.secret"))


def test_the_state_of_torchs_generators_goes_on(tmp_path):
    """Dropout after a resume is that of the uninterrupted run."""
    from torch import nn

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        return private("fo", model=model)

    whole = start()
    steps_of(*whole, steps=10)
    first = start()
    steps_of(*first, steps=4)
    first[0].save_checkpoint(tmp_path / "c")
    second = start()
    torch.manual_seed(99)
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=6)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


# -- own loops ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "dp-adam", "dp-is"])
def test_a_checkpoint_of_an_own_loop_goes_on_bit_for_bit(tmp_path, method):
    options = {"engine_options": {"ledger": tmp_path / "l"}}
    whole = private(method)
    schedule = torch.optim.lr_scheduler.StepLR(whole[2], 3, 0.5)
    steps_of(*whole, steps=11, after=schedule.step)
    first = private(method, **options)
    schedule = torch.optim.lr_scheduler.StepLR(first[2], 3, 0.5)
    steps_of(*first, steps=5, after=schedule.step)
    first[0].save_checkpoint(tmp_path / "c", schedule=schedule, note={"best": 0.5})
    first[0].detach()
    second = private(method, **options)
    schedule = torch.optim.lr_scheduler.StepLR(second[2], 3, 0.5)
    assert second[0].load_checkpoint(tmp_path / "c", schedule=schedule) == {"note": {"best": 0.5}}
    steps_of(*second, steps=6, after=schedule.step)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)


def test_saving_in_the_middle_of_a_lot_is_refused(tmp_path):
    engine, _, _, loader = private("dp-sgd")
    next(iter(loader))
    with pytest.raises(PrivacyError, match="middle of a lot"):
        engine.save_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "fo"}, "method: dp-sgd -> fo"),
        ({"max_grad_norm": 2.0}, "bounds"),
        ({"model": "other"}, r"another model \(0.bias.*absent -> .*9"),
        ({"data_name": "letters"}, "other data.*name: None -> letters"),
        ({"optimizer": torch.optim.SGD}, "optimizer Adam, not of SGD"),
    ],
    ids=["method", "bounds", "model", "data", "optimizer"],
)
def test_another_run_is_refused_and_named_and_nothing_changes(tmp_path, changes, says):
    from torch import nn

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    saved = private("dp-sgd", optimizer=adam)
    steps_of(*saved, steps=3)
    saved[0].save_checkpoint(tmp_path / "c")
    options = {"method": "dp-sgd", "optimizer": adam} | changes
    if options["optimizer"] is torch.optim.SGD:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    if options.get("model") == "other":
        options["model"] = nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 3)
        ).double()
    engine, model, *_ = private(**options)
    before = [p.clone() for p in model.parameters()]
    says = says.replace("0.bias.*absent -> .*9", r"0.bias: \[8\] torch.float64 -> \[9\]")
    with pytest.raises((ConfigError, PrivacyError), match=says):
        engine.load_checkpoint(tmp_path / "c")
    assert engine.released == engine.ledger.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# -- what goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_full_or_unwritable_disk_ends_with_a_message_and_the_earlier_checkpoint(
    tmp_path, monkeypatch, code
):
    write, left = os.write, [40]

    def filling(file, content):
        left[0] -= 1
        if left[0] < 0:
            write(file, bytes(content)[: len(content) // 2])
            raise OSError(code, os.strerror(code))
        return write(file, content)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(StorageError, match=os.strerror(code)):
        training.train(config(tmp_path / "run"))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    state, secret = checkpoint.read(tmp_path / "run" / "checkpoint.pt")
    assert state["engine"]["released"] % 3 == 0
    assert secret is not None
    assert not list((tmp_path / "run").glob(".*.partial"))
    training.train(config(tmp_path / "whole"))
    training.resume(tmp_path / "run")
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_checkpoint_with_code_in_it_does_not_run_it(tmp_path):
    import hashlib
    import io
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    for payload in (pickle.dumps(Evil()), None):
        if payload is None:
            buffer = io.BytesIO()
            torch.save({"engine": Evil()}, buffer)
            payload = buffer.getvalue()
        digest = hashlib.sha256(payload).hexdigest().encode()
        (tmp_path / "c").write_bytes(b"vestige checkpoint 1\n" + digest + b"\n" + payload)
        with pytest.raises(ConfigError, match="something else than numbers and tensors"):
            checkpoint.read(tmp_path / "c")
        assert not (tmp_path / "owned").exists()


# -- budgets and ledgers on the command line -------------------------------------------------


# -- what a reviewer found -------------------------------------------------------------------


def test_a_checkpoint_is_not_loaded_into_a_run_that_goes_on(tmp_path):
    """Going back under the same key would put the same noise over other sums."""
    for options in ({}, {"engine_options": {"ledger": tmp_path / "l", "noise_seed": None}}):
        engine, *rest = private("dp-sgd", **options)
        engine.save_checkpoint(tmp_path / "c")
        steps_of(engine, *rest, steps=3)
        with pytest.raises(PrivacyError, match="has drawn lots"):
            engine.load_checkpoint(tmp_path / "c")
        fresh = private("dp-sgd")
        next(iter(fresh[3]))
        fresh[0].abandon_lot()
        with pytest.raises(PrivacyError, match="has drawn lots"):
            fresh[0].load_state_dict(private("dp-sgd")[0].state_dict())


def test_a_ledger_is_not_made_anew_by_a_resume(tmp_path, monkeypatch):
    """Also where nothing was charged yet when the checkpoint was made."""
    (tmp_path / "sub").mkdir()
    cut_off(tmp_path / "cut", 2, monkeypatch, checkpoint_every=100, ledger=Path("shared.jsonl"))
    monkeypatch.chdir(tmp_path / "sub")
    with pytest.raises(ConfigError, match=r"outside of its folder.*shared.jsonl' is yours"):
        training.resume(tmp_path / "cut")
    result = training.resume(tmp_path / "cut", ledger=tmp_path / "shared.jsonl")
    assert sum(e.count for e in read(tmp_path / "shared.jsonl").events) == STEPS
    assert result["epsilon"] > 0
    assert not (tmp_path / "sub" / "shared.jsonl").exists()
    monkeypatch.chdir(tmp_path)
    cut_off(tmp_path / "again", 2, monkeypatch, checkpoint_every=100)
    (tmp_path / "again" / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(PrivacyError, match="lacks 0 releases of run"):
        training.resume(tmp_path / "again")


def test_a_refused_data_set_stays_refused(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l"}, data_name="a")
    steps_of(*first, steps=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="different data"):
            private("dp-sgd", engine_options={"ledger": first[0].ledger}, data_name="b")


def test_secrets_belong_to_one_checkpoint(tmp_path):
    engine, *_ = private("dp-sgd")
    for name in ("ckpt", "ckpt.10", "ckpt.pt", "c[1].pt"):
        for _ in range(2):
            engine.save_checkpoint(tmp_path / name)
    assert len(list(tmp_path.glob("*.secret"))) == 4
    for name in ("ckpt", "ckpt.10", "ckpt.pt", "c[1].pt"):
        assert checkpoint.read(tmp_path / name)[1] is not None


def test_what_cannot_be_read_back_is_not_saved(tmp_path):
    def with_numpy(parameters):
        return torch.optim.SGD(parameters, lr=np.float64(0.05))

    engine, *_ = private("dp-sgd", optimizer=with_numpy)
    engine.save_checkpoint(tmp_path / "c", best=np.float64(0.5), scores=[np.int64(3)])
    again, *_ = private("dp-sgd", optimizer=with_numpy)
    assert again.load_checkpoint(tmp_path / "c") == {"best": 0.5, "scores": [3]}
    with pytest.raises(ConfigError, match=r"checkpoint\['others'\]\['thing'\] is a object"):
        engine.save_checkpoint(tmp_path / "d", thing=object())
    assert not (tmp_path / "d").exists()


def test_a_finished_run_leaves_no_secret(tmp_path, monkeypatch):
    """Whatever a crash has left of earlier ones."""
    cut_off(tmp_path / "cut", 10, monkeypatch)
    left = tmp_path / "cut" / ".checkpoint.pt.0123456789ab.secret.partial"
    left.write_text("half")
    training.resume(tmp_path / "cut")
    assert not [p for p in (tmp_path / "cut").iterdir() if "secret" in p.name]
    left.write_text("half")
    (tmp_path / "cut" / "checkpoint.pt").write_text("left by a kill")
    training.resume(tmp_path / "cut")
    assert not [p for p in (tmp_path / "cut").iterdir() if "checkpoint" in p.name]


def test_dropout_goes_on_in_the_middle_of_an_epoch_of_any_data_set(tmp_path):
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Own(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.full((5,), index / 24).double(), index % 3

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine("rdp", noise_seed=4)
        return engine, *engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(Own(), batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    whole = start()
    steps_of(*whole, steps=7)
    first = start()
    steps_of(*first, steps=2)
    first[0].save_checkpoint(tmp_path / "c")
    second = start()
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=5)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_killed_run_has_a_statement_of_all_that_it_was_charged(tmp_path, monkeypatch):
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=None)
    stated = run_json("statement", str(tmp_path / "cut"))
    events = read(tmp_path / "cut" / "ledger.jsonl").events
    # Nine steps were saved; the others were planned, and may still be made.
    planned = [*events, Event(0.2, 1.0, STEPS - 9)]
    assert stated["guarantee"]["epsilon"] == accounting.epsilon(planned, 1e-5, "rdp")
    assert stated["guarantee"]["end"]["kind"] == "planned releases"
    assert stated["ledger"]["charged"] == 11
    assert stated["ledger"]["over_reported"] == 2
    training.resume(tmp_path / "cut")
    after = run_json("statement", str(tmp_path / "cut"))
    assert after["ledger"]["charged"] == 11 + (STEPS - 9)
    assert after["ledger"]["over_reported"] == 2


def test_names_and_texts_of_numpy_are_saved_as_plain_ones(tmp_path):
    engine, *_ = private("dp-sgd")
    engine.save_checkpoint(tmp_path / "c", name=np.str_("a"), table={np.int64(3): [np.bool_(True)]})
    found = private("dp-sgd")[0].load_checkpoint(tmp_path / "c")
    assert found == {"name": "a", "table": {3: [True]}}
    assert type(found["name"]) is str
    assert type(next(iter(found["table"]))) is int


def test_a_short_secret_is_no_secret(tmp_path):
    private("dp-sgd")[0].save_checkpoint(tmp_path / "c")
    (secret,) = tmp_path.glob("c.*.secret")
    secret.write_text('{"torch": "00", "cuda": [], "noise_seed": null}')
    private("dp-sgd")[0].load_checkpoint(tmp_path / "c")


def test_a_refused_setting_leaves_no_lock_behind(tmp_path):
    engine = PrivacyEngine("rdp", ledger=tmp_path / "l")
    with pytest.raises(ConfigError):
        engine.make_private(module=None, optimizer=None, data_loader=None, max_grad_norm=1.0)
    made = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    steps_of(*made, steps=1)
    shared = private("dp-sgd", engine_options={"ledger": made[0].ledger})
    made[0].detach()
    steps_of(*shared, steps=1)
    shared[0].detach()
    again = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    assert again[0].earlier == 2


def test_a_step_inside_a_step_is_one_release():
    """torch hooks the step of every class whose objects were made, the parent's too."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    plain = private("dp-sgd", averaging="ema")
    steps_of(*plain, steps=5)
    own = private("dp-sgd", optimizer=lambda p: Counting(p, lr=0.05), averaging="ema")
    steps_of(*own, steps=5)
    assert own[2].calls == own[0].released == own[0].ledger.steps == 5
    for a, b in zip(plain[1].parameters(), own[1].parameters(), strict=True):
        assert torch.equal(a, b)
    one, two = plain[0].averaged_state_dict(), own[0].averaged_state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)


# -- ledgers that others have, or that a folder names ---------------------------------------
