"""The neural operator ⊕: state and input to new state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor

from deeprnn.backends.call import InputProjection
from deeprnn.backends.registry import check_plain
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.backends.unrolling import without_autocast
from deeprnn.errors import UserError
from deeprnn.model import equations, units
from deeprnn.model.arguments import check_input
from deeprnn.model.operator_specs import PlusSettings, PlusSpec, warn_idle_shortcut
from deeprnn.model.operators import Masks, Operator, enter
from deeprnn.model.overrides import changed, formula, hook_kind, own_method, refresh_weights, unroll_calls
from deeprnn.model.tracing import is_symbolic, leaf, traced_backend
from deeprnn.model.transition import Weights, joined, less_centres, unroll_layers
from deeprnn.model.units import UnitSpec

logger = logging.getLogger("deeprnn")


@formula("forward", "layers", "project", "_phi")
class Plus(Operator):
    """⊕: h' = x ⊕ h, a transition MLP of any depth.

    Layer l computes z_l = φ_l(W_l z_{l-1} + U_l x + S_l h + b_l) with z_0 = h, and h' = z_L. Which
    layers have U and S is data (`input_to`, `shortcut`). Matrices are stored (out, in), except for
    integer symbols, where U is the embedding itself, (symbols, out). Call it for one step; `unroll`
    runs a whole sequence on the fastest backend. A subclass may have its own `forward`, and hooks may be
    registered: `unroll` then calls this module step by step.
    """

    W1: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        initialise: bool = True,
        **settings: Unpack[PlusSettings],
    ) -> None:
        super().__init__()
        self.spec = spec = PlusSpec(input_size, hidden_size, **settings)  # type: ignore[arg-type]
        warn_idle_shortcut("Plus", spec.shortcut, spec.intermediate_sizes)
        self.roles = {}
        kw = {"device": device, "dtype": dtype}
        width_in = spec.input_size
        for i, (size, unit) in enumerate(self._input_layers(), 1):
            rows, columns = size * unit.pool, width_in
            if i == 1 and spec.embeds:
                rows, columns = columns, rows
            self._matrix(f"E{i}", rows, columns, self._entry_role() if i == 1 else "hidden", **kw)
            if spec.bias:
                self._vector(f"e{i}", size * unit.pool, f"bias:{unit.name}", **kw)
            self._unit(f"_e{i}", unit, size, **kw)
            width_in = size
        self._transition(width_in, kw)
        if initialise:
            self.reset_parameters()

    @classmethod
    def from_spec(cls, spec: PlusSpec, device=None, dtype=None, initialise: bool = True) -> Plus:
        """The operator that `spec` describes."""
        settings = {n: getattr(spec, n) for n in spec.__dataclass_fields__}
        return cls(device=device, dtype=dtype, initialise=initialise, **settings)

    def _input_layers(self) -> list[tuple[int, UnitSpec]]:
        return [
            (size, UnitSpec.parse(u))
            for size, u in zip(self.spec.input_mlp_sizes, self.spec.input_mlp_units, strict=True)
        ]

    def _transition(self, width_in: int, kw: dict) -> None:
        spec, below = self.spec, self.spec.hidden_size
        embedded = spec.embeds and not spec.input_mlp_sizes
        entry = "hidden" if spec.input_mlp_sizes else self._entry_role()
        for l, (size, width, unit) in enumerate(zip(spec.sizes, spec.widths, spec.unit_specs, strict=True)):
            n = l + 1
            self._matrix(f"W{n}", width, below, "hidden", **kw)
            if spec.inputs[l]:
                rows, columns = (width_in, width) if embedded else (width, width_in)
                self._matrix(f"U{n}", rows, columns, entry, **kw)
            if spec.inputs[l] and spec.skip_size:
                rows, columns = (spec.skip_size, width) if spec.symbols else (width, spec.skip_size)
                self._matrix(f"K{n}", rows, columns, "input", **kw)
            if spec.shortcuts[l]:
                self._matrix(f"S{n}", width, spec.hidden_size, "hidden", **kw)
            if spec.bias:
                self._vector(f"b{n}", width, f"bias:{unit.name}", **kw)
            self._unit(f"{n}", unit, size, **kw)
            below = size

    def _entry_role(self) -> str:
        """How the input's weights are first drawn: between levels of a stack as those of hidden layers."""
        return "hidden" if self.spec.stacked else "input"

    def _list(self, letter: str) -> list[Tensor | None]:
        return [getattr(self, f"{letter}{n}", None) for n in range(1, self.spec.depth + 1)]

    def embed_input(self, x: Tensor) -> Tensor:
        """What enters the transition: behind the deep input-to-hidden MLP, where there is one."""
        for i, (_, unit) in enumerate(self._input_layers(), 1):
            a = enter(x, getattr(self, f"E{i}"), i == 1 and self.spec.embeds)
            bias = getattr(self, f"e{i}", None)
            x = self._phi(f"_e{i}", unit)(a if bias is None else a + bias)
        return x

    def _one_product(self, x: Tensor) -> InputProjection | None:
        """What enters, where all layers have an input and it is a vector; else None."""
        spec, U = self.spec, self._list("U")
        if not all(u is not None for u in U) or (spec.embeds and not spec.input_mlp_sizes) or spec.skip_size:
            return None
        x = self.embed_input(x) if spec.input_mlp_sizes else x
        b = self._list("b") if spec.bias else []
        return InputProjection(x.to(U[0].dtype), U, b)  # type: ignore[union-attr,arg-type]

    def _check_inputs(self, x: Tensor, skip: Tensor | None, lead: str = "...") -> None:
        """Refuse what does not fit, before a matrix product does so in words that nobody can place."""
        spec = self.spec
        check_input("Plus: x", x, spec.input_size, spec.embeds, lead)
        if spec.skip_size:
            if skip is None:
                raise UserError("this ⊕ also takes the model's input: pass it as `skip`")
            check_input("Plus: skip", skip, spec.skip_size, spec.symbols, lead)

    def _check_state(self, h: Tensor, batch: torch.Size) -> None:
        """Refuse a state of another size; one state may serve a whole batch."""
        pairs = zip(reversed(batch), reversed(h.shape[:-1]), strict=False)
        size = self.spec.hidden_size
        if h.shape[-1:] != (size,) or any(a != b and 1 not in (a, b) for a, b in pairs):
            raise UserError(f"Plus: h must be {(*batch, size)}, got {tuple(h.shape)}")

    def project(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """Everything that enters the layers from outside the recurrence, (..., Σ widths)."""
        spec = self.spec
        self._check_inputs(x, skip)
        if (projection := self._one_product(x)) is not None:
            return projection.A
        lead = x.shape if spec.embeds else x.shape[:-1]
        embedded = spec.embeds and not spec.input_mlp_sizes
        x = self.embed_input(x) if spec.input_mlp_sizes else x
        U, K, b = self._list("U"), self._list("K"), self._list("b")
        parts = []
        for l, width in enumerate(spec.widths):
            part = self.W1.new_zeros(())
            if (u := U[l]) is not None:
                part = enter(x, u, embedded)
            if (k := K[l]) is not None:
                part = part + enter(skip, k, spec.symbols)  # type: ignore[arg-type]
            if (bias := b[l]) is not None:
                part = part + bias
            parts.append(part.expand(*lead, width))
        return torch.cat(parts, -1)

    def _phis(self) -> list[units.Unit]:
        return [self._phi(f"{n}", u) for n, u in enumerate(self.spec.unit_specs, 1)]

    def _named(self) -> list[tuple[str, Tensor | None, Tensor | None]]:
        """The layers' units by name, with the parameters of those that have some."""
        rho, centre = self._list("rho"), self._list("c")
        return [(str(u), rho[l], centre[l]) for l, u in enumerate(self.spec.unit_specs)]

    def forward(self, x: Tensor, h: Tensor, skip: Tensor | None = None) -> Tensor:
        """x ⊕ h for one step: x (B, I) or symbols (B,), h (B, H)."""
        if is_symbolic(x):
            return leaf(self, x, h, skip)
        return self.layers(x, h, skip)[-1]

    def layers(self, x: Tensor, h: Tensor, skip: Tensor | None = None) -> list[Tensor]:
        """All layers of one step, the new state last."""
        A = self.project(x, skip)
        self._check_state(h, A.shape[:-1])
        # Not `.mT`: the older ONNX exporter does not know it.
        W = [w.transpose(-2, -1) for w in self._list("W")]  # type: ignore[union-attr]
        S = [None if s is None else s.transpose(-2, -1) for s in self._list("S")]
        with without_autocast(A.device.type):  # the state keeps its type, as in `unroll`
            A, h = A.to(W[0].dtype), h.to(W[0].dtype)
            entered = A.split(list(self.spec.widths), dim=-1)
            return equations.transition_mlp(entered, h, W, S, self._phis())

    def unroll(
        self,
        x: Tensor,
        h0: Tensor,
        reset: Tensor | None = None,
        skip: Tensor | None = None,
        masks: Masks | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """x_t ⊕ h_{t-1} over a sequence: states (T, B, H) and intermediate layers (T, B, ΣM_l − H).

        Where ⊕ has its own `forward`, or hooks, no backend knows its step: it is called step by step, and of
        the layers inside it nothing is given, (T, B, 0).
        """
        layers = self.unroll_layers(x, h0, reset, skip, masks, backend)
        return layers[-1], joined(layers)

    def unroll_layers(
        self,
        x: Tensor,
        h0: Tensor,
        reset: Tensor | None = None,
        skip: Tensor | None = None,
        masks: Masks | None = None,
        backend: str = "auto",
    ) -> list[Tensor]:
        """All layers over a sequence, (T, B, M_l) each; the states are the last."""
        spec, masks = self.spec, masks or {}
        if (reason := changed(self, "forward", "layers", "_phi")) is not None:
            return self._unroll_calls(reason, x, h0, reset, skip, masks, backend)
        refresh_weights(self)
        own_project = own_method(self, "project") is not None
        if not own_project:
            self._check_inputs(x, skip, "T, B")
        W, S, rho, centre = (
            [x for x in self._list(name) if x is not None] for name in ("W", "S", "rho", "c")
        )
        dropped = [masks.get(f"z{n}") for n in range(1, spec.depth)]
        projection = None if centre or own_project else self._one_product(x)
        if projection is None:
            projection = less_centres(self.project(x, skip), spec, centre)
        weights, backend = Weights(W, S, rho), traced_backend(backend, x, h0)
        return unroll_layers(spec, projection, h0, weights, reset, masks.get("state"), dropped, backend)

    def _unroll_calls(
        self,
        reason: str,
        x: Tensor,
        h0: Tensor,
        reset: Tensor | None,
        skip: Tensor | None,
        masks: Masks,
        backend: str,
    ) -> list[Tensor]:
        """`unroll_layers` by calling this module for every step, for the reason given."""
        check_plain(backend, f"this ⊕: {reason}; use backend='auto'")
        if inner := [name for name in masks if name.startswith("z")]:
            raise UserError(
                f"dropout of intermediate layers ({', '.join(inner)}) acts inside ⊕, and {reason}: "
                "use dropout.state or dropout.output"
            )
        log_plain_loop(reason)
        gives_layers = own_method(self, "forward") is None and hook_kind(self) is None
        step = self.layers if gives_layers else lambda *inputs: [self(*inputs)]
        states, others = unroll_calls(step, x, h0, reset, skip, masks.get("state"))
        return [others, states]

    # ---- as a level of a model

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Widths of the states that are carried on: one."""
        return (self.spec.hidden_size,)

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """h_0 = 0."""
        return (self.W1.new_zeros(batch, self.spec.hidden_size),)

    def run(
        self,
        x: Tensor,
        state: Sequence[Tensor],
        reset: Tensor | None = None,
        skip: Tensor | None = None,
        masks: Masks | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the next level sees of a sequence, (T, B, H), and the states after it."""
        h = self.unroll(x, state[0], reset, skip, masks, backend)[0]
        return h, (h[-1] if x.shape[0] else state[0],)

    def run_step(
        self, x: Tensor, state: Sequence[Tensor], skip: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the next level sees of one step, (B, H), and the states after it."""
        h = self(x, state[0]) if skip is None else self(x, state[0], skip)
        return h, (h,)

    def commutativity(self, a: Tensor, b: Tensor, counted: Tensor | None = None) -> Tensor:
        """The penalty ‖a ⊕ b − b ⊕ a‖² over (..., H), where what enters ⊕ has the state's size.

        With a deep input function in front, `a` and `b` stand where its last layer does.
        """
        spec = self.spec
        if spec.entering != spec.hidden_size:
            entering = f"an input of {spec.entering}" if spec.entering else "integer symbols"
            raise UserError(
                f"a ⊕ b and b ⊕ a need an input of the state's size: this ⊕ has {entering} beside a state of "
                f"{spec.hidden_size}; hidden layers in front, the last as wide as the state, make it so"
            )
        if not spec.input_mlp_sizes:
            return equations.commutativity_penalty(a, b, self, counted)
        if (reason := changed(self, "forward", "layers", "_phi")) is not None:
            raise UserError(f"what stands behind the input function cannot be called by itself: {reason}")
        return equations.commutativity_penalty(a, b, self._after_input, counted)

    def _after_input(self, e: Tensor, h: Tensor) -> Tensor:
        """⊕ of the input function's last layer and the state."""
        W, U, S = (
            [None if m is None else m.transpose(-2, -1) for m in self._list(letter)] for letter in "WUS"
        )
        layers = [equations.Layer(*parts) for parts in zip(W, U, S, self._list("b"), strict=True)]  # type: ignore[arg-type]
        return equations.deep_transition(e, h, layers, self._phis())

    def extra_repr(self) -> str:
        s = self.spec
        sizes = " -> ".join(map(str, (s.hidden_size, *s.sizes)))
        return f"{s.input_size} ⊕ {sizes}, units={','.join(s.units)}, shortcut={s.shortcut}, input_to={s.input_to}"


@constant_when_compiled
def log_plain_loop(reason: str) -> None:
    """Say once why a sequence is not on a fast backend."""
    _log_once(reason)


@cache
def _log_once(reason: str) -> None:
    logger.info("⊕ is called step by step: %s", reason)
