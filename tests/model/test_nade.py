"""▷ as a NADE: probabilities that sum to one, exact gradients by every way, samples as likely as the model says."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from torch.func import functional_call, vmap

import deeprnn
from deeprnn.errors import UserError
from deeprnn.model import nade_loss, nade_segments
from deeprnn.model.nade import NadePredict
from deeprnn.model.nade_loss import nade_nats, plain_nats
from deeprnn.model.scoring import nats, note_logits
from tests.backends.small_emulation import EMULATED, Small

SIZES = [(1, 1, 1), (7, 7, 7), (5, 63, 3), (9, 3, 129), (2, 88, 63)]
"""frames, notes, hidden units"""


def values(N, O, D, P=(), dtype=torch.float64, density=0.3):
    y = (torch.rand(N, O) < density).to(torch.uint8)
    shapes = ((N, O), (N, D), (O, D), (O, D))
    return y, [torch.randn(*P, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def gradients(total, leaves):
    weights = torch.linspace(-1, 2, total.numel(), dtype=total.dtype).view(total.shape)
    return torch.autograd.grad(total, leaves, weights)


def all_frames(n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product([0, 1], repeat=n)))


# ---- what it is


def test_the_probabilities_of_all_frames_sum_to_one():
    torch.manual_seed(0)
    predict = NadePredict(4, 6, hidden_size=5, sizes=(3,), dtype=torch.float64)
    for parameter in predict.parameters():
        torch.nn.init.normal_(parameter)
    frames, h = all_frames(6), torch.randn(4, dtype=torch.float64)
    log_p = predict.log_prob(h.expand(64, 4), frames)
    assert log_p.exp().sum().item() == pytest.approx(1.0, abs=1e-12)


def test_without_a_hidden_layer_that_matters_notes_are_independent():
    predict = NadePredict(4, 6, hidden_size=5, dtype=torch.float64)
    torch.nn.init.zeros_(predict.V)
    h, y = torch.randn(3, 4, dtype=torch.float64), torch.randint(2, (3, 6))
    plain = deeprnn.Predict(4, 6, dtype=torch.float64)
    plain.load_state_dict({name: getattr(predict, name) for name in ("V1", "b1")})
    wanted = deeprnn.model.losses.bernoulli_nats(plain(h), y)
    torch.testing.assert_close(predict.log_prob(h, y), -wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,)])
def test_a_chord_is_drawn_in_as_many_steps_as_notes_sound_in_it(lead, temperature, monkeypatch):
    """The same frame and probabilities as note by note, from the same numbers."""
    torch.manual_seed(2)
    predict = NadePredict(5, 40, hidden_size=6, dtype=torch.float64)
    for parameter in predict.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    torch.nn.init.constant_(predict.b1, -2.0)
    with torch.no_grad():
        out = predict(torch.randn(*lead, 5, dtype=torch.float64))
    u = torch.rand(*lead, 40, dtype=torch.float64)
    steps = []
    real = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args: steps.append(1) or real(*args))
    frames, chances = predict.draw(out, u, temperature)
    slow, slow_chances = predict._draw_by_notes(*predict.biases(out), u, temperature)
    assert torch.equal(frames, slow)
    torch.testing.assert_close(chances, slow_chances)
    most = int(frames.sum(-1).max()) if frames.numel() else -1
    assert len(steps) == most + 1 < 40


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_frames_that_are_no_frames_are_refused(value):
    predict = NadePredict(3, 4, hidden_size=5)
    y = torch.tensor([0.0, 1.0, value, 0.0])
    with pytest.raises(UserError, match=f"y must be zeros and ones, got {value:g}"):
        predict.log_prob(torch.randn(3), y)
    for good in (torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 1, 0], dtype=torch.bool)):
        assert predict.log_prob(torch.randn(3), good) < 0
    h, frames = torch.randn(6, 3), torch.randint(2, (6, 4)).float()
    torch.testing.assert_close(vmap(predict.log_prob)(h, frames), predict.log_prob(h, frames))


def test_an_unknown_argument_is_answered_with_its_own_names():
    with pytest.raises(
        UserError,
        match=r"NadePredict: unknown argument 'hiden_size' .*'hidden_size'.*known are hidden_size, sizes",
    ):
        NadePredict(3, 4, hiden_size=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("way", ["sample", "chain"])
def test_frames_are_drawn_as_often_as_they_are_likely(way):
    from deeprnn.generation.chords import Chain

    torch.manual_seed(1)
    predict = NadePredict(3, 4, hidden_size=6)
    for parameter in predict.parameters():
        torch.nn.init.normal_(parameter, std=1.5)
    h, count = torch.randn(3), 40_000
    p = predict.log_prob(h.expand(16, 3), all_frames(4)).exp()
    generator = torch.Generator().manual_seed(3)
    if way == "sample":
        drawn = predict.sample(h.expand(count, 3), generator)
    else:
        u = torch.rand(count, 4, generator=generator).numpy()
        drawn = torch.from_numpy(Chain(predict)(predict(h.expand(count, 3)).detach().numpy(), u)[0]).float()
    number = (drawn @ torch.tensor([8.0, 4.0, 2.0, 1.0])).long()
    share = torch.bincount(number, minlength=16) / count
    assert p.max() < 0.9  # there is something to choose from
    spread = (p * (1 - p) / count).sqrt()
    assert ((share - p).abs() < 5 * spread + 1e-4).all()


def test_both_ways_to_draw_agree_number_for_number():
    from deeprnn.generation.chords import Chain

    predict = NadePredict(5, 12, hidden_size=9)
    for parameter in predict.parameters():
        torch.nn.init.normal_(parameter)
    out, u = predict(torch.randn(30, 5)).detach(), torch.rand(30, 12)
    for temperature in (0.0, 0.5, 1.0, 2.0):
        frame, p = predict.draw(out, u, temperature)
        on, q = Chain(predict, temperature)(out.numpy(), u.numpy())
        assert torch.equal(frame.bool(), torch.from_numpy(on))
        torch.testing.assert_close(p, torch.from_numpy(q), atol=1e-5, rtol=1e-4)
        if temperature == 1:
            torch.testing.assert_close(p, torch.sigmoid(predict.conditional_logits(out, frame)))


# ---- how it is computed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("way", ["machine code", "segments", "dense"])
def test_value_and_gradients_equal_the_plain_formula(size, density, way, monkeypatch):
    monkeypatch.setattr(nade_segments, "NUMBERS", 300)  # several pieces
    monkeypatch.setattr(nade_loss, "HELD", 40)
    if way != "machine code":
        monkeypatch.setattr(nade_loss, "_machine_code", lambda W: None)
    if way == "dense":
        monkeypatch.setattr(nade_segments, "forward", nade_loss._dense_forward)
        monkeypatch.setattr(nade_segments, "backward", nade_loss._dense_backward)
    y, leaves = values(*size, density=density)
    found, wanted = nade_nats(y, *leaves), plain_nats(y.double(), *leaves)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(gradients(found, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_single_precision_is_near():
    y, leaves = values(50, 88, 200, density=0.05)
    own = [x.detach().float().requires_grad_() for x in leaves]
    found, wanted = nade_nats(y, *own), plain_nats(y.double(), *leaves)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(found, own), gradients(wanted, leaves), strict=True):
        assert (a.double() - b).abs().max() < 1e-5 * b.abs().max()


def test_nothing_as_large_as_all_hidden_layers_is_kept():
    y, leaves = values(10, 30, 40, density=0.1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        nade_nats(y, *leaves).sum().backward()
    assert kept
    assert max(kept) <= 30 * 40


def test_derivatives_of_second_order():
    y, leaves = values(2, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: nade_nats(y, *x), leaves)
    assert torch.autograd.gradgradcheck(lambda *x: nade_nats(y, *x), leaves)


def test_gradients_inside_a_functional_transform_and_batched_ones():
    y, leaves = values(3, 5, 4)
    plain = [x.detach() for x in leaves]
    inside = torch.func.grad(lambda *x: nade_nats(y, *x).sum(), argnums=(0, 1, 2, 3))(*plain)
    outside = torch.autograd.grad(plain_nats(y.double(), *leaves).sum(), leaves)
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b)
    eye = torch.eye(3, dtype=torch.float64)
    rows = torch.autograd.grad(nade_nats(y, *leaves), leaves, eye, is_grads_batched=True)
    torch.testing.assert_close(rows[2].sum(0), outside[2])


def test_a_population_equals_its_members():
    y, leaves = values(4, 7, 5, P=(3,))
    total = vmap(lambda *x: nade_nats(y, *x))(*leaves)
    grads = gradients(total, leaves)
    for p in range(3):
        own = [x[p].detach().requires_grad_() for x in leaves]
        alone = nade_nats(y, *own)
        torch.testing.assert_close(total[p], alone)
        weights = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)[p]
        for got, want in zip(grads, torch.autograd.grad(alone, own, weights), strict=True):
            torch.testing.assert_close(got[p], want)


def test_extreme_biases_stay_finite():
    y, leaves = values(4, 7, 5, dtype=torch.float32)
    huge = [x.detach().mul(1e4).requires_grad_() for x in leaves]
    found, wanted = nade_nats(y, *huge), plain_nats(y.float(), *huge)
    torch.testing.assert_close(found, wanted)
    assert all(g.isfinite().all() for g in gradients(found, huge))


def test_it_compiles_as_one_operator():
    y, leaves = values(3, 5, 4)
    compiled = torch.compile(nade_nats, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(y, *leaves), nade_nats(y, *leaves))


@pytest.fixture
def emulated(monkeypatch):
    """The kernels of a GPU, compiled for the CPU."""
    from deeprnn.backends.cuda import nade

    def kernel(name, notes, hidden, device):
        return Small("training/nade.cu", name, {"NOTES": notes, "HIDDEN": hidden})

    monkeypatch.setattr(nade, "_kernel", lru_cache(kernel))
    monkeypatch.setattr(nade, "index_of", lambda device: 0)
    monkeypatch.setattr(nade_loss, "_has_kernel", lambda W: True)


@EMULATED
@pytest.mark.parametrize(("size", "members"), [((11, 66, 63), (2,))])
def test_the_emulated_kernels(size, members, emulated):
    y, exact = values(*size, P=members, density=0.2)
    y = y | (torch.arange(size[0]) == 1).to(torch.uint8)[:, None]  # one frame in which all notes sound
    own = [x.detach().float().requires_grad_() for x in exact]
    formula = vmap if members else lambda function: function
    found = formula(lambda *x: nade_nats(y, *x))(*own)
    wanted = formula(lambda *x: plain_nats(y.double(), *x))(*exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(found, own), gradients(wanted, exact), strict=True):
        assert (a.double() - b).norm() <= 2e-6 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [*SIZES, (200, 88, 200), (40, 100, 2047), (3, 5, 2049)]
)  # the last: beyond the kernel
@pytest.mark.parametrize("members", [(), (3,)])
def test_on_the_gpu(size, members):
    y, exact = values(*size, P=members, density=0.1)
    own = [x.detach().float().cuda().requires_grad_() for x in exact]
    formula = vmap if members else lambda function: function
    found = formula(lambda *x: nade_nats(y.cuda(), *x))(*own)
    wanted = formula(lambda *x: plain_nats(y.double(), *x))(*exact)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-4)
    weights = torch.linspace(-1, 2, found.numel()).view(found.shape)
    grads = torch.autograd.grad(found, own, weights.cuda())
    for a, b in zip(grads, torch.autograd.grad(wanted, exact, weights.double()), strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-5 * b.norm()


# ---- as a model's output


def model(**settings):
    settings = {
        "input_size": 9,
        "hidden_size": 6,
        "output_size": 9,
        "output": "nade",
        "nade_size": 5,
    } | settings
    return deeprnn.rnn(**settings, seed=1, dtype=torch.float64)


@pytest.mark.parametrize("deep", [(), (4,), (4, 3)])
@pytest.mark.parametrize("shortcut", [False, True])
def test_a_deep_output_feeds_both_biases(deep, shortcut):
    if shortcut and not deep:
        pytest.skip("nothing to go around")
    net = deeprnn.build(
        deeprnn.assemble(input_size=9, output_size=9, hidden_sizes=(6,), output_hidden=deep, output="nade",
                         output_shortcut=shortcut, nade_size=5),
        seed=2, dtype=torch.float64,
    )  # fmt: skip
    h, y = torch.randn(3, 6, dtype=torch.float64), torch.randint(2, (3, 9))
    b, c = net.predict.biases(net.predict(h))
    o = h
    for n in range(1, len(deep) + 1):
        o = torch.sigmoid(o @ getattr(net.predict, f"V{n}").T + getattr(net.predict, f"b{n}"))
    last = len(deep) + 1
    wanted = o @ getattr(net.predict, f"V{last}").T + getattr(net.predict, f"b{last}")
    torch.testing.assert_close(b, wanted + h @ net.predict.K.T if shortcut else wanted)
    torch.testing.assert_close(c, o @ net.predict.C.T + net.predict.c)
    torch.testing.assert_close(
        net.predict.log_prob(h, y), -plain_nats(y.double(), b, c, net.predict.W, net.predict.V)
    )


def test_steps_and_sequences_agree_and_every_parameter_learns():
    net = model()
    x = torch.randint(2, (4, 3, 9)).double()
    out, _ = net(x)
    state = None
    for t in range(4):
        step, state = net.step(x[t], state)
        torch.testing.assert_close(step, out[t])
    total = nats(net, out, x).sum()
    grads = torch.autograd.grad(total, list(net.parameters()))
    assert all(g.abs().max() > 0 for g in grads)
    own = torch.nn.functional.binary_cross_entropy_with_logits(note_logits(net, out, x), x, reduction="sum")
    torch.testing.assert_close(total, own)


def test_padding_never_changes_the_loss():
    from deeprnn.data.batching import Batch
    from deeprnn.training.updater import Scored

    net = model()
    x, y = torch.randint(2, (4, 3, 9)).double(), torch.randint(2, (4, 3, 9)).double()
    mask, reset = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]).bool(), torch.zeros(4, 3).bool()

    def scored(y):
        total, _ = Scored(net)(Batch(x, y, mask, reset), net.initial_state(3), None)
        return total, torch.autograd.grad(total, list(net.parameters()))

    total, grads = scored(y)
    other, others = scored(torch.where(mask.unsqueeze(-1), y, 1 - y))
    assert torch.equal(total, other)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_a_mapped_model_equals_each_alone():
    nets = [model() for _ in range(2)]
    torch.nn.init.normal_(nets[1].predict.W)
    stacked = {
        k: torch.stack([dict(n.named_parameters())[k] for n in nets]) for k, _ in nets[0].named_parameters()
    }
    x = torch.randint(2, (3, 2, 9)).double()

    def call(named):
        from deeprnn.model.scoring import StepNats

        return functional_call(StepNats(nets[0]), {f"model.{k}": v for k, v in named.items()}, (x, x))[0]

    together = vmap(call)(stacked)
    for net, found in zip(nets, together, strict=True):
        torch.testing.assert_close(found, nats(net, net(x)[0], x))


def test_specs_survive_json_and_labels_name_it():
    from deeprnn.model.notation import equations, label, short_name
    from deeprnn.model.structure import dissect

    spec = model().spec
    assert deeprnn.ModelSpec.from_dict(spec.to_dict()) == spec
    assert (label(spec), short_name(spec)) == ("RNN-NADE", "rnn-nade")
    assert dissect(spec).parameters == sum(p.numel() for p in model().parameters())
    assert equations(spec)[-2:] == [
        "gᵢ,ₜ = σ(C hₜ + c + Σ_{j<i} Wⱼ yⱼ,ₜ)", "p(yᵢ,ₜ = 1 | y_{<i},ₜ) = σ((V₁ hₜ + b₁)ᵢ + Vᵢ gᵢ,ₜ)",
    ]  # fmt: skip


@pytest.mark.parametrize("step", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_exported_computes_the_same(step):
    from deeprnn.model.export import export_program

    net = model().float()
    program = export_program(net, step).module()
    x = torch.randint(2, (2, 9) if step else (6, 2, 9)).float()
    out, state = net.step(x) if step else net(x)
    second = torch.rand(x.shape) if step else torch.randint(2, x.shape).float()
    found, *states = program(x, second, *net.initial_state(2))
    wanted = net.predict.draw(out, second)[0] if step else net.predict.conditional_logits(out, second)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(states[0], state[0])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: NadePredict(4, 6, hidden_size=0), "hidden_size must be a whole number"),
        (lambda: model(symbols=True), "integer symbols"),
        (lambda: model(nade_size=0), "do not fit"),
        (
            lambda: NadePredict(4, 6, hidden_size=5).log_prob(torch.zeros(2, 4), torch.zeros(2, 5)),
            r"\(2, 6\)",
        ),
        (lambda: NadePredict(4, 6, hidden_size=5).sample(torch.zeros(4), temperature=-1.0), "temperature=-1"),
        (lambda: NadePredict(4, 6, hidden_size=5).biases(torch.zeros(2, 6)), "6 [+] 5 biases"),
    ],
)
def test_mistakes_are_named(make, told):
    with pytest.raises(UserError, match=told):
        make()
