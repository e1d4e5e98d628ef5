"""DeepRNN beside torch.nn.RNN: the same weights, outputs, gradients, shapes and refusals."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from deeprnn import DeepRNN

T, B, I, H = 5, 3, 4, 6
DOUBLE = {"dtype": torch.float64}
SETTINGS = [
    dict(zip(("num_layers", "bias", "batch_first", "bidirectional"), values, strict=True))
    for values in itertools.product((1, 2), (True, False), (False, True), (False, True))
]


def name(settings: dict) -> str:
    return "-".join([f"{settings['num_layers']}", *(k for k, v in settings.items() if v is True)])


ALL = pytest.mark.parametrize("settings", SETTINGS, ids=name)


def draw(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)
    return x.requires_grad_()


def pair(settings: dict, **more) -> tuple[nn.RNN, DeepRNN]:
    torch.manual_seed(3)
    theirs = nn.RNN(I, H, **DOUBLE, **settings, **more)
    torch.manual_seed(4)
    mine = DeepRNN(I, H, **DOUBLE, **settings, **more)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def compare(theirs: nn.RNN, mine: DeepRNN, x, h0: Tensor | None) -> None:
    """Equal outputs, last states and gradients of everything, from uneven gradients of both results."""
    results = []
    for net in (theirs, mine):
        leaves = [t for t in (x.data if isinstance(x, PackedSequence) else x, h0) if t is not None]
        output, h_n = net(x, h0)
        flat = output.data if isinstance(output, PackedSequence) else output
        loss = (flat * torch.linspace(-1, 1, flat.numel(), **DOUBLE).view_as(flat)).sum() + h_n.square().sum()
        grads = torch.autograd.grad(loss, (*leaves, *net.parameters()))
        results.append((output, h_n, grads))
    (output, h_n, grads), (output2, h_n2, grads2) = results
    assert type(output) is type(output2)
    if isinstance(output, PackedSequence):
        assert torch.equal(output.batch_sizes, output2.batch_sizes)
        assert (output.sorted_indices is None) == (output2.sorted_indices is None)
        output, output2 = (pad_packed_sequence(o)[0] for o in (output, output2))
    for a, b in zip((output, h_n, *grads), (output2, h_n2, *grads2), strict=True):
        torch.testing.assert_close(b, a)


@ALL
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "h0"])
def test_batched(settings, given):
    theirs, mine = pair(settings)
    lead = (B, T) if settings["batch_first"] else (T, B)
    levels = settings["num_layers"] * (1 + settings["bidirectional"])
    compare(theirs, mine, draw(*lead, I), draw(levels, B, H, seed=1) if given else None)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_nonlinearities_and_backends(nonlinearity, backend):
    theirs, mine = pair({"num_layers": 2, "bidirectional": True, "nonlinearity": nonlinearity})
    mine.backend = backend
    compare(theirs, mine, draw(T, B, I), draw(4, B, H, seed=1))


@ALL
def test_unbatched(settings):
    theirs, mine = pair(settings)
    levels = settings["num_layers"] * (1 + settings["bidirectional"])
    compare(theirs, mine, draw(T, I), draw(levels, H, seed=1))


@ALL
def test_an_empty_batch(settings):
    theirs, mine = pair(settings)
    lead = (0, T) if settings["batch_first"] else (T, 0)
    assert [t.shape for t in mine(draw(*lead, I))] == [t.shape for t in theirs(draw(*lead, I))]


@ALL
@pytest.mark.parametrize("lengths", [(5, 3, 1), (2, 5, 2), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed(settings, lengths, enforce_sorted):
    if enforce_sorted:
        lengths = tuple(sorted(lengths, reverse=True))
    theirs, mine = pair(settings)
    packed = pack_sequence([draw(n, I, seed=n) for n in lengths], enforce_sorted=enforce_sorted)
    packed = packed._replace(data=packed.data.detach().requires_grad_())
    levels = settings["num_layers"] * (1 + settings["bidirectional"])
    compare(theirs, mine, packed, draw(levels, B, H, seed=1))


@ALL
def test_the_same_seed_gives_the_same_names_order_and_weights(settings):
    torch.manual_seed(5)
    theirs = list(nn.RNN(I, H, **settings).named_parameters())
    torch.manual_seed(5)
    mine = list(DeepRNN(I, H, **settings).named_parameters())
    assert [n for n, _ in mine] == [n for n, _ in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))


@ALL
def test_a_state_dict_goes_back_to_nn_rnn(settings):
    theirs, mine = pair(settings)
    mine.reset_parameters()
    theirs.load_state_dict(mine.state_dict())
    lead = (B, T) if settings["batch_first"] else (T, B)
    torch.testing.assert_close(theirs(draw(*lead, I))[0], mine(draw(*lead, I))[0])


def test_the_arguments_of_nn_rnn_stand_in_its_order():
    documented = ["input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first", "dropout",
                  "bidirectional", "device", "dtype"]  # fmt: skip
    assert [n for n in inspect.signature(DeepRNN.__init__).parameters if n != "self"][
        : len(documented)
    ] == documented
    theirs = nn.RNN(I, H, 2, "relu", False, True, 0.0, True)
    mine = DeepRNN(I, H, 2, "relu", False, True, 0.0, True)
    for attribute in documented[:8]:
        assert getattr(mine, attribute) == getattr(theirs, attribute), attribute


def test_dropout_with_the_same_seed_drops_the_same():
    theirs, mine = pair({"num_layers": 3}, dropout=0.4)
    outputs = []
    for net in (theirs, mine):
        torch.manual_seed(6)
        outputs.append(net(draw(T, B, I))[0])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("x", "h0"),
    [
        (torch.zeros(T, B, I + 1), None),
        (torch.zeros(I), None),
        (torch.zeros(0, B, I), None),
        (torch.zeros(T, B, I), torch.zeros(B, H)),
        (torch.zeros(T, I), torch.zeros(1, B, H)),
        (torch.zeros(T, B, I), torch.zeros(1, B + 1, H)),
        (torch.zeros(T, B, I, **DOUBLE), None),
    ],
)
def test_what_nn_rnn_refuses_is_refused_with_the_same_kind_of_error(x, h0):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        nn.RNN(I, H)(x, h0)
    with pytest.raises(theirs.type):
        DeepRNN(I, H)(x, h0)


def test_hx_is_nn_rnns_name_of_the_first_state():
    theirs, mine = pair({"num_layers": 2})
    x, h = draw(T, B, I), draw(2, B, H, seed=1)
    torch.testing.assert_close(mine(x, hx=h)[0], theirs(x, hx=h)[0])


def test_shapes_come_from_the_meta_device_as_nn_rnns_do():
    x = torch.empty(T, B, I, device="meta")
    theirs, mine = nn.RNN(I, H, 2, device="meta"), DeepRNN(I, H, 2, intermediate_sizes=5, device="meta")
    assert [y.shape for y in mine(x)] == [y.shape for y in theirs(x)]
    assert mine.step(x[0])[0].shape == (B, H)


@ALL
def test_attributes_that_code_for_nn_rnn_may_read(settings):
    theirs, mine = pair(settings)
    assert (mine.mode, mine.proj_size) == (theirs.mode, theirs.proj_size)
    assert [len(group) for group in mine.all_weights] == [len(group) for group in theirs.all_weights]
    for group, expected in zip(mine.all_weights, theirs.all_weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, expected, strict=True))


def test_all_weights_of_a_deep_layer_are_all_its_parameters():
    layer = DeepRNN(
        I, H, num_layers=2, intermediate_sizes=(5, 4), shortcut="all", input_to="all", bidirectional=True
    )
    found = [p for group in layer.all_weights for p in group]
    assert len(layer.all_weights) == 4
    assert {id(p) for p in found} == {id(p) for p in layer.parameters()}
    assert len(found) == len(list(layer.parameters()))
