"""Cells beside PyTorch's own: GRU, LSTM, a normalised LSTM, a recurrent highway, and a step that a user wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.bench.peers import Captured, Peer, Results, Work
from deeprnn.cells.cell import Cell
from deeprnn.cells.layer_norm import LayerNormLSTM
from deeprnn.model.drop_in import GRU, LSTM
from deeprnn.model.recurrent import RHN, Recurrent

PEERS = {
    "GRU": "nn.GRU",
    "LSTM": "nn.LSTM",
    "layer-norm LSTM": "layer-norm LSTM, loop",
    "RHN": "RHN, loop",
    "your own step": "your own step, loop",
}
"""ours, and what each is compared with"""
NAMES = tuple(name for pair in PEERS.items() for name in pair)


class Paced(Cell):
    """h' = h + σ(pace) ∘ (tanh(W h + U x) − h): the guide's example of a user's cell."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U = nn.Linear(input_size, hidden_size)
        self.W = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pace = nn.Parameter(torch.zeros(hidden_size))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())


class CellBench:
    """One shape: its data, and every cell's weights, which ours and its peer share. `depth` is the highway's."""

    def __init__(self, work: Work, seed: int = 0) -> None:
        torch.manual_seed(seed)
        I, H = work.inputs, work.hidden
        self.work = work
        kinds: dict[str, Any] = {"GRU": GRU(I, H), "LSTM": LSTM(I, H), "RHN": RHN(I, H, depth=work.depth)}
        own = {"layer-norm LSTM": LayerNormLSTM(I, H), "your own step": Paced(I, H)}
        self.modules = {**kinds, **{name: Recurrent(cell) for name, cell in own.items()}}
        for name, module in (("GRU", nn.GRU(I, H)), ("LSTM", nn.LSTM(I, H))):
            module.load_state_dict(self.modules[name].state_dict())
            self.modules[f"nn.{name}"] = module
        for module in self.modules.values():
            module.to(work.device)
        self.x = torch.randn(work.steps, work.batch, I, device=work.device)
        self.g = torch.randn(work.steps, work.batch, H, device=work.device)

    def peer(self, name: str) -> Peer:
        """The peer of that name; on a GPU all of them are replayed as CUDA graphs."""
        kind = name.removesuffix(", loop")
        module = self.modules[kind]
        run: Callable[[], Tensor] = lambda: module(self.x)[0]  # noqa: E731
        if name != kind:
            run = lambda: loop(module, self.x)  # noqa: E731
        peer = Peer(name, run, list(module.parameters()), lambda: self.truth(kind))
        if self.work.device == "cuda":
            graphs = Captured(peer, self.g)
            peer.train = peer.results = graphs.train
            peer.forward, peer.calls = graphs.forward, 4
        return peer

    def truth(self, kind: str) -> Results:
        """Outputs and gradients in float64: by PyTorch's layer, or by the step in a loop."""
        kind = kind if f"nn.{kind}" not in self.modules else f"nn.{kind}"
        twin = copy.deepcopy(self.modules[kind]).double()
        x = self.x.double()
        h = twin(x)[0] if kind.startswith("nn.") else loop(twin, x)
        gradients = torch.autograd.grad(h, list(twin.parameters()), self.g.double())
        return h.detach().cpu(), [d.cpu() for d in gradients]


def loop(layer: Any, x: Tensor) -> Tensor:
    """A layer's first cell, called step by step, as one writes it in PyTorch."""
    cell = layer.cells[0]
    states, outputs = cell.initial_state(x.shape[1]), []
    for x_t in x.unbind(0):
        new = cell(x_t, *states)
        states = (new,) if isinstance(new, Tensor) else new
        outputs.append(states[0])
    return torch.stack(outputs)
