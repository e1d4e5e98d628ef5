"""What documents say of results: rebuilt from the files, and true when there is nothing, a part, or all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.reproduction import clean_scores, documents, replications, tables
from deeprnn.reproduction.clean_scores import CleanScore, add_scores, read_scores
from deeprnn.reproduction.documents import DOCUMENTS, SECTIONS, Sources, rebuilt, sections_of, update_document
from deeprnn.reproduction.entries import read_ledger
from tests.reproduction.ledger import entry, write

ROOT = Path(__file__).parents[2]
SOURCES = Sources(ROOT / tables.FOLDER, ROOT / replications.FOLDER, ROOT / "results" / "studies")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_projects_documents_are_what_its_results_say(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert sections_of(text), name
    assert text == rebuilt(text, SOURCES), f"{name} is stale: run `deeprnn report --readme {name}`"


def test_every_section_stands_in_some_document():
    found = [s for name in DOCUMENTS for s in sections_of((ROOT / name).read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(SECTIONS)


def test_a_document_without_markers_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(UserError, match="results:begin"):
        update_document(tmp_path / "README.md", SOURCES)
    (tmp_path / "README.md").write_text("<!-- clean:end --> before <!-- clean:begin -->")
    with pytest.raises(UserError, match="clean:begin"):
        update_document(tmp_path / "README.md", SOURCES)
    assert main(["report", "--readme", str(tmp_path / "none.md")]) == 2
    assert "no file" in capsys.readouterr().err


# ---- reruns


def score(name: str, data: str, model: str, clean: float) -> CleanScore:
    return CleanScore(name, data, model, 11, clean - 0.1, clean, 1000, 900, 2, clean + 0.1, 500, 37)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    made = [entry("jsb", "rnn", s, 8.3 + s / 100) for s in range(1, 6)]
    made += [entry("ptb-word", "dts", s, 108.0 + s / 10) for s in range(1, 4)]
    return write(tmp_path / "published", *made)


def test_no_rerun_is_said_to_be_none(tmp_path: Path, published: Path):
    entries = read_ledger(published)
    assert replications.read_replications(tmp_path / "nowhere") == []
    assert replications.markdown([], entries, tables.TITLES) == "No rerun has been entered yet.\n"
    assert replications.sentence([], entries) == "No rerun has been entered yet.\n"
    assert "No trained model has been scored" in clean_scores.markdown([], tables.TITLES)
    (tmp_path / "folder" / "seed-11" / "runs").mkdir(parents=True)
    empty = replications.read_replications(tmp_path / "folder")
    assert replications.sentence(empty, entries) == "No rerun has been entered yet.\n"


def test_part_of_a_rerun_names_what_is_missing(tmp_path: Path, published: Path):
    home = tmp_path / "folder" / "seed-11"
    write(home / "runs", entry("jsb", "rnn", 11, 8.34), entry("ptb-word", "dts", 11, 130.0))
    add_scores(home / "clean.json", [score("jsb-rnn-000.json", "jsb", "rnn", 8.4)])
    (home / "calls.json").write_text(json.dumps([{"seconds": 570.2}, {"seconds": 20.3}]))
    found, known = replications.read_replications(home.parent), read_ledger(published)
    told = replications.markdown(found, known, tables.TITLES)
    assert told.startswith(
        "**seed-11**: 2 of 23 cells, 590 s in 2 calls; 1 of them within 1 % of the paper's number"
    )
    rest = "nottingham, jsb/dts, jsb/dots, jsb/srnn, jsb/dots-star, musedata, ptb-char, ptb-word/rnn, ptb-word/dots"
    assert f"1 agree, 1 differ, 0 cannot be judged; still to be run: {rest}, ptb-word/srnn." in told
    assert "| JSB Chorales | RNN | 8.338 | 8.330 ± 0.016 | 8.340 | +0.010 | 0.59 | agrees | 8.400 |" in told
    assert "| PTB words | DT(S)-RNN | 112 | 108.2 ± 0.1 | 130.0 | +21.8 | " in told
    assert "| differs | — |" in told
    assert replications.sentence(found, known).startswith("seed-11: 2 of 23 cells, 590 s in 2 calls; ")
    whole = [entry(c.data, c.model, 11, c.value) for c in paper.CELLS]
    write(tmp_path / "all" / "seed-12" / "runs", *whole)
    (other,) = replications.read_replications(tmp_path / "all")
    said = replications.sentence([other], known)
    assert said.startswith("seed-12: all 23 cells; 23 of them within 1 %")
    assert "still to be run" not in said


def test_calls_that_say_nothing_are_refused(tmp_path: Path):
    (tmp_path / "seed-11" / "runs").mkdir(parents=True)
    (tmp_path / "seed-11" / "calls.json").write_text("[{}]")
    with pytest.raises(UserError, match="no list of calls"):
        replications.read_replications(tmp_path)


# ---- clean scores


def test_clean_scores_are_kept_once_and_shown_beside_the_whole(tmp_path: Path):
    path = tmp_path / "clean.json"
    first = score("a.json", "jsb", "rnn", 8.4)
    assert add_scores(path, [first]) == [first]
    assert add_scores(path, [score("a.json", "jsb", "rnn", 9.0)]) == [first], "a run that has a row keeps it"
    add_scores(path, [score("b.json", "jsb", "rnn", 8.6)])
    assert [row.clean for row in read_scores(path)] == [8.4, 8.6]
    told = clean_scores.markdown(read_scores(path), tables.TITLES)
    assert (
        "| JSB Chorales | RNN | 2 | 8.400 ± 0.141 | 8.500 ± 0.141 | 2 songs | 8.600 ± 0.141 | 8.200" in told
    )
    assert " ± 0.141 (37 songs) |" in told
    text = clean_scores.markdown(
        [CleanScore("c", "ptb-word", "rnn", 1, 120.0, 121.0, 1000, 900, 83)], tables.TITLES
    )
    assert "| PTB words | RNN | 1 | 120.0 | 121.0 | 83 lines | — | — |" in text
    path.write_text('[{"entry": "a"}]')
    with pytest.raises(UserError, match="holds no clean scores"):
        read_scores(path)


def test_first_stages_are_of_no_cell(tmp_path: Path, published: Path):
    """The RNN of another size that an sRNN starts from is in the ledger of a rerun, and no RNN of the table."""
    home = tmp_path / "folder" / "seed-11"
    stage = entry("jsb", "rnn", 11, 8.29)
    stage["recipe"]["model"]["hidden"] = [400]
    write(home / "runs", entry("jsb", "rnn", 11, 8.34), stage)
    names = [path.name for path in sorted((home / "runs").iterdir())]
    add_scores(home / "clean.json", [score(name, "jsb", "rnn", 8.0 + n) for n, name in enumerate(names)])
    (found,) = replications.read_replications(home.parent)
    (row,) = replications.clean_of_cells([found], read_ledger(published))
    assert row.clean == 8.0


def test_the_project_s_own_sources_are_found_from_its_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert documents.rebuilt((ROOT / "docs/audit.md").read_text(encoding="utf-8"), Sources())
