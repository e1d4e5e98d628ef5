# %% [markdown]
# # Your own ⊕
#
# The paper builds recurrent networks from two operators: **⊕** takes an input and a state to a new state, **▷** takes
# a state to a prediction. Here is a new ⊕ in ten lines, trained and compared with two of the paper's.

# %% parameters
EPOCHS = 8

# %% [markdown]
# ## Ten lines
#
# In the paper's ⊕ every unit starts afresh at each step. Let each unit instead keep a pace *a* of its own, learned with
# the rest, and move only that far towards its new value: h′ = h + a·((x ⊕ h) − h). Some units may then remember for
# long while others follow the notes.

# %%
import torch
from deeprnn import Plus
from torch import nn


class Paced(Plus):
    """h' = h + a·((x ⊕ h) − h), with a pace a between 0 and 1 for each unit."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.pace = nn.Parameter(torch.linspace(-2, 4, self.spec.hidden_size))  # a = sigmoid(pace): slow ones to quick ones

    def forward(self, x, h, skip=None):
        return torch.lerp(h, super().forward(x, h, skip), self.pace.sigmoid())


# %% [markdown]
# It is an ordinary module: `h = plus(x, h)` for one step. Around it, the shortest model there is: a loop and a ▷.

# %%
from deeprnn import Predict


class Model(nn.Module):
    """States by ⊕, logits by ▷; `reset` (T, B) marks where a song begins."""

    def __init__(self, plus):
        super().__init__()
        self.plus, self.predict = plus, Predict(plus.spec.hidden_size, 88)
        nn.init.constant_(self.predict.b1, -3.0)  # four notes of 88 sound at a time: begin there

    def forward(self, x, h, reset):
        states = []
        for x_t, new in zip(x.float(), reset):
            h = self.plus(x_t, h * ~new[:, None])
            states.append(h)
        return self.predict(torch.stack(states)), h


# %% [markdown]
# ## The data and the loop
#
# Bach's chorales on a grid of quarter notes. The loop is the paper's in small: chunks of time with the state carried
# on, every frame scored, the gradient's norm clipped.

# %%
from deeprnn import load_data
from deeprnn.data import Grid
from deeprnn.data.batching import music_chunks, music_evaluation
from deeprnn.model.losses import bernoulli_nll

data = load_data("bach", grid=Grid(steps_per_beat=1), transpose=True)


def run_through(model, batches, optimiser=None):
    """Nats per frame; learns on the way where there is an optimiser."""
    total, frames, h = 0.0, 0, None
    for batch in batches:
        h = batch.x.new_zeros(batch.x.shape[1], model.plus.spec.hidden_size).float() if h is None or len(h) != batch.x.shape[1] else h.detach()
        with torch.set_grad_enabled(optimiser is not None):
            logits, h = model(batch.x, h, batch.reset)
            nats, count = bernoulli_nll(logits, batch.y, batch.mask)
        if optimiser:
            optimiser.zero_grad()
            (nats / count.clamp_min(1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        total, frames = total + nats.item(), frames + int(count)
    return total / frames


def learn(plus):
    model = Model(plus)
    optimiser = torch.optim.Adam(model.parameters(), 0.005)
    rows = []
    for epoch in range(1, EPOCHS + 1):
        plan = music_chunks(data.splits["train"], chunk=32, lanes=4, seed=0, epoch=epoch)
        train = run_through(model, (plan[i] for i in range(len(plan))), optimiser)
        plan = music_evaluation(data.splits["valid"])
        rows.append({"epoch": epoch, "train": train, "valid": run_through(model, (plan[i] for i in range(len(plan))))})
    return model, rows


# %% [markdown]
# ## The comparison
#
# Three ⊕ of about the same size: the conventional one, the paper's deep transition with a shortcut, and ours on top
# of the conventional one.

# %%
from deeprnn.render.curves import comparison_png
from IPython.display import Image

candidates = {
    "RNN": lambda: Plus(88, 120),
    "DT(S)-RNN": lambda: Plus(88, 90, intermediate_sizes=(60,), shortcut="last", input_to="all"),
    "paced RNN": lambda: Paced(88, 120),
}
models, curves = {}, {}
for name, make in candidates.items():
    torch.manual_seed(1)
    models[name], curves[name] = learn(make())
    size = sum(p.numel() for p in models[name].parameters())
    print(f"{name:10} {size:7,} parameters   {min(row['valid'] for row in curves[name]):.3f} nats per frame (validation)")
Image(comparison_png(curves, title="Validation", metric="nats per frame", dpi=65))

# %% [markdown]
# At this size and time they lie close together: before believing any order, train longer and with several seeds.
# What paces did it learn? Near 1 a unit is the paper's; near 0 it remembers.

# %%
pace = models["paced RNN"].plus.pace.detach().sigmoid()
print("slowest", [round(a, 2) for a in pace.sort().values[:5].tolist()], " quickest", [round(a, 2) for a in pace.sort().values[-5:].tolist()])

# %% [markdown]
# To make it part of the library: the equation goes to `equations.py`, the parameters to `operators.py`, and the grid
# test of the backends shows whether a faster loop computes the same. See `CONTRIBUTING.md`.
