"""Weight noise and dropout masks: fresh for every gradient, from (member's seed, purpose, update) alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.model.sequence_model import SequenceModel
from deeprnn.training import rng


class Noise:
    """Gaussian noise of a member's standard deviation on every weight matrix (Graves 2011), one flat draw a member."""

    def __init__(
        self, stds: Sequence[float], seeds: Sequence[int], matrices: int, device: torch.device
    ) -> None:
        self.stds, self.matrices = list(stds), matrices
        self.any = any(self.stds)
        self.scales = torch.tensor(self.stds, dtype=torch.float32, device=device)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.members = [int(s) for s in seeds]
        self.generator = torch.Generator()
        self.draw = torch.empty(matrices if self.any and device.type == "cpu" else 0)

    def add(self, parameters: Tensor, noisy: Tensor, rows: slice, update: Tensor) -> None:
        """noisy = parameters + noise for members `rows`; nothing where there is no noise."""
        if not self.any:
            return
        M = self.matrices
        if parameters.device.type == "cpu":
            for p, (seed, std) in enumerate(zip(self.members[rows], self.stds[rows], strict=True)):
                self.generator.manual_seed(rng.mix(seed, rng.NOISE, int(update)))
                self.draw.normal_(generator=self.generator)
                torch.add(parameters[p, :M], self.draw, alpha=std, out=noisy[p, :M])
                noisy[p, M:].copy_(parameters[p, M:])
            return
        # Imported here: the kernels need an NVIDIA driver.
        from deeprnn.training import fused

        fused.add_noise(parameters, self.scales[rows], self.seeds[rows], update, noisy, count=M)


def dropout_masks(
    model: SequenceModel, T: int, B: int, seeds: Tensor, update: Tensor, lanes_here: slice = slice(None)
) -> dict[str, Tensor] | None:
    """Masks (p, ...) of the members with these seeds, and what their cells draw, stacked; None where there is none.

    They are drawn for all B lanes, of which the `own` are given: they do not depend on who trains which lanes.
    """
    if not model.training:  # dynamic evaluation learns without dropout
        return None
    if not model.mask_shapes(T, B) and not model.draw_shapes(T, B):
        return None
    if seeds.device.type == "cpu":
        drawn = [
            model.draw_masks(T, B, rng.generator(int(s), rng.DROPOUT, int(update))) for s in seeds.tolist()
        ]
        masks = {name: torch.stack([m[name] for m in drawn]) for name in drawn[0]}
    else:
        masks = _hashed_masks(model, T, B, seeds, update)
    return masks if lanes_here in (slice(None), slice(0, B)) else _of_lanes(model, T, B, masks, lanes_here)


def _of_lanes(
    model: SequenceModel, T: int, B: int, masks: dict[str, Tensor], lanes_here: slice
) -> dict[str, Tensor]:
    """Masks cut down to some of the lanes, the dimension that grows with B; a mask without lanes stays as it is."""

    def shapes(lanes: int) -> dict[str, tuple[int, ...]]:
        shapes = {**model.mask_shapes(T, lanes), **model.draw_shapes(T, lanes)}
        return {name: shape for name, (_, shape) in shapes.items()}

    out, larger = {}, shapes(B + 1)
    count = lanes_here.stop - lanes_here.start
    for name, shape in shapes(B).items():
        lanes = [i for i, (n, m) in enumerate(zip(shape, larger[name], strict=True), 1) if n != m]
        out[name] = masks[name].narrow(lanes[0], lanes_here.start, count) if lanes else masks[name]
    return out


def _hashed_masks(model: SequenceModel, T: int, B: int, seeds: Tensor, update: Tensor) -> dict[str, Tensor]:
    """Dropout masks by hashing on the device, all in one draw."""
    masks, draws = model.mask_shapes(T, B), model.draw_shapes(T, B)
    shapes = [shape for _, shape in masks.values()]
    shapes += [(2, *shape) if kind == "normal" else shape for kind, shape in draws.values()]
    sizes = [math.prod(shape) for shape in shapes]
    uniform = rng.hashed_uniform(seeds, rng.DROPOUT, update, sum(sizes)).split(sizes, 1)
    dtype = next(model.predict.parameters()).dtype
    parts = [u.view(len(seeds), *shape) for u, shape in zip(uniform, shapes, strict=True)]
    scaled = {
        name: (part >= p).to(dtype) / (1 - p)
        for (name, (p, _)), part in zip(masks.items(), parts, strict=False)
    }
    for (name, (kind, _)), part in zip(draws.items(), parts[len(masks) :], strict=True):
        scaled[name] = (part if kind == "uniform" else _normal(part[:, 0], part[:, 1])).to(dtype)
    return scaled


def _normal(u: Tensor, angle: Tensor) -> Tensor:
    """Normal numbers from two uniform ones in [0, 1): Box and Muller."""
    return torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * math.pi * angle)
