"""The HTML report: one file, whole, about any mixture of runs."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprnn.errors import UserError
from deeprnn.render.browser import encode_probabilities
from deeprnn.reproduction.html import collect, report_html, write_report
from deeprnn.reproduction.html.gather import PiecePrediction, TextPrediction, groups, predict, score
from deeprnn.reproduction.html.sections import difference, part, settings, spread
from deeprnn.runs.folder import load_run
from tests.small_runs import small_run
from tests.web.browser import launch

pytest.importorskip("symusic")
VOID = {"meta", "br", "img", "input", "hr", "link"}


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order, and remembers addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def everything() -> str:
    kinds = [small_run("music", 1), small_run("music", 2), small_run("music", 1, "dots"), small_run("char"),
             small_run("word")]  # fmt: skip
    return report_html(kinds)


def test_the_page_is_well_formed_and_needs_no_network(everything: str):
    parser = parse(everything)
    assert all(address.startswith("data:") for address in parser.addresses)
    outside = everything.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside
    assert "https://" not in outside
    assert "prefers-color-scheme: dark" in everything
    assert "@import" not in everything


def test_every_group_has_its_parts(everything: str):
    assert everything.count('<section class="run">') == 4  # two seeds are one group
    assert everything.count('class="deeprnn-model"') == 4
    assert everything.count("<h3>Gradient norm</h3>") == 4
    assert len([roll for roll in parts(everything, "roll") if "tempo" in roll]) == 2
    assert everything.count('<pre class="surprise">') == 2
    assert "DOT(S)-RNN" in everything
    assert "tunes: side by side" in everything
    assert " ± " in everything


def parts(page: str, kind: str) -> list[dict[str, Any]]:
    """What charts or rolls are made from."""
    pattern = rf'<div data-part="{kind}"><script type="application/json">(.*?)</script>'
    return [json.loads(text) for text in re.findall(pattern, page)]


def test_charts_and_rolls_hold_what_was_measured(everything: str):
    run = small_run("char")
    (curves,) = [c for c in parts(everything, "chart") if c["label"] == "Learning curves" and c["y"] == "bpc"]
    valid = {line["name"]: line["points"] for line in curves["series"]}["valid"]
    assert valid == [[row["epoch"], pytest.approx(row["valid"], rel=1e-5)] for row in run.metrics()]
    seen = predict(small_run("music", 1, "dots"))
    assert isinstance(seen, PiecePrediction)
    rolls = [roll for roll in parts(everything, "roll") if roll["label"] == "A test piece"]
    frames = [np.flatnonzero(frame).tolist() for frame in seen.frames]
    (roll,) = [r for r in rolls if r["heat"] == encode_probabilities(seen.probabilities)]
    assert roll["frames"] == frames
    assert roll["grid"] == {"steps_per_beat": 4, "low": 21}
    (dots,) = [c for c in parts(everything, "chart") if c["label"].startswith("Result against")]
    assert {line["points"][0][3] for line in dots["series"]} == {"RNN", "DOT(S)-RNN"}


def test_what_stands_in_a_part_cannot_leave_it():
    name = "</script><script>alert(1)</script>"
    page = part("chart", {"label": name})
    parse(page)
    assert "<script>alert" not in page
    assert parts(page, "chart") == [{"label": name}]


def test_files_are_written_with_png_figures(tmp_path: Path):
    path = write_report(
        [small_run("music", 1), small_run("music", 1, "dots")], tmp_path / "deep" / "report.html"
    )
    assert path.stat().st_size > 10_000
    names = sorted(p.name for p in (tmp_path / "deep" / "report-figures").iterdir())
    assert names == [
        "tunes-comparison.png", "tunes-dots-rnn-curves.png", "tunes-dots-rnn-model.png",
        "tunes-dots-rnn-test-piece.png", "tunes-rnn-curves.png", "tunes-rnn-model.png", "tunes-rnn-test-piece.png",
    ]  # fmt: skip


def test_no_run_is_an_error():
    with pytest.raises(UserError, match="at least one run"):
        report_html([])


def copy_of(run, folder: Path, **changes) -> Path:
    shutil.copytree(run.path, folder)
    info = json.loads((folder / "run.json").read_text("utf-8"))
    (folder / "run.json").write_text(json.dumps({**info, **changes}), "utf-8")
    return folder


def test_a_run_without_data_or_result_says_so(tmp_path: Path):
    folder = copy_of(small_run("char"), tmp_path / "r", result=None, status="running")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        re.sub(r'name = ".*book.txt"', 'name = "/nowhere/book.txt"', recipe.read_text("utf-8")), "utf-8"
    )
    page = report_html([load_run(folder)])
    parse(page)
    assert "The data is not here" in page
    assert score(load_run(folder), "test") is None
    assert score(load_run(folder), "valid") == pytest.approx(score(small_run("char"), "valid"))


def test_a_run_that_has_only_begun(tmp_path: Path):
    folder = copy_of(small_run("music"), tmp_path / "r", result=None, status="running")
    for name in ("metrics.jsonl", "best.safetensors", "best.json"):
        (folder / name).unlink()
    page = report_html([load_run(folder)])
    parse(page)
    assert "No epoch is finished yet" in page
    assert "no trained model" in page


@pytest.mark.parametrize("kind", ["noise", "link", "large"])
def test_a_recipe_that_anyone_may_have_written(tmp_path: Path, kind: str):
    """Bytes that are no text are shown as far as they can be; nothing from outside of the folder is."""
    folder = copy_of(small_run("char"), tmp_path / "r")
    recipe = folder / "recipe.toml"
    recipe.unlink()
    (tmp_path / "secret").write_text("a secret")
    if kind == "link":
        recipe.symlink_to(tmp_path / "secret")
    else:
        recipe.write_bytes(b"# \xff\xd9 <b>noise" if kind == "noise" else b"#" * 2_000_000)
    page = settings(load_run(folder))
    parse(page)
    assert "a secret" not in page
    assert ("\ufffd\ufffd &lt;b&gt;noise" in page) == (kind == "noise")
    assert len(page) < 1_200_000


def test_names_cannot_break_the_page(tmp_path: Path):
    folder = copy_of(small_run("word"), tmp_path / "r", label="<script>alert(1)</script>", name='"><b>')
    page = report_html([load_run(folder)])
    parse(page)
    assert "<script>alert" not in page


def test_seeds_are_averaged(tmp_path: Path):
    runs = []
    for seed, value in ((1, 8.0), (2, 8.4)):
        result = {"best_epoch": 1, "train": {"nats_per_frame": 7.0}, "valid": {"nats_per_frame": value + 0.1},
                  "test": {"nats_per_frame": value}}  # fmt: skip
        runs.append(load_run(copy_of(small_run("music"), tmp_path / str(seed), result=result, paper=8.0)))
    (group,) = groups(runs)
    assert group.mean("test") == pytest.approx((8.2, 0.2828427))
    assert group.best is runs[0]
    page = report_html(runs)
    assert "8.200 ± 0.283" in page
    assert "+2.5 %" in page


def test_a_population_stands_for_all_its_members(tmp_path: Path):
    for seed in (1, 2):
        copy_of(small_run("music", seed), tmp_path / f"seed-{seed}")
    (tmp_path / "population.json").write_text(json.dumps({"format": 1, "members": ["seed-1", "seed-2"]}))
    runs = collect([tmp_path, small_run("char").path])
    assert [run.kind for run in runs] == ["music", "music", "char"]
    assert len(groups(runs)) == 2


def test_predictions_are_the_models():
    seen = predict(small_run("music"))
    assert isinstance(seen, PiecePrediction)
    expected = -np.log(np.where(seen.frames > 0, seen.probabilities, 1 - seen.probabilities)).sum(axis=1)
    assert np.allclose(seen.surprise, expected, rtol=1e-3)
    seen = predict(small_run("char"))
    assert isinstance(seen, TextPrediction)
    best = seen.favourites[0]
    assert best == sorted(best, key=lambda pair: -pair[1])
    for symbol, bits, favourites in zip(seen.symbols, seen.surprise, seen.favourites, strict=True):
        if symbol in dict(favourites):
            assert bits == pytest.approx(-np.log2(dict(favourites)[symbol]), abs=1e-3)


def test_numbers_are_written_with_sense():
    assert spread((8.3384, 0.0)) == "8.338"
    assert spread((107.54, 1.23)) == "107.5 ± 1.2"
    assert spread(None) == "–"
    assert "better" in difference((8.0, 0), 8.3)
    assert difference(None, 8.3) == "–"
    assert "−3.6 %" in difference((8.0, 0), 8.3)
    assert "±0.0 %" in difference((8.2999, 0), 8.3)


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_charts_fit_and_the_sample_plays(tmp_path: Path, width: int):
    runs = [small_run("music"), small_run("music", 1, "dots"), small_run("word")]
    path = write_report(runs, tmp_path / "report.html", figures=False)
    troubles, requests = [], []
    for browser in launch():
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".chart path.line")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.evaluate(
            "[...document.querySelectorAll('.chart, .roll')].map(e => e.getBoundingClientRect().right)"
        )
        assert len(boxes) >= 12
        assert max(boxes) <= width
        page.locator("text=▶ Play").first.click()
        page.wait_for_function(
            "[...document.querySelectorAll('.roll')].some(e => Number(e.dataset.playhead) > 0.5)"
        )
        page.click("text=■ Stop")
        page.wait_for_function(
            "[...document.querySelectorAll('.roll')].every(e => e.dataset.playhead === '')"
        )
    assert troubles == []
    assert [url for url in requests if not url.startswith(("data:", "file:"))] == []
