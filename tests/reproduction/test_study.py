"""A study from plan to picture on toy data: resumed, tampered with, by two processes, with runs missing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model.structure import dissect
from deeprnn.reproduction.cells import model_spec
from deeprnn.reproduction.entries import read_ledger
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.plan import Job, JobPlan, find_member
from deeprnn.reproduction.run import run_plan
from deeprnn.reproduction.runner import Settings
from deeprnn.reproduction.study import analysis, dynamic, figure, goals
from deeprnn.reproduction.study import run as study_run
from deeprnn.reproduction.study.analysis import results
from deeprnn.reproduction.study.figure import study_figure
from deeprnn.reproduction.study.jobs import Runs, chosen, study_plan
from deeprnn.reproduction.study.plan_file import Goal, packaged_studies, read_study, recipes_of
from deeprnn.reproduction.study.report import text
from deeprnn.reproduction.study.run import describe_study, read_runs, run_study
from deeprnn.runs.folder import Run
from deeprnn.runs.locking import lock
from deeprnn.training import loading
from deeprnn.training.dynamic import dynamic_evaluation
from deeprnn.training.members import members_of
from deeprnn.training.recipe import override
from tests.reproduction.toys import write_study


@pytest.fixture
def toy(tmp_path: Path):
    """The study's plan, settings and ledger."""
    loading.forget_data()
    return read_study(str(write_study(tmp_path))), Settings(root=tmp_path / "runs"), tmp_path / "ledger"


def quiet(text: str) -> None:
    pass


def test_from_plan_to_picture_in_pieces(toy, monkeypatch):
    study, settings, ledger = toy
    plan, undecided = study_plan(study, read_runs(ledger), settings.root)
    # A population of both rates for each decay; DOT(S) after DT(S), which is its first stage, at each rate by itself.
    assert undecided == 4
    by = {}
    for job in plan.jobs:
        by.setdefault(job.recipe.model.kind, []).append(job)
    assert {kind: len(jobs) for kind, jobs in by.items()} == {"rnn": 1, "long": 1, "dts": 1, "dots": 2}
    assert all(job.needs in by["dts"] for job in by["dots"])
    assert all(not job.recipe.evaluation.test for job in plan.jobs)
    assert by["long"][0].recipe.stop.epochs == 2
    expected = describe_study(study, settings, ledger)
    assert "2 trials each" in expected
    assert "in all" in expected
    assert not ledger.exists()

    # Interrupted: a signal after a job that has finished.
    real = study_run.run_plan

    def interrupted(plan, settings, say, entered):
        first = [j for j in plan.jobs if j.needs is None][:1] or plan.jobs[:1]
        outcome = real(replace(plan, jobs=first), settings, say, entered)
        return replace(outcome, signal=signal.SIGTERM)

    monkeypatch.setattr(study_run, "run_plan", interrupted)
    assert run_study(study, settings, ledger, quiet).status == 128 + signal.SIGTERM
    assert len(read_ledger(ledger / "runs")) == 2
    told = text(results(study, read_runs(ledger)))
    assert "not answered: toy, main: 8 of 8 runs are missing" in told
    assert "Answered yes: 0 of 1" in told
    monkeypatch.setattr(study_run, "run_plan", real)
    assert run_study(study, settings, ledger, quiet).status == 0

    runs = read_runs(ledger)
    scored = [e for e in runs.entries.values() if e.has_test]
    assert len(scored) == 4 * 2  # the new seeds of four contenders, and nothing else, have a test score
    assert {e.seed for e in scored} == {11, 12}
    for entry in (e for e in runs.entries.values() if not e.has_test):
        assert "test" not in entry.raw["result"]
    for contender, data in study.entrants():
        trial, cost = chosen(study, contender, data, runs)
        costs = [e.value("valid") for e in runs.entries.values()
                 if e.seed == 1 and e.model == contender.name and not e.has_test]  # fmt: skip
        assert cost == min(costs)
        assert {**trial} in study.family(contender).trials
    again = run_study(study, settings, ledger, lambda line: pytest.fail(line))
    assert again.finished == []
    found = results(study, runs)
    (answer,) = found.answers
    assert (answer.tested.contender.tested, answer.control.contender.tested) == (True, False)
    assert answer.p == answer.test.p  # one question: nothing to correct
    assert len(found.pairs) == 1
    assert not found.open
    assert study_figure(found).startswith(b"\x89PNG")


@pytest.mark.slow
def test_processes_side_by_side_come_to_what_one_comes_to(toy, tmp_path, capfd):
    study, settings, ledger = toy
    assert run_study(study, settings, ledger, quiet).status == 0
    several = replace(settings, root=tmp_path / "several", jobs=2)
    assert run_study(study, several, tmp_path / "ledger-of-several", quiet).status == 0
    told = capfd.readouterr().out  # by the processes themselves
    assert re.search(r"^\[ +\d+\.\d s\] toy/rnn-seeds.*: finished", told, re.MULTILINE)
    alone, beside = (read_runs(place).entries for place in (ledger, tmp_path / "ledger-of-several"))
    assert {k: e.value("valid") for k, e in beside.items()} == {k: e.value("valid") for k, e in alone.items()}


@pytest.mark.slow
def test_the_budget_reaches_processes(toy, tmp_path):
    """Two endless jobs are saved when it is over; they are scored only where that is asked for."""
    study, settings, _ = toy
    endless = {"stop.epochs": 0, "stop.patience": 0, "schedule.name": "constant"}
    recipes = [
        override(job.recipe, endless) for job in study_plan(study, Runs({}), settings.root)[0].jobs[:2]
    ]
    for recorded in (True, False):
        place = tmp_path / str(recorded)
        now = replace(settings, jobs=2, budget=0.3, root=place, ledger=place / "l", record_cut_off=recorded)
        jobs = [Job(f"toy/{recipe.model.kind}", recipe) for recipe in recipes]
        outcome = run_plan(JobPlan(jobs), now, quiet)
        assert (outcome.over, outcome.signal, outcome.failed) == (True, 0, {})
        assert sorted(outcome.unfinished) == sorted(job.name for job in jobs)
        assert len(list(place.glob("*/last.json"))) == 2
        stopped = [e.raw["stopped"] for e in read_ledger(now.ledger)]
        assert stopped == ["cut off when 0.3 minutes had passed"] * sum(
            len(members_of(recipe)) for recipe in recipes if recorded
        )


def test_a_changed_plan_is_refused_and_so_is_a_second_process(toy, capsys):
    study, settings, ledger = toy
    with lock(ledger), pytest.raises(UserError, match=r"ledger"):
        run_study(study, settings, ledger, quiet)
    assert not (ledger / "started.json").exists()
    settings = replace(settings, budget=1e-9)
    assert run_study(study, settings, ledger, quiet).over
    began = json.loads((ledger / "started.json").read_text())
    assert began["plan"] == study.path.read_text()
    study.path.write_text(study.path.read_text().replace("[11, 12]", "[11, 12, 13]"))
    with pytest.raises(UserError, match="changed after the first run"):
        run_study(read_study(str(study.path)), settings, ledger, quiet)
    assert main(["report", "--study", str(study.path), "--ledger", str(ledger)]) == 2
    assert main(["reproduce", "--study", str(study.path), "--ledger", str(ledger), "--plan"]) == 2
    assert "changed after the first run" in capsys.readouterr().err
    (ledger / "started.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        run_study(study, settings, ledger, quiet)


def test_a_recipe_that_was_changed_is_another_study(toy, monkeypatch):
    study, _, _ = toy
    before = study.digest
    from deeprnn.reproduction.study import plan_file
    from deeprnn.training.recipe import load_recipe, override

    monkeypatch.setattr(
        plan_file, "load_recipe", lambda name: override(load_recipe(name), {"optimiser.clip": 0.5})
    )
    assert study.digest != before


def test_a_plan_is_committed_before_its_first_run(toy, monkeypatch):
    study, settings, ledger = toy
    folder = study.path.parent

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)

    git("init", "-q")
    part = replace(settings, budget=1e-9)
    with pytest.raises(UserError, match="commit the plan before its first run"):
        run_study(study, part, ledger, quiet)
    assert not (ledger / "started.json").exists()
    git("add", study.path.name)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    assert run_study(study, part, ledger, quiet).over


def test_the_code_of_a_cell_of_ones_own_is_part_of_the_plan(toy):
    study, _, _ = toy
    cell = study.path.parent / "counted_cells.py"
    cell.write_text("import deeprnn\n\n\nclass Paced(deeprnn.Cell):\n    pass\n")
    study.path.write_text(
        study.path.read_text().replace(
            '"model.hidden" = 4', f'"model.hidden" = 4\n"model.cell" = "{cell}:Paced"'
        )
    )
    before = read_study(str(study.path)).digest
    assert read_study(str(study.path)).digest == before
    cell.write_text(cell.read_text() + "\nSLOPE = 2\n")
    assert read_study(str(study.path)).digest != before


def test_nothing_is_scored_when_the_time_ends_a_final_run(toy, monkeypatch):
    """A run that the budget cuts off is saved, and enters no ledger with a test score."""
    study, settings, ledger = toy
    assert run_study(study, replace(settings, budget=1e-9), ledger, quiet).unfinished
    assert not list((ledger / "runs").glob("*.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"3", b'["x"]', b'[{"x": 1}]', b"\xff"])
def test_a_damaged_note_of_what_diverged_is_a_sentence(toy, content):
    study, settings, ledger = toy
    ledger.mkdir()
    (ledger / "diverged.json").write_bytes(content)
    for call in (lambda: run_study(study, settings, ledger, quiet), lambda: read_runs(ledger)):
        with pytest.raises(UserError, match=r"diverged\.json cannot be read .*or remove it"):
            call()


# ---- what diverges, by the rule that the plan was made with


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of three seeds with nothing left to run, two of which a contender needs: the plan and its runs."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_study(folder)
    path.write_text(path.read_text().replace("[11, 12]", "[11, 12, 13]"))
    loading.forget_data()
    study = read_study(str(path))
    assert run_study(study, Settings(root=folder / "runs"), folder / "ledger", quiet).status == 0
    return study, read_runs(folder / "ledger")


def without(runs: Runs, gone) -> Runs:
    """The same with some runs ended by divergence in place of a result."""
    lost = {recipe for recipe, entry in runs.entries.items() if gone(entry)}
    return Runs({r: e for r, e in runs.entries.items() if r not in lost}, frozenset(lost))


def test_a_final_seed_that_diverges_is_left_out_with_its_count_shown(finished):
    study, runs = finished
    deep = without(runs, lambda e: e.has_test and e.seed == 12 and e.model in ("dts", "dots"))
    found = results(study, deep)
    (answer,) = found.answers
    assert not found.open
    assert [e.seed for e in answer.tested.entries] == [11, 13]
    assert not study_plan(study, deep, Path("nowhere"))[0].jobs
    told = text(found)
    assert f"{answer.tested.contender.label} (1 of 3 seeds diverged) against" in told
    assert "2 seeds, 1 of 3 seeds diverged (" in told
    assert found.to_dict()["scores"][2]["diverged"] == 1
    assert study_figure(found).startswith(b"\x89PNG")


def marked(entry, **changes):
    return replace(entry, raw={**entry.raw, **changes})


def test_runs_of_uncommitted_code_are_marked_wherever_a_study_shows_them(finished, monkeypatch):
    """In the answers, the scores, the table of goals and the figure; runs of the search as well as seeds."""
    study, runs = finished
    assert "†" not in text(results(study, runs))
    answer = results(study, runs).answers[0]
    name = answer.tested.contender.name
    dirty = {
        recipe: marked(e, dirty=True) if e.model == name and e.seed in (1, 12) else e
        for recipe, e in runs.entries.items()
    }
    found = results(study, Runs(dirty))
    told = text(found)
    label = answer.tested.contender.label
    assert f"{label}† against" in told
    assert any(f"{label}: " in line and "† nats/frame" in line for line in told.splitlines())
    code = "code with changes in no commit"
    remark = f"† toy, main, {label}: 1 of 3 {code}; of the search, 2 of 2 {code}"
    assert remark in told
    score = next(s for s in found.to_dict()["scores"] if s["contender"] == name)
    assert len(score["marks"]) == 2
    goal = Goal("main", "toy", "9.9 nobody", (1.0,))
    monkeypatch.setattr(goals, "read_runs", lambda ledger: Runs(dirty))
    table = goals.table(replace(study, goals=(goal,)), Path("nowhere"))
    assert f"| {label}† " in table
    assert remark in table
    drawn = []
    monkeypatch.setattr(figure, "png_bytes", lambda f: drawn.append(f) or b"")
    study_figure(found)
    (axes,) = drawn[0].axes
    assert any("†" in t.get_text() for t in axes.get_yticklabels())
    assert remark in " ".join(axes.get_xlabel().split())


def test_runs_by_other_data_of_the_same_name_are_refused(toy):
    study, settings, ledger = toy
    assert run_study(study, replace(settings, only=("main/toy/rnn",)), ledger, quiet).status == 0
    (path, *_) = [e.path for e in read_ledger(ledger / "runs") if e.has_test]
    raw = json.loads(path.read_text())
    assert len(raw["data"]["fingerprint"]) == 16
    path.write_text(json.dumps({**raw, "data": {**raw["data"], "fingerprint": "0" * 16}}))
    with pytest.raises(UserError, match="were trained on different data, both named"):
        read_runs(ledger)


def test_a_contender_with_too_few_seeds_or_no_trial_is_lost_and_cannot_win(finished):
    study, runs = finished
    winner = results(study, runs).answers[0].tested.contender.name
    (other,) = {"dts", "dots"} - {winner}
    few = without(runs, lambda e: e.model == winner and e.has_test and e.seed != 11)
    none = without(runs, lambda e: e.model == winner)
    for gone, words in (
        (few, "2 of 3 seeds diverged: lost, fewer than 2"),
        (none, "lost: every trial diverged"),
    ):
        found = results(study, gone)
        assert [a.tested.contender.name for a in found.answers] == [other]
        assert [s.lost for s in found.scores] == [s.contender.name == winner for s in found.scores]
        assert not found.open
        assert words in text(found)
        assert len(found.pairs) == (winner != "dots")
        assert not study_plan(study, gone, Path("nowhere"))[0].jobs
    void = results(study, without(runs, lambda e: e.model in ("dts", "dots")))
    assert not void.answers
    assert void.void == ("toy, main: every deep contender is lost",)
    assert "not answered: toy, main: every deep contender is lost" in text(void)
    assert "Answered yes: 0 of 1" in text(void)


def test_the_report_tells_how_sure_a_choice_was(finished):
    study, runs = finished
    for score in results(study, runs).scores:
        costs = sorted(e.value("valid") for e in runs.entries.values()
                       if not e.has_test and e.model == score.contender.name and e.seed == 1)  # fmt: skip
        assert score.ahead == pytest.approx(costs[1] - costs[0])
        assert score.edges == ("optimiser.rate",), "one of two rates; a single decay is no grid"
    told = text(results(study, runs))
    assert "ahead of the runner-up on validation; at the edge of its grid: rate)" in told
    assert analysis._edges({"x": (0.0, 0.1, 0.2)}, {"x": 0.0}) == (), "nothing lies below zero"
    assert analysis._edges({"x": (0.0, 0.1, 0.2)}, {"x": 0.1}) == ()


@pytest.mark.slow
def test_a_trial_that_diverges_is_noted_and_not_waited_for(toy):
    study, settings, ledger = toy
    study.path.write_text(study.path.read_text().replace("[0.01, 0.03]", "[0.01, 1e30]"))
    study = read_study(str(study.path))
    outcome = run_study(study, settings, ledger, quiet)
    assert outcome.status == 0, outcome.failed
    assert len(json.loads((ledger / "diverged.json").read_text())) > 0
    found = results(study, read_runs(ledger))
    assert not found.open
    assert all(score.trial["optimiser.rate"] == 0.01 for score in found.scores)


@pytest.mark.slow
def test_the_command_line(toy, tmp_path, capsys):
    study, settings, ledger = toy
    words = ["--study", str(study.path), "--ledger", str(ledger)]
    assert main(["reproduce", *words, "--runs", str(settings.root), "--device", "cpu"]) == 0
    assert "Does depth help the toy?" in capsys.readouterr().out
    assert main(["report", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["scores"]) == 4
    assert all(len(score["values"]) == 2 for score in told["scores"])
    assert main(["report", *words, "--figures", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "study-toy.png").stat().st_size > 1000
    assert main(["reproduce", *words, "--seeds", "3"]) == 2
    assert "its plan says what is run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds = [11", "seeds = [1, 11", "must be new"),
        ('label = "RNN"', 'labl = "RNN"', "labl"),
        ('family = "main"\nlabel = "RNN"', 'family = "other"\nlabel = "RNN"', "family"),
        ('"stop.epochs" = 1', '"stop.epoch" = 2', "stop.epoch"),
        ("main/dots", "main/dot", "main/dot"),
        ("least_seeds = 2", "least_seeds = 3", "from 2 to the 2 seeds"),
        ('question = "Does depth help the toy?"', "", "question is missing"),
    ],
)
def test_a_plan_that_says_nonsense_is_refused(toy, old, new, said):
    path = toy[0].path
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=said):
        read_study(str(path))


# ---- slices, and a table of goals


def test_words_of_only_name_a_slice(toy):
    study, settings, ledger = toy
    names = lambda *only: [c.name for c, _ in study.entrants(only)]  # noqa: E731
    assert names() == names("toy") == names("main") == names("main/toy") == ["rnn", "long", "dts", "dots"]
    assert names("main/toy/d*") == ["dts", "dots"]
    assert names("main/toy/rnn", "main/*/long") == ["rnn", "long"]
    with pytest.raises(UserError, match="did you mean 'main'"):
        study_plan(study, read_runs(ledger), settings.root, ["mian/toy"])
    told = describe_study(study, replace(settings, only=("main/toy/dts",)), ledger)
    assert "  main/toy  " in told
    assert "search 1 populations" in told


GOALS = """
[[goal]]
family = "main"
data = "toy"
title = "Toy, static"
known = "9.9 nobody"
goal = [1000.0, 0.5]

[[goal]]
family = "main"
data = "toy"
title = "Toy, dynamic"
known = "9.9 nobody"
goal = [0.1]
dynamic = true
"""


def test_words_of_only_are_run_one_after_another(toy):
    """Time that ends leaves whole rows: seeds of the first come before the search of the second."""
    study, settings, ledger = toy
    for words in (("main/toy/rnn", "main/toy/long"), ("main/toy/dts", "main/toy/dots")):
        finished = run_study(study, replace(settings, only=words), ledger, quiet).finished
        first, second = (
            [name for name in finished if f"/{word.rpartition('/')[2]}-" in name] for word in words
        )
        assert len(first) + len(second) == len(finished)
        assert finished == [*first, *second]
        assert any("seeds" in name for name in first)


def test_goals_are_shown_beside_what_is_known(toy, monkeypatch):
    """Not run, in part, whole: a goal that is missed stays missed."""
    study, settings, ledger = toy
    study.path.write_text(study.path.read_text().replace("[0.01, 0.03]", "[0.01]") + GOALS)
    study = read_study(str(study.path))
    told = goals.table(study, ledger)
    assert "| Toy, static | 9.9 nobody | ≤ 1000, then ≤ 0.5 | not run | not run |  |  |" in told
    assert "Nothing of this plan has been run yet" in told
    monkeypatch.setattr(dynamic, "RATES", (0.01, 1e30))
    part = replace(settings, only=("main/toy/rnn",))
    assert run_study(study, part, ledger, quiet).status == 0
    told = goals.table(study, ledger)
    assert "1 of 2 trials, 2 of 4 seeds | not run |" in told
    assert "0 of 1 rows are whole, by 3 runs. Open: toy, main: 6 of 8 runs are missing." in told
    assert len(dynamic.read_dynamic(ledger)) == 2, "one contender has its seeds"
    assert run_study(study, settings, ledger, quiet).status == 0
    told = goals.table(study, ledger)
    static, moving = (line.split(" | ") for line in told.splitlines()[2:4])
    assert static[5] == "≤ 1000"
    assert moving[5] == "no"
    assert "(by song " in static[3]
    runs, rows = read_runs(ledger), dynamic.read_dynamic(ledger)
    finals = [e for e in runs.entries.values() if e.has_test]
    assert rows.keys() == {e.path.name for e in finals}
    assert {row["rate"] for row in rows.values()} == {0.01}, "validation chose it"
    name, kept = next(iter(rows.items()))
    (entry,) = [e for e in finals if e.path.name == name]
    model = Run(find_member(settings.root, identity(entry.recipe), entry.seed)).model()
    again = dynamic_evaluation(
        model, loading.load_data_once(entry.recipe.data), "test", rate=0.01, chunk=entry.recipe.data.chunk
    )
    assert kept["test"] == again
    before = (ledger / dynamic.FILE).read_text()
    assert run_study(study, settings, ledger, quiet).finished == []
    assert (ledger / dynamic.FILE).read_text() == before, "scored once"


def test_a_goal_goes_by_the_twin_that_validation_prefers(finished):
    """Whatever test says, static and dynamic."""
    study, runs = finished
    goal = replace(read_study("beyond").goals[0], family="main", data="toy", goal=(2.0, 1.0))
    shallow, deep = (replace(s, contender=replace(s.contender, label=name), entries=s.entries[:1])
                     for s, name in zip(results(study, runs).scores[1:3], ("A", "B"), strict=True))  # fmt: skip
    twins = [goals.Twin(shallow, 3.0, [1.5, 1.5]), goals.Twin(deep, 2.9, [1.9, 1.9])]
    assert goals._reached(goal, twins) == "≤ 2"
    assert goals._reached(goal, [twins[0], twins[1]._replace(test=[2.1])]) == "no"
    moving = replace(goal, dynamic=True)
    a, b = shallow.entries[0], deep.entries[0]
    key = "nats_per_frame"
    rows = {a.path.name: {"valid": 2.0, "test": {key: 9.0}}, b.path.name: {"valid": 3.0, "test": {key: 8.0}}}
    sides = [replace(s, wanted=1, least=1) for s in (shallow, deep)]
    twin = goals._twin(sides, moving, rows)
    assert (twin.score.contender.label, twin.test) == ("A", [9.0]), "chosen by dynamic validation"
    assert goals._twin(sides, moving, {a.path.name: rows[a.path.name]}) is None, "one is not scored yet"


# ---- the plans that come with the package


@pytest.mark.parametrize("name", packaged_studies())
def test_packaged_plans_are_whole_and_fair(name):
    study = read_study(name)
    for contender, data in study.entrants():
        family = study.family(contender)
        for trial in family.trials[-1:]:
            recipe, stage = recipes_of(study, contender, data, trial)
            final, _ = recipes_of(study, contender, data, trial, final=True)
            assert (recipe.evaluation.test, final.evaluation.test) == (False, True)
            assert stage is None or not stage.evaluation.test
            assert recipe.optimiser.nonfinite == "skip"
            if not data.startswith("ptb"):
                assert recipe.data.order == "own"


@pytest.mark.parametrize("name", packaged_studies())
def test_contenders_are_trained_alike_but_for_what_their_plan_names(name):
    """What a recipe brings along, such as a dropout that helped one cell, would decide a comparison in silence."""
    study = read_study(name)
    for family, data in ((f, data) for f in study.families for data in f.data):
        contenders = [c for c in study.contenders if c.family == family.name]
        shared = recipes_of(study, contenders[0], data, family.trials[-1])[0]
        named = {"model", "stop.epochs", "pretrain.recipe", "init.rectifier_bias"}
        named |= {field for c in contenders for field in (*c.settings, *c.by_data.get(data, {}))}
        for contender in contenders:
            for recipe in filter(None, recipes_of(study, contender, data, family.trials[-1])):
                assert _unlike(shared, recipe) <= named, (contender.name, data)
            epochs = contender.length * shared.stop.epochs / contenders[0].length
            assert recipes_of(study, contender, data, family.trials[-1])[0].stop.epochs == epochs


def _unlike(one, other):
    """Fields of training in which two recipes differ, part.field."""
    plain, theirs = asdict(one), asdict(other)
    return {
        f"{part}.{field}" if isinstance(values, dict) else part
        for part, values in plain.items()
        if part != "model"
        for field in (values if isinstance(values, dict) else (part,))
        if (values[field] if isinstance(values, dict) else values)
        != (theirs[part][field] if isinstance(values, dict) else theirs[part])
    }


def test_every_row_beyond_the_paper_has_twins_of_the_same_parameters():
    study = read_study("beyond")
    counts: dict[tuple[str, str], list[int]] = {}
    for contender, data in study.entrants():
        recipe, stage = recipes_of(study, contender, data, study.family(contender).trials[0])
        assert stage is None
        counts.setdefault((contender.family, data), []).append(dissect(model_spec(recipe)).parameters)
    assert counts.keys() == {(goal.family, goal.data) for goal in study.goals}
    for row in counts.values():
        assert max(row) == pytest.approx(min(row), rel=0.01)
    assert max(counts["char", "ptb-char"]) <= 14e6
    assert max(counts["word", "ptb-word"]) <= 24e6


def test_wide_models_train_one_by_one_and_small_ones_in_lockstep():
    """Two whole-card models in one launch take longer than one after the other."""
    for name, row, members in (("beyond", "word/ptb-word/lstm", 1), ("depth", "music/jsb/dts", 3)):
        jobs = study_plan(read_study(name), Runs({}), Path("nowhere"), [row])[0].jobs
        assert {len(members_of(job.recipe)) for job in jobs} == {members}


def test_the_matched_rnn_has_the_parameters_of_the_largest_deep_model():
    study = read_study("depth")
    counts = {}
    for contender, data in study.entrants():
        recipe, _ = recipes_of(study, contender, data, study.family(contender).trials[0])
        counts[contender.family, contender.name, data] = dissect(model_spec(recipe)).parameters
    for family in study.families:
        deep = [c.name for c in study.contenders if c.family == family.name and c.tested]
        matched = "rnn-matched-dropout" if family.name == "dropout" else "rnn-matched"
        for data in family.data:
            largest = max(counts[family.name, name, data] for name in deep)
            assert counts[family.name, matched, data] == pytest.approx(largest, rel=0.01)
