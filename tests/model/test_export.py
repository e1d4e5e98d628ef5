"""Exported recurrences compute what the module computes, at lengths and batches they have not seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import deeprnn
from deeprnn import DeepRNN
from deeprnn.errors import UserError
from deeprnn.model.export import _example, export_onnx, export_program

I, H = 4, 6
DEEP = {"intermediate_sizes": (5,), "shortcut": "last", "input_to": "all"}


LAYERS = {
    "gru": lambda: deeprnn.GRU(I, H, 2),
    "lstm": lambda: deeprnn.LSTM(I, H, proj_size=3, batch_first=True),
    "highway": lambda: deeprnn.RHN(I, H, depth=2, bidirectional=True),
    "plain-loop": lambda: deeprnn.Recurrent(Summed(I, H), num_layers=2),
}


class Summed(deeprnn.Cell):
    """No description has sums over units."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U, self.W = torch.nn.Linear(input_size, hidden_size), torch.nn.Linear(hidden_size, hidden_size)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.U(x) + self.W(h)).cumsum(-1)


def make(name: str):
    torch.manual_seed(0)
    if name in LAYERS:
        return LAYERS[name]()
    if name == "layer":
        return DeepRNN(I, H, num_layers=2, **DEEP)
    if name == "both-ways":
        return DeepRNN(I, H, bidirectional=True, batch_first=True)
    sizes = {"input_size": I, "hidden_size": H, "output_size": I, "seed": 0}
    if name == "characters":
        return deeprnn.stacked_rnn(output="categorical", **sizes)
    if name == "pooled":
        units = {"intermediate_unit": "lp:2", "output_unit": "maxout:2", "unit": "tanh"}
        return deeprnn.dots_rnn(intermediate_size=5, output_hidden_size=7, **units, **sizes)
    return deeprnn.dots_rnn(intermediate_size=5, output_hidden_size=7, **sizes)


def inputs(net, T: int, B: int, step: bool = False) -> tuple[Tensor, ...]:
    """x and states for a length and batch of one's choice."""
    torch.manual_seed(T + B)
    lead = (B,) if step else (T, B)
    if not isinstance(net, deeprnn.SequenceModel):
        ways = 2 if net.bidirectional else 1
        lead = (B, T) if net.batch_first and not step else lead
        sizes = (H,) if isinstance(net, DeepRNN) else net.state_sizes
        return torch.randn(*lead, I), *(torch.randn(net.num_layers * ways, B, n) for n in sizes)
    x = torch.randint(I, lead) if net.spec.symbols else torch.randn(*lead, I)
    return x, *(torch.rand_like(h) for h in net.initial_state(B))


def expected(net, values: tuple[Tensor, ...], step: bool = False) -> list[Tensor]:
    call = net.step if step else net
    with torch.no_grad():
        if not isinstance(net, deeprnn.SequenceModel) and len(values) == 2:
            return list(call(*values))
        y, state = call(values[0], values[1:])
    return [y, *state]


@pytest.mark.parametrize("name", ["dots", *LAYERS])
def test_an_exported_program_at_an_unseen_length_and_batch(name):
    net = make(name).train()
    before = {n: p.clone() for n, p in net.state_dict().items()}
    program = export_program(net).module()
    assert net.training
    assert all(torch.equal(before[n], p) for n, p in net.state_dict().items())
    for T, B in ((7, 2), (23, 1), (2, 9)):
        values = inputs(net, T, B)
        for got, want in zip(program(*values), expected(net, values), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dots", "layer", *LAYERS])
def test_the_strict_exporter_takes_it_too(name):
    """It lets a compiler read the code, where the other one only runs it."""
    net = make(name)
    values = inputs(net, 5, 3)
    example = values if len(values) == 2 and name != "dots" else (values[0], values[1:])
    program = torch.export.export(net, example, strict=True)
    got = program.module()(*example)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), expected(net, values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def run_onnx(path, values: tuple[Tensor, ...]) -> list[Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    assert names == ["x", *(f"h0_{k}" for k in range(len(values) - 1))]
    assert [o.name for o in session.get_outputs()] == ["y", *(f"h_{k}" for k in range(len(values) - 1))]
    feed = {n: v.numpy() for n, v in zip(names, values, strict=True)}
    return [torch.from_numpy(o) for o in session.run(None, feed)]


@pytest.mark.parametrize(
    "name",
    ["layer", "characters", "pooled", "gru", "lstm", pytest.param("both-ways", marks=pytest.mark.slow)],
)
def test_onnx_at_an_unseen_length_and_batch(name, tmp_path):
    pytest.importorskip("onnxscript")
    net = make(name)
    path = export_onnx(net, tmp_path / "folder" / "net.onnx")
    for T, B in ((11, 2), (2, 7)):
        values = inputs(net, T, B)
        for got, want in zip(run_onnx(path, values), expected(net, values), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer", "pooled", "lstm"])
def test_onnx_step_by_step(name, tmp_path):
    pytest.importorskip("onnxscript")
    net = make(name)
    path = export_onnx(net, tmp_path / "step.onnx", step=True)
    values = inputs(net, 1, 5, step=True)
    for _ in range(3):  # the state that comes out goes in again
        got, want = run_onnx(path, values), expected(net, values, step=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        values = (values[0], *got[1:])


def test_an_export_takes_the_type_and_device_of_the_parameters():
    sizes = {"input_size": I, "hidden_size": H, "output_size": I}
    net = deeprnn.rnn(**sizes, dtype=torch.float64)
    x, h = torch.rand(3, 2, I, dtype=torch.float64), torch.rand(2, H, dtype=torch.float64)
    torch.testing.assert_close(export_program(net).module()(x, h)[0], net(x, (h,))[0], rtol=0, atol=1e-12)
    elsewhere = (deeprnn.rnn(**sizes, device="meta"), DeepRNN(I, H, device="meta"))
    elsewhere += (deeprnn.rnn(**sizes, output="categorical", device="meta"),)
    assert all(value.is_meta for net in elsewhere for value in _example(net, step=False))


def test_what_is_no_recurrence_of_ours_is_refused():
    with pytest.raises(UserError, match="got RNN"):
        export_program(torch.nn.RNN(I, H))  # type: ignore[arg-type]


def test_both_ways_cannot_be_exported_step_by_step(tmp_path):
    with pytest.raises(UserError, match="bidirectional"):
        export_onnx(make("both-ways"), tmp_path / "step.onnx", step=True)


@pytest.mark.parametrize("resets", [False, True])
def test_the_scan_behind_it_equals_the_reference(resets):
    net = make("dots").double()
    x = torch.randn(6, 3, I, dtype=torch.float64)
    reset = torch.rand(6, 3) < 0.4 if resets else None
    want = net(x, None, reset)[0]
    net.backend = "scan"
    torch.testing.assert_close(net(x, None, reset)[0], want)
