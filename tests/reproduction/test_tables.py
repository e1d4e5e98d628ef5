"""Tables from the ledger: right numbers, honest gaps, and a README that cannot drift from its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.reproduction import cells, tables
from deeprnn.reproduction.entries import read_entry, read_ledger
from deeprnn.reproduction.extras import extra_rows
from tests.reproduction.ledger import entry, recipe, write

ROOT = Path(__file__).parents[2]


def found(folder: Path, data: str, model: str) -> cells.Row:
    table = tables.rows(tables.read_ledger(folder))
    return next(r for r in table if (r.cell.data, r.cell.model) == (data, model))


def test_mean_deviation_and_best_validation_seed(tmp_path: Path):
    write(
        tmp_path,
        entry("jsb", "rnn", 1, test=8.30, valid=8.5),
        entry("jsb", "rnn", 2, test=8.40, valid=8.2),
        entry("jsb", "rnn", 3, test=8.20, valid=8.4),
    )
    row = found(tmp_path, "jsb", "rnn")
    assert row.ours == pytest.approx(8.30)
    assert row.sd == pytest.approx(0.1)
    assert row.best == 8.40, "the seed is chosen on validation, not on test"
    assert row.difference == pytest.approx(100 * (8.30 / 8.338 - 1))
    assert found(tmp_path, "jsb", "dts").ours is None


def test_of_two_recipes_the_better_on_validation_counts(tmp_path: Path):
    slow = [entry("jsb", "rnn", s, test=8.0, valid=8.6, optimiser__rate=0.5) for s in (1, 2, 3)]
    fast = [entry("jsb", "rnn", s, test=8.5, valid=8.1) for s in (1, 2, 3)]
    lucky = [entry("jsb", "rnn", 1, test=7.0, valid=7.0, optimiser__rate=2.0)]  # one seed is not enough
    write(tmp_path, *slow, *fast, *lucky)
    assert found(tmp_path, "jsb", "rnn").ours == pytest.approx(8.5)


def test_a_model_of_another_size_fills_no_cell(tmp_path: Path):
    write(tmp_path, entry("jsb", "rnn", 1, test=8.3, model__hidden=[400]))
    assert not found(tmp_path, "jsb", "rnn").entries


def test_deviations_are_named(tmp_path: Path):
    plain = entry("jsb", "rnn", 1, 8.3, data__chunk=50, schedule__beta=100.0, regulariser__weight_noise=0.075)
    char = entry("ptb-char", "dots", 1, 1.4, data__lanes=16, optimiser__name="momentum", schedule__name="halving",
                 pretrain__recipe="", init__input_std=0.01, init__output_std=0.001, init__rectifier_bias=0.1,
                 reason="8 minutes passed")  # fmt: skip
    write(tmp_path, plain, char)
    assert found(tmp_path, "jsb", "rnn").deviations == (
        "decay from the best parameters after 4 epochs without a new best",
        "one song order (seed 0) for all seeds",
    )
    assert found(tmp_path, "ptb-char", "dots").deviations == (
        "16 lanes", "momentum 0.9", "no pretraining", "1 of 1 cut off by time",
    )  # fmt: skip


def test_the_star_s_training_and_first_stages_are_named(tmp_path: Path):
    star = entry("jsb", "dots-star", 1, 8.0, optimiser__name="adamw", optimiser__weight_decay=0.05,
                 schedule__name="cosine", stop__epochs=85, regulariser__dropout_output=0.5)  # fmt: skip
    stack = entry("jsb", "srnn", 1, 8.4)
    stack["first_stage"] = recipe("jsb", "rnn", model__hidden=[400], regulariser__weight_noise=0.075)
    write(tmp_path, star, stack)
    named = found(tmp_path, "jsb", "dots-star").deviations
    assert {"adamw with weight decay 0.05", "cosine schedule of 85 epochs", "dropout output 0.5"} <= set(
        named
    )
    row = found(tmp_path, "jsb", "srnn")
    assert "first stage: RNN of 400 units, ? epochs, weight noise 0.075" in row.deviations
    assert row.epochs == "? + 30", "unknown is said as unknown"


def test_entries_of_uncommitted_code_or_cut_off_are_marked(tmp_path: Path):
    changed = {**entry("jsb", "dts3", 1, 8.3), "dirty": True}
    write(tmp_path, changed, entry("jsb", "rnn", 1, 8.3, reason="2 minutes passed"))
    text = tables.markdown(read_ledger(tmp_path))
    assert "8.300† | 1 | 1 of 1 code with changes in no commit |" in text
    assert "**8.300†** (8.338)" in text
    assert "1 of 1 cut off by time" in text
    assert "8.300†" in tables.text_tables(read_ledger(tmp_path))


def test_the_songs_of_nottingham_that_stand_in_two_splits():
    data = pytest.importorskip("deeprnn.data")
    try:
        songs = data.load("nottingham").splits
    except UserError as error:
        pytest.skip(str(error))
    places: dict[bytes, list[tuple[str, int]]] = {}
    for split in ("train", "valid", "test"):
        for number, song in enumerate(songs[split]):
            places.setdefault(song.tobytes(), []).append((split, number))
    twice = [tuple(sum(where, ())) for where in places.values() if len({s for s, _ in where}) > 1]
    assert sorted(twice) == sorted(tables.TWICE)


def test_both_character_counts_are_shown(tmp_path: Path):
    made = [entry("ptb-char", "rnn", s, 1.42) for s in (1, 2)]
    for one in made:
        one["result"]["test"]["bpc_stripped"] = 1.43
    write(tmp_path, *made)
    assert "| PTB characters, stripped | 1.430 ± 0.000 | — |" in tables.markdown(read_ledger(tmp_path))


def test_weight_decay_is_named(tmp_path: Path):
    write(tmp_path, entry("ptb-word", "dts", 1, 112.0, optimiser__name="adamw", optimiser__weight_decay=0.04))
    assert "adamw with weight decay 0.04" in found(tmp_path, "ptb-word", "dts").deviations


def test_dropout_is_named_in_cell_and_verdict(tmp_path: Path):
    write(tmp_path, entry("ptb-word", "rnn", 1, 118.0))
    write(tmp_path, entry("ptb-word", "dots", 1, 108.0, regulariser__dropout_output=0.2))
    assert "dropout output 0.2" in found(tmp_path, "ptb-word", "dots").deviations
    verdict = next(v for v in cells.verdicts(cells.rows(read_ledger(tmp_path))) if v.data == "ptb-word")
    assert "; dropout output 0.2 against no dropout" in verdict.text


def test_weight_noise_is_named_in_cell_and_verdict(tmp_path: Path):
    write(tmp_path, entry("nottingham", "rnn", 1, 3.22, regulariser__weight_noise=0.075))
    write(tmp_path, entry("nottingham", "dots", 1, 3.18, regulariser__weight_noise=0.13))
    assert "weight noise 0.13" in found(tmp_path, "nottingham", "dots").deviations
    verdict = next(v for v in cells.verdicts(cells.rows(read_ledger(tmp_path))) if v.data == "nottingham")
    assert "; weight noise 0.13 against weight noise 0.075" in verdict.text


def test_the_length_of_a_cosine_is_named(tmp_path: Path):
    write(tmp_path, entry("ptb-word", "rnn", 1, 118.0, schedule__name="cosine", stop__epochs=9))
    write(tmp_path, entry("ptb-word", "dts", 1, 112.0, schedule__name="cosine", stop__epochs=24))
    assert "cosine schedule of 9 epochs" in found(tmp_path, "ptb-word", "rnn").deviations
    verdict = next(v for v in cells.verdicts(cells.rows(read_ledger(tmp_path))) if v.data == "ptb-word")
    assert verdict.text.endswith("; cosine schedule of 24 epochs against cosine schedule of 9 epochs")


def test_cells_json_lists_all_23(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path, entry("ptb-word", "srnn", 1, 109.0), entry("ptb-word", "srnn", 2, 111.0))
    assert main(["report", "--cells", "--json", "--ledger", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(c["table"], c["data"], c["model"], c["paper"]) for c in listed] == [
        (c.table, c.data, c.model, c.value) for c in paper.CELLS
    ]
    filled = [c for c in listed if c["ours"] is not None]
    assert len(listed) == 23
    assert [(c["data"], c["model"], c["ours"], c["seeds"], c["metric"]) for c in filled] == [
        ("ptb-word", "srnn", 110.0, 2, "perplexity")
    ]
    assert listed[0]["seeds"] == 0
    assert listed[0]["sd"] is None


def test_an_empty_ledger_gives_tables_of_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", "--ledger", str(tmp_path / "none")]) == 0
    out = capsys.readouterr().out
    assert out.count("—") == 2 * 23
    assert out.count("not measured") == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.pop("seed"), "'seed' is missing"),
        (lambda e: e["result"].pop("test"), "'test' is missing"),
        (lambda e: e["result"]["valid"].update(nats_per_frame=float("nan")), "result.valid is nan"),
        (lambda e: e["recipe"]["optimiser"].update(rat=1), "unknown recipe field 'optimiser.rat'"),
        (lambda e: e.update(curve=[]), "curve"),
        (lambda e: e.update(seed=2), "recipe.seeds is [1]"),
        (lambda e: e.pop("commit"), "'commit' is missing"),
        (lambda e: e["data"].update(kind="video"), "video"),
    ],
)
def test_a_malformed_entry_is_an_error_naming_the_file(tmp_path: Path, change, says: str):
    made = entry("jsb", "rnn", 1, 8.3)
    change(made)
    path = tmp_path / "jsb-bad.json"
    path.write_text(json.dumps(made))
    with pytest.raises(UserError) as caught:
        tables.read_ledger(tmp_path)
    assert "jsb-bad.json" in str(caught.value)
    assert says in str(caught.value)


def test_text_that_is_no_json_is_an_error_naming_the_file(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"seed": 1')
    with pytest.raises(UserError, match=r"x\.json cannot be read"):
        read_entry(tmp_path / "x.json")


def test_the_same_run_twice_is_refused(tmp_path: Path):
    write(tmp_path, entry("jsb", "rnn", 1, 8.3), entry("jsb", "rnn", 1, 8.4))
    with pytest.raises(UserError, match="same recipe and seed"):
        tables.rows(tables.read_ledger(tmp_path))


# ---- does depth help


def ledger_of(folder: Path, shallow: list[float], deep: dict[str, list[float]]) -> cells.Verdict:
    made = [entry("jsb", "rnn", s, v) for s, v in enumerate(shallow, 1)]
    made += [entry("jsb", m, s, v) for m, values in deep.items() for s, v in enumerate(values, 1)]
    write(folder, *made)
    table = tables.rows(tables.read_ledger(folder))
    return next(v for v in cells.verdicts(table) if v.data == "jsb")


def test_a_deep_model_that_wins_is_said_to_win(tmp_path: Path):
    verdict = ledger_of(tmp_path, [8.30, 8.40, 8.35, 8.33], {"dts": [8.10, 8.21, 8.14, 8.15]})
    assert verdict.deep_wins
    assert verdict.text.startswith("shown: DT(S)-RNN −0.195 (95 %: −0.")


def test_a_deep_model_that_does_not_win_is_said_not_to(tmp_path: Path):
    verdict = ledger_of(tmp_path, [8.30, 8.40, 8.35], {"dts": [8.29, 8.45, 8.30], "srnn": [8.5, 8.6, 8.5]})
    assert not verdict.deep_wins
    assert verdict.text.startswith("not shown: DT(S)-RNN −0.003 (95 %: −0.")
    assert "better at 2 of 3 seeds" in verdict.text


def test_the_deep_model_is_chosen_on_validation(tmp_path: Path):
    made = [entry("jsb", "rnn", s, 8.3 + s / 100) for s in (1, 2, 3)]
    made += [entry("jsb", "dts", s, 8.0 + s / 90, valid=8.9) for s in (1, 2, 3)]
    made += [entry("jsb", "dots", s, 8.5 + s / 90, valid=8.1) for s in (1, 2, 3)]
    write(tmp_path, *made)
    verdict = next(v for v in cells.verdicts(tables.rows(tables.read_ledger(tmp_path))) if v.data == "jsb")
    assert verdict.model == "dots", "the test set must not pick its own winner"
    assert not verdict.deep_wins


def test_the_star_is_compared_apart_and_only_when_it_is_finished(tmp_path: Path):
    shallow = [entry("jsb", "rnn", s, 8.3 + s / 100) for s in (1, 2, 3)]
    deep = [entry("jsb", "dts", s, 8.4 + s / 90) for s in (1, 2, 3)]
    star = [entry("jsb", "dots-star", s, 8.0 + s / 90) for s in (1, 2, 3)]
    cut = [entry("jsb", "dots-star", s, 8.0 + s / 90, reason="2.2 minutes passed") for s in (1, 2, 3)]
    for folder, stars in (("done", star), ("cut", cut), ("none", [])):
        write(tmp_path / folder, *shallow, *deep, *stars)
        table = tables.rows(tables.read_ledger(tmp_path / folder))
        verdict = next(v for v in cells.verdicts(table) if v.data == "jsb")
        assert ": DT(S)-RNN +0.1" in verdict.text, "the star does not decide for the others"
        assert ("; DOT(S)-RNN* −0.29" in verdict.text) == (folder == "done")


def test_rows_are_corrected_for_each_other(tmp_path: Path):
    """p = 0.03 in each of two rows is nothing to speak of; the RNN ahead everywhere is said in words."""
    close = [-0.036, -0.015, -0.002, -0.019, -0.026]
    made = [entry(d, "rnn", s, 8.0 + s / 10) for d in ("jsb", "musedata") for s in range(1, 6)]
    made += [entry("jsb", "dots", s, 8.0 + s / 10 + gap) for s, gap in enumerate(close, 1)]
    for model in ("dts", "dots", "srnn"):
        made += [entry("musedata", model, s, 8.0 + s / 10 - 2 * gap) for s, gap in enumerate(close, 1)]
    write(tmp_path, *made)
    judged = {v.data: v for v in cells.verdicts(cells.rows(read_ledger(tmp_path)))}
    test, corrected = judged["jsb"].test, judged["jsb"].corrected
    assert test is not None
    assert test.p is not None
    assert test.p < 0.05 < 2 * test.p == corrected
    assert judged["jsb"].text.startswith("not shown: DOT(S)-RNN −0.020")
    assert not judged["musedata"].deep_wins
    assert "the RNN is better than DT(S)-RNN, DOT(S)-RNN, sRNN at every seed" in judged["musedata"].text


def test_one_seed_proves_nothing(tmp_path: Path):
    verdict = ledger_of(tmp_path, [8.4], {"dts": [8.0]})
    assert not verdict.deep_wins
    assert "one seed, no test" in verdict.text


# ---- README and figures


def test_readme_is_rewritten_between_its_markers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    readme = tmp_path / "README.md"
    readme.write_text("# Top\n\n<!-- results:begin -->\nold 1.234\n<!-- results:end -->\n\nEnd.\n")
    write(tmp_path / "runs", entry("jsb", "dts", 1, 8.2), entry("jsb", "dts", 2, 8.3))
    call = ["report", "--readme", str(readme), "--ledger", str(tmp_path / "runs")]
    assert main(call) == 0
    text = readme.read_text()
    assert text.startswith("# Top\n")
    assert text.endswith("\n\nEnd.\n")
    assert "1.234" not in text
    assert "**8.250 ± 0.071** (8.278)" in text
    assert "1 of the paper's 23 cells are measured, by 2 runs" in text
    assert main(call) == 0
    assert "up to date" in capsys.readouterr().out
    assert readme.read_text() == text


def test_extra_models_have_their_own_table(tmp_path: Path):
    write(tmp_path, entry("jsb", "dt", 1, 8.5), entry("jsb", "dts3", 1, 8.6), entry("jsb", "dts", 1, 8.3))
    listed = extra_rows(tables.read_ledger(tmp_path))
    assert [(r.model, r.ours) for r in listed] == [("dt", 8.5), ("dts3", 8.6)]
    assert listed[1].parameters > listed[0].parameters
    assert "DT(S)-RNN, depth 3" in tables.markdown(tables.read_ledger(tmp_path))


def test_figures_of_a_partial_ledger(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from deeprnn.reproduction.figures import draw_all

    assert draw_all([], tmp_path / "none") == []
    write(tmp_path / "runs", entry("jsb", "rnn", 1, 8.4), entry("jsb", "rnn", 2, 8.3), entry("jsb", "dt", 1, 8.5),
          entry("ptb-word", "dots", 1, 108.0), entry("nottingham", "dots-star", 1, 3.0))  # fmt: skip
    paths = draw_all(tables.read_ledger(tmp_path / "runs"), tmp_path / "images")
    names = {p.stem for p in paths}
    assert names == {
        "learning-jsb",
        "learning-nottingham",
        "learning-ptb-word",
        "cells",
        "parameters",
        "depth",
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
