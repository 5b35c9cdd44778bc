"""A search up to its charge: every candidate is built once, and the noise of all is solved for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vestige import methods
from vestige.errors import ConfigError
from vestige.plan import USER, common_adjacency, of_users
from vestige.privacy.accounting import Charge, events_of
from vestige.privacy.ledger import Facts
from vestige.privacy.selection import Law
from vestige.train import training
from vestige.train.checks import check_lot
from vestige.train.config import DEFAULT_NOISE, TrainConfig
from vestige.train.evaluation import ledger_of_held_out
from vestige.train.loop import Prepared, Progress
from vestige.train.tune.candidates import Candidate
from vestige.train.tune.cost import ACCOUNTANT, Bill, bill, charge_of, releases, search_event
from vestige.train.tune.trial import Setup

if TYPE_CHECKING:
    from torch import nn

    from vestige.train.data import Dataset


@dataclass(frozen=True)
class Plan:
    """What is known before the first trial: each candidate's setup, and a bill for each ledger."""

    setups: tuple[Setup, ...]
    bill: Bill  # of the training records
    held_out: Bill | None  # where scores are noisy


@dataclass(frozen=True)
class _Draft:
    """A candidate with its data, and what a run of it will be charged."""

    config: TrainConfig
    dataset: Dataset
    groups: tuple[str, ...]
    steps: int
    charges: dict[Charge, int]


def planned(
    base: TrainConfig,
    chosen: tuple[Candidate, ...],
    law: Law,
    ledger: Path,
    tell: Callable[[Progress], None],
) -> Plan:
    """Load, solve, and build every candidate once, so that what is wrong is refused unspent."""
    tell(Progress(f"loading {Path(base.dataset).name}"))
    device = training.device_of(base.device)
    loaded = training.load_data(base, base.seed)
    records = base.dataset_size or loaded.protected
    datasets: dict[str, Dataset] = {}
    drafts = [_draft(one, loaded, records, device, datasets) for one in chosen]
    tell(Progress("accounting"))
    adjacency = common_adjacency(
        methods.resolve(one.config.method, one.config.settings).adjacency for one in chosen
    )
    data = {"name": Path(base.dataset).name, "records": records}
    if loaded.units is not None:
        data, adjacency = data | {"unit": USER}, of_users(adjacency)
    seeded = base.noise_seed is not None
    own_noise = [one.config.noise_multiplier for one in chosen]
    noises = [DEFAULT_NOISE if noise is None else noise for noise in own_noise]
    solve = event = None
    if base.epsilon is not None:
        solve = base.epsilon, charge_of(law, [draft.charges for draft in drafts])
    else:
        kinds = [events_of(d.charges, noise) for d, noise in zip(drafts, noises, strict=True)]
        event = search_event(law, [releases(kind) for kind in kinds])
    whole, noise = bill(ledger, data, Facts(adjacency, seeded), base.delta, event, solve)
    if solve:
        noises = [noise] * len(drafts)
    held_out, held_out_noise = _held_out(base, law, ledger)
    earlier = sum(one.count for one in whole.earlier)
    setups = tuple(
        Setup(
            draft.config.changed(
                epsilon=None,
                noise_multiplier=noise,
                accountant=ACCOUNTANT,
                evaluate_epsilon=None,
                noise_seed=None,
                ledger=None,
            ),
            draft.dataset,
            Prepared(draft.steps, noise, whole.epsilon, draft.groups, earlier),
            device,
            whole.event,
            held_out_noise,
        )
        for draft, noise in zip(drafts, noises, strict=True)
    )
    tell(Progress("building every candidate once"))
    for setup in setups:
        setup.session().engine.close()
    return Plan(setups, whole, held_out)


def _held_out(base: TrainConfig, law: Law, ledger: Path) -> tuple[Bill | None, float | None]:
    """The bill of the held-out records, each of whose scores is one Gaussian release."""
    if base.evaluate_epsilon is None:
        return None, None
    solve = base.evaluate_epsilon, charge_of(law, [{Charge(1.0): 1}])
    data = {"name": Path(base.dataset).name, "part": "held-out"}
    facts = Facts(test_mode=base.noise_seed is not None)
    made, noise = bill(ledger_of_held_out(ledger), data, facts, base.delta, None, solve)
    assert math.isfinite(noise)
    return made, noise


def _draft(
    one: Candidate, loaded: Dataset, records: int, device: str, datasets: dict[str, Dataset]
) -> _Draft:
    from vestige.gradients.clipping import split_clipping
    from vestige.gradients.groups import partition
    from vestige.train import models
    from vestige.train.recipes.features import with_features

    config = one.config
    check_lot(config.chosen_lot, records)
    method = methods.resolve(config.method, config.settings)
    name, shape = config.chosen_model, loaded.input_shape
    model = models.build(name, shape, loaded.classes, config.seed).to(device)
    _check_untrained(model, name)
    groups = partition(model, split_clipping(config.chosen_clipping)[0]).names
    training._check_bounds(config.clip, groups)
    if name not in datasets:  # features go with a model
        datasets[name] = with_features(loaded, model, device, lambda _: None)
    steps, lot = config.planned_steps(records), config.chosen_lot
    charges = methods.planned_charges(
        method, config.chosen_clipping, len(groups), records, lot, lot / records, steps
    )
    return _Draft(config, datasets[name], groups, steps, dict(charges))


def _check_untrained(model: nn.Module, name: str) -> None:
    """Refuse weights that an engine has trained: no trial may begin where another run ended."""
    import torch

    from vestige.engine.lineage import Things

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if Things.of(model, optimizer, None).trained_by():
        raise ConfigError(
            f"model {name!r} hands out weights that another run of this process has trained: a "
            "search begins every trial anew, so return a new module each time."
        )
