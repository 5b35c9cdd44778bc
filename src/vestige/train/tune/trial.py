"""One trial: a private run in memory, of which nothing is kept but an outcome.

Guarantee: an outcome is a function of the trial's releases, of public settings, and of held-out
records that are public or that it sees through one noisy release. The bound of a search is about
outcomes that are independent draws of one mechanism, so a trial sees nothing of another: no
weights, no generator, no ledger, and no notes of who has trained on the same tensors before.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vestige import methods
from vestige.errors import PrivacyError
from vestige.plan import PrivacyPlan
from vestige.privacy.events import Event
from vestige.privacy.ledger import Ledger
from vestige.sampling.streams import Randomness
from vestige.train.config import TrainConfig
from vestige.train.evaluation import door_of_held_out, noisy_share
from vestige.train.loop import Prepared, Session
from vestige.train.saved_model import WEIGHTS_FILE
from vestige.train.tune.cost import stays_within

if TYPE_CHECKING:
    from vestige.train.data import Dataset

AVERAGED_FILE = "model_averaged.pt"


@dataclass(frozen=True)
class Setup:
    """What a trial of one candidate is made from, all of it known before the search is charged."""

    config: TrainConfig
    dataset: Dataset
    known: Prepared
    device: str
    event: Event  # the search
    held_out_noise: float | None = None  # of the score; None where the held-out records are public

    def session(self, noise_seed: int | None = None) -> Session:
        """A run of this candidate, up to its first lot."""
        from vestige.train import models

        config, data = self.config.changed(noise_seed=noise_seed), self.dataset
        shape = data.input_shape
        built = models.build(config.chosen_model, shape, data.classes, config.seed)
        # A factory of somebody's own may hand out the same module each time.
        model = copy.deepcopy(built).to(self.device)
        made = methods.resolve(config.method, config.settings).make_optimizer
        if config.momentum:
            made = partial(made, momentum=config.momentum)
        return Session(config, own_tensors(data), model, made, self.device, self.known)


def own_tensors(data: Dataset) -> Dataset:
    """Copies to train on: an engine's caveats count other engines on the same tensors."""
    own = replace(data, x_train=data.x_train.clone(), y_train=data.y_train.clone())
    if data.features is None:
        return own
    return replace(own, features=(data.features[0].clone(), data.features[1]))


@dataclass(frozen=True)
class Outcome:
    """All that a trial hands out; a failed one has no weights and the lowest score."""

    score: float
    weights: dict[str, bytes]
    result: dict[str, Any]
    caveats: list[str]
    plan: PrivacyPlan | None
    failure: str = ""


def run(setup: Setup, noise_seed: int | None, stop: Callable[[], bool]) -> Outcome | None:
    """The outcome of one trial; None where it was told to stop."""
    with silence():
        try:
            session = setup.session(noise_seed)
            with session.settled():
                for _ in session.lots(stop):
                    pass
                if not session.over:
                    return None
                spent = session.engine.door.own.merged()
                outcome = _outcome(setup, session, noise_seed)
        except Exception as error:  # a trial that fails is one with the lowest score, and no sign
            # Its text may hold what a record said, also where the error is of this library.
            return Outcome(-1.0, {}, {}, [], None, type(error).__name__)
        finally:
            if setup.device != "cpu":
                gc.collect()  # a model holds itself, and a GPU has memory for few
    if not stays_within(spent, setup.event):
        raise PrivacyError(
            f"a run of {setup.config.method} cost more than was planned for a trial: the search is "
            "stopped, and nothing of it is written. Leave this method out."
        )
    return outcome


def _outcome(setup: Setup, session: Session, noise_seed: int | None) -> Outcome:
    from vestige.train.run_folder import weights_of
    from vestige.train.tasks import hits

    weights = {WEIGHTS_FILE: weights_of(session.model)}
    averaged = session.averaged() if setup.config.averaging else contextlib.nullcontext()
    with averaged:
        if setup.config.averaging:
            weights[AVERAGED_FILE] = weights_of(session.model)
        right = hits(session.dataset, session.held_out_scores(), session.test_data[1])
    if setup.held_out_noise is None:
        score = float(right.double().nan_to_num(0.0).clamp(0, 1).mean())
    else:
        randomness = Randomness(noise_seed)
        # Test mode has one key: another address than that of the training noise.
        randomness.relabel = lambda purpose: b"score " + purpose
        door = door_of_held_out(setup.held_out_noise, randomness, Ledger())
        score, _ = noisy_share(door, right)
    result, caveats = session.result(), session.caveats()
    return Outcome(score, weights, result, caveats, session.engine.plan)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """While entered, nothing is printed, warned of or logged: that would tell of the trials."""
    before = logging.root.manager.disable
    out, errors = (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    )
    with out, errors, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
