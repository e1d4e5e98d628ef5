"""The chart, the roll and the synthesiser of the browser, in a browser and as one script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deeprnn.model.metrics import HEADLINE
from deeprnn.render import held_notes
from deeprnn.render.browser import PARTS, bundle, encode_probabilities, timbres_module, to_lists
from deeprnn.render.synth import TIMBRES, Synthesis
from tests.web.browser import launch


def test_the_timbres_are_those_of_the_wav_files():
    table = json.loads(timbres_module().removeprefix("export const TIMBRES = ").rstrip(";\n"))
    assert set(table) == set(TIMBRES)
    for name, timbre in TIMBRES.items():
        assert table[name]["partials"] == list(timbre.partials)
        assert (table[name]["decay"], table[name]["detune"]) == (timbre.decay, timbre.detune)


def test_metrics_have_the_names_that_results_are_written_with():
    names = re.search(r"^export const UNITS = \{(.*)\};$", (PARTS / "dom.js").read_text(), re.MULTILINE)
    assert names is not None
    pairs = re.findall(r'"?([\w/]+)"?: "([^"]*)"', names[1])
    assert dict(pairs) == {headline.name: headline.words for headline in HEADLINE.values()}


def test_a_bundle_holds_every_part_once_after_what_it_needs():
    main = (
        'import { Roll } from "./parts/roll.js";\nimport { Player } from "./parts/synth.js";\nnew Roll();\n'
    )
    script = bundle(main)
    assert re.findall(r"^const \$(\w+) = ", script, re.MULTILINE) == ["dom", "roll", "timbres", "synth"]
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert script.endswith("const { Roll } = $roll;\nconst { Player } = $synth;\nnew Roll();\n")
    assert "</script" not in script


def test_every_part_imports_and_exports_as_the_bundle_knows():
    for path in PARTS.glob("*.js"):
        main = f'import {{ x }} from "./{path.name}";\n'
        assert not re.search(r"^(import|export)\b|\bimport\(", bundle(main), re.MULTILINE), path.name


def test_rolls_and_probabilities_as_the_page_has_them():
    roll = np.zeros((2, 4), np.uint8)
    roll[1, [0, 3]] = 1
    assert to_lists(roll) == [[], [0, 3]]
    assert encode_probabilities(np.array([0.0, 0.25, 1.0])) == "AID/"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """An empty page that has the parts at hand as `parts`."""
    names = ["timbres", *(path.stem for path in PARTS.glob("*.js"))]
    main = "".join(f'import {{ x as {n} }} from "./{n}.js";\n' for n in names)
    script = re.sub(r"^const \{ x as .*\n", "", bundle(main), flags=re.MULTILINE)
    script += f"window.parts = {{ {', '.join(f'{n}: ${n}' for n in names)} }};"
    for browser in launch():
        page = browser.new_page(viewport={"width": 700, "height": 500})
        style = "".join((PARTS / f"{name}.css").read_text() for name in ("colours", "parts"))
        style += "body { font-family: 'DejaVu Sans', Verdana, sans-serif }"  # wide, where a system has no narrower one
        page.set_content(f'<style>{style}</style><div id="box"></div><script type="module">{script}</script>')
        page.wait_for_function("window.parts")
        yield page


@pytest.mark.browser
@pytest.mark.parametrize(("name", "pitch"), [("piano", 40), ("piano", 69), ("piano", 100), ("organ", 60)])
def test_a_tone_is_that_of_the_wav_files(page: Any, name: str, pitch: int):
    """One key held, dry: the browser's tone is what the WAV file has between attack and release."""
    rate, program = 16000, {"piano": 0, "organ": 19}[name]
    roll = np.zeros((8, 88), np.uint8)
    roll[:, pitch - 21] = 1
    (note,) = held_notes(roll)
    piece = Synthesis(roll, tempo=120, program=program, rate=rate)
    dry = np.zeros((2, 8000), np.float32)
    piece._play(0, dry)
    script = "([n, p, v]) => parts.synth.tone(p, v, parts.timbres.TIMBRES[n], 16000, 8000).map((side) => [...side])"
    heard = np.array(page.evaluate(script, [name, pitch, note.velocity]))
    steady = slice(round(TIMBRES[name].attack * rate), 8000)
    np.testing.assert_allclose(heard[:, steady], dry[:, steady], atol=1e-4 * np.abs(dry).max())


@pytest.mark.browser
def test_velocities_are_those_of_the_wav_files(page: Any):
    roll = (np.random.default_rng(0).random((60, 88)) < 0.06).astype(np.uint8)
    notes = held_notes(roll, 21, 4)
    given = [{"key": n.pitch - 21, "start": n.start} for n in notes]
    script = "([notes, frames]) => parts.synth.velocities(notes, frames.map((f) => new Set(f)), 4)"
    assert page.evaluate(script, [given, to_lists(roll)]) == pytest.approx([n.velocity for n in notes], abs=1)


@pytest.mark.browser
@pytest.mark.parametrize(
    "values",
    [
        (2e-4, 1e-4),
        (2e-3, 4e-5),
        (3e-7, 1e-8),
        (8.27512, 8.2750),
        (1.0, 0.9999),
        (5e4, 1.0),
        (119.0, 118.99),
        (0.0, 0.0),
        (1.09, 0.55),
        (10.9, 0.55),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_no_two_ticks_have_one_name(page: Any, values: tuple[float, float], wide: bool):
    chart(page, [{"name": "a", "class": "train", "points": [[1, values[0]], [2, values[1]]]}], wide=wide)
    for axis in ("x", "y"):
        names = page.locator(f"#box .tick-{axis}").all_text_contents()
        assert len(names) >= 2
        assert len(set(names)) == len(names)
        assert all(len(name) <= 9 for name in names), names
    # Found and measured at once: a chart that is drawn anew in between would leave parts that lie nowhere.
    left, *names = page.evaluate(
        """() => ["svg", ".tick-y"].flatMap((part) => [...document.querySelectorAll(`#box ${part}`)])
               .map((e) => e.getBoundingClientRect().left)"""
    )
    assert len(names) >= 2
    assert min(names) >= left, "a name is cut off"


@pytest.mark.browser
def test_whole_epochs_have_whole_names(page: Any):
    chart(page, [{"name": "a", "class": "train", "points": [[1, 5.0], [2, 4.0]]}])
    assert page.locator("#box .tick-x").all_text_contents() == ["1", "2"]


@pytest.mark.browser
def test_within_an_epoch_the_axis_has_fractions(page: Any):
    chart(page, [{"name": "a", "class": "train", "points": [[0.02, 5.0], [0.41, 4.0]]}])
    names = page.locator("#box .tick-x").all_text_contents()
    assert len(set(names)) == len(names) >= 2


@pytest.mark.browser
def test_charts_take_odd_input(page: Any):
    chart(page, [])
    assert "nothing measured yet" in page.locator("#box").inner_html()
    chart(
        page, [{"name": "a<b", "class": "s0", "points": [[1, 2.0]]}], guides=[{"name": "x & y", "value": 2.5}]
    )
    assert page.locator("#box circle.dot").count() == 1
    chart(
        page, [{"name": "a", "class": "s0", "points": [[i, 1 / (i + 1)] for i in range(60_000)]}], wide=True
    )
    assert page.locator("#box path.line").count() == 1
    dots = [{"name": n, "class": "s0", "dots": True, "points": [[1000, 8.0, 0.1, n]]} for n in "ab"]
    chart(page, dots)
    assert page.locator("#box .dot-name").count() == 2


def chart(page: Any, series: list[dict[str, Any]], guides: list[Any] | None = None, **options: Any) -> None:
    page.evaluate(
        """([series, guides, options]) => {
            const chart = parts.chart.lineChart(options);
            document.getElementById("box").replaceChildren(chart.el);
            chart.update(series, guides);
        }""",
        [series, guides or [], options],
    )


@pytest.mark.browser
def test_bars_have_names_and_shares(page: Any):
    rows = [["optimiser.rate", 0.75], ["model.hidden", 0.25]]
    script = "(rows) => document.getElementById('box').replaceChildren(parts.parallel.bars({ rows }))"
    page.evaluate(script, rows)
    assert page.locator("#box .bar-name").all_inner_texts() == ["optimiser.rate", "model.hidden"]
    assert page.locator("#box .bar-share").all_inner_texts() == ["75 %", "25 %"]
    assert page.locator("#box").inner_text().count("object") == 0
