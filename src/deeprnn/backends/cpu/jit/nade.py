"""A NADE's nats and gradients as machine code: frame by frame, with one hidden layer at a time in a core's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from deeprnn.backends.cpu.jit import machine
from deeprnn.backends.cpu.jit.builder import I64, POINTER
from deeprnn.backends.cpu.jit.emitter import Emitter
from deeprnn.backends.cpu.jit.number import NUMBERS

ROOM = 64
"""bytes beyond each vector of the workspace, so that its last register may be whole"""


def forward(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor, nats: Tensor, delta: Tensor) -> None:
    """Fill nats (N,) and delta (N, O), their derivative by the logits."""
    _call("forward", W, [y, b, c, W, V, nats, delta], len(y), vectors=2)


def backward(
    y: Tensor, c: Tensor, W: Tensor, V: Tensor, db: Tensor, dc: Tensor, dW: Tensor, dV: Tensor
) -> None:
    """Fill the gradients of c, W and V from that of b."""
    dW.zero_()
    dV.zero_()
    _call("backward", W, [y, c, W, V, db, dc, dW, dV], len(y), vectors=len(W) + 4)


def _call(name: str, W: Tensor, tensors: list[Tensor], frames: int, vectors: int) -> None:
    notes, hidden = W.shape
    tensors = [x.contiguous() for x in tensors]  # results are; inputs may be views
    wide = hidden * W.element_size() + ROOM
    wide += -wide % 64
    room = torch.empty(vectors * wide + 8 * notes + 64, dtype=torch.uint8)
    words = [x.data_ptr() for x in tensors] + [room.data_ptr(), frames, notes, hidden, wide]
    _function(name, W.dtype)((ctypes.c_int64 * len(words))(*words))


@lru_cache(maxsize=8)
def _function(name: str, dtype: torch.dtype) -> Callable[[Any], None]:
    number, size = NUMBERS[dtype], machine.machine().vector_bytes
    kind = {"forward": _Forward, "backward": _Backward}[name]
    address = machine.address(
        f"nade_{name}", str(dtype), lambda symbol: kind(symbol, [POINTER], number, size // number.size).text
    )
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Nade(Emitter):
    """What both directions share; a table of words holds the addresses, and the sizes behind them."""

    tensors: int

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        (table,) = self.arguments
        self.given = [self.pointer(table, i) for i in range(self.tensors)]
        room = self.pointer(table, self.tensors)
        self.frames, self.notes, self.hidden, self.wide = (
            self.word(table, self.tensors + 1 + i) for i in range(4)
        )
        self.room = room
        self.loop(0, self.frames, self.frame)
        self.b.ret_void()

    def frame(self, n: Any) -> None:
        """One frame."""
        raise NotImplementedError

    def vector_of(self, number: Any) -> Any:
        """A vector of the workspace."""
        return self.offset(self.room, self.mul(number, self.wide))

    def row(self, tensor: Any, number: Any, width: Any) -> Any:
        """A row of a matrix."""
        return self.at(tensor, self.mul(number, width))

    def each(self, count: Any, body: Callable[..., Any], carried: list[Any] | None = None) -> list[Any]:
        """`body(place, mask, *carried)` for registers of so many numbers; the last one may be masked."""
        whole = self.b.sdiv(count, self.index(self.lanes))
        values = self.loop(
            0, whole, lambda i, *rest: body(self.mul(i, self.lanes), None, *rest), carried or []
        )
        place = self.mul(whole, self.lanes)
        left = self.b.sub(count, place)
        with self.b.if_else(self.less(0, left)) as (some, none):
            with some:
                last, end = body(place, self.lanes_below(left), *values) or [], self.b.block
            with none:
                other = self.b.block
        merged = []
        for x, value in zip(last, values, strict=True):
            phi = self.b.phi(x.type)
            phi.add_incoming(x, end)
            phi.add_incoming(value, other)
            merged.append(phi)
        return merged

    def hear(self, a: Any, s: Any, row: Any, value: Any) -> None:
        """a += value · row, and s = σ(a)."""
        factor = self.broadcast(value)

        def body(place: Any, mask: Any) -> None:
            new = self.fma(factor, self.load(self.at(row, place), mask), self.load(self.at(a, place)))
            self.store(new, self.at(a, place))
            self.store(self.sigmoid(new), self.at(s, place))

        self.each(self.hidden, body)

    def begin(self, c: Any, a: Any, s: Any) -> None:
        """a = c, and s = σ(a)."""

        def body(place: Any, mask: Any) -> None:
            value = self.load(self.at(c, place), mask)
            self.store(value, self.at(a, place))
            self.store(self.sigmoid(value), self.at(s, place))

        self.each(self.hidden, body)

    def sounds(self, value: Any) -> Any:
        """Whether a note sounds; NaN does, and is seen in the result."""
        return self.b.fcmp_unordered("!=", value, ir.Constant(self.scalar, 0.0))

    def sum_of(self, x: Any) -> Any:
        """All lanes together."""
        step = self.lanes // 2
        while step:
            x = self.b.fadd(x, self._shuffle(x, x, [(i + step) % self.lanes for i in range(self.lanes)]))
            step //= 2
        return self.b.extract_element(x, ir.Constant(ir.IntType(32), 0))


class _Forward(_Nade):
    """Logits note by note, then nats and their derivative for all notes of the frame."""

    tensors = 7

    def frame(self, n: Any) -> None:
        y, b, c, W, V, nats, delta = self.given
        y, b, delta = (self.row(x, n, self.notes) for x in (y, b, delta))
        a, s = self.vector_of(0), self.vector_of(1)
        self.begin(self.row(c, n, self.hidden), a, s)

        def note(i: Any) -> None:
            row = self.row(V, i, self.hidden)

            def product(place: Any, mask: Any, total: Any) -> list[Any]:
                return [self.fma(self.load(self.at(row, place), mask), self.load(self.at(s, place)), total)]

            # The workspace beyond the last unit holds σ of zeros, which the mask of V leaves out.
            (total,) = self.each(self.hidden, product, [self.zero()])
            logit = self.b.fadd(self.sum_of(total), self.number_at(self.at(b, i)))
            self.b.store(logit, self.at(delta, i))
            value = self.number_at(self.at(y, i))
            with self.b.if_then(self.sounds(value)):
                self.hear(a, s, self.row(W, i, self.hidden), value)

        self.loop(0, self.notes, note)

        def loss(place: Any, mask: Any, total: Any) -> list[Any]:
            logit, value = self.load(self.at(delta, place), mask), self.load(self.at(y, place), mask)
            nats = self.softplus(self.b.fneg(self.absolute(logit)))
            nats = self.b.fadd(nats, self.b.fsub(self.relu(logit), self.b.fmul(value, logit)))
            self.store(self.b.fsub(self.sigmoid(logit), value), self.at(delta, place), mask)
            return [self.b.fadd(total, nats if mask is None else self.select(mask, nats, self.zero()))]

        (total,) = self.each(self.notes, loss, [self.zero()])
        self.b.store(self.sum_of(total), self.at(nats, n))


class _Backward(_Nade):
    """V's gradient on the way up; what each segment sends to its hidden layer is summed on the way down."""

    tensors = 8

    def frame(self, n: Any) -> None:
        y, c, W, V, db, dc, dW, dV = self.given
        y, db = self.row(y, n, self.notes), self.row(db, n, self.notes)
        a, s, sums = (self.vector_of(i) for i in range(3))
        heard = self.vector_of(self.add(self.notes, 4))  # the notes that sound, as whole numbers
        self.begin(self.row(c, n, self.hidden), a, s)
        self.each(self.hidden, lambda place, mask: self.store(self.zero(), self.at(sums, place)))

        def note(i: Any, segment: Any) -> list[Any]:
            g = self.broadcast(self.number_at(self.at(db, i)))
            into, row = self.row(dV, i, self.hidden), self.row(V, i, self.hidden)

            def products(place: Any, mask: Any) -> None:
                old = self.load(self.at(into, place), mask)
                self.store(self.fma(g, self.load(self.at(s, place)), old), self.at(into, place), mask)
                total = self.fma(g, self.load(self.at(row, place), mask), self.load(self.at(sums, place)))
                self.store(total, self.at(sums, place))

            self.each(self.hidden, products)
            value = self.number_at(self.at(y, i))
            on = self.sounds(value)
            with self.b.if_then(on):
                self._send(s, sums, self.vector_of(self.add(segment, 3)))
                self.b.store(i, self.word_at(heard, segment))
                self.hear(a, s, self.row(W, i, self.hidden), value)
            return [self.add(segment, self.b.zext(on, I64))]

        (count,) = self.loop(0, self.notes, note, [self.index(0)])
        self._send(s, sums, self.vector_of(self.add(count, 3)))
        self._down(count, heard, y, dW, self.row(dc, n, self.hidden))

    def _send(self, s: Any, sums: Any, into: Any) -> None:
        """A segment's gradient of a: the sum of its notes' times s (1 - s); the sum begins anew."""

        def body(place: Any, mask: Any) -> None:
            x = self.load(self.at(s, place))
            slope = self.b.fmul(x, self.b.fsub(self.splat(1.0), x))
            self.store(self.b.fmul(self.load(self.at(sums, place)), slope), self.at(into, place))
            self.store(self.zero(), self.at(sums, place))

        self.each(self.hidden, body)

    def _down(self, count: Any, heard: Any, y: Any, dW: Any, dc: Any) -> None:
        """From the last segment to the first: a note's row gets the sum of all segments above it."""

        def segment(k: Any) -> None:
            above = self.b.sub(count, k)
            note = self.word(heard, self.add(above, -1))
            factor = self.broadcast(self.number_at(self.at(y, note)))
            row = self.row(dW, note, self.hidden)
            mine, below = self.vector_of(self.add(above, 3)), self.vector_of(self.add(above, 2))

            def body(place: Any, mask: Any) -> None:
                x = self.load(self.at(mine, place))
                old = self.load(self.at(row, place), mask)
                self.store(self.fma(factor, x, old), self.at(row, place), mask)
                self.store(self.b.fadd(self.load(self.at(below, place)), x), self.at(below, place))

            self.each(self.hidden, body)

        self.loop(0, count, segment)
        first = self.vector_of(3)
        self.each(
            self.hidden,
            lambda place, mask: self.store(self.load(self.at(first, place)), self.at(dc, place), mask),
        )
