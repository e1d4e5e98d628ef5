"""▷ as a NADE: notes of one frame that depend on each other, given the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.backends.transformations import no_modes_or_transforms
from deeprnn.errors import UserError, did_you_mean
from deeprnn.model.equations import nade_logits
from deeprnn.model.nade_loss import nade_nats
from deeprnn.model.operator_specs import PredictSettings, PredictSpec
from deeprnn.model.operators import Masks
from deeprnn.model.overrides import formula
from deeprnn.model.predict import Predict
from deeprnn.model.spec_fields import positive

COLD = 1e-9
"""temperatures below are 0: dividing by them leaves the range of floats"""


@formula("forward", "last_layer", "_phi", "log_prob", "nats", "conditional_logits", "biases", "draw")
class NadePredict(Predict):
    """▷ as a neural autoregressive distribution estimator: p(y | h) = Π_i p(y_i | y_<i, h), exact.

    p(y_i = 1 | y_<i, h) = σ(b_i + V_i σ(c + Σ_{j<i} W_j y_j)), notes from the lowest to the highest
    (`equations.nade_logits`). Both biases are the output MLP's: b = V_L o + b_L and c = C o + c, where o is its last
    hidden layer, or h where it has none. Calling it gives (…, O + D), b and c side by side, which `nats`,
    `conditional_logits` and `draw` take; `log_prob` and `sample` begin with h.
    """

    C: Tensor
    c: Tensor
    W: Tensor
    V: Tensor

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        hidden_size: int = 200,
        device: Any = None,
        dtype: torch.dtype | None = None,
        initialise: bool = True,
        **settings: Unpack[PredictSettings],
    ) -> None:
        _check_settings(settings)
        positive("NadePredict", hidden_size=hidden_size)
        super().__init__(input_size, output_size, device=device, dtype=dtype, initialise=False, **settings)
        self.spec = spec = replace(self.spec, nade_size=hidden_size)
        kw = {"device": device, "dtype": dtype}
        self._matrix("C", hidden_size, (spec.input_size, *spec.sizes)[-1], "output", **kw)
        if spec.bias:
            self._vector("c", hidden_size, "bias:sigmoid", **kw)
        self._matrix("W", output_size, hidden_size, "input", **kw)
        self._matrix("V", output_size, hidden_size, "output", **kw)
        if initialise:
            self.reset_parameters()

    @classmethod
    def from_spec(cls, spec: PredictSpec, device=None, dtype=None, initialise: bool = True) -> NadePredict:
        """The operator that `spec` describes."""
        settings = {n: getattr(spec, n) for n in spec.__dataclass_fields__ if n != "nade_size"}
        return cls(hidden_size=spec.nade_size, device=device, dtype=dtype, initialise=initialise, **settings)

    def last_layer(self, h: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the layer of both biases multiplies, its matrix (O + D, ·) and its bias.

        A shortcut from h reaches b alone.
        """
        y, weight, bias = super().last_layer(h, masks)
        C = F.pad(self.C, (0, weight.shape[-1] - self.C.shape[-1])) if self.spec.shortcut else self.C
        return y, torch.cat([weight, C]), None if bias is None else torch.cat([bias, self.c])

    def biases(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """b (…, O) and c (…, D) of what `forward` gave."""
        O, D = self.spec.output_size, self.spec.nade_size
        if out.shape[-1] != O + D:
            raise UserError(
                f"NadePredict: {O} + {D} biases are needed in the last place, got {tuple(out.shape)}"
            )
        return out[..., :O], out[..., O:]

    def nats(self, out: Tensor, y: Tensor) -> Tensor:
        """-log p(y) of frames y (…, O), from what `forward` gave: (…)."""
        b, c = self.biases(out)
        return nade_nats(y.expand(b.shape), b, c, self.W, self.V)

    def conditional_logits(self, out: Tensor, y: Tensor) -> Tensor:
        """The logit of each p(y_i | y_<i, h) along frames y (…, O): the chain's, not those of single notes."""
        b, c = self.biases(out)
        return nade_logits(y.to(b.dtype), b, c, self.W, self.V)

    def log_prob(self, h: Tensor, y: Tensor) -> Tensor:
        """log p(y | h) in nats, summed over notes: h (…, H), y (…, O) of zeros and ones; (…).

        Other values of y are refused on a CPU; not on a GPU, nor while traced, compiled or transformed (vmap).
        """
        self._check_frames(h, y)
        return -self.nats(self(h), y)

    @torch.no_grad()
    def sample(
        self, h: Tensor, generator: torch.Generator | None = None, *, temperature: float = 1.0
    ) -> Tensor:
        """Frames y (…, O) from p(y | h), note by note: exact ancestral sampling.

        At a temperature τ each conditional's logit is divided by τ; 0 takes the likelier value of every note.
        """
        out = self(h)
        device = out.device if generator is None else generator.device
        u = torch.rand(*out.shape[:-1], self.spec.output_size, generator=generator, device=device)
        return self.draw(out, u.to(out.device), temperature)[0]

    @torch.no_grad()
    def draw(self, out: Tensor, u: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Frames and their notes' conditional probabilities, by uniform numbers u (…, O) in the place of chance.

        While it is traced, compiled or transformed it goes note by note, else from sounding note to sounding note.
        """
        if not 0 <= temperature < float("inf"):
            raise UserError(f"temperature={temperature} must be 0 or above; 1 is the model's own")
        b, a = self.biases(out)
        quick = out.numel() and no_modes_or_transforms()
        return (self._draw_by_chords if quick else self._draw_by_notes)(b, a, u, temperature)

    def _draw_by_notes(self, b: Tensor, a: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Draw notes in as many steps as there are notes, whatever the values: for tracing and transformations."""
        notes, chances = [], []
        for i in range(self.spec.output_size):
            p = _chances(b[..., i] + torch.sigmoid(a) @ self.V[i], temperature)
            note = (u[..., i] < p).to(b.dtype)
            a = a + note.unsqueeze(-1) * self.W[i]
            notes.append(note)
            chances.append(p)
        return torch.stack(notes, -1), torch.stack(chances, -1)

    def _draw_by_chords(self, b: Tensor, a: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Draw notes in as many steps as notes sound: between two of them the hidden layer stays as it is.

        All notes above the last one that sounded are asked at once, the lowest that sounds is taken, and the rest are
        asked again, until none does in any frame.
        """
        shape, O = b.shape, self.spec.output_size
        b, a, u = b.reshape(-1, O), a.reshape(-1, a.shape[-1]), u.expand(shape).reshape(-1, O)
        frames, chances = torch.zeros_like(b), torch.zeros_like(b)
        note, V = torch.arange(O, device=b.device), self.V.t()
        undecided = torch.ones_like(b, dtype=torch.bool)
        while True:
            p = _chances(torch.addmm(b, torch.sigmoid(a), V), temperature)
            chances = torch.where(undecided, p, chances)
            sounds, first = ((u < p) & undecided).max(1, keepdim=True)
            if not sounds.any():
                return frames.reshape(shape), chances.reshape(shape)
            on = sounds.to(b.dtype)
            frames.scatter_add_(1, first, on)
            a = torch.addcmul(a, on, self.W[first.squeeze(1)])
            undecided = (note > first) & sounds

    def _check_frames(self, h: Tensor, y: Tensor) -> None:
        want = (*h.shape[:-1], self.spec.output_size)
        if y.shape != want:
            raise UserError(f"NadePredict: y must be frames of shape {want}, got {tuple(y.shape)}")
        # Values are not there while traced, compiled or transformed; on a GPU to look would be to wait.
        if y.dtype != torch.bool and y.device.type == "cpu" and no_modes_or_transforms():
            wrong = (y != 0) & (y != 1)
            if wrong.any():
                raise UserError(f"NadePredict: y must be zeros and ones, got {y[wrong][0].item():g}")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nade={self.spec.nade_size}"


def _chances(logits: Tensor, temperature: float) -> Tensor:
    if temperature < COLD:
        return (logits > 0).to(logits.dtype)
    return torch.sigmoid(logits if temperature == 1 else logits / temperature)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """An unknown keyword is an error that names this class's own."""
    accepted = ("hidden_size", *PredictSettings.__annotations__, "device", "dtype", "initialise")
    for name in settings:
        if name not in PredictSettings.__annotations__:
            hint = did_you_mean(name, accepted)
            raise UserError(f"NadePredict: unknown argument {name!r}{hint}: known are {', '.join(accepted)}")
