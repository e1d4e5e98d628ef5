"""What a model gave, turned into nats: the one place that knows which loss belongs to which output."""

from __future__ import annotations

from torch import Tensor, nn

from deeprnn.model import losses
from deeprnn.model.nade import NadePredict
from deeprnn.model.operators import Masks
from deeprnn.model.sequence_model import SequenceModel, State


class StepNats(nn.Module):
    """A model as a function from inputs and targets to nats, for `torch.func.functional_call`."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        masks: Masks | None = None,
    ) -> tuple[Tensor, State]:
        """Nats of every step (T, B), and the state to carry on."""
        out, new = self.model(x, state, reset, masks)
        return nats(self.model, out, y), new


def nats(model: SequenceModel, out: Tensor, y: Tensor) -> Tensor:
    """Nats of each step (..., T, B) at the targets y, from what the model gave."""
    if isinstance(model.predict, NadePredict):
        return model.predict.nats(out, y)
    return losses.nats(model.spec.output, out, y)


def note_logits(model: SequenceModel, out: Tensor, y: Tensor) -> Tensor:
    """The logit of each note of frames y (..., O); of a NADE given the notes below it, as its chain has them."""
    return model.predict.conditional_logits(out, y) if isinstance(model.predict, NadePredict) else out
