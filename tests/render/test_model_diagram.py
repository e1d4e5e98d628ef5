"""A model taken apart, counted, described and drawn, always from its spec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.model.models import assemble
from deeprnn.model.notation import equations, label, short_count
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.structure import dissect
from deeprnn.render.model_diagram import HIGH, WIDE, model_picture, model_png, model_svg

MUSIC = {"input_size": 9, "output_size": 7}
FAMILY = {
    "rnn": assemble(hidden_sizes=(5,), **MUSIC),
    "dt": assemble(hidden_sizes=(5,), intermediate=4, **MUSIC),
    "dts": assemble(hidden_sizes=(5,), intermediate=4, shortcut="last", input_to="all", **MUSIC),
    "dt-last": assemble(hidden_sizes=(5,), intermediate=(4, 3), input_to="last", **MUSIC),
    "deep": assemble(hidden_sizes=(5,), intermediate=(4, 3, 2), shortcut="all", input_to="all", **MUSIC),
    "do": assemble(hidden_sizes=(5,), output_hidden=(4, 3), output_shortcut=True, **MUSIC),
    "di": assemble(hidden_sizes=(5,), input_mlp=(6, 8), **MUSIC),
    "srnn": assemble(hidden_sizes=(5, 6, 4), **MUSIC),
    "everything": assemble(
        hidden_sizes=(5, 6), intermediate=(4, 3), shortcut="all", input_to="all", output_hidden=(8,), input_mlp=3,
        output_from="all", input_to_levels="all", output_shortcut=True, unit="lp:2", output_unit="maxout:3", **MUSIC,
    ),
    "symbols": assemble(
        hidden_sizes=(5, 5), intermediate=4, output="categorical", input_to_levels="all", bias=False, **MUSIC
    ),
}  # fmt: skip
each_model = pytest.mark.parametrize("spec", FAMILY.values(), ids=FAMILY.keys())


@each_model
def test_counts_are_those_of_the_model_that_is_built(spec):
    model = SequenceModel(spec)
    anatomy = dissect(spec)
    assert anatomy.parameters == sum(p.numel() for p in model.parameters())
    assert anatomy.weights == sum(p.numel() for p in model.parameters() if p.dim() == 2)


@each_model
def test_every_matrix_of_the_model_is_one_link_or_a_part_of_it(spec):
    model = SequenceModel(spec)
    real: dict[str, int] = {}
    for k, level in enumerate(model.levels, 1):
        number = k if len(spec.levels) > 1 else 0
        real |= {f"{number}.{n}": p.numel() for n, p in level.named_parameters() if p.dim() == 2}
    real |= {f"out.{n}": p.numel() for n, p in model.predict.named_parameters() if p.dim() == 2}
    anatomy, mine = dissect(spec), {}
    for link in anatomy.links:
        target = anatomy.layer(link.target)
        place = "out" if target.letter in "oy" else str(target.level)
        name = f"{place}.{link.matrix}"
        mine[name] = mine.get(name, 0) + link.weights
    assert mine == real


@pytest.mark.parametrize("size", paper.TABLE1, ids=lambda s: f"{s.data}-{s.model}")
def test_table_1_to_the_printed_precision(size):
    assert short_count(dissect(paper.spec(size.data, size.model)).weights) == size.printed


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rnn", "RNN"), ("dt", "DT-RNN"), ("dts", "DT(S)-RNN"), ("do", "DO-RNN"), ("srnn", "sRNN"), ("di", "DI-RNN"),
     ("everything", "sDIOT(S)-RNN*")],
)  # fmt: skip
def test_names_are_the_papers(name, expected):
    assert label(FAMILY[name]) == expected


def test_equations_of_dots_are_the_papers():
    assert equations(paper.spec("jsb", "dots")) == [
        "zₜ = σ(W₁ hₜ₋₁ + U₁ xₜ + b₁)",
        "hₜ = σ(W₂ zₜ + U₂ xₜ + S₂ hₜ₋₁ + b₂)",
        "oₜ = σ(V₁ hₜ + b₁)",
        "yₜ = σ(V₂ oₜ + b₂)",
    ]


def test_equations_of_a_stack_name_the_levels():
    lines = equations(assemble(hidden_sizes=(5, 5), bias=False, **MUSIC))
    assert lines[1] == "hₜ⁽²⁾ = σ(W₁⁽²⁾ hₜ₋₁⁽²⁾ + U₁⁽²⁾ hₜ⁽¹⁾)"


@each_model
def test_one_box_per_layer_and_step_and_none_overlap(spec):
    boxes = model_picture(spec).boxes
    assert len(boxes) == 2 * len(dissect(spec).layers)
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert abs(a.x - b.x) >= WIDE or abs(a.y - b.y) >= HIGH, (a.label, b.label)


@each_model
def test_everything_lies_within_the_picture(spec):
    picture = model_picture(spec)
    points = [
        (b.x + sx * b.w / 2, b.y + sy * b.h / 2) for b in picture.boxes for sx in (-1, 1) for sy in (-1, 1)
    ]
    points += [p for c in picture.curves for part in c.parts for p in part] + [
        c.start for c in picture.curves
    ]
    assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in points)


@each_model
def test_no_line_runs_through_a_box(spec):
    picture = model_picture(spec)
    for curve in picture.curves:
        for x, y in _along(curve):
            for box in picture.boxes:
                inside = abs(x - box.x) < box.w / 2 - 1 and abs(y - box.y) < box.h / 2 - 1
                assert not inside, (curve.kind, curve.label, box.label)


def _along(curve, n: int = 40):
    start = curve.start
    for a, b, c in curve.parts:
        for i in range(n + 1):
            t = i / n
            w = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            yield tuple(sum(k * p[d] for k, p in zip(w, (start, a, b, c), strict=True)) for d in (0, 1))
        start = c


@each_model
def test_shortcuts_are_drawn_when_the_model_has_them(spec):
    shown = [c for c in model_picture(spec).curves if c.kind == "shortcut" and c.label]
    assert len(shown) == sum(sum(level.shortcuts) for level in spec.levels)


@each_model
def test_svg_is_well_formed_and_speaks_of_both_steps(spec):
    text = model_svg(spec)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"x", "h", "y", "t", "t−1"} <= words
    assert len(re.findall(r'class="box ', text)) == 2 * len(dissect(spec).layers)


def test_a_title_cannot_break_the_svg():
    picture = ElementTree.fromstring(model_svg(FAMILY["rnn"], title='<script>"&'))
    assert '<script>"&' in "".join(picture.itertext())
    assert not [e for e in picture.iter() if e.tag.endswith("script")]


def test_png_is_drawn():
    pytest.importorskip("matplotlib")
    assert model_png(FAMILY["everything"], dpi=50).startswith(b"\x89PNG")


def describe(**options):
    pytest.importorskip("tyro")
    from deeprnn.commands.describe import Describe

    return Describe(**options)


def test_describe_table1_as_json(capsys):
    assert describe(table1=True, json=True).run() == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 20
    assert rows[4] == {"data": "jsb", "model": "rnn", "units": [200], "parameters": 75200, "paper": "75K"}


def test_describe_prints_and_draws(tmp_path, capsys):
    command = describe(
        model="dots", hidden=(400,), intermediate=(400,), output_hidden=(400,), svg=tmp_path / "a/m.svg"
    )
    assert command.run() == 0
    assert "745,600" in capsys.readouterr().out
    assert (tmp_path / "a/m.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize("name", ["rnn", "dt", "dts", "do", "dot", "dots", "srnn", "sdts", "sdots"])
def test_describe_knows_every_short_name(name):
    expected = {"srnn": "sRNN", "sdts": "sDT(S)-RNN", "sdots": "sDOT(S)-RNN", "rnn": "RNN"}
    upper = {"dt": "DT", "dts": "DT(S)", "do": "DO", "dot": "DOT", "dots": "DOT(S)"}
    assert label(describe(model=name).spec()) == expected.get(name, f"{upper.get(name)}-RNN")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--table1"),
        ({"model": "lstn"}, "'lstn' is neither"),
        ({"model": "rnn", "intermediate": (3,)}, "--intermediate"),
        ({"model": "dts", "output_hidden": (3,)}, "--output-hidden"),
        ({"model": "dots", "hidden": (3, 4)}, "one level"),
        ({"model": "rnn", "hidden": (0,)}, "at least 1"),
        ({"model": "rnn", "unit": "sigmod"}, "sigmoid"),
        ({"model": "rnn", "levels": 3}, "--levels 3: rnn has one level"),
        ({"model": "srnn", "levels": 2, "hidden": (3, 4, 5)}, "--levels 2: --hidden gives 3"),
        ({"model": "srnn", "levels": 0}, "--levels 0"),
        ({"model": "srnn", "levels": -1}, "--levels -1"),
        ({"table1": True, "svg": Path("x.svg")}, "draws nothing"),
    ],
)
def test_describe_says_what_is_wrong(options, words):
    with pytest.raises(UserError, match=words):
        describe(**options).run()


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"model": 3}', b'{"model": {}}', b"\xff\xfe"])
def test_describe_refuses_a_damaged_run(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError):
        describe(model=str(tmp_path)).run()


def test_describe_counts_levels_and_names_what_lp_units_learn(capsys):
    assert describe(model="srnn", levels=3, hidden=(5,), unit="lp:2").run() == 0
    shown = capsys.readouterr().out
    assert "level 3" in shown
    assert "orders and centres" in shown


@pytest.mark.parametrize("member", ["", "seed-1"])
def test_describe_reads_a_run(tmp_path, capsys, member):
    if member:
        (tmp_path / "population.json").write_text('{"members": ["seed-1"]}')
        (tmp_path / member).mkdir()
    (tmp_path / member / "run.json").write_text(json.dumps({"model": FAMILY["dts"].to_dict()}))
    assert describe(model=str(tmp_path), json=True).run() == 0
    assert json.loads(capsys.readouterr().out)["label"] == "DT(S)-RNN"
