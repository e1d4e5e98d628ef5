"""A small vocabulary for writing vector loops as LLVM code: loops, register tiles, units, a barrier.

`cpu_jit.py` writes the programs with it. Everything here builds instructions through llvmlite; a "vector"
is one hardware register of `lanes` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
POINTER = ir.PointerType()
SPINS_BEFORE_YIELD = 300
YIELD = "deeprnn_yield"  # the system's "let another thread run"


@dataclass(frozen=True)
class Number:
    """A floating point type and what exp needs to know of it."""

    type: ir.Type
    bits: ir.IntType
    size: int  # bytes
    mantissa: int
    bias: int
    ln2_high: float  # ln 2 split in two, so that n * ln2_high is exact
    ln2_low: float
    degree: int  # of the Taylor polynomial of exp on |r| <= ln(2)/2
    limit: float  # exp(±limit) is a normal number


FLOAT = Number(ir.FloatType(), I32, 4, 23, 127, 0.693359375, -2.12194440054690583e-4, 7, 87.0)
DOUBLE = Number(ir.DoubleType(), I64, 8, 52, 1023, 6.93145751953125e-1, 1.42860682030941723212e-6, 13, 708.0)


class Emitter:
    """Writes one function; `b` is the llvmlite builder, positioned where the next instruction goes."""

    def __init__(self, function: ir.Function, number: Number, lanes: int):
        self.function, self.number, self.lanes = function, number, lanes
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.scalar = number.type
        self.vector = ir.VectorType(number.type, lanes)
        self.words = ir.VectorType(number.bits, lanes)

    # ---- numbers

    def index(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def splat(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [ir.Constant(self.scalar, value)] * self.lanes)

    def zero(self) -> ir.Constant:
        return self.splat(0.0)

    def broadcast(self, scalar: Any) -> Any:
        single = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(single, ir.Constant(self.vector, ir.Undefined), mask)

    def call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Call an LLVM intrinsic, declared on first use."""
        module = self.function.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        kind = "f32" if self.number is FLOAT else "f64"
        return self.call(f"llvm.fma.v{self.lanes}{kind}", self.vector, x, y, z)

    # ---- memory

    def at(self, pointer: Any, offset: Any, stride: int = 1) -> Any:
        """Address of element `offset * stride`."""
        offset = self.index(offset) if isinstance(offset, int) else offset
        if stride != 1:
            offset = self.b.mul(offset, self.index(stride))
        return self.b.gep(pointer, [offset], source_etype=self.scalar)

    def load(self, pointer: Any, mask: Any = None) -> Any:
        if mask is None:
            return self.b.load(pointer, align=self.number.size, typ=self.vector)
        kind = "f32" if self.number is FLOAT else "f64"
        name = f"llvm.masked.load.v{self.lanes}{kind}.p0"
        return self._masked(name, self.vector, [pointer], mask, self.zero())

    def store(self, value: Any, pointer: Any, mask: Any = None) -> None:
        if mask is None:
            self.b.store(value, pointer, align=self.number.size)
            return
        kind = "f32" if self.number is FLOAT else "f64"
        name = f"llvm.masked.store.v{self.lanes}{kind}.p0"
        self._masked(name, ir.VoidType(), [value, pointer], mask)

    def _masked(self, name: str, result: ir.Type, head: list[Any], mask: Any, *tail: Any) -> Any:
        """The alignment is written as an argument, which every LLVM reads (newer ones turn it into an attribute)."""
        return self.call(name, result, *head, ir.Constant(I32, self.number.size), mask, *tail)

    def mask(self, valid: int) -> Any:
        """The first `valid` lanes, None for all of them."""
        if valid >= self.lanes:
            return None
        return ir.Constant(ir.VectorType(I1, self.lanes), [int(i < valid) for i in range(self.lanes)])

    def lanes_below(self, count: Any) -> Any:
        """A mask of the lanes whose number is below `count`, known only at run time."""
        numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        kind = ir.VectorType(I64, self.lanes)
        single = self.b.insert_element(ir.Constant(kind, ir.Undefined), count, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        spread = self.b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)
        return self.b.icmp_signed("<", numbers, spread)

    def transpose(self, rows: list[Any]) -> list[Any]:
        """A square of `lanes` vectors, rows for columns, by swapping ever larger blocks."""
        step, rows = 1, list(rows)
        while step < self.lanes:
            for i in range(self.lanes):
                if i & step:
                    continue
                a, b = rows[i], rows[i + step]
                near = [l if not l & step else self.lanes + l - step for l in range(self.lanes)]
                far = [l + step if not l & step else self.lanes + l for l in range(self.lanes)]
                rows[i], rows[i + step] = self._shuffle(a, b, near), self._shuffle(a, b, far)
            step *= 2
        return rows

    def _shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, self.lanes), places))

    # ---- control

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[..., Sequence[Any]],
        carried: Sequence[Any] = (),
        step: int = 1,
    ) -> list[Any]:
        """`for i in range(start, stop, step): carried = body(i, *carried)`; the last carried values."""
        start = self.index(start) if isinstance(start, int) else start
        stop = self.index(stop) if isinstance(stop, int) else stop
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(name) for name in ("head", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(start, before)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.b.icmp_signed("<", i, stop), inside, after)
        self.b.position_at_end(inside)
        results = body(i, *values) or ()
        i.add_incoming(self.b.add(i, self.index(step)), self.b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return values

    def barrier(self, counter: Any, target: Any, parts: int) -> None:
        """Wait until all parts have arrived: an ever-growing counter, spinning, then yielding the core."""
        goal = self.b.add(self.b.load(target, typ=I64), self.index(parts))
        self.b.store(goal, target)
        self.b.atomic_rmw("add", counter, self.index(1), "acq_rel")
        before = self.b.block
        check, again, rest, after = (
            self.b.append_basic_block(n) for n in ("check", "again", "rest", "after")
        )
        self.b.branch(check)
        self.b.position_at_end(check)
        spins = self.b.phi(I64)
        spins.add_incoming(self.index(0), before)
        arrived = self.b.load_atomic(counter, "acquire", 8, typ=I64)
        self.b.cbranch(self.b.icmp_signed(">=", arrived, goal), after, again)
        self.b.position_at_end(again)
        self._relax()
        more = self.b.add(spins, self.index(1))
        tired = self.b.icmp_signed(">", more, self.index(SPINS_BEFORE_YIELD))
        spins.add_incoming(more, again)
        self.b.cbranch(tired, rest, check)
        self.b.position_at_end(rest)
        self.call(YIELD, I32)
        spins.add_incoming(self.index(0), rest)
        self.b.branch(check)
        self.b.position_at_end(after)

    def _relax(self) -> None:
        """Tell the core that this is a waiting loop."""
        triple = self.function.module.triple
        if triple.startswith(("x86", "i686", "amd64")):
            self.call("llvm.x86.sse2.pause", ir.VoidType())
        elif triple.startswith(("aarch64", "arm64")):
            self.call("llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))

    # ---- a register tile

    def multiply(
        self, tile: list[Any], rows: Sequence[Any], weights: Any, depth: int, width: int, unroll: int = 2
    ) -> list[Any]:
        """tile[r][v] += Σ_k rows[r][k] * weights[k][v], k in order, so that splitting never changes a sum.

        `tile` is flat, row by row, `width` vectors each; `weights` is dense, (depth, width vectors).
        """
        columns = width * self.lanes

        def once(k: Any, values: list[Any]) -> list[Any]:
            base = self.at(weights, k, columns)
            loaded = [self.load(self.at(base, v * self.lanes)) for v in range(width)]
            out = []
            for r, row in enumerate(rows):
                x = self.broadcast(self.b.load(self.at(row, k), typ=self.scalar))
                out += [self.fma(x, loaded[v], values[r * width + v]) for v in range(width)]
            return out

        def several(k: Any, *values: Any) -> list[Any]:
            result = list(values)
            for u in range(unroll):
                result = once(self.b.add(k, self.index(u)), result)
            return result

        whole = depth // unroll * unroll
        tile = self.loop(0, whole, several, tile, step=unroll)
        for k in range(whole, depth):
            tile = once(self.index(k), tile)
        return tile

    # ---- units and their slopes

    def unit(self, name: str, x: Any) -> Any:
        """φ(x), keeping NaN."""
        return getattr(self, f"_{name}")(x)

    def slope(self, name: str, y: Any) -> Any:
        """φ'(x) from y = φ(x); None for a slope of one."""
        one = self.splat(1.0)
        if name == "sigmoid":
            return self.b.fmul(y, self.b.fsub(one, y))
        if name == "tanh":
            return self.fma(self.b.fneg(y), y, one)
        if name == "relu":
            return self.b.select(self.b.fcmp_ordered(">", y, self.zero()), one, self.zero())
        return None

    def _identity(self, x: Any) -> Any:
        return x

    def _relu(self, x: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered("<", x, self.zero()), self.zero(), x)

    def _sigmoid(self, x: Any) -> Any:
        scale, rest = self._exp(self.b.fneg(x), self.number.limit)
        one = self.splat(1.0)
        return self.b.fdiv(one, self.b.fadd(one, self.fma(scale, rest, scale)))

    def _tanh(self, x: Any) -> Any:
        """tanh x = e / (e + 2) with e = exp(2x) - 1, which stays exact near zero."""
        scale, rest = self._exp(self.b.fadd(x, x), 40.0)
        e = self.fma(scale, rest, self.b.fsub(scale, self.splat(1.0)))
        return self.b.fdiv(e, self.b.fadd(e, self.splat(2.0)))

    def _exp(self, x: Any, limit: float) -> tuple[Any, Any]:
        """2ⁿ and p with exp(x) = 2ⁿ (1 + p), x clipped to ±limit."""
        n = self.number
        x = self.b.select(self.b.fcmp_ordered(">", x, self.splat(limit)), self.splat(limit), x)
        x = self.b.select(self.b.fcmp_ordered("<", x, self.splat(-limit)), self.splat(-limit), x)
        # Adding 1.5 * 2^mantissa rounds to a whole number and leaves it in the low bits.
        magic = self.splat(1.5 * 2.0**n.mantissa)
        shifted = self.fma(x, self.splat(1.0 / math.log(2.0)), magic)
        whole = self.b.fsub(shifted, magic)
        r = self.fma(whole, self.splat(-n.ln2_high), x)
        r = self.fma(whole, self.splat(-n.ln2_low), r)
        p = self.splat(1.0 / math.factorial(n.degree))
        for k in range(n.degree - 1, 0, -1):
            p = self.fma(p, r, self.splat(1.0 / math.factorial(k)))
        bias = ir.Constant(self.words, [ir.Constant(n.bits, n.bias)] * self.lanes)
        shift = ir.Constant(self.words, [ir.Constant(n.bits, n.mantissa)] * self.lanes)
        scale = self.b.shl(self.b.add(self.b.bitcast(shifted, self.words), bias), shift)
        return self.b.bitcast(scale, self.vector), self.b.fmul(p, r)
