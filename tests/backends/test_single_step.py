"""Calls of one step on the CPU, by torch's operations: the same function, and no weight kept that could be stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from deeprnn.backends import cpu
from deeprnn.bench.cells import Paced
from deeprnn.model.drop_in import GRU, LSTM
from deeprnn.model.layers import DeepRNN
from deeprnn.model.recurrent import Recurrent

I, H, B = 5, 7, 3
DEEP = {"intermediate_sizes": (6, 9), "shortcut": "all", "input_to": "all"}
LAYERS = {
    "rnn": lambda **k: DeepRNN(I, H, **k),
    "relu": lambda **k: DeepRNN(I, H, nonlinearity="relu", **k),
    "maxout": lambda **k: DeepRNN(I, H, nonlinearity="maxout:2", **k),
    "dts": lambda **k: DeepRNN(I, H, **DEEP, **k),
    "dt, input to the last": lambda **k: DeepRNN(I, H, intermediate_sizes=6, input_to="last", **k),
    "gru": lambda **k: GRU(I, H, **k),
    "deep gru": lambda **k: GRU(I, H, intermediate_sizes=6, **k),
    "lstm": lambda **k: LSTM(I, H, **k),
    "projected lstm": lambda **k: LSTM(I, H, proj_size=4, **k),
}
EACH = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
FEW = pytest.mark.parametrize(
    "make", [LAYERS[n] for n in ("rnn", "dts", "gru", "lstm")], ids=["rnn", "dts", "gru", "lstm"]
)
OPTIONS = [{}, {"bias": False}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True},
           {"num_layers": 2, "dropout": 0.5}]  # fmt: skip


def flat(found) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [y for part in found for y in flat(part)]


def by_reference(layer: nn.Module, x: torch.Tensor, *state):
    """The plain loop in float64, with the numbers that the layer has now."""
    twin = copy.deepcopy(layer).double()
    twin.backend = "reference"
    return twin(x.double(), *[torch.utils._pytree.tree_map(lambda h: h.double(), s) for s in state])


def close(a, b, tolerance=2e-6) -> None:
    for mine, other in zip(flat(a), flat(b), strict=True):
        assert mine.shape == other.shape
        mine, other = mine.detach().double(), other.detach().double()
        assert (mine - other).norm() <= tolerance * max(1.0, float(other.norm()))


@EACH
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_step_is_the_reference_with_all_its_gradients(make, options):
    torch.manual_seed(0)
    layer = make(**options).eval()
    x = torch.randn(B, 1, I) if options.get("batch_first") else torch.randn(1, B, I)
    state = torch.utils._pytree.tree_map(torch.randn_like, layer(x)[1])
    found, true = layer(x, state), by_reference(layer, x, state)
    close(found, true)
    twin = copy.deepcopy(layer).double()
    twin.backend = "reference"
    truth = twin(x.double(), torch.utils._pytree.tree_map(lambda h: h.double(), state))
    mine, theirs = (
        torch.autograd.grad(sum(y.sin().sum() for y in flat(results)), list(module.parameters()))
        for results, module in ((found, layer), (truth, twin))
    )
    close(list(mine), list(theirs), 1e-5)


@FEW
def test_a_step_is_a_sequence_of_one(make):
    layer, x = make(num_layers=2), torch.randn(1, B, I)
    y, state = layer.step(x[0])
    close((y.unsqueeze(0), state), tuple(flat(z) for z in by_reference(layer, x)))
    close(layer(x), by_reference(layer, x))
    close(layer(x[:, 0]), by_reference(layer, x[:, 0]))  # without a batch dimension


@FEW
def test_a_stream_of_single_calls_is_the_whole_sequence(make):
    layer, x, state, outputs = make(), torch.randn(6, B, I), None, []
    for x_t in x.split(1):
        y, state = layer(x_t, state)
        outputs.append(y)
    close((torch.cat(outputs), state), layer(x), 1e-5)


@pytest.mark.parametrize("rows", [1, 20])
@FEW
def test_no_kernel_is_called_and_no_weight_packed_for_one_step(make, rows, monkeypatch):
    layer, x = make(), torch.randn(1, rows, I)

    def refuse(*arguments):
        raise AssertionError("a kernel was called")

    for name in ("forward", "forward_with_projection"):
        monkeypatch.setattr(cpu.Cpu, name, refuse)
    layer(x)
    layer.step(x[0])
    with pytest.raises(AssertionError, match="kernel"):
        layer(torch.randn(2, B, I))


def test_one_step_of_a_users_cell_is_a_call_of_it(monkeypatch):
    layer, x = Recurrent(Paced(I, H), num_layers=2), torch.randn(1, B, I)
    whole = Recurrent([copy.deepcopy(cell) for cell in layer.cells], backend="cpu")
    found = layer(x), torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    true = whole(x), torch.autograd.grad(whole(x)[0].sum(), list(whole.parameters()))
    close(found, true, 1e-5)
    for name in ("forward", "forward_with_projection"):
        monkeypatch.setattr(cpu.Cpu, name, None)
    close(layer(x), found[0])


# ---- parameters that change


def through_data(layer, new):
    for p, q in zip(layer.parameters(), new, strict=True):
        p.data.copy_(q)


def through_storage(layer, new):
    for p, q in zip(layer.parameters(), new, strict=True):
        p.detach().untyped_storage().copy_(q.untyped_storage())


def new_storage(layer, new):
    for p, q in zip(layer.parameters(), new, strict=True):
        p.data = q.clone()


def through_numpy(layer, new):
    for p, q in zip(layer.parameters(), new, strict=True):
        p.detach().numpy()[...] = q.numpy()


def by_loading(layer, new):
    layer.load_state_dict(dict(zip(layer.state_dict(), new, strict=True)))


def by_assigning(layer, new):
    layer.load_state_dict(dict(zip(layer.state_dict(), new, strict=True)), assign=True)


def new_parameters(layer, new):
    for (name, _), q in zip(list(layer.named_parameters()), new, strict=True):
        setattr(layer, name, nn.Parameter(q))


def by_optimiser(layer, new, **options):
    for p, q in zip(layer.parameters(), new, strict=True):
        p.grad = q
    torch.optim.Adam(layer.parameters(), lr=0.1, **options).step()


def by_fused_optimiser(layer, new):
    by_optimiser(layer, new, fused=True)


CHANGES = [through_data, through_storage, new_storage, through_numpy, by_loading, by_assigning, new_parameters,
           by_optimiser, by_fused_optimiser]  # fmt: skip


@FEW
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("T", [1, 4])
def test_changed_parameters_are_used_at_once(make, change, T):
    torch.manual_seed(1)
    layer, x = make(), torch.randn(T, B, I)
    with torch.no_grad():
        before = layer(x)[0], layer(x)[0], layer.step(x[0])[0]
    change(layer, [torch.randn(p.shape) * 0.5 for p in layer.parameters()])
    with torch.no_grad():
        close(layer(x), by_reference(layer, x))
        close(layer.step(x[0])[0], by_reference(layer, x[:1])[0][0])
        assert not torch.allclose(layer(x)[0], before[0], atol=1e-3)


@FEW
def test_parametrized_weights_are_computed_anew(make):
    layer, x = make(), torch.randn(1, B, I)
    parametrizations.weight_norm(layer, "weight_hh_l0")
    layer(x)
    layer.parametrizations.weight_hh_l0.original0.data.mul_(3)
    with torch.no_grad():
        close(layer(x), by_reference(layer, x))
        close(layer.step(x[0])[0], by_reference(layer, x)[0][0])


@FEW
def test_functional_calls_and_populations_use_the_given_numbers(make):
    layer, x = make(), torch.randn(1, B, I)
    own = {name: torch.randn(4, *p.shape) * 0.3 for name, p in layer.named_parameters()}
    together = vmap(lambda p: functional_call(layer, p, (x,))[0])(own)
    for k in range(4):
        member = {name: p[k] for name, p in own.items()}
        twin = copy.deepcopy(layer)
        twin.load_state_dict(member)
        close([together[k], functional_call(layer, member, (x,))[0]], [by_reference(twin, x)[0]] * 2)


@FEW
def test_an_output_may_be_changed_in_place(make):
    layer, x = make(), torch.randn(1, B, I)
    y, state = layer(x)
    kept = flat(state)[0].clone()
    F.dropout(y, 0.5, inplace=True).sum().backward()
    assert torch.equal(flat(state)[0], kept)
    with torch.no_grad():
        y, state = layer(x)
        y.zero_()
    assert torch.equal(flat(state)[0], kept)


def test_autocast_keeps_the_parameters_type():
    layer, x = DeepRNN(I, H), torch.randn(1, B, I)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].dtype == layer.step(x[0])[0].dtype == torch.float32


def test_an_asked_for_backend_serves_one_step_too(monkeypatch):
    calls = []
    for name in ("forward", "forward_with_projection"):
        real = getattr(cpu.Cpu, name)
        monkeypatch.setattr(cpu.Cpu, name, lambda self, *a, real=real: calls.append(1) or real(self, *a))
    DeepRNN(I, H, backend="cpu")(torch.randn(1, B, I))
    assert calls == [1]


# ---- batch sizes share code


def test_forty_batch_sizes_need_no_more_code_than_sixteen():
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import machine

    layer = LSTM(I, 20)

    def train(batch: int) -> None:
        layer(torch.randn(3, batch, I))[0].sum().backward()

    for batch in range(1, 17):
        train(batch)
    before = set(machine._ADDRESSES)
    for batch in range(17, 41):
        train(batch)
    assert set(machine._ADDRESSES) == before
