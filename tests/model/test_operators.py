"""The operators ⊕ and ▷ alone: by hand, gradients to second order, autocast, names of parameters."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from deeprnn import DeepRNN, Plus, Predict
from deeprnn.errors import UserError
from tests.peers import numpy_rnn

T, B, I, H, M, O = 3, 2, 3, 3, 2, 2
DOUBLE = {"dtype": torch.float64}

PLUSES: dict[str, dict] = {
    "shallow": {"units": ("tanh",)},
    "dt": {"intermediate_sizes": (M,), "units": ("tanh", "sigmoid")},
    "dts": {"intermediate_sizes": (M,), "shortcut": "last", "input_to": "all"},
    "dts-all": {"intermediate_sizes": (M, 3), "shortcut": "all", "input_to": "last", "units": ("tanh",)},
    "no-bias": {"intermediate_sizes": (M,), "bias": False, "shortcut": "last"},
    "identity": {"units": ("identity",)},
    "deep-input": {"input_mlp_sizes": (4,), "input_mlp_units": ("tanh",)},
    "skip": {"skip_size": 2, "intermediate_sizes": (M,), "input_to": "all"},
    "maxout": {"intermediate_sizes": (M,), "units": ("maxout:2", "tanh")},
    "lp": {"intermediate_sizes": (M,), "units": ("lp:2", "tanh"), "shortcut": "last"},
    "lp-input": {"input_mlp_sizes": (M,), "input_mlp_units": ("lp:2",)},
}
PREDICTS: dict[str, dict] = {
    "linear": {},
    "deep": {"sizes": (3, 2), "units": ("tanh", "sigmoid")},
    "shortcut": {"sizes": (3,), "shortcut": True, "units": ("tanh",)},
    "no-bias": {"sizes": (3,), "bias": False},
    "maxout": {"sizes": (3,), "units": ("maxout:2",)},
    "lp": {"sizes": (3,), "units": ("lp:2",)},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(0.6 * draw(*p.shape, seed=100 + i))
    return module


def plus(name: str, **more) -> Plus:
    return shaken(Plus(I, H, **DOUBLE, **{**PLUSES[name], **more}))  # type: ignore[return-value]


def predict(name: str) -> Predict:
    return shaken(Predict(H, O, **DOUBLE, **PREDICTS[name]))  # type: ignore[return-value]


def call_all(module: torch.nn.Module, method, *tensors: Tensor):
    """A function of the tensors and of every parameter, for gradcheck."""
    names = [name for name, _ in module.named_parameters()]

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *args):
            return method(self.inner, *args)

    def function(*args):
        parameters = {f"inner.{n}": p for n, p in zip(names, args[len(tensors) :], strict=True)}
        return functional_call(Call(), parameters, args[: len(tensors)])

    leaves = [t.detach().clone().requires_grad_() for t in (*tensors, *module.parameters())]
    return function, leaves


@pytest.mark.parametrize("name", PLUSES)
def test_plus_equals_the_numpy_operator(name):
    op = plus(name)
    x, h, skip = draw(B, I, seed=1), draw(B, H, seed=2), draw(B, 2, seed=3)
    got = op(x, h, skip if op.spec.skip_size else None)
    weights = {n: p.detach().numpy() for n, p in op.state_dict().items()}
    for b in range(B):
        want = numpy_rnn.plus(
            weights,
            "",
            list(op.spec.units),
            list(op.spec.input_mlp_units),
            x[b].numpy(),
            h[b].numpy(),
            skip=skip[b].numpy(),
        )
        np.testing.assert_allclose(got[b].detach().numpy(), want, rtol=1e-12)


@pytest.mark.parametrize("name", PREDICTS)
def test_predict_equals_the_numpy_operator(name):
    op, h = predict(name), draw(B, H, seed=2)
    weights = {n: p.detach().numpy() for n, p in op.state_dict().items()}
    got = op(h).detach().numpy()
    for b in range(B):
        want = numpy_rnn.predict(weights, "", list(op.spec.units), h[b].numpy())
        np.testing.assert_allclose(got[b], want, rtol=1e-12)


@pytest.mark.parametrize("name", PLUSES)
def test_plus_gradients_to_second_order(name):
    op = plus(name)
    x, h = draw(1, I, seed=1), draw(1, H, seed=2)
    more = (draw(1, 2, seed=3),) if op.spec.skip_size else ()
    function, leaves = call_all(op, lambda op, *a: op(*a), x, h, *more)
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("name", PREDICTS)
def test_predict_gradients_to_second_order(name):
    function, leaves = call_all(predict(name), lambda op, h: op(h), draw(1, H, seed=2))
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["shallow", "dts", "dts-all", "lp"])
def test_unrolled_gradients_to_second_order(name, backend):
    """Through time, resets and the fast backend's own backward; the second order passes by the plain one."""
    op = plus(name)
    reset = torch.tensor([[False, True], [False, False], [True, False]])
    x, h0 = draw(T, B, I, seed=1), draw(B, H, seed=2)
    function, leaves = call_all(op, lambda op, x, h0: op.unroll(x, h0, reset, backend=backend), x, h0)
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", [n for n in PLUSES if n not in ("skip",)])
def test_unrolling_is_stepping(name):
    op, x, h = plus(name), draw(T, B, I, seed=1), draw(B, H, seed=2)
    states, inner = op.unroll(x, h)
    for t in range(T):
        layers = op.layers(x[t], h)
        h = layers[-1]
        torch.testing.assert_close(states[t], h)
        torch.testing.assert_close(inner[t], torch.cat([*layers[:-1], h[:, :0]], -1))


def test_unrolling_with_masks_is_stepping_with_masks():
    op, x, h = plus("dts"), draw(T, B, I, seed=1), draw(B, H, seed=2)
    masks = {"state": draw(B, H, seed=4), "z1": draw(T, B, M, seed=5)}
    states, _ = op.unroll(x, h, masks=masks)
    A = op.project(x)
    for t in range(T):
        before = h * masks["state"]
        z = torch.sigmoid(A[t, :, :M] + before @ op.W1.T) * masks["z1"][t]
        h = torch.sigmoid(A[t, :, M:] + z @ op.W2.T + before @ op.S2.T)
        torch.testing.assert_close(states[t], h)


WRONG = {
    "(B, H) = (2, 3), got (1, 3)": {"h0": torch.zeros(1, H, **DOUBLE)},
    "(2, 3), got (2, 4)": {"h0": torch.zeros(B, H + 1, **DOUBLE)},
    "is on meta, the input on cpu": {"h0": torch.zeros(B, H, device="meta", **DOUBLE)},
    "(T, B) = (3, 2), got torch.int64": {"reset": torch.zeros(T, B, dtype=torch.int64)},
    "got torch.bool of shape (3, 1)": {"reset": torch.zeros(T, 1, dtype=torch.bool)},
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.parametrize("name", ["dts", "maxout"])
def test_what_does_not_fit_never_reaches_a_kernel(name, words):
    given = {"h0": draw(B, H), "reset": None, **WRONG[words]}
    with pytest.raises(UserError, match=re.escape(words)):
        plus(name).unroll(draw(T, B, I), given["h0"], given["reset"])


@pytest.mark.parametrize(("name", "shape"), [("W1", (M, H + 1)), ("W2", (H, M - 1)), ("S2", (H, H - 1))])
def test_a_matrix_of_another_shape_never_reaches_a_kernel(name, shape):
    op, h0 = plus("dts"), draw(B, shape[1] if name == "W1" else H)
    setattr(op, name, torch.nn.Parameter(draw(*shape)))
    with pytest.raises(UserError, match=re.escape(f"must be {(M, H)}, {(H, M)}, {(H, H)}, got")):
        op.unroll(draw(T, B, I), h0)


def test_an_rnn_by_hand():
    op, out = plus("dts"), predict("deep")
    h, ys = torch.zeros(B, H, **DOUBLE), []
    x = draw(T, B, I, seed=1)
    for x_t in x:
        h = op(x_t, h)
        ys.append(out(h))
    torch.testing.assert_close(torch.stack(ys), out(op.unroll(x, torch.zeros(B, H, **DOUBLE))[0]))


def test_commutativity():
    op, a, b = plus("dts"), draw(B, H, seed=1), draw(B, H, seed=2)
    want = (op(a, b) - op(b, a)).square().sum(-1).mean()
    torch.testing.assert_close(op.commutativity(a, b), want)
    assert op.commutativity(a, b) > 0
    assert op.commutativity(a, a) == 0
    with torch.no_grad():
        op.U1.copy_(op.W1), op.U2.copy_(op.S2)
    assert op.commutativity(a, b).item() == pytest.approx(0, abs=1e-25)


def test_commutativity_needs_equal_sizes():
    with pytest.raises(UserError, match="size: this ⊕ has an input of 4"):
        Plus(4, 5).commutativity(torch.zeros(1, 4), torch.zeros(1, 5))


def test_a_skip_input_that_is_missing_is_named():
    with pytest.raises(UserError, match="skip"):
        plus("skip")(draw(B, I), draw(B, H))


@pytest.mark.parametrize("name", ["dts", "lp"])
def test_the_state_keeps_its_type_under_autocast(name):
    op = shaken(Plus(I, H, **PLUSES[name]))
    x, h = draw(T, B, I).float(), draw(B, H).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = op.unroll(x, h)
        stepped = op(x[0], h)  # type: ignore[operator]
        low, _ = op.unroll(x, h.bfloat16())
    assert states.dtype == stepped.dtype == low.dtype == torch.float32
    torch.testing.assert_close(stepped, states[0])
    torch.testing.assert_close(states, op.unroll(x, h)[0], rtol=0.02, atol=0.02)
    assert not torch.equal(states, op.unroll(x, h)[0])  # the projection did run in bf16


def test_the_last_layer_in_pieces_is_the_whole():
    for name in PREDICTS:
        op, h = predict(name), draw(B, H, seed=2)
        y, weight, bias = op.last_layer(h)
        torch.testing.assert_close(torch.nn.functional.linear(y, weight, bias), op(h))


def test_parameters_have_the_papers_letters():
    names = [n for n, _ in Plus(I, H, **PLUSES["dts"]).named_parameters()]
    assert names == ["W1", "U1", "b1", "W2", "U2", "S2", "b2"]
    names = [n for n, _ in Predict(H, O, sizes=(3,), shortcut=True).named_parameters()]
    assert names == ["V1", "b1", "V2", "K", "b2"]


def test_symbols_gather_a_row():
    op = plus("shallow", symbols=True)
    assert op.U1.shape == (I, H)
    symbols = torch.tensor([2, 0])
    torch.testing.assert_close(op.project(symbols), op.U1[symbols] + op.b1)


def test_from_spec_is_the_same_operator():
    op = plus("lp")
    again = Plus.from_spec(op.spec, **DOUBLE)
    again.load_state_dict(op.state_dict())
    x, h = draw(B, I), draw(B, H)
    assert torch.equal(again(x, h), op(x, h))


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Plus(3, 4, intermediate_sizes=(5,), shortcut="last"), "3 ⊕ 4 -> 5 -> 4.*shortcut=last"),
        (Predict(4, 2, sizes=(3,), units=("relu",)), "▷ 4 -> 3 -> 2, units=relu"),
    ],
)
def test_an_operator_says_what_it_is(op, words):
    import re

    assert re.search(words, repr(op))


@pytest.mark.parametrize("setting", [{"shortcut": "some"}, {"units": ("tan",)}, {"intermediate_sizes": (0,)}])
def test_wrong_settings_are_refused(setting):
    with pytest.raises(UserError):
        Plus(3, 4, **setting)


@pytest.mark.parametrize(
    ("settings", "x", "h", "words"),
    [
        ({}, (B, I + 1), (B, H), "Plus: x must be (..., 3), got (2, 4)"),
        ({}, (B, I), (B, H + 1), "Plus: h must be (2, 3), got (2, 4)"),
        ({}, (B, I), (B + 1, H), "Plus: h must be (2, 3), got (3, 3)"),
        ({"input_mlp_sizes": (4,)}, (B, I + 1), (B, H), "Plus: x must be (..., 3), got (2, 4)"),
        (
            {"symbols": True},
            (B, I),
            (B, H),
            "Plus: x must be integer symbols (...), got torch.float64 of shape (2, 3)",
        ),
    ],
)
def test_a_step_that_does_not_fit_is_named(settings, x, h, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
        Plus(I, H, **DOUBLE, **settings)(draw(*x), draw(*h))


@pytest.mark.parametrize("name", ["dts", "maxout"])
@pytest.mark.parametrize(
    ("shape", "words"),
    [((T, B, I + 1), "Plus: x must be (T, B, 3), got (3, 2, 4)"),
     ((B, I), "Plus: x must be (T, B, 3), got (2, 3): call ⊕ itself for one step")],
)  # fmt: skip
def test_a_sequence_that_does_not_fit_is_named(name, shape, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
        plus(name).unroll(draw(*shape), draw(B, H))


def test_a_skip_input_that_does_not_fit_is_named():
    op, x, h = plus("skip"), draw(B, I), draw(B, H)
    with pytest.raises(UserError, match="pass it as `skip`"):
        op(x, h)
    with pytest.raises(UserError, match=re.escape("Plus: skip must be (..., 2), got (2, 3)")):
        op(x, h, draw(B, 3))


@pytest.mark.parametrize("name", PREDICTS)
def test_a_state_that_does_not_fit_the_output_is_named(name):
    with pytest.raises(UserError, match=re.escape("Predict: h must be (..., 3), got (2, 4)")):
        predict(name)(draw(B, H + 1))


def test_one_state_may_serve_a_batch():
    op, x, h = plus("dts"), draw(B, I), draw(1, H)
    torch.testing.assert_close(op(x, h), op(x, h.expand(B, H)))
    torch.testing.assert_close(op(x[0], h[0]), op(x, h)[0])


@pytest.mark.parametrize("shortcut", ["last", "all"])
def test_a_shortcut_with_nothing_to_go_around_is_told(shortcut):
    words = (
        f"shortcut='{shortcut}' goes around intermediate layers, and there are none: give intermediate_sizes"
    )
    for make in (Plus, DeepRNN):
        with pytest.warns(UserWarning, match=words) as caught:
            idle = make(I, H, shortcut=shortcut)
        assert caught[0].filename == __file__
        assert [p.shape for p in idle.parameters()] == [p.shape for p in make(I, H).parameters()]
