"""Databases in place of the journal: a real PostgreSQL, killed, shared, stopped; passwords that are never shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.sweeps.folder import read_owner
from deeprnn.sweeps.spec import Spec, load_spec
from deeprnn.sweeps.trial_storage import same_place, without_password
from deeprnn.sweeps.winner import score_winner
from tests.sweeps.postgresql import PASSWORD, Server
from tests.sweeps.toys import Quiet, as_file, spec, sweep

SECRETS = (PASSWORD, "a%2Bsecret", "secret", "hush-hush")
SHORT: dict[str, Any] = {"overrides": {"stop.epochs": 1}, "trials": 2}
LIMIT = 120
"""seconds for a sweep in a process of its own"""


def scores(outcome) -> dict[int, float | None]:
    return {t.number: t.value for t in outcome.trials}


def check_kept_secret(folder: Path, *texts: object) -> None:
    for text in texts:
        assert not [secret for secret in SECRETS if secret in str(text)], text
    for path in (p for p in folder.rglob("*") if p.is_file()):
        assert not [secret for secret in SECRETS if secret.encode() in path.read_bytes()], path


# ---- without a server


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://nobody:hush-hush@127.0.0.1:1/x",
        "postgresql://nobody:part@hush-hush@127.0.0.1:1/x",
        "postgresql+psycopg2://127.0.0.1:1/x?user=nobody&password=hush-hush",
        "nosuch://nobody:hush-hush@x",
        "sqlite:////nowhere/at/all.db",
    ],
)
def test_a_database_that_does_not_answer_is_a_sentence_without_its_password(tmp_path, url):
    with pytest.raises(UserError, match="--storage") as error:
        sweep(spec(), tmp_path / "s", storage=url)
    check_kept_secret(tmp_path, error.value)


def test_a_database_serves_as_a_journal_does_and_its_folder_remembers_it(tmp_path, capsys):
    url, which = f"sqlite:///{tmp_path}/s.db", spec(**SHORT)
    first = scores(sweep(which, tmp_path / "s", storage=url))
    assert first == scores(sweep(which, tmp_path / "t"))
    assert not (tmp_path / "s/journal.log").exists()
    assert main(["sweep", str(tmp_path / "s"), "--jobs", "1"]) == 0  # without --storage
    assert "2 trials: 2 complete" in capsys.readouterr().out
    assert not (tmp_path / "s/journal.log").exists()
    for other in (str(tmp_path / "other.log"), f"sqlite:///{tmp_path}/other.db"):
        with pytest.raises(UserError, match=r"the trials of \S+/s are in sqlite:\S+/s\.db, not in"):
            sweep(which, tmp_path / "s", storage=other)
    (tmp_path / "s.db").rename(tmp_path / "moved.db")
    assert scores(sweep(which, tmp_path / "s", storage=f"sqlite:///{tmp_path}/moved.db")) == first
    with pytest.raises(UserError, match="not in"):
        sweep(which, tmp_path / "t", storage=url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql://me:a:b@h/x", "postgresql://me:***@h/x"),
        ("postgresql://me:a@b/c@h:5/x?password=d", "postgresql://me:***@h:5/x?…"),
        ("postgresql://me@h/x", "postgresql://me@h/x"),
        ("shared/journal.log", "shared/journal.log"),
    ],
)
def test_passwords_are_not_without_password(url, text):
    assert without_password(url) == text


def test_one_place_has_many_spellings():
    assert same_place("postgresql://me:***@h:5/x", "postgresql+psycopg2://other:p@h:5/x?sslmode=require")
    assert not same_place("postgresql://me@h:5/x", "postgresql://me@h:5/y")
    assert same_place("journal.log", str(Path("journal.log").absolute()))


# ---- with one


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def command(which: Spec, folder: Path, url: str) -> list[str]:
    """`deeprnn sweep` with this sweep as a file."""
    words = ["sweep", str(as_file(which, folder)), "--out", str(folder / "s"), "--jobs", "1", "--pack", "2"]
    return [sys.executable, "-m", "deeprnn", *words, "--storage", url]


def start(which: Spec, folder: Path, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(which, folder, url), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_wrong_password_and_a_missing_database_are_sentences(server, tmp_path):
    for url, told in (
        (server.url("postgres", "hush-hush"), "authentication failed"),
        (server.url("nosuch"), 'database "nosuch" does not exist'),
    ):
        with pytest.raises(UserError, match=told) as error:
            sweep(spec(), tmp_path / "s", storage=url)
        check_kept_secret(tmp_path, error.value)


def test_a_sweep_in_postgresql_is_remembered_without_its_password(server, tmp_path, monkeypatch, capsys):
    url, which = server.database("remembered"), spec(**SHORT)
    first = scores(sweep(which, tmp_path / "s", storage=url))
    assert first == scores(sweep(which, tmp_path / "t"))
    owner = read_owner(tmp_path / "s")
    assert owner is not None
    assert owner.storage == f"postgresql://sweeper:***@127.0.0.1:{server.port}/remembered"
    with pytest.raises(UserError, match="give that --storage with its password"):
        sweep(which, tmp_path / "s")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    plain = f"postgresql://sweeper@127.0.0.1:{server.port}/remembered"
    assert scores(sweep(which, tmp_path / "s", storage=plain)) == first
    assert scores(sweep(which, tmp_path / "s")) == first  # by its folder alone
    record, _ = score_winner(load_spec(tmp_path / "s"), tmp_path / "s")
    assert main(["sweep", str(tmp_path / "s"), "--score-test"]) == 0
    shown_now = capsys.readouterr()
    assert f"test {record['test']:.4f}" in shown_now.out
    check_kept_secret(tmp_path, shown_now.out, shown_now.err)


def test_killed_in_mid_sweep_it_goes_on_from_postgresql(server, tmp_path):
    which = spec(overrides={"stop.epochs": 12}, trials=4)
    whole = scores(sweep(which, tmp_path / "whole"))
    url = server.database("killed")
    process = start(which, tmp_path, url)
    wait_for(lambda: list(tmp_path.glob("s/packs/*/last.json")), process)
    process.send_signal(signal.SIGKILL)
    check_kept_secret(tmp_path, process.communicate(timeout=LIMIT)[0])
    view = Quiet()
    outcome = sweep(load_spec(tmp_path / "s"), tmp_path / "s", pack=2, view=view, storage=url)
    assert outcome.finished
    assert any("going on with" in remark for remark in view.remarks)
    assert scores(outcome) == pytest.approx(whole)


def test_two_coordinators_begin_at_once_and_train_every_trial_once(server, tmp_path):
    which = spec(trials=6, overrides={"stop.epochs": 2})
    url = server.database("shared")
    both = [start(which, tmp_path / name, url) for name in ("a", "b")]
    told = [process.communicate(timeout=LIMIT)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    ended = [
        line.split(":")[0].strip() for text in told for line in text.splitlines() if ": complete" in line
    ]
    assert sorted(ended) == [f"trial {number}" for number in range(6)]
    outcome = sweep(load_spec(tmp_path / "a/s"), tmp_path / "a/s", storage=url)
    assert outcome.finished
    assert scores(outcome) == pytest.approx(scores(sweep(which, tmp_path / "whole")))
    check_kept_secret(tmp_path, *told)


def test_a_server_that_stops_in_mid_sweep_ends_it_saved_and_it_goes_on_later(server, tmp_path):
    which = spec(overrides={"stop.epochs": 4000, "save.seconds": 600.0}, trials=2)  # of which it begins one
    url = server.database("stopped")
    process = start(which, tmp_path, url)
    wait_for(lambda: list(tmp_path.glob("s/trials/*/metrics.jsonl")), process)
    server.stop()
    try:
        out = process.communicate(timeout=LIMIT)[0]
    finally:
        server.start()
    assert process.returncode == 2, out
    assert "answers no more" in out
    assert "Traceback" not in out
    assert list(tmp_path.glob("s/packs/*/last.json")), "what was trained is saved"
    view = Quiet()
    view.changed = lambda study, running: received.append(signal.SIGINT)  # long enough: it has gone on
    received: list[int] = []
    sweep(load_spec(tmp_path / "s"), tmp_path / "s", pack=2, view=view, received=received, storage=url)
    assert view.remarks[0] == "going on with 1 begun trial"
    check_kept_secret(tmp_path, out)
