"""PrivacyCallback: the same releases as a plain loop, resumed runs, and what Lightning logs."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.trainers import N, Releases, equal, flat, seeded
from vestige import ConfigError, PrivacyEngine, PrivacyError

lightning = pytest.importorskip(
    "lightning", reason="needs the extra: pip install -e '.[lightning]'"
)
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402

from vestige.integrations.lightning import PrivacyArguments, PrivacyCallback  # noqa: E402

PRIVACY = PrivacyArguments(
    max_grad_norm=1.0, delta=1e-3, noise_multiplier=1.0, noise_seed=3, accountant="rdp"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, small data


def net():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


class Module(lightning.LightningModule):
    """A user's module; with `log` it logs its training loss."""

    def __init__(self, log=False):
        super().__init__()
        self.net, self.told = seeded(net), log

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if self.told:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(PrivacyCallback):
    """Watches the door, and stops where it is told to."""

    def __init__(self, physical=None, privacy=PRIVACY, stop=None):
        super().__init__(privacy, physical)
        self.releases, self.stop = Releases(), stop

    def on_train_start(self, trainer, pl_module):
        self.engine.door.observers.append(self.releases)

    def on_train_batch_end(self, trainer, pl_module, *others):
        super().on_train_batch_end(trainer, pl_module, *others)
        trainer.should_stop = trainer.should_stop or self.engine.released == self.stop


def data(records=N):
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 5, generator=made), torch.randint(0, 3, (N,), generator=made)
    return TensorDataset(x[:records].clone(), y[:records].clone())


def trainer_of(folder, *callbacks, **options):
    settings = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    }
    return lightning.Trainer(
        default_root_dir=folder, callbacks=list(callbacks), **settings | options
    )


def fit(folder, watch, *callbacks, module=None, records=N, ckpt_path=None, **options):
    module = module or Module()
    trainer = trainer_of(folder, watch, *callbacks, **options)
    loader = DataLoader(data(records), batch_size=6, shuffle=True)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("physical", [None, 2])
def test_two_epochs_release_what_a_plain_loop_releases(physical, tmp_path):
    watch = Watch(physical)
    module, trainer = fit(tmp_path, watch)
    engine, model, releases = PrivacyEngine("rdp", noise_seed=3), seeded(net), Releases()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
    )
    engine.door.observers.append(releases)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert len(releases.values) == watch.engine.released == 2 * 4
    assert trainer.global_step == 2 * len(loader)
    assert equal(watch.releases.values, releases.values)
    assert torch.equal(flat(module), flat(model))
    assert watch.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert (tmp_path / "ledger.jsonl").exists()


def test_a_module_that_is_called_itself_and_has_several_parts(tmp_path):
    class Two(Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.net(x))

    watch = Watch()
    fit(tmp_path, watch, module=Two(), max_epochs=1)
    assert watch.engine.released == 4 and watch.releases.values[0].numel() > 75


def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    whole = Watch(2)
    module, _ = fit(tmp_path / "whole", whole)
    first = Watch(2, stop=4)
    _, cut = fit(tmp_path / "cut", first)
    cut.save_checkpoint(tmp_path / "cut" / "a.ckpt")
    assert first.engine.released == 4
    again = Watch(2)
    resumed, _ = fit(tmp_path / "cut", again, ckpt_path=tmp_path / "cut" / "a.ckpt")
    assert torch.equal(flat(resumed), flat(module))
    assert again.engine.ledger.steps == again.engine.released == 8 and again.engine.lost == 0
    saved = torch.load(tmp_path / "cut" / "a.ckpt", weights_only=False)
    # A run that stops early is claimed at the length that was planned.
    claimed = saved["privacy_statement"]["guarantee"]["epsilon"]
    assert claimed == whole.engine.get_epsilon(1e-3) > first.engine.get_epsilon(1e-3)


def test_no_checkpoint_is_made_in_the_middle_of_a_lot(tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    with pytest.raises(PrivacyError, match="that is a multiple of loader"):
        fit(tmp_path, Watch(2), saves, enable_checkpointing=True)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=11, save_top_k=-1)
    watch = Watch(2)  # ceil((6 + 6 sqrt(6)) / 2) = 11 batches of a lot
    fit(tmp_path, watch, saves, enable_checkpointing=True, max_epochs=1)
    assert len(list(tmp_path.glob("*.ckpt"))) == 4
    assert watch.engine.ledger.steps == 1 + 4  # that of the run before, in the same file


def test_epsilon_is_logged_and_the_rest_is_the_same_on_neighbours(tmp_path):
    told = []
    for records in (N, N - 1):
        watch = Watch(2, replace(PRIVACY, dataset_size=N))
        _, trainer = fit(tmp_path / str(records), watch, records=records)
        told.append((dict(trainer.logged_metrics), trainer.global_step, watch.engine.released))
    assert told[0] == told[1]
    assert set(told[0][0]) == {"epsilon"}
    assert float(told[0][0]["epsilon"]) == pytest.approx(watch.engine.get_epsilon(1e-3), abs=1e-3)


def test_what_training_step_logs_is_a_caveat(tmp_path):
    watch = Watch()
    fit(tmp_path, watch, module=Module(log=True), max_epochs=1)
    assert any("training_step logs train_loss" in caveat for caveat in watch.engine.caveats())


def test_validation_is_untouched_and_choosing_by_it_is_a_caveat(tmp_path):
    watch = Watch()
    saves = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = trainer_of(
        tmp_path, watch, saves, EarlyStopping("val_loss"), enable_checkpointing=True
    )
    loader = DataLoader(data(), batch_size=6)
    trainer.fit(Module(), loader, DataLoader(data(8), batch_size=8))
    assert watch.engine.released == 8 and "val_loss" in trainer.callback_metrics
    for said in ("the best checkpoint is kept", "training stops early"):
        assert any(said in caveat for caveat in watch.engine.caveats())


def test_a_rate_that_follows_a_plateau_is_a_caveat(tmp_path):
    class Waits(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }

    watch = Watch()
    trainer = trainer_of(tmp_path, watch, max_epochs=1)
    trainer.fit(Waits(), DataLoader(data(), batch_size=6), DataLoader(data(8), batch_size=8))
    assert any("follows a plateau" in caveat for caveat in watch.engine.caveats())


def test_a_parameter_without_a_part_in_the_first_release_stops_the_run(tmp_path):
    module = Module()
    module.net.idle = nn.Identity()
    module.net.idle.weight = nn.Parameter(torch.zeros(2))
    watch = Watch()
    with pytest.raises(PrivacyError, match=r"'idle.weight' had no part in the first release"):
        fit(tmp_path, watch, module=module)
    assert watch.engine.released == watch.engine.ledger.steps == 1


def test_an_interrupt_in_the_middle_of_a_lot_is_charged(tmp_path):
    class Stops(Module):
        def training_step(self, batch, index):
            if index == 1:
                raise RuntimeError("stop")
            return super().training_step(batch, index)

    watch = Watch(2)
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, watch, module=Stops())
    assert (watch.engine.released, watch.engine.ledger.steps) == (0, 1)


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"limit_train_batches": 0.5}],
    ids=str,
)
def test_settings_that_do_not_go_with_it_are_refused(options, tmp_path):
    with pytest.raises(ConfigError, match=f"does not take {next(iter(options))}="):
        fit(tmp_path, Watch(), **options)


def test_several_processes_are_refused_with_the_page_that_tells_how():
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False)
    with pytest.raises(ConfigError, match=r"does not take world_size=2: .*docs/scaling.md"):
        Watch().on_fit_start(trainer, None)


def test_the_trainer_has_its_own_loader_back(tmp_path):
    watch = Watch()
    with warnings.catch_warnings():
        module, trainer = fit(tmp_path, watch, max_epochs=1)
    assert type(trainer.fit_loop._data_source.instance) is DataLoader
    assert module.net[0].weight.requires_grad
