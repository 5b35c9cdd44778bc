"""Rules for LSTM, GRU and RNN layers: the cell unrolled over time, its products captured.

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

from vestige.gradients.refs import Uncovered
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
    if kwargs or len(args) != 9 or not isinstance(args[2], list | tuple):
        raise Uncovered("a recurrent layer on packed sequences")
    x, start, weights, biases, layers, dropout, training, both, batch_first = args
    if not any(capture.find(w) for w in weights):
        return NotImplemented
    states = list(start) if isinstance(start, tuple | list) else [start]
    rows = capture.rows_in(x, [], "a recurrent layer")
    if rows is None or x.ndim != 3:
        raise Uncovered("a recurrent layer whose input has no batch rows")
    place = rows.place(x.shape)
    for state in states:
        if capture.tracker.label(state) is None:  # zeros that the layer made for this batch
            label = rows if place is None else rows.at(state.shape, 1, place[1])
            capture.tracker.give(state, label)
    each = 4 if biases else 2
    if len(weights) != layers * (1 + both) * each:
        raise Uncovered("a recurrent layer with projections")
    by_cell = [weights[at : at + each] for at in range(0, len(weights), each)]
    with capture:
        if not batch_first:
            x = x.transpose(0, 1)
        out, last = _stack(_CELLS[func], x, states, by_cell, dropout * training, both)
        return (out if batch_first else out.transpose(0, 1), *last)


def _stack(
    cell: Cell,
    x: Tensor,
    states: list[Tensor],
    weights: Sequence[Sequence[Tensor]],
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
    cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs at all time steps, and its last state."""
    w_x, w_h, *bias = weights
    b_x, b_h = bias or (None, None)
    moved = F.linear(x, w_x, b_x)
    steps = range(x.shape[1])
    outputs: list[Tensor] = []
    for t in reversed(steps) if backwards else steps:
        state = cell(moved[:, t], F.linear(state[0], w_h, b_h), state)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state
