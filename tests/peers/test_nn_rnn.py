"""The cases that PyTorch holds its own `nn.RNN` to, put to DeepRNN beside it: one paragraph here, one subject there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import rnn as sequences

from deeprnn import DeepRNN

T, B, I, H = 6, 3, 4, 5
DOUBLE = {"dtype": torch.float64}
OPTIONS = {
    "plain": {},
    "relu": {"nonlinearity": "relu"},
    "three-levels": {"num_layers": 3},
    "no-bias": {"bias": False, "num_layers": 2},
    "batch-first": {"batch_first": True},
    "both-ways": {"bidirectional": True},
    "everything": {
        "num_layers": 2, "nonlinearity": "relu", "bias": False, "batch_first": True, "bidirectional": True,
    },
}  # fmt: skip
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def pair(**options) -> tuple[nn.RNN, DeepRNN]:
    """Both layers with the same weights."""
    torch.manual_seed(0)
    theirs = nn.RNN(I, H, **{**DOUBLE, **options})
    mine = DeepRNN(I, H, **{**DOUBLE, **options})
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def an_input(net: nn.RNNBase, steps: int = T, batch: int = B, seed: int = 0) -> Tensor:
    lead = (batch, steps) if net.batch_first else (steps, batch)
    return draw(*lead, I, seed=seed)


def a_state(net: nn.RNNBase, *batch: int) -> Tensor:
    return draw(net.num_layers * (2 if net.bidirectional else 1), *batch, H, seed=9)


def same(theirs: nn.Module, mine: nn.Module, *inputs) -> None:
    """The same results, and the same gradients of inputs and parameters."""
    found = []
    for net in (theirs, mine):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output, h_n = net(*leaves)
        parameters = [p for p in net.parameters() if p.requires_grad]
        loss = output.square().sum() + (h_n * torch.linspace(-1, 1, h_n.numel(), **DOUBLE).view_as(h_n)).sum()
        found.append((output, h_n, *torch.autograd.grad(loss, (*leaves, *parameters))))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


# ---- shapes and states


@EACH
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("given", [False, True], ids=["no-state", "state"])
def test_sequences_of_every_length(options, steps, given):
    theirs, mine = pair(**options)
    same(theirs, mine, an_input(mine, steps), *([a_state(mine, B)] if given else []))


@EACH
def test_a_single_sequence_without_a_batch_dimension(options):
    theirs, mine = pair(**options)
    same(theirs, mine, draw(T, I), a_state(mine))
    with_batch = mine(an_input(mine, batch=1))[0]
    alone = mine(an_input(mine, batch=1).squeeze(0 if mine.batch_first else 1))[0]
    torch.testing.assert_close(alone, with_batch.squeeze(0 if mine.batch_first else 1))


@EACH
def test_an_empty_batch_has_empty_results_and_zero_gradients(options):
    theirs, mine = pair(**options)
    x = an_input(mine, batch=0)
    for a, b in zip(mine(x), theirs(x), strict=True):
        assert a.shape == b.shape
    mine(x)[0].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in mine.parameters())


@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "bidirectional" not in o])
def test_a_state_that_is_carried_on_makes_one_sequence_of_two(options):
    _, mine = pair(**options)
    time = 1 if mine.batch_first else 0
    first, second = an_input(mine).split([2, T - 2], time)
    one, h = mine(first)
    two, h = mine(second, h)
    whole, h_n = mine(an_input(mine))
    torch.testing.assert_close(torch.cat([one, two], time), whole)
    torch.testing.assert_close(h, h_n)


@EACH
def test_inputs_and_states_may_lie_anywhere_in_memory(options):
    theirs, mine = pair(**options)
    x, h = an_input(mine), a_state(mine, B)
    spread = torch.stack([x, x], -1)[..., 0]
    swapped = h.transpose(0, 1).contiguous().transpose(0, 1)
    assert not spread.is_contiguous()
    torch.testing.assert_close(mine(spread, swapped), theirs(x, h))
    torch.testing.assert_close(mine(spread, swapped), mine(x, h))


def test_an_expanded_state_serves_every_row():
    theirs, mine = pair()
    h = draw(1, 1, H).expand(1, B, H)
    same(theirs, mine, an_input(mine), h)


def test_the_input_and_the_state_are_left_as_they_were():
    _, mine = pair(num_layers=2)
    x, h = an_input(mine), a_state(mine, B)
    before = x.clone(), h.clone()
    mine(x, h)
    assert torch.equal(x, before[0])
    assert torch.equal(h, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_have_the_parameters_type(dtype):
    theirs, mine = pair(dtype=dtype)
    x = an_input(mine).to(dtype)
    assert [y.dtype for y in mine(x)] == [y.dtype for y in theirs(x)] == [dtype, dtype]
    torch.testing.assert_close(mine(x), theirs(x))


def test_no_gradient_is_recorded_where_none_is_wanted():
    theirs, mine = pair()
    with torch.no_grad():
        assert not mine(an_input(mine))[0].requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(mine(an_input(mine)), theirs(an_input(theirs)))
    for net in (theirs, mine):
        net.weight_ih_l0.requires_grad_(False)
        net.bias_hh_l0.requires_grad_(False)
    same(theirs, mine, an_input(mine))


# ---- packed sequences


def packed(lengths: list[int], enforce_sorted: bool) -> sequences.PackedSequence:
    rows = [draw(n, I, seed=n + 10 * k) for k, n in enumerate(lengths)]
    return sequences.pack_sequence(rows, enforce_sorted=enforce_sorted)


@EACH
@pytest.mark.parametrize(
    ("lengths", "enforce_sorted"),
    [
        ([4, 3, 3], True),
        ([4, 3, 3], False),
        ([1, 5, 2], False),
        ([2, 2, 2], True),
        ([1, 1, 1], False),
        ([3], True),
    ],
)
@pytest.mark.parametrize("given", [False, True], ids=["no-state", "state"])
def test_packed_sequences(options, lengths, enforce_sorted, given):
    theirs, mine = pair(**options)
    x = packed(lengths, enforce_sorted)
    state = (a_state(mine, len(lengths)),) if given else ()
    (out, h), (want, want_h) = mine(x, *state), theirs(x, *state)
    torch.testing.assert_close(h, want_h)
    torch.testing.assert_close(out.data, want.data)
    assert torch.equal(out.batch_sizes, want.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(out, name), getattr(want, name)
        assert (a is None and b is None) or torch.equal(a, b)


@EACH
def test_a_packed_row_is_that_sequence_alone(options):
    _, mine = pair(**options)
    lengths = [2, 5, 1, 3]
    x = packed(lengths, False)
    output, _ = sequences.pad_packed_sequence(mine(x)[0])
    rows, _ = sequences.pad_packed_sequence(x)
    for k, n in enumerate(lengths):
        torch.testing.assert_close(output[:n, k], mine(rows[:n, k])[0])


@EACH
def test_gradients_through_packing_and_padding(options):
    grads = []
    for net in pair(**options):
        x = draw(T, B, I).requires_grad_()
        run = sequences.pack_padded_sequence(x, torch.tensor([2, 6, 3]), enforce_sorted=False)
        output, h = net(run)
        padded, lengths = sequences.pad_packed_sequence(output, batch_first=True, padding_value=-1.0)
        assert lengths.tolist() == [2, 6, 3]
        grads.append(torch.autograd.grad(padded.square().sum() + h.sum(), (x, *net.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a)
    assert not grads[1][0][2:, 0].any()  # beyond a sequence's end nothing is learned


def test_a_packed_sequence_moves_and_casts_as_ever():
    theirs, mine = pair()
    x = packed([3, 2], True).to(torch.float32).double()
    torch.testing.assert_close(mine(x)[0].data, theirs(x)[0].data)


# ---- dropout


def test_dropout_acts_in_training_only():
    theirs, mine = pair(num_layers=3, dropout=0.5)
    x = an_input(mine)
    results = []
    for net in (theirs, mine):
        torch.manual_seed(5)
        results.append(net.train()(x)[0])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x))
    assert not torch.allclose(results[1], mine(x)[0])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    theirs, mine = pair(num_layers=2, dropout=p)
    same(theirs, mine, an_input(mine))


def test_dropout_reproduces_under_a_fork_of_the_generator():
    _, mine = pair(num_layers=2, dropout=0.5)
    x = an_input(mine)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = mine(x)[0]
    torch.manual_seed(3)
    torch.testing.assert_close(mine(x)[0], first)


# ---- a module like any other


@EACH
def test_a_state_dict_goes_both_ways(options):
    theirs, mine = pair(**options)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    mine.reset_parameters()
    assert theirs.load_state_dict(mine.state_dict()) == ([], [])
    x = an_input(mine)
    torch.testing.assert_close(theirs(x), mine(x))


def test_a_state_dict_that_does_not_fit_is_refused_by_name():
    state = DeepRNN(I, H, num_layers=2).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight_ih_l1"):
        DeepRNN(I, H).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_zh_l0_d2"):
        DeepRNN(I, H, intermediate_sizes=3).load_state_dict(DeepRNN(I, H).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight_hh_l0"):
        DeepRNN(I, H + 1).load_state_dict(DeepRNN(I, H).state_dict())
    missing, unexpected = DeepRNN(I, H).load_state_dict(state, strict=False)
    assert not missing
    assert len(unexpected) == 4


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "intermediate_sizes": 3}])
def test_copies_share_nothing(options):
    torch.manual_seed(1)
    mine = DeepRNN(I, H, **DOUBLE, **options)
    x = an_input(mine)
    want = mine(x)[0]
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    copies = [
        copy.deepcopy(mine),
        copy.copy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(x)[0], want)
        assert isinstance(other, nn.RNNBase)
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in mine.named_parameters()]
    for other in (copies[0], *copies[2:]):
        with torch.no_grad():
            other.weight_hh_l0.zero_()
    assert torch.equal(mine(x)[0], want)


def test_a_copy_after_a_backward_pass():
    _, mine = pair()
    mine(an_input(mine))[0].sum().backward()
    other = copy.deepcopy(mine)
    same(mine, other, an_input(mine))


def test_a_replaced_parameter_is_used():
    theirs, mine = pair()
    new = nn.Parameter(draw(H, H, seed=4))
    for net in (theirs, mine):
        net.weight_hh_l0 = nn.Parameter(new.detach().clone())
    same(theirs, mine, an_input(mine))


def test_parameters_shared_between_layers_gather_both_gradients():
    grads = []
    for kind in (nn.RNN, DeepRNN):
        torch.manual_seed(2)
        one, two = kind(H, H, **DOUBLE), kind(H, H, **DOUBLE)
        two.weight_hh_l0 = one.weight_hh_l0
        x = draw(T, B, H)
        (two(one(x)[0])[0].square().sum()).backward()
        grads.append(one.weight_hh_l0.grad)
    torch.testing.assert_close(*grads)


def test_moving_to_another_type_and_to_no_memory():
    _, mine = pair(num_layers=2)
    x = an_input(mine)
    want = mine(x)[0]
    assert mine.float()(x.float())[0].dtype == torch.float32
    torch.testing.assert_close(mine.double()(x)[0], want, rtol=1e-5, atol=1e-5)
    empty = copy.deepcopy(mine).to("meta")
    assert empty(x.to("meta"))[0].shape == want.shape
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(mine.state_dict())
    torch.testing.assert_close(filled(x), mine(x))
    mine.share_memory()
    torch.testing.assert_close(filled(x), mine(x))


def test_it_is_an_rnn_base_wherever_code_asks():
    theirs, mine = pair(num_layers=2, bidirectional=True)
    assert isinstance(mine, nn.RNNBase)

    def orthogonal(module: nn.Module) -> None:
        if isinstance(module, nn.RNNBase):
            for name, p in module.named_parameters():
                (nn.init.orthogonal_ if "weight_hh" in name else nn.init.constant_)(
                    p, *([] if "weight_hh" in name else [0.1])
                )

    for net in (theirs, mine):
        torch.manual_seed(7)
        nn.Sequential(net).apply(orthogonal)
    same(theirs, mine, an_input(mine))
    for name in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
                 "proj_size", "nonlinearity"):  # fmt: skip
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine._flat_weights_names == theirs._flat_weights_names
    assert all(torch.equal(a, b) for a, b in zip(mine._flat_weights, theirs._flat_weights, strict=True))
    x, h = an_input(mine), a_state(mine, B)
    assert mine.get_expected_hidden_size(x, None) == theirs.get_expected_hidden_size(x, None)
    mine.check_forward_args(x, h, None)
    torch.testing.assert_close(mine.permute_hidden(h, torch.tensor([2, 0, 1])), h[:, [2, 0, 1]])


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamic_quantisation_passes_it_by_and_does_the_rest():
    class Net(nn.Module):
        def __init__(self, recurrent: nn.RNNBase) -> None:
            super().__init__()
            self.recurrent, self.out = recurrent, nn.Linear(H, 2)

        def forward(self, x):
            return self.out(self.recurrent(x)[0])

    theirs, mine = (Net(net.float()) for net in pair())
    mine.load_state_dict(theirs.state_dict())
    x = draw(T, B, I).float()
    low = [torch.ao.quantization.quantize_dynamic(net, {nn.Linear, nn.RNN})(x) for net in (theirs, mine)]
    torch.testing.assert_close(*low)


def test_data_parallel_replicas_and_stateless_calls():
    theirs, mine = pair(num_layers=2)
    x = an_input(mine)
    replica = mine._replicate_for_data_parallel()
    for name, p in mine.named_parameters():
        setattr(replica, name, p * 2)
    doubled = {name: p * 2 for name, p in theirs.named_parameters()}
    want = torch.func.functional_call(theirs, doubled, (x,))
    torch.testing.assert_close(replica(x), want)
    torch.testing.assert_close(torch.func.functional_call(mine, doubled, (x,)), want)
    torch.testing.assert_close(nn.DataParallel(mine)(x), mine(x))


# ---- weights that are computed: parametrizations, norms, pruning


def new_style_weight_norm(net: nn.Module) -> None:
    parametrizations.weight_norm(net, "weight_hh_l0")


def new_style_spectral_norm(net: nn.Module) -> None:
    torch.manual_seed(1)
    parametrizations.spectral_norm(net, "weight_hh_l0")


def orthogonal(net: nn.Module) -> None:
    parametrizations.orthogonal(net, "weight_hh_l0")


def own_parametrization(net: nn.Module) -> None:
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).mT

    parametrize.register_parametrization(net, "weight_hh_l0", Symmetric())


def old_style_weight_norm(net: nn.Module) -> None:
    nn.utils.weight_norm(net, "weight_hh_l0")
    with torch.no_grad():
        net.weight_hh_l0_g.mul_(2)  # type: ignore[operator]


def old_style_spectral_norm(net: nn.Module) -> None:
    torch.manual_seed(1)
    nn.utils.spectral_norm(net, "weight_hh_l0")


def pruning(net: nn.Module) -> None:
    prune.l1_unstructured(net, "weight_hh_l0", amount=0.5)


COMPUTED = pytest.mark.parametrize(
    "change",
    [
        new_style_weight_norm, new_style_spectral_norm, orthogonal, own_parametrization, old_style_weight_norm,
        old_style_spectral_norm, pruning,
    ],
)  # fmt: skip
OLD_STYLE = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


@OLD_STYLE
@COMPUTED
def test_computed_weights_are_those_of_the_call(change: Callable[[nn.Module], None]):
    theirs, mine = pair(num_layers=2)
    plain = mine(an_input(mine))[0]
    for net in (theirs, mine):
        change(net.eval())  # in training a spectral norm moves with every look at it
    same(theirs, mine, an_input(mine))
    if change not in (old_style_spectral_norm, new_style_weight_norm):
        assert not torch.allclose(mine(an_input(mine))[0], plain)


@OLD_STYLE
@COMPUTED
def test_all_weights_lists_computed_weights_too(change: Callable[[nn.Module], None]):
    theirs, mine = pair(num_layers=2)
    for net in (theirs, mine):
        change(net.eval())
    for mine_, theirs_ in zip(mine.all_weights, theirs.all_weights, strict=True):
        for a, b in zip(mine_, theirs_, strict=True):
            torch.testing.assert_close(a, b)


@OLD_STYLE
def test_norms_and_pruning_can_be_taken_off_again():
    theirs, mine = pair()
    for net in (theirs, mine):
        nn.utils.weight_norm(net, "weight_ih_l0")
        nn.utils.remove_weight_norm(net, "weight_ih_l0")
        prune.random_unstructured(net, "weight_hh_l0", amount=0.0)
        prune.remove(net, "weight_hh_l0")
        parametrizations.weight_norm(net, "bias_ih_l0", dim=None)
        parametrize.remove_parametrizations(net, "bias_ih_l0")
    torch.testing.assert_close(mine(an_input(mine)), theirs(an_input(theirs)))


def test_helpers_over_all_parameters():
    theirs, mine = pair(num_layers=2)
    x = an_input(mine)
    for net in (theirs, mine):
        vector = nn.utils.parameters_to_vector(net.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, net.parameters())
        net(x)[0].square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net in (theirs, mine)]
    torch.testing.assert_close(*norms)
    for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    empty = nn.utils.skip_init(DeepRNN, I, H)
    assert [p.shape for p in empty.parameters()] == [p.shape for p in nn.RNN(I, H).parameters()]


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_training_takes_the_same_path(optimiser):
    weights = []
    for net in pair(num_layers=2):
        steps = optimiser(net.parameters(), lr=0.05)
        x = an_input(net)

        def loss(net=net, x=x, steps=steps):
            steps.zero_grad()
            value = (net(x)[0] - 0.3).square().mean()
            value.backward()
            return value

        for _ in range(3):
            steps.step(loss)
        weights.append([p.detach() for p in net.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(b, a)


# ---- what is refused


REFUSED = {  # arguments of the layer, and words that PyTorch's tests look for
    "no-units": ((10, 0, 1), {}, "hidden_size must be greater than zero"),
    "no-levels": ((10, 10, 0), {}, "num_layers must be greater than zero"),
    "bias-0": ((3, 5), {"bias": 0}, "bias should be of type bool, got: int"),
    "bias-1": ((3, 5), {"bias": 1}, "bias should be of type bool, got: int"),
    "bias-text": ((3, 5), {"bias": "True"}, "bias should be of type bool, got: str"),
    "batch-first-0": ((3, 5), {"batch_first": 0}, "batch_first should be of type bool, got: int"),
    "batch-first-1": ((3, 5), {"batch_first": 1}, "batch_first should be of type bool, got: int"),
    "batch-first-text": ((3, 5), {"batch_first": "False"}, "batch_first should be of type bool, got: str"),
    "input-float": ((3.0, 5), {}, "input_size should be of type int, got: float"),
    "input-text": (("10", 5), {}, "input_size should be of type int, got: str"),
    "no-input": ((0, 5), {}, "input_size must be greater than zero"),
    "negative-input": ((-1, 5), {}, "input_size must be greater than zero"),
    "hidden-float": ((3, 5.0), {}, "hidden_size should be of type int, got: float"),
    "negative-levels": ((3, 5, -1), {}, "num_layers must be greater than zero"),
    "half-a-level": ((3, 5, 1.5), {}, "num_layers|float"),
    "dropout": ((3, 5, 2), {"dropout": 1.5}, r"dropout should be a number in range \[0, 1\]"),
    "negative-dropout": ((3, 5, 2), {"dropout": -0.1}, r"dropout should be a number in range \[0, 1\]"),
    "projection": ((3, 5), {"proj_size": 2}, "proj_size argument is only supported for LSTM"),
    "unit": ((3, 5), {"nonlinearity": "sine"}, "nonlinearity.*'sine'"),
}


@pytest.mark.parametrize(("sizes", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_refused_alike(sizes, options, words):
    with pytest.raises((TypeError, ValueError), match=f"(?i){words}") as theirs:
        nn.RNN(*sizes, **options)
    with pytest.raises(theirs.type, match=words):
        DeepRNN(*sizes, **options)


INPUTS = {
    "dtype": ((torch.zeros(T, B, I, **DOUBLE),), r"RNN input dtype .* does not match weight dtype .* Convert input: "
              r"input\.to\(.*\), or convert model: model\.to\(.*\)"),
    "one-dimension": ((torch.zeros(I),), "Expected input to be 2D or 3D, got 1D tensor instead"),
    "four-dimensions": ((torch.zeros(1, T, B, I),), "Expected input to be 2D or 3D, got 4D tensor instead"),
    "input-size": ((torch.zeros(T, B, I + 1),), rf"input.size\(-1\) must be equal to input_size. Expected {I}, got"),
    "no-steps": ((torch.zeros(0, B, I),), "Expected sequence length to be larger than 0"),
    "state-of-a-batch": ((torch.zeros(T, I), torch.zeros(1, B, H)), "For unbatched 2-D input, hx should also be 2-D"),
    "state-of-none": ((torch.zeros(T, B, I), torch.zeros(1, H)), "For batched 3-D input, hx should also be 3-D"),
    "another-batch": ((torch.zeros(T, B, I), torch.zeros(1, B + 1, H)), "Expected hidden size"),
    "more-levels": ((torch.zeros(T, B, I), torch.zeros(2, B, H)), "Expected hidden size"),
    "another-width": ((torch.zeros(T, B, I), torch.zeros(1, B, H + 1)), "Expected hidden size"),
    "state-dtype": ((torch.zeros(T, B, I), torch.zeros(1, B, H, **DOUBLE)), "dtype"),
    "state-device": ((torch.zeros(T, B, I), torch.zeros(1, B, H, device="meta")), "not at the same device"),
    "device": ((torch.zeros(T, B, I, device="meta"),), "Input and parameter tensors are not at the same device"),
    "packed-size": ((sequences.pack_sequence([torch.zeros(2, I + 1)]),), "must be equal to input_size"),
    "packed-dtype": ((sequences.pack_sequence([torch.zeros(2, I, **DOUBLE)]),), "does not match weight dtype"),
    "packed-state": ((sequences.pack_sequence([torch.zeros(2, I)]), torch.zeros(1, 2, H)), "Expected hidden size"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "words"), INPUTS.values(), ids=INPUTS)
def test_inputs_are_refused_alike(inputs, words):
    with pytest.raises((ValueError, RuntimeError), match=words) as theirs:
        nn.RNN(I, H)(*inputs)
    with pytest.raises(theirs.type, match=words):
        DeepRNN(I, H)(*inputs)


@pytest.mark.parametrize("options", [{"num_layers": 1, "dropout": 0.5}])
def test_dropout_between_no_levels_warns_where_the_layer_is_made(options):
    for kind in (nn.RNN, DeepRNN):
        with pytest.warns(UserWarning, match="num_layers") as caught:
            kind(I, H, **options)
    assert caught[0].filename == __file__
