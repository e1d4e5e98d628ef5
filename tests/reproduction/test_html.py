"""The HTML report: one file, whole, about any mixture of runs."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import wave
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from deeprnn.errors import UserError
from deeprnn.render.charts import Series, line_chart, roll_svg, scatter, tiny_png
from deeprnn.reproduction.html import collect, report_html, write_report
from deeprnn.reproduction.html.gather import PiecePrediction, TextPrediction, groups, predict, score
from deeprnn.reproduction.html.sections import difference, spread
from deeprnn.runs.folder import load_run
from tests.small_runs import small_run

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
    assert "prefers-color-scheme:dark" in everything
    assert "@import" not in everything


def test_every_group_has_its_parts(everything: str):
    assert everything.count('<section class="run">') == 4  # two seeds are one group
    assert everything.count('class="deeprnn-model"') == 4
    assert everything.count("<h3>Gradient norm</h3>") == 4
    assert everything.count("▶ Play</button>") == 2
    assert everything.count('<pre class="surprise">') == 2
    assert "DOT(S)-RNN" in everything
    assert "tunes: side by side" in everything
    assert " ± " in everything


def test_the_sound_is_a_playable_wav_of_modest_size(everything: str):
    sounds = re.findall(r"data:audio/wav;base64,([A-Za-z0-9+/=]+)", everything)
    assert len(sounds) == 2
    data = base64.b64decode(sounds[0])
    assert len(data) < 1_500_000
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnchannels() == 1
        samples = np.frombuffer(file.readframes(-1), "<i2")
    assert 1000 < np.abs(samples).max() < 32767


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


@pytest.mark.parametrize("values", [(2e-4, 1e-4), (3e-7, 1e-8), (8.27512, 8.2750), (1.0, 0.9999), (5e4, 1.0)])
def test_no_two_ticks_have_one_name(values):
    names = re.findall(r'text-anchor="end">([^<]+)<', line_chart([Series("rate", [1, 2], values)]))
    assert len(names) >= 3
    assert len(set(names)) == len(names)
    assert all(len(name) <= 9 for name in names)


def test_a_start_off_the_scale_is_cut_off_not_drawn_along_the_edge():
    y = [40.0, 20.0, *(8.0 - 0.01 * i for i in range(30))]
    chart = line_chart([Series("a", range(1, 33), y)], skip=0.2)
    clip = re.search(r'<svg x="\S+" y="(\S+)" width="\S+" height="\S+" viewBox', chart)
    points = re.search(r'points="([^"]+)"', chart)
    assert clip
    assert points
    heights = [float(point.split(",")[1]) for point in points[1].split()]
    assert max(heights[:2]) < float(clip[1]) < min(heights[10:])


def test_charts_take_odd_input():
    assert "nothing to draw" in line_chart([Series("a", [], [])])
    assert "circle" in line_chart([Series("a", [1], [2.0])])
    parse(line_chart([Series("a<b", [1, 2, 3], [1.0, float("nan"), 3.0])], level=(2.0, "x & y"), log=True))
    parse(scatter([(1000, 8.0, 0.1, "a"), (1000, 8.0, 0.0, "b")], level=(8.1, "p")))
    for frames in (np.zeros((0, 88)), np.zeros((5, 88)), np.ones((5, 88))):
        parse(roll_svg(frames, probabilities=frames * 0.5, primer=min(2, len(frames))))


def test_tiny_png_is_a_png():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 4), np.uint8)
    assert (np.asarray(image.open(io.BytesIO(tiny_png(pixels)))) == pixels).all()


@pytest.mark.browser
def test_the_play_button_plays_in_a_browser(tmp_path: Path):
    sync_api = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no Chromium here: `make browser` installs it")
    path = write_report([small_run("music")], tmp_path / "report.html", figures=False)
    troubles, requests = [], []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"],
        )
        page = browser.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.click("text=▶ Play")
        page.wait_for_function("document.querySelector('audio').currentTime > 0.3")
        assert page.evaluate("document.querySelector('svg.roll.heard').classList.contains('playing')")
        assert "translate" in page.get_attribute("svg.roll.heard .cursor", "transform")
        page.click("text=Pause")
        assert page.evaluate("document.querySelector('audio').paused")
        browser.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith(("data:", "file:"))] == []
