"""Random numbers inside a private step: dropout masks and augmentations, from a secret stream.

A row's mask follows from its place in the lot. Where the numbers are known outside (a published
torch.manual_seed), one record less hands every later row another mask, and the sum moves by far
more than C. So whatever draws while a batch is read or a model runs draws from a stream of the
lot, AES under the run's key, addressed by (lot, rank). The stream goes on through all physical
batches and forward passes of the lot: no two rows share a mask, and every generator is seeded
afresh each time from bytes that were never used.

The generators are torch's (of the CPU and of the accelerator), `random`, `numpy.random`, and
those that a model or a data set holds itself. Outside they are the user's, bit for bit.

Guarantee: given the lot, the rows' random numbers are independent of each other and unknown
outside, as far as the generators are good. Two neighbouring data sets can then be coupled so that
every common record has the same mask, and their sums differ by one clipped gradient.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import mtrand
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from vestige.errors import PrivacyError
from vestige.sampling.streams import FORWARD, Randomness, secret_bytes

Take = Callable[[int], bytes]

_WORDS = 624  # of a Mersenne twister
_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_EXPLICIT = (torch.Generator, random.Random, *_NUMPY)
_DEPTH = 8  # how far from a model or data set its generators are looked for
_LONG = 256  # a longer list holds records


class LotStream:
    """The random numbers of one lot, for reading it and for its forward passes.

    `explicit` are generators that the model or the data set holds.
    """

    def __init__(
        self, randomness: Randomness, lot: int, rank: int = 0, explicit: tuple[Any, ...] = ()
    ) -> None:
        self._cipher = randomness.stream(FORWARD + rank.to_bytes(4, "big"), lot)
        self.explicit = explicit
        self._kept: list[list[Callable[[], object]]] = []  # how to give back, one list per use
        self._seeds: dict[torch.Generator, int] = {}  # of the innermost use

    def _take(self, count: int) -> bytes:
        return self._cipher.update(bytes(count))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All generators run on this stream; afterwards they are as they were."""
        outer, self._seeds = self._seeds, {}
        self._kept.append([])
        try:
            for generator in _all(self.explicit):
                self._adopt(generator)
            yield
        finally:
            for give_back in reversed(self._kept.pop()):  # one may stand there under two names
                give_back()
            self._seeds = outer

    def position(self) -> Callable[[], AbstractContextManager[None]]:
        """Where all generators stand now: while what is returned is entered, they stand there."""
        known = [*_all(self.explicit), *self._seeds]
        there = [_keep(generator) for generator in known]

        @contextmanager
        def again() -> Iterator[None]:
            here = [_keep(generator) for generator in known]
            try:
                for put in reversed(there):
                    put()
                yield
            finally:
                for put in reversed(here):
                    put()

        return again

    def _adopt(self, generator: Any) -> None:
        self._kept[-1].append(_keep(generator))
        _seed(generator, self._take)
        if isinstance(generator, torch.Generator):
            self._seeds[generator] = generator.initial_seed()

    def watch(self, generator: Any) -> None:
        """Before an operation, which may have been given a `generator` of its own."""
        if isinstance(generator, torch.Generator) and generator not in self._seeds:
            self._adopt(generator)
        self.check_seeds()

    def check_seeds(self) -> None:
        """Refuse a generator that was seeded since it was installed."""
        for generator, seed in self._seeds.items():
            if generator.initial_seed() != seed:
                raise PrivacyError(
                    "the model seeds a torch generator inside its forward pass, so that whoever "
                    "knows the seed knows every row's random numbers, and the clip bound would not "
                    "hold: take torch.manual_seed (or the like) out of forward."
                )


@contextmanager
def untouched(stream: LotStream | None) -> Iterator[None]:
    """The self-check runs: it draws what it likes, and all generators are as they were."""
    kept = [_keep(generator) for generator in _all(stream.explicit if stream else ())]
    try:
        yield
    finally:
        for give_back in reversed(kept):
            give_back()


class WorkerSeeds:
    """Called in every worker process of a loader: its generators get states of their own.

    torch would seed them with 32 bits of one number, and the user's function (`initialise`, which
    comes first) with what it likes.
    """

    def __init__(self, initialise: Callable[[int], None] | None, collate: Any) -> None:
        self._initialise, self._collate = initialise, collate
        self.secret = b""  # set before every loop

    def __call__(self, worker: int) -> None:
        if self._initialise is not None:
            self._initialise(worker)
        stream = secret_bytes(self.secret, b"worker", worker)
        info = get_worker_info()
        assert info is not None
        for generator in _all(explicit_generators(info.dataset, self._collate)):
            _seed(generator, lambda count: stream.update(bytes(count)))


def _all(explicit: tuple[Any, ...]) -> Iterator[Any]:
    yield torch.default_generator
    yield from accelerator_generators()
    yield random
    yield np.random
    yield from explicit


def accelerator_generators() -> list[torch.Generator]:
    """Those of every device of the accelerator; none before it is first used."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return []
    module = torch.get_device_module(device)
    if device.type == "mps":
        return [module._get_default_mps_generator()]
    return list(getattr(module, "default_generators", ()))


def _keep(generator: Any) -> Callable[[], object]:
    """A function that puts the generator back to where it is now."""
    if generator is np.random:
        return _keep_numpy()
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if generator is random or isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    bits = generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator
    return functools.partial(setattr, bits, "state", bits.state)


def _seed(generator: Any, take: Take) -> None:
    """Set the generator to a state made of secret bytes."""
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cpu":
            generator.set_state(_mersenne(take))
        else:
            generator.manual_seed(int.from_bytes(take(8), "little"))
    elif generator is random or isinstance(generator, random.Random):
        generator.seed(int.from_bytes(take(32), "little"))
    elif generator is np.random:
        _seed_numpy(take)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_numpy_state(type(generator._bit_generator), take))
    else:
        bits = (
            generator if isinstance(generator, np.random.BitGenerator) else generator.bit_generator
        )
        bits.state = type(bits)(int.from_bytes(take(32), "little")).state


def _mersenne(take: Take) -> Tensor:
    """A state of torch's CPU generator whose 624 words are all secret: of a seed it uses 32 bits.

    Layout: seed, left (4 bytes) and seeded, next, the words as 64-bit numbers, cached normals.
    """
    state = _FRESH.copy()
    state[:8] = np.frombuffer(take(8), np.uint8)
    state[24 : 24 + 8 * _WORDS].view(np.uint64)[:] = np.frombuffer(take(4 * _WORDS), np.uint32)
    return torch.from_numpy(state)


_FRESH: npt.NDArray[np.uint8] = torch.Generator().manual_seed(0).get_state().numpy()


# -- numpy's global generator ---------------------------------------------------------------
#
# get_state and set_state take 130 us together, more than the forward pass of a small model. The
# twister's memory is read and written instead; the normal number that randn holds back for its next
# call is not in it.


def _memory(bits: np.random.BitGenerator) -> npt.NDArray[np.uint32]:
    """The words of a Mersenne twister and its position, in place."""
    global _known
    if _known[0] is not bits:
        words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(bits.ctypes.state_address)
        _known = (bits, np.ctypeslib.as_array(words))
    return _known[1]


_known: tuple[Any, npt.NDArray[np.uint32]] = (None, np.empty(0, np.uint32))


def _take_held_normal(memory: npt.NDArray[np.uint32], before: bytes) -> float | None:
    """The number that randn holds back, which is then gone; None if there is none."""
    number = float(np.random.standard_normal())
    if memory.tobytes() == before:
        return number
    np.random.standard_normal()  # the second of the pair that was drawn
    memory[:] = np.frombuffer(before, np.uint32)
    return None


def _keep_numpy() -> Callable[[], None]:
    bits = mtrand.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        state = np.random.get_state(legacy=False)

        def give_back_any() -> None:
            mtrand.set_bit_generator(bits)
            np.random.set_state(state)

        return give_back_any
    memory = _memory(bits)
    before = memory.tobytes()
    held = _take_held_normal(memory, before)

    def give_back() -> None:
        if mtrand.get_bit_generator() is not bits:
            mtrand.set_bit_generator(bits)
        words = np.frombuffer(before, np.uint32)
        memory[:] = words
        _take_held_normal(memory, before)
        if held is not None:
            np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 1, held))

    return give_back


def _seed_numpy(take: Take) -> None:
    bits = mtrand.get_bit_generator()
    if type(bits) is np.random.MT19937:
        memory = _memory(bits)
        memory[:_WORDS] = np.frombuffer(take(4 * _WORDS), np.uint32)
        memory[_WORDS] = _WORDS  # all words are to be twisted before the first number
    else:
        np.random.set_state(_numpy_state(type(bits), take))


def _numpy_state(kind: Any, take: Take) -> Any:
    fresh = np.random.RandomState(kind(int.from_bytes(take(32), "little")))
    return fresh.get_state(legacy=False)


# -- generators that a model or a data set holds --------------------------------------------


def explicit_generators(*roots: Any) -> tuple[Any, ...]:
    """The generators that objects or classes hold, functions close over, or methods name.

    They cannot be swapped by setting global state, and are usually seeded with a constant.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # the objects themselves, so that no number stands for two
    level = [part for root in roots for part in (root.modules() if _is_model(root) else [root])]
    for _ in range(_DEPTH):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen[id(value)] = value
            if isinstance(value, _EXPLICIT):
                if not isinstance(value, random.SystemRandom):
                    found[id(value)] = value
            else:
                following += _held_by(value)
        level = following
    return tuple(found.values())


_PLAIN = (Tensor, np.ndarray, str, bytes, int, float, complex, types.ModuleType, type(None))


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONG else []
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _LONG else []
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return _named_by(value)
    if isinstance(value, type):  # what its methods name, once for all of its objects
        parts = [getattr(part, "__func__", part) for part in vars(value).values()]
        named = [_named_by(part) for part in parts if isinstance(part, types.FunctionType)]
        held = [g for g in itertools.chain(parts, *named) if isinstance(g, _EXPLICIT)]
        return [*held, *value.__mro__[1:]]
    try:
        return [*vars(value).values(), type(value)]
    except TypeError:
        return []


def _named_by(function: types.FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and the generators among its globals."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    names = function.__globals__
    named = [names[name] for name in function.__code__.co_names if name in names]
    return (
        cells + list(function.__defaults__ or ()) + [g for g in named if isinstance(g, _EXPLICIT)]
    )
