"""torch.jit, torch.fx, TensorBoard, the older ONNX exporter and types with operations of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import deeprnn
from deeprnn import DeepRNN, Plus, Predict, UserError
from deeprnn.model.models import assemble, build

T, B, I, H, O = 4, 2, 3, 5, 2


class Paced(deeprnn.Cell):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.pace = nn.Parameter(torch.rand(hidden_size))

    def step(self, x, h):
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace)


class Summed(Paced):
    """Called step by step: no description has sums over units."""

    def step(self, x, h):
        return torch.tanh(self.U(x) + self.W(h)).cumsum(-1) * self.pace


MAKERS = {
    "layer": lambda: DeepRNN(I, H),
    "deep-layer": lambda: DeepRNN(
        I, H, 2, bidirectional=True, intermediate_sizes=4, shortcut="last", input_to="all"
    ),
    "pooled-layer": lambda: DeepRNN(I, H, nonlinearity="maxout:2"),
    "asked-for": lambda: DeepRNN(I, H, backend="cpu"),
    "model": lambda: deeprnn.dots_rnn(
        input_size=I, hidden_size=H, intermediate_size=4, output_hidden_size=6, output_size=O, seed=0
    ),
    "gru": lambda: deeprnn.GRU(I, H, 2),
    "one-gru": lambda: deeprnn.GRU(I, H),
    "lstm": lambda: deeprnn.LSTM(I, H, bidirectional=True, proj_size=4),
    "highway": lambda: deeprnn.RHN(I, H, depth=2),
    "own-cell": lambda: deeprnn.Recurrent(Paced(I, H), num_layers=2),
    "plain-loop": lambda: deeprnn.Recurrent(Summed(I, H)),
    "model-of-cells": lambda: build(assemble(input_size=I, hidden_sizes=(H,), output_size=O, cell="lstm"), seed=0),
    "pooled-model": lambda: deeprnn.dots_rnn(
        input_size=I, hidden_size=H, intermediate_size=4, output_hidden_size=6, output_size=O, seed=0,
        intermediate_unit="lp:2", output_unit="maxout:2",
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", MAKERS)
TRACES = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name]().eval()


def last_state(h: Tensor | tuple[Tensor, ...]) -> Tensor:
    return h if isinstance(h, Tensor) else torch.cat(h, -1)


def layer_of(name: str) -> nn.Module:
    """A layer of these, in a model of somebody's."""
    return Classifier(make(name), {"lstm": 8}.get(name, H))


class Classifier(nn.Module):
    """A model of somebody's that holds a recurrent layer."""

    def __init__(self, recurrent: nn.Module, size: int = H) -> None:
        super().__init__()
        self.recurrent, self.out = recurrent, nn.Linear(size, O)

    def forward(self, x):
        output, h = self.recurrent(x)
        return self.out(output), h


# ---- torch.jit


class TestJitTrace:
    pytestmark = TRACES

    @EACH
    @pytest.mark.parametrize(("steps", "gradients"), [(T, True), (T, False), (1, True)])
    def test_a_trace_computes_the_same(self, name, steps, gradients):
        net = make(name)
        with torch.set_grad_enabled(gradients):
            traced = torch.jit.trace(net, (torch.randn(steps, B, I),))
        x = torch.randn(steps, 7, I)  # of another batch
        got, want = traced(x), net(x)
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(last_state(got[1]), last_state(want[1]))

    @pytest.mark.parametrize("name", ["deep-layer", "gru", "lstm", "own-cell", "plain-loop"])
    def test_gradients_of_a_trace(self, name):
        net, x = make(name), torch.randn(T, B, I)
        traced = torch.jit.trace(net, (x,))
        parameters = list(net.parameters())
        want = torch.autograd.grad(net(x)[0].square().sum(), parameters)
        for a, b in zip(torch.autograd.grad(traced(x)[0].square().sum(), parameters), want, strict=True):
            torch.testing.assert_close(a, b)

    def test_a_trace_is_of_one_length_and_says_so(self):
        traced = torch.jit.trace(make("layer"), (torch.randn(T, B, I),))
        for steps in (T - 1, T + 1):
            with pytest.raises(RuntimeError):
                traced(torch.randn(steps, B, I))

    @EACH
    def test_a_trace_holds_operations_of_torch_alone(self, name):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                traced = torch.jit.trace(make(name), (torch.randn(T, B, I),))
            kinds = {node.kind() for node in traced.inlined_graph.nodes()}
            assert {kind.partition("::")[0] for kind in kinds} <= {"aten", "prim"}

    @pytest.mark.parametrize(
        ("first", "name"),
        [("", "deep-layer"), ("import deeprnn", "deep-layer"), ("", "gru")],
        ids=["alone", "with-deeprnn", "cell-alone"],
    )
    def test_a_saved_trace_runs_in_a_fresh_process(self, first, name, tmp_path):
        net, x = make(name), torch.randn(T, B, I)
        with torch.no_grad():
            torch.jit.trace(net, (x,)).save(str(tmp_path / "net.pt"))
        torch.save((x, net(x)[0].detach()), tmp_path / "case.pt")
        code = f"""
import sys, torch
{first}
net = torch.jit.load({str(tmp_path / "net.pt")!r})
x, want = torch.load({str(tmp_path / "case.pt")!r})
torch.testing.assert_close(net(x)[0], want)
assert ("deeprnn" in sys.modules) == {bool(first)}
print("equal")
"""
        environment = {**os.environ, "PYTHONPATH": str(Path(deeprnn.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert done.stdout.strip() == "equal", done.stderr

    def test_a_summary_writer_draws_the_graph(self, tmp_path):
        tensorboard = pytest.importorskip("torch.utils.tensorboard")
        with tensorboard.SummaryWriter(str(tmp_path)) as writer:
            writer.add_graph(Classifier(make("layer")), torch.randn(T, B, I))
            writer.add_graph(layer_of("gru"), torch.randn(T, B, I))
        assert any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "net",
    [
        DeepRNN(I, H),
        Classifier(DeepRNN(I, H)),
        make("model"),
        Plus(I, H),
        Predict(H, O),
        nn.Sequential(Plus(I, H)),
    ],
    ids=["layer", "inside", "model", "plus", "predict", "plus-inside"],
)
def test_scripting_names_the_way_that_works(net):
    with pytest.raises(UserError, match=r"torch.jit.script cannot compile .* use torch.export"):
        torch.jit.script(net)
    if not isinstance(net, (Plus, Predict, nn.Sequential)):
        net(torch.randn(T, B, I))  # it is unharmed


# ---- torch.fx


@pytest.mark.parametrize("recurrent", [DeepRNN, nn.RNN, deeprnn.GRU, deeprnn.RHN])
def test_a_layer_is_one_node_of_a_symbolic_graph(recurrent):
    net = Classifier(recurrent(I, H))
    graph = fx.symbolic_trace(net)
    assert [node.op for node in graph.graph.nodes if node.target == "recurrent"] == ["call_module"]
    for steps in (T, 9):
        x = torch.randn(steps, B, I)
        torch.testing.assert_close(graph(x), net(x))


def test_models_and_operators_are_nodes_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.plus, self.predict = make("model"), Plus(O, H), Predict(H, O, sizes=(3,))

        def forward(self, x, h):
            y, _ = self.model(x)
            return self.predict(self.plus(y[-1], h))

    net = Net()
    graph, x, h = fx.symbolic_trace(net), torch.randn(T, B, I), torch.randn(B, H)
    torch.testing.assert_close(graph(x, h), net(x, h))


@pytest.mark.parametrize(
    "net",
    [DeepRNN(I, H), make("model"), Plus(I, H), make("gru"), make("own-cell")],
    ids=["layer", "model", "plus", "gru", "own-cell"],
)
def test_a_loop_alone_has_no_symbolic_graph_and_says_so(net):
    with pytest.raises(UserError, match=r"torch.fx cannot look into .*: trace a module that contains it"):
        fx.symbolic_trace(net)


# ---- types with their own operations


class Counting(Tensor):
    """A tensor that counts the operations it goes through."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Holder:
    """No tensor, but operations of torch take it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(Holder, lambda x: x.tensor, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Holder, func(*args, **kwargs))

    def __getattr__(self, name):
        value = getattr(self.tensor, name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: type(self).__torch_function__(
            getattr(Tensor, name), (), (self, *args), kwargs
        )

    def __getitem__(self, index):
        return Holder(self.tensor[index])

    def __add__(self, other):
        return torch.add(self, other)

    def __sub__(self, other):
        return torch.sub(self, other)

    def __mul__(self, other):
        return torch.mul(self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return torch.sub(other, self)


@EACH
def test_a_tensor_with_its_own_operations(name):
    net, x = make(name), torch.randn(T, B, I)
    Counting.calls = 0
    output, _ = net(x.as_subclass(Counting))
    assert isinstance(output, Counting)
    assert Counting.calls
    torch.testing.assert_close(output.as_subclass(Tensor), net(x)[0])


def test_what_a_node_is_given_besides_the_input():
    class Padded(Classifier):
        def forward(self, x, lengths):
            output, h, inside = self.recurrent(x, lengths=lengths, return_all_states=True)
            return self.out(output), h, inside

    net = Padded(make("gru"))
    graph, x, lengths = fx.symbolic_trace(net), torch.randn(T, B, I), torch.tensor([2, 4])
    torch.testing.assert_close(graph(x, lengths)[:2], net(x, lengths)[:2])


@pytest.mark.parametrize("name", ["layer", "deep-layer", "model", "gru", "lstm", "own-cell"])
def test_what_operations_of_torch_take(name):
    net, x = make(name), torch.randn(T, B, I)
    output, _ = net(Holder(x))
    assert isinstance(output, Holder)
    torch.testing.assert_close(output.tensor, net(x)[0])


@pytest.mark.parametrize("x", [None, 3.0, [[1.0]], "x"])
def test_what_they_do_not_take_is_named(x):
    with pytest.raises(TypeError, match=f"input must be a Tensor.*{type(x).__name__}"):
        DeepRNN(I, H)(x)
    with pytest.raises(TypeError, match=f"input must be a Tensor.*{type(x).__name__}"):
        make("model")(x)


# ---- the older ONNX exporter


@pytest.mark.parametrize(
    "name", ["layer", "deep-layer", "pooled-layer", "model", "gru", "lstm", "own-cell", "plain-loop"]
)
@pytest.mark.filterwarnings("ignore")
def test_the_older_onnx_exporter(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    net, x = make(name), torch.randn(T, B, I)
    torch.onnx.export(net, (x,), str(tmp_path / "net.onnx"), dynamo=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    (first,) = (i.name for i in session.get_inputs())
    torch.testing.assert_close(torch.from_numpy(session.run(None, {first: x.numpy()})[0]), net(x)[0])
