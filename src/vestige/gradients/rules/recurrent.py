"""Rules for LSTM, GRU and RNN layers and cells: unrolled over time, their products captured.

torch runs a whole recurrent stack as one operation. Here the input products of all time steps are
one linear layer, the hidden products one small linear layer a step; the uses of a weight at its
time steps add up like those of any reused parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.refs import Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import rule

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, c, o = (x + h).chunk(4, dim=1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(c)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=1), h.chunk(3, dim=1)
    update = torch.sigmoid(xz + hz)
    fresh = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (fresh + update * (state[0] - fresh),)


def _rnn(squash: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, h, _: (squash(x + h),)


_CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn(torch.tanh),
    torch.rnn_relu: _rnn(torch.relu),
}


@rule(*_CELLS)
def recurrent(capture: Capture, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A stack of recurrent layers in one or both directions."""
    if kwargs or len(args) != 9 or not isinstance(args[3], bool):
        raise _packed()
    x, start, weights, biases, layers, dropout, training, both, batch_first = args
    if not any(capture.find(w) for w in weights):
        return NotImplemented
    states = list(start) if isinstance(start, tuple | list) else [start]
    rows = capture.rows_in(x, [], "a recurrent layer")
    if rows is None or x.ndim != 3:
        raise Uncovered("a recurrent layer whose input has no batch rows")
    _own_states(capture, x, states, rows, axis=1)
    each = len(weights) // (layers * (1 + both))  # with biases four, one more with projections
    by_cell = [weights[at : at + each] for at in range(0, len(weights), each)]
    with capture:
        if not batch_first:
            x = x.transpose(0, 1)
        cells = [_Weights(w, biases) for w in by_cell]
        out, last = _stack(_CELLS[func], x, states, cells, dropout * training, both)
        return (out if batch_first else out.transpose(0, 1), *last)


def _stack(
    cell: Cell,
    x: Tensor,
    states: list[Tensor],
    weights: Sequence[_Weights],
    dropout: float,
    both: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The layers of the stack on x (rows, time, features); states are (layer, rows, width)."""
    directions = 1 + both
    finals: list[State] = []
    for first in range(0, len(weights), directions):
        outputs = []
        for at in range(first, first + directions):
            initial = tuple(s[at] for s in states)
            out, final = _unroll(cell, x, initial, weights[at], backwards=at > first)
            outputs.append(out)
            finals.append(final)
        x = torch.cat(outputs, dim=2) if both else outputs[0]
        if dropout and first + directions < len(weights):
            x = F.dropout(x, dropout)
    return x, [torch.stack(column) for column in zip(*finals, strict=True)]


def _unroll(
    cell: Cell, x: Tensor, state: State, weights: _Weights, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs at all time steps, and its last state."""
    moved = F.linear(x, weights.x, weights.b_x)
    steps = range(x.shape[1])
    outputs: list[Tensor] = []
    for t in reversed(steps) if backwards else steps:
        state = cell(moved[:, t], F.linear(state[0], weights.h, weights.b_h), state)
        if weights.projection is not None:
            state = F.linear(state[0], weights.projection), *state[1:]
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state


class _Weights:
    """The weights of one layer in one direction, in torch's order."""

    def __init__(self, weights: Sequence[Tensor], biases: bool) -> None:
        self.x, self.h = weights[:2]
        self.b_x: Tensor | None = weights[2] if biases else None
        self.b_h: Tensor | None = weights[3] if biases else None
        self.projection = weights[-1] if len(weights) % 2 else None


def _own_states(
    capture: Capture, x: Tensor, states: Sequence[Tensor], rows: Rows, axis: int
) -> None:
    """Give a state without rows, zeros that were made for this batch, those of `x`."""
    place = rows.place(x.shape)
    for state in states:
        if capture.tracker.label(state) is None and not capture.find(state):
            label = rows if place is None else rows.at(state.shape, axis, place[1])
            capture.tracker.give(state, label)


_SINGLE: dict[Any, Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _rnn(torch.tanh),
    torch.rnn_relu_cell: _rnn(torch.relu),
}


@rule(*_SINGLE)
def single_step(
    capture: Capture,
    func: Any,
    x: Tensor,
    start: Any,
    w_x: Tensor,
    w_h: Tensor,
    *biases: Tensor | None,
) -> Any:
    """One step of a cell: `nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`."""
    if not any(capture.find(w) for w in (w_x, w_h, *biases)):
        return NotImplemented
    states = tuple(start) if isinstance(start, tuple | list) else (start,)
    rows = None if capture.find(x) else capture.rows_in(x, [], "a recurrent cell")
    if rows is None or any(state.shape[0] != x.shape[0] for state in states):
        raise Uncovered("a recurrent cell whose input has no batch rows")
    _own_states(capture, x, states, rows, axis=0)
    b_x, b_h = biases if biases else (None, None)
    with capture:
        made = _SINGLE[func](F.linear(x, w_x, b_x), F.linear(states[0], w_h, b_h), states)
    return made if isinstance(start, tuple | list) else made[0]


@rule(torch._pack_padded_sequence)
def packed(_: Capture, __: Any, *___: Any, **____: Any) -> Any:
    """Positions of all rows in one axis, in an order that follows from everybody's lengths."""
    raise _packed()


def _packed() -> UnsupportedModel:
    return UnsupportedModel(
        "a PackedSequence has the steps of all records in one axis, as long as their lengths make "
        "it, and no row of its own for any of them: give the recurrent layer the padded rows "
        "(rows, steps, features), and take out[torch.arange(len(out)), lengths - 1] for the last "
        "step of each."
    )
