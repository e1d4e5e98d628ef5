"""A sweep from end to end: packed equals alone, kills lose nothing, failures are recorded, test is scored once."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.files import DiskFull
from deeprnn.runs.locking import lock
from deeprnn.sweeps import coordinator
from deeprnn.sweeps import pack as packs
from deeprnn.sweeps.engines import WorkerLost
from deeprnn.sweeps.engines.local import LocalEngine
from deeprnn.sweeps.folder import open_study
from deeprnn.sweeps.html import sweep_html, top_of
from deeprnn.sweeps.pack import Pack, train_pack
from deeprnn.sweeps.spec import load_spec
from deeprnn.sweeps.storage import Store
from deeprnn.sweeps.study import Study, best
from deeprnn.sweeps.winner import score_winner, write_winner
from deeprnn.training import loading
from deeprnn.training.recipe import load_recipe, override
from deeprnn.training.session import run_recipe
from tests.small_runs import text_file
from tests.sweeps.toys import Quiet, as_file, spec, sweep

WIDE = {
    "optimiser.rate": "log:0.1..4",
    "model.hidden": [[5], [7]],
    "regulariser.weight_noise": "uniform:0..0.1",
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scores(outcome) -> dict[int, float | None]:
    return {t.number: t.value for t in outcome.trials}


@cache
def undisturbed() -> dict[int, float | None]:
    with TemporaryDirectory() as folder:
        return scores(sweep(spec(WIDE), Path(folder) / "s"))


def test_packed_trials_score_what_they_would_alone(tmp_path):
    packed, alone = sweep(spec(WIDE), tmp_path / "a", pack=8), sweep(spec(WIDE), tmp_path / "b", pack=1)
    assert packed.finished
    assert scores(packed) == scores(alone)
    which = spec(WIDE)
    trial = packed.trials[2]
    result = run_recipe(which.recipe_at(trial.point), tmp_path / "run")[0]
    assert result["valid"]["bpc"] == pytest.approx(trial.value)


def test_a_finished_sweep_runs_nothing_again_and_more_trials_are_added(tmp_path):
    first = sweep(spec(), tmp_path / "s")
    view = Quiet()
    assert sweep(spec(), tmp_path / "s", view=view).trials == first.trials
    assert not view.trials
    more = sweep(spec(trials=8), tmp_path / "s", view=view)
    assert [t.number for t in view.trials] == [6, 7]
    assert more.trials[:6] == first.trials
    with pytest.raises(UserError, match=r"holds another sweep: its space\.optimiser\.rate differs"):
        sweep(spec({"optimiser.rate": "log:0.1..5"}), tmp_path / "s")


def test_its_data_are_read_once(tmp_path, monkeypatch):
    """And what they are warned of is told once."""
    load, read = loading.load_data, []
    monkeypatch.setattr(loading, "load_data", lambda part: read.append(part) or load(part))
    sweep(spec(trials=2), tmp_path, pack=1)
    assert len(read) == 1


def test_a_finished_sweep_needs_no_data(tmp_path, capsys):
    """Its best trials and its page come from the folder alone."""
    book = tmp_path / "book.txt"
    book.write_bytes(text_file().read_bytes())
    which = spec(overrides={"data.name": str(book)}, trials=3)
    first = sweep(which, tmp_path / "s")
    book.unlink()
    assert sweep(load_spec(tmp_path / "s"), tmp_path / "s").trials == first.trials
    for _ in range(2):
        assert main(["sweep", str(tmp_path / "s"), "--jobs", "1"]) == 0
        assert "3 trials: 3 complete" in capsys.readouterr().out
    assert (tmp_path / "s/report.html").is_file()
    assert main(["sweep", str(tmp_path / "s"), "--jobs", "1", "--trials", "4"]) == 2
    assert "book.txt" in capsys.readouterr().err


def test_the_mean_over_seeds_is_a_trials_score(tmp_path):
    which = spec(overrides={"seeds": [1, 2]}, trials=2)
    outcome = sweep(which, tmp_path / "s")
    recipe = which.recipe_at(outcome.trials[0].point)
    alone = [
        run_recipe(override(recipe, {"seeds": [seed]}), tmp_path / f"r{seed}")[0]["valid"]["bpc"]
        for seed in (1, 2)
    ]
    assert outcome.trials[0].value == pytest.approx(sum(alone) / 2)


def test_a_trial_that_goes_nan_fails_with_its_reason_and_the_others_go_on(tmp_path):
    which = spec({"init.output_std": [0.1, 3e38, 0.2]}, sampler="grid")
    outcome = sweep(which, tmp_path / "s")
    assert outcome.finished
    assert [t.state for t in outcome.trials] == ["complete", "failed", "complete"]
    assert "diverged" in outcome.trials[1].reason


def test_a_sweep_without_a_winner_ends_with_a_status_that_scripts_see(tmp_path):
    which = spec({"init.output_std": [3e38, 2e38]}, sampler="grid")
    assert main(["sweep", str(as_file(which, tmp_path)), "--out", str(tmp_path / "s"), "--jobs", "1"]) == 1
    assert main(["sweep", str(tmp_path / "s"), "--jobs", "1"]) == 1


def test_values_that_do_not_go_together_fail_and_the_others_go_on(tmp_path):
    which = spec({"data.lanes": [4, 10**6]}, sampler="grid")
    outcome = sweep(which, tmp_path / "s")
    assert [t.state for t in outcome.trials] == ["complete", "failed"]
    assert "choose a smaller number" in outcome.trials[1].reason


def test_a_crash_in_a_trial_is_its_reason(tmp_path, monkeypatch):
    real = packs.Trainer

    def crash(recipe, *arguments, **options):
        if recipe.model.hidden == (7,):
            raise RuntimeError("the sky fell")
        return real(recipe, *arguments, **options)

    monkeypatch.setattr(packs, "Trainer", crash)
    outcome = sweep(spec({"model.hidden": [[5], [7]]}, sampler="grid"), tmp_path / "s")
    assert [t.state for t in outcome.trials] == ["complete", "failed"]
    assert outcome.trials[1].reason == "RuntimeError: the sky fell"


def test_of_a_pack_that_crashes_only_the_trial_at_fault_fails(tmp_path, monkeypatch):
    real = packs.Trainer

    def crash(recipe, *arguments, variants, **options):
        if any(variant.optimiser.clip == 7.0 for variant in variants):
            raise RuntimeError("the sky\n  fell\n")
        return real(recipe, *arguments, variants=variants, **options)

    monkeypatch.setattr(packs, "Trainer", crash)
    view, which = Quiet(), spec({"optimiser.clip": [0.5, 7.0, 1.0]}, sampler="grid")
    outcome = sweep(which, tmp_path / "s", view=view)
    assert [t.state for t in outcome.trials] == ["complete", "failed", "complete"]
    assert outcome.trials[1].reason == "RuntimeError: the sky fell"
    assert view.remarks == ["pack 0: RuntimeError: the sky fell; its trials are trained one at a time"]
    assert not list((tmp_path / "s/packs").iterdir())


def test_a_worker_that_dies_takes_no_other_with_it():
    """Not even one that dies while it has nothing to do."""
    with LocalEngine("cpu", 2) as engine:
        first = engine.submit(_wait_for_a_report)
        second = engine.submit(_kill_oneself)
        with pytest.raises(WorkerLost, match="a worker process died"):
            second.result(timeout=60)
        engine.board.report(0, [])
        (worker,) = {first.result(timeout=60)}
        os.kill(worker, signal.SIGKILL)
        engine.board.report(0, [])
        third = engine.submit(_wait_for_a_report)
        try:
            assert third.result(timeout=60) != worker
        except WorkerLost:  # its end was noticed only then
            engine.board.report(0, [])
            assert engine.submit(_wait_for_a_report).result(timeout=60) != worker


def _wait_for_a_report(board, device) -> int:
    while not board.drain():
        time.sleep(0.05)
    return os.getpid()


def test_a_worker_that_hangs_does_not_outlive_a_second_interrupt():
    script = "from tests.sweeps.test_sweep import interrupt_what_hangs; interrupt_what_hangs()"
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert done.stdout.split() == ["interrupted"], done.stderr


def interrupt_what_hangs() -> None:
    try:
        with LocalEngine("cpu", 2) as engine:
            engine.submit(_stop_oneself)
            while not engine.board.drain():
                time.sleep(0.05)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("interrupted")


def _stop_oneself(board, device) -> None:
    board.report(0, [])
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill_oneself(board, device) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_hopeless_trials_are_pruned(tmp_path, sampler):
    which = spec({"optimiser.rate": "log:1e-6..4"}, pruner="median", trials=16, sampler=sampler)
    outcome = sweep(which, tmp_path / "s", pack=4)
    states = Counter(t.state for t in outcome.trials)
    assert outcome.finished
    assert states["pruned"] >= 1
    good = best(outcome.trials)[0]
    pruned = [t for t in outcome.trials if t.state == "pruned"]
    assert all(t.curve[-1] > good.value for t in pruned)


# ---- interrupted


class Signals(list):
    """A signal after so many questions."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left < 0

    def __getitem__(self, index):
        return 2


@pytest.mark.parametrize("after", [0, 2])
def test_interrupted_and_gone_on_with_it_ends_as_it_would_have(tmp_path, after):
    sweep(spec(WIDE), tmp_path / "s", received=Signals(after))
    outcome = sweep(spec(WIDE), tmp_path / "s")
    assert outcome.finished
    assert scores(outcome) == undisturbed()


class Killed(BaseException):
    """As a kill: nobody catches it."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", ["ask", "complete", "report", "_remove_pack", "_submit"])
def test_killed_anywhere_no_trial_is_lost_or_counted_twice(tmp_path, monkeypatch, place, count):
    owner = Study if hasattr(Study, place) else coordinator.Coordinator
    real, calls = getattr(owner, place), []

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) == count:
            raise Killed
        return real(self, *arguments)

    monkeypatch.setattr(owner, place, dies)
    try:
        sweep(spec(WIDE), tmp_path / "s")
    except Killed:
        assert len(calls) == count
    monkeypatch.undo()
    outcome = sweep(spec(WIDE), tmp_path / "s")
    assert outcome.finished
    assert [t.number for t in outcome.trials] == list(range(6))
    assert scores(outcome) == undisturbed()


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path):
    whole = scores(sweep(spec(), tmp_path / "s"))
    with open(tmp_path / "s/journal.log", "ab") as file:
        file.write(b'{"op_code": 4, "wor')
    assert scores(sweep(spec(trials=6), tmp_path / "s")) == whole
    assert sweep(spec(trials=7), tmp_path / "s").finished


def test_half_a_line_of_another_sweep_does_not_spoil_the_next(tmp_path):
    """Of two that share a journal one meets a full disk, and the other writes on."""
    which = spec(trials=8)
    sweep(spec(), tmp_path / "s")
    study = open_study(which, tmp_path / "s")
    with open(tmp_path / "s/journal.log", "ab") as file:
        file.write(b'{"op_code": 4, "wor')
    (trial,) = study.ask(1)
    study.complete(trial.number, 1.0)
    assert open_study(which, tmp_path / "s").trials() == study.trials()


def test_a_full_disk_leaves_no_half_line(tmp_path):
    which = spec(trials=8)
    sweep(spec(), tmp_path / "s")
    study, path = open_study(which, tmp_path / "s"), tmp_path / "s/journal.log"
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(DiskFull, match=r"journal\.log"):
            study.ask(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert len(open_study(which, tmp_path / "s").ask(1)) == 1


def test_scores_of_epochs_do_not_wait_for_the_disk_and_ends_of_trials_do(tmp_path, monkeypatch):
    study, synced, real = open_study(spec(trials=40), tmp_path / "s"), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(1) or real(handle))
    trials = study.ask(40)
    assert len(synced) == 1
    for epoch in range(1, 6):
        study.report(trials[0].number, epoch, 1.0 / epoch)
    assert len(synced) == 1
    study.complete(trials[0].number, 0.2)
    assert len(synced) == 2


def test_trials_that_have_ended_are_read_once(tmp_path, monkeypatch):
    """A live table is drawn twice a second, of thousands of trials."""
    study, read, real = open_study(spec(trials=40), tmp_path / "s"), [], Study._from_optuna
    for trial in study.ask(40)[:30]:
        study.complete(trial.number, 1.0)
    study.trials()
    monkeypatch.setattr(
        Study, "_from_optuna", lambda self, frozen: read.append(frozen.number) or real(self, frozen)
    )
    assert [t.state for t in study.trials()] == ["complete"] * 30 + ["running"] * 10
    assert read == list(range(30, 40))


def test_a_curve_does_not_rise_where_its_first_epoch_is_missing(tmp_path):
    study = Study(spec(), tmp_path, owner="a")
    study.ask(1)
    study.report(0, 2, 3.0)
    study.report(0, 4, 2.0)
    assert study.trial(0).curve == (3.0, 3.0, 3.0, 2.0)


@pytest.mark.parametrize("content", [b"not a journal\n", b'{"op_code": 99}\n', b"[]\n", b"\xff\xfe\n"])
def test_a_damaged_journal_is_a_sentence(tmp_path, content):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/journal.log").write_bytes(content)
    with pytest.raises(UserError, match="journal"):
        sweep(spec(), tmp_path / "s")


@pytest.mark.parametrize("content", ["dear diary", "dear diary\n", '{"name": "Ada"}', '{"op": 1}\n{'])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, content):
    notes = tmp_path / "notes.txt"
    notes.write_text(content)
    with pytest.raises(UserError, match=r"notes\.txt is no journal of a sweep: .*another --storage"):
        Study(spec(), tmp_path / "s", str(notes))
    assert notes.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_begun_trials_are_gone_on_with_though_the_folders_own_name_is_lost(tmp_path, content):
    """Its trials know the folder they were begun in."""
    which, mark = spec(), tmp_path / "s" / "owner.json"
    assert not sweep(which, tmp_path / "s", received=[2]).finished
    assert open_study(which, tmp_path / "s").ask(2)
    before = mark.read_bytes()
    mark.unlink() if content is None else mark.write_bytes(content)
    assert sweep(which, tmp_path / "s").finished
    assert mark.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"[]"])
def test_where_the_trials_are_is_asked_when_that_is_lost(tmp_path, content):
    which, mark, shared = spec(), tmp_path / "s" / "owner.json", str(tmp_path / "shared.log")
    assert not sweep(which, tmp_path / "s", storage=shared, received=[2]).finished
    mark.unlink() if content is None else mark.write_bytes(content)
    with pytest.raises(
        UserError, match=r"owner\.json is (missing|damaged).*give their --storage, or put it back"
    ):
        sweep(which, tmp_path / "s")
    assert sweep(which, tmp_path / "s", storage=shared).finished


def test_a_pack_whose_worker_died_goes_on(tmp_path):
    class Mortal(LocalEngine):
        deaths = 2

        def submit(self, work, *arguments):
            if self.deaths:
                self.deaths -= 1
                return super().submit(_die)
            return super().submit(work, *arguments)

    view = Quiet()
    outcome = sweep(spec(), tmp_path / "s", view=view, engine=Mortal("cpu", 1))
    assert outcome.finished
    assert sum("goes on from its last checkpoint" in r for r in view.remarks) == 2
    assert all(t.state == "complete" for t in outcome.trials)


@pytest.mark.parametrize(("after", "place"), [(2, "first-stages"), (14, "packs")])
def test_a_damaged_checkpoint_is_no_trials_fault(tmp_path, caplog, after, place):
    stage = tmp_path / "first.toml"
    stage.write_text("[stop]\nepochs = 1\n[data]\nchunk = 40\nlanes = 8\n[model]\nhidden = [5]\n")
    which = spec(overrides={"model.kind": "srnn", "model.hidden": [5, 5], "pretrain.recipe": str(stage)})
    pack = Pack(0, (0,), (which.recipe_at(which.space.draw(0, 0)),))
    with pytest.raises(packs.saving.Interrupted):
        train_pack(pack, tmp_path / "s", received=Signals(after))
    saved = list((tmp_path / "s" / place).glob("*/*.safetensors"))
    assert saved
    for path in saved:
        path.write_bytes(b"damaged")
    assert train_pack(pack, tmp_path / "s") == train_pack(pack, tmp_path / "undisturbed")
    assert "begins anew" in caplog.text


def test_a_pack_that_gets_further_each_time_may_lose_any_number_of_workers(tmp_path):
    """As on machines that are taken away for others."""

    class Shortlived:
        saved = 0

        def __init__(self, board):
            self.board = board

        def report(self, number, rows):
            self.board.report(number, rows)
            if rows[0]["epoch"] == Shortlived.saved + 2:  # earlier ones, told again, are not new
                Shortlived.saved += 1
                raise WorkerLost("a node died")
            return []

        def __getattr__(self, name):
            return getattr(self.board, name)

    class Taken(LocalEngine):
        def submit(self, work, *arguments):
            return super().submit(lambda board, *rest: work(Shortlived(board), *rest), *arguments)

    view, deaths = Quiet(), coordinator.ATTEMPTS + 1
    which = spec(trials=1, overrides={"stop.epochs": deaths + 1})
    outcome = sweep(which, tmp_path / "s", view=view, engine=Taken("cpu", 1))
    assert sum("goes on from its last checkpoint" in r for r in view.remarks) == deaths
    assert [t.state for t in outcome.trials] == ["complete"]


def _die(board, device):
    raise WorkerLost("a worker process died")


# ---- two at once


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path):
    with lock(tmp_path / "s"), pytest.raises(UserError, match="is in use by process"):
        sweep(spec(), tmp_path / "s")


def test_two_sweeps_share_one_journal_and_every_trial_is_trained_once(tmp_path):
    shared = str(tmp_path / "journal.log")
    first = Study(spec(trials=4), tmp_path / "a", shared, owner="a")
    taken = first.ask(1)
    outcome = sweep(spec(trials=4), tmp_path / "b", storage=shared)
    assert not outcome.finished
    assert [t.state for t in outcome.trials] == ["running", "complete", "complete", "complete"]
    assert [t.number for t in first.unfinished()] == [taken[0].number]
    with pytest.raises(UserError, match="another sweep"):
        sweep(spec({"optimiser.rate": "log:0.5..4"}), tmp_path / "c", storage=shared)


# ---- the winner


def test_of_a_shared_study_nobody_takes_all_trials_at_once(tmp_path, monkeypatch):
    asked, real = [], Study.ask
    monkeypatch.setattr(Study, "ask", lambda self, most: asked.append(most) or real(self, most))
    which = spec(trials=8, overrides={"stop.epochs": 1})
    assert sweep(which, tmp_path / "own").finished
    alone = asked.pop(0)
    asked.clear()
    assert sweep(which, tmp_path / "shared", storage=str(tmp_path / "shared.log")).finished
    assert alone >= 8
    assert max(asked) == 2


def test_the_winner_is_scored_on_test_once(tmp_path, monkeypatch):
    which = spec()
    with pytest.raises(UserError, match="holds no sweep"):
        score_winner(which, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    sweep(which, tmp_path / "s", received=Signals(0))
    with pytest.raises(UserError, match="have not ended"):
        score_winner(which, tmp_path / "s")
    outcome = sweep(which, tmp_path / "s")
    winner = write_winner(which, tmp_path / "s", outcome.trials)
    record, scored = score_winner(which, tmp_path / "s")
    assert scored.score == record
    first = best(outcome.trials)[0]
    assert record["trial"] == first.number
    result = run_recipe(load_recipe(winner), tmp_path / "run")[0]
    assert record["test"] == pytest.approx(result["test"]["bpc"])
    monkeypatch.setattr("deeprnn.sweeps.winner.evaluate", None)  # a second scoring would call it
    (tmp_path / "s/winner.json").unlink()  # a copy: the study's own record decides
    assert score_winner(which, tmp_path / "s")[0] == record
    assert sweep(which, tmp_path / "s").score == record


def test_no_search_goes_on_after_its_winner_was_scored(tmp_path):
    sweep(spec(trials=3), tmp_path / "s")
    score_winner(spec(trials=3), tmp_path / "s")
    with pytest.raises(UserError, match=r"scored on test, so this search is over \(3 trials\)"):
        sweep(spec(trials=4), tmp_path / "s")
    with pytest.raises(UserError, match="2 trials are fewer than the 3 that have begun"):
        sweep(spec(trials=2), tmp_path / "s")
    assert load_spec(tmp_path / "s").trials == 3


def test_a_recipe_that_is_never_to_be_scored_is_not(tmp_path):
    which = spec(overrides={"evaluation.test": False}, trials=2)
    sweep(which, tmp_path / "s")
    with pytest.raises(UserError, match=r"evaluation\.test = false"):
        score_winner(which, tmp_path / "s")


def test_of_sweeps_that_share_a_study_the_one_that_trained_the_winner_scores_it(tmp_path):
    shared, which = str(tmp_path / "journal.log"), spec(trials=2)
    sweep(which, tmp_path / "a", storage=shared)
    sweep(which, tmp_path / "b", storage=shared)
    with pytest.raises(
        UserError, match=rf"the winner, trial \d, was trained by \S+{tmp_path}/a: score it there"
    ):
        score_winner(which, tmp_path / "b")
    record, _ = score_winner(which, tmp_path / "a")  # which remembers where its trials are
    assert score_winner(which, tmp_path / "b")[0] == record


def test_a_search_never_scores_test(tmp_path, monkeypatch):
    from deeprnn.training import evaluate, loop

    seen = []
    real = evaluate.evaluation_plan
    for module in (evaluate, loop):
        monkeypatch.setattr(module, "evaluation_plan", lambda d, s, p: seen.append(s) or real(d, s, p))
    sweep(spec(), tmp_path / "s")
    assert set(seen) == {"valid"}


def test_only_the_best_trials_keep_their_parameters(tmp_path):
    outcome = sweep(spec(trials=9), tmp_path / "s")
    kept = {int(p.parent.name) for p in (tmp_path / "s").rglob("best.safetensors")}
    assert kept == {t.number for t in best(outcome.trials, coordinator.BEST_KEPT)}


# ---- the page, the store, processes


def test_the_page_holds_every_trial_and_no_address(tmp_path):
    which = spec(WIDE)
    outcome = sweep(which, tmp_path / "s")
    outcome.importances = {"optimiser.rate": 0.75}
    outcome.score = {"trial": 1, "valid": 1.5, "test": 1.6, "metric": "bpc", "scored": "today"}
    page = sweep_html(which, "<b>s</b>", outcome)
    assert "on book," in page
    assert str(text_file().parent) not in page
    assert "<b>1.6000</b> bpc" in page
    assert 'data-part="parallel"' in page
    assert 'data-part="bars"' in page
    assert "<b>s</b>" not in page
    opening = 'data-part="parallel"><script type="application/json">'
    start = page.index(opening) + len(opening)
    chart = json.loads(page[start : page.index("</script>", start)])
    assert [axis["name"] for axis in chart["axes"]] == [*WIDE, "valid"]
    assert len(chart["lines"]) == 6
    assert all(0 <= place <= 1 for line in chart["lines"] for place in line["places"])
    assert not [word for word in page.split() if word.startswith(("src=http", "href=http"))]


@pytest.mark.parametrize(
    ("values", "top"),
    [
        ([5.0, 6, 7], 7),
        ([5.0, 5.0], 5),
        ([5.0] * 9 + [1e9], 1e9),
        ([5.0] + [6.0] * 17 + [7.0, 1e9], 6),
        ([3.0], 3),
    ],
)
def test_a_trial_that_went_astray_does_not_press_the_others_together(values, top):
    assert top_of(values) == top


class Remembering(MemoryFileSystem):
    """As object stores are: no renames, and a listing stays what it was until it is asked for anew."""

    protocol = "remembering"
    listings: dict[str, Any] = {}  # noqa: RUF012

    def ls(self, path, detail=True, **options):
        return self.listings.setdefault(path, super().ls(path, detail=detail, **options))

    def invalidate_cache(self, path=None):
        self.listings.clear()


@pytest.mark.parametrize("place", ["file://{}", "remembering://{}"])
def test_a_pack_goes_on_elsewhere_from_what_the_store_has(tmp_path, place):
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    which = spec(overrides={"stop.epochs": 4})
    pack = Pack(0, (0, 1), tuple(which.recipe_at(which.space.draw(0, n)) for n in (0, 1)))
    whole = train_pack(pack, tmp_path / "whole")
    store = Store(place.format(tmp_path / "store"))
    store.check()
    epochs = []

    def stop_after_two(rows):
        epochs.append(rows[0]["epoch"])
        return ()

    class Over(list):
        def __bool__(self):
            return len(epochs) >= 2

        def __getitem__(self, index):
            return 15

    with pytest.raises(packs.saving.Interrupted):
        train_pack(pack, tmp_path / "here", report=stop_after_two, received=Over(), store=store)
    again = []
    results = train_pack(
        pack, tmp_path / "there", report=lambda rows: again.append(rows[0]["epoch"]) or (), store=store
    )
    assert again == [1, 2, 3, 4], "those of the first attempt are told again: who heard them may be gone"
    assert results == whole
    lines = (tmp_path / "there" / pack.homes[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4], "and trained once"


def test_scores_that_were_told_but_not_written_down_are_told_again(tmp_path, monkeypatch):
    """A coordinator that dies between a worker's epoch and the journal's line: the curves are as undisturbed."""
    which = spec(trials=2, overrides={"stop.epochs": 4})
    whole = sweep(which, tmp_path / "whole")
    heard = []

    def dies_at_the_second(study, number, epoch, value):
        heard.append(epoch)
        if len(heard) > 1:
            raise RuntimeError("dies")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Study, "report", dies_at_the_second)
        with pytest.raises(RuntimeError, match="dies"):
            sweep(which, tmp_path / "s")
    again = sweep(which, tmp_path / "s")
    assert [t.curve for t in again.trials] == [t.curve for t in whole.trials]
    assert all(len(t.curve) == 4 for t in again.trials)


class Elsewhere(LocalEngine):
    """A machine whose folders are not the coordinator's."""

    root: str

    def submit(self, work, *arguments):
        pack, _, *rest = arguments
        return super().submit(work, pack, self.root, *rest)


def test_killed_before_a_trials_files_were_brought_here_it_still_has_them(tmp_path, monkeypatch):
    def dies(self, place):
        raise Killed

    Elsewhere.root = str(tmp_path / "there")
    which, store = spec(trials=6), f"file://{tmp_path}/store"
    monkeypatch.setattr(coordinator.Coordinator, "_remove_pack", dies)
    with pytest.raises(Killed):
        sweep(which, tmp_path / "s", engine=Elsewhere("cpu", 1), store=store)
    monkeypatch.undo()
    outcome = sweep(which, tmp_path / "s", engine=Elsewhere("cpu", 1), store=store)
    assert outcome.finished
    assert score_winner(which, tmp_path / "s")[0]["trial"] == best(outcome.trials)[0].number
    assert not [
        path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name != ".checked"
    ]


def test_a_store_sees_what_another_machine_wrote_since(tmp_path):
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    store = Store("remembering://shared")
    for count, name in enumerate(("last.safetensors", "last.json"), 1):
        store.fs.pipe_file(f"{store.base}/packs/00000/{name}", b"{}")
        store.download("packs/00000", tmp_path / str(count))
        assert len(list((tmp_path / str(count)).iterdir())) == count


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "file:///proc/nowhere"])
def test_a_store_that_cannot_be_used_is_a_sentence(tmp_path, url):
    with pytest.raises(UserError, match="--store"):
        sweep(spec(), tmp_path / "s", store=url)


def test_without_optuna_packs_still_train():
    code = """
import sys
for name in ("optuna", "ray", "rich", "tyro", "symusic", "fsspec"):
    sys.modules[name] = None
import deeprnn.sweeps.pack, deeprnn.sweeps.space, deeprnn.sweeps.spec
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_processes_of_their_own_train_the_same(tmp_path):
    whole = scores(sweep(spec(trials=4), tmp_path / "a", pack=2))
    outcome = sweep(spec(trials=4), tmp_path / "b", pack=2, engine=LocalEngine("cpu", 2))
    assert scores(outcome) == pytest.approx(whole)


def test_a_first_stage_is_trained_once_for_all_trials_of_its_shape(tmp_path):
    base = {"model.kind": "srnn", "model.hidden": [5, 5], "stop.epochs": 1}
    stage = tmp_path / "first.toml"
    stage.write_text("[stop]\nepochs = 1\n[data]\nchunk = 40\nlanes = 8\n[model]\nhidden = [5]\n")
    which = spec(overrides={**base, "pretrain.recipe": str(stage)}, trials=3)
    outcome = sweep(which, tmp_path / "s", pack=2)
    assert [t.state for t in outcome.trials] == ["complete"] * 3
    assert len(list((tmp_path / "s/first-stages").iterdir())) == 1
