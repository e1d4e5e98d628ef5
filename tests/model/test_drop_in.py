"""deeprnn.GRU and deeprnn.LSTM beside torch.nn's: the same weights, outputs, gradients, shapes and refusals."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import deeprnn

T, B, I, H = 5, 3, 4, 6
DOUBLE = {"dtype": torch.float64}
PAIRS = {"GRU": (nn.GRU, deeprnn.GRU), "LSTM": (nn.LSTM, deeprnn.LSTM)}
SETTINGS = [
    {"num_layers": layers, "bias": bias, "batch_first": first, "bidirectional": both}
    for layers, bias, first, both in itertools.product((1, 2), (True, False), (False, True), (False, True))
]
CASES = [(kind, s) for kind in PAIRS for s in SETTINGS] + [
    ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 2}),
    ("LSTM", {"num_layers": 1, "proj_size": 5, "bias": False}),
]


def name(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())


ALL = pytest.mark.parametrize(("kind", "settings"), CASES, ids=name)
BOTH = pytest.mark.parametrize("kind", PAIRS)


def draw(*shape: int, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE).requires_grad_()


def pair(kind, **settings):
    theirs, mine = PAIRS[kind]
    torch.manual_seed(3)
    a, b = theirs(I, H, **DOUBLE, **settings), mine(I, H, **DOUBLE, **settings)
    b.load_state_dict(a.state_dict())
    return a, b


def states(layer, kind, batch=B):
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (layer.proj_size or H, H)[: 1 + (kind == "LSTM")]
    lead = (rows,) if batch is None else (rows, batch)
    return [draw(*lead, n, seed=7 + k) for k, n in enumerate(sizes)]


def given(hx):
    return hx[0] if len(hx) == 1 else tuple(hx)


def flat(state):
    return list(state) if isinstance(state, tuple) else [state]


def compare(theirs, mine, x, hx) -> None:
    """Equal outputs, last states and gradients of everything, from uneven gradients of all results."""
    results = []
    for net in (theirs, mine):
        leaves = [x.data if isinstance(x, PackedSequence) else x, *hx]
        output, last = net(x, given(hx) if hx else None)
        data = output.data if isinstance(output, PackedSequence) else output
        loss = (data * torch.linspace(-1, 1, data.numel(), **DOUBLE).view_as(data)).sum()
        loss = loss + sum(h.square().sum() for h in flat(last))
        grads = torch.autograd.grad(loss, (*leaves, *net.parameters()))
        results.append((output, flat(last), grads))
    (y, last, grads), (y2, last2, grads2) = results
    assert type(y) is type(y2)
    if isinstance(y, PackedSequence):
        assert torch.equal(y.batch_sizes, y2.batch_sizes)
        y, y2 = (pad_packed_sequence(o)[0] for o in (y, y2))
    for a, b in zip((y, *last, *grads), (y2, *last2, *grads2), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-11)


@ALL
def test_batches(kind, settings):
    theirs, mine = pair(kind, **settings)
    x = draw(B, T, I) if settings.get("batch_first") else draw(T, B, I)
    compare(theirs, mine, x, states(mine, kind))
    compare(theirs, mine, x, [])


@ALL
def test_unbatched(kind, settings):
    theirs, mine = pair(kind, **settings)
    compare(theirs, mine, draw(T, I), states(mine, kind, None))


@ALL
def test_packed_sequences(kind, settings):
    theirs, mine = pair(kind, **settings)
    for ordered in (True, False):
        lengths = (5, 3, 1) if ordered else (2, 5, 3)
        x = pack_sequence([draw(n, I, seed=n) for n in lengths], enforce_sorted=ordered)
        x = x._replace(data=x.data.detach().requires_grad_())
        compare(theirs, mine, x, states(mine, kind))


@ALL
def test_names_shapes_and_order_of_parameters(kind, settings):
    theirs, mine = pair(kind, **settings)
    assert [(n, p.shape) for n, p in mine.named_parameters()] == [
        (n, p.shape) for n, p in theirs.named_parameters()
    ]
    assert [len(w) for w in mine.all_weights] == [len(w) for w in theirs.all_weights]
    theirs.load_state_dict(mine.state_dict())


@BOTH
def test_the_same_seed_gives_the_same_weights(kind):
    weights = []
    for cls in PAIRS[kind]:
        torch.manual_seed(5)
        weights.append(cls(I, H, 2, bidirectional=True).state_dict())
    for n, w in weights[0].items():
        assert torch.equal(weights[1][n], w)


@BOTH
def test_arguments_have_the_same_names_and_order(kind):
    mine = PAIRS[kind][1]
    own = list(inspect.signature(mine).parameters)
    first = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    assert own[:7] == first
    assert isinstance(mine(I, H), nn.RNNBase)
    for extra in ("device", "dtype", "proj_size"):
        assert extra in own


def test_positional_arguments_mean_the_same():
    wide = (I, H, 2, True, True, 0.0, True)
    assert deeprnn.GRU(*wide).bidirectional is nn.GRU(*wide).bidirectional is True
    assert deeprnn.LSTM(*wide, 2).proj_size == nn.LSTM(*wide, 2).proj_size == 2


@BOTH
def test_dropout_between_levels_in_training_alone(kind):
    theirs, mine = pair(kind, num_layers=2, dropout=0.5)
    x = draw(T, B, I)
    outputs = []
    for net in (theirs, mine):
        torch.manual_seed(9)
        outputs.append(net(x)[0])
    torch.testing.assert_close(outputs[1], outputs[0])
    assert not torch.equal(mine(x)[0], mine(x)[0])
    mine.eval(), theirs.eval()
    torch.testing.assert_close(mine(x)[0], theirs(x)[0])


@BOTH
def test_second_derivatives(kind):
    theirs, mine = pair(kind, num_layers=2)
    x = draw(3, 2, I)
    found = []
    for net in (theirs, mine):
        leaves = [x, *net.parameters()]
        first = torch.autograd.grad(net(x)[0].square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-9)


@BOTH
def test_torch_func(kind):
    """Gradients, forward mode and the hessian, of a function of the parameters or of the input."""
    theirs, mine = pair(kind)
    x = draw(2, 1, I).detach()
    values = dict(mine.named_parameters())
    ours = grad(lambda p: functional_call(mine, p, (x,))[0].sin().sum())(values)
    wanted = torch.autograd.grad(theirs(x)[0].sin().sum(), list(theirs.parameters()))
    for g, truth in zip(ours.values(), wanted, strict=True):
        torch.testing.assert_close(g, truth)
    v = torch.randn_like(x)
    y, tangent = jvp(lambda x: mine(x)[0], (x,), (v,))
    torch.testing.assert_close(y, theirs(x)[0])
    slope = torch.autograd.functional.jvp(lambda x: theirs(x)[0], x, v)[1]  # by two backward passes
    torch.testing.assert_close(tangent, slope)
    H1 = hessian(lambda x: mine(x)[0].sin().sum())(x)
    H2 = torch.autograd.functional.hessian(lambda x: theirs(x)[0].sin().sum(), x)
    torch.testing.assert_close(H1, H2)


@BOTH
def test_a_population_by_vmap(kind):
    nets = [pair(kind)[1] for _ in range(3)]
    for k, net in enumerate(nets):
        nn.init.normal_(net.weight_hh_l0, std=0.1 * (k + 1))
    parameters, buffers = stack_module_state(nets)
    x = draw(T, B, I)
    y = vmap(lambda p, b: functional_call(nets[0], (p, b), (x,))[0])(parameters, buffers)
    for k, net in enumerate(nets):
        torch.testing.assert_close(y[k], net(x)[0])


@BOTH
def test_compiled_as_one_graph(kind):
    mine = PAIRS[kind][1](I, H, 2, bidirectional=True)
    x = torch.randn(T, B, I)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    y = compiled(x)[0]
    torch.testing.assert_close(y, mine(x)[0])
    leaves = list(mine.parameters())
    found = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(mine(x)[0].square().sum(), leaves))


@BOTH
def test_autocast(kind):
    mine = PAIRS[kind][1](I, H)
    x = torch.randn(T, B, I)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = mine(x)
    assert {t.dtype for t in (y, *flat(last))} == {torch.float32}
    torch.testing.assert_close(y, mine(x)[0], rtol=0.05, atol=0.05)
    y.sum().backward()


@BOTH
def test_exported_with_batch_and_time_left_open(kind):
    mine = PAIRS[kind][1](I, H, 2, batch_first=True).eval()
    dims = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("time", min=2)}
    program = torch.export.export(mine, (torch.zeros(B, T, I),), dynamic_shapes={"input": dims})
    x = torch.randn(2, 9, I)
    for a, b in zip(flat(program.module()(x)[1]), flat(mine(x)[1]), strict=True):
        torch.testing.assert_close(a, b)


@BOTH
def test_copies_and_pickles_compute_the_same(kind):
    mine = pair(kind)[1]
    x = draw(T, B, I)
    for again in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert torch.equal(again(x)[0], mine(x)[0])
        nn.init.zeros_(again.weight_hh_l0)
        assert not torch.equal(again(x)[0], mine(x)[0])


@BOTH
def test_steps_lengths_and_reset_marks(kind):
    mine = pair(kind, num_layers=2)[1]
    x, state = draw(T, B, I), None
    y, last = mine(x)
    for t in range(T):
        out, state = mine.step(x[t], state)
        torch.testing.assert_close(out, y[t])
    for a, b in zip(flat(state), flat(last), strict=True):
        torch.testing.assert_close(a, b)
    marks = torch.zeros(T, B, dtype=torch.bool)
    marks[2] = True
    torch.testing.assert_close(mine(x, reset=marks)[0][2:], mine(x[2:])[0])
    short = mine(x, lengths=[2, 5, 3])[1]
    for a, b in zip(flat(short), flat(mine(x[:2, :1])[1]), strict=True):
        torch.testing.assert_close(a[:, :1], b)


@BOTH
def test_every_sequence_inside_on_request(kind):
    mine = PAIRS[kind][1](I, H, 2, **DOUBLE)
    y, last, sequences = mine(draw(T, B, I), return_all_states=True)
    assert torch.equal(sequences[1][0], y)
    for k, h in enumerate(flat(last)):
        assert torch.equal(sequences[0][k][-1], h[0])


@BOTH
def test_depth_under_gates(kind):
    """With `intermediate_sizes` the candidate is the end of a deep transition: Pascanu et al., Sec. 3.3.1."""
    torch.manual_seed(0)
    net = PAIRS[kind][1](I, H, intermediate_sizes=(5, 3), **DOUBLE)
    x, h, c = draw(1, B, I), draw(B, H, seed=1), draw(B, H, seed=2)
    rows = (5, H, 5) if kind == "GRU" else (H, H, 5, H)
    into = (x[0] @ net.weight_ih_l0.t() + net.bias_ih_l0).split(rows, -1)
    back = (h @ net.weight_hh_l0.t() + net.bias_hh_l0).split(rows, -1)
    if kind == "GRU":
        r, z = torch.sigmoid(into[0] + back[0]), torch.sigmoid(into[1] + back[1])
        n = torch.tanh(into[2] + r * back[2])
    else:
        i, f, n, o = (a + b for a, b in zip(into, back, strict=True))
        i, f, n, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(n), torch.sigmoid(o)
    n = torch.tanh(n @ net.weight_zh_l0_d2.t() + net.bias_l0_d2)
    n = torch.tanh(n @ net.weight_zh_l0_d3.t() + net.bias_l0_d3)
    if kind == "GRU":
        wanted, state = z * h + (1 - z) * n, h[None]
    else:
        wanted, state = o * torch.tanh(f * c + i * n), (h[None], c[None])
    torch.testing.assert_close(net(x, state)[0][0], wanted)
    assert "stage 3" in net.explain()


@BOTH
def test_compiling_describes_a_layer_of_any_type(kind):
    """The cell in it has no numbers, and stays in the type that it was built in."""
    layer = PAIRS[kind][1](I, H).double()
    x = draw(T, B, I)
    torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert "plain loop" not in layer.explain()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))


@BOTH
def test_one_node_for_torch_fx(kind):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = PAIRS[kind][1](I, H), nn.Linear(H, 2)

        def forward(self, x):
            return self.out(self.rnn(x)[0])

    module, x = Tagger(), torch.randn(T, B, I)
    torch.testing.assert_close(torch.fx.symbolic_trace(module)(x), module(x))


def test_what_torch_refuses_is_refused_in_its_words():
    for cls in (nn.GRU, deeprnn.GRU):
        with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM"):
            cls(I, H, proj_size=2)
    for cls in (nn.LSTM, deeprnn.LSTM):
        with pytest.raises(ValueError, match="proj_size has to be smaller"):
            cls(I, H, proj_size=H)
        with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
            cls(I, H)(torch.zeros(T, B, I + 1))
        with pytest.raises(RuntimeError, match=r"Expected hidden\[1\] size"):
            cls(I, H)(torch.zeros(T, B, I), (torch.zeros(1, B, H), torch.zeros(1, B, H + 1)))
        with pytest.raises(ValueError, match="hidden_size must be greater than zero"):
            cls(I, 0)
        with pytest.raises(
            RuntimeError, match=r"For batched 3-D input, hx and cx .* got \(2-D, 3-D\) tensors"
        ):
            cls(I, H)(torch.zeros(T, B, I), (torch.zeros(B, H), torch.zeros(1, B, H)))


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.float64])
@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_an_input_of_another_type_is_refused_in_torchs_words(name, kind):
    for cls in (getattr(nn, name), getattr(deeprnn, name)):
        with pytest.raises(ValueError, match=rf"input dtype \({kind}\) does not match weight dtype"):
            cls(I, H)(torch.zeros(T, B, I, dtype=kind))
        with pytest.raises(RuntimeError, match="Input and parameter tensors are not at the same device"):
            cls(I, H)(torch.zeros(T, B, I, device="meta"))
    with pytest.raises(ValueError, match="does not match weight dtype"):
        deeprnn.RHN(I, H)(torch.zeros(T, B, dtype=kind).expand(I, T, B))


def test_integers_are_symbols_for_a_cell_of_ones_own():
    class Embedded(deeprnn.Cell):
        def __init__(self, input_size, hidden_size):
            super().__init__()
            self.E, self.W = nn.Embedding(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

        def step(self, x, h):
            return torch.tanh(self.E(x) + self.W(h))

    layer = deeprnn.Recurrent(Embedded(I, H))
    assert layer(torch.zeros(T, B, dtype=torch.int64))[0].shape == (T, B, H)
    with pytest.raises(ValueError, match="Expected integer symbols to be 1D or 2D, got 3D"):
        layer(torch.zeros(T, B, I, dtype=torch.int64))


def test_a_recurrent_highway_of_depth_one_is_a_gated_mix():
    torch.manual_seed(0)
    net = deeprnn.RHN(I, H, depth=1, dtype=torch.float64)
    cell, x, h = net.cells[0], draw(1, B, I), draw(1, B, H, seed=1)
    a = x[0] @ cell.weight_ih.t() + h[0] @ cell.weight_hh_d1.t() + cell.bias_d1
    n, t = torch.tanh(a[:, :H]), torch.sigmoid(a[:, H:])
    torch.testing.assert_close(net(x, h)[0][0], t * n + (1 - t) * h[0])
    deep = deeprnn.RHN(I, H, depth=4, num_layers=2, batch_first=True, bidirectional=True)
    y, last = deep(torch.zeros(B, T, I))
    assert y.shape == (B, T, 2 * H)
    assert last.shape == (4, B, H)
