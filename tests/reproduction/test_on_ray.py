"""The paper's experiments and a study as tasks of a real Ray of two nodes, one of which is killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deeprnn.cli import main
from deeprnn.data import sources
from deeprnn.errors import UserError
from deeprnn.reproduction import runner
from deeprnn.reproduction.entries import Entry, read_ledger
from deeprnn.reproduction.run import reproduce
from deeprnn.reproduction.runner import Settings
from deeprnn.reproduction.study.plan_file import read_study
from deeprnn.reproduction.study.run import read_runs, run_study
from tests.reproduction.test_study import quiet, toy  # noqa: F401  a fixture
from tests.sweeps.ray_cluster import Cluster

pytestmark = pytest.mark.slow

SMALL = (
    "model.hidden=6",
    "jsb/srnn:model.hidden=[6,6]",
    "data.lanes=16",
    "stop.epochs=12",
    "save.seconds=0.1",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with Cluster(nodes=2) as nodes:
        yield nodes


@pytest.fixture
def killed(cluster, tmp_path, monkeypatch) -> list[str]:
    """Kills one node as soon as some job has saved something; holds what was saved then."""
    real, seen = runner.Runner._check_clock, []

    def check(self, engine) -> None:
        saved = [path.parent.name for path in tmp_path.glob("cluster/**/last.json")]
        if saved and not seen:
            seen.extend(saved)
            cluster.kill_oldest()
        real(self, engine)

    monkeypatch.setattr(runner.Runner, "_check_clock", check)
    return seen


def values(entries: list[Entry]) -> dict[tuple[str, str, int, str], tuple[float, ...]]:
    """What was scored, by who it was."""
    return {
        (e.model, e.identity, e.seed, str(e.recipe.optimiser.rate)): tuple(
            e.value(split) for split in ("valid", "test") if split in e.raw["result"]
        )
        for e in entries
    }


def need_jsb() -> None:
    try:
        sources.find("jsb")
    except UserError as error:
        pytest.skip(str(error))


def test_cells_and_their_first_stages_train_on_a_cluster_that_loses_a_node(tmp_path, cluster, killed):
    need_jsb()
    here = Settings(
        ("jsb/srnn",), seeds=2, overrides=SMALL, root=tmp_path / "here/runs", ledger=tmp_path / "here/l"
    )
    assert reproduce(here, quiet).status == 0
    words = ["--only", "jsb/srnn", "--seeds", "2", "--runs", str(tmp_path / "cluster/runs"), "--jobs", "2"]
    words += ["--ledger", str(tmp_path / "cluster/l"), "--device", "cpu", "--override", *SMALL]
    assert main(["reproduce", *words, "--engine", "ray", "--address", cluster.address]) == 0
    assert killed
    alone, there = (values(read_ledger(tmp_path / name / "l")) for name in ("here", "cluster"))
    assert len(there) == 4  # both stages of both seeds, each entered once
    assert there.keys() == alone.keys()
    assert all(there[who] == pytest.approx(alone[who], abs=1e-5) for who in alone)


def test_the_budget_ends_what_runs_on_a_cluster_and_says_so_in_the_ledger(tmp_path, cluster):
    need_jsb()
    endless = (*SMALL, "stop.epochs=0", "stop.patience=0")
    now = Settings(("jsb/rnn",), seeds=1, budget=0.5, overrides=endless, root=tmp_path / "runs",
                   ledger=tmp_path / "l", engine="ray", address=cluster.address)  # fmt: skip
    outcome = reproduce(now, quiet)
    assert outcome.over
    assert outcome.unfinished == ["jsb/rnn"]
    (only,) = read_ledger(tmp_path / "l")
    assert only.cut_off
    assert "0.5 minutes had passed" in only.raw["stopped"]


def test_a_study_runs_on_a_cluster_that_loses_a_node(toy, tmp_path, cluster, killed):  # noqa: F811
    study, settings, ledger = toy
    path = study.path
    path.write_text(path.read_text().replace('"stop.epochs" = 1', '"stop.epochs" = 40\n"save.seconds" = 0.1'))
    study = read_study(str(path))
    assert run_study(study, settings, ledger, quiet).status == 0
    there = replace(settings, root=tmp_path / "cluster", engine="ray", address=cluster.address, jobs=2)
    outcome = run_study(study, there, tmp_path / "ledger-there", quiet)
    assert outcome.status == 0, outcome.failed
    assert killed
    alone, far = (
        values(list(read_runs(place).entries.values())) for place in (ledger, tmp_path / "ledger-there")
    )
    assert far.keys() == alone.keys()
    assert all(far[who] == pytest.approx(alone[who], abs=1e-5) for who in alone)
