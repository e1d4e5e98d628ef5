"""The loop: it learns, carries state, keeps the best, averages, and stops at what is not a number."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from deeprnn.data import load
from deeprnn.data.batching import Batch
from deeprnn.data.music import MusicData
from deeprnn.model.models import build
from deeprnn.model.specs import Dropout
from deeprnn.runs.checkpoint import load_state
from deeprnn.runs.folder import Run
from deeprnn.training.dynamic import dynamic_evaluation
from deeprnn.training.evaluate import evaluate, evaluation_plan, one_gram, score
from deeprnn.training.loop import NonFinite, Trainer
from deeprnn.training.recipe import EvaluationPart, override
from deeprnn.training.saving import Interrupted
from deeprnn.training.session import recipe_of, run_recipe
from tests.helpers import benchmark_data
from tests.torture.stories import outcome
from tests.training.toys import DEEP, music, recipe, text


class Lines:
    """Collects what the loop reports."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.updates = 0

    def updated(self, trainer):
        self.updates += 1

    def epoch_ended(self, trainer, rows):
        self.rows.append(rows[0])


def test_it_learns_the_toy_music():
    lines = Lines()
    trainer = Trainer(recipe(stop__epochs=25, regulariser__weight_noise=0.01), music())
    trainer.train([lines])
    assert lines.updates == 25 * trainer.length
    assert lines.rows[-1]["train"] < 0.6 * lines.rows[0]["train"]
    assert lines.rows[-1]["step"] == lines.updates
    result = trainer.results()[0]
    assert result["valid"]["nats_per_frame"] == min(r["valid"] for r in lines.rows)
    assert result["best_epoch"] == 1 + int(np.argmin([r["valid"] for r in lines.rows]))
    assert set(result) == {"best_epoch", "train", "valid", "test"}


def test_transposition_is_drawn_anew_each_epoch_and_from_nothing_else():
    settings = recipe(data__random_transpose=3, stop__epochs=2)
    trainer = Trainer(settings, music())
    tables = [trainer.plan(trainer.members[0], epoch).table for epoch in (1, 2)]
    assert not torch.equal(*tables)
    trainer.train()
    again = Trainer(override(settings, {"seeds": [7, 8]}), music())
    for epoch, table in enumerate(tables, 1):
        assert torch.equal(again.plan(again.members[1], epoch).table, table), "order and keys are shared"
    own = Trainer(override(settings, {"seeds": [7, 8], "data.order": "own"}), music())
    first, second = (own.plan(member, 1).table for member in own.members)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_it_learns_a_text(kind):
    lines = Lines()
    settings = recipe(
        data__chunk=12,
        stop__epochs=8,
        regulariser__weight_noise=0.0,
        optimiser__name="adam",
        optimiser__rate=0.02,
    )
    Trainer(settings, text(kind)).train([lines])
    assert lines.rows[-1]["valid"] < lines.rows[0]["valid"] - 0.3


def test_one_update_is_the_clipped_gradient_of_the_mean_loss():
    """Against autograd on the model itself, without noise."""
    data = music()
    trainer = Trainer(recipe(regulariser__weight_noise=0.0, optimiser__clip=0.1, **DEEP), data)
    model = build(trainer.spec, seed=0)
    model.load_state_dict(
        {k: v.clone() for k, v in trainer.layout.views(trainer.updater.parameters[0]).items()}
    )
    batch = trainer.plans(1)[0][0]
    logits, state = model(batch.x, None, batch.reset)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.y.float(), reduction="sum")
    (loss / batch.mask.sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    assert norm > 0.1
    before = trainer.updater.parameters.clone()
    trainer.updater.update([batch])
    moved = trainer.layout.views((before - trainer.updater.parameters)[0])
    for name, p in model.named_parameters():
        torch.testing.assert_close(moved[name], p.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(trainer.updater.state[0][0], state[0], rtol=1e-5, atol=1e-6)


def test_the_state_is_carried_within_a_song_and_reset_at_the_next():
    trainer = Trainer(recipe(regulariser__weight_noise=0.0), music())
    plan = trainer.plans(1)[0]
    first, second = plan[0], plan[1]
    assert first.reset[0, 0]
    assert not second.reset.any()
    trainer.updater.update([first])
    carried = trainer.updater.state[0].clone()
    assert carried.abs().sum() > 0
    other = Trainer(recipe(regulariser__weight_noise=0.0), music())
    other.updater.update([first])
    other.updater.state[0].zero_()
    for t in (trainer, other):
        t.updater.update([second])
    assert not torch.equal(trainer.updater.parameters, other.updater.parameters)
    fresh = Batch(second.x, second.y, second.mask, first.reset)
    for t in (trainer, other):
        t.updater.parameters.copy_(other.updater.parameters)
        t.updater.update([fresh])
    assert torch.equal(trainer.updater.state[0], other.updater.state[0])


def test_restoring_goes_back_to_the_best_parameters():
    trainer = Trainer(
        recipe(stop__epochs=0, stop__patience=1, schedule__patience=1, optimiser__rate=4.0), music()
    )
    while trainer.schedule.members[0].tau0 is None:
        trainer.train_epoch()
        trainer.end_epoch()
    assert torch.equal(trainer.updater.parameters, trainer.best)


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_a_number(nonfinite):
    trainer = Trainer(recipe(optimiser__nonfinite=nonfinite), music())
    engine_update = trainer.updater.update

    def poisoned(batches):
        if int(trainer.updater.tau) == 4:
            trainer.updater.state[0].fill_(float("nan"))
            batches = [Batch(b.x, b.y, b.mask, torch.zeros_like(b.reset)) for b in batches]
        engine_update(batches)

    trainer.updater.update = poisoned  # type: ignore[method-assign]
    if nonfinite == "stop":
        with pytest.raises(NonFinite, match=r"update 4 .*--optimiser.rate"):
            trainer.train()
        assert int(trainer.updater.tau) == 5
    else:
        trainer.train()
    assert torch.isfinite(trainer.updater.parameters).all()


def diverge(trainer: Trainer, at: int, member: int = 0) -> None:
    """Make a member's parameters infinite with the last update of an epoch."""
    step = trainer.updater.update

    def poisoned(batches):
        step(batches)
        if int(trainer.updater.tau) == at:
            trainer.updater.parameters[member].fill_(float("inf"))

    trainer.updater.update = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("nonfinite", "said"),
    [("stop", r"update 17 \(epoch 1\) made parameters"), ("skip", "after epoch 1 the validation cost")],
)
def test_a_validation_cost_that_is_not_a_number_is_never_the_best(nonfinite, said):
    trainer = Trainer(recipe(optimiser__nonfinite=nonfinite), music())
    diverge(trainer, trainer.length)
    with pytest.raises(NonFinite, match=rf"{said} .*--optimiser.rate 0.25"):
        trainer.train()
    assert trainer.schedule.members[0].best is None


def test_a_member_that_diverges_ends_alone_where_that_is_asked_for():
    trainer = Trainer(recipe(seeds=[1, 2], optimiser__nonfinite="skip"), music())
    diverge(trainer, 2 * trainer.length)
    lines = Lines()
    trainer.train([lines])
    lost, kept = trainer.schedule.members
    assert (lost.finished, lost.best_epoch) == ("diverged in epoch 2", 1)
    assert kept.finished == "all 3 epochs done"
    assert all(np.isfinite(r["test"]["nats_per_frame"]) for r in trainer.results())


def test_a_member_that_diverges_in_its_first_epoch_ends_alone_too():
    trainer = Trainer(recipe(seeds=[1, 2], optimiser__nonfinite="skip"), music())
    diverge(trainer, trainer.length)
    trainer.train([Lines()])
    lost, kept = trainer.schedule.members
    assert (lost.finished, lost.best) == ("diverged in epoch 1", None)
    assert kept.finished == "all 3 epochs done"
    alone = Trainer(recipe(seeds=[2], optimiser__nonfinite="skip"), music())
    alone.train()
    assert trainer.results() == [None, alone.results()[0]]


def test_when_all_members_diverge_in_the_first_epoch_there_is_nothing_to_go_on_with():
    trainer = Trainer(recipe(seeds=[1, 2], optimiser__nonfinite="skip"), music())
    for member in (0, 1):
        diverge(trainer, trainer.length, member)
    with pytest.raises(NonFinite, match="after epoch 1"):
        trainer.train()


@pytest.mark.parametrize("updates", [0, 1])
def test_infinite_parameters_are_the_fault_of_the_update_that_made_them_and_never_saved(tmp_path, updates):
    decay = {"optimiser__name": "adamw", "optimiser__rate": 3e38, "optimiser__weight_decay": 100.0}
    settings = recipe(save__updates=updates, optimiser__clip=0.0, regulariser__weight_noise=0.0, **decay)
    with pytest.raises(NonFinite, match=r"update 0 \(epoch 1\) made parameters NaN or infinite"):
        run_recipe(settings, tmp_path / "r", data=music())
    assert load_state(tmp_path / "r") is None


class Scored(Lines):
    """Counts what is scored, and may stop it."""

    def __init__(self, stop_at: int = 0) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []
        self.stop_at = stop_at

    def scored(self, trainer, split, done, total):
        self.calls.append((split, done, total))
        if len(self.calls) == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)


def test_scoring_tells_how_far_it_is():
    watcher = Scored()
    settings = recipe(stop__epochs=1, seeds=[1, 2], evaluation__chunk=5, evaluation__width=1)
    trainer = Trainer(settings, music())
    trainer.train([watcher])
    trainer.results([watcher])
    for split in ("train", "valid", "test"):
        calls = [(done, total) for name, done, total in watcher.calls if name == split]
        total = calls[0][1]
        assert total > 4
        assert calls == [(n, total) for n in range(1, total + 1)] * (2 if split == "valid" else 1)


@pytest.mark.parametrize("at", [1, 3, 5, 9])
def test_a_signal_while_scoring_saves_and_going_on_is_bit_equal(tmp_path, at):
    """In an epoch's validation, and in the scoring after the last one."""
    settings = recipe(stop__epochs=2, evaluation__chunk=25, evaluation__width=2, seeds=[1, 2])
    run_recipe(settings, tmp_path / "whole", data=music())
    with pytest.raises(Interrupted):
        run_recipe(settings, tmp_path / "cut", data=music(), watch=lambda t, f: [Scored(at)])
    assert Run(tmp_path / "cut" / "seed-1").info["status"] == "stopped"
    run_recipe(recipe_of(tmp_path / "cut"), tmp_path / "cut", data=music())
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_time_that_ends_during_validation_ends_the_run():
    trainer = Trainer(recipe(stop__epochs=0, stop__minutes=1.0), music())
    trainer.train_epoch()
    trainer._clock -= 60  # so long did validation take
    trainer.end_epoch()
    assert trainer.schedule.done


def test_a_cosine_ends_with_the_time():
    settings = recipe(schedule__name="cosine", stop__epochs=0, stop__minutes=1.0, schedule__warmup=9)
    trainer = Trainer(settings, music())
    rates = []

    class Clock(Lines):
        def updated(self, t):
            rates.append(float(t.schedule.rates(t.updater.tau)))
            t._clock -= 2.0  # an update of two seconds: thirty fit

    trainer.train([Clock()])
    assert 29 <= len(rates) <= 31
    assert rates[0] == pytest.approx(2 / 9)  # the warm-up as it is given: nothing is known yet
    assert rates[14] == pytest.approx(0.5, abs=0.1)
    assert rates[-1] == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("average", ["ema", "tail"])
def test_averaged_weights_are_what_is_evaluated(average):
    trainer = Trainer(
        recipe(optimiser__average=average, optimiser__average_decay=0.5, stop__epochs=1), music()
    )
    seen = []

    class Each(Lines):
        def updated(self, t):
            seen.append(t.updater.parameters.clone())

    trainer.train([Each()])
    if average == "tail":
        expected = torch.stack(seen).double().mean(0)
    else:
        expected = seen[0].double()
        for n, p in enumerate(seen[1:], 2):
            expected = torch.lerp(expected, p.double(), max(0.5, 1 / n))
    torch.testing.assert_close(trainer.best, expected.float(), rtol=1e-4, atol=1e-5)


def test_minutes_end_a_run_in_mid_epoch():
    trainer = Trainer(recipe(stop__epochs=0, stop__minutes=1e-5), music())
    trainer.train()
    assert "minutes passed" in trainer.schedule.members[0].finished
    assert int(trainer.updater.tau) < trainer.length


def test_evaluation_scores_every_frame_once_whatever_the_layout():
    data = music()
    model = build(recipe(**DEEP).model.spec(12, False, recipe().regulariser.dropout), seed=3)
    total = 0.0
    for song in data.splits["test"]:
        x = torch.tensor(np.concatenate([np.zeros((1, 12)), song[:-1]]), dtype=torch.float32)[:, None]
        logits, _ = model(x)
        y = torch.tensor(song, dtype=torch.float32)[:, None]
        total += torch.nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="sum").item()
    frames = data.splits["test"].frames
    for part in (recipe().evaluation, recipe(evaluation__chunk=7, evaluation__width=1).evaluation):
        found = evaluate(model, data, "test", part)
        assert found["nats_per_frame"] == pytest.approx(total / frames, rel=1e-5)
        assert found["frames"] == frames


def test_dynamic_evaluation_learns_on_the_way_and_leaves_the_model_alone():
    data = music()
    model = build(recipe().model.spec(12, False, recipe().regulariser.dropout), seed=3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain = evaluate(model, data, "test")["nats_per_frame"]
    tiny = dynamic_evaluation(model, data, "test", rate=1e-9, chunk=5)["nats_per_frame"]
    dynamic = dynamic_evaluation(model, data, "test", rate=0.5, chunk=5)["nats_per_frame"]
    assert tiny == pytest.approx(plain, rel=1e-4)
    assert dynamic < plain - 0.05
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_members_are_scored_as_if_alone():
    data, settings = music(), recipe(seeds=[1, 2])
    trainer = Trainer(settings, data)
    plan = evaluation_plan(data, "valid", settings.evaluation)
    both = score(trainer.model, trainer.updater.parameters, plan)
    one = score(trainer.model, trainer.updater.parameters[1:], plan)
    assert np.array_equal(both[1], one[0])


@pytest.mark.parametrize(("name", "published"), [("jsb", 11.06), ("nottingham", 10.25), ("musedata", 11.51)])
def test_the_one_gram_baseline_is_the_published_one(name, published):
    benchmark_data()
    data = load(name)
    assert isinstance(data, MusicData)
    assert one_gram(data, "test") == pytest.approx(published, abs=0.01)


def test_bf16_autocast_stays_close_and_keeps_the_state_in_fp32():
    plain, half = (
        Trainer(recipe(optimiser__precision=p, regulariser__weight_noise=0.0, **DEEP), music())
        for p in ("fp32", "bf16")
    )
    batch = plain.plans(1)[0][0]
    for trainer in (plain, half):
        trainer.updater.update([batch])
    assert half.updater.state[0].dtype == torch.float32
    assert not torch.equal(plain.updater.parameters, half.updater.parameters)
    torch.testing.assert_close(plain.updater.parameters, half.updater.parameters, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("streams", [1, 3])
def test_scoring_many_classes_takes_short_chunks_and_gives_the_same(streams, monkeypatch):
    data, part = text(), EvaluationPart(streams=streams)
    model = build(recipe().model.spec(data.size, True, Dropout()), seed=0)
    whole = evaluate(model, data, "valid", part)
    assert max(evaluation_plan(data, "valid", part).lengths) > 7
    monkeypatch.setattr("deeprnn.training.evaluate.MOST_LOGITS", 7 * streams * data.size)
    assert max(evaluation_plan(data, "valid", part).lengths) == 7
    assert evaluate(model, data, "valid", part) == pytest.approx(whole, rel=1e-5)
