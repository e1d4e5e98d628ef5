"""torch.func, torch.compile and DistributedDataParallel see ordinary parameters and operators."""

from __future__ import annotations

import gc
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

import deeprnn
from deeprnn import DeepRNN
from deeprnn.cells.draws import sequence_dropout

T, B, I, H, P = 4, 3, 3, 5, 3
DOUBLE = {"dtype": torch.float64}
DEEP = {"intermediate_sizes": (4,), "shortcut": "last", "input_to": "all"}

BUILDERS = {
    "rnn": ("rnn", {}),
    "dots": ("dots_rnn", {"intermediate_size": 4, "output_hidden_size": 6}),
    "dots-star": (
        "dots_rnn",
        {
            "intermediate_size": 4,
            "output_hidden_size": 6,
            "intermediate_unit": "lp:2",
            "output_unit": "maxout:2",
        },
    ),
    "stacked": ("stacked_dts_rnn", {"intermediate_size": 4, "input_to_levels": "all", "output_from": "all"}),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def members(name: str, symbols: bool = False) -> list[deeprnn.SequenceModel]:
    builder, options = BUILDERS[name]
    make = getattr(deeprnn, builder)
    sizes = {"input_size": I, "hidden_size": H, "output_size": I, "symbols": symbols, **DOUBLE, **options}
    return [make(seed=s, **sizes) for s in range(P)]


def weigh(logits: Tensor) -> Tensor:
    """A loss under which every logit counts differently."""
    return (logits * torch.linspace(-1, 1, logits.numel(), **DOUBLE).view_as(logits)).sum()


def alone(models, x, state=None, reset=None):
    """Logits, losses and gradients of each member by itself."""
    logits, grads = [], []
    for net in models:
        y, _ = net(x, state, reset)
        logits.append(y)
        grads.append(torch.autograd.grad(weigh(y), list(net.parameters())))
    return torch.stack(logits), [torch.stack(g) for g in zip(*grads, strict=True)]


@pytest.mark.parametrize("symbols", [False, True], ids=["vectors", "symbols"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_population_equals_its_members_alone(name, backend, symbols):
    """Parameters stacked, the model mapped over them, autograd outside: gradients separate by themselves."""
    models = members(name, symbols)
    for net in models:
        net.backend = backend
    x = torch.randint(I, (T, B)) if symbols else draw(T, B, I)
    reset = torch.tensor([[False] * B, [True, False, True], [False] * B, [False, True, False]])
    state = tuple(torch.full_like(h, 0.2) for h in models[0].initial_state(B))
    parameters, _ = stack_module_state(models)  # type: ignore[arg-type]
    logits, last = vmap(lambda p: functional_call(models[0], p, (x, state, reset)))(parameters)
    want, want_grads = alone(models, x, state, reset)
    torch.testing.assert_close(logits, want)
    assert last[0].shape == (P, B, H)
    grads = torch.autograd.grad(sum(weigh(y) for y in logits), list(parameters.values()))
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_each_member_may_have_its_own_input_state_and_resets():
    models = members("dots")
    parameters, _ = stack_module_state(models)  # type: ignore[arg-type]
    x, h = draw(P, T, B, I), draw(P, B, H, seed=1)
    reset = torch.rand(P, T, B, generator=torch.Generator().manual_seed(2)) < 0.4
    logits, _ = vmap(lambda p, x, h, r: functional_call(models[0], p, (x, (h,), r)))(parameters, x, h, reset)
    for p, net in enumerate(models):
        torch.testing.assert_close(logits[p], net(x[p], (h[p],), reset[p])[0])


@pytest.mark.parametrize(
    ("name", "backend"), [("dots", "auto"), ("dots", "reference"), ("dots-star", "auto"), ("stacked", "auto")]
)
def test_grad_alone_and_inside_vmap(name, backend):
    models = members(name)
    for net in models:
        net.backend = backend
    x = draw(T, B, I)
    _, want = alone(models, x)
    single = grad(lambda p: weigh(functional_call(models[0], p, (x,))[0]))(dict(models[0].named_parameters()))
    for a, b in zip(single.values(), want, strict=True):
        torch.testing.assert_close(a, b[0])
    parameters, _ = stack_module_state(models)  # type: ignore[arg-type]
    mapped = vmap(grad(lambda p: weigh(functional_call(models[0], p, (x,))[0])))(parameters)
    for a, b in zip(mapped.values(), want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_population_of_layers():
    layers = [DeepRNN(I, H, num_layers=2, **DEEP, **DOUBLE) for _ in range(P)]
    parameters, _ = stack_module_state(layers)  # type: ignore[arg-type]
    x = draw(T, B, I)
    output, h_n = vmap(lambda p: functional_call(layers[0], p, (x,)))(parameters)
    for p, net in enumerate(layers):
        want, want_n = net(x)
        torch.testing.assert_close(output[p], want)
        torch.testing.assert_close(h_n[p], want_n)


def test_forward_mode_agrees_with_reverse_mode():
    net = members("dots")[0]
    x, direction = draw(T, B, I), draw(T, B, I, seed=1)
    value, tangent = jvp(lambda x: weigh(net(x)[0]), (x,), (direction,))
    (gradient,) = torch.autograd.grad(weigh(net(x.requires_grad_())[0]), x)
    torch.testing.assert_close(value, weigh(net(x)[0]))
    torch.testing.assert_close(tangent, (gradient * direction).sum())


def test_hessian():
    net = DeepRNN(1, 2, **DOUBLE)
    x = draw(3, 1, 1)
    mine = hessian(lambda x: weigh(net(x)[0]))(x).reshape(3, 3)
    torch.testing.assert_close(
        mine, torch.autograd.functional.hessian(lambda x: weigh(net(x)[0]), x).reshape(3, 3)
    )
    torch.testing.assert_close(mine, mine.mT)


LAYERS = {"DeepRNN": DeepRNN, "GRU": deeprnn.GRU, "LSTM": deeprnn.LSTM, "RHN": deeprnn.RHN}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", LAYERS)
def test_reverse_mode_over_reverse_mode(name, frozen):
    """Second and third derivatives by torch.func's gradients of gradients, of fixed weights too."""
    net = LAYERS[name](2, 3).double().requires_grad_(not frozen)
    x, v = draw(3, 1, 2), draw(3, 1, 2, seed=1)

    def loss(x):
        return weigh(net(x)[0]).sin()

    wanted = torch.autograd.functional.hessian(loss, x)
    along = wanted.reshape(6, 6) @ v.reshape(6)
    torch.testing.assert_close(jacrev(jacrev(loss))(x), wanted)
    torch.testing.assert_close(vmap(vjp(grad(loss), x)[1])(v[None])[0].reshape(6), along)
    torch.testing.assert_close(vjp(grad(loss), x)[1](v)[0].reshape(6), along)
    third = grad(lambda x: (grad(lambda x: (grad(loss)(x) * v).sum())(x) * v).sum())(x)
    (first,) = torch.autograd.grad(loss(x.requires_grad_()), x, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), x, create_graph=True)
    torch.testing.assert_close(third, torch.autograd.grad((second * v).sum(), x)[0])


@pytest.mark.parametrize("name", ["GRU", "LSTM", "RHN"])
def test_a_first_call_inside_a_transformation_reads_the_cell_all_the_same(name):
    net = LAYERS[name](2, 3).double()
    values = {k: p.detach() for k, p in net.named_parameters()}
    grad(lambda x: functional_call(net, values, (x,))[0].sum())(draw(3, 1, 2))
    assert "plain loop" not in net.explain()


def test_gradients_per_example():
    net = DeepRNN(I, H, **DEEP, **DOUBLE)
    x = draw(T, B, I)
    p = dict(net.named_parameters())

    def loss(p, x):
        return weigh(functional_call(net, p, (x,))[0])

    each = vmap(grad(loss), in_dims=(None, 1))(p, x)
    for b in range(B):
        want = torch.autograd.grad(weigh(net(x[:, b])[0]), list(net.parameters()))
        for got, expected in zip(each.values(), want, strict=True):
            torch.testing.assert_close(got[b], expected)


# ---- torch.compile


def both(net: nn.Module, compiler: str, *inputs):
    """Results and gradients, eager and compiled as one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=compiler)
    out = []
    for call in (net, compiled):
        output, last = call(*inputs)
        state = last if isinstance(last, Tensor) else torch.cat(last, -1)
        out.append((output, state, *torch.autograd.grad(weigh(output), list(net.parameters()))))
    return zip(*out, strict=True)


@pytest.mark.parametrize(
    ("settings", "compiler"),
    [
        ({**DEEP, "backend": "auto"}, "aot_eager"),
        ({**DEEP, "backend": "reference"}, "aot_eager"),
        ({"bidirectional": True, "num_layers": 2}, "eager"),
        ({**DEEP, "intermediate_nonlinearity": "maxout:2"}, "eager"),
    ],
)
def test_a_compiled_layer_equals_the_eager_one(settings, compiler):
    net = DeepRNN(I, H, **settings, **DOUBLE)
    for eager, compiled in both(net, compiler, draw(T, B, I)):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("name", ["dots", "dots-star"])
def test_a_compiled_model_equals_the_eager_one(name):
    net = members(name)[0]
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[2, 1] = True
    for eager, compiled in both(net, "aot_eager", draw(T, B, I), None, reset):
        torch.testing.assert_close(compiled, eager)


class Summed(deeprnn.Cell):
    """Called step by step: no description has sums over units."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.U(x) + self.W(sequence_dropout(h, 0.5, self.training))).cumsum(-1)


def test_a_plain_loop_is_one_graph_too():
    layer = deeprnn.Recurrent(Summed(I, H)).double().eval()
    for eager, compiled in both(layer, "aot_eager", draw(T, B, I)):
        torch.testing.assert_close(compiled, eager)
    compiled = torch.compile(layer.train(), fullgraph=True, backend="eager")
    output, _ = compiled(
        torch.zeros(T, B, I, dtype=torch.float64), torch.full((1, B, H), 1e3, dtype=torch.float64)
    )
    assert output.shape == (T, B, H)


@pytest.mark.parametrize("kind", [DeepRNN, deeprnn.GRU])
def test_lengths_and_batches_of_any_size_take_three_graphs(kind):
    """One for the first, one for another length, one for all lengths and batches."""
    torch._dynamo.reset()
    counters.clear()
    layer = kind(I, H)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for steps, batch in ((5, 2), (6, 2), (7, 3), (9, 4), (3, 2), (40, 16), (100, 2), (4, 30)):
        x = torch.randn(steps, batch, I)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++)")
def test_inductor_equals_eager():
    torch._dynamo.reset()
    net, x = DeepRNN(I, H, **DEEP, **DOUBLE), draw(2, B, I)
    with torch.no_grad():  # its backward is that of aot_eager, above; compiling it takes long
        torch.testing.assert_close(torch.compile(net, fullgraph=True)(x)[0], net(x)[0])


# ---- DistributedDataParallel


def _train_in_parallel(rank: int, world: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        _compare_gradients(rank, world)
    finally:
        # A replica that outlives the group joins the group's threads with the interpreter's lock held, and they
        # may be waiting for that lock: everything that holds the group has to be gone first.
        gc.collect()
        dist.destroy_process_group()


def _compare_gradients(rank: int, world: int) -> None:
    """The gradients of replicas that see a row each are those of one network that sees all rows."""
    torch.manual_seed(rank)  # DDP must make the replicas equal
    net = DeepRNN(I, H, **DEEP, **DOUBLE)
    replica = nn.parallel.DistributedDataParallel(net)
    x = draw(T, world, I)
    replica(x[:, rank : rank + 1])[0].square().sum().backward()
    mean = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    want = torch.autograd.grad(net(x)[0].square().sum() / world, list(net.parameters()))
    for a, b in zip(mean, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


def test_ddp_wraps_and_trains(tmp_path, loopback):
    _train_in_parallel(0, 1, str(tmp_path / "meet"))


@pytest.mark.slow
def test_ddp_averages_the_gradients_of_two_processes(tmp_path, loopback):
    torch.multiprocessing.spawn(_train_in_parallel, args=(2, str(tmp_path / "meet")), nprocs=2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("unit", ["tanh", "maxout:2", "lp:2"])
def test_a_vectorized_jacobian(unit):
    """Its gradients come batched by a vmap of autograd's own."""
    op, x, h0 = deeprnn.Plus(4, 6, units=(unit,)), torch.randn(3, 2, 4), torch.randn(2, 6)
    found = [
        torch.autograd.functional.jacobian(lambda x, h: op.unroll(x, h)[0], (x, h0), vectorize=way)
        for way in (True, False)
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_a_layer_batched_by_autograd():
    net, x = DeepRNN(I, H, num_layers=2, **DEEP, **DOUBLE), draw(T, B, I)
    y, parameters = net(x)[0], list(net.parameters())
    vectors = draw(3, T, B, H)
    batched = torch.autograd.grad(y, parameters, vectors, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(y, parameters, vectors[i], retain_graph=True)
        for a, b in zip(batched, alone, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("unit", ["tanh", "maxout:2"])
def test_a_vmap_inside_another(unit):
    op, x, h0 = deeprnn.Plus(4, 6, units=(unit,)), torch.randn(3, 2, 4), torch.randn(2, 5, 2, 6)
    mapped = vmap(vmap(lambda h: op.unroll(x, h)[0]))(h0)
    for i, j in ((0, 3), (1, 4)):
        torch.testing.assert_close(mapped[i, j], op.unroll(x, h0[i, j])[0])
