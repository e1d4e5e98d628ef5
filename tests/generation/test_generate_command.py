"""`deeprnn generate` on real, tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deeprnn.errors import UserError
from deeprnn.generation import generate
from deeprnn.generation.primers import read_primer, run_data
from deeprnn.render import midi_bytes
from tests.small_runs import small_run, text_file, tune

pytest.importorskip("tyro")
pytest.importorskip("symusic")

from deeprnn.commands.generate import Generate


def run_json(capsys, **options) -> dict:
    assert Generate(json=True, **options).run() == 0
    return json.loads(capsys.readouterr().out)


def test_music_needs_no_option_but_a_seed(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run_json(capsys, run_folder=small_run("music").path, seed=3)
    assert [Path(f).suffix for f in out["files"]] == [".mid", ".wav", ".png"]
    assert all(Path(f).is_file() for f in out["files"])
    assert 192 < out["length"] <= 256
    assert out["copy_check"]["left_out"] is None
    assert len(out["copy_check"]["passages"]) == 1
    assert set(out["statistics"]) == {"sample", "unseen"}
    assert out["statistics"]["unseen"]["notes_at_once"] > 0
    first = Path(out["files"][0]).read_bytes()
    again = run_json(capsys, run_folder=small_run("music").path, seed=3, formats=("mid",))
    assert Path(again["files"][0]).read_bytes() == first


def test_a_fresh_seed_is_told(tmp_path: Path, capsys):
    options = {"run_folder": small_run("music").path, "out": tmp_path, "formats": ("mid",), "length": 8}
    a, b = run_json(capsys, **options), run_json(capsys, **options)
    assert a["seed"] != b["seed"]
    Generate(**options, seed=a["seed"]).run()
    printed = capsys.readouterr()
    assert f"--seed {a['seed']}" in printed.err
    assert printed.out.strip() == a["files"][0]


def test_a_primer_from_a_midi_file(tmp_path: Path, capsys):
    path = tmp_path / "begin.mid"
    path.write_bytes(midi_bytes(tune(99, 16), steps_per_beat=4))
    run = small_run("music")
    assert (read_primer(run, str(path)) == tune(99, 16)).all()
    assert len(read_primer(run, str(path), 5)) == 5
    out = run_json(
        capsys, run_folder=run.path, primer=str(path), out=tmp_path, formats=("mid",), seed=1, length=8
    )
    assert out["primer"] == 16
    out = run_json(
        capsys, run_folder=run.path, primer=str(path), out=tmp_path, formats=("mid",), seed=1, length=8,
        keep_primer=False,
    )  # fmt: skip
    assert out["primer"] == 0


def test_a_primer_from_the_data_by_number_and_name():
    run = small_run("music")
    data = run_data(run)
    first = data.splits["valid"][0]
    assert (read_primer(run, "valid:1") == first[:32]).all()  # two bars of four steps a beat
    name = data.names["valid"][0]  # type: ignore[union-attr]
    assert (read_primer(run, f"valid:{name}", 10) == first[:10]).all()
    with pytest.raises(UserError, match="valid:1 to valid:"):
        read_primer(run, "valid:900")
    with pytest.raises(UserError, match="near are"):
        read_primer(run, "valid:nobody")
    with pytest.raises(UserError, match="no primer 'nowhere"):
        read_primer(run, "nowhere.mid")


def test_a_run_of_a_search_reads_no_primer_from_the_test_part(monkeypatch):
    """As `evaluate` refuses to score it."""
    run = small_run("music")
    assert len(read_primer(run, "test:1"))
    of_search = {**run.recipe, "evaluation": {**run.recipe.get("evaluation", {}), "test": False}}
    monkeypatch.setattr(type(run), "recipe", property(lambda self: of_search))
    with pytest.raises(UserError, match=r"evaluation\.test=false.*stays unread"):
        read_primer(run, "test:1")
    assert len(read_primer(run, "valid:1"))


def test_a_named_primer_works_in_python_too():
    music = generate.from_run(small_run("music"), primer="valid:1", length=4, seed=0)
    assert music.primer == 32


def silent_run(folder: Path, share: float = 1.0) -> Path:
    """A run whose model expects no note, or in a share of the samples one."""
    import shutil

    from deeprnn.runs import checkpoint

    shutil.copytree(small_run("music").path, folder)
    best = checkpoint.load_best(folder)
    tensors = {name: value.clone() for name, value in best.tensors.items()}
    tensors["predict.V1"][:] = 0
    tensors["predict.b1"][:] = -30.0
    if share < 1:
        tensors["predict.b1"][40] = np.log((1 - share) / share)
    checkpoint.save_best(folder, tensors, best.meta)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_silence_is_refused_and_no_empty_file_is_written(tmp_path: Path, temperature: float):
    run = silent_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"every frame came out silent, .* try another --seed"):
        Generate(run, temperature=temperature, out=tmp_path / "out", length=20, seed=1).run()
    assert not (tmp_path / "out").exists()


def test_some_silent_pieces_are_told(tmp_path: Path, capsys):
    run = silent_run(tmp_path / "run", share=0.6)
    options = {"count": 12, "length": 1, "seed": 1, "formats": ("mid",), "copy_check": False}
    assert Generate(run, out=tmp_path / "out", **options).run() == 0
    assert "warning: no note in " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["music", "char"])
def test_no_length_is_refused(kind: str, tmp_path: Path):
    with pytest.raises(UserError, match="length=0 must be from 1"):
        Generate(small_run(kind).path, length=0, out=tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_a_run_knows_how_many_notes_its_data_has_at_once():
    assert small_run("music").info["data"]["most_notes"] == 2
    assert small_run("char").info["data"]["most_notes"] is None
    music = generate.from_run(small_run("music"), length=64, seed=0, temperature=3.0)
    assert max(int(piece.sum(1).max()) for piece in music) <= 2


def test_text_is_streamed_to_stdout_and_the_rest_to_stderr(capsys):
    run = small_run("char")
    assert Generate(run.path, seed=2, length=40, primer="the cat").run() == 0
    printed = capsys.readouterr()
    expected = generate.from_run(run, seed=2, length=40, primer="the cat")
    assert printed.out == expected[0] + "\n"
    assert "copy check" in printed.err


def test_text_as_json_and_files(tmp_path: Path, capsys):
    out = run_json(
        capsys, run_folder=small_run("word").path, seed=2, length=12, count=3, out=tmp_path, top_k=3
    )
    assert len(out["texts"]) == 3
    assert [Path(f).read_text("utf-8") for f in out["files"]] == out["texts"]


def test_text_primers(tmp_path: Path):
    run = small_run("char")
    assert read_primer(run, "a dog") == "a dog"
    path = tmp_path / "begin.txt"
    path.write_text("the mat")
    assert read_primer(run, str(path)) == "the mat"
    assert read_primer(run, "test:1") in text_file().read_text("utf-8")
    with pytest.raises(UserError, match="number of a line"):
        read_primer(run, "test:x")


def test_without_the_data_the_copy_check_is_left_out(tmp_path: Path, capsys):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(small_run("char").path, folder)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text("utf-8").replace(str(text_file()), "/nowhere/book.txt"), "utf-8")
    out = run_json(capsys, run_folder=folder, seed=1, length=10)
    assert "not here" in out["copy_check"]["left_out"]
    assert len(out["texts"][0]) == 10


def test_copies_are_found(capsys):
    """A model that is made to repeat its primer's text is caught."""
    from deeprnn.generation.copy_check import check

    data = run_data(small_run("music"))
    passages, typical = check([data.splits["train"][0][4:30]], data)
    assert passages[0].length == 26
    assert typical is None or typical < 26


@pytest.mark.parametrize(
    ("options", "words"),
    [({"top_k": 3}, "top_k=3 is for text"), ({"temperature": -1.0}, "temperature=-1"), ({"tempo": 1.0}, "tempo=1"),
     ({"program": 400}, "program=400"), ({"primer_length": 4}, "--primer"), ({"count": 0}, "count=0")],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, options, words):
    with pytest.raises((UserError, ValueError), match=words):
        Generate(small_run("music").path, out=tmp_path, **options).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tempo": 90.0}, "tempo=90.0 is for music"), ({"max_notes": 3}, "max_notes=3 is for music"),
     ({"formats": ("mid",)}, "--formats is for music")],
)  # fmt: skip
def test_options_of_music_are_refused_for_text_before_anything_is_printed(capsys, options, words):
    with pytest.raises(UserError, match=words):
        Generate(small_run("char").path, **options).run()
    assert capsys.readouterr().out == ""


def test_no_format_at_all_is_a_mistake(tmp_path: Path):
    with pytest.raises(UserError, match="names no format"):
        Generate(small_run("music").path, formats=(), out=tmp_path).run()


def test_a_paragraph_is_a_primer_though_no_file_can_have_its_name():
    paragraph = "the cat sat on the mat " * 30
    assert read_primer(small_run("char"), paragraph) == paragraph
    with pytest.raises(UserError, match=r"no primer 'the cat .*\.\.\.'"):
        read_primer(small_run("music"), paragraph)


def test_a_text_primer_that_is_no_text_is_refused(tmp_path: Path):
    music, latin = tmp_path / "tune.mid", tmp_path / "latin.txt"
    music.write_bytes(midi_bytes(tune(1, 16), steps_per_beat=4))
    latin.write_bytes("höre".encode("latin-1"))
    for path in (music, latin):
        with pytest.raises(UserError, match="is not a text file"):
            read_primer(small_run("char"), str(path))
    windows = tmp_path / "windows.txt"
    windows.write_bytes(b"\xef\xbb\xbfthe cat\r\nsat")
    assert read_primer(small_run("char"), str(windows)) == "the cat\nsat"


def test_a_place_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path, capsys):
    from deeprnn.cli import main

    (tmp_path / "file").write_text("")
    run = str(small_run("music").path)
    assert main(["generate", run, "--length", "4", "--formats", "mid", "--out", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert "exists" in error


def test_three_lines_of_python(tmp_path: Path):
    import deeprnn

    run = deeprnn.load_run(small_run("music").path)
    music = generate.from_run(run, seed=1, length=16)
    assert len(music.save(tmp_path / "out" / "tune")) == 3
    assert np.asarray(music[0]).shape == (16, 88)
