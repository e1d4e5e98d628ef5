"""The benchmarked ⊕ as a jitted `jax.lax.scan`, on JAX's default device."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeprnn.bench.peers import JAX, Bench, Peer, Results

if TYPE_CHECKING:
    from collections.abc import Callable


def jax_peer(bench: Bench) -> Peer:
    """The peer; true fp32, timed by the host's clock around `block_until_ready`."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the card is shared with torch
    import jax

    parameters = {name: _as_jax(p) for name, p in bench.model.named_parameters()}
    x, g = _as_jax(bench.x), _as_jax(bench.g)
    forward, train = _jitted(bench.work.depth, bench.work.hidden)

    def timed(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        def call() -> Any:
            with jax.default_matmul_precision("highest"):
                return jax.block_until_ready(function(parameters, *arguments))

        return call

    states, gradients = timed(forward, x), timed(train, x, g)

    def results() -> Results:
        by_name = gradients()
        return _as_torch(states()), [_as_torch(by_name[name]) for name in parameters]

    weights: list[Tensor] = list(bench.model.parameters())
    return Peer(JAX, states, weights, bench.truth, states, gradients, results, by_host=True)


@lru_cache(maxsize=16)
def _jitted(depth: int, hidden: int) -> tuple[Any, Any]:
    """All states, and the gradient of their product with g by the parameters."""
    import jax
    import jax.numpy as jnp

    def states(p: dict[str, Any], x: Any) -> Any:
        entered = [x @ p[f"U.{l}.weight"].T + p[f"U.{l}.bias"] for l in range(depth)]

        def step(h: Any, a: Any) -> tuple[Any, Any]:
            z = jax.nn.sigmoid(h @ p["W.0.weight"].T + a[0])
            for l in range(1, depth):
                z = jax.nn.sigmoid(z @ p[f"W.{l}.weight"].T + h @ p[f"S.{l - 1}.weight"].T + a[l])
            return z, z

        return jax.lax.scan(step, jnp.zeros((x.shape[1], hidden)), entered)[1]

    return jax.jit(states), jax.jit(jax.grad(lambda p, x, g: (states(p, x) * g).sum()))


def _as_jax(x: Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(x.detach().cpu().numpy())


def _as_torch(x: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(x))
