"""Packing: weights copied once a call into the panels a program reads."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from deeprnn.backends.cpu.jit.emit import I64, POINTER, Emitter
from deeprnn.backends.cpu.jit.programs import new_module, new_name


class Packing:
    """Copies one matrix into panels: product, panel, k, column; columns past the end become zero.

    `transposed` reads (columns, k), the layout of stored weights, else (k, columns).
    """

    ARGUMENTS = 2, 8

    def __init__(self, number: Any, lanes: int, transposed: bool):
        module = new_module()
        self.name = new_name("pack")
        kinds = [POINTER] * 2 + [I64] * 8
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), self.name)
        self.e, self.transposed = Emitter(function, number, lanes), transposed
        source, target, columns, count, width, wide, depth, above, below, stride = function.args
        e, b = self.e, self.e.b
        whole = b.mul(b.udiv(depth, e.index(lanes)), e.index(lanes))
        rows_in_panel = b.add(b.add(above, depth), below)

        def panel(p: Any) -> tuple[()]:
            early = b.icmp_signed("<", p, wide)
            vectors = b.add(width, b.zext(early, I64))
            start = b.add(b.mul(p, width), b.select(early, p, wide))
            row = b.mul(vectors, e.index(lanes))
            base = b.add(b.mul(b.mul(start, rows_in_panel), e.index(lanes)), b.mul(above, row))

            def vector(v: Any) -> tuple[()]:
                column = b.mul(b.add(start, v), e.index(lanes))
                out = e.at(target, b.add(base, b.mul(v, e.index(lanes))))
                self._vector(source, out, column, columns, row, depth, whole, stride)
                return ()

            e.loop(0, vectors, vector)
            return ()

        e.loop(0, count, panel)
        b.ret_void()
        self.text = str(module)

    def _vector(self, source, out, column, columns, row, depth, whole, stride) -> None:
        e, b = self.e, self.e.b
        if not self.transposed:
            mask = e.lanes_below(b.sub(columns, column))

            def copy(k: Any) -> tuple[()]:
                e.store(e.load(e.at(source, b.add(b.mul(k, stride), column)), mask), e.at(out, b.mul(k, row)))
                return ()

            e.loop(0, depth, copy)
            return

        def lines(k: Any, mask: Any) -> list[Any]:
            loaded = []
            for i in range(e.lanes):
                at = b.add(column, e.index(i))
                inside = b.icmp_signed("<", at, columns)
                line = e.at(source, b.add(b.mul(b.select(inside, at, e.index(0)), stride), k))
                loaded.append(b.select(inside, e.load(line, mask), e.zero()))
            return e.transpose(loaded)

        def block(k: Any) -> tuple[()]:
            for i, value in enumerate(lines(k, None)):
                e.store(value, e.at(out, b.mul(b.add(k, e.index(i)), row)))
            return ()

        e.loop(0, whole, block, step=e.lanes)
        for i, value in enumerate(lines(whole, e.lanes_below(b.sub(depth, whole)))):
            k = b.add(whole, e.index(i))
            with b.if_then(b.icmp_signed("<", k, depth)):
                e.store(value, e.at(out, b.mul(k, row)))
