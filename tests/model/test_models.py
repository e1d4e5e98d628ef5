"""The paper's models against an independent NumPy loop, and the identities between them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

import deeprnn
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.model.init import CHAR, MUSIC, WORD
from deeprnn.model.models import default_init
from deeprnn.model.specs import Dropout
from tests.peers import numpy_rnn

T, B, I, H, M, D, O = 5, 3, 4, 6, 5, 7, 4
SIZES = {"input_size": I, "hidden_size": H, "output_size": O}
F64 = {"dtype": torch.float64, "seed": 1}
S = "sigmoid"

# name: (builder, its options, what the NumPy loop is told: units per level, of the output, of the input MLP)
MODELS: dict[str, tuple[str, dict, dict]] = {
    "rnn": ("rnn", {}, {"units": [[S]]}),
    "rnn-tanh-no-bias": ("rnn", {"unit": "tanh", "bias": False}, {"units": [["tanh"]]}),
    "dt": ("dt_rnn", {"intermediate_size": M}, {"units": [[S, S]]}),
    "dt-3": ("dt_rnn", {"intermediate_size": (M, 3)}, {"units": [[S, S, S]]}),
    "dt-input-last": ("dt_rnn", {"intermediate_size": M, "input_to": "last"}, {"units": [[S, S]]}),
    "dts": ("dts_rnn", {"intermediate_size": M}, {"units": [[S, S]]}),
    "dts-all": (
        "dts_rnn",
        {"intermediate_size": (M, 3), "shortcut": "all", "intermediate_unit": "relu"},
        {"units": [["relu", "relu", S]]},
    ),
    "do": ("do_rnn", {"output_hidden_size": D}, {"units": [[S]], "output_units": [S]}),
    "do-shortcut": (
        "do_rnn",
        {"output_hidden_size": (D, 3), "output_shortcut": True, "output_unit": "relu"},
        {"units": [[S]], "output_units": ["relu", "relu"]},
    ),
    "dot": (
        "dot_rnn",
        {"intermediate_size": M, "output_hidden_size": D},
        {"units": [[S, S]], "output_units": [S]},
    ),
    "dots": (
        "dots_rnn",
        {"intermediate_size": M, "output_hidden_size": D},
        {"units": [[S, S]], "output_units": [S]},
    ),
    "dots-star": (
        "dots_rnn",
        {
            "intermediate_size": M,
            "output_hidden_size": D,
            "unit": "tanh",
            "intermediate_unit": "lp:2",
            "output_unit": "maxout:3",
        },
        {"units": [["lp:2", "tanh"]], "output_units": ["maxout:3"]},
    ),
    "stacked": ("stacked_rnn", {"num_levels": 3}, {"units": [[S]] * 3}),
    "stacked-sizes": ("stacked_rnn", {"hidden_size": (H, 3)}, {"units": [[S]] * 2}),
    "stacked-all-out": (
        "stacked_rnn",
        {"output_from": "all", "hidden_size": (H, 3)},
        {"units": [[S]] * 2, "all_states_out": True},
    ),
    "stacked-input-everywhere": (
        "stacked_rnn",
        {"input_to_levels": "all", "num_levels": 3},
        {"units": [[S]] * 3},
    ),
    "stacked-both": (
        "stacked_rnn",
        {"input_to_levels": "all", "output_from": "all"},
        {"units": [[S]] * 2, "all_states_out": True},
    ),
    "stacked-dts": ("stacked_dts_rnn", {"intermediate_size": M}, {"units": [[S, S]] * 2}),
    "stacked-dots-everything": (
        "stacked_dts_rnn",
        {
            "intermediate_size": M,
            "output_hidden_size": D,
            "input_to_levels": "all",
            "output_from": "all",
            "input_mlp": (3, 8),
        },
        {"units": [[S, S]] * 2, "output_units": [S], "all_states_out": True, "input_units": [S, S]},
    ),
    "deep-input": ("rnn", {"input_mlp": (3, 8)}, {"units": [[S]], "input_units": [S, S]}),
    "maxout-state": ("rnn", {"unit": "maxout:2"}, {"units": [["maxout:2"]]}),
    "lp-deep": ("dt_rnn", {"intermediate_size": (M, 3), "unit": "lp:3"}, {"units": [["lp:3"] * 3]}),
}


def model(name: str, **more):
    builder, options, peer = MODELS[name]
    made = getattr(deeprnn, builder)(**{**SIZES, **F64, **options, **more})
    shake(made)
    return made, peer


def shake(module: torch.nn.Module) -> None:
    """Give every parameter, biases, orders and centres too, a value that shows when it is left out."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def inputs(symbols: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if symbols:
        return torch.randint(I, (T, B), generator=generator)
    return torch.randn(T, B, I, generator=generator, dtype=torch.float64)


def numpy_weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in module.state_dict().items()}


def assert_equal(a: torch.Tensor, b: torch.Tensor | np.ndarray, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.detach(), torch.as_tensor(b).detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("resets", [False, True], ids=["", "reset"])
@pytest.mark.parametrize("symbols", [False, True], ids=["vectors", "symbols"])
@pytest.mark.parametrize("name", MODELS)
def test_every_builder_equals_the_numpy_loop(name, symbols, resets):
    net, peer = model(name, symbols=symbols)
    x = inputs(symbols)
    state = tuple(torch.full_like(h, 0.3) for h in net.initial_state(B))
    reset = torch.rand(T, B, generator=torch.Generator().manual_seed(5)) < 0.4 if resets else None
    logits, last = net(x, state, reset)
    want, want_last = numpy_rnn.run(
        numpy_weights(net),
        x.numpy(),
        symbols=symbols,
        reset=None if reset is None else reset.numpy(),
        state=[h.numpy() for h in state],
        **peer,
    )
    assert_equal(logits, want)
    for mine, theirs in zip(last, want_last, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_with_carried_state_equal_the_whole(name):
    net, _ = model(name)
    x = inputs(False)
    whole, last = net(x)
    first, state = net(x[:2])
    second, state = net(x[2:], state)
    assert_equal(torch.cat([first, second]), whole)
    for a, b in zip(state, last, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("symbols", [False, True], ids=["vectors", "symbols"])
@pytest.mark.parametrize("name", ["rnn", "dots", "dots-star", "stacked-dots-everything"])
def test_steps_equal_the_sequence(name, symbols):
    net, _ = model(name, symbols=symbols)
    x, state, steps = inputs(symbols), None, []
    for frame in x:
        y, state = net.step(frame, state)
        steps.append(y)
    whole, last = net(x)
    assert_equal(torch.stack(steps), whole)
    assert state is not None
    for a, b in zip(state, last, strict=True):
        assert_equal(a, b)


def test_a_reset_forgets_what_came_before():
    net, _ = model("dots")
    x = inputs(False)
    reset = torch.zeros(T, B, dtype=torch.bool)
    reset[2] = True
    assert_equal(net(x, reset=reset)[0][2:], net(x[2:])[0])


def test_uint8_frames_and_bools_equal_floats():
    net, _ = model("dts")
    frames = (inputs(False) > 0).to(torch.uint8)
    want = net(frames.double())[0]
    assert_equal(net(frames)[0], want)
    assert_equal(net(frames.bool())[0], want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_symbols_are_gathered_whatever_their_integer_type(dtype):
    net, _ = model("dots", symbols=True)
    x = inputs(True)
    one_hot = torch.nn.functional.one_hot(x, I).double()
    dense, _ = model("dots")
    dense.load_state_dict({n: p.mT if ".U" in n else p for n, p in net.state_dict().items()})
    assert_equal(net(x.to(dtype))[0], dense(one_hot)[0])


def test_dt_of_depth_1_equals_rnn():
    shallow, _ = model("rnn")
    deep = deeprnn.dt_rnn(intermediate_size=(), **SIZES, **F64)
    deep.load_state_dict(shallow.state_dict())
    assert deep.spec == shallow.spec
    assert_equal(deep(inputs(False))[0], shallow(inputs(False))[0])


def test_zero_shortcuts_make_dts_equal_dt():
    dt, _ = model("dt", input_to="all")
    dts, _ = model("dts")
    shortcut = dts.levels[0].S2
    dts.load_state_dict({**dt.state_dict(), "levels.0.S2": torch.zeros_like(shortcut)})
    assert_equal(dts(inputs(False))[0], dt(inputs(False))[0])
    with torch.no_grad():
        shortcut.fill_(0.5)
    assert not torch.allclose(dts(inputs(False))[0], dt(inputs(False))[0])


def test_depth_1_output_equals_deep_output_off():
    plain, _ = model("rnn")
    off = deeprnn.do_rnn(output_hidden_size=(), **SIZES, **F64)
    off.load_state_dict(plain.state_dict())
    assert_equal(off(inputs(False))[0], plain(inputs(False))[0])


def test_a_stack_of_one_level_is_the_rnn():
    assert deeprnn.stacked_rnn(num_levels=1, **SIZES).spec == deeprnn.rnn(**SIZES).spec


@pytest.mark.parametrize(("steps", "batch"), [(0, B), (T, 0), (0, 0)])
@pytest.mark.parametrize("name", ["rnn", "dots", "dots-star", "stacked-dots-everything"])
def test_empty_sequences_and_batches(name, steps, batch):
    net, _ = model(name)
    x = torch.zeros(steps, batch, I, dtype=torch.float64, requires_grad=True)
    logits, state = net(x)
    assert logits.shape == (steps, batch, O)
    assert [h.shape for h in state] == [(batch, level.spec.hidden_size) for level in net.levels]
    logits.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_the_model_carries_no_hidden_state():
    net, _ = model("dots")
    x = inputs(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    first = net(x)[0]
    assert_equal(net(x)[0], first, 0)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("name", ["dots", "dots-star", "stacked-dots-everything"])
def test_copies_and_pickles_compute_the_same(name):
    net, _ = model(name)
    x = inputs(False)
    want = net(x)[0]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.spec == net.spec
        assert_equal(other(x)[0], want, 0)
    again = deeprnn.build(deeprnn.ModelSpec.from_dict(net.spec.to_dict()), dtype=torch.float64)
    again.load_state_dict(net.state_dict())
    assert_equal(again(x)[0], want, 0)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, same, other = (
        deeprnn.dots_rnn(intermediate_size=M, output_hidden_size=D, seed=s, **SIZES) for s in (1, 1, 2)
    )
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_building_with_a_seed_leaves_the_global_randomness_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    deeprnn.dots_rnn(intermediate_size=M, output_hidden_size=D, seed=4, **SIZES)
    assert torch.equal(torch.rand(3), want)


# ---- dropout: explicit masks


def dropping(**rates):
    return model("stacked-dots-everything", input_mlp=(), dropout=Dropout(**rates))[0]


def test_no_masks_means_no_dropout_even_in_training_mode():
    net = dropping(input=0.5, state=0.5, intermediate=0.5, output=0.5).train()
    plain, _ = model("stacked-dots-everything", input_mlp=())
    assert_equal(net(inputs(False))[0], plain(inputs(False))[0])


def test_masks_come_from_the_generator_alone():
    net = dropping(input=0.2, state=0.3, intermediate=0.4, output=0.5)
    one, same, other = (net.draw_masks(T, B, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one.keys() == same.keys()
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_masks_keep_the_mean_and_zero_is_zero():
    net = deeprnn.dts_rnn(
        input_size=50,
        hidden_size=60,
        intermediate_size=70,
        output_size=50,
        dropout=Dropout(intermediate=0.25),
    )
    masks = net.draw_masks(40, 5, torch.Generator().manual_seed(0))
    assert set(masks) == {"0.z1"}
    assert masks["0.z1"].unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert masks["0.z1"].mean().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_masks_of_ones_change_nothing_and_masks_of_zeros_do(per_sequence):
    net = dropping(input=0.5, state=0.5, intermediate=0.5, output=0.5, per_sequence=per_sequence)
    x = inputs(False)
    masks = net.draw_masks(T, B, torch.Generator().manual_seed(0))
    want = net(x)[0]
    assert_equal(net(x, masks={k: torch.ones_like(m) for k, m in masks.items()})[0], want)
    for name in masks:
        one_off = {k: torch.zeros_like(m) if k == name else torch.ones_like(m) for k, m in masks.items()}
        assert not torch.allclose(net(x, masks=one_off)[0], want), name


def test_a_dropped_state_is_not_seen_by_the_transition():
    net, _ = model("dts")
    x = inputs(False)
    got = net(x, masks={"0.state": torch.zeros(B, H, dtype=torch.float64)})[0]
    assert_equal(got, net(x, reset=torch.ones(T, B, dtype=torch.bool))[0])


# ---- what is refused


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(T, I), "3 dimension"),
        (torch.zeros(T, B, I + 1), f"Expected {I}, got {I + 1}"),
        ([[0.0]], "Tensor"),
    ],
)
def test_wrong_inputs_are_named(x, words):
    net, _ = model("rnn")
    with pytest.raises((ValueError, TypeError), match=words):
        net(x)


def test_vectors_for_a_symbol_model_are_refused():
    net, _ = model("rnn", symbols=True)
    with pytest.raises(ValueError, match="integer symbols"):
        net(torch.zeros(T, B))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ((torch.zeros(B, H),), "state"),
        ((torch.zeros(B, H + 1), torch.zeros(B, H)), "state"),
        ((torch.zeros(B + 1, H), torch.zeros(B, H)), "state"),
        ((None, torch.zeros(B, H)), "state.*NoneType"),
    ],
)
def test_a_wrong_state_is_named(state, words):
    net = deeprnn.stacked_rnn(**SIZES)
    with pytest.raises(ValueError, match=words):
        net(torch.zeros(T, B, I), state)
    with pytest.raises(ValueError, match=words):
        net.step(torch.zeros(B, I), state)


@pytest.mark.parametrize("reset", [torch.zeros(B, T, dtype=torch.bool), torch.zeros(T, B), [[True] * B] * T])
def test_wrong_reset_marks_are_named(reset):
    net = deeprnn.rnn(**SIZES)
    with pytest.raises((ValueError, TypeError), match="reset"):
        net(torch.zeros(T, B, I), reset=reset)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 2.5}, "hidden_size"),
        ({"output_size": -1}, "output_size"),
        ({"unit": "sigmod"}, "did you mean 'sigmoid'"),
        ({"shortcut": "both"}, "shortcut"),
        ({"input_to": "middle"}, "input_to"),
        ({"output": "gaussian"}, "output"),
        ({"intermediate": None}, "size.*None"),
        ({"output_hidden": "12"}, "size.*'12'"),
        ({"dropout": Dropout(input=0.1), "output": "categorical"}, r"dropout.input=0.1.*symbols"),
        ({"dropout": 0.3}, r"dropout.*Dropout\(output=0.5\).*0.3"),
        ({"init": {"input_std": 1}}, "init must be an InitSpec"),
        ({"output_shortcut": True}, "shortcut"),
    ],
)
def test_wrong_sizes_and_words_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        deeprnn.rnn(**{**SIZES, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"intermediate_size": 3}, "intermediate_size is for.*dt_rnn"),
        ({"dropuot": None}, "'dropuot'.*did you mean 'dropout'"),
    ],
)
def test_a_setting_that_no_model_has_is_named(options, words):
    with pytest.raises(TypeError, match=words):
        deeprnn.rnn(**SIZES, **options)


def test_as_many_levels_as_sizes_and_no_contradiction():
    assert len(deeprnn.stacked_rnn(**{**SIZES, "hidden_size": (3, 4, 5)}).levels) == 3
    with pytest.raises(ValueError, match="num_levels=2, but hidden_size lists 3"):
        deeprnn.stacked_rnn(**{**SIZES, "hidden_size": (3, 4, 5)}, num_levels=2)


def test_shapes_come_from_the_meta_device():
    net = deeprnn.dots_rnn(**SIZES, intermediate_size=3, output_hidden_size=4, device="meta")
    assert net(torch.empty(T, B, I, device="meta"))[0].shape == (T, B, net.spec.output_size)
    assert net.step(torch.empty(B, I, device="meta"))[0].shape == (B, net.spec.output_size)


@pytest.mark.parametrize("options", [{"num_levels": 0}, {"hidden_size": ()}, {"num_levels": 1.5}])
def test_a_stack_without_levels_is_refused(options):
    with pytest.raises(ValueError, match="level"):
        deeprnn.stacked_rnn(**{**SIZES, **options})


def test_sizes_that_do_not_meet_are_refused():
    spec = deeprnn.stacked_rnn(**SIZES).spec
    with pytest.raises(UserError, match="one below"):
        dataclasses.replace(
            spec, levels=(spec.levels[0], dataclasses.replace(spec.levels[1], input_size=H + 1))
        )
    with pytest.raises(UserError, match="▷ takes"):
        dataclasses.replace(spec, predict=dataclasses.replace(spec.predict, input_size=H + 1))
    with pytest.raises(UserError, match="skip_size"):
        dataclasses.replace(spec, input_to_levels="all")


def test_an_asked_for_backend_that_cannot_serve_says_why():
    net, _ = model("dots-star")
    net.backend = "cuda"
    with pytest.raises(UserError, match=r"backend 'cuda' cannot serve this case: .* move them to a GPU"):
        net(inputs(False))
    net.backend = "auto"
    net(inputs(False))


# ---- the paper's numbers


@pytest.mark.parametrize("entry", paper.TABLE1, ids=lambda s: f"{s.data}-{s.model}")
def test_table_1_counts_come_out_as_printed(entry):
    """Weight matrices only; the paper cuts thousands off and prints millions to two places."""
    with torch.device("meta"):
        net = deeprnn.SequenceModel(paper.spec(entry.data, entry.model), initialise=False)
    count = sum(p.numel() for p in net.parameters() if p.dim() == 2)
    assert entry.printed == (f"{count / 1e6:.2f}M" if count >= 4e6 else f"{count // 1000}K")


def test_the_paper_has_twenty_sizes_and_twenty_three_results():
    assert len(paper.TABLE1) == 20
    assert len(paper.CELLS) == 23
    assert paper.result("ptb-word", "dots") == 107.5
    assert paper.result("jsb", "dots-star") == 7.92
    assert paper.result("ptb-char", "dots-star") is None
    assert {c.kind for c in paper.CELLS if c.data == "ptb-char"} == {"char"}


def test_only_characters_have_rectifiers_in_the_output():
    assert paper.spec("ptb-char", "dots").predict.units == ("relu",)
    assert paper.spec("ptb-word", "dots").predict.units == ("sigmoid",)
    assert {u for d in paper.INPUTS for p in paper.spec(d, "dots").levels for u in p.units} == {"sigmoid"}


def test_the_task_decides_the_default_initialisation():
    assert default_init(paper.spec("jsb", "rnn")) is MUSIC
    assert default_init(paper.spec("ptb-char", "rnn")) is CHAR
    assert default_init(paper.spec("ptb-word", "rnn")) is WORD
