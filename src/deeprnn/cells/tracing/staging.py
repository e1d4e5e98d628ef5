"""Stages made from expressions: what is multiplied by what, in which order, and which values go from stage to stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from deeprnn.cells.expressions import Expression, in_order, leaf, replace, replace_all
from deeprnn.cells.tracing.algebra import SUMS, SignedTerm, flattened, mixed, plain, rewritten, summed, uses
from deeprnn.cells.tracing.blocks import MatrixVector, State
from deeprnn.cells.tracing.cuts import minimal_cut
from deeprnn.cells.tracing.pulling import StepExpressions
from deeprnn.cells.tracing.recording import Undescribable

Signed = tuple[int, int]  # a sign and the number of a piece
MOST_STAGES = 100
"""a step of more products one after the other is unrolled by the plain loop: no kernel gains on that many"""


class PreactivationSum(NamedTuple):
    """What a pre-activation adds up: pieces of products, of what comes from x, of parameters."""

    products: tuple[Signed, ...]
    rows: tuple[Signed, ...] = ()
    fixed: tuple[Signed, ...] = ()


class StageKey(NamedTuple):
    """Units that are computed together: which level of products they need, and how many there are."""

    level: int
    size: int


@dataclass
class StageAssignment:
    """Assigns every expression that must exist as a stage's output to a stage: a level of products, and a size.

    The expressions are over `sum`, `state`, `fixed` and `drawn` leaves.
    """

    expressions: StepExpressions
    sums: list[PreactivationSum] = field(default_factory=list)
    states: list[Expression] = field(default_factory=list)
    vectors: dict[tuple[MatrixVector, int], Expression] = field(default_factory=dict)
    stages: dict[StageKey, list[Expression]] = field(default_factory=dict)
    stage_of: dict[Expression, StageKey] = field(default_factory=dict)
    _levels: dict[Expression, int] = field(default_factory=dict)

    def arrange(self) -> None:
        """Rewrite, assign every root to a stage, and let whatever later stages need of earlier ones be a root there."""
        raw = [*self.expressions.states, *self.expressions.vectors.values()]
        simple = rewritten(raw, lambda e: mixed(plain(e)))
        self._count = uses([simple[e] for e in raw])
        self._folded: dict[Expression, Expression] = {}
        final = {e: self._fold_sums(simple[e]) for e in raw}
        again = rewritten(list(final.values()), mixed)
        self.states = [again[final[e]] for e in self.expressions.states]
        self.vectors = {k: again[final[e]] for k, e in self.expressions.vectors.items()}
        for state_part, e in zip(self.expressions.columns.state_parts, self.states, strict=True):
            self._assign(e, state_part.width)
        for (block, i), e in self.vectors.items():
            if e.op != "state":
                self._assign(e, len(block.parts[i].index))
        for level in range(max(stage.level for stage in self.stages), 1, -1):
            for stage in [s for s in self.stages if s.level == level]:
                self._reuse_earlier_stages(stage)

    # ---- sums

    def _fold_sums(self, e: Expression) -> Expression:
        """The expression with what a pre-activation can add up as `sum` leaves."""
        known = self._folded
        waiting = [(e, *self._split_sum(e))]  # a list, for Python's own stack is soon full
        while waiting:
            node, summands, rest = waiting[-1]
            unknown = [t.term for t in rest if t.term not in known]
            if unknown:
                waiting += [(inner, *self._split_sum(inner)) for inner in reversed(unknown)]
                continue
            waiting.pop()
            terms = [SignedTerm(t.sign, known[t.term]) for t in rest]
            if node in known:
                continue
            if summands:
                known[node] = summed([SignedTerm(1, self._sum(summands)), *terms])
            else:
                known[node] = Expression(node.op, tuple(t.term for t in terms), node.value) if terms else node
        return known[e]

    def _split_sum(self, e: Expression) -> tuple[list[SignedTerm], list[SignedTerm]]:
        """What of an expression one pre-activation adds up, and its other terms; or nothing, and its arguments."""
        if e.op in ("product", "row"):
            return [SignedTerm(1, e)], []
        if e.op in SUMS:
            terms = flattened(e, lambda inner: self._count[inner] == 1)
            summands = [t for t in terms if t.term.op in ("product", "row") and self._count[t.term] == 1]
            if any(t.term.op == "row" for t in summands):
                summands += [t for t in terms if t.term.op == "fixed"]
            if len(summands) > 1 or (summands and summands[0].sign < 0):
                return summands, [t for t in terms if t not in summands]
        return [], [SignedTerm(1, a) for a in e.args]

    def _sum(self, terms: list[SignedTerm]) -> Expression:
        pieces = {
            kind: tuple((t.sign, t.term.value[0]) for t in terms if t.term.op == kind)  # type: ignore[index]
            for kind in ("product", "row", "fixed")
        }
        found = PreactivationSum(pieces["product"], pieces["row"], pieces["fixed"])
        if found not in self.sums:
            self.sums.append(found)
        return leaf("sum", self.sums.index(found))

    # ---- levels

    def level(self, e: Expression) -> int:
        """How many stages of products lie below an expression, its own included."""
        waiting = [e]  # a list, for Python's own stack is soon full
        while waiting:
            if waiting[-1] in self._levels:
                waiting.pop()
                continue
            sums = [self.sums[n.value[0]] for n in in_order([waiting[-1]]) if n.op == "sum"]  # type: ignore[index]
            read = [v for s in sums for _, piece in s.products for v in self._vectors_of(piece)]
            if unknown := [v for v in read if v not in self._levels]:
                waiting += unknown
                continue
            level = max((self.sum_level(s) for s in sums), default=0)
            if level > MOST_STAGES:
                raise Undescribable(f"more than {MOST_STAGES} matrix products follow each other in a step")
            self._levels[waiting.pop()] = level
        return self._levels[e]

    def sum_level(self, s: PreactivationSum) -> int:
        """The stage at which all vectors of a sum are there; 0 for what needs none."""
        return max((self._product_level(piece) for _, piece in s.products), default=0)

    def _vectors_of(self, piece: int) -> list[Expression]:
        """What a product multiplies besides states of the step before."""
        block = self.expressions.pieces[piece][0]
        assert isinstance(block, MatrixVector)
        read = [i for i, part in enumerate(block.parts) if not isinstance(part.block, State)]
        return [e for i in read if (e := self.vectors[block, i]).op != "state"]

    def _product_level(self, piece: int) -> int:
        return 1 + max((max(1, self.level(e)) for e in self._vectors_of(piece)), default=0)

    def _assign(self, e: Expression, size: int) -> None:
        stage = StageKey(max(1, self.level(e)), size)
        if e not in self.stage_of:
            self.stage_of[e] = stage
            self.stages.setdefault(stage, []).append(e)

    # ---- from stage to stage

    def _reuse_earlier_stages(self, stage: StageKey) -> None:
        """Make the fewest values that this stage needs outputs of earlier ones, where there are such stages.

        A stage made for them alone would give no product, which a persistent kernel has no place for: the gates of an
        LSTM whose candidate is the end of a deep transition are sums of the candidate's stage.
        """
        ready = {
            e: leaf("ready", k) for k, (e, key) in enumerate(self.stage_of.items()) if key.level < stage.level
        }
        back = {new: e for e, new in ready.items()}
        roots = replace_all(self.stages[stage], ready)

        def earlier(e: Expression) -> bool:
            return e.op == "sum" and 0 < self.sum_level(self.sums[e.value[0]]) < stage.level  # type: ignore[index]

        apart = self._levels_given_ready(roots)
        for e in minimal_cut(roots, earlier, lambda e: apart[e] < stage.level):
            value = replace(e, back)
            if StageKey(max(1, self.level(value)), stage.size) in self.stages:
                self._assign(value, stage.size)

    def _levels_given_ready(self, roots: Sequence[Expression]) -> dict[Expression, int]:
        """The level of every part, where what is ready counts for nothing."""
        levels: dict[Expression, int] = {}
        for e in in_order(roots):
            sum_level = self.sum_level(self.sums[e.value[0]]) if e.op == "sum" else 0  # type: ignore[index]
            levels[e] = max((levels[a] for a in e.args), default=sum_level)
        return levels

    @cached_property
    def order(self) -> list[StageKey]:
        """The stages, one after the other."""
        return sorted(self.stages, key=lambda stage: stage.level)
