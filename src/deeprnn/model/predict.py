"""The neural operator ▷: state to output."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.model import equations
from deeprnn.model.arguments import check_input
from deeprnn.model.operator_specs import PredictSettings, PredictSpec
from deeprnn.model.operators import Masks, Operator
from deeprnn.model.overrides import formula


@formula("forward", "last_layer", "_phi")
class Predict(Operator):
    """▷: logits = ▷ h, an output MLP with any number of hidden layers."""

    K: Tensor

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        initialise: bool = True,
        **settings: Unpack[PredictSettings],
    ) -> None:
        super().__init__()
        self.spec = spec = PredictSpec(input_size, output_size, **settings)  # type: ignore[arg-type]
        self.roles = {}
        kw = {"device": device, "dtype": dtype}
        below = spec.input_size
        for n, (size, unit) in enumerate(zip(spec.sizes, spec.unit_specs, strict=True), 1):
            self._matrix(f"V{n}", size * unit.pool, below, "output_hidden" if n == 1 else "hidden", **kw)
            if spec.bias:
                self._vector(f"b{n}", size * unit.pool, f"bias:{unit.name}", **kw)
            self._unit(f"{n}", unit, size, **kw)
            below = size
        last = len(spec.sizes) + 1
        self._matrix(f"V{last}", spec.output_size, below, "output", **kw)
        if spec.shortcut:
            self._matrix("K", spec.output_size, spec.input_size, "output", **kw)
        if spec.bias:
            self._vector(f"b{last}", spec.output_size, "bias:output", **kw)
        if initialise:
            self.reset_parameters()

    @classmethod
    def from_spec(cls, spec: PredictSpec, device=None, dtype=None, initialise: bool = True) -> Predict:
        """The operator that `spec` describes."""
        settings = {n: getattr(spec, n) for n in spec.__dataclass_fields__}
        return cls(device=device, dtype=dtype, initialise=initialise, **settings)

    def last_layer(self, h: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the final linear layer multiplies, its matrix and its bias.

        Kept apart from `forward` so that a loss over many classes can take the product in pieces.
        """
        check_input("Predict: h", h, self.spec.input_size, False, "...")
        masks = masks or {}
        h = h if "h" not in masks else h * masks["h"]
        n = len(self.spec.sizes)
        V = [getattr(self, f"V{i}").transpose(-2, -1) for i in range(1, n + 1)]
        phis = [self._phi(f"{i}", u) for i, u in enumerate(self.spec.unit_specs, 1)]
        b = [getattr(self, f"b{i}", None) for i in range(1, n + 1)]
        y = equations.deep_output(h, V, phis, b, [masks.get(f"y{i}") for i in range(1, n + 1)])
        weight, bias = getattr(self, f"V{n + 1}"), getattr(self, f"b{n + 1}", None)
        if self.spec.shortcut:
            return torch.cat([y, h], -1), torch.cat([weight, self.K], -1), bias
        return y, weight, bias

    def forward(self, h: Tensor, masks: Masks | None = None) -> Tensor:
        """Logits of the next symbol, (..., O)."""
        return F.linear(*self.last_layer(h, masks))

    def extra_repr(self) -> str:
        sizes = " -> ".join(map(str, (self.spec.input_size, *self.spec.sizes, self.spec.output_size)))
        return f"▷ {sizes}, units={','.join(self.spec.units) or 'linear'}, shortcut={self.spec.shortcut}"
