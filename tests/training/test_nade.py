"""A NADE through everything a run goes through: learning, populations, resuming, scoring, report and page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deeprnn.errors import UserError
from deeprnn.model.specs import Dropout
from deeprnn.runs.folder import Run
from deeprnn.training.dynamic import dynamic_evaluation
from deeprnn.training.evaluate import evaluate
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import Recipe, override
from deeprnn.training.session import recipe_of, run_recipe
from tests.training.toys import DEEP, music, recipe, text

NADE = {"model__output": "nade", "model__nade_size": 7}


def test_it_learns_and_a_member_equals_the_model_alone():
    data = music()
    both, alone = Trainer(recipe(seeds=[1, 2], **NADE), data), Trainer(recipe(seeds=[2], **NADE), data)
    assert both.model.spec.output == "nade"
    before = evaluate(both.model, data, "valid")["nats_per_frame"]
    both.train()
    alone.train()
    assert torch.equal(both.updater.parameters[1], alone.updater.parameters[0])
    assert both.results()[1] == alone.results()[0]
    assert both.results()[0]["valid"]["nats_per_frame"] < before


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path):
    class Stop(Exception):
        pass

    class StopAt:
        def updated(self, trainer):
            if int(trainer.updater.tau) == trainer.length + 1:
                raise Stop

        def epoch_ended(self, trainer, rows): ...

    settings = recipe(save__updates=1, **NADE, **DEEP)
    run_recipe(settings, tmp_path / "whole", data=music())
    with pytest.raises(Stop):
        run_recipe(settings, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt()])
    run_recipe(recipe_of(tmp_path / "cut"), tmp_path / "cut", data=music())
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    assert whole.info["result"] == cut.info["result"]
    assert whole.info["label"].endswith("-NADE")
    for a, b in zip(whole.model().parameters(), cut.model().parameters(), strict=True):
        assert torch.equal(a, b)


def test_dynamic_evaluation_and_the_report_s_picture(tmp_path):
    from deeprnn.reproduction.html.gather import _predict_piece

    data = music()
    trainer = Trainer(recipe(**NADE), data)
    trainer.train()
    model = trainer.model
    static = evaluate(model, data, "test")["nats_per_frame"]
    assert np.isfinite(dynamic_evaluation(model, data, "test", rate=0.1, chunk=5)["nats_per_frame"])
    assert evaluate(model, data, "test")["nats_per_frame"] == static  # the model itself is left as it was
    frames = np.asarray(data.splits["test"][0])
    seen = _predict_piece(model, frames, "piece")
    p = np.where(frames > 0, seen.probabilities, 1 - seen.probabilities)
    assert seen.chain
    assert np.allclose(-np.log(p).sum(1), seen.surprise, rtol=1e-3)


def test_the_page_tells_what_its_probabilities_are():
    from types import SimpleNamespace

    from deeprnn.web import music as page
    from deeprnn.web.limits import Limits
    from deeprnn.web.refusals import Fields

    model = Trainer(recipe(**NADE), music()).model.eval()
    loaded = SimpleNamespace(model=model, keys=12)
    found = page.predict(loaded, Fields({"frames": [[0, 4], [2]]}), Limits())  # type: ignore[arg-type]
    assert len(found["nats"]) == 2
    assert found["mean"] == pytest.approx(sum(found["nats"]) / 2, abs=1e-3)


def test_a_text_cannot_have_one():
    settings = recipe(**NADE)
    with pytest.raises(UserError, match="is for music"):
        settings.model.spec(7, True, Dropout())
    with pytest.raises(UserError, match="is for music"):
        Trainer(settings, text())
    with pytest.raises(UserError, match=r"model\.nade_size must be at least 1"):
        recipe(model__nade_size=0)


def test_a_recipe_may_say_it_in_a_section_of_its_own():
    want = override(Recipe(), {"model.output": "nade", "model.nade_size": 50})
    assert Recipe.from_dict({"output": {"kind": "nade", "nade_size": 50}}) == want
    assert override(Recipe(), {"output.kind": "nade", "output.nade_size": 50}) == want
    with pytest.raises(UserError, match=r"output\.kidn"):
        Recipe.from_dict({"output": {"kidn": "nade"}})
