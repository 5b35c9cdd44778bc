"""Opacus' accountants: calculators of epsilon, and the one that answers for an engine's ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from vestige.compat.refusals import gone, refuse, refused
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.events import Event

History = list[tuple[float, float, int]]


class IAccountant:
    """A calculator: `step` adds releases that somebody makes, `get_epsilon` composes them.

    It guards nothing. The accountant of an engine is `engine.accountant`.

    Guarantee: `get_epsilon` is an upper bound, as `vestige.accounting.epsilon`.
    """

    name: ClassVar[str] = "pld"
    get_privacy_spent = gone("get_privacy_spent", "accountant")

    def __init__(self) -> None:
        self.history: History = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Add one release."""
        self.history = history_of([*events_of(self.history), Event(sample_rate, noise_multiplier)])

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Epsilon of the history; orders and grids (`alphas`, `eps_error`) are chosen by itself."""
        return accounting.epsilon(events_of(self.history), delta, self.name)

    def __len__(self) -> int:
        return len(self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The accountant's name."""
        return cls.name

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """For `optimizer.attach_step_hook`: a count beside the ledger's."""
        return lambda optimizer: self.step(
            noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate
        )

    def state_dict(self) -> dict[str, Any]:
        """History and name."""
        return {"history": list(self.history), "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self.history = history_of(events_of(state_dict["history"]))


class PRVAccountant(IAccountant):
    """Answered by "pld", Google's accountant of the same loss distributions."""


class RDPAccountant(IAccountant):
    """Rényi accounting."""

    name: ClassVar[str] = "rdp"


GaussianAccountant = refused("gdp", "the gdp accountant")


def _stop(reason: str, name: str) -> Callable[..., None]:
    """A method that would change what was charged."""
    return lambda self, *args, **options: refuse(reason, f"engine.accountant.{name}")


class EngineAccountant(str):
    """The name of an engine's accountant, which answers for its ledger as Opacus' accountant does.

    Guarantee: it reads. Nothing that is called here changes what was charged.
    """

    _engine: PrivacyEngine

    @classmethod
    def of(cls, name: str, engine: PrivacyEngine) -> EngineAccountant:
        """The accountant of that name over what the engine's ledger holds whenever it is asked."""
        made = cls(name)
        made._engine = engine
        return made

    @property
    def history(self) -> History:
        """(noise multiplier, sampling rate, releases) in order, as charged; a copy."""
        return history_of(self._engine.ledger.events)

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Epsilon of everything on the ledger: `engine.get_epsilon(delta)`."""
        return self._engine.get_epsilon(delta)

    def __len__(self) -> int:
        return len(self._engine.ledger.events)

    def __bool__(self) -> bool:
        return True

    def mechanism(self) -> str:
        """The accountant's name."""
        return str(self)

    def state_dict(self) -> dict[str, Any]:
        """History and name, to read."""
        return {"history": self.history, "mechanism": str(self)}

    get_privacy_spent = gone("get_privacy_spent", "engine.accountant")
    step = _stop("accountant.step", "step")
    get_optimizer_hook_fn = _stop("accountant.step", "get_optimizer_hook_fn")
    load_state_dict = _stop("accountant.load_state_dict", "load_state_dict")


def events_of(history: Iterable[tuple[float, float, int]]) -> list[Event]:
    """Opacus' history as events."""
    return [Event(rate, noise, count) for noise, rate, count in history]


def history_of(events: Iterable[Event]) -> History:
    """Events as Opacus' history, equal neighbours together."""
    rows: History = []
    for event in events:
        count = event.count
        if rows and rows[-1][:2] == (event.noise_multiplier, event.sample_rate):
            count += rows.pop()[2]
        rows.append((event.noise_multiplier, event.sample_rate, count))
    return rows


def create_accountant(mechanism: str) -> IAccountant:
    """The calculator of that name: prv, pld or rdp; gdp is refused."""
    if mechanism == "gdp":
        refuse("gdp", "accountant='gdp'")
    return PRVAccountant() if accounting.accountant_name(mechanism) == "pld" else RDPAccountant()


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    **options: Any,
) -> float:
    """The smallest noise that stays within the target, to 0.1 %, by the accountant named.

    An epoch has ceil(1 / sample_rate) lots, as the engine's has. `epsilon_tolerance` and the
    accountant's own options are not needed.

    Guarantee: epsilon at the answer was evaluated and is at most the target.
    """
    name = create_accountant(accountant).mechanism()
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={epochs} and steps={steps}: give exactly one of them.")
    if epochs is not None:
        Event(sample_rate, 1.0)  # refuses a rate that an epoch's length cannot be taken from
        steps = math.ceil(epochs * math.ceil(1 / sample_rate - 1e-9))
    assert steps is not None
    found = accounting.calibrate(target_epsilon, target_delta, sample_rate, steps, name)
    return found.noise_multiplier
