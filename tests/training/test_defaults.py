"""Settings for people's own data: what a short training of a text reaches by them."""

from __future__ import annotations

from itertools import islice, product

import pytest

from deeprnn.data.text import text_data
from deeprnn.training.defaults import choose
from deeprnn.training.engine import Eager
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import DataPart, Recipe, override
from tests.training.toys import music

WORDS = [
    " ".join(words)
    for words in product(("a cat", "my dog", "one bird"), ("sat", "ran", "sang"), ("on", "by"))
]


def letters() -> str:
    """Sentences of a few words in many orders: to be learned within some dozens of updates."""
    ends = product(WORDS, ("the mat", "a hill", "no sea"), ("today", "again", "in may"))
    return "".join(f"{' '.join(end)}.\n" for end in islice(ends, 200)) * 5


def cost_after(recipe: Recipe, updates: int) -> float:
    """Nats a character over the second half of so many updates."""
    text = letters()
    trainer = Trainer(
        recipe, text_data("toy", "char", {"train": text, "valid": text[:500], "test": text[:500]})
    )
    engine = Eager(trainer.updater)
    engine.load(trainer.plans(1))
    for number in range(updates):
        if number == updates // 2:
            trainer.updater.take_sums()
        engine.step(number % engine.length)
    (sums,) = trainer.updater.take_sums()
    return sums["nats"] / sums["count"]


def test_a_text_is_learned_in_fewer_updates_than_by_the_settings_for_music():
    text = letters()
    data = text_data("toy", "char", {"train": text, "valid": text[:500], "test": text[:500]})
    chosen = override(choose(data, DataPart(name="toy"), "dots")[0], {"model.hidden": [50]})
    songs, _ = choose(music(), DataPart(name="toy"), "dots")
    slower = override(
        chosen, {"init.input_std": songs.init.input_std, "optimiser.rate": songs.optimiser.rate}
    )
    assert cost_after(chosen, 60) < 0.8 * cost_after(slower, 60)


def test_a_remark_leaves_room_for_a_persons_options():
    part = DataPart(name="toy")
    assert not any("option" in remark for remark in choose(music(), part, "dots")[1])
    told = choose(music(), part, "dots", changed=True)[1]
    assert any("where no option says otherwise: 100 units" in remark for remark in told)


@pytest.mark.parametrize(("kind", "chunk"), [("char", 50), ("word", 50)])
def test_settings_fit_the_kind_of_text(kind, chunk):
    text = letters()
    data = text_data("toy", kind, {"train": text, "valid": text[:500], "test": text[:500]})
    recipe, remarks = choose(data, DataPart(name="toy"), "dots")
    assert recipe.data.chunk == chunk
    assert f"{recipe.optimiser.rate:g}" in " ".join(remarks)
