"""The plan's graph, and toy reproductions: what is done is skipped, what is cut off goes on, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.reproduction import plan as planning
from deeprnn.reproduction import runner as running
from deeprnn.reproduction import tables
from deeprnn.reproduction.entries import groups, read_ledger, record
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.job import Place, run_job
from deeprnn.reproduction.kernels import Loop
from deeprnn.reproduction.plan import Job, cells_named, changed, make_plan, recipe_for
from deeprnn.reproduction.run import reproduce
from deeprnn.reproduction.runner import Outcome, Runner, Settings
from deeprnn.reproduction.times import cpu_update, estimate, makespan, ordered
from deeprnn.runs import checkpoint, ledger
from deeprnn.runs.folder import Run
from deeprnn.training.recipe import load_recipe, override, packaged
from tests.reproduction.ledger import entry, recipe, write
from tests.reproduction.toys import TINY, made_up_songs, small_songs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def songs() -> Iterator[None]:
    """A made-up `jsb` in place of the benchmark set."""
    with made_up_songs():
        yield


def settings(folder: Path, *only: str, **more) -> Settings:
    return Settings(
        only=only, seeds=2, overrides=TINY, root=folder / "runs", ledger=folder / "ledger", **more
    )


def by_name(plan: planning.JobPlan) -> dict[str, Job]:
    names = [job.name for job in plan.jobs]
    assert len(set(names)) == len(names)
    return dict(zip(names, plan.jobs, strict=True))


# ---- the plan


def test_all_23_cells_are_wanted_and_have_recipes():
    names = cells_named()
    assert len(names) == 23
    for name in cells_named(extras=True):
        recipe = recipe_for(name)
        assert f"{recipe.data.name}/{recipe.model.kind}" == name
    assert sum(n.startswith("extra/") for n in packaged()) == len(cells_named(extras=True)) - 23


def test_extra_models_train_as_the_paper_s_do():
    for name in (n for n in cells_named(extras=True) if n not in cells_named()):
        extra, like = recipe_for(name), recipe_for(f"{name.partition('/')[0]}/dts")
        for part in ("data", "init", "optimiser", "schedule", "regulariser", "stop"):
            assert getattr(extra, part) == getattr(like, part), (
                f"{name}: [{part}] differs from the DT(S)-RNN's"
            )


def own_loop(monkeypatch: pytest.MonkeyPatch, jobs: Sequence[Job], **loops: Loop) -> None:
    """Let jobs go through time as is said by their names, in place of what the planner finds."""
    known = {id(job.recipe): loops[job.name.partition("/")[2].replace("-", "_")] for job in jobs}
    monkeypatch.setattr(Job, "loop", property(lambda self: known[id(self.recipe)]))


NARROW, WIDE = Loop(2.5e-6, None, 1 / 7), Loop(3.3e-6, None, 0.99)
SMALL, WHOLE = Loop(4.5e-5, "it has no persistent kernel", 0.0), Loop(1e-4, None, 1.0)


@pytest.mark.parametrize("loop", [SMALL, WHOLE])
def test_what_wants_the_whole_card_has_it_to_itself(loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = make_plan(["jsb/dots-star", "jsb/rnn", "musedata/dots-star"], [], tmp_path)
    star, shallow, other = plan.jobs
    own_loop(monkeypatch, plan.jobs, rnn=NARROW, dots_star=loop)
    assert [job.alone for job in plan.jobs] == [True, False, True]
    cases = [("cuda", star, []), ("cuda:1", star, []), ("cpu", star, [shallow, other])]
    for device, busy, allowed in [*cases, ("cuda", shallow, []), ("cpu", shallow, [star, other])]:
        runner = Runner(Settings(device=device), plan, print, lambda: None, [], Outcome())
        runner.waiting.remove(busy)
        runner.running[Future()] = busy
        assert _started(runner) == allowed
    runner = Runner(Settings(device="cuda"), plan, print, lambda: None, [], Outcome())
    assert runner._ready() is not None, "nothing runs: anything may begin"


def test_narrow_models_come_first_and_two_wide_ones_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = make_plan(
        [f"{data}/{kind}" for data in paper.INPUTS for kind in ("rnn", "dts")], [], tmp_path
    ).jobs
    own_loop(monkeypatch, jobs, rnn=NARROW, dts=WIDE)
    runner = Runner(Settings(device="cuda"), planning.JobPlan(jobs), print, lambda: None, [], Outcome())
    kinds = []
    while job := runner._ready():
        kinds.append(job.recipe.model.kind)
        runner.waiting.remove(job)
        runner.running[Future()] = job
    assert kinds == ["rnn"] * 5 + ["dts"] * 2
    runner.running = {f: j for f, j in runner.running.items() if j.wide}
    assert len(_started(runner)) == 3, "with no narrow one beside them wide ones may be more"
    free = Runner(Settings(device="cpu"), planning.JobPlan(jobs), print, lambda: None, [], Outcome())
    assert free._ready() is jobs[0], "on a CPU there is nothing to share"


def test_every_cell_of_the_paper_has_persistent_kernels(tmp_path: Path):
    for job in make_plan(cells_named(extras=True), [], tmp_path, seeds=1).jobs:
        assert job.loop is not None, job.name
        assert job.loop.small_kernels is None, job.name
        assert job.wide == (job.recipe.data.lanes > 1), job.name
    large = ["model.hidden=1200", "model.intermediate=1200"]
    hidden = make_plan(["jsb/dts"], [], tmp_path, seeds=1, overrides=large).jobs
    assert hidden[0].loop is not None
    assert hidden[0].loop.share == 1.0, "these weights need all processors"


def _started(runner: Runner) -> list:
    """The jobs that may begin, each beside those that run now."""
    ready = []
    while job := runner._ready():
        runner.waiting.remove(job)
        ready.append(job)
    return ready


def test_words_of_only():
    assert cells_named(["jsb"]) == [f"jsb/{m}" for m in paper.LABELS]
    assert cells_named(["musedata/dts", "*/srnn"])[:2] == ["musedata/dts", "nottingham/srnn"]
    assert "jsb/dts4" in cells_named(["jsb"], extras=True)
    assert cells_named(["jsb/dts4"]) == ["jsb/dts4"]
    with pytest.raises(UserError, match="did you mean 'nottingham'"):
        cells_named(["notingham"])


def test_first_stages_come_first_and_are_shared(tmp_path: Path):
    jobs = by_name(make_plan(cells_named(), [], tmp_path))
    for data in paper.INPUTS:
        assert jobs[f"{data}/dots"].needs is jobs[f"{data}/dts"], f"{data}: trained once, used twice"
        assert jobs[f"{data}/rnn"].needs is None
    assert jobs["musedata/srnn"].needs is jobs["musedata/rnn"], "both have 600 units"
    assert jobs["jsb/srnn"].needs is jobs["jsb/rnn-400"], (
        "Table 1's RNN has 200 units, the stack's levels 400"
    )
    assert jobs["jsb/rnn-400"].recipe.model.hidden == (400,)
    order = list(jobs)
    assert all(order.index(j.needs.name) < order.index(j.name) for j in jobs.values() if j.needs)
    assert len(jobs["jsb/rnn"].recipe.seeds) == 5
    assert len(jobs["ptb-word/rnn"].recipe.seeds) == 3


def test_a_first_stage_without_shortcut_is_a_dt(tmp_path: Path):
    jobs = by_name(make_plan(cells_named(["jsb/dot", "jsb/dt", "jsb/sdts"]), [], tmp_path))
    assert jobs["jsb/dot"].needs is jobs["jsb/dt"]
    assert jobs["jsb/sdts"].needs is jobs["jsb/dts"]
    assert jobs["jsb/dt"].why == "cell"


def entries_for(
    folder: Path, name: str, seeds: Sequence[int], stopped: str = "no new best in 20 epochs"
) -> None:
    data, _, model = name.partition("/")
    made = [entry(data, model, seed, 8.3, reason=stopped) for seed in seeds]
    for one in made:
        one["recipe"] = {**recipe_for(name).to_dict(), "seeds": [one["seed"]]}
    write(folder, *made)


def test_what_the_ledger_has_is_left_out(tmp_path: Path):
    entries_for(tmp_path / "ledger", "jsb/rnn", [1, 2, 4])
    entries = tables.read_ledger(tmp_path / "ledger")
    assert make_plan(["jsb/rnn"], entries, tmp_path, seeds=2).done == ["jsb/rnn"]
    assert by_name(make_plan(["jsb/rnn"], entries, tmp_path))["jsb/rnn"].recipe.seeds == (3, 5)


def test_what_was_cut_off_is_not_done(tmp_path: Path):
    entries_for(tmp_path / "ledger", "jsb/rnn", [1, 2], stopped="cut off when 8 minutes had passed")
    plan = make_plan(["jsb/rnn"], tables.read_ledger(tmp_path / "ledger"), tmp_path, seeds=2)
    assert plan.done == []
    assert plan.jobs[0].recipe.seeds == (1, 2)


def test_overrides_reach_the_recipes_they_name():
    recipe = recipe_for("ptb-char/rnn")
    assert changed(recipe, "ptb-char/rnn", ["ptb-*:data.lanes=16"]).data.lanes == 16
    assert changed(recipe, "ptb-char/rnn", ["ptb-char:data.lanes=16"]).data.lanes == 16
    assert changed(recipe, "ptb-char/rnn", ["*/dots:data.lanes=16"]).data.lanes == recipe.data.lanes != 16
    assert changed(recipe, "ptb-char/rnn", ["optimiser.rate=4"]).optimiser.rate == 4.0
    with pytest.raises(UserError, match="needs the form"):
        changed(recipe, "ptb-char/rnn", ["data.lanes"])
    with pytest.raises(UserError, match=r"data\.lanes"):
        changed(recipe, "ptb-char/rnn", ["data.lane=16"])


def test_a_grid_of_rates_is_done_when_every_member_is(tmp_path: Path):
    grid = ["rates=[0.5,1.0]", "jsb:seeds=1"]
    entries_for(tmp_path / "ledger", "jsb/rnn", [1])  # at the recipe's own rate, 1.0
    entries = tables.read_ledger(tmp_path / "ledger")
    plan = make_plan(["jsb/rnn"], entries, tmp_path, seeds=5, overrides=grid)
    assert plan.jobs[0].recipe.seeds == (1,)
    assert plan.jobs[0].recipe.rates == (0.5, 1.0)
    assert make_plan(["jsb/rnn"], entries, tmp_path, seeds=5, overrides=["rates=1", "seeds=1"]).done == [
        "jsb/rnn"
    ]


def test_an_override_of_both_stages_keeps_them_shared(tmp_path: Path):
    jobs = by_name(make_plan(["jsb/dts", "jsb/dots"], [], tmp_path, overrides=["optimiser.rate=0.5"]))
    assert jobs["jsb/dots"].needs is jobs["jsb/dts"]
    assert jobs["jsb/dts"].recipe.optimiser.rate == 0.5


def test_expected_time_follows_chains_and_workers():
    recipe = recipe_for("jsb/rnn")
    first, other = Job("a", recipe, expected=10.0), Job("c", recipe_for("jsb/dts"), expected=8.0)
    second = Job("b", recipe_for("jsb/dots"), needs=first, expected=5.0)
    jobs = [second, other, first]
    assert [j.name for j in ordered(jobs)] == ["a", "c", "b"]
    for device in ("cpu", "cuda"):
        assert makespan(jobs, 1, device) == 23.0
        assert makespan(jobs, 2, device) == 15.0


def test_expected_time_has_models_of_small_kernels_alone_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    star, other = (Job(n, recipe_for(n), expected=9.0) for n in ("jsb/dots-star", "musedata/dots-star"))
    short, long = (Job(n, recipe_for(n), expected=e) for n, e in (("jsb/rnn", 4.0), ("jsb/dts", 10.0)))
    jobs = [star, short, other, long]
    own_loop(monkeypatch, jobs, rnn=NARROW, dts=NARROW, dots_star=SMALL)
    assert makespan(jobs, 4, "cpu") == 10.0
    assert makespan(jobs, 4, "cuda:0") == 10.0 + 9.0 + 9.0


def test_a_run_that_was_cut_off_tells_no_time(tmp_path: Path):
    entries_for(tmp_path, "jsb/rnn", [1], stopped="cut off when 8 minutes had passed")
    entries_for(tmp_path, "jsb/dts", [1])
    entries = tables.read_ledger(tmp_path)
    cut, done = make_plan(["jsb/rnn", "jsb/dts"], entries, tmp_path, seeds=2).jobs
    for job in (cut, done):
        estimate(job, entries, "cpu")
    assert (cut.estimate, done.estimate, done.expected) == ("estimated", "recorded", 60.0)
    assert cut.expected > 0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("jsb/rnn", 0.0029), ("jsb/dots-star", 0.060), ("nottingham/rnn", 0.0137), ("nottingham/dts", 0.020),
     ("ptb-char/rnn", 0.091), ("ptb-word/rnn", 0.189), ("ptb-word/srnn", 0.413)],
)  # fmt: skip
def test_an_update_on_a_cpu_is_expected_to_take_what_its_width_and_vocabulary_take(name, seconds):
    """Seconds of one update, measured on one core."""
    recipe = load_recipe(f"paper/{name}")
    assert cpu_update(recipe) == pytest.approx(seconds, rel=0.3)


def test_a_wider_model_is_expected_to_take_longer_on_a_cpu():
    recipe = load_recipe("paper/nottingham/rnn")
    times = [cpu_update(override(recipe, {"model.hidden": n})) for n in (200, 400, 800, 1600)]
    assert times == sorted(times)
    assert times[-1] > 8 * times[1]


def test_without_a_ledger_one_seed_of_everything_is_expected_to_take_what_it_took(tmp_path: Path):
    """But for DOT(S)*, which ran by small kernels then, one after the other when all else had ended."""
    measured = json.loads((ROOT / "results" / "bench" / "h200-one-seed.json").read_text())
    ended = max(job["end"] for job in measured["jobs"] if "dots-star" not in job["job"])
    jobs = make_plan(cells_named(), [], tmp_path, seeds=1).jobs
    assert {job.name for job in jobs} == {job["job"] for job in measured["jobs"]}
    for job in jobs:
        estimate(job, [], "cuda")
    jobs = [job for job in jobs if job.recipe.model.kind != "dots-star"]
    assert makespan(jobs, 4, "cuda") == pytest.approx(ended, rel=0.15)


def test_on_a_gpu_four_populations_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("deeprnn.training.loading.pick_device", lambda name: "cuda")
    place = ["--ledger", str(tmp_path), "--runs", str(tmp_path)]
    assert main(["reproduce", "--plan", "--only", "jsb", *place]) == 0
    assert "6 populations on cuda, 4 at once" in capsys.readouterr().out


def test_identity_ignores_seed_and_settings_of_absent_layers():
    recipe = recipe_for("ptb-char/dts")
    same = changed(
        recipe, "x", ["seeds=7", "save.seconds=1", "model.output_unit=relu", "init.rectifier_bias=0.3"]
    )
    assert identity(same) == identity(recipe)
    assert identity(changed(recipe, "x", ["optimiser.rate=0.3"])) != identity(recipe)
    dots = recipe_for("ptb-char/dots")
    assert identity(changed(dots, "x", ["init.rectifier_bias=0.3"])) != identity(dots)


def test_identity_ignores_what_the_schedule_does_not_read():
    paper = recipe_for("jsb/rnn")
    cosine = changed(paper, "x", ["schedule.name=cosine", "stop.epochs=5"])
    assert identity(changed(cosine, "x", ["schedule.patience=9", "schedule.beta=3"])) == identity(cosine)
    assert identity(changed(cosine, "x", ["schedule.floor=0.1"])) != identity(cosine)
    assert identity(changed(paper, "x", ["schedule.patience=9"])) != identity(paper)
    assert identity(changed(paper, "x", ["schedule.factor=1.1", "evaluation.chunk=9"])) == identity(paper)
    streams = changed(paper, "x", ["evaluation.streams=2"])
    assert identity(changed(streams, "x", ["evaluation.chunk=9"])) != identity(streams) != identity(paper)


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--budget", "-1"], ["--jobs", "0"]])
def test_a_plan_of_nothing_is_refused(wrong, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = ["--runs", str(tmp_path / "runs"), "--ledger", str(tmp_path / "ledger")]
    assert main(["reproduce", "--plan", *place, *wrong]) == 2
    assert f"error: {wrong[0]} must be" in capsys.readouterr().err


def test_plan_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    call = [
        "reproduce",
        "--plan",
        "--only",
        "jsb",
        "--device",
        "cpu",
        "--ledger",
        str(tmp_path),
        "--runs",
        str(tmp_path),
    ]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "6 populations on cpu" in out
    assert "after jsb/dts" in out
    assert "expected: " in out
    assert main(["reproduce", "--plan", "--only", "jbs", "--device", "cpu"]) == 2
    assert "did you mean 'jsb'" in capsys.readouterr().err


# ---- toy runs


def test_a_toy_reproduction_from_plan_to_table(tmp_path: Path, songs: None):
    said: list[str] = []
    outcome = reproduce(settings(tmp_path, "jsb/dts", "jsb/dots"), said.append)
    assert (outcome.finished, outcome.failed, outcome.status) == (["jsb/dts", "jsb/dots"], {}, 0)
    entries = tables.read_ledger(tmp_path / "ledger")
    assert [(e.model, e.seed) for e in entries] == [("dots", 1), ("dots", 2), ("dts", 1), ("dts", 2)]
    assert all(e.epochs == 3 and not e.cut_off for e in entries)
    assert len(list((tmp_path / "runs").iterdir())) == 2, "the DT(S) of the cell is the first stage too"
    assert entries[0].raw["first_stage"]["model"]["kind"] == "dts"
    again = reproduce(settings(tmp_path, "jsb/dts", "jsb/dots"), said.append)
    assert again.finished == []
    assert "nothing is left to run" in said[-1]


def test_the_second_stage_starts_from_the_first(tmp_path: Path, songs: None):
    frozen = (*TINY, "jsb/dots:pretrain.rate=0.0", "jsb/dots:schedule.restore_best=false")
    now = Settings(
        ("jsb/dots",), seeds=2, overrides=frozen, root=tmp_path / "runs", ledger=tmp_path / "ledger"
    )
    assert reproduce(now, lambda text: None).status == 0
    first, second = (sorted((tmp_path / "runs").glob(f"jsb-{m}-*/seed-2"))[0] for m in ("dts", "dots"))
    before, after = checkpoint.load_best(first).tensors, checkpoint.load_best(second).tensors
    levels = [n for n in before if n.startswith("levels.")]
    assert levels
    assert all(torch.equal(before[n], after[n]) for n in levels), (
        "at rate 0 they stay what the first stage learnt"
    )


def test_a_first_stage_that_a_kill_kept_from_the_ledger_is_entered(tmp_path: Path, songs: None):
    """It had ended, so that no job trains it again, but not all members of its population had."""
    now = settings(tmp_path, "jsb/dots")
    assert reproduce(now, lambda text: None).status == 0
    whole = {path.name for path in (tmp_path / "ledger").iterdir()}
    for path in (tmp_path / "ledger").iterdir():
        if "-dots-" in path.name or path.name.endswith("seed-1.json"):
            path.unlink()
    for path in (tmp_path / "runs").glob("jsb-dots-*"):
        shutil.rmtree(path)
    assert reproduce(now, lambda text: None).status == 0
    assert {path.name for path in (tmp_path / "ledger").iterdir()} == whole


class After(Sequence[int]):
    """Nothing heard for so many looks, then a signal: an interruption at a chosen update."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __len__(self) -> int:
        self.looks -= 1
        return int(self.looks < 0)

    def __getitem__(self, index):
        return int(signal.SIGTERM)


def test_a_job_cut_off_goes_on_bit_for_bit(tmp_path: Path):
    data = small_songs()
    recipe = changed(recipe_for("jsb/rnn"), "jsb/rnn", [*TINY, "seeds=[1,2]"])
    for name, stops in (("whole", []), ("cut", [3, 17, 5])):
        root, ledger = tmp_path / name, tmp_path / name / "ledger"
        for looks in stops:
            place = Place(root, ledger, "cpu", After(looks), lambda: "cut off when 8 minutes had passed")
            assert not run_job("x", recipe, None, root / "run", data, place, lambda text: None)
        if stops:
            assert all(e.cut_off for e in tables.read_ledger(ledger))
        place = Place(root, ledger, "cpu", ())
        assert run_job("x", recipe, None, root / "run", data, place, lambda text: None)
    whole, both = (tables.read_ledger(tmp_path / n / "ledger") for n in ("whole", "cut"))
    cut = [e for e in both if not e.cut_off]
    assert len(both) > len(cut) == 2, "what was cut off stays beside what was finished"
    assert [groups(e).popitem()[1] for e in (both, whole)] == [cut, whole], "the finished ones count"
    assert [e.raw["result"] for e in whole] == [e.raw["result"] for e in cut]
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in e.curve] for e in (*whole, *cut)]
    assert timeless[:2] == timeless[2:]
    for seed in (1, 2):
        a, b = (checkpoint.load_best(tmp_path / n / "run" / f"seed-{seed}").tensors for n in ("whole", "cut"))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_nothing_in_the_ledger_is_ever_written_over(tmp_path: Path):
    cut = record(entry("jsb", "rnn", 1, 9.9, reason="cut off when 1 minutes had passed"), tmp_path)
    path = record(entry("jsb", "rnn", 1, 8.3), tmp_path)
    before = {p: p.read_bytes() for p in (cut, path)}
    assert record(entry("jsb", "rnn", 1, 7.0), tmp_path) == path
    assert record(entry("jsb", "rnn", 1, 7.0, reason="cut off when 2 minutes had passed"), tmp_path) == cut
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert tables.rows(read_ledger(tmp_path))[5].values == [8.3], (
        "the finished run counts, not the cut-off one"
    )


def test_a_run_from_another_first_stage_is_another_entry(tmp_path: Path):
    """As happened in the ledger: the second stage alike, the first with another weight noise."""
    made = entry("nottingham", "srnn", 1, 3.24)
    paths = set()
    for noise in (0.075, 0.13):
        made["first_stage"] = recipe("nottingham", "rnn", regulariser__weight_noise=noise)
        paths.add(record(made, tmp_path))
    assert len(paths) == 2


def test_the_budget_saves_what_runs_and_starts_nothing(tmp_path: Path, songs: None):
    endless = (*TINY[:-1], "stop.epochs=0", "stop.patience=0")
    now = Settings(("jsb/rnn", "jsb/dts"), seeds=1, budget=0.03, overrides=endless, root=tmp_path / "runs",
                   ledger=tmp_path / "ledger")  # fmt: skip
    outcome = reproduce(now, lambda text: None)
    assert outcome.finished == []
    assert sorted(outcome.unfinished) == ["jsb/dts", "jsb/rnn"]
    assert outcome.status == 0
    (only,) = tables.read_ledger(tmp_path / "ledger")
    assert only.cut_off
    assert len(list((tmp_path / "runs").glob("*/last.safetensors"))) == 1


def test_a_second_stage_finds_its_first_in_a_grid_of_rates(tmp_path: Path, songs: None):
    grid = (*TINY, "jsb/dts:rates=[0.5,0.25]")
    now = Settings(("jsb/dts",), seeds=2, overrides=grid, root=tmp_path / "runs", ledger=tmp_path / "ledger")
    assert reproduce(now, lambda text: None).finished == ["jsb/dts"]
    assert len(tables.read_ledger(tmp_path / "ledger")) == 4
    picked = (*TINY, "jsb/dts:optimiser.rate=0.25")
    later = Settings(
        ("jsb/dots",), seeds=2, overrides=picked, root=tmp_path / "runs", ledger=tmp_path / "ledger"
    )
    assert reproduce(later, lambda text: None).finished == ["jsb/dots"]


def test_one_failing_job_costs_the_others_nothing(
    tmp_path: Path, songs: None, monkeypatch: pytest.MonkeyPatch
):
    real = running.run_job

    def fails(name: str, *rest):
        if name == "jsb/dts":
            raise RuntimeError("made to fail")
        return real(name, *rest)

    monkeypatch.setattr(running, "run_job", fails)
    outcome = reproduce(settings(tmp_path, "jsb/dts", "jsb/dots", "jsb/rnn"), lambda text: None)
    assert outcome.finished == ["jsb/rnn"]
    assert "made to fail" in outcome.failed["jsb/dts"]
    assert outcome.unfinished == ["jsb/dots"]
    assert outcome.status == 1


def test_training_and_reproducing_name_an_entry_alike(tmp_path: Path, songs: None):
    assert reproduce(settings(tmp_path, "jsb/rnn"), lambda text: None).status == 0
    (home,) = (tmp_path / "runs").glob("jsb-rnn-*/seed-2")
    path = record(ledger.entry(Run(home)), tmp_path / "other")
    assert path.name in {p.name for p in (tmp_path / "ledger").iterdir()}


def test_a_user_s_own_data_may_have_any_name(tmp_path: Path):
    made = entry("jsb", "rnn", 1, 8.3)
    made["data"]["name"] = "songs/[old]*"
    assert record(made, tmp_path) == record(made, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_entry_under_another_file_name_is_found(tmp_path: Path):
    write(tmp_path, entry("jsb", "rnn", 1, 8.3))
    assert record(entry("jsb", "rnn", 1, 7.0), tmp_path).name == "jsb-rnn-000.json"
    assert len(list(tmp_path.iterdir())) == 1
