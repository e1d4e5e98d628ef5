# %% [markdown]
# # Text: characters one by one, and how surprising each of them is
#
# Any text will do. This one is on every computer that has Python: the language's own reference manual, as `help()`
# shows it.

# %% parameters
EPOCHS, CHARACTERS = 4, 1_000_000  # more epochs make it write sentences

# %%
from pathlib import Path
from tempfile import mkdtemp

import deeprnn
from pydoc_data.topics import topics

folder = Path(mkdtemp())
text = "\n".join(topics[name].split("Related help")[0] for name in sorted(topics))[:CHARACTERS]
(folder / "manual.txt").write_text(text, encoding="utf-8")
data = deeprnn.load_data(folder / "manual.txt", kind="char")
print(f"{len(text):,} characters, {data.size} different ones; split", {k: len(v) for k, v in data.splits.items()})
print("…", text[6_000:6_300], "…")

# %% [markdown]
# ## Training
#
# The recipe `quick/char` with a smaller model. A plain RNN and a DOT(S)-RNN see the text equally often.

# %%
from deeprnn.training.recipe import load_recipe, override
from deeprnn.render.curves import comparison_png
from deeprnn.training.session import run_recipe
from IPython.display import HTML, Image

runs = {}
common = {"data.name": str(folder / "manual.txt"), "model.hidden": [128], "optimiser.rate": 0.005, "stop.epochs": EPOCHS}
for kind, inner, outer in (("rnn", [], []), ("dots", [96], [128])):
    shape = {"model.kind": kind, "model.intermediate": inner, "model.output_hidden": outer}
    recipe = override(load_recipe("quick/char"), {**common, **shape})
    run_recipe(recipe, folder / kind, data=data)
    runs[kind] = deeprnn.load_run(folder / kind)
    info = runs[kind].info
    print(f"{info['label']:12} {info['parameters']:,} parameters, {info['result']['test']['bpc']:.3f} bits per character on the test part")
Image(comparison_png({run.info["label"]: run.metrics() for run in runs.values()}, title="Validation", metric="bits per character", dpi=65))

# %% [markdown]
# ## Writing
#
# Low temperatures are safe, high ones bold:

# %%
from deeprnn.generation import generate

best = min(runs.values(), key=lambda run: run.info["result"]["valid"]["bpc"])
for temperature in (0.4, 0.8, 1.2):
    print(f"--- temperature {temperature}")
    print(generate.from_run(best, primer="The statement ", length=220, temperature=temperature, seed=1))

# %% [markdown]
# ## Surprise
#
# The model gives every character a probability before it reads it. In bits, −log₂ p: the darker, the less expected.

# %%
import html
import math

import torch

model = best.model()


def surprise(sentence):
    ids = torch.from_numpy(data.encode(sentence).astype("int64"))
    with torch.no_grad():
        logits, _ = model(ids[:-1, None])  # (T, 1, symbols): what is expected after each character
    bits = torch.nn.functional.cross_entropy(logits[:, 0], ids[1:], reduction="none") / math.log(2)
    shade = [0.0, *(min(b / 12, 0.9) for b in bits.tolist())]
    spans = (f'<span style="background: rgb(201 94 45 / {a:.2f})">{html.escape(c)}</span>' for c, a in zip(sentence, shade))
    return HTML(f'<pre style="font-size: 15px; line-height: 1.7">{"".join(spans)}\n{bits.mean():.2f} bits per character</pre>')


surprise("The exception is raised when the object is called with the wrong type of giraffe.")

# %% [markdown]
# `deeprnn serve` shows the same for any text you paste, with the model's alternatives behind every character; and
# `deeprnn train book.txt --level char` trains on a book of yours.
