"""Dropout with one mask a sequence: on the input, between levels and in the recurrence, of ⊕ and of gated cells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import deeprnn
from deeprnn.errors import UserError
from deeprnn.model.models import assemble, build
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import Dropout

T, B, I, H = 6, 3, 5, 4
DROP = Dropout(input=0.4, state=0.4, output=0.4, levels=0.4, per_sequence=True)
CELLS = ("", "lstm", "gru", "rhn", "coupled-lstm", "mogrifier")


def model_of(cell: str, dropout: Dropout = DROP, **options) -> SequenceModel:
    spec = assemble(input_size=I, output_size=I, hidden_sizes=(H, H), cell=cell, dropout=dropout, **options)
    return build(spec, seed=3, dtype=torch.float64)


def masks_of(model: SequenceModel, seed: int = 0) -> dict[str, Tensor]:
    return model.draw_masks(T, B, torch.Generator().manual_seed(seed))


def lstm_by_hand(x: Tensor, named: dict[str, Tensor], level: int, mask: Tensor) -> Tensor:
    """An LSTM in which the same units of h are missing at every step."""
    own = {n.removeprefix(f"levels.{level}.cell."): p for n, p in named.items()}
    h = c = x.new_zeros(B, H)
    out = []
    for x_t in x:
        a = F.linear(x_t, own["weight_ih"], own["bias_ih"])
        a = a + F.linear(h * mask, own["weight_hh"], own["bias_hh"])
        i, f, g, o = a.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out)


def rnn_by_hand(x: Tensor, named: dict[str, Tensor], level: int, mask: Tensor) -> Tensor:
    own = {n.removeprefix(f"levels.{level}."): p for n, p in named.items()}
    h, out = x.new_zeros(B, H), []
    for x_t in x:
        h = torch.sigmoid(F.linear(x_t, own["U1"], own["b1"]) + F.linear(h * mask, own["W1"]))
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize("cell", ["", "lstm"])
def test_a_stack_with_every_mask_equals_a_loop_by_hand_and_so_do_its_gradients(cell):
    model = model_of(cell)
    x, masks = torch.randn(T, B, I, dtype=torch.float64), masks_of(model)
    named = dict(model.named_parameters())
    state = [(masks[f"{k}.draw0"] >= 0.4).double() / 0.6 if cell else masks[f"{k}.state"] for k in range(2)]
    level = lstm_by_hand if cell else rnn_by_hand
    first = level(x * masks["input"], named, 0, state[0])
    second = level(first * masks["below1"], named, 1, state[1])
    want = F.linear(second * masks["out.h"], named["predict.V1"], named["predict.b1"])
    found, _ = model(x, None, None, masks)
    torch.testing.assert_close(found, want)
    weight = torch.randn_like(want)
    by_hand = torch.autograd.grad((want * weight).sum(), list(named.values()))
    own = torch.autograd.grad((found * weight).sum(), list(named.values()))
    for name, a, b in zip(named, own, by_hand, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("cell", CELLS)
def test_a_mask_is_the_same_at_every_step_and_another_for_each_sequence(cell):
    model = model_of(cell)
    masks = masks_of(model)
    assert {k: tuple(m.shape) for k, m in masks.items() if not k[0].isdigit()} == {
        "input": (B, I), "below1": (B, H), "out.h": (B, H),
    }  # fmt: skip
    recurrent = [m for k, m in masks.items() if k[0].isdigit()]
    assert len(recurrent) == 2
    assert all(m.shape == (B, H) for m in recurrent)
    assert len({tuple(row.tolist()) for m in masks.values() for row in m}) > B
    # an input unit that is dropped has no influence at any step, and one that is kept has some at every step
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    only = {k: torch.ones_like(m) if k in ("below1", "out.h") else m for k, m in masks.items()}
    y, _ = model(x, None, None, only)
    (slope,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), x)
    dropped = masks["input"] == 0
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(slope != 0, ~dropped.expand(T, B, I))
    # two lanes with the same song differ
    one = torch.randn(T, 1, I, dtype=torch.float64).expand(T, B, I)
    y, _ = model(one, None, None, masks)
    assert not torch.equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize("cell", ["", "lstm", "rhn"])
def test_evaluation_has_none(cell):
    model, plain = model_of(cell), model_of(cell, Dropout())
    x = torch.randn(T, B, I, dtype=torch.float64)
    model.eval()
    assert torch.equal(model(x)[0], plain(x)[0])
    assert not model.draw_shapes(T, B)


def test_masks_of_every_step_where_none_is_asked_for_a_sequence():
    model = model_of("gru", Dropout(input=0.5, levels=0.5))
    masks = masks_of(model)
    assert {k: tuple(m.shape) for k, m in masks.items()} == {"input": (T, B, I), "below1": (T, B, H)}


class Own(deeprnn.Cell):
    """A cell that knows nothing of dropout."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W = torch.nn.Linear(input_size + hidden_size, hidden_size)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.W(torch.cat([x, h], -1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": Dropout(levels=0.1), "hidden_sizes": (4,)}, r"dropout.levels=0.1 acts between levels"),
        ({"dropout": Dropout(intermediate=0.1), "cell": "lstm"}, r"not inside the cell lstm: use dropout.state"),
        (
            {"dropout": Dropout(state=0.1), "cell": "lstm", "cell_options": ["recurrent_dropout=0.2"]},
            r"dropout.state=0.1 and the cell's option recurrent_dropout",
        ),
        ({"dropout": Dropout(symbols=0.1), "output": "categorical"}, r"dropout.symbols=0.1 .*set model.embedding"),
        ({"dropout": Dropout(state=0.1), "cell": f"{__name__}:Own"}, r"Own has no attribute recurrent_dropout"),
    ],
)  # fmt: skip
def test_what_has_nothing_to_act_on_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(assemble(**{"input_size": I, "output_size": I, "hidden_sizes": (H, H), **options}))
