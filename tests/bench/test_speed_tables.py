"""The pages say what the results say; a later row replaces an earlier one; what is missing is a dash."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks import gpu_kernels, plot_growth, shapes, speed_format, speed_goals, speed_readme, speed_tables
from benchmarks.records import Results, read
from benchmarks.shapes import LOOP, OURS, TORCH, Shape

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.errors import UserError
from deeprnn.reproduction.documents import SECTIONS, marker

ROOT = Path(__file__).parents[2]
GPU = read(speed_tables.BENCH / "h200-layers")
SHAPE = Shape("gru", 400, 16, 128)


def write(path: Path, *rows: dict, commit: str = "c0ffee0123") -> Path:
    """A file of results."""
    about = {"commit": commit, "versions": {"torch": "2.0"}, "machine": {"cpu": "x", "threads": 1}}
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"about": about}, *rows)))
    return path


def row(peer: str, us: float, shape: Shape = SHAPE, how: str = "graph_train") -> dict:
    """µs a step as a row has them."""
    return {"peer": peer, **asdict(shape), f"{how}_us": us * shape.steps}


@pytest.mark.parametrize("page", speed_tables.sections())
def test_the_pages_are_what_the_results_say(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    places = speed_tables.sections()[page]
    assert text == speed_tables.rebuilt(text, places), f"{page}: run `python benchmarks/speed_tables.py`"
    others = [marker(name, which) for name in SECTIONS for which in ("begin", "end")]
    marks = [line for line in text.splitlines() if line.startswith("<!--") and line not in others]
    assert len(marks) == 2 * len(places), "a place that nothing fills, or one that is missing"


def test_a_page_whose_number_is_another_is_noticed():
    (name, content), *_ = speed_tables.sections()["README.md"].items()
    text = f"<!-- {name}:begin -->\n{content}<!-- {name}:end -->\n"
    assert speed_tables.rebuilt(text, {name: content}) == text
    assert speed_tables.rebuilt(text.replace("×", "x", 1), {name: content}) == text


def test_a_later_file_replaces_rows_and_leaves_the_others(tmp_path):
    write(tmp_path / "1.jsonl", row(OURS, 4.0), row(TORCH, 20.0), row(LOOP, 100.0), commit="aaaaaaaaa")
    write(tmp_path / "2.jsonl", row(OURS, 2.0), {**row(LOOP, 0.0), "failed": "off"}, commit="bbbbbbbbb")
    found = read(tmp_path)
    assert found.microseconds(SHAPE, OURS, "graph_train") == 2.0
    assert found.microseconds(SHAPE, TORCH, "graph_train") == 20.0
    assert found.layers[SHAPE, OURS]["about"]["commit"] == "bbbbbbbbb"
    assert [why for *_, why, _ in found.failures([SHAPE])] == ["off"]
    listed = speed_format.sources(found, [SHAPE], "folder")
    assert "1.jsonl): 1 rows, commit aaaaaaa" in listed
    assert "2.jsonl): 2 rows, commit bbbbbbb" in listed


def test_a_file_that_was_cut_off_has_its_whole_lines(tmp_path):
    file = write(tmp_path / "1.jsonl", row(OURS, 4.0), row(TORCH, 20.0))
    text = file.read_text()
    file.write_text(text[:-20])
    assert list(read(file).layers) == [(SHAPE, OURS)]
    file.write_text("nonsense\n" + text)
    with pytest.raises(UserError, match="line 1"):
        read(file)
    assert read(tmp_path / "nowhere") == Results()


def test_ratios_and_dashes():
    assert speed_format.against(2.0, 20.0) == "20.0 · 10×"
    assert speed_format.against(2.0, 3.0) == "3.00 · 1.5×"
    assert speed_format.against(None, 3.0) == "3.00"
    assert speed_format.gain(2.0, None) == "-"
    assert [speed_format.figure(x) for x in (0.123, 9.999, 99.94, 1234.5, None)] == [
        "0.12",
        "10.0",
        "99.9",
        "1,234",
        "-",
    ]


def test_like_stands_beside_like(tmp_path):
    """A graph's time is never divided by a call's from Python."""
    deep = [Shape("rnn", 128, batch, 128) for batch in (1, 16, 64)]
    rows = [row(OURS, 1.0, s) for s in deep] + [row(TORCH, 8.0, s, "python_train") for s in deep]
    text = speed_readme.readme(read(write(tmp_path / "1.jsonl", *rows)), Results())
    assert "| RNN, 128 units | - | - | - | - | - | - |" in text
    rows += [row(TORCH, 3.0, s) for s in deep]
    text = speed_readme.readme(read(write(tmp_path / "1.jsonl", *rows)), Results())
    assert "| RNN, 128 units | - | - | - | 3.0× | 3.0× | 3.0× |" in text


def test_goals_are_told_met_and_missed(tmp_path):
    s = Shape("gru", 512, 1, 128)
    found = read(write(tmp_path / "1.jsonl", row(OURS, 2.0, s), row(OURS, 5.0, Shape("gru", 512, 16, 128))))
    lines = {line[0]: line[1:] for line in speed_goals.gpu_goal_rows(found)}
    assert lines["GRU 512"] == [
        "B=1: **2** of 2.5",
        "B=16: 5 of 4.5: missed",
        "B=64: - of 8",
        "B=256: - of 22",
    ]
    pairs = [(s, 1.0, 3.0), (Shape("rnn", 64, 1, 128), 1.0, 1.5), (SHAPE, None, 1.0)]
    assert speed_goals.counted(pairs, least=2) == "1 of 2. Not: RNN 64, B = 1 (1.50×)"
    assert speed_goals.counted(pairs, most=2) == "1 of 2. Not: GRU 512, B = 1 (3.00×)"


def test_every_goal_is_about_a_shape_that_is_measured():
    measured = {shape for group in shapes.GPU_GROUPS.values() for shape in group()}
    for goal in speed_goals.GOALS:
        assert {replace(goal.shape, batch=batch) for batch in goal.microseconds} <= measured


@pytest.mark.parametrize("kernel", [name for name in gpu_kernels.KERNELS if name != "gates"])
def test_every_kernel_has_its_word(kernel):
    plans = gpu_kernels.KERNELS[kernel](schedule(gpu_kernels.CELLS["rnn512"], False), 16, 1, False, Device())
    word = {"cluster": "cluster", "tensor_core": "cluster, tensor cores", "whole_card": "whole card",
            "whole_card_tensor_core": "whole card, tensor cores"}[kernel]  # fmt: skip
    assert {speed_format.kernel_of(plan.describe()) for plan in plans} == {word}
    assert speed_format.kernel_of("stepwise: library products") == "stepwise"


STEEP = 1.5
"""times as steep as the axis, in the logarithm: what has to be explained"""


def test_no_cliff_of_the_picture_is_left_without_a_word():
    page = " ".join((ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split())
    words = {"hidden": "units", "batch": "rows", "steps": "steps", "depth": "layers"}
    cliffs = []
    for curve in shapes.GPU_GROWTH:
        found = plot_growth.points(curve, OURS, lambda s, peer: GPU.microseconds(s, peer, speed_goals.GRAPH))
        for (s, a), (t, b) in pairwise(found):
            x, y = getattr(s, curve.field), getattr(t, curve.field)
            if math.log(b / a) > STEEP * math.log(y / x):
                cliffs.append(f"{x:,} to {y:,} {words[curve.field]}")
    assert cliffs
    assert [text for text in cliffs if text not in page] == []


def test_pictures_are_drawn_from_part_of_a_measurement(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_growth.cpu_figure(Results()) is None
    few = [row(OURS, float(i), s, "python_train") for i, s in enumerate(shapes.CPU_GROWTH[0].shapes[:2], 1)]
    drawn = plot_growth.cpu_figure(read(write(tmp_path / "1.jsonl", *few)))
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    few = [row(OURS, float(i), s) for i, s in enumerate(shapes.GPU_GROWTH[1].shapes, 1)]
    assert plot_growth.gpu_figure(read(write(tmp_path / "1.jsonl", *few))).startswith(b"\x89PNG")
