# %% [markdown]
# # Your own ⊕
#
# The paper builds recurrent networks from two operators: **⊕** takes an input and a state to a new state, **▷** takes
# a state to a prediction. Here is a new ⊕ in ten lines. `deeprnn train` learns it, beside two of the paper's, and then
# it writes music.

# %% parameters
EPOCHS = 8

# %%
import sys
from tempfile import mkdtemp

%cd -q {mkdtemp()}

# %% [markdown]
# ## Ten lines
#
# In the paper's ⊕ every unit starts afresh at each step. Let each unit instead keep a pace *a* of its own, learned with
# the rest, and move only that far towards its new value: h′ = h + a·(tanh(W h + U x) − h). Some units may then remember
# for long while others follow the notes. It is ordinary PyTorch for one step of time:

# %%
%%writefile paced.py
import deeprnn, torch
from torch import nn

class Paced(deeprnn.Cell):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.U, self.W = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)
        self.pace = nn.Parameter(torch.linspace(-2, 4, hidden_size))  # a = sigmoid(pace): slow ones to quick ones

    def step(self, x, h):
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())

# %% [markdown]
# ## What becomes of it
#
# `step` is read once. What does not depend on the state leaves the loop; the rest becomes one description, from which
# the loop forwards and backwards is made for this machine. `explain` shows it:

# %%
import deeprnn
from paced import Paced

print(deeprnn.Recurrent(Paced(88, 120)).explain())

# %% [markdown]
# ## Training
#
# Bach's chorales on a grid of quarter notes. The file with the class is all that the command needs; everything else is
# as for any model: schedules, checkpoints, populations, resuming.

# %%
settings = f"--data.steps-per-beat 1 --data.transpose true --data.chunk 32 --data.lanes 4 --optimiser.rate 0.005 --stop.epochs {EPOCHS}"
!{sys.executable} -m deeprnn train bach --model paced.py:Paced --model.hidden 120 {settings} --name paced --quiet

# %% [markdown]
# The same for two of the paper's, of about the same size:

# %%
!{sys.executable} -m deeprnn train bach --model rnn --model.hidden 120 {settings} --name rnn --quiet
!{sys.executable} -m deeprnn train bach --model dts --model.hidden 90 --model.intermediate 60 {settings} --name dts --quiet

# %%
from deeprnn.render.curves import comparison_png
from IPython.display import Image

runs = {name: deeprnn.load_run(f"runs/{name}") for name in ("rnn", "dts", "paced")}
for run in runs.values():
    best = min(row["valid"] for row in run.metrics())
    print(f"{run.info['label']:10} {run.info['parameters']:7,} parameters   {best:.3f} nats per frame (validation)")
Image(comparison_png({run.info["label"]: run.metrics() for run in runs.values()}, title="Validation", metric="nats per frame", dpi=65))

# %% [markdown]
# At this size and time they lie close together: before believing any order, train longer and with several seeds
# (`--seeds 1..5`). What paces did it learn? Near 1 a unit is the conventional one; near 0 it remembers.

# %%
pace = runs["paced"].model().levels[0].cell.pace.detach().sigmoid()
print("slowest", [round(a, 2) for a in pace.sort().values[:5].tolist()], " quickest", [round(a, 2) for a in pace.sort().values[-5:].tolist()])

# %% [markdown]
# ## Hear it

# %%
music = runs["paced"].generate(length=64, seed=4, temperature=0.9)
Image(music.png(dpi=65))

# %% [markdown]
# `music.save("out/paced")` writes `.mid`, `.wav` and `.png`; in a live notebook `IPython.display.Audio(music.wav())`
# plays it. A run names its cell but never brings its code along: on the command line the file is given again, as in
# `deeprnn generate runs/paced --import paced.py`. What can stand in a `step`, and what it costs, is in
# `docs/guide/cells.md`.
