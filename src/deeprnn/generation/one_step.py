"""One step of a model, laid out for a handful of rows: what sampling spends its time on.

`SequenceModel.step` is the truth and serves every model. For a few rows on a CPU most of its time goes into
calls and into joining matrices anew; here they are joined once, everything that h(t-1) enters is one product,
and the arithmetic is numpy's, which is the quicker of the two at this size. A test holds both equal.

Products are cut so small that numpy's BLAS computes each on the calling thread. Shared with a second thread, a product
of microseconds waits for that thread to be scheduled: milliseconds where another process keeps the cores busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deeprnn.cells.functions import FUNCTIONS
from deeprnn.model.operator_specs import PlusSpec
from deeprnn.model.overrides import changed, own_method

if TYPE_CHECKING:
    from deeprnn.model.plus import Plus
    from deeprnn.model.predict import Predict
    from deeprnn.model.sequence_model import SequenceModel, State

Array = np.ndarray
Step = Callable[[Tensor, "State"], "tuple[Tensor, State]"]

ALONE = 2**18
"""multiplications up to which OpenBLAS, which numpy brings along, does not share a product among threads"""
ROWS = 4
"""rows that products are cut for: those of a block of samples"""


def fastest_step(model: SequenceModel) -> Step:
    """The quickest way to take one step with this model where it stands."""
    weight = next(model.parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and can_serve(model):
        return FewRows(model)
    return model.step


def can_serve(model: SequenceModel) -> bool:
    """Whether `FewRows` knows the model: plain ⊕, no deep input or input to upper levels, nothing overridden."""
    if not all(isinstance(level.spec, PlusSpec) for level in model.levels) or overridden(model):
        return False
    if model.spec.embedding is not None:
        return False
    return all(
        not spec.skip_size and not spec.input_mlp_sizes and all(unit in UNITS for unit in spec.units)
        for spec in (level.spec for level in model.levels)
    ) and all(unit in UNITS for unit in model.predict.spec.units)


def overridden(model: SequenceModel) -> bool:
    """Whether the model or one of its operators has an overridden step, or hooks."""
    return (
        own_method(model, "step", "embed", "joined") is not None
        or any(changed(level, "forward", "layers", "project", "_phi", weights=True) for level in model.levels)
        or changed(model.predict, "forward", "last_layer", "_phi", weights=True) is not None
    )


UNITS: dict[str, Callable[[Array], Array]] = {
    row.name: row.numpy for row in FUNCTIONS.values() if row.numpy is not None
}
"""units by name; they may overwrite their argument"""


class FewRows:
    """`model.step` for small batches; takes and gives torch tensors that share numpy's memory."""

    def __init__(self, model: SequenceModel) -> None:
        self.levels = [_Level(level) for level in model.levels]  # type: ignore[arg-type]
        self.output = _Output(model.predict)
        self.all_levels = model.spec.output_from == "all"

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x (B, I) or symbols (B,), state one (B, H) a level; logits (B, O)."""
        below = x.numpy()
        new = []
        for level, h in zip(self.levels, state, strict=True):
            below = level(below, h.numpy())
            new.append(below)
        top = np.concatenate(new, axis=1) if self.all_levels else below
        return torch.from_numpy(self.output(top)), tuple(torch.from_numpy(h) for h in new)


class Product:
    """x @ W, for a few rows of x, in parts of columns that each stay on one thread."""

    def __init__(self, W: Array) -> None:
        columns_each = max(1, ALONE // (ROWS * max(1, len(W))))
        self.parts = [
            np.ascontiguousarray(W[:, at : at + columns_each]) for at in range(0, W.shape[1], columns_each)
        ]

    def __call__(self, x: Array) -> Array:
        if len(self.parts) == 1:
            return x @ self.parts[0]
        return np.concatenate([x @ part for part in self.parts], axis=1)


class _Level:
    """One ⊕: U of all layers side by side, and W_1 beside every S."""

    def __init__(self, level: Plus) -> None:
        spec = level.spec
        self.symbols = spec.embeds
        ends = np.cumsum(spec.sizes)
        self.slices = [slice(int(end - size), int(end)) for end, size in zip(ends, spec.sizes, strict=True)]
        entering = [n for n, has in enumerate(spec.inputs, 1) if has]
        parts = [_array(level, f"U{n}") for n in entering]
        U = np.ascontiguousarray(np.concatenate(parts if self.symbols else [u.T for u in parts], axis=1))
        self.enter = U.__getitem__ if self.symbols else Product(U)
        every_layer = all(spec.inputs)
        columns = [np.arange(s.start, s.stop) for n, s in enumerate(self.slices, 1) if n in entering]
        self.columns = None if every_layer else np.concatenate(columns)
        biases = [
            _array(level, f"b{n}") if spec.bias else np.zeros(m, np.float32)
            for n, m in enumerate(spec.sizes, 1)
        ]
        self.b = np.concatenate(biases)
        from_state = [
            _array(level, "W1"),
            *(_array(level, f"S{n}") for n, s in enumerate(spec.shortcuts, 1) if s),
        ]
        self.H = Product(np.concatenate(from_state).T)  # (H, M_1 + Σ widths with S)
        self.shortcuts = spec.shortcuts
        self.W = [Product(_array(level, f"W{n}").T) for n in range(2, spec.depth + 1)]
        self.units = [UNITS[unit] for unit in spec.units]

    def __call__(self, x: Array, h: Array) -> Array:
        entered = self.enter(x)
        if self.columns is not None:
            a = np.tile(self.b, (len(h), 1))
            a[:, self.columns] += entered
        else:
            a = entered
            a += self.b
        from_state = self.H(h)
        used = self.slices[0].stop
        z = a[:, self.slices[0]]
        z += from_state[:, :used]
        z = self.units[0](z)
        for n, W in enumerate(self.W, 1):
            at = self.slices[n]
            total = W(z)
            total += a[:, at]
            if self.shortcuts[n]:
                total += from_state[:, used : used + total.shape[1]]
                used += total.shape[1]
            z = self.units[n](total)
        return np.ascontiguousarray(z)


class _Output:
    """One ▷."""

    def __init__(self, predict: Predict) -> None:
        spec = predict.spec
        count = len(spec.sizes) + 1
        V = [_array(predict, f"V{n}") for n in range(1, count + 1)]
        b = [_array(predict, f"b{n}") for n in range(1, count + 1)] if spec.bias else []
        if spec.nade_size:  # the hidden layer's biases beside those of the notes
            V[-1] = np.concatenate([V[-1], _array(predict, "C")])
            b[-1:] = [np.concatenate([*b[-1:], _array(predict, "c")])] if spec.bias else []
        self.b = b or [None] * count
        self.V = [Product(v.T) for v in V]
        self.K = Product(_array(predict, "K").T) if spec.shortcut else None
        self.units = [*(UNITS[unit] for unit in spec.units), UNITS["identity"]]

    def __call__(self, h: Array) -> Array:
        y = h
        for V, b, unit in zip(self.V, self.b, self.units, strict=True):
            y = V(y)
            if b is not None:
                y += b
            y = unit(y)
        if self.K is not None:
            around = self.K(h)
            y[:, : around.shape[1]] += around  # of a NADE the biases of notes alone
        return y


def _array(module: torch.nn.Module, name: str) -> Array:
    return getattr(module, name).detach().numpy()
