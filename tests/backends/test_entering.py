"""The input's product, the loop and all gradients as one operation, and the stretches in which it goes backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deeprnn.backends import TransitionSpec, cuda, gradients, reference, unroll_input
from deeprnn.backends.cuda import entering, launch, planning, products, rows, stretches, tall

GPU = pytest.mark.gpu
W = tall.Wanted


# ---- the input's product in one with the loop

SPEC = TransitionSpec((12, 8), ("sigmoid", "tanh"), (False, True))


def plainly(monkeypatch, split=True):
    """The kernels' places taken by plain operations, so that what remains is which is called with what."""

    def rows_times(x, matrix, bias=None):
        y = x @ matrix.mT
        return y if bias is None else y + bias.unsqueeze(-2)

    class Sums:
        def __init__(self, left, width, reset, wanted, free=0, onto=None):
            self.left, self.width, self.reset, self.wanted, self.sides = left, width, reset, wanted, []
            self.onto, self.outs = onto, []

        def cut_left(self, stream=None):
            done.append("cut")
            for x, h0 in self.left:
                side = self.left[0].x.new_ones(*self.left[0].x.shape[:-1], 1) if x is None else x
                self.sides.append(side if h0 is None else gradients.previous_states(side, h0, self.reset))

        def finish(self, right, stream=None):
            assert right.shape[-1] == self.width
            whole = right.flatten(-3, -2).mT @ torch.cat(self.sides, -1).flatten(-3, -2)
            self.outs = [whole[..., w.right : w.right_end, w.left : w.left_end] for w in self.wanted]
            if self.onto is not None:
                self.outs = [a.add_(b) for a, b in zip(self.onto.outs, self.outs, strict=True)]
            return list(self.outs)

    done: list[str] = []  # what `_all_sums` launches, in its order

    class Look:
        def __init__(self, dh, *given):
            self.steps = dh.storage_offset(), len(dh)
            done.append(f"room {len(dh)}")

        def begin(self, stream=None):
            done.append(f"look {self.steps[1]}" + (" beside" if stream else ""))

    def forward(A, h0, W, S, reset, *text):
        return reference.unroll(A, h0, W, S, SPEC, reset)

    def backward(dh, dz, h, z, W, S, reset, spec, bf16, dA, dh0, after=None, looked=None):
        assert looked is None or looked.steps == (dh.storage_offset(), len(dh)), "looked at other steps"
        done.append(f"loop {len(h)}")
        marks = torch.zeros(len(h) + 1, h.shape[1], dtype=torch.bool)
        if reset is not None:  # the row that follows these steps is read where there is one
            count = len(h) + (after is not None)
            marks[:count] = reset.as_strided((count, h.shape[1]), reset.stride())
        d1, d2 = (torch.zeros_like(dA[0]) if after is None else after).split([12, 8], -1)
        for t in range(len(h) - 1, -2, -1):
            carried = (d1 @ W[0] + d2 @ S[0]).masked_fill(marks[t + 1].unsqueeze(-1), 0)
            if t >= 0:
                d2 = (dh[t] + carried) * (1 - h[t] ** 2)
                d1 = (d2 @ W[1] + (0 if dz is None else dz[t])) * z[t] * (1 - z[t])
                dA[t] = torch.cat([d1, d2], -1)
            elif dh0 is not None:
                dh0.copy_(carried)

    monkeypatch.setattr(entering, "splits", lambda x, spec: split)
    monkeypatch.setattr(rows, "rows_times", rows_times)
    monkeypatch.setattr(tall, "Sums", Sums)
    monkeypatch.setattr(cuda, "_forward", forward)
    monkeypatch.setattr(launch, "backward", backward)
    monkeypatch.setattr(launch, "look", Look)
    monkeypatch.setattr(cuda, "unroll_cuda", forward)
    monkeypatch.setattr(cuda, "_plain", lambda *tensors: True)
    return done


def given(biases=2) -> list[Any]:
    """x, h0, U1, U2, W1, W2, S2 and some of b1, b2 and the first layer's second one, in float64."""
    shapes = ((7, 3, 8), (3, 8), (12, 8), (8, 8), (12, 8), (8, 12), (8, 8), (12,), (8,), (12,))
    return [(0.3 * torch.randn(s, dtype=torch.float64)).requires_grad_() for s in shapes[: 7 + biases]]


def by_entering(x, h0, U1, U2, W1, W2, S2, *b, reset=None):
    return entering.unroll(x, [U1, U2], b, h0, [W1, W2], [S2], SPEC, reset, "fp32")


def by_reference(x, h0, U1, U2, W1, W2, S2, b1=None, b2=None, again=0.0, reset=None):
    bias = None if b1 is None or b2 is None else torch.cat([b1 + again, b2])
    return reference.unroll(F.linear(x, torch.cat([U1, U2]), bias), h0, [W1, W2], [S2], SPEC, reset)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("biases", [0, 2, 3])
@pytest.mark.parametrize("only", [None, "x", "U", "b", "S", "h alone"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("bounds", [(0, 7), (0, 2, 3, 7)], ids=["whole", "stretches"])
def test_all_gradients_of_the_input_and_the_loop(split, biases, only, marked, bounds, monkeypatch):
    plainly(monkeypatch, split)
    cutting = stretches.Cutting(tuple(pairwise(bounds)), 41)
    monkeypatch.setattr(entering, "_cutting", lambda *given: cutting)
    tensors = given(biases)
    wanted = {"x": [0], "U": [2], "b": range(7, 7 + biases), "S": [6]}.get(only or "", range(len(tensors)))
    for i, t in enumerate(tensors):
        t.requires_grad_(i in wanted)
    leaves = [t for t in tensors if t.requires_grad]
    if not leaves:
        pytest.skip("no biases")
    reset = torch.rand(7, 3) < 0.3 if marked else None
    upstream = [torch.randn(7, 3, n, dtype=torch.float64) for n in (8, 12)][: 1 if only == "h alone" else 2]
    results = []
    for function in (by_entering, by_reference):
        outputs = function(*tensors, reset=reset)[: len(upstream)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_what_goes_beside_the_loop_follows_it_and_all_memory_is_there_before(monkeypatch):
    """Memory taken later may be some that the loop still writes to; what begins sooner takes its processors."""
    done = plainly(monkeypatch)

    class Beside:
        def __init__(self, device):
            done.append("fork")

        def begin(self):
            return 7

        mark, wait, end = (lambda self, what=what: done.append(what) for what in ("mark", "wait", "join"))

    monkeypatch.setattr(entering, "Beside", Beside)
    cutting = stretches.Cutting(((0, 1), (1, 3), (3, 7)), 41)
    monkeypatch.setattr(entering, "_cutting", lambda *given: cutting)
    tensors = given()
    h, _ = by_entering(*tensors)
    torch.autograd.grad(h.sum(), tensors)
    first = [
        "room 4",
        "room 2",
        "room 1",
        "look 4",
        "fork",
        "loop 4",
        "look 2 beside",
        "look 1 beside",
        "mark",
    ]
    assert done == [*first, "cut", "cut", "cut", "wait", "fork", "loop 2", "fork", "loop 1", "join"]


def test_torchs_products_are_taken_only_where_they_are_wanted(monkeypatch):
    plainly(monkeypatch, split=False)
    monkeypatch.setattr(entering, "weight_gradients", lambda *a: pytest.fail("not wanted"))
    tensors = given()
    for t in tensors[4:7]:
        t.requires_grad_(False)
    h, _ = by_entering(*tensors)
    assert all(g.any() for g in torch.autograd.grad(h.sum(), [tensors[i] for i in (0, 1, 2, 3, 7, 8)]))


def test_a_second_derivative_of_the_input_and_the_loop(monkeypatch):
    plainly(monkeypatch)
    assert torch.autograd.gradgradcheck(by_entering, given(biases=3))


def test_gradients_to_be_differentiated_again_count_no_path_twice(monkeypatch):
    """The first state depends on the weights where it is carried on, and a matrix may serve in two places."""
    plainly(monkeypatch)
    leaves, found = given(biases=3), []
    x, h0, U1, U2, _, *others = leaves
    leaves.pop(4)
    for function in (by_entering, by_reference):
        h, _ = function(x, h0, U1, U2, U1, *others)
        h, _ = function(x, h[-1], U1, U2, U1, *others)
        found.append(torch.autograd.grad(h.square().sum(), leaves, create_graph=True))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_mapped_over_the_outputs_of_the_input_and_the_loop(monkeypatch):
    plainly(monkeypatch)
    monkeypatch.setattr(cuda, "_plain", lambda *tensors: not gradients.inside_vmap())
    tensors = given(biases=3)
    h, _ = by_entering(*tensors)
    grads = torch.randn(3, *h.shape, dtype=h.dtype)
    found = torch.func.vmap(lambda g: torch.autograd.grad(h, tensors, g, retain_graph=True))(grads)
    for p in range(3):
        for a, b in zip(found, torch.autograd.grad(h, tensors, grads[p], retain_graph=True), strict=True):
            torch.testing.assert_close(a[p], b)


def test_only_plain_fp32_on_a_gpu_is_taken_over(monkeypatch):
    spec = TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True))
    x, U, b = torch.zeros(100, 64, 88), [torch.zeros(400, 88)] * 2, [torch.zeros(400)] * 3
    h0 = torch.zeros(64, 400)

    def serves(x=x, U=U, b=b, others=(h0,)):
        return entering.serves(x, U, b, others, spec)

    assert not serves()
    monkeypatch.setattr(entering, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    assert serves()
    assert serves(x[:1], b=())
    assert not serves(x.double())
    assert not serves(U=[U[0], U[1].double()])
    assert not serves(others=(h0.double(),))
    assert not serves(x[0])
    assert not serves(U=[U[0], torch.zeros(400, 92)])
    assert not serves(U=[U[0], torch.zeros(396, 88)])
    assert not serves(b=[b[0], torch.zeros(399)])
    assert not serves(b=[*b[:2], torch.zeros(399)])
    with torch.autocast("cpu"):
        assert not serves()
    seen = []
    torch.func.vmap(lambda u: seen.append(serves(U=[u, U[1]])) or u)(torch.zeros(2, 400, 88))
    assert seen == [False]


def test_only_many_rows_go_to_the_tensor_cores(monkeypatch):
    spec = TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True))
    x = torch.zeros(100, 64, 88)
    assert not entering.splits(x, spec)
    monkeypatch.setattr(products, "hopper", lambda device: True)
    assert entering.splits(x, spec)
    assert not entering.splits(x[:3], spec)
    assert not entering.splits(x.transpose(0, 1), spec)
    assert not entering.splits(torch.zeros(100, 64, 87), spec)
    assert not entering.splits(x, TransitionSpec((400, 20), ("sigmoid", "sigmoid"), (False, True)))


def test_without_a_gpu_the_product_and_the_loop_are_apart():
    tensors = given(biases=3)
    x, h0, U1, U2, W1, W2, S2, *b = tensors
    found = unroll_input(x, [U1, U2], b, h0, [W1, W2], [S2], SPEC)
    for f, expected in zip(found, by_reference(*tensors), strict=True):
        torch.testing.assert_close(f, expected)


# ---- stretches of the sequence

PAPER = TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True))
H200 = planning.Device()


@pytest.mark.parametrize("steps", [1, 2, 5, 50, 200, 1601])
@pytest.mark.parametrize("batch", [2, 128, 256, 273, 600, 20000])
def test_stretches_follow_one_another_and_cover_every_step(steps, batch):
    cutting = stretches.cutting(PAPER, steps, batch, 88, False, H200, False)
    bounds = [0, *(end for _, end in cutting.stretches)]
    assert list(cutting.stretches) == list(pairwise(bounds))
    assert bounds[-1] == steps
    assert all(a < b for a, b in pairwise(bounds))
    assert len(cutting.stretches) <= stretches.MOST


def test_only_large_batches_that_leave_processors_idle_are_cut():
    def count(spec, batch, device=H200, captured=False):
        return len(stretches.cutting(spec, 200, batch, 88, False, device, captured).stretches)

    assert count(PAPER, 256) == 3
    assert count(PAPER, 64) == 1, "a further launch costs the host too much"
    assert count(PAPER, 64, captured=True) == 2, "which a graph does not pay"
    assert count(PAPER, 16, captured=True) == 1
    assert count(PAPER, 512) == 1, "a second wave of clusters takes every processor that becomes idle"
    assert count(TransitionSpec((512, 512), PAPER.units, PAPER.shortcuts), 256) == 1, (
        "7 clusters of 16 blocks"
    )
    assert count(PAPER, 256, planning.Device((8, 0))) == 1, "another kernel's loop"


@pytest.mark.parametrize(("path", "lead"), [("generic", ()), ("mma", (2,))])
def test_a_stretch_goes_to_no_kernel_that_would_take_it_for_a_whole(path, lead, monkeypatch):
    monkeypatch.setattr(launch, "kernel_of", lambda *case: None)
    ring = planning.ring(PAPER, True)
    plan = planning.generic_plan(ring, 256, 1, False, H200)
    if path == "mma":
        plan = planning.make_plan(PAPER, 256, 1, False, True, H200)
    assert plan.path == path
    h = torch.zeros(*lead, 1, 256, 400)
    W, S, dA = (
        [torch.zeros(*lead, 400, 400)] * 2,
        [torch.zeros(*lead, 400, 400)],
        torch.zeros(*lead, 1, 256, 800),
    )
    with pytest.raises(ValueError, match="stretch"):
        launch.backward(h, None, h, h, W, S, None, PAPER, False, dA, None, plan=plan)


def test_sums_beside_the_loop_wait_for_no_processor():
    whole = (W(0, 400, 0, 800), W(489, 889, 400, 800), W(400, 488, 0, 800), W(488, 489, 0, 800))
    for count in (3000, 17000, 51200):
        plan = tall.cut(whole, count, 1, 41, at_once=True)
        assert plan is not None
        assert 30 <= len(plan.tiles) * plan.splits <= 41


def test_work_beside_begins_after_what_was_before_and_ends_before_what_follows(monkeypatch):
    done = []

    class Event:
        def record(self, stream):
            self.at = stream.name
            done.append(f"{stream.name} marks")

    class Stream:
        device_index, cuda_stream = 0, 7

        def __init__(self, device=0, name="second"):
            self.name = name

        def wait_event(self, event):
            done.append(f"{self.name} waits for {event.at}")

    first = Stream(name="first")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    entering._second.cache_clear()
    kept = []
    for _ in range(2):
        beside = entering.Beside(torch.device("cuda", 0))
        done.append("loop")
        assert beside.begin() == 7
        beside.mark()
        beside.wait()
        beside.end()
        kept.append(beside.second)
    once = ["first marks", "loop", "second waits for first", *["second marks", "first waits for second"] * 2]
    assert done == once * 2
    assert len(set(map(id, kept[0][1:]))) == 3, "each place has an event of its own"
    assert kept[0] is kept[1], "stream and events are made once"
    entering._second.cache_clear()
    assert entering.Beside(torch.device("cpu")).begin() is None


# ---- on a GPU


@GPU
@pytest.mark.parametrize("marked", [False, True])
def test_a_layer_in_stretches_is_the_whole_but_for_rounding(marked, monkeypatch):
    shapes = ((30, 250, 88), (250, 400), *(((400, 88), (400,)) * 2), (400, 400), (400, 400), (400, 400))
    leaves = [torch.randn(s, device="cuda").mul_(0.1 if i > 1 else 1) for i, s in enumerate(shapes)]
    x, h0, U1, b1, U2, b2, W1, W2, S2 = (t.requires_grad_() for t in leaves)
    reset = torch.rand(30, 250, device="cuda") < 0.05 if marked else None
    upstream = [torch.randn(30, 250, 400, device="cuda") for _ in range(2)]

    def run():
        outputs = entering.unroll(x, [U1, U2], [b1, b2], h0, [W1, W2], [S2], PAPER, reset, "fp32")
        found = torch.autograd.grad(outputs, leaves, upstream)
        outputs = [y.detach() for y in outputs]  # a tape kept alive would tie a capture to this stream
        return [*outputs, *found]

    assert entering.splits(x, PAPER)
    whole = run()
    cutting = stretches.Cutting(((0, 7), (7, 12), (12, 30)), 41)
    monkeypatch.setattr(entering, "_cutting", lambda *given: cutting)
    called = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for found in (called, captured):
        for i, (a, b) in enumerate(zip(found, whole, strict=True)):
            if i < 2:  # h and z: forward is not cut
                assert torch.equal(a, b)
            assert float((a - b).norm() / b.norm()) < 1e-6


@GPU
@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("batch", [64, 1])
def test_a_layer_with_the_product_of_its_input(backend, marked, batch):
    spec = TransitionSpec((400, 200), ("sigmoid", "tanh"), (False, True))
    shapes = ((40, batch, 88), (batch, 200), (400, 88), (200, 88), (400, 200), (200, 400), (200, 200))
    scales = (1, 1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1)
    leaves = [
        (torch.randn(s, device="cuda") * c).requires_grad_()
        for s, c in zip((*shapes, (400,), (200,), (400,)), scales, strict=True)
    ]
    reset = torch.rand(40, batch, device="cuda") < 0.05 if marked else None
    if reset is not None:
        reset[0] = False  # or the gradient of a lone h0 would be zero, which has no relative error
    x, h0, U1, U2, W1, W2, S2, *b = leaves
    assert entering.serves(x, (U1, U2), b, (h0, W1, W2, S2), spec)
    assert entering.splits(x, spec) == (batch > 1)
    upstream = [torch.randn(40, batch, n, device="cuda") for n in (200, 400)]
    outputs = unroll_input(x, (U1, U2), b, h0, [W1, W2], [S2], spec, reset, backend)
    found = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    x, h0, U1, U2, W1, W2, S2, *b = wide
    A = F.linear(x, torch.cat([U1, U2]), torch.cat([b[0] + b[2], b[1]]))
    outputs = reference.unroll(A, h0, [W1, W2], [S2], spec, reset)
    truth = [*outputs, *torch.autograd.grad(outputs, wide, [u.double() for u in upstream])]
    for f, t in zip(found, truth, strict=True):
        assert float((f - t).norm() / t.norm()) < 1e-5
