"""A cell as a level of a model, in the place of the paper's ⊕."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.cells import lookup
from deeprnn.cells.plans import DrawSpec, PlanRequest
from deeprnn.errors import UserError
from deeprnn.model.cell_loop import call_cell, draw_specs, unroll_cell
from deeprnn.model.init import InitSpec
from deeprnn.model.operator_specs import CellSpec
from deeprnn.model.operators import Masks
from deeprnn.model.overrides import own_hook, refresh_weights


class CellLevel(nn.Module):
    """x, states -> output, states by a cell that is found by its name; integer symbols are embedded first."""

    def __init__(self, spec: CellSpec, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.cell = self._build().to(device=device, dtype=dtype)
        sizes = self.cell.sizes()
        self.state_sizes = sizes.states
        if sizes.output != spec.hidden_size:
            raise UserError(
                f"the cell {lookup.short(spec.cell)} has an output of {sizes.output} units, but model.hidden says "
                f"{spec.hidden_size}: the first state, or what output(*state) returns, must have that size"
            )
        if spec.symbols:
            shape = spec.input_size, spec.entering
            self.embedding = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    @classmethod
    def from_spec(cls, spec: CellSpec, device=None, dtype=None, initialise: bool = True) -> CellLevel:
        """The level that `spec` describes."""
        level = cls(spec, device, dtype)
        if initialise:
            level.initialise(InitSpec())
        return level

    def _build(self) -> Any:
        spec = self.spec
        return lookup.build(spec.cell, spec.entering, spec.hidden_size, spec.options)

    @torch.no_grad()
    def initialise(self, init: InitSpec, generator: torch.Generator | None = None) -> None:
        """Numbers as the cell's own constructor draws them, the same for one generator on every device."""
        with torch.random.fork_rng([]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            self.cell.load_state_dict(self._build().state_dict())
            if self.spec.symbols:
                self.embedding.copy_(torch.randn(self.embedding.shape) * init.input_std)

    def set_state_dropout(self, p: float) -> None:
        """Leave units of the state out where the cell's matrices multiply it, the same ones for a whole sequence."""
        if not hasattr(self.cell, "recurrent_dropout"):
            raise UserError(
                f"dropout.state={p}: the cell {lookup.short(self.spec.cell)} has no attribute recurrent_dropout, the "
                "probability by which its step drops units of the state (deeprnn.cells.draws.sequence_dropout)"
            )
        self.cell.recurrent_dropout = float(p)

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """The cell's own first states."""
        return tuple(self.cell.initial_state(batch))

    def draws(self) -> tuple[DrawSpec, ...]:
        """The random numbers that the cell takes as it is: none in evaluation, or where it runs by the plain loop."""
        like = next(self.parameters())
        return draw_specs(self.cell, PlanRequest(like.dtype, like.dtype, str(like.device)))

    def _entered(self, x: Tensor, like: Tensor) -> Tensor:
        refresh_weights(self)
        if (kind := own_hook(self)) is not None:
            raise UserError(
                f"a {kind} on a level of cells would never run, for the level itself is not called: register it on the "
                "level's cell, such as model.levels[0].cell"
            )
        if not self.spec.symbols:
            return x.to(like.dtype)
        return F.embedding(x if x.dtype in (torch.int32, torch.int64) else x.long(), self.embedding)

    def run(
        self,
        x: Tensor,
        state: Sequence[Tensor],
        reset: Tensor | None = None,
        skip: Tensor | None = None,
        masks: Masks | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the next level sees of a sequence, (T, B, H), and the states after it.

        `masks` hold what the cell draws, by the names draw0, draw1, …; where they are missing it draws for itself.
        """
        drawn = [(masks or {})[f"draw{i}"] for i in range(len(masks or {}))] or None
        unrolled = unroll_cell(self.cell, self._entered(x, state[0]), state, reset, None, drawn, backend)
        last = tuple(h[-1] if x.shape[0] else h0 for h, h0 in zip(unrolled.states, state, strict=True))
        if self.cell.output is None:
            return unrolled.states[0], last
        y = self.cell.output(*(h.reshape(-1, h.shape[-1]) for h in unrolled.states))
        return y.reshape(*x.shape[:2], y.shape[-1]), last

    def run_step(
        self, x: Tensor, state: Sequence[Tensor], skip: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the next level sees of one step, (B, H), and the states after it."""
        new = call_cell(self.cell, self._entered(x, state[0]), state)
        return new[0] if self.cell.output is None else self.cell.output(*new), tuple(new)

    def extra_repr(self) -> str:
        return f"{self.spec.cell}"
