"""deeprnn.Recurrent: a user's cell as a layer, honoured whatever it does."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import deeprnn
from deeprnn.cells.library import GRU, LSTM, LeakyRNN

T, B, I, H = 5, 3, 4, 6


class Paced(deeprnn.Cell):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.U = nn.Linear(input_size, hidden_size)
        self.W = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pace = nn.Parameter(torch.zeros(hidden_size))

    def step(self, x, h):
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())


class Ranked(Paced):
    """A sort of units inside, which no description has."""

    def step(self, x, h):
        return torch.tanh((self.U(x) + self.W(h)).sort(-1).values)


def loop(layer, x, h=None):
    cell = layer.cells[0]
    h = torch.zeros(x.shape[1], H) if h is None else h[0]
    steps = []
    for x_t in x:
        h = cell(x_t, h)
        steps.append(h)
    return torch.stack(steps)


def test_a_layer_has_the_shapes_of_torch():
    layer = deeprnn.Recurrent(Paced(I, H), num_layers=2, bidirectional=True, batch_first=True)
    y, h = layer(torch.randn(B, T, I))
    assert y.shape == (B, T, 2 * H)
    assert h.shape == (4, B, H)
    assert layer(torch.randn(T, I))[0].shape == (T, 2 * H)
    two = deeprnn.Recurrent(LSTM(I, H))
    y, (h, c) = two(torch.randn(T, B, I))
    assert torch.equal(y[-1], h[0])
    assert c.shape == (1, B, H)


def test_explain_names_the_stages_the_products_and_the_backend():
    text = deeprnn.Recurrent(Paced(I, H)).explain()
    for part in (
        "v1 (6) = sigmoid(pace)",
        "one product",
        "stage 1: 6 units",
        "travels",
        "for backward",
        "backend: ",
    ):
        assert part in text


def test_a_sort_runs_by_the_plain_loop_and_says_so(caplog):
    torch.manual_seed(0)
    layer, x = deeprnn.Recurrent(Ranked(I, H)), torch.randn(T, B, I)
    with caplog.at_level(logging.WARNING, logger="deeprnn"):
        y = layer(x)[0]
        layer(x)
    torch.testing.assert_close(y, loop(layer, x))
    lines = [r.getMessage() for r in caplog.records if "plain loop" in r.getMessage()]
    assert len(lines) == 1
    assert "Ranked" in lines[0]
    assert "sort" in lines[0]
    assert "sort" in layer.explain()
    with pytest.raises(deeprnn.UserError, match="plain loop"):
        deeprnn.Recurrent(layer.cells[0], backend="cpu")(x)


def test_a_part_compiled_by_torch_jit_is_called():
    torch.manual_seed(0)
    cell, x = Paced(I, H), torch.randn(T, B, I)
    expected = loop(deeprnn.Recurrent(cell), x)
    slope = torch.autograd.grad(expected.sum(), cell.pace)[0]
    cell.W = torch.jit.script(cell.W)
    layer = deeprnn.Recurrent(cell)
    y = layer(x)[0]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), cell.pace)[0], slope)
    assert "W is compiled by torch.jit" in layer.explain()


def test_normalising_the_input_alone_is_described():
    class InputNormed(Paced):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            self.norm = nn.LayerNorm(hidden_size)

        def step(self, x, h):
            return torch.tanh(self.norm(self.U(x)) + self.W(h))

    layer = deeprnn.Recurrent(InputNormed(I, H))
    assert "stage 1" in layer.explain()
    x = torch.randn(T, B, I)
    torch.testing.assert_close(layer(x)[0], loop(layer, x))


def test_hooks_act(caplog):
    torch.manual_seed(0)
    layer, x = deeprnn.Recurrent(Paced(I, H)), torch.randn(T, B, I)
    plain = layer(x)[0]
    seen = []
    handle = layer.cells[0].W.register_forward_hook(lambda module, args, out: seen.append(1) or out + 1.0)
    hooked = layer(x)[0]
    assert len(seen) >= T
    torch.testing.assert_close(hooked, loop(layer, x))
    assert not torch.allclose(hooked, plain)
    handle.remove()
    torch.testing.assert_close(layer(x)[0], plain)


def test_overrides_act():
    class Halved(Paced):
        def forward(self, x, h):
            return 0.5 * self.step(x, h)

    layer, x = deeprnn.Recurrent(Halved(I, H)), torch.randn(T, B, I)
    torch.testing.assert_close(layer(x)[0], loop(layer, x))
    layer = deeprnn.Recurrent(Paced(I, H))
    layer.cells[0].step = lambda x, h: h + 1  # on the object itself
    assert torch.equal(layer(x)[0][-1], torch.full((B, H), float(T)))


def test_changes_of_settings_and_modules_are_seen():
    cell = LeakyRNN(I, H, alpha=0.5)
    layer, x = deeprnn.Recurrent(cell), torch.randn(T, B, I)
    first = layer(x)[0]
    cell.alpha = 0.1
    assert not torch.allclose(layer(x)[0], first)
    torch.testing.assert_close(layer(x)[0], loop(layer, x))


def test_weight_masks_as_parametrizations():
    """Sparsity and Dale's principle (a unit excites or inhibits) are functions of weights: they leave the loop."""

    class Dale(nn.Module):
        def __init__(self, sign, mask):
            super().__init__()
            self.register_buffer("sign", sign)
            self.register_buffer("mask", mask)

        def forward(self, weight):
            return weight.abs() * self.sign * self.mask

    torch.manual_seed(0)
    cell, x = LeakyRNN(I, H), torch.randn(T, B, I)
    sign, mask = torch.tensor([1.0] * 4 + [-1.0] * 2), (torch.rand(H, H) < 0.5).float()
    parametrize.register_parametrization(cell, "weight_hh", Dale(sign, mask))
    layer = deeprnn.Recurrent(cell)
    assert "stage 1" in layer.explain()
    y = layer(x)[0]
    torch.testing.assert_close(y, loop(layer, x))
    y.sum().backward()
    gradient = cell.parametrizations.weight_hh.original.grad
    assert not gradient[mask == 0].any()
    assert gradient[mask == 1].any()


@pytest.mark.parametrize("option", ["zoneout", "recurrent_dropout"])
def test_zoneout_and_recurrent_dropout_act_in_training_alone(option):
    torch.manual_seed(0)
    layer, x = deeprnn.Recurrent(GRU(I, H, **{option: 0.5})), torch.randn(T, B, I)
    assert "stage 1" in layer.explain()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    plain = deeprnn.Recurrent(GRU(I, H)).eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(plain(x)[0], layer(x)[0]) == (
        option == "recurrent_dropout"
    )  # zoneout: the expectation


def test_recurrent_dropout_is_one_mask_a_sequence():
    """With identity weights and no input, a unit that is left out stays out for good."""
    cell = deeprnn.cells.library.RNN(I, H, unit="identity", recurrent_dropout=0.5)
    with torch.no_grad():
        for p in cell.parameters():
            p.zero_()
        cell.weight_hh.copy_(torch.eye(H))
    torch.manual_seed(3)
    y = deeprnn.Recurrent(cell)(torch.zeros(4, 50, I), torch.ones(1, 50, H))[0]
    assert set(y[0].unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(y[3], y[0] * 8)


def test_noise_of_a_leaky_rnn_is_fresh_at_every_step():
    torch.manual_seed(0)
    layer = deeprnn.Recurrent(LeakyRNN(I, H, alpha=1.0, noise=0.1, unit="identity"))
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    y = layer(torch.zeros(400, B, I))[0]
    assert abs(y.std().item() - 0.1 * 2**0.5) < 0.01
    assert abs((y[1:] * y[:-1]).mean().item()) < 1e-3
    assert "anew at every step" in layer.explain()


def test_a_cells_own_output_and_first_state(caplog):
    class Read(Paced):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            self.first = nn.Parameter(torch.ones(hidden_size))
            self.V = nn.Linear(hidden_size, 2)

        def initial_state(self, batch):
            return (self.first.expand(batch, -1),)

        def output(self, h):
            return self.V(h)

    layer, x = deeprnn.Recurrent(Read(I, H)), torch.randn(T, B, I)
    y, h = layer(x)
    cell = layer.cells[0]
    want = loop(layer, x, cell.initial_state(B)[0][None])
    torch.testing.assert_close(y, cell.V(want))
    torch.testing.assert_close(h[0], want[-1])
    marks = torch.zeros(T, B, dtype=torch.bool)
    marks[2] = True
    assert "with reset marks: by the plain loop" in layer.explain()
    with caplog.at_level(logging.WARNING, logger="deeprnn"):
        torch.testing.assert_close(layer(x, reset=marks)[0][2:], layer(x[2:])[0])
    assert "initial_state" in caplog.text


class Reservoir(deeprnn.Cell):
    """An echo state network: nothing in it is learned."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.input_size, self.state_sizes = input_size, (hidden_size,)
        self.register_buffer("U", torch.randn(hidden_size, input_size))
        self.register_buffer("W", 0.3 * torch.randn(hidden_size, hidden_size))

    def step(self, x, h):
        return torch.tanh(x @ self.U.t() + h @ self.W.t())


def test_a_cell_of_buffers_alone_has_their_type():
    layer = deeprnn.Recurrent(Reservoir(I, H), num_layers=2).double()
    x = torch.randn(T, B, I, dtype=torch.float64)
    assert "plain loop" not in layer.explain()
    y, h = layer(x)
    assert y.dtype == h.dtype == torch.float64
    below = loop(layer, x, torch.zeros(1, B, H, dtype=torch.float64))
    torch.testing.assert_close(h[0], below[-1])
    torch.testing.assert_close(layer.step(x[0])[0], y[0])
    assert deeprnn.Recurrent(Reservoir(I, H)).to("meta")(x.float().to("meta"))[0].device.type == "meta"


LAYERS = {
    "own": lambda: deeprnn.Recurrent(Paced(I, H), bidirectional=True),
    "GRU": lambda: deeprnn.GRU(I, H, 2),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_nothing_behind_the_end_of_a_sequence_matters(make):
    """Not even NaN: it reaches neither outputs nor gradients."""
    layer, x, lengths = make(), torch.randn(T, B, I), [5, 2, 3]
    found = []
    for padding in (0.0, float("nan")):
        for b, n in enumerate(lengths):
            x[n:, b] = padding
        y, h, inside = layer(x, lengths=lengths, return_all_states=True)
        gradients = torch.autograd.grad(y.square().sum() + h.sum(), list(layer.parameters()))
        found.append([y, h, *inside[0], *gradients])
    torch.testing.assert_close(found[1], found[0])
    assert not found[1][0][4, 1:].any()


def test_symbols_behind_the_end_of_a_sequence_need_not_be_any():
    class Embedded(Paced):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            self.U = nn.Embedding(input_size, hidden_size)

    layer, x = deeprnn.Recurrent(Embedded(I, H)), torch.tensor([[0, 1], [2, -100]])
    assert layer(x, lengths=[2, 1])[0].shape == (2, 2, H)


def test_lists_and_functions_of_cells():
    layer = deeprnn.Recurrent([Paced(I, H), GRU(H, H)])
    assert layer.num_layers == 2
    assert deeprnn.Recurrent(lambda n: GRU(n, H), 3, input_size=I).cells[2].input_size == H
    with pytest.raises(deeprnn.UserError, match="takes 4 inputs, but gets 6"):
        deeprnn.Recurrent([Paced(I, H), GRU(I, H)])
    with pytest.raises(deeprnn.UserError, match="states of the same sizes"):
        deeprnn.Recurrent([Paced(I, H), LSTM(H, H)])
    with pytest.raises(deeprnn.UserError, match=r"must be a deeprnn\.Cell"):
        deeprnn.Recurrent(3)


def test_copies_are_their_own():
    layer, x = deeprnn.Recurrent(Paced(I, H), num_layers=2), torch.randn(T, B, I)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x)[0], layer(x)[0])
    nn.init.zeros_(again.cells[0].U.weight)
    assert not torch.equal(again(x)[0], layer(x)[0])


def test_gradients_reach_everything_by_either_way():
    for kind in (Paced, Ranked):
        layer, x = deeprnn.Recurrent(kind(I, H)), torch.randn(T, B, I, requires_grad=True)
        h0 = torch.randn(1, B, H, requires_grad=True)
        y, h = layer(x, h0)
        found = torch.autograd.grad(y.sin().sum() + h.sum(), [x, h0, layer.cells[0].W.weight])
        want = loop(layer, x, h0)
        truth = torch.autograd.grad(want.sin().sum() + want[-1].sum(), [x, h0, layer.cells[0].W.weight])
        torch.testing.assert_close(found, truth)


def test_sizes_of_many_states_are_found_in_few_calls():
    calls = []

    class Four(deeprnn.Cell):
        def __init__(self):
            super().__init__()
            self.U = nn.Linear(I, 12)
            self.others = nn.ModuleList(nn.Linear(k, k + 1) for k in range(20, 30))

        def step(self, x, a, b, c, d):
            calls.append(x)
            return torch.tanh(self.U(x) + a), a + b, b + c, c + d

    assert Four().sizes().states == (12, 12, 12, 12)
    assert len(calls) < 1000
