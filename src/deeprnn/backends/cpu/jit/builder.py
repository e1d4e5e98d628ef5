"""LLVM functions written from Python: words of memory, loops, calls through pointers, a barrier between threads.

Everything here builds instructions through llvmlite. A "word" is a 64-bit integer or an address: tables that Python
fills and machine code reads are arrays of words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
POINTER, VOID = ir.PointerType(), ir.VoidType()
SPINS_BEFORE_YIELD = 300
YIELD = "deeprnn_yield"
"""name of the system's call that lets another thread run"""


def new_module() -> ir.Module:
    """An empty module for this processor."""
    module = ir.Module("deeprnn")
    module.triple = llvm.get_process_triple()
    return module


class Builder:
    """Writes one function; `b` is llvmlite's builder, which stands where the next instruction goes."""

    def __init__(self, name: str, arguments: Sequence[ir.Type], module: ir.Module | None = None):
        self.module = new_module() if module is None else module
        self.function = ir.Function(self.module, ir.FunctionType(VOID, arguments), name)
        self.arguments = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))

    @property
    def text(self) -> str:
        """The module with every function written so far."""
        return str(self.module)

    def index(self, value: Any) -> Any:
        """A whole number as a constant; what is a value already stays."""
        return ir.Constant(I64, int(value)) if isinstance(value, int) else value

    def intrinsic(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        """Call a function by its name, declared on first use."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    def call_address(self, address: Any, *arguments: Any, result: ir.Type = VOID) -> Any:
        """Call the function at an address."""
        kind = ir.FunctionType(result, [a.type for a in arguments])
        return self.b.call(self.b.inttoptr(address, kind.as_pointer()), arguments)

    # ---- memory

    def offset(self, pointer: Any, count: Any) -> Any:
        """The address so many bytes further on."""
        return self.b.gep(pointer, [self.index(count)], source_etype=I8)

    def word_at(self, table: Any, number: Any) -> Any:
        """The address of a word of a table."""
        return self.b.gep(table, [self.index(number)], source_etype=I64)

    def word(self, table: Any, number: Any) -> Any:
        """A word of a table."""
        return self.b.load(self.word_at(table, number), typ=I64)

    def pointer(self, table: Any, number: Any) -> Any:
        """A word of a table, which is an address."""
        return self.b.load(self.word_at(table, number), typ=POINTER)

    def stack(self, kind: ir.Type, count: Any, align: int = 8) -> Any:
        """Room for so many values that lives as long as the call; untyped as all our addresses are."""
        room = self.b.alloca(kind, size=self.index(count))
        room.align = align  # type: ignore[assignment]
        return self.b.inttoptr(self.b.ptrtoint(room, I64), POINTER)

    def marked(self, marks: Any) -> Any:
        """Whether the byte at an address is set."""
        return self.b.icmp_unsigned("!=", self.b.load(marks, typ=I8), ir.Constant(I8, 0))

    # ---- whole numbers

    def add(self, *values: Any) -> Any:
        """The sum of whole numbers."""
        total, *rest = [self.index(value) for value in values]
        for value in rest:
            total = self.b.add(total, value)
        return total

    def mul(self, a: Any, b: Any) -> Any:
        """The product of whole numbers."""
        return self.b.mul(self.index(a), self.index(b))

    def less(self, a: Any, b: Any) -> Any:
        """Whether a < b."""
        return self.b.icmp_signed("<", self.index(a), self.index(b))

    def minimum_of(self, a: Any, b: Any) -> Any:
        """The smaller of two whole numbers."""
        return self.b.select(self.less(a, b), self.index(a), self.index(b))

    # ---- control

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[..., Sequence[Any] | None],
        carried: Sequence[Any] = (),
        step: Any = 1,
    ) -> list[Any]:
        """`for i in range(start, stop, step): carried = body(i, *carried)`; the last carried values."""
        start, stop, step = self.index(start), self.index(stop), self.index(step)
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(name) for name in ("head", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(start, before)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.less(i, stop), inside, after)
        self.b.position_at_end(inside)
        results = body(i, *values) or ()
        i.add_incoming(self.b.add(i, step), self.b.block)
        for phi, value in zip(values, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return values

    def repeat(
        self,
        carried: Sequence[Any],
        holds: Callable[..., Any],
        body: Callable[..., Sequence[Any]],
    ) -> list[Any]:
        """`while holds(*carried): carried = body(*carried)`; the last carried values."""
        before = self.b.block
        head, inside, after = (self.b.append_basic_block(name) for name in ("while", "again", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        values = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(values, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(holds(*values), inside, after)
        self.b.position_at_end(inside)
        for phi, value in zip(values, body(*values), strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return values

    def either(
        self, condition: Any, then: Callable[[], Sequence[Any]], otherwise: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        """The values of one of two pieces of code."""
        with self.b.if_else(condition) as (yes, no):
            with yes:
                first, first_end = then(), self.b.block
            with no:
                second, second_end = otherwise(), self.b.block
        values = []
        for a, b in zip(first, second, strict=True):
            value = self.b.phi(a.type)
            value.add_incoming(a, first_end)
            value.add_incoming(b, second_end)
            values.append(value)
        return values

    def barrier(self, counter: Any, goal: Any) -> None:
        """Arrive, and wait until an ever-growing counter of arrivals reaches the goal: spinning, then yielding."""
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
        spins.add_incoming(more, again)
        self.b.cbranch(self.less(SPINS_BEFORE_YIELD, more), rest, check)
        self.b.position_at_end(rest)
        self.intrinsic(YIELD, I32)
        spins.add_incoming(self.index(0), rest)
        self.b.branch(check)
        self.b.position_at_end(after)

    def _relax(self) -> None:
        """Tell the core that this is a waiting loop."""
        triple = self.module.triple
        if triple.startswith(("x86", "i686", "amd64")):
            self.intrinsic("llvm.x86.sse2.pause", VOID)
        elif triple.startswith(("aarch64", "arm64")):
            self.intrinsic("llvm.aarch64.hint", VOID, ir.Constant(I32, 1))
