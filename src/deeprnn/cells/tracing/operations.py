"""What torch's operations do to rows and elements: move them, fill them with a constant, treat rows one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _words("""
    view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select split
    split_with_sizes unsafe_split unsafe_split_with_sizes unsafe_chunk chunk unbind cat stack flip
    roll clone contiguous alias lift_fresh copy slice_scatter select_scatter narrow repeat
    constant_pad_nd unflatten flatten movedim
""")
"""operations whose results are elements of their arguments"""
TAKE_SIZES = MOVES | {"native_group_norm"}
"""those that may be told the batch size"""
SAME = _words("""
    clone alias lift_fresh contiguous
""")
"""those that leave every element where it is"""

FILLS: dict[str, Callable[..., Any]] = {
    "zeros": lambda *a, **k: 0.0,
    "zeros_like": lambda *a, **k: 0.0,
    "new_zeros": lambda *a, **k: 0.0,
    "empty": lambda *a, **k: 0.0,
    "empty_like": lambda *a, **k: 0.0,
    "new_empty": lambda *a, **k: 0.0,
    "empty_strided": lambda *a, **k: 0.0,
    "new_empty_strided": lambda *a, **k: 0.0,
    "ones": lambda *a, **k: 1.0,
    "ones_like": lambda *a, **k: 1.0,
    "new_ones": lambda *a, **k: 1.0,
    "full": lambda size, value, **k: value,
    "full_like": lambda x, value, **k: value,
    "new_full": lambda x, size, value, **k: value,
    "fill": lambda x, value: value,
    "scalar_tensor": lambda value, **k: value,
}
"""the value that an operation fills a tensor with"""

ROW_WISE = _words("""
    mm addmm bmm baddbmm linear embedding native_layer_norm native_group_norm convolution _softmax
    _log_softmax sum mean var std amax amin max min logsumexp cumsum cumprod argmax argmin topk sort
    prod any all norm linalg_vector_norm index_select gather max_pool2d_with_indices avg_pool2d
    _adaptive_avg_pool2d glu _native_batch_norm_legit_no_training
""")
"""operations that can treat every row of a batch by itself; `treats_rows_apart` looks at their dimensions"""
WHOLE = _words("""
    embedding native_layer_norm native_group_norm convolution max_pool2d_with_indices avg_pool2d
    _adaptive_avg_pool2d _native_batch_norm_legit_no_training linear
""")
"""operations whose first dimension is the batch by definition"""


def name_of(node: fx.Node) -> str:
    """The operation's name, such as "addmm"."""
    if node.op != "call_function":
        return node.name
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else getattr(node.target, "__name__", "")


def treats_rows_apart(node: fx.Node, names: dict[fx.Node, Tensor], rows: int) -> bool:
    """Whether a row-wise operation keeps the rows of a batch apart; `names` are of its arguments that have rows."""
    name = name_of(node)
    batch = {a: batch_dimension(x, rows) for a, x in names.items()}
    if None in batch.values():
        return False
    tensors = [a for a in node.args if isinstance(a, fx.Node)]
    if name in ("mm", "addmm"):
        first, second = tensors[-2:]
        places = (batch.get(first), batch.get(second))
        return places in ((0, None), (None, 1)) and batch.get(tensors[0], 0) == 0
    if name in ("bmm", "baddbmm"):
        first, second = tensors[-2:]
        return (batch.get(first), batch.get(second)) in ((1, None), (None, 2), (0, None), (None, 0), (0, 0))
    if any(d != 0 for d in batch.values()):
        return False
    if name in WHOLE:
        return True
    ndim = len(next(iter(names.values())).shape)
    return all(d % ndim != 0 for d in _dimensions(node))


def _dimensions(node: fx.Node) -> Sequence[int]:
    """The dimensions that a reduction goes over; 0 stands for all."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    if "dim" not in given and not any(a.name == "dim" for a in schema.arguments):
        return (0,)
    dim: Any = given.get("dim", next(a.default_value for a in schema.arguments if a.name == "dim"))
    if dim is None:
        return (0,)
    return tuple(dim) or (0,) if isinstance(dim, (list, tuple)) else (dim,)


def batch_dimension(names: Tensor, rows: int) -> int | None:
    """The dimension along which row b of a batch follows row b - 1, None where there is none."""
    row = names % rows
    for d, size in enumerate(names.shape):
        if size == rows - 1:
            shape = [1] * names.dim()
            shape[d] = size
            expected = torch.arange(1, rows).view(shape)
            if bool(((row == 0) | (row == expected)).all()):
                return d
    return None
