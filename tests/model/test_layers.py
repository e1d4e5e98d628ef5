"""DeepRNN: the deep settings, the forms of calling it, and everything an ordinary module can do."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import deeprnn
from deeprnn import DeepRNN
from deeprnn.backends.choose import fastest_backend
from deeprnn.cells.deep_transition import DeepTransition

T, B, I, H = 5, 3, 4, 6
DOUBLE = {"dtype": torch.float64}
DEEP = {"intermediate_sizes": (5, 3), "shortcut": "last", "input_to": "all"}

LAYERS: dict[str, dict] = {
    "plain": {},
    "relu-stack": {"num_layers": 2, "nonlinearity": "relu"},
    "both-ways": {"num_layers": 2, "bidirectional": True},
    "dt": {"intermediate_sizes": 5, "nonlinearity": "sigmoid"},
    "dts": DEEP,
    "dts-all-stack": {**DEEP, "shortcut": "all", "num_layers": 2, "intermediate_nonlinearity": "relu"},
    "dts-input-last": {**DEEP, "input_to": "last", "bias": False},
    "dts-both-ways": {**DEEP, "bidirectional": True, "num_layers": 2},
    "maxout": {**DEEP, "intermediate_nonlinearity": "maxout:2"},
}
ONE_WAY = [n for n, s in LAYERS.items() if not s.get("bidirectional")]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def layer(name: str, **more) -> DeepRNN:
    torch.manual_seed(1)
    return DeepRNN(I, H, **DOUBLE, **{**LAYERS[name], **more})


def count(net: DeepRNN) -> int:
    return net.num_layers * (2 if net.bidirectional else 1)


# ---- forms of calling


def test_the_deep_transition_is_the_equation():
    net = layer("dts")
    x, h0 = draw(T, B, I), draw(1, B, H, seed=1)
    p = dict(net.named_parameters())
    h, out = h0[0], []
    for x_t in x:
        z1 = torch.tanh(
            x_t @ p["weight_ih_l0"].T + h @ p["weight_hh_l0"].T + p["bias_ih_l0"] + p["bias_hh_l0"]
        )
        z2 = torch.tanh(x_t @ p["weight_ih_l0_d2"].T + z1 @ p["weight_zh_l0_d2"].T + p["bias_l0_d2"])
        h = torch.tanh(
            x_t @ p["weight_ih_l0_d3"].T
            + z2 @ p["weight_zh_l0_d3"].T
            + h @ p["weight_sh_l0_d3"].T
            + p["bias_l0_d3"]
        )
        out.append(h)
    output, h_n = net(x, h0)
    torch.testing.assert_close(output, torch.stack(out))
    torch.testing.assert_close(h_n[0], h)


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_states(name):
    net = layer(name)
    output, h_n, states = net(draw(T, B, I), return_all_states=True)
    ways = 2 if net.bidirectional else 1
    assert output.shape == (T, B, H * ways)
    assert h_n.shape == (count(net), B, H)
    sizes = [*net.intermediate_sizes, H]
    assert [[z.shape for z in level] for level in states] == [[(T, B, m) for m in sizes]] * count(net)
    torch.testing.assert_close(torch.cat([level[-1] for level in states[-ways:]], -1), output)
    for k, level in enumerate(states):
        backward = net.bidirectional and k % 2
        torch.testing.assert_close(level[-1][0 if backward else -1], h_n[k])


@pytest.mark.parametrize("name", LAYERS)
def test_batch_first_moves_the_batch_of_sequences_and_nothing_else(name):
    net, first = layer(name), layer(name, batch_first=True)
    x, h0 = draw(T, B, I), draw(count(net), B, H, seed=1)
    output, h_n, states = net(x, h0, return_all_states=True)
    other, other_n, other_states = first(x.transpose(0, 1), h0, return_all_states=True)
    torch.testing.assert_close(other.transpose(0, 1), output)
    torch.testing.assert_close(other_n, h_n)
    for mine, theirs in zip(states, other_states, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_unbatched_is_a_batch_of_one(name, batch_first):
    net = layer(name, batch_first=batch_first)
    x, h0 = draw(T, I), draw(count(net), H, seed=1)
    one = 0 if batch_first else 1
    output, h_n, states = net(x.unsqueeze(one), h0.unsqueeze(1), return_all_states=True)
    alone, alone_n, alone_states = net(x, h0, return_all_states=True)
    torch.testing.assert_close(alone, output.squeeze(one))
    torch.testing.assert_close(alone_n, h_n.squeeze(1))
    torch.testing.assert_close(alone_states[0][0], states[0][0].squeeze(one))


@pytest.mark.parametrize("name", ONE_WAY)
def test_steps_equal_the_sequence(name):
    net, x, h = layer(name), draw(T, B, I), None
    output, h_n = net(x)
    for t in range(T):
        y, h = net.step(x[t], h)
        torch.testing.assert_close(y, output[t])
    torch.testing.assert_close(h, h_n)


@pytest.mark.parametrize("name", ONE_WAY)
def test_two_halves_equal_the_whole(name):
    net, x = layer(name), draw(T, B, I)
    output, h_n = net(x)
    first, h = net(x[:2])
    second, h = net(x[2:], h)
    torch.testing.assert_close(torch.cat([first, second]), output)
    torch.testing.assert_close(h, h_n)


@pytest.mark.parametrize("lengths", [[2, 5, 3], [4, 4, 4], [1, 5, 1]])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_equals_each_sequence_alone(name, lengths):
    net = layer(name)
    sequences = [draw(n, I, seed=n + 10 * i) for i, n in enumerate(lengths)]
    h0 = draw(count(net), len(lengths), H, seed=1)
    packed, h_n, states = net(pack_sequence(sequences, enforce_sorted=False), h0, return_all_states=True)
    output, got = pad_packed_sequence(packed)
    inner, _ = pad_packed_sequence(states[-1][0])
    assert got.tolist() == lengths
    for i, x in enumerate(sequences):
        alone, alone_n, alone_states = net(x, h0[:, i].contiguous(), return_all_states=True)
        torch.testing.assert_close(output[: len(x), i], alone)
        torch.testing.assert_close(h_n[:, i], alone_n)
        torch.testing.assert_close(inner[: len(x), i], alone_states[-1][0])


@pytest.mark.parametrize("name", ["plain", "dts-both-ways", "maxout"])
def test_an_empty_batch(name):
    net = layer(name)
    x = torch.zeros(T, 0, I, requires_grad=True, **DOUBLE)
    output, h_n = net(x)
    assert output.shape == (T, 0, H * (2 if net.bidirectional else 1))
    assert h_n.shape == (count(net), 0, H)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in net.parameters())


def test_dropout_acts_between_levels_in_training_alone():
    net = layer("relu-stack", dropout=0.5)
    x = draw(T, B, I)
    plain = layer("relu-stack")(x)[0]
    torch.testing.assert_close(net.eval()(x)[0], plain)
    net.train()
    _, _, states = net(x, return_all_states=True)
    torch.testing.assert_close(states[0][0], layer("relu-stack")(x, return_all_states=True)[2][0][0])
    assert not torch.allclose(net(x)[0], plain)
    gone = layer("relu-stack", dropout=1.0)
    nothing = torch.zeros(T, B, I, **DOUBLE)
    with torch.no_grad():
        gone.weight_ih_l0.zero_()
    torch.testing.assert_close(gone(x)[0], gone(nothing)[0])


# ---- gradients


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["plain", "dts-all-stack", "dts-both-ways", "maxout"])
def test_gradients_to_second_order(name, backend):
    small = {"intermediate_sizes": (2,)} if "intermediate_sizes" in LAYERS[name] else {}
    smooth = {"intermediate_nonlinearity": "tanh"} if name == "dts-all-stack" else {}
    torch.manual_seed(0)
    net = DeepRNN(2, 2, **DOUBLE, **{**LAYERS[name], **small, **smooth, "backend": backend})
    names = [n for n, _ in net.named_parameters()]

    def function(x, h0, *weights):
        return torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x, h0))

    leaves = [draw(3, 2, 2), draw(count(net), 2, 2, seed=1), *net.parameters()]
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)


def test_auto_takes_the_fast_backend_where_it_can_serve():
    case = DeepTransition((5, 6), ("tanh", "tanh"), (False, True))
    assert fastest_backend(case.cell.text, "cpu", torch.float64) == "cpu"
    assert fastest_backend(case.cell.text, "cpu", torch.bfloat16) == "reference"


# ---- an ordinary module


def test_deepcopy_pickle_and_state_dict():
    net, x = layer("dts-both-ways"), draw(T, B, I)
    want = net(x)[0]
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), layer("dts-both-ways")]
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in copies[2].parameters():
            p.zero_()
    copies[2].load_state_dict(torch.load(file, weights_only=True))
    for other in copies:
        assert torch.equal(other(x)[0], want)
        with torch.no_grad():
            other.weight_hh_l0.zero_()
    assert torch.equal(net(x)[0], want)  # the copies share nothing with it


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations(make):
    net, x = layer("dts"), draw(T, B, I)
    make(net, "weight_hh_l0")
    output = net(x)[0]
    if make is parametrizations.orthogonal:
        w = net.weight_hh_l0
        torch.testing.assert_close(w.mT @ w if w.shape[0] > w.shape[1] else w @ w.mT, torch.eye(5, **DOUBLE))
    output.sum().backward()
    originals = [p for n, p in net.named_parameters() if n.startswith("parametrizations")]
    assert originals
    assert all(p.grad is not None and p.grad.isfinite().all() for p in originals)


def test_functional_call_uses_the_given_parameters():
    net, other, x = layer("dts"), layer("dts"), draw(T, B, I)
    other.reset_parameters()
    got = torch.func.functional_call(net, dict(other.named_parameters()), (x,))[0]
    assert torch.equal(got, other(x)[0])
    assert not torch.equal(got, net(x)[0])


def test_moving_and_casting():
    net = layer("dts").float()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net(draw(T, B, I).float())[0].dtype == torch.float32
    with torch.device("meta"):
        empty = DeepRNN(I, H, **DEEP)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(net.state_dict())
    assert torch.equal(filled(draw(T, B, I).float())[0], net(draw(T, B, I).float())[0])


@pytest.mark.parametrize("name", ["plain", "dts-both-ways", "maxout"])
def test_the_state_keeps_its_type_under_autocast(name):
    net, x = layer(name).float(), draw(T, B, I).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, h_n = net(x)
        low, _ = net(x.bfloat16(), h_n.bfloat16())
    assert output.dtype == h_n.dtype == low.dtype == torch.float32
    torch.testing.assert_close(output, net(x)[0], rtol=0.03, atol=0.03)
    if not net.bidirectional:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, h = net.step(x[0])
        assert y.dtype == h.dtype == torch.float32
        torch.testing.assert_close(y, output[0])


def test_a_replica_of_data_parallel_runs():
    """It has no parameters of its own: their copies are plain attributes."""
    net, x = DeepRNN(I, H, **DEEP), torch.randn(T, B, I)
    replica = net._replicate_for_data_parallel()
    for name, weight in net.named_parameters():
        setattr(replica, name, weight.clone())
    assert not list(replica.parameters())
    torch.testing.assert_close(replica(x), net(x))
    torch.testing.assert_close(replica.step(x[0]), net.step(x[0]))


def test_reset_parameters_draws_anew_within_nn_rnns_bounds():
    net = layer("dts-both-ways")
    before = net.weight_hh_l0.clone()
    net.reset_parameters()
    assert not torch.equal(net.weight_hh_l0, before)
    assert all(p.abs().max() <= H**-0.5 for p in net.parameters())


def test_the_repr_tells_what_is_not_default():
    assert repr(DeepRNN(4, 6)) == "DeepRNN(4, 6)"
    net = DeepRNN(4, 6, 2, "relu", bias=False, batch_first=True, dropout=0.1, bidirectional=True, **DEEP)
    want = (
        "DeepRNN(4, 6, intermediate_sizes=(5, 3), num_layers=2, nonlinearity='relu', bias=False, "
        "batch_first=True, dropout=0.1, bidirectional=True, shortcut='last', input_to='all')"
    )
    assert repr(net) == want


def test_flatten_parameters_is_there_for_old_callers():
    net, x = layer("plain"), draw(T, B, I)
    want = net(x)[0]
    net.flatten_parameters()
    assert torch.equal(net(x)[0], want)


def test_a_unit_of_ones_own():
    net = layer("plain", nonlinearity=lambda a: torch.sin(a))
    x = draw(1, B, I)
    a = nn.functional.linear(x, net.weight_ih_l0, net.bias_ih_l0 + net.bias_hh_l0)
    torch.testing.assert_close(net(x)[0], a.sin())


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_size": 0}, "input_size.*got 0"),
        ({"hidden_size": 2.0}, "hidden_size should be of type int, got: float.*2.0"),
        ({"num_layers": 0}, "num_layers.*got 0"),
        ({"num_layers": True}, "num_layers.*got: bool.*True"),
        ({"nonlinearity": "sine"}, "nonlinearity.*'sine'"),
        ({"nonlinearity": None}, "nonlinearity.*None"),
        ({"nonlinearity": nn.GELU}, "nonlinearity.*class.*GELU()"),
        ({"nonlinearity": nn.PReLU()}, "nonlinearity.*'PReLU' has parameters"),
        ({"nonlinearity": "lp:2"}, "^nonlinearity 'lp:2'"),
        ({"intermediate_sizes": 3, "intermediate_nonlinearity": "lp"}, "^intermediate_nonlinearity 'lp'"),
        ({"bias": 1}, "bias.*got: int.*1"),
        ({"batch_first": "yes"}, "batch_first.*'yes'"),
        ({"bidirectional": None}, "bidirectional.*None"),
        ({"dropout": 1.5}, "dropout.*got 1.5"),
        ({"dropout": float("nan")}, "dropout.*nan"),
        ({"dropout": True}, "dropout.*True"),
        ({"intermediate_sizes": (5, 0)}, r"intermediate_sizes\[1\].*got 0"),
        ({"intermediate_sizes": 2.5}, "intermediate_sizes.*2.5"),
        ({"intermediate_sizes": "5"}, "intermediate_sizes.*'5'"),
        ({"intermediate_nonlinearity": 3}, "intermediate_nonlinearity.*3"),
        ({"shortcut": True}, "shortcut.*True"),
        ({"input_to": "second"}, "input_to.*'second'"),
        ({"backend": "gpu"}, "backend.*'gpu'"),
        ({"backend": []}, r"backend.*\[\]"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DeepRNN(**{"input_size": I, "hidden_size": H, **arguments})


@pytest.mark.parametrize(
    ("x", "h0", "error", "words"),
    [
        (torch.zeros(T, B, I + 1), None, RuntimeError, f"Expected {I}, got {I + 1}"),
        (torch.zeros(I), None, ValueError, "2D or 3D, got 1D"),
        (torch.zeros(1, T, B, I), None, ValueError, "got 4D"),
        (torch.zeros(0, B, I), None, RuntimeError, "larger than 0"),
        ([[0.0]], None, TypeError, "input must be a Tensor.*list"),
        (None, None, TypeError, "NoneType"),
        (torch.zeros(T, B, I, **DOUBLE), None, ValueError, "float64.*float32"),
        (torch.zeros(T, B, I, dtype=torch.int64), None, ValueError, r"int64.*: input.to\(torch.float32\)$"),
        (torch.zeros(T, B, I), torch.zeros(B, H), RuntimeError, "hx should also be 3-D"),
        (torch.zeros(T, I), torch.zeros(1, B, H), RuntimeError, "hx should also be 2-D"),
        (torch.zeros(T, B, I), torch.zeros(1, B + 1, H), RuntimeError, r"Expected hidden size \(1, 3, 6\)"),
        (torch.zeros(T, B, I), torch.zeros(2, B, H), RuntimeError, "Expected hidden size"),
        (torch.zeros(T, B, I), torch.zeros(1, B, H, **DOUBLE), RuntimeError, "hx has dtype"),
        (torch.zeros(T, B, I), [0.0], TypeError, "hx.*list"),
    ],
)
def test_a_wrong_input_is_named_with_its_value(x, h0, error, words):
    with pytest.raises(error, match=words):
        DeepRNN(I, H)(x, h0)


@pytest.mark.parametrize(
    "x", [torch.zeros(T, B, I), torch.zeros(B, I + 1), None, torch.zeros(B, I, **DOUBLE)]
)
@pytest.mark.parametrize("kind", [DeepRNN, deeprnn.GRU, deeprnn.LSTM, deeprnn.RHN])
def test_a_wrong_step_is_named(kind, x):
    with pytest.raises((RuntimeError, ValueError), match=r"x must be|dtype"):
        kind(I, H).step(x)


def test_both_ways_has_no_step():
    with pytest.raises(RuntimeError, match="bidirectional=False"):
        DeepRNN(I, H, bidirectional=True).step(torch.zeros(B, I))


def test_a_wrong_packed_sequence_is_named():
    packed = pack_padded_sequence(torch.zeros(T, B, I + 1), torch.tensor([5, 3, 2]))
    with pytest.raises(RuntimeError, match=f"Expected {I}, got {I + 1}"):
        DeepRNN(I, H)(packed)


@pytest.mark.parametrize("kind", [DeepRNN, deeprnn.GRU, deeprnn.LSTM, deeprnn.RHN])
def test_dropout_with_nothing_to_drop_warns_whoever_asked_for_it(kind):
    with pytest.warns(UserWarning, match="num_layers") as warned:
        kind(I, H, dropout=0.5)
    assert warned[0].filename == __file__


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 6),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.lists(st.integers(-1, 4), max_size=3),
    st.sampled_from(["tanh", "relu", "maxout:2", "lp", "none", "last", "all", "first", "auto", "reference"]),
    st.just({}),
    st.just(object()),
)
GOOD = {
    "input_size": st.integers(1, 4),
    "hidden_size": st.integers(1, 4),
    "num_layers": st.integers(1, 3),
    "nonlinearity": st.sampled_from(["tanh", "relu", "sigmoid", "identity", "maxout:2"]),
    "bias": st.booleans(),
    "batch_first": st.booleans(),
    "dropout": st.floats(0, 1),
    "bidirectional": st.booleans(),
    "intermediate_sizes": st.one_of(st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2)),
    "intermediate_nonlinearity": st.sampled_from(["tanh", "relu", None, "maxout:3"]),
    "shortcut": st.sampled_from(["none", "last", "all"]),
    "input_to": st.sampled_from(["first", "last", "all"]),
    "backend": st.sampled_from(["auto", "reference"]),
}


@st.composite
def arguments(draw, wrong: bool):
    """Good settings, and with `wrong` one or two of them replaced by anything at all."""
    chosen = {name: draw(good) for name, good in GOOD.items()}
    if any("maxout" in str(chosen[n]) for n in ("nonlinearity", "intermediate_nonlinearity")):
        chosen["backend"] = "auto"
    replaced = draw(st.sets(st.sampled_from(sorted(GOOD)), min_size=1, max_size=2)) if wrong else set()
    chosen.update({name: draw(ANY) for name in replaced})
    return chosen, replaced


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments(wrong=False), st.integers(1, 3), st.integers(0, 2))
def test_every_good_setting_runs(chosen, steps, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = DeepRNN(**chosen[0])
    lead = (batch, steps) if net.batch_first else (steps, batch)
    output, h_n = net(torch.randn(*lead, net.input_size))
    assert output.shape == (*lead, net.hidden_size * (2 if net.bidirectional else 1))
    assert h_n.shape == (count(net), batch, net.hidden_size)
    assert len(dict(net.named_parameters())) == len(net.state_dict())


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments(wrong=True))
def test_anything_else_is_a_value_type_or_runtime_error_that_names_it(case):
    chosen, replaced = case
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = DeepRNN(**chosen)
    except (ValueError, TypeError, RuntimeError) as error:
        words = str(error)
        assert any(re.search(rf"\b{name}", words) for name in replaced), words
        shown = [repr(chosen[name]) for name in replaced]
        inside = [repr(v) for name in replaced if isinstance(chosen[name], list) for v in chosen[name]]
        assert any(value.strip("'\"") in words for value in (*shown, *inside)), words
    else:
        net(torch.randn(2, 2, net.input_size))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.one_of(st.none(), st.lists(st.integers(0, 5), max_size=4)),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.booleans(),
)
def test_any_shape_runs_or_is_refused(shape, h_shape, dtype, batch_first):
    net = DeepRNN(2, 3, batch_first=batch_first)
    h0 = None if h_shape is None else torch.zeros(h_shape)
    try:
        output, _ = net(torch.zeros(shape, dtype=dtype), h0)
    except (ValueError, RuntimeError) as error:
        assert re.search("input|hidden|hx|length", str(error))  # noqa: PT017
    else:
        assert output.shape == (*shape[:-1], 3)
