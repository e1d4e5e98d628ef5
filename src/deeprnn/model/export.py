"""Trained recurrences for other runtimes: torch.export and ONNX, with batch and time left open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.errors import UserError, need
from deeprnn.files import replacing
from deeprnn.model.layers import DeepRNN
from deeprnn.model.sequence_layer import SequenceLayer
from deeprnn.model.sequence_model import SequenceModel

Recurrent = SequenceModel | DeepRNN | SequenceLayer


class Sequence(nn.Module):
    """A recurrence as a function of plain tensors: (x, h0) -> (output, h), h as one tensor a state."""

    recurrent: Any

    def __init__(self, recurrent: Recurrent) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, *h0: Tensor) -> tuple[Tensor, ...]:
        return _called(self.recurrent, self.recurrent, x, h0)


class Step(Sequence):
    """One step of the same, for streaming."""

    def forward(self, x: Tensor, *h0: Tensor) -> tuple[Tensor, ...]:
        return _called(self.recurrent, self.recurrent.step, x, h0)


def _called(recurrent: nn.Module, call: Any, x: Tensor, h: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output and states; layers take and give one state as it is, several as a tuple, and models always a tuple."""
    y, state = call(x, h[0] if len(h) == 1 and not isinstance(recurrent, SequenceModel) else h)
    return (y, state) if isinstance(state, Tensor) else (y, *state)


class Conditionals(nn.Module):
    """A sequence of frames under a NADE: (x, frame, h0) -> (logits of each note given those below it, h).

    log p(frame) is the sum of y · logit − log(1 + exp(logit)) over notes y.
    """

    def __init__(self, recurrent: SequenceModel) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, frame: Tensor, *h0: Tensor) -> tuple[Tensor, ...]:
        out, state = self.recurrent(x, tuple(h0))
        return (self.recurrent.predict.conditional_logits(out, frame), *state)  # type: ignore[union-attr]


class Draw(nn.Module):
    """One step of a NADE for streaming: (x, uniform, h0) -> (a frame drawn by uniform numbers (B, O), h)."""

    def __init__(self, recurrent: SequenceModel) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor, uniform: Tensor, *h0: Tensor) -> tuple[Tensor, ...]:
        out, state = self.recurrent.step(x, tuple(h0))
        return (self.recurrent.predict.draw(out, uniform)[0], *state)  # type: ignore[union-attr]


def second_input(module: Recurrent, step: bool) -> str:
    """What a NADE takes beside x: its notes are no function of x and the state alone. Empty for other outputs."""
    if not isinstance(module, SequenceModel) or module.spec.output != "nade":
        return ""
    return "uniform" if step else "frame"


def _example(module: Recurrent, step: bool) -> tuple[Tensor, ...]:
    """Inputs of sizes that do not look like constants (neither 0 nor 1 nor equal to each other)."""
    T, B = 5, 3
    if not isinstance(module, Recurrent):
        raise UserError(f"a layer or a SequenceModel of deeprnn can be exported, got {type(module).__name__}")
    weight = next(module.parameters())
    kw = {"dtype": weight.dtype, "device": weight.device}
    if not isinstance(module, SequenceModel):
        if step and module.bidirectional:
            raise UserError(
                "a bidirectional layer cannot be exported step by step: it needs the whole sequence"
            )
        lead = (B,) if step else (B, T) if module.batch_first else (T, B)
        x = torch.zeros(*lead, module.input_size, **kw)
        rows = module.num_layers * (2 if module.bidirectional else 1)
        sizes = (module.hidden_size,) if isinstance(module, DeepRNN) else module.state_sizes
        return x, *(torch.zeros(rows, B, n, **kw) for n in sizes)
    lead = (B,) if step else (T, B)
    if module.spec.symbols:
        x = torch.zeros(lead, dtype=torch.int64, device=weight.device)
    else:
        x = torch.zeros(*lead, module.spec.input_size, **kw)
    second = [torch.zeros(*lead, module.spec.output_size, **kw)] if second_input(module, step) else []
    return x, *second, *module.initial_state(B)


def _dynamic(module: Recurrent, step: bool, states: int) -> dict:
    batch = torch.export.Dim("batch", min=1)
    time = torch.export.Dim("time", min=2)
    is_layer = not isinstance(module, SequenceModel)
    batch_first = is_layer and module.batch_first
    x = {0: batch} if step else {0: batch, 1: time} if batch_first else {0: time, 1: batch}
    h = {1: batch} if is_layer else {0: batch}
    second = second_input(module, step)
    return {"x": x, **({second: x} if second else {}), "h0": (h,) * states}


def export_program(module: Recurrent, step: bool = False) -> torch.export.ExportedProgram:
    """`torch.export` with dynamic batch and, for the sequence form, dynamic time."""
    example = _example(module, step)
    second = second_input(module, step)
    shapes = _dynamic(module, step, len(example) - 1 - bool(second))
    training = module.training
    try:
        kind = (Draw if step else Conditionals) if second else (Step if step else Sequence)
        wrapped = kind(module).eval()  # type: ignore[arg-type]
        return torch.export.export(wrapped, example, dynamic_shapes=shapes)
    finally:
        module.train(training)


def export_onnx(module: Recurrent, path: str | Path, *, step: bool = False) -> Path:
    """Write an ONNX file: inputs x, h0_0 .. and outputs y, h_0 .., batch and time dynamic.

    The sequence form has one Scan per level; `step=True` writes a single step for streaming, to be
    called with the state it returned. A model with a NADE has a second input: the sequence form the frames whose
    notes' logits are y, the step uniform numbers by which it draws the frame y. Needs the extra `export`.
    """
    need("onnxscript", extra="export")
    second = second_input(module, step)
    states = len(_example(module, step)) - 1 - bool(second)
    with torch.no_grad():
        program = torch.onnx.export(
            export_program(module, step),
            input_names=["x", *([second] if second else []), *(f"h0_{i}" for i in range(states))],
            output_names=["y", *(f"h_{i}" for i in range(states))],
            verbose=False,
        )
    if program is None:
        raise UserError("torch.onnx wrote no program for this model")
    path = Path(path)
    with replacing(path) as temporary:
        program.save(str(temporary))
    return path
