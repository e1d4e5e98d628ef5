"""The programs: an unrolled ⊕, its backward through time, and the packing of weights, as LLVM code.

One run is the whole loop over time. Each layer is a product of rows of the batch with weights packed into
panels a few vectors wide; a tile of rows x vectors of results stays in registers while k runs, starts from
what enters the layer and leaves through the unit (forward) or the slope (backward), so that every number
is read and written once. Threads take rows of the batch, or, where there are fewer rows than pay, panels of
every layer, with a barrier after each layer; then each core's weights stay in its own cache. Sums run over
k in one fixed order: neither batch, nor population, nor threads change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from deeprnn.backends.cpu.jit.emit import I8, I64, POINTER, Emitter
from deeprnn.backends.cpu.jit.plan import Panels, Plan, Product

_NAMES = count()


def new_name(kind: str) -> str:
    """A name no other function of this process has."""
    return f"deeprnn_{kind}_{next(_NAMES)}"


def new_module() -> ir.Module:
    """An empty module for this processor."""
    module = ir.Module("deeprnn")
    module.triple = llvm.get_process_triple()
    return module


class Program:
    """Writes the function `run` of one plan: common arguments, tiles over rows and panels, the barrier."""

    POINTERS: tuple[str, ...] = ()
    reset: Any
    weights: Any
    zeros: Any
    counter: Any
    steps: Any
    batch: Any
    first: Any
    tall: Any
    short: Any
    part: Any

    def __init__(self, plan: Plan):
        self.plan = plan
        module = new_module()
        names = (*self.POINTERS, "reset", "weights", "zeros", "counter")
        counts = ("steps", "batch", "first", "tall", "short", "part")
        kinds = [POINTER] * len(names) + [I64] * len(counts)
        self.name = new_name("run")
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), self.name)
        for argument, name in zip(function.args, (*names, *counts), strict=True):
            argument.name = name
            setattr(self, name, argument)
        self.e = Emitter(function, plan.number, plan.lanes)
        self.b = self.e.b
        self.arguments = len(names), len(counts)
        self.target = self.b.alloca(I64)
        self.b.store(self.e.index(0), self.target)
        self.write()
        self.b.ret_void()
        self.text = str(module)

    def write(self) -> None:
        raise NotImplementedError

    def meet(self) -> None:
        if self.plan.parts > 1:
            self.e.barrier(self.counter, self.target, self.plan.parts)

    def each_tile(self, panels: Panels, write: Callable[[Any, int, Any, int, int | None], None]) -> None:
        """Call write(row, rows, first vector, vectors, valid lanes of the last one) for each kind of tile."""
        share = panels.count // self.plan.parts
        low = self.b.mul(self.part, self.e.index(share))
        high = self.b.add(low, self.e.index(share))
        ragged = panels.columns % panels.lanes
        final = (panels.count if panels.width else panels.wide) - 1
        for width, a, b in ((panels.width + 1, 0, panels.wide), (panels.width, panels.wide, panels.count)):
            if width == 0 or a >= b:
                continue
            stop = final if ragged and b - 1 == final else b
            self._panel_range(panels, a, stop, width, low, high, None, write)
            self._panel_range(panels, stop, b, width, low, high, ragged, write)

    def _panel_range(self, panels, a, b, width, low, high, ragged, write) -> None:
        if a >= b:
            return
        b_ = self.b
        start = b_.select(b_.icmp_signed(">", low, self.e.index(a)), low, self.e.index(a))
        stop = b_.select(b_.icmp_signed("<", high, self.e.index(b)), high, self.e.index(b))

        def one_panel(panel: Any) -> tuple[()]:
            extra = b_.select(
                b_.icmp_signed("<", panel, self.e.index(panels.wide)), panel, self.e.index(panels.wide)
            )
            vector = b_.add(b_.mul(panel, self.e.index(panels.width)), extra)
            self._row_blocks(lambda row, rows: write(row, rows, vector, width, ragged))
            return ()

        self.e.loop(start, stop, one_panel)

    def _row_blocks(self, write: Callable[[Any, int], None]) -> None:
        start = self.first
        for height, blocks in zip(self.plan.heights, (self.tall, self.short), strict=False):
            stop = self.b.add(start, self.b.mul(blocks, self.e.index(height)))
            self.e.loop(start, stop, partial(self._tiles, write, height), step=height)
            start = stop

    def _tiles(self, write: Callable[[Any, int], None], height: int, row: Any) -> tuple[()]:
        write(row, height)
        return ()

    def columns(self, vectors: int, ragged: int | None) -> list[tuple[int, Any]]:
        """(offset, mask) of each vector of a tile."""
        lanes = self.plan.lanes
        masks = [None] * (vectors - 1) + [None if ragged is None else self.e.mask(ragged)]
        return [(v * lanes, masks[v]) for v in range(vectors)]

    def put(self, results: list[Any], ends: list[Any], spots: list[tuple[int, Any]]) -> None:
        """Store a tile's sums, row by row."""
        places = [(self.e.at(end, offset), mask) for end in ends for offset, mask in spots]
        for value, (place, mask) in zip(results, places, strict=True):
            self.e.store(value, place, mask)

    def each_row(self, rows: int, start: Any, stride: int, finish: Callable[[Any, Any], None]) -> None:
        """finish(r, place of row r) for the rows just stored.

        What follows the sums is a loop over memory, which is in the nearest cache, and not one copy of the
        code per row in registers: the program is compiled in half the time and runs no slower.
        """

        def one(r: Any) -> tuple[()]:
            finish(r, self.e.at(start, r, stride))
            return ()

        self.e.loop(0, rows, one)

    def packed(self, product: Product, vector: Any) -> Any:
        """Where a panel's weights begin."""
        offset = self.b.add(
            self.b.mul(vector, self.e.index(product.depth * self.plan.lanes)), self.e.index(product.offset)
        )
        return self.e.at(self.weights, offset)


class Forward(Program):
    """z_l = φ_l(A_l + W_l z_{l-1} + S_l h(t-1)), for all t."""

    POINTERS = ("A", "h0", "h", "z")
    A: Any
    h0: Any
    h: Any
    z: Any

    def write(self) -> None:
        plan, e, b = self.plan, self.e, self.b
        H, total = plan.sizes[-1], sum(plan.sizes)

        def step(t: Any) -> tuple[()]:
            row0 = b.mul(t, self.batch)
            earlier = e.at(self.h, b.sub(row0, self.batch), H)
            previous = b.select(b.icmp_signed("==", t, e.index(0)), self.h0, earlier)
            for product in plan.products(backward=False):
                self._layer(product, row0, previous, total, H)
                self.meet()
            return ()

        e.loop(0, self.steps, step)

    def _layer(self, product: Product, row0: Any, previous: Any, total: int, H: int) -> None:
        plan, e, b, l = self.plan, self.e, self.b, product.layer
        inner = total - H

        def tile(row: Any, rows: int, vector: Any, width: int, ragged: int | None) -> None:
            def finish(r: Any, place: Any) -> None:
                for offset, mask in spots:
                    spot = e.at(place, offset)
                    e.store(e.unit(plan.units[l], e.load(spot, mask)), spot, mask)

            column = b.mul(vector, e.index(plan.lanes))
            lines = [b.add(b.add(row0, row), e.index(r)) for r in range(rows)]
            states = self._states(previous, row, row0, rows, H)
            spots = self.columns(width, ragged)
            starts = [
                e.at(e.at(self.A, line, total), b.add(column, e.index(plan.offsets[l]))) for line in lines
            ]
            results = [e.load(e.at(start, offset), mask) for start in starts for offset, mask in spots]
            weights = self.packed(product, vector)
            for kind, layer, depth in product.terms:
                if kind == "S" or layer == 0:
                    sources = states
                else:
                    sources = [e.at(e.at(self.z, line, inner), plan.offsets[l - 1]) for line in lines]
                results = e.multiply(results, sources, weights, depth, width)
                weights = e.at(weights, depth * width * plan.lanes)
            if l == len(plan.sizes) - 1:
                ends = [e.at(e.at(self.h, line, H), column) for line in lines]
            else:
                ends = [
                    e.at(e.at(self.z, line, inner), b.add(column, e.index(plan.offsets[l]))) for line in lines
                ]
            self.put(results, ends, spots)
            self.each_row(rows, ends[0], H if l == len(plan.sizes) - 1 else inner, finish)

        self.each_tile(product.panels, tile)

    def _states(self, previous: Any, row: Any, row0: Any, rows: int, H: int) -> list[Any]:
        """Row pointers of h(t-1); a row that was reset reads zeros."""
        e, b = self.e, self.b
        states = [e.at(previous, b.add(row, e.index(r)), H) for r in range(rows)]
        if not self.plan.reset:
            return states
        for r in range(rows):
            mark = b.load(b.gep(self.reset, [b.add(b.add(row0, row), e.index(r))], source_etype=I8), typ=I8)
            states[r] = b.select(b.icmp_unsigned("!=", mark, ir.Constant(I8, 0)), self.zeros, states[r])
        return states


class Backward(Program):
    """δ_l and, fused with it, what goes back to h(t-1), for all t from the last to the first."""

    POINTERS = ("dh", "dz", "h", "z", "dA", "dh0")
    dh: Any
    dz: Any
    h: Any
    z: Any
    dA: Any
    dh0: Any

    def write(self) -> None:
        plan, e, b = self.plan, self.e, self.b
        *inner, back = plan.products(backward=True)
        steps_less_one = b.sub(self.steps, e.index(1))
        self._last_step(back.panels, b.mul(steps_less_one, self.batch))
        self.meet()

        def step(i: Any) -> tuple[()]:
            t = b.sub(steps_less_one, i)
            row0 = b.mul(t, self.batch)
            for product in inner:
                self._inner(product, row0)
                self.meet()
            self._back(back, row0, b.icmp_signed(">", t, e.index(0)))
            self.meet()
            return ()

        e.loop(0, self.steps, step)

    def _line(self, row0: Any, row: Any, r: int) -> Any:
        return self.b.add(self.b.add(row0, row), self.e.index(r))

    def _last_step(self, panels: Panels, row0: Any) -> None:
        def tile(row: Any, rows: int, vector: Any, width: int, ragged: int | None) -> None:
            column = self.b.mul(vector, self.e.index(self.plan.lanes))
            for r in range(rows):
                self._top(self._line(row0, row, r), column, [self.e.zero()] * width, width, ragged)

        self.each_tile(panels, tile)

    def _top(self, line: Any, column: Any, values: list[Any], width: int, ragged: int | None) -> None:
        """δ_L = (dh + values) φ'(h) at one row."""
        plan, e, b = self.plan, self.e, self.b
        H, total = plan.sizes[-1], sum(plan.sizes)
        place = b.add(b.mul(line, e.index(H)), column)
        out = e.at(e.at(self.dA, line, total), b.add(column, e.index(plan.offsets[-1])))
        for value, (offset, mask) in zip(values, self.columns(width, ragged), strict=True):
            here = b.add(place, e.index(offset))
            value = b.fadd(value, e.load(e.at(self.dh, here), mask))
            slope = e.slope(plan.units[-1], e.load(e.at(self.h, here), mask))
            e.store(value if slope is None else b.fmul(value, slope), e.at(out, offset), mask)

    def _inner(self, product: Product, row0: Any) -> None:
        """δ_l = (dz_l + W_{l+1}ᵀ δ_{l+1}) φ'(z_l)."""
        plan, e, b, l = self.plan, self.e, self.b, product.layer
        total = sum(plan.sizes)
        inner = total - plan.sizes[-1]

        def tile(row: Any, rows: int, vector: Any, width: int, ragged: int | None) -> None:
            column = b.add(b.mul(vector, e.index(plan.lanes)), e.index(plan.offsets[l]))
            lines = [self._line(row0, row, r) for r in range(rows)]
            spots = self.columns(width, ragged)
            places = [b.add(b.mul(line, e.index(inner)), column) for line in lines]
            results = [
                e.load(e.at(self.dz, b.add(place, e.index(offset))), mask) if plan.z_gradient else e.zero()
                for place in places
                for offset, mask in spots
            ]
            sources = [e.at(e.at(self.dA, line, total), plan.offsets[l + 1]) for line in lines]
            results = e.multiply(results, sources, self.packed(product, vector), product.depth, width)
            ends = [e.at(e.at(self.dA, line, total), column) for line in lines]
            self.put(results, ends, spots)

            def finish(r: Any, end: Any) -> None:
                outputs = e.at(e.at(self.z, places[0]), r, inner)
                for offset, mask in spots:
                    slope = e.slope(plan.units[l], e.load(e.at(outputs, offset), mask))
                    if slope is not None:
                        spot = e.at(end, offset)
                        e.store(b.fmul(e.load(spot, mask), slope), spot, mask)

            self.each_row(rows, ends[0], total, finish)

        self.each_tile(product.panels, tile)

    def _back(self, product: Product, row0: Any, more: Any) -> None:
        """c = W_1ᵀ δ_1 + Σ S_lᵀ δ_l, zero where reset: dh0 and, where there is a step before, its δ_L."""
        plan, e, b = self.plan, self.e, self.b
        H, total = plan.sizes[-1], sum(plan.sizes)

        def tile(row: Any, rows: int, vector: Any, width: int, ragged: int | None) -> None:
            column = b.mul(vector, e.index(plan.lanes))
            lines = [self._line(row0, row, r) for r in range(rows)]
            results = [e.zero()] * (rows * width)
            weights = self.packed(product, vector)
            for _, layer, depth in product.terms:
                sources = [e.at(e.at(self.dA, line, total), plan.offsets[layer]) for line in lines]
                results = e.multiply(results, sources, weights, depth, width)
                weights = e.at(weights, depth * width * plan.lanes)
            ends = [e.at(e.at(self.dh0, b.add(row, e.index(r)), H), column) for r in range(rows)]
            spots = self.columns(width, ragged)
            self.put(results, ends, spots)

            def finish(r: Any, end: Any) -> None:
                line = b.add(lines[0], r)
                values = [e.load(e.at(end, offset), mask) for offset, mask in spots]
                if plan.reset:
                    mark = b.load(b.gep(self.reset, [line], source_etype=I8), typ=I8)
                    cut = b.icmp_unsigned("!=", mark, ir.Constant(I8, 0))
                    values = [b.select(cut, e.zero(), value) for value in values]
                    for value, (offset, mask) in zip(values, spots, strict=True):
                        e.store(value, e.at(end, offset), mask)
                with b.if_then(more):
                    self._top(b.sub(line, self.batch), column, values, width, ragged)

            self.each_row(rows, ends[0], H, finish)

        self.each_tile(product.panels, tile)
