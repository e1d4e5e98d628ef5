"""A layer's product and unit in one kernel: as many kernels a step as ⊕ has layers, in each direction.

For small batches a library's product costs its launch and more; here blocks of 32 columns share the inner
dimension among their warps in fp32 and apply the unit to the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deeprnn.backends.cuda import unit_kernels
from deeprnn.backends.cuda.unit_kernels import COLUMNS, Product, padded
from deeprnn.backends.stepwise.loop import Given, Layout, States, first, matrices, product

ROWS = 32
"""the largest batch: beyond, a library's product reads the matrices less often"""


def serves(layout: Layout, batch: int) -> bool:
    """Whether the batch is small, one group of layers sees the state, and a pool lies within a tile."""
    return len(layout.runs) == 1 and batch <= ROWS and all(COLUMNS % u.pool == 0 for u in layout.units)


def forward(
    layout: Layout, states: States, h0: Tensor, W: Sequence[Tensor], S: Sequence[Tensor], given: Given
) -> None:
    """As `steps_loop.forward`."""
    states.before.select(-3, 0).copy_(first(h0, given.state_mask, given.reset))
    (whole,), (run,), own = matrices(layout, W, S), layout.runs, layout.widths[0]
    parts = whole.mT.split([own, whole.shape[-2] - own], -1) if len(run) > 1 else (whole.mT,)
    rest = layout.columns(states.slope, 1, run[-1]) if len(run) > 1 else None
    products = [Product(states.before, padded(*parts), own, rest)]
    for l in range(1, len(W)):
        products.append(Product(layout.place(states.z, l - 1), padded(W[l].mT), layout.widths[l]))
    calls = []
    for l, front in enumerate(products):
        tensors = unit_kernels.forward_tensors(layout, l, states, given)
        calls.append(unit_kernels.prepare("forward", layout, l, tensors, states.h, given.keep, front))
    for t in range(states.h.shape[-3]):
        for call in calls:
            call(t)


def backward(
    layout: Layout, slope: Tensor, dA: Tensor, G: Sequence[Tensor], carry: Tensor, W: Sequence[Tensor],
    S: Sequence[Tensor], state_mask: Tensor | None, reset: Tensor | None, inner: bool,
) -> None:  # fmt: skip
    """As `steps_loop.backward`: fills dA, completes G where exponents need it, and leaves the last carry."""
    (whole,), (run,), last = matrices(layout, W, S), layout.runs, layout.last
    delta = layout.columns(dA, run[0], run[-1])
    fronts = [
        Product(layout.columns(dA, l + 1), padded(W[l + 1]), layout.sizes[l], outside=inner)
        for l in range(last)
    ]
    fronts.append(Product(delta, padded(whole), layout.sizes[last], ahead=1, outside=True))
    tensors = [
        unit_kernels.backward_tensors(layout, l, slope, dA, G, carry, state_mask, reset)
        for l in range(last + 1)
    ]
    calls = [
        unit_kernels.prepare("backward", layout, l, tensors[l], G[-1], product=fronts[l])
        for l in range(last, -1, -1)
    ]
    steps = dA.shape[-3]
    unit_kernels.prepare("backward", layout, last, tensors[last], G[-1])(steps - 1)  # nothing comes back yet
    for call in calls[1:]:
        call(steps - 1)
    for t in range(steps - 2, -1, -1):
        for call in calls:
            call(t)
    product(dA)(carry, delta.select(-3, 0), whole, beta=0)
