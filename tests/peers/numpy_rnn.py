"""The paper's models as one slow float64 loop in NumPy, written from its equations and sharing no code.

One sequence at a time, one vector at a time: h_t from x_t and h_{t-1} (Sec. 3.3), y_t from h_t. Which
layers see the input, the shortcut or the model's own input is read off the names of the weights.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

Weights = dict[str, ndarray]


def phi(name: str, a: ndarray, weights: Weights, owner: str, suffix: str) -> ndarray:
    """The unit `name` on pre-activations `a`; Lp reads its order and centres from the weights."""
    kind, _, pool = name.partition(":")
    if kind == "sigmoid":
        return 1.0 / (1.0 + np.exp(-a))
    if kind == "tanh":
        return np.tanh(a)
    if kind == "relu":
        return np.where(a > 0, a, 0.0)
    if kind == "identity":
        return a
    groups = int(pool)
    if kind == "maxout":
        return np.array([max(a[j : j + groups]) for j in range(0, len(a), groups)])
    assert kind == "lp"
    centres, orders = weights[f"{owner}c{suffix}"], 1.0 + np.log1p(np.exp(weights[f"{owner}rho{suffix}"]))
    out = []
    for unit, p in enumerate(orders):
        own = slice(unit * groups, (unit + 1) * groups)
        out.append(np.mean(np.abs(a[own] - centres[own]) ** p) ** (1.0 / p))
    return np.array(out)


def times(matrix: ndarray, v: ndarray | int, symbol: bool) -> ndarray:
    """Matrix times vector, or the row that stands for a symbol."""
    return matrix[v] if symbol else matrix @ v


def plus(
    weights: Weights,
    owner: str,
    units: list[str],
    input_units: list[str],
    x: ndarray | int,
    h: ndarray,
    symbol: bool = False,
    skip: ndarray | int | None = None,
    skip_symbol: bool = False,
) -> ndarray:
    """h' = x ⊕ h, after the deep input-to-hidden MLP where there is one."""
    for i, unit in enumerate(input_units, 1):
        a = times(weights[f"{owner}E{i}"], x, symbol)
        a = a + weights.get(f"{owner}e{i}", 0.0)
        x, symbol = phi(unit, a, weights, owner, f"_e{i}"), False
    z = h
    for n, unit in enumerate(units, 1):
        a = weights[f"{owner}W{n}"] @ z
        if f"{owner}U{n}" in weights:
            a = a + times(weights[f"{owner}U{n}"], x, symbol)
        if f"{owner}K{n}" in weights:
            assert skip is not None
            a = a + times(weights[f"{owner}K{n}"], skip, skip_symbol)
        if f"{owner}S{n}" in weights:
            a = a + weights[f"{owner}S{n}"] @ h
        a = a + weights.get(f"{owner}b{n}", 0.0)
        z = phi(unit, a, weights, owner, f"{n}")
    return z


def predict(weights: Weights, owner: str, units: list[str], h: ndarray) -> ndarray:
    """▷ h: the logits."""
    y = h
    for n, unit in enumerate(units, 1):
        y = phi(unit, weights[f"{owner}V{n}"] @ y + weights.get(f"{owner}b{n}", 0.0), weights, owner, f"{n}")
    last = len(units) + 1
    y = weights[f"{owner}V{last}"] @ y + weights.get(f"{owner}b{last}", 0.0)
    return y + weights[f"{owner}K"] @ h if f"{owner}K" in weights else y


def run(
    weights: Weights,
    x: ndarray,
    *,
    units: list[list[str]],
    output_units: list[str] = (),  # type: ignore[assignment]
    input_units: list[str] = (),  # type: ignore[assignment]
    symbols: bool = False,
    all_states_out: bool = False,
    reset: ndarray | None = None,
    state: list[ndarray] | None = None,
) -> tuple[ndarray, list[ndarray]]:
    """Logits (T, B, O) and each level's last state (B, H); `units` has one list per level."""
    T, B = x.shape[:2]
    hidden = [weights[f"levels.{k}.W1"].shape[1] for k in range(len(units))]
    logits = [[np.empty(0)] * B for _ in range(T)]
    final = [np.zeros((B, H)) for H in hidden]
    for b in range(B):
        h = [np.zeros(H) if state is None else state[k][b] for k, H in enumerate(hidden)]
        for t in range(T):
            if reset is not None and reset[t, b]:
                h = [np.zeros(H) for H in hidden]
            frame = int(x[t, b]) if symbols else x[t, b].astype(float)
            below, symbol = frame, symbols
            for k, names in enumerate(units):
                first = input_units if k == 0 else []
                h[k] = plus(weights, f"levels.{k}.", names, first, below, h[k], symbol, frame, symbols)
                below, symbol = h[k], False
            seen = np.concatenate(h) if all_states_out else h[-1]
            logits[t][b] = predict(weights, "predict.", output_units, seen)
        for k in range(len(units)):
            final[k][b] = h[k]
    return np.array(logits), final
