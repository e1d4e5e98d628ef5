"""Levels of ⊕, or of cells, below one ▷."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.model.cell_level import CellLevel
from deeprnn.model.embedding import Embedding
from deeprnn.model.nade import NadePredict
from deeprnn.model.operator_specs import CellSpec
from deeprnn.model.operators import Masks, enter
from deeprnn.model.overrides import formula, refresh_weights
from deeprnn.model.plus import Plus
from deeprnn.model.predict import Predict
from deeprnn.model.specs import ModelSpec
from deeprnn.model.tracing import Traceable, is_symbolic, is_tensor, leaf

State = tuple[Tensor, ...]


@formula("forward", "step", "embed", "joined")
class SequenceModel(Traceable):
    """Levels of ⊕ below one ▷: inputs to logits of the next symbol.

    `y, state = model(x, state)`: x is (T, B, I) vectors or frames, or (T, B) integer symbols; y is
    (T, B, O) logits, or what a NADE takes (`NadePredict`); state is one (B, n) tensor for every state of every
    level (an LSTM has two), None for the first ones. Nothing is hidden on the module, so a sequence may be cut
    anywhere and carried on.
    """

    def __init__(self, spec: ModelSpec, device=None, dtype=None, initialise: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.levels: list[Plus | CellLevel] = nn.ModuleList(
            (CellLevel if isinstance(p, CellSpec) else Plus).from_spec(p, device, dtype, initialise)  # type: ignore[arg-type]
            for p in spec.levels
        )  # type: ignore[assignment]
        for level in self.levels:
            if spec.dropout.state and isinstance(level, CellLevel):
                level.set_state_dropout(spec.dropout.state)
        output = NadePredict if spec.output == "nade" else Predict
        self.predict = output.from_spec(spec.predict, device, dtype, initialise)
        if spec.embedding is not None and not spec.embedding.tied:
            self.embedding = Embedding(spec.embedding, device, dtype, initialise)
        self.backend = "auto"

    def embed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the first level sees: x itself, or a learned vector for each symbol; `mask` (symbols, 1) drops some."""
        embedding = self.spec.embedding
        if embedding is None:
            return x
        # Tied, the vectors are ▷'s last matrix: one parameter, and no second name for it.
        if not embedding.tied:
            return self.embedding(x, mask)
        refresh_weights(self.predict)
        weight = getattr(self.predict, f"V{len(self.spec.predict.sizes) + 1}")
        return enter(x, weight if mask is None else weight * mask, True)

    def initial_state(self, batch_size: int) -> State:
        """The states before the first step: h_0 = 0 for every level."""
        return tuple(h for level in self.levels for h in level.initial_state(batch_size))

    def hidden(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[Tensor, State]:
        """The states that ▷ sees, (T, B, ·), and the state to carry on."""
        states, last = self.level_states(x, state, reset, masks)
        return self.joined(states), last

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """Of all levels' states those that ▷ sees."""
        return torch.cat(list(states), -1) if self.spec.output_from == "all" else states[-1]

    def level_states(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[list[Tensor], State]:
        """Every level's states, (T, B, H_l) each, and the state to carry on."""
        self._check(x, 2 if self.spec.symbols else 3)
        self._check_reset(reset, x)
        state = self._state(state, x.shape[1])
        masks = masks or {}
        entered = self.embed(x, masks.get("symbols"))
        below = entered if "input" not in masks else entered * masks["input"]
        outputs, last = [], []
        for k, (level, state_of_level) in enumerate(zip(self.levels, self._by_level(state), strict=True)):
            inner = _of_level(masks, k)
            skip = entered if level.spec.skip_size else None
            if f"below{k}" in masks:
                below = below * masks[f"below{k}"]
            below, new = level.run(below, state_of_level, reset, skip, inner, backend=self.backend)
            outputs.append(below)
            last += new
        return outputs, tuple(last)

    def _by_level(self, state: State) -> list[State]:
        """Each level's own states."""
        states, start = [], 0
        for level in self.levels:
            end = start + len(level.state_sizes)
            states.append(state[start:end])
            start = end
        return states

    def forward(
        self, x: Tensor, state: State | None = None, reset: Tensor | None = None, masks: Masks | None = None
    ) -> tuple[Tensor, State]:
        """Logits of every step and the state after the last; `reset` (T, B) zeroes the state before a step."""
        if is_symbolic(x):
            return leaf(self, x, state, reset, masks)
        top, state = self.hidden(x, state, reset, masks)
        dropped = _of_output(masks or {})
        return self.predict(top, dropped) if dropped else self.predict(top), state

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One step, for streaming and sampling: x (B, I) or symbols (B,), logits (B, O).

        h_t = f_h(x_t, h_{t-1}), y_t = f_o(h_t), Eqs. (1) and (2): here h_t = x_t ⊕ h_{t-1} and y_t = ▷ h_t, Fig. 3.
        """
        self._check(x, 1 if self.spec.symbols else 2)
        state = self._state(state, x.shape[0])
        entered, outputs, last = self.embed(x), [], []
        below = entered
        for level, state_of_level in zip(self.levels, self._by_level(state), strict=True):
            below, new = level.run_step(below, state_of_level, entered if level.spec.skip_size else None)
            outputs.append(below)
            last += new
        return self.predict(self.joined(outputs)), tuple(last)

    def _state(self, state: State | None, batch: int) -> State:
        """The given state, checked, or zeros."""
        if state is None:
            return self.initial_state(batch)
        want = [(batch, n) for level in self.levels for n in level.state_sizes]
        got = [tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__ for h in state]
        if got != want:
            raise ValueError(f"state must hold one (B, H) tensor per level, {want}, got {got}")
        return tuple(state)

    def _check_reset(self, reset: Tensor | None, x: Tensor) -> None:
        if reset is not None and not isinstance(reset, Tensor):
            raise TypeError(f"reset must be a Tensor of bool marks, got {type(reset).__name__}")
        if reset is not None and (reset.dtype != torch.bool or reset.shape != x.shape[:2]):
            raise ValueError(
                f"reset must be bool marks of shape (T, B) = {tuple(x.shape[:2])}, got {reset.dtype} of "
                f"shape {tuple(reset.shape)}"
            )

    def _check(self, x: Tensor, dims: int) -> None:
        spec = self.spec
        if not is_tensor(x):
            raise TypeError(f"input must be a Tensor, got {type(x).__name__}")
        if x.dim() != dims:
            shape = {1: "(B,)", 2: "(T, B)" if spec.symbols else "(B, I)", 3: "(T, B, I)"}[dims]
            raise ValueError(f"input must have {dims} dimension(s), {shape}, got {tuple(x.shape)}")
        if spec.symbols and (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"input must be integer symbols, got {x.dtype}: this model gathers, it takes no vectors"
            )
        if not spec.symbols and x.shape[-1] != spec.input_size:
            raise ValueError(
                f"input.size(-1) must be equal to input_size. Expected {spec.input_size}, got {x.shape[-1]}"
            )

    def mask_shapes(self, T: int, B: int) -> dict[str, tuple[float, tuple[int, ...]]]:
        """Each dropout mask of a call of `forward` by name: its probability and its shape."""
        drop = self.spec.dropout
        steps = () if drop.per_sequence else (T,)
        out = {}
        if self.spec.embedding is not None:
            out["symbols"] = drop.symbols, (self.spec.embedding.symbols, 1)
        if not self.levels[0].spec.symbols:
            out["input"] = drop.input, (*steps, B, self.levels[0].spec.input_size)
        for k, level in enumerate(self.levels):
            if k:
                out[f"below{k}"] = drop.levels, (*steps, B, level.spec.input_size)
            if isinstance(level, CellLevel):
                continue
            out[f"{k}.state"] = drop.state, (B, level.spec.hidden_size)
            for n, size in enumerate(level.spec.intermediate_sizes, 1):
                out[f"{k}.z{n}"] = drop.intermediate, (*steps, B, size)
        out["out.h"] = drop.output, (*steps, B, self.predict.spec.input_size)
        for n, size in enumerate(self.predict.spec.sizes, 1):
            out[f"out.y{n}"] = drop.output, (*steps, B, size)
        return {name: (p, shape) for name, (p, shape) in out.items() if p}

    def draw_shapes(self, T: int, B: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The random numbers that cells take in a call of `forward`, by name: uniform or normal, and their shape."""
        return {
            f"{k}.draw{i}": (kind, (B, *shape) if per_sequence else (T, B, *shape))
            for k, level in enumerate(self.levels)
            if isinstance(level, CellLevel)
            for i, (kind, shape, per_sequence) in enumerate(level.draws())
        }

    def draw_masks(self, T: int, B: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Fresh dropout masks for one call of `forward`, scaled so that the mean is kept, and what cells draw."""
        kw: dict[str, Any] = {"generator": generator, "device": generator.device if generator else None}
        like, out = next(self.predict.parameters()), {}
        for name, (p, shape) in self.mask_shapes(T, B).items():
            out[name] = (torch.rand(shape, **kw) >= p).to(like) / (1 - p)
        for name, (kind, shape) in self.draw_shapes(T, B).items():
            out[name] = (torch.rand if kind == "uniform" else torch.randn)(shape, **kw).to(like)
        return out


def _of_level(masks: Masks, level: int) -> dict[str, Tensor]:
    prefix = f"{level}."
    return {k.removeprefix(prefix): v for k, v in masks.items() if k.startswith(prefix)}


def _of_output(masks: Masks) -> dict[str, Tensor]:
    return {k.removeprefix("out."): v for k, v in masks.items() if k.startswith("out.")}
