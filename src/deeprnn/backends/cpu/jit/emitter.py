"""Vector code: registers of `lanes` numbers, masked and strided memory, transposition, elementary functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from deeprnn.backends.cpu.jit.builder import I1, I32, POINTER, VOID, Builder
from deeprnn.backends.cpu.jit.circular import CircularMath
from deeprnn.backends.cpu.jit.error_function import ErrorFunctionMath
from deeprnn.backends.cpu.jit.hyperbolic import HyperbolicMath
from deeprnn.backends.cpu.jit.number import FLOAT, Number
from deeprnn.backends.cpu.jit.rounding import RoundingMath


class Splat(ir.Constant):
    """A constant in every lane, written once: text with all lanes is ten times as long to write and to read."""

    def __init__(self, kind: ir.VectorType, element: ir.Constant):
        super().__init__(kind, [element] * kind.count)
        self.element = element

    def _get_reference(self) -> str:
        return f"splat ({self.element})"


class Emitter(CircularMath, ErrorFunctionMath, HyperbolicMath, RoundingMath, Builder):
    """Writes one function of vector instructions; the table `cells.functions.FUNCTIONS` calls its methods."""

    def __init__(self, name: str, arguments: Sequence[ir.Type], number: Number, lanes: int):
        super().__init__(name, arguments)
        self.number, self.lanes = number, lanes
        self.scalar = number.type
        self.vector = ir.VectorType(number.type, lanes)
        self.words = ir.VectorType(number.bits, lanes)
        self._splats: dict[str, Splat] = {}
        self.suffix = f"v{lanes}{'f32' if number is FLOAT else 'f64'}"

    @property
    def vector_bytes(self) -> int:
        """Bytes of a register."""
        return self.lanes * self.number.size

    # ---- values

    def splat(self, value: float) -> ir.Constant:
        """A constant in every lane."""
        return self.splat_of(self.vector, ir.Constant(self.scalar, value))

    def splat_of(self, kind: ir.VectorType, value: ir.Constant) -> ir.Constant:
        """A constant in every lane of a vector of any kind."""
        key = str(value)
        if key not in self._splats:
            self._splats[key] = Splat(kind, value)
        return self._splats[key]

    def zero(self) -> ir.Constant:
        """Zero in every lane."""
        return self.splat(0.0)

    def broadcast(self, scalar: Any) -> Any:
        """A number in every lane."""
        return self._spread(scalar, self.vector)

    def _spread(self, scalar: Any, kind: ir.VectorType) -> Any:
        nothing = ir.Constant(kind, ir.Undefined)
        single = self.b.insert_element(nothing, scalar, ir.Constant(I32, 0))
        return self._shuffle(single, nothing, [0] * self.lanes)

    def _shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, self.lanes), places))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x·y + z, rounded once."""
        return self.intrinsic(f"llvm.fma.{self.suffix}", self.vector, x, y, z)

    def shared(self, name: str, write: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this module, written on first use: for code too long to stand at every use."""
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(self.vector, [self.vector] * len(arguments))
            function = ir.Function(self.module, kind, name)
            function.linkage = "internal"
            outside, self.b = self.b, ir.IRBuilder(function.append_basic_block("entry"))
            self.b.ret(write(*function.args))
            self.b = outside
        return self.b.call(function, arguments)

    # ---- memory

    def at(self, pointer: Any, count: Any) -> Any:
        """The address so many numbers further on."""
        return self.b.gep(pointer, [self.index(count)], source_etype=self.scalar)

    def number_at(self, pointer: Any) -> Any:
        """One number."""
        return self.b.load(pointer, typ=self.scalar)

    def load(self, pointer: Any, mask: Any = None, step: int = 1) -> Any:
        """A vector whose lanes lie `step` numbers apart; where a mask is off nothing is read and the value is 0."""
        if step != 1:
            everywhere = Splat(ir.VectorType(I1, self.lanes), ir.Constant(I1, 1))
            name = f"llvm.masked.gather.{self.suffix}.v{self.lanes}p0"
            places = self._places(pointer, step)
            return self.intrinsic(name, self.vector, places, self._alignment, mask or everywhere, self.zero())
        if mask is None:
            return self.b.load(pointer, align=self.number.size, typ=self.vector)
        name = f"llvm.masked.load.{self.suffix}.p0"
        return self.intrinsic(name, self.vector, pointer, self._alignment, mask, self.zero())

    def store(self, value: Any, pointer: Any, mask: Any = None, step: int = 1) -> None:
        """Store a vector, `step` numbers apart; where a mask is off nothing is written."""
        if step != 1:
            everywhere = Splat(ir.VectorType(I1, self.lanes), ir.Constant(I1, 1))
            name = f"llvm.masked.scatter.{self.suffix}.v{self.lanes}p0"
            places = self._places(pointer, step)
            self.intrinsic(name, VOID, value, places, self._alignment, mask or everywhere)
        elif mask is None:
            self.b.store(value, pointer, align=self.number.size)
        else:
            name = f"llvm.masked.store.{self.suffix}.p0"
            self.intrinsic(name, VOID, value, pointer, self._alignment, mask)

    @property
    def _alignment(self) -> ir.Constant:
        """Written as an argument, which every LLVM reads: newer ones turn it into an attribute."""
        return ir.Constant(I32, self.number.size)

    def _places(self, pointer: Any, step: int) -> Any:
        """The addresses of lanes `step` numbers apart."""
        offsets = ir.Constant(
            ir.VectorType(ir.IntType(64), self.lanes), [step * i for i in range(self.lanes)]
        )
        places = self.b.gep(pointer, [offsets], source_etype=self.scalar)
        places.type = ir.VectorType(POINTER, self.lanes)  # llvmlite takes it for one address
        return places

    def lanes_below(self, count: Any) -> Any:
        """A mask of the lanes whose number is below `count`."""
        numbers = ir.Constant(self.words, list(range(self.lanes)))
        narrow = count if self.number.bits.width == 64 else self.b.trunc(count, self.number.bits)
        return self.b.icmp_signed("<", numbers, self._spread(narrow, self.words))

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
