# %% [markdown]
# # Music: train a deep RNN on Bach's chorales and let it write
#
# Everything here runs on a laptop's CPU and needs no download: the chorales come with the package `music21`
# (`pip install 'deeprnn[all]'`). A chorale is a *piano roll*: one row of 88 zeros and ones for every eighth note.
# The model reads it row by row and says, before each row, how likely each key is to sound.

# %% parameters
EPOCHS = 20  # half a minute on a free core; forty with 200 units, as in the recipe, write a better chorale

# %%
from pathlib import Path
from tempfile import mkdtemp

import deeprnn
from deeprnn.generation import generate
from deeprnn.training.recipe import load_recipe, override
from deeprnn.render.curves import curves_png
from deeprnn.render.pianoroll import pianoroll_png
from deeprnn.training.evaluate import one_gram
from deeprnn.training.session import load_data, run_recipe
from IPython.display import SVG, Image

folder = Path(mkdtemp())
smaller = {"model.hidden": [128], "model.intermediate": [128], "model.output_hidden": [128], "optimiser.rate": 0.005}
recipe = override(load_recipe("quick/bach-dots"), {**smaller, "stop.epochs": EPOCHS, "stop.minutes": 0})
data = load_data(recipe.data)
print({split: f"{len(songs)} chorales, {songs.frames} frames" for split, songs in data.splits.items()})

# %% [markdown]
# One of the test chorales, and what a model without memory would need to predict them all:

# %%
chorale, steps = data.splits["test"][3], data.grid.steps_per_beat
print(f"{data.names['test'][3]}; a model without memory needs {one_gram(data):.2f} nats per frame")
Image(pianoroll_png(chorale[:128], steps_per_beat=steps, dpi=65))

# %% [markdown]
# ## The model
#
# A DOT(S)-RNN: a layer between one state and the next (deep **t**ransition, with a **s**hortcut around it), and a
# layer between state and output (deep **o**utput). It is assembled from the recipe's plain data:

# %%
from deeprnn.model.notation import equations
from deeprnn.render.model_diagram import model_svg

spec = recipe.model.spec(data.size, False, recipe.regulariser.dropout)
print(*equations(spec), sep="\n")
SVG(model_svg(spec))

# %% [markdown]
# ## Training
#
# A recipe in a folder: the folder then holds everything, and `deeprnn resume` would take it up if it were cut off.

# %%
result = run_recipe(recipe, folder / "bach", data=data)[0]
run = deeprnn.load_run(folder / "bach")
print({split: round(result[split]["nats_per_frame"], 3) for split in ("train", "valid", "test")}, "nats per frame")
Image(curves_png(run.metrics(), title=run.info["label"], metric="nats per frame", dpi=65))

# %% [markdown]
# ## Listening
#
# It hears the first two bars of the chorale above and goes on. Behind the notes glows what it expected.

# %%
music = generate.from_run(run, primer=chorale[: 8 * steps], length=96, seed=4, temperature=0.9, tempo=80.0)
Image(music.png(dpi=65))

# %% [markdown]
# `music.save("out/chorale")` writes `chorale.mid`, `chorale.wav` and `chorale.png`; in a live notebook
# `IPython.display.Audio(music.wav())` plays it. Is it new? The longest passage that it shares with the training data:

# %%
from deeprnn.generation.copy_check import Corpus

corpus = Corpus(list(data.splits["train"]), data.names["train"])
ours, theirs = corpus.longest(music.sampled[0]), corpus.longest(chorale)
print(f"the sample shares {ours.length} of {len(music.sampled[0])} frames with {ours.name}; a test chorale shares {theirs.length}")

# %% [markdown]
# Where to go from here: `deeprnn serve` opens a page where the same model continues what you draw,
# `deeprnn train my_midi_folder/` learns your own music, and `deeprnn train jsb --model dots` is a cell of the paper's
# Table 2.
