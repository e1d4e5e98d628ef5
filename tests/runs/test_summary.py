"""One summary of a run, whoever asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.reproduction.html.gather import groups, score
from deeprnn.reproduction.html.sections import results_table
from deeprnn.runs.folder import Run
from deeprnn.runs.summary import Curve, summarise, summary
from deeprnn.web.library import Library
from deeprnn.web.limits import Limits
from tests.web.runs import write_run


def on_page(folder: Path) -> dict:
    (entry,) = Library([folder.parent], Limits()).entries()
    return entry.summary


@pytest.mark.parametrize("kind", ["music", "char", "word"])
@pytest.mark.parametrize("finished", [True, False])
def test_terminal_report_and_page_say_the_same(tmp_path: Path, kind: str, finished: bool):
    folder = tmp_path / "runs" / "r"
    write_run(folder, kind=kind)
    info = json.loads((folder / "run.json").read_text())
    if not finished:
        info["result"] = None
    (folder / "run.json").write_text(json.dumps(info))
    run, page = Run(folder), on_page(folder)
    terminal = summary(run)
    assert terminal["valid"] is not None
    assert (terminal["test"] is not None) == finished
    for name in ("train", "valid", "test", "best_epoch", "epochs", "metric", "label", "data", "parameters"):
        assert terminal[name] == page[name], name
    for split in ("train", "valid", "test"):
        assert score(run, split) == terminal[split]


def test_a_run_cut_off_or_by_uncommitted_code_is_marked_everywhere(tmp_path: Path, capsys):
    """On the terminal, in the report and on the page: no number of it stands there like any other."""
    folder = tmp_path / "runs" / "r"
    write_run(folder, kind="music")
    info = json.loads((folder / "run.json").read_text())
    assert main(["runs", str(folder.parent)]) == 0
    assert "†" not in capsys.readouterr().out
    assert on_page(folder)["marks"] == []
    assert "†" not in results_table(groups([Run(folder)]))
    changes = {"reason": "2.5 minutes passed", "commit": "0123456789ab+"}
    (folder / "run.json").write_text(json.dumps({**info, **changes}))
    told = ["cut off by time", "code with changes in no commit"]
    assert on_page(folder)["marks"] == summary(Run(folder))["marks"] == told
    assert main(["runs", str(folder.parent)]) == 0
    shown = capsys.readouterr().out
    assert "r † " in shown
    assert "† cut off by time; code with changes in no commit: r" in " ".join(shown.split())
    html = results_table(groups([Run(folder)]))
    assert "†</td>" in html
    assert "1 of 1 cut off by time; 1 of 1 code with changes in no commit</p>" in html


def test_before_its_end_a_run_shows_the_epoch_of_its_best_validation():
    rows = [{"epoch": e, "train": 10.0 - e, "valid": abs(e - 3) + 5.0} for e in range(1, 7)]
    told = summarise({"data": {"kind": "music"}, "result": None}, Curve.of(rows))
    assert (told["train"], told["valid"], told["test"]) == (7.0, 5.0, None)
    assert (told["best_epoch"], told["epochs"]) == (3, 6)


@pytest.mark.parametrize(
    "info", [{}, {"data": 3, "result": [1]}, {"data": {"kind": "odd"}, "result": {"test": {}}}]
)
def test_whatever_run_json_holds_there_is_a_summary(info: dict):
    told = summarise(info, Curve.of([{"valid": None}, {"valid": float("nan"), "epoch": "x"}]))
    assert told["test"] is None
    assert told["valid"] is None
    assert told["epochs"] == 2
