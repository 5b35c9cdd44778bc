"""Rules for LSTM, GRU and RNN layers: the cell unrolled over time, its products captured.

torch runs a whole recurrent stack as one operation. Here the input products of all time steps are
one linear layer, the hidden products one small linear layer a step; the uses of a weight at its
time steps add up like those of any reused parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.gradients.capture import Capture
from vestige.gradients.refs import Uncovered

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


def _recurrent(cell: Cell) -> Callable[..., Any]:
    def rule(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        with capture:
            if not batch_first:
                x = x.transpose(0, 1)
            out, last = _stack(
                cell, x, states, list(weights), biases, layers, dropout * training, both
            )
            return (out if batch_first else out.transpose(0, 1), *last)

    return rule


def _stack(
    cell: Cell,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    both: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The layers of the stack on x (rows, time, features); states are (layer, rows, width)."""
    directions, each = 1 + both, 4 if biases else 2
    if len(weights) != layers * directions * each:
        raise Uncovered("a recurrent layer with projections")
    finals: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            w_x, w_h, *b = weights[at * each : (at + 1) * each]
            initial = tuple(s[at] for s in states)
            out, final = _unroll(cell, x, initial, w_x, w_h, b, backwards=direction == 1)
            outputs.append(out)
            finals.append(final)
        x = torch.cat(outputs, dim=2) if both else outputs[0]
        if dropout and layer + 1 < layers:
            x = F.dropout(x, dropout)
    return x, [torch.stack(column) for column in zip(*finals, strict=True)]


def _unroll(
    cell: Cell,
    x: Tensor,
    state: State,
    w_x: Tensor,
    w_h: Tensor,
    bias: list[Tensor],
    backwards: bool,
) -> tuple[Tensor, State]:
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


TABLE: dict[Any, Any] = {
    torch.lstm: _recurrent(_lstm),
    torch.gru: _recurrent(_gru),
    torch.rnn_tanh: _recurrent(_rnn(torch.tanh)),
    torch.rnn_relu: _recurrent(_rnn(torch.relu)),
}
