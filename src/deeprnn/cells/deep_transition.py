"""The paper's ⊕ as a cell: a transition MLP of any depth, with shortcuts, pooled units and dropout masks.

v(t) = mask h(t-1),    z_l = mask_l φ_l(A_l[t] + W_l z_{l-1} + S_l v(t)),    z_0 = v(t),    h(t) = z_L
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from deeprnn.cells.description import CellDescription, Output, Preactivation, Product, Rows, Stage, Vector
from deeprnn.cells.expressions import Expression, apply, leaf
from deeprnn.cells.functions import FUNCTIONS, UNITS
from deeprnn.errors import UserError

POOLED = ("maxout", "lp")


@dataclass(frozen=True)
class DeepTransition:
    """What decides the cell of a ⊕."""

    sizes: tuple[int, ...]
    """outputs of each layer, the last being the state's"""
    units: tuple[str, ...]
    """φ of each layer: a function of the table, or "maxout", "lp" """
    shortcuts: tuple[bool, ...]
    """which layers see h(t-1) directly; the first does so through W_1"""
    pools: tuple[int, ...] = ()
    """linear maps that feed one unit, layer by layer; none: one everywhere"""
    masks: tuple[bool, ...] = ()
    """whether a layer's output is multiplied by a mask; none: nowhere"""
    state_mask: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", self.pools or (1,) * self.depth)
        object.__setattr__(self, "masks", self.masks or (False,) * self.depth)
        for unit, pool in zip(self.units, self.pools, strict=True):
            if unit in POOLED:
                continue
            if not _of_one_number(unit):
                raise UserError(f"unknown unit {unit!r}: known are {', '.join((*UNITS, *POOLED))}")
            if pool != 1:
                raise UserError(f"unit {unit!r} does not pool {pool} linear maps: {' and '.join(POOLED)} do")

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.sizes)

    @property
    def hidden_size(self) -> int:
        """H, the width of the state."""
        return self.sizes[-1]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns of A of each layer."""
        return tuple(n * pool for n, pool in zip(self.sizes, self.pools, strict=True))

    @property
    def total(self) -> int:
        """Width of A: all layers side by side."""
        return sum(self.widths)

    @property
    def is_plain(self) -> bool:
        """Whether units are functions of one number and nothing is masked."""
        return not (self.state_mask or any(self.masks) or any(u in POOLED for u in self.units))

    @cached_property
    def cell(self) -> CellDescription:
        """The description. Matrices: every W, every S; vectors: exponents; masks: the state's mask, the layers'."""
        return _describe(self)


@lru_cache(maxsize=1024)
def _describe(plus: DeepTransition) -> CellDescription:
    H, stages = plus.hidden_size, []
    state = Vector("state", 0)
    if plus.state_mask:
        stages.append(Stage(H, (), (leaf("mask", 0) * leaf("state", 0),)))
        state = Vector("output", 0, 0)
    shortcut_places = {l: plus.depth + n for n, l in enumerate(l for l, s in enumerate(plus.shortcuts) if s)}
    masks = [H] * plus.state_mask
    vectors: list[int] = []
    starts = list(accumulate(plus.widths, initial=0))
    below = state
    for l, (size, pool) in enumerate(zip(plus.sizes, plus.pools, strict=True)):
        pre = []
        for i in range(pool):
            rows = Rows(i, pool)
            products = [Product(l, below, rows)]
            if plus.shortcuts[l]:
                products.append(Product(shortcut_places[l], state, rows))
            pre.append(Preactivation(tuple(products), Rows(starts[l] + i, pool)))
        out = _unit(plus.units[l], pool, len(vectors))
        if plus.units[l] == "lp":
            vectors.append(size)
        if plus.masks[l]:
            out = out * leaf("mask", len(masks))
            masks.append(size)
        stages.append(Stage(size, tuple(pre), (out,)))
        below = Vector("output", 0, len(stages) - 1)
    shapes = [(w, b) for w, b in zip(plus.widths, (H, *plus.sizes[:-1]), strict=True)]
    shapes += [(plus.widths[l], H) for l in shortcut_places]
    return CellDescription(
        states=(H,),
        stages=tuple(stages),
        new_states=(Output(len(stages) - 1, 0),),
        matrices=tuple(shapes),
        entry_width=plus.total,
        vectors=tuple(vectors),
        masks=tuple(masks),
    )


def _of_one_number(function: str) -> bool:
    return function in FUNCTIONS and FUNCTIONS[function].arity == 1


def _unit(name: str, pool: int, vector: int) -> Expression:
    pre = [leaf("preactivation", i) for i in range(pool)]
    if name == "maxout":
        return apply("maximum", *pre)
    if name == "lp":
        return apply("lp", leaf("vector", vector), *pre)
    return pre[0] if name == "identity" else apply(name, pre[0])


@lru_cache(maxsize=1024)
def recognise(cell: CellDescription) -> DeepTransition | None:
    """The ⊕ whose cell this is, None for any other cell."""
    state_mask = bool(cell.stages) and not cell.stages[0].preactivations
    layers = cell.stages[1:] if state_mask else cell.stages
    if not layers or len(cell.states) != 1:
        return None
    sizes, units, pools, masks, shortcuts = [], [], [], [], []
    for stage in layers:
        if len(stage.outputs) != 1 or not stage.preactivations:
            return None
        out = stage.outputs[0]
        masked = out.op == "multiply" and out.args[1].op == "mask"
        phi = out.args[0] if masked else out
        name = {"preactivation": "identity", "maximum": "maxout"}.get(phi.op, phi.op)
        if name not in POOLED and (not _of_one_number(name) or len(stage.preactivations) != 1):
            return None
        sizes.append(stage.size)
        units.append(name)
        pools.append(len(stage.preactivations))
        masks.append(masked)
        shortcuts.append(len(stage.preactivations[0].products) == 2)
    plus = DeepTransition(
        tuple(sizes), tuple(units), tuple(shortcuts), tuple(pools), tuple(masks), state_mask
    )
    return plus if plus.cell == cell else None
