"""One update of P models: batch, noise, forward, loss, backward, clip, step, carry.

`Updater.update` is tensor code without a host synchronisation, so on a GPU it is captured as one CUDA graph
for each chunk length (`cuda_graph.py`). Members are served in groups: on the CPU each alone, by the very
calls that serve a single model, which costs about a sixth more than `torch.func.vmap` over four members but
makes a member bit-equal to that model, and a finished one free; on a GPU all together under `vmap`.

Of several processes (`ranks.py`) each has some of the lanes. One sum over all of them, of gradient, nats and count side
by side, lies between backward and clip: from there on every process does what one with all lanes would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from deeprnn.backends.cuda.device import nvidia
from deeprnn.data.batching import Batch
from deeprnn.model import losses, scoring
from deeprnn.model.overrides import changed
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.training import noise
from deeprnn.training.commutative import commutativity, levels_with_two_orders
from deeprnn.training.dropconnect import DropConnect
from deeprnn.training.flat import Layout
from deeprnn.training.fused import SUMS, account
from deeprnn.training.optimiser import Optimiser, clip_scale, thresholds
from deeprnn.training.ranks import Ranks
from deeprnn.training.recipe import Recipe
from deeprnn.training.schedule import Schedule

State = tuple[Tensor, ...]
LARGE = 2000
"""outputs from which the softmax is taken in pieces"""


class Scored(nn.Module):
    """A model with its loss: what is differentiated."""

    def __init__(self, model: SequenceModel, commutative: float = 0.0) -> None:
        super().__init__()
        self.model, self.commutative = model, commutative
        if commutative:
            levels_with_two_orders(model.spec)  # refused now, where there is none

    def forward(self, batch: Batch, state: State, masks: dict[str, Tensor] | None) -> tuple[Tensor, State]:
        """Sum of nats over the scored steps of a batch, and the state to carry on."""
        x, y, mask, reset = batch
        if not self.commutative and not self._in_pieces():
            out, state = self.model(x, state, reset, masks)
            return self._nats(out, y, mask), state
        states, after = self.model.level_states(x, state, reset, masks)
        total = self._output_loss(self.model.joined(states), y, mask, masks)
        if self.commutative:
            penalty = self.commutative * commutativity(self.model, x, states, state, reset, mask) * mask.sum()
            total = total + (penalty - penalty.detach())  # its gradient alone: what is reported stays nats
        return total, after

    def _output_loss(self, top: Tensor, y: Tensor, mask: Tensor, masks: dict[str, Tensor] | None) -> Tensor:
        out = {k.removeprefix("out."): m for k, m in (masks or {}).items() if k.startswith("out.")}
        if not self._in_pieces():
            return self._nats(self.model.predict(top, out) if out else self.model.predict(top), y, mask)
        from deeprnn.model.large_softmax import linear_cross_entropy

        return linear_cross_entropy(*self.model.predict.last_layer(top, out), y, mask)[0]

    def _nats(self, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if self.model.spec.output == "nade":
            return losses.masked_sum(scoring.nats(self.model, out, y), mask)[0]
        return losses.nll(self.model.spec.output, out, y, mask)[0]

    def _in_pieces(self) -> bool:
        """Whether output layer and loss are one operation: many classes, and nothing to call in between."""
        model, spec = self.model, self.model.spec
        if spec.output != "categorical" or spec.output_size < LARGE:
            return False
        return not changed(model, "forward") and not changed(model.predict, "forward", weights=True)


class Message(NamedTuple):
    """What ranks sum after a group's backward pass, in one buffer."""

    whole: Tensor  # (p * N + 2 * p,)
    gradient: Tensor  # (p, N)
    views: list[Tensor]  # of the gradient, by parameter
    totals: Tensor  # (2, p): nats, count


class Updater:
    """Parameters, gradients and carried states of P models in static buffers, and the update on them."""

    def __init__(
        self,
        model: SequenceModel,
        recipe: Recipe,
        seeds: Sequence[int],
        parameters: Tensor,
        schedule: Schedule,
        multipliers: Tensor | None = None,
        ranks: Ranks | None = None,
        variants: Sequence[Recipe] = (),
    ) -> None:
        """`variants`: each member's own recipe where they differ (`training.lockstep` says in what they may)."""
        self.ranks = ranks or Ranks()
        P, device = len(seeds), parameters.device
        recipes = variants or [recipe] * P
        self.model, self.recipe, self.schedule, self.device = model, recipe, schedule, device
        self.scored = Scored(model, recipe.regulariser.commutative)
        self.layout = Layout.of(model)
        self.parameters = parameters  # (P, N)
        self.optimiser = Optimiser(recipe.optimiser, parameters, multipliers)
        self.fused = nvidia(device) and parameters.dtype == torch.float32
        stds = [r.regulariser.weight_noise for r in recipes]
        self.noise = noise.Noise(stds, seeds, self.layout.matrices, device)
        self.dropconnect = DropConnect(recipe.regulariser.dropconnect, model.spec, self.layout, seeds, device)
        computed = self.noise.any or self.dropconnect.p
        self.noisy = torch.empty_like(parameters) if computed else parameters
        self.clip = thresholds([r.optimiser.clip for r in recipes]).to(parameters)
        self.groups = (
            [slice(0, P)] if device.type == "cuda" and P > 1 else [slice(p, p + 1) for p in range(P)]
        )
        self.leaves = [self._leaves(rows) for rows in self.groups]
        self.messages = [self._message(rows) for rows in self.groups]
        self.lanes = self.ranks.share(recipe.data.lanes)
        own = self.lanes.stop - self.lanes.start
        self.state: State = tuple(
            h.detach().to(parameters).expand(P, *h.shape).clone() for h in model.initial_state(own)
        )
        self.tau = torch.zeros((), dtype=torch.int64, device=device)
        self.totals = torch.zeros(len(SUMS), P, dtype=torch.float64, device=device)
        self.sums = dict(zip(SUMS, self.totals, strict=True))
        self.zero = parameters.new_zeros(())  # a number in its place would be a launch of its own
        self.bad = torch.full((P,), -1, dtype=torch.int64, device=device)
        self.average = parameters.clone() if recipe.optimiser.average != "none" else None
        self.averaged = torch.zeros((), dtype=torch.float64, device=device)

    def _leaves(self, rows: slice) -> dict[str, Tensor]:
        views = self.layout.views(self.noisy[rows])
        if rows.stop - rows.start == 1:
            views = {name: view[0] for name, view in views.items()}
        return {name: view.detach().requires_grad_() for name, view in views.items()}

    def _message(self, rows: slice) -> Message:
        P, N = rows.stop - rows.start, self.parameters.shape[1]
        whole = self.parameters.new_zeros(P * N + 2 * P)
        gradient = whole[: P * N].view(P, N)
        views = list(self.layout.views(gradient).values())
        return Message(whole, gradient, views, whole[P * N :].view(2, P))

    def update(self, batches: Sequence[Batch]) -> None:
        """One update of every group that still trains; `batches` holds one for all, or one for each group."""
        rates = self.schedule.rates(self.tau)
        if self.average is not None:
            self.averaged += 1
        for number, rows in enumerate(self.groups):
            if len(self.groups) > 1 and self.schedule.members[number].finished:
                continue
            batch = batches[number if len(batches) > 1 else 0]
            self._update(number, rows, batch, rates[rows])
        if self.average is not None and not self.fused:
            self.average.lerp_(self.parameters, self._average_weight().to(self.average.dtype))
        self.tau += 1

    def _update(self, number: int, rows: slice, batch: Batch, rate: Tensor) -> None:
        parameters, message, leaves = self.parameters[rows], self.messages[number], self.leaves[number]
        gradient = message.gradient
        self.noise.add(parameters, self.noisy[rows], rows, self.tau)
        connected = self.dropconnect.draw(rows, self.tau)
        if connected is not None and not self.noise.any:
            self.noisy[rows].copy_(parameters)
        self.dropconnect.apply(self.noisy[rows], connected)
        T, B = batch.mask.shape[-2], self.recipe.data.lanes
        masks = noise.dropout_masks(self.model, T, B, self.noise.seeds[rows], self.tau, self.lanes)
        nats, state = self._forward(leaves, batch, tuple(h[rows] for h in self.state), masks)
        count = batch.mask.sum((-2, -1))
        if self.ranks.alone:  # others' counts are known only after the sum
            count = count.clamp(min=1)
            loss = nats / count
        else:
            loss = nats
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        with torch.no_grad():
            for view, g in zip(message.views, grads, strict=True):
                view.copy_(g.view_as(view))
            self.dropconnect.apply(gradient, connected)
            nats = nats.detach()
            if not self.ranks.alone:
                nats, count = self._sum_over_ranks(message, nats, count)
            norm = torch.linalg.vector_norm(gradient, dim=1)
            if self.fused:
                average = None if self.average is None else (self.average[rows], self._average_weight())
                sums, bad = self.totals[:, rows], self.bad[rows]
                factor, good = account(norm, nats, count, self.clip[rows], self.tau, sums, bad)
                self.optimiser.fused_step(rows, parameters, gradient, factor, rate, self.tau, average)
            else:
                good, scale = self._judge(rows, nats, count, norm)
                gradient.mul_(scale[:, None])
                # On the CPU asking is cheaper than filling.
                if self.device.type != "cpu" or not bool(good.all()):
                    gradient.masked_fill_(~good[:, None], 0.0)
                self.optimiser.step(rows, parameters, gradient, rate, self.tau)
            for carried, h in zip(self.state, state, strict=True):
                carried[rows] = torch.where(good[:, None, None], h.detach(), self.zero.to(h.dtype))

    def _sum_over_ranks(self, message: Message, nats: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Nats and count of all lanes; the message's gradient becomes that of their quotient."""
        message.totals[0], message.totals[1] = nats, count
        self.ranks.sum_(message.whole)
        nats, count = message.totals[0].clone(), message.totals[1].clamp(min=1)
        message.gradient.div_(count[:, None])
        return nats, count

    def _forward(
        self, leaves: dict[str, Tensor], batch: Batch, state: State, masks: Any
    ) -> tuple[Tensor, State]:
        """Nats (p,) and states (p, B, H) of a group: one member plainly, several under vmap."""
        bf16 = self.recipe.optimiser.precision == "bf16"
        named = {f"model.{name}": leaf for name, leaf in leaves.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            if len(state[0]) > 1:
                dims = (0, 0 if batch.mask.dim() == 3 else None, 0, None if masks is None else 0)
                return vmap(self._call, in_dims=dims)(named, batch, state, masks)
            single = None if masks is None else {k: m[0] for k, m in masks.items()}
            nats, state = self._call(named, batch, tuple(h[0] for h in state), single)
        return nats[None], tuple(h[None] for h in state)

    def _call(self, named: dict[str, Tensor], batch: Batch, state: State, masks: Any) -> tuple[Tensor, State]:
        return functional_call(self.scored, named, (Batch(*batch), state, masks))

    def _judge(self, rows: slice, nats: Tensor, count: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Which gradients are finite and what clipping leaves of them; the epoch's sums, and the first that was not."""
        good = torch.isfinite(norm) & torch.isfinite(nats)
        scale = clip_scale(norm, self.clip[rows])
        values = (nats, count.expand_as(nats), norm, scale < 1, good)  # as SUMS names them
        for total, value in zip(self.totals, values, strict=True):
            total[rows] += torch.where(good, value, 0)
        bad = self.bad[rows]
        bad.copy_(torch.where((bad < 0) & ~good, self.tau, bad))
        return good, scale

    def _average_weight(self) -> Tensor:
        """The weight of the newest parameters in the average."""
        part = self.recipe.optimiser
        least = 0.0 if part.average == "tail" else 1 - part.average_decay
        return (1 / self.averaged).clamp(min=least)

    # ---- what the loop does once an epoch

    @property
    def evaluated(self) -> Tensor:
        """The parameters that are evaluated and kept: averaged where that is asked for and has begun."""
        return self.parameters if self.average is None else self.average

    def restore(self, member: int, parameters: Tensor) -> None:
        """Put a member back to earlier parameters (N,)."""
        self.parameters[member].copy_(parameters)
        self.optimiser.forget(member)
        if self.average is not None:
            self.average[member].copy_(parameters)

    def take_sums(self) -> list[dict[str, float]]:
        """The epoch's sums of each member, which start again from zero."""
        values = self.totals.T.tolist()
        self.totals.zero_()
        return [dict(zip(SUMS, own, strict=True)) for own in values]

    def whole_tensors(self) -> dict[str, Tensor]:
        """Everything that must survive, by name, with the carried states of all ranks' lanes."""
        lanes = self.recipe.data.lanes
        states = {f"state.{k}": self.ranks.all_lanes(h, lanes) for k, h in enumerate(self.state)}
        return {**self.tensors(), **states}

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of one of `whole_tensors`."""
        return whole[:, self.lanes] if name.startswith("state.") else whole

    def tensors(self) -> dict[str, Tensor]:
        """Everything of this process that an update changes, by name."""
        out = {"parameters": self.parameters, "tau": self.tau, "bad": self.bad}
        out |= {f"state.{k}": h for k, h in enumerate(self.state)}
        out |= {f"optimiser.{k}": b for k, b in self.optimiser.buffers.items()}
        out |= {f"sums.{k}": s for k, s in self.sums.items()}
        if self.average is not None:
            out |= {"average": self.average, "averaged": self.averaged}
        return out
