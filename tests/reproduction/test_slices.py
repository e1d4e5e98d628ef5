"""The script for slices of a bare GPU machine: what it leaves, killed or not, and what another machine makes of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deeprnn.data.music import MusicData, Songs
from deeprnn.data.rolls import save_npz
from deeprnn.errors import UserError
from deeprnn.reproduction import tables
from deeprnn.reproduction.entries import read_ledger
from deeprnn.reproduction.replications import read_replications
from deeprnn.reproduction.run import reproduce
from deeprnn.reproduction.runner import Settings
from deeprnn.reproduction.study import dynamic
from deeprnn.reproduction.study import run as study_run
from deeprnn.reproduction.study.analysis import results
from deeprnn.reproduction.study.plan_file import read_study
from deeprnn.reproduction.study.run import read_runs
from deeprnn.training import loading
from tests.reproduction.toys import STUDY, TINY, made_up_songs, small_songs, write_study

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_reproduce  # noqa: E402
import slice_files  # noqa: E402


@pytest.fixture
def songs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A made-up `jsb` in place of the benchmark set."""
    monkeypatch.setattr(gpu_reproduce, "load_data", lambda part: small_songs())
    with made_up_songs():
        yield


def call(folder: Path, name: str, **more) -> argparse.Namespace:
    given = {"only": ["jsb/dts", "jsb/dots"], "extras": False, "seeds": "2", "fresh": False, "study": "",
             "seconds": 0.0, "budget": 5.0, "jobs": 1, "device": "cpu", "override": [*TINY], "keep": [],
             "out": folder / name / "out", "work": folder / name / "work", "restore": None,
             "commit": "0123456789ab", "state_limit": 9.0}  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def test_a_slice_packs_state_that_another_machine_takes_up(
    tmp_path: Path, songs: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_reproduce, "LEDGER", tmp_path / "checkout" / "runs")
    first = gpu_reproduce.Slice(call(tmp_path, "a", only=["jsb/dts"], keep=["jsb/dots"]))
    assert first.run() == 0
    out = tmp_path / "a" / "out"
    assert {p.name for p in out.iterdir()} == {"results.tar.gz", "state-0.part", "log.txt"}
    second = gpu_reproduce.Slice(call(tmp_path, "b", restore=out))
    assert second.run() == 0
    log = (tmp_path / "b" / "out" / "log.txt").read_text()
    assert "in the ledger already: jsb/dts" in log
    assert "finished: jsb/dots\n" in log, "the first stage came along and was not trained again"
    assert slice_files.collect(tmp_path / "b" / "out", tmp_path / "checkout" / "runs") == 0
    entries = tables.read_ledger(tmp_path / "checkout" / "runs")
    assert len(entries) == 4
    assert {p.name for p in (tmp_path / "checkout").iterdir()} == {"runs"}, (
        "the published ledger gets entries alone"
    )
    whole = tmp_path / "c"
    settings = Settings(("jsb/dts", "jsb/dots"), seeds=2, overrides=TINY, root=whole, ledger=whole / "ledger")
    reproduce(settings, lambda text: None)
    assert [e.raw["result"] for e in read_ledger(whole / "ledger")] == [e.raw["result"] for e in entries]


def test_a_rerun_in_two_slices_becomes_a_replication(
    tmp_path: Path, songs: None, monkeypatch: pytest.MonkeyPatch
):
    """The second slice, elsewhere, goes on with what the first left; both calls and all scores are kept."""
    published = tmp_path / "published"
    monkeypatch.setattr(gpu_reproduce, "LEDGER", published)
    reproduce(
        Settings(("jsb/dts",), seeds=3, overrides=TINY, root=tmp_path / "p", ledger=published), lambda t: None
    )
    fresh = {"fresh": True, "seeds": "11..11"}
    assert gpu_reproduce.Slice(call(tmp_path, "a", only=["jsb/dts"], keep=["jsb/dots"], **fresh)).run() == 0
    place = tmp_path / "a" / "out"
    assert gpu_reproduce.Slice(call(tmp_path, "b", restore=place, **fresh)).run() == 0
    home = tmp_path / "replications" / "seed-11"
    for out in (place, tmp_path / "b" / "out", tmp_path / "b" / "out"):  # again is nothing new
        assert slice_files.collect(out, home) == 0
    (found,) = read_replications(home.parent)
    assert [(e.model, e.seed) for e in found.entries] == [("dots", 11), ("dts", 11)]
    assert all(e.raw["commit"] is not None for e in found.entries)
    assert [[span["job"] for span in c["spans"]] for c in found.calls] == [["jsb/dts"], ["jsb/dots"]]
    assert {row.entry for row in found.clean} == {e.path.name for e in found.entries}
    for row, entry in zip(found.clean, found.entries, strict=True):
        assert row.whole == pytest.approx(entry.value(), rel=1e-6), (
            "the parameters kept have the score recorded"
        )
        assert row.near_duplicates == 3, "every made-up test song stands in the training part"
        assert row.clean is None, "so that nothing is left"
    log = (tmp_path / "b" / "out" / "log.txt").read_text()
    assert "without near-duplicates" in log


def test_a_time_limit_leaves_what_a_later_call_goes_on_with(tmp_path: Path, songs: None, monkeypatch):
    monkeypatch.setattr(gpu_reproduce, "TO_SAVE", 0.0)
    endless = [*TINY[:-1], "stop.epochs=0", "stop.patience=0"]
    given = {
        "fresh": True,
        "seeds": "1",
        "override": endless,
        "only": ["jsb/dts"],
        "seconds": 2.0,
        "budget": 0.0,
    }
    monkeypatch.setattr(gpu_reproduce, "TO_END", -1e6)  # the process that tests must not end
    monkeypatch.setattr(gpu_reproduce, "LEDGER", tmp_path / "none")
    for times in (1, 2):
        one = gpu_reproduce.Slice(call(tmp_path, "a", **given))
        assert one.run() == 0
        assert one.outcome.unfinished == ["jsb/dts"]
        assert one.state["kept"] == ["jsb/dts"]
        assert len(json.loads((one.home / "calls.json").read_text())) == times
        assert not list(one.settings.ledger.glob("*.json")), (
            "a rerun's runs are scored once, when they are whole"
        )
    log = (tmp_path / "a" / "out" / "log.txt").read_text()
    assert log.count("jsb/dts: goes on in epoch") == 1


def test_a_gpu_compiles_what_comes_first_before_it_trains(tmp_path: Path, songs: None, monkeypatch):
    """And what of the test parts is clean is found meanwhile: workers know neither the card nor this process."""
    import kernels_ahead

    asked: list[list[str]] = []
    woken: list[str] = []

    def compile_all(pool, recipes, seconds):
        asked.append([recipe.model.kind for recipe in recipes])
        return {"kernels": len(recipes), "seconds": 0.1, "core_seconds": 0.2, "failures": []}

    monkeypatch.setattr(kernels_ahead, "compile_all", compile_all)
    monkeypatch.setattr(gpu_reproduce, "_wake", woken.append)
    with ThreadPoolExecutor(1) as pool:
        given = call(tmp_path, "a", only=["jsb/dts", "jsb/dots", "jsb/rnn"], fresh=True, seeds="11..11")
        one = gpu_reproduce.Slice(given, pool)
        one.device = "cuda"
        one._prepare(one._jobs_left())
        assert one._parts_of(small_songs())["clean"].left_out == 3
    for _ in range(100):
        if len(asked) == 2:
            break
        time.sleep(0.01)
    assert woken == ["cuda"]
    assert [len(kinds) for kinds in asked] == [2, 1], "two for each population at once, then the rest"
    assert one.notes["kernels"]["kernels"] == 2
    assert "kernels of the first 2 jobs" in (tmp_path / "a" / "out" / "log.txt").read_text()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A study's plan, and what a call for it is given; no folder of studies to go on from."""
    study = read_study(str(write_study(tmp_path)))
    loading.forget_data()
    monkeypatch.setattr(gpu_reproduce, "STUDIES", tmp_path / "studies")
    return study, {"study": str(study.path), "seeds": "", "override": []}


def test_a_study_goes_on_in_slices(tmp_path: Path, toy):
    study, given = toy
    first = call(tmp_path, "a", **{**given, "only": ["main/toy/rnn", "main/toy/long"]})
    assert gpu_reproduce.Slice(first).run() == 0
    out = tmp_path / "a" / "out"
    assert "4 of 8 runs are missing" in (out / "log.txt").read_text()
    rest = call(tmp_path, "b", **{**given, "only": []}, restore=out)
    assert gpu_reproduce.Slice(rest).run() == 0
    home = tmp_path / "studies" / "toy"
    assert slice_files.collect(tmp_path / "b" / "out", home) == 0
    found = results(study, read_runs(home))
    assert len(found.answers) == 1
    assert not found.open
    (home / "started.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be compared"):
        slice_files.collect(tmp_path / "b" / "out", home)


def test_slices_that_began_each_by_itself_become_one_study(tmp_path: Path, toy):
    """Two machines that know nothing of each other, then a third that goes on from the results collected."""
    study, given = toy
    home = tmp_path / "studies" / "toy"
    outs = [tmp_path / name / "out" for name in ("a", "b", "c")]
    slices = [gpu_reproduce.Slice(call(tmp_path, name, **{**given, "only": [f"main/toy/{one}"]}))
              for name, one in (("a", "rnn"), ("b", "long"))]  # fmt: skip
    for one in slices:
        assert one.run() == 0
    began = [json.loads((s.home / "started.json").read_text()) for s in slices]
    began[1]["began"] = "2001-01-01T00:00:00+00:00"
    (slices[1].home / "started.json").write_text(json.dumps(began[1]))
    slices[1].pack()
    for out in outs[:2]:
        assert slice_files.collect(out, home) == 0
    assert json.loads((home / "started.json").read_text()) == began[1], "the earlier of the two"
    assert slice_files.collect(outs[0], home) == 0
    assert json.loads((home / "started.json").read_text()) == began[1]
    third = gpu_reproduce.Slice(call(tmp_path, "c", **{**given, "only": []}))
    assert third.run() == 0
    log = (outs[2] / "log.txt").read_text()
    assert "8 entries of toy are known" in log
    assert not {name for name in third.outcome.finished if "/rnn" in name or "/long" in name}
    assert slice_files.collect(outs[2], home) == 0
    assert not results(study, read_runs(home)).open
    other = {**json.loads((home / "started.json").read_text()), "digest": "0"}
    (home / "started.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="another plan or other recipes"):
        slice_files.collect(outs[0], home)


def test_parameters_that_are_yet_to_be_scored_dynamically_come_along(tmp_path: Path, toy, monkeypatch):
    """Time ends the first slice before its finished runs are scored so; another machine has only what it left."""
    study, given = toy
    goal = '[[goal]]\nfamily = "main"\ndata = "toy"\nknown = ""\ngoal = [1.0]\ndynamic = true\n'
    study.path.write_text(study.path.read_text() + goal)
    monkeypatch.setattr(dynamic, "RATES", (0.01,))
    with monkeypatch.context() as out_of_time:
        out_of_time.setattr(study_run, "score_dynamic", lambda *given: 0)
        assert gpu_reproduce.Slice(call(tmp_path, "a", **{**given, "only": ["main/toy/rnn"]})).run() == 0
    home = tmp_path / "studies" / "toy"
    assert slice_files.collect(tmp_path / "a" / "out", home) == 0
    assert not dynamic.read_dynamic(home)
    rest = call(tmp_path, "b", **{**given, "only": ["main/toy/rnn"]}, restore=tmp_path / "a" / "out")
    assert gpu_reproduce.Slice(rest).run() == 0
    assert slice_files.collect(tmp_path / "b" / "out", home) == 0
    scored = {e.path.name for e in read_ledger(home / "runs") if e.has_test}
    assert len(scored) == 2
    kept = dynamic.read_dynamic(home)
    assert kept.keys() == scored
    # Scored again elsewhere, at another rate: what was entered first stays, and the caller is told.
    rows = [{**row, "rate": 0.5} for row in kept.values()]
    files = {**slice_files.read_results(tmp_path / "b" / "out"), dynamic.FILE: json.dumps(rows).encode()}
    slice_files.pack_results(tmp_path / "b" / "out", files)
    assert slice_files.collect(tmp_path / "b" / "out", home) == 1
    assert dynamic.read_dynamic(home) == kept


def test_a_study_on_a_bare_machine_says_which_commit_its_plan_is_of(tmp_path: Path, toy, monkeypatch):
    monkeypatch.setattr(study_run, "commit", lambda: None)
    one = gpu_reproduce.Slice(call(tmp_path, "a", **{**toy[1], "only": [], "budget": 1e-9}))
    assert one.run() == 0
    assert json.loads((one.home / "started.json").read_text())["commit"] == "0123456789ab"


def test_a_slice_without_a_repository_writes_the_commit_it_is_told(tmp_path: Path, songs: None):
    told = gpu_reproduce.Slice(call(tmp_path, "a"))
    unknown = json.dumps({"commit": None}).encode()
    assert json.loads(told._with_commit(unknown))["commit"] == "0123456789ab"
    known = json.dumps({"commit": "fedcba987654"}).encode()
    assert told._with_commit(known) == known


# ---- files


def test_pieces_of_two_states_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slice_files, "PART", 4096)
    root, outs = tmp_path / "runs", [tmp_path / "a", tmp_path / "b"]
    for number, out in enumerate(outs):
        out.mkdir()
        (root / "run").mkdir(parents=True, exist_ok=True)
        (root / "run" / "metrics.jsonl").write_bytes(bytes([number]) * 9000)
        kept, lost = slice_files.pack_state(out, root, [("run", [root / "run" / "metrics.jsonl"])], 10**6)
        assert (kept, lost) == (["run"], [])
    assert len(list(outs[0].glob("state-*.part"))) > 2
    assert slice_files.unpack_state(outs[0], tmp_path / "there") == ["run"]
    assert (tmp_path / "there" / "run" / "metrics.jsonl").read_bytes() == bytes(9000)
    assert slice_files.unpack_state(outs[1], tmp_path / "there") == [], "what is there already stays as it is"
    os.replace(outs[1] / "state-1.part", outs[0] / "state-1.part")
    with pytest.raises(UserError, match="not whole"):
        slice_files.unpack_state(outs[0], tmp_path / "other")
    (outs[1] / "state-1.part").write_bytes(b"")
    with pytest.raises((UserError, ValueError)):
        slice_files.unpack_state(outs[1], tmp_path / "other")


def test_a_checkpoint_that_is_being_replaced_is_not_packed(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "last.safetensors").write_bytes(b"new")
    sidecar = run / "last.json"
    sidecar.write_text(json.dumps({"sha256": hashlib.sha256(b"old").hexdigest()}))
    files = [sidecar, run / "last.safetensors"]
    assert slice_files.read_whole(files) is None
    kept, lost = slice_files.pack_state(tmp_path, tmp_path, [("run", files)], 10**6)
    assert kept == []
    assert "being replaced" in lost[0]
    sidecar.write_text(json.dumps({"sha256": hashlib.sha256(b"new").hexdigest()}))
    assert slice_files.read_whole(files) is not None
    assert slice_files.pack_state(tmp_path, tmp_path, [("run", files)], 100)[1] == [
        "run (0.0 MiB do not fit)"
    ]


BLOCK = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "tyro", "symusic", "music21", "matplotlib", "scipy", "optuna"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
"""


def test_killed_on_a_bare_machine_it_goes_on_in_the_same_tree(tmp_path: Path):
    """torch, numpy and safetensors alone, no repository; SIGKILL, then the same command again."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    draw = np.random.default_rng(1)
    rolls = {
        s: Songs.pack([(draw.random((n, 6)) < 0.3) for n in (300, 90)], 6) for s in ("train", "valid", "test")
    }
    save_npz(tmp_path / "songs.npz", MusicData("songs", rolls))
    plan = STUDY.replace("{songs}", str(tmp_path / "songs.npz")).replace(
        '"stop.epochs" = 1', '"stop.epochs" = 80'
    )
    (tmp_path / "toy.toml").write_text(plan.replace("[0.01, 0.03]", "[0.01]"))
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "OUT": str(tmp_path / "out"),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_reproduce.py"), "--study", "toy.toml", "--device", "cpu",
               "--only", "main/toy/rnn", "--workers", "0", "--jobs", "1", "--commit", "0123456789ab"]  # fmt: skip
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    ledger = tmp_path / "runs" / "gpu" / "toy" / "runs"
    for _ in range(1200):
        if first.poll() is not None or list(ledger.glob("*.json")):
            break
        time.sleep(0.05)
    assert first.poll() is None, first.communicate()[0].decode()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    left = slice_files.read_results(tmp_path / "out")
    assert len([n for n in left if n.startswith("runs/")]) <= 1
    done = {path: path.read_bytes() for path in ledger.glob("*.json")}
    again = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    entries = sorted(read_ledger(ledger), key=lambda e: e.seed)
    assert [(e.seed, e.has_test) for e in entries] == [(1, False), (11, True), (12, True)]
    assert all(path.read_bytes() == content for path, content in done.items())
    assert entries[0].command is not None
    assert str(tmp_path) not in entries[0].command
