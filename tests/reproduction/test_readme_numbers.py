"""Every number in the README's results, computed again from the JSON alone: numpy, scipy and json, nothing of ours.

Which runs a cell has is decided here anew as well: Table 1's sizes, the recipe with the best mean on validation among
those with three seeds, finished runs before those that were cut off.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

stats = pytest.importorskip("scipy.stats")
ROOT = Path(__file__).parents[2]
KEYS = {"nottingham": "nats_per_frame", "jsb": "nats_per_frame", "musedata": "nats_per_frame", "ptb-char": "bpc",
        "ptb-word": "perplexity"}  # fmt: skip
TITLES = {"Nottingham": "nottingham", "JSB Chorales": "jsb", "MuseData": "musedata", "PTB characters": "ptb-char",
          "PTB words": "ptb-word"}  # fmt: skip
LABELS = {"RNN": "rnn", "DT(S)-RNN": "dts", "DOT(S)-RNN": "dots", "sRNN": "srnn", "DOT(S)-RNN*": "dots-star",
          "DT-RNN": "dt", "DO-RNN": "do", "DOT-RNN": "dot", "sDT(S)-RNN": "sdts", "DT(S)-RNN, depth 3": "dts3",
          "DT(S)-RNN, depth 4": "dts4"}  # fmt: skip
SIZES = {  # Table 1: state, transition, output; of an sRNN its level
    "nottingham": {"rnn": [600], "dts": [400, 400], "dots": [400, 400, 400], "srnn": [400]},
    "jsb": {"rnn": [200], "dts": [400, 400], "dots": [400, 400, 400], "srnn": [400]},
    "musedata": {"rnn": [600], "dts": [400, 400], "dots": [400, 400, 400], "srnn": [600]},
    "ptb-char": {"rnn": [600], "dts": [400, 400], "dots": [400, 400, 600], "srnn": [400]},
    "ptb-word": {"rnn": [200], "dts": [200, 200], "dots": [200, 200, 200], "srnn": [400]},
}
PAPER = {
    "nottingham": {"rnn": 3.225, "dts": 3.206, "dots": 3.215, "srnn": 3.258, "dots-star": 2.95},
    "jsb": {"rnn": 8.338, "dts": 8.278, "dots": 8.437, "srnn": 8.367, "dots-star": 7.92},
    "musedata": {"rnn": 6.990, "dts": 6.988, "dots": 6.973, "srnn": 6.954, "dots-star": 6.59},
    "ptb-char": {"rnn": 1.414, "dts": 1.409, "dots": 1.386, "srnn": 1.412},
    "ptb-word": {"rnn": 117.7, "dts": 112.0, "dots": 107.5, "srnn": 110.0},
}

for (
    sizes
) in SIZES.values():  # the RNN of which an sRNN's levels are made, where it is not the RNN of the table
    if sizes["rnn"] != sizes["srnn"]:
        sizes["level"] = sizes["srnn"]
ANSWERS = ("shown", "not shown", "the RNN is better")

Runs = list[dict[str, Any]]


def cut(run: dict[str, Any]) -> bool:
    return "minutes" in run["stopped"]


def score(run: dict[str, Any], split: str = "test", key: str = "") -> float:
    return run["result"][split][key or KEYS[run["data"]["name"]]]


def of_size(run: dict[str, Any], name: str) -> bool:
    sizes, model = SIZES[run["data"]["name"]].get(name), run["recipe"]["model"]
    if sizes is None:
        return name != "level"
    levels = 2 if name == "srnn" else 1
    return [model["hidden"][0], *model["intermediate"], *model["output_hidden"]] == sizes and len(
        model["hidden"]
    ) == levels


def names_of(run: dict[str, Any]) -> list[str]:
    """What a run counts for: its model, an RNN of an sRNN's level size also as that."""
    names = [run["model"], "level"] if run["model"] == "rnn" else [run["model"]]
    return [name for name in names if of_size(run, name)]


@pytest.fixture(scope="module")
def ledger() -> dict[tuple[str, str], Runs]:
    """The runs of every data set and model that the table is about, in order of seeds."""
    groups: dict[tuple[str, str], dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted((ROOT / "results" / "runs").glob("*.json")):
        run = json.loads(path.read_text())
        for name in names_of(run):
            recipe = {k: v for k, v in run["recipe"].items() if k not in ("seeds", "save", "evaluation")}
            first = {
                k: v
                for k, v in (run["first_stage"] or {}).items()
                if k not in ("seeds", "save", "evaluation")
            }
            seeds = groups[run["data"]["name"], name][json.dumps([recipe, first], sort_keys=True)]
            if run["seed"] not in seeds or cut(seeds[run["seed"]]):
                seeds[run["seed"]] = run
    best = {}
    for cell, recipes in groups.items():
        enough = [list(dict(sorted(r.items())).values()) for r in recipes.values() if len(r) >= 3]
        best[cell] = min(enough, key=lambda runs: np.mean([score(r, "valid") for r in runs]))
    return best


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """The cells of every table row in the results."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text[text.index("<!-- results:begin -->") : text.index("<!-- results:end -->")]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "").replace("−", "-") for cell in line] for line in lines]


def spread(values: list[float], places: int) -> str:
    return f"{np.mean(values):.{places}f} ± {np.std(values, ddof=1):.{places}f}"


def holm(p: list[float]) -> list[float]:
    order = np.argsort(p)
    raised = np.maximum.accumulate([min(1.0, (len(p) - i) * p[k]) for i, k in enumerate(order)])
    return [float(raised[list(order).index(k)]) for k in range(len(p))]


def paired(
    ledger: dict[tuple[str, str], Runs], data: str, models: tuple[str, ...]
) -> tuple[str, Any, np.ndarray]:
    """Of the deep models the best on validation, its test against the RNN's, and the differences."""
    model = min(models, key=lambda m: np.mean([score(r, "valid") for r in ledger[data, m]]))
    shallow = {r["seed"]: score(r) for r in ledger[data, "rnn"]}
    both = [(score(r), shallow[r["seed"]]) for r in ledger[data, model]]
    gaps = np.array([a - b for a, b in both])
    return model, stats.ttest_rel(*zip(*both, strict=True)), gaps


def test_tables_2_and_3(ledger, rows):
    wide = [r for r in rows if r[0] in TITLES and r[-1] in ANSWERS]
    judged = [r for r in rows if r[1] in ANSWERS]
    assert len(wide) == len(judged) == 5
    for row, verdict in zip(wide, judged, strict=True):
        assert (row[0], row[-1]) == (verdict[0], verdict[1])
        data = TITLES[row[0]]
        places = 1 if data == "ptb-word" else 3
        for model, text in zip(PAPER[data], row[1:-1], strict=True):
            value = PAPER[data][model]
            printed = f"{value:.{2 if model == 'dots-star' else places}f}"
            assert text == f"{spread([score(r) for r in ledger[data, model]], places)} ({printed})", (
                data,
                model,
            )
    (stripped,) = [r for r in rows if r[0] == "PTB characters, stripped"]
    for model, text in zip(PAPER["ptb-char"], stripped[1:-1], strict=True):
        assert text == spread([score(r, key="bpc_stripped") for r in ledger["ptb-char", model]], 3)


@pytest.mark.parametrize("models", [("dts", "dots", "srnn"), ("dots-star",)])
def test_verdicts(ledger, rows, models):
    labels = {short: name for name, short in LABELS.items()}
    star = models == ("dots-star",)
    judged = [r for r in rows if (r[1] == "apart" if star else r[1] in ANSWERS)]
    assert [TITLES[r[0]] for r in judged] == [data for data in PAPER if (data, models[0]) in ledger]
    tests = [paired(ledger, TITLES[r[0]], models) for r in judged]
    corrected = holm([test.pvalue for _, test, _ in tests])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for row, (model, test, gaps), p in zip(judged, tests, corrected, strict=True):
        data = TITLES[row[0]]
        places = 1 if data == "ptb-word" else 3
        low, high = test.confidence_interval(0.95)
        gap = f"{gaps.mean():+.{places}f} (95 %: {low:+.{places}f} to {high:+.{places}f})"
        better = f"{(gaps < 0).sum()} of {len(gaps)} seeds"
        assert row[2:6] == [labels[model], gap, better, f"p = {test.pvalue:.2g}, Holm {p:.2g}"], row[0]
        sizes = [ledger[data, m][0]["parameters"] for m in (model, "rnn")]
        assert f"{sizes[0]:,} parameters against {sizes[1]:,}" in row[6], row[0]
        if not star:
            assert row[1] == (
                "not shown" if p >= 0.05 else "shown" if gaps.mean() < 0 else "the RNN is better"
            )
            behind = all((paired(ledger, data, (m,))[2] > 0).all() for m in models)
            assert bool(re.search(f"On {row[0]} the RNN is better than [^.]+ at every seed", text)) == behind


def test_every_cell(ledger, rows):
    details = [r for r in rows if len(r) == 9 and r[0] in TITLES]
    assert len(details) == 23
    for row in details:
        data, model = TITLES[row[0]], LABELS[row[1]]
        runs, places = ledger[data, model], 1 if data == "ptb-word" else 3
        values = [score(r) for r in runs]
        best = score(min(runs, key=lambda r: score(r, "valid")))
        share = 100 * (np.mean(values) / PAPER[data][model] - 1)
        assert row[3:5] == [spread(values, places), str(len(runs))]
        assert row[6:8] == [f"{best:.{places}f}", "0.0 %" if abs(share) < 0.05 else f"{share:+.1f} %"]
        stages = zip(*([s["epochs"] for s in r["stages"]] for r in runs), strict=True)
        for text, epochs in zip(row[5].split(" + "), stages, strict=True):
            known = sorted({e for e in epochs if e is not None})
            assert [int(n) for n in re.sub(r" \(.*", "", text).split("–") if n != "?"] == known[:1] + known[
                1:
            ][-1:]
            assert ("?" in text or "unknown" in text) == (None in epochs)


def test_the_summary_and_the_extra_models(ledger, rows):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = {
        (d, m): np.mean([score(r) for r in ledger[d, m]]) / v
        for d, row in PAPER.items()
        for m, v in row.items()
    }
    runs = sum(len(ledger[cell]) for cell in cells)
    within = sum(ratio <= 1.01 for ratio in cells.values())
    assert f"{len(cells)} of the paper's 23 cells are measured, by {runs} runs; {within} of them are" in text
    extra = [r for r in rows if len(r) == 6 and r[0] in TITLES and r[2].replace(",", "").isdigit()]
    own = ("dt", "do", "dot", "sdts", "dts3", "dts4", "level")
    assert len(extra) == sum(model in own for _, model in ledger)
    for row in extra:
        data = TITLES[row[0]]
        level = row[1] == f"RNN, {SIZES[data]['level'][0]} units"
        mine = ledger[data, "level" if level else LABELS[row[1]]]
        places = 1 if data == "ptb-word" else 3
        marked = any(cut(r) or r["dirty"] for r in mine)
        assert row[3] == spread([score(r) for r in mine], places) + "†" * marked
        assert (int(row[2].replace(",", "")), int(row[4])) == (mine[0]["parameters"], len(mine))
        assert bool(row[5]) == marked


def test_sentences_beside_the_tables():
    """What a NADE gains on the chorales, and of which melodies DOT(S)* is ahead on JSB."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    runs = [json.loads(path.read_text()) for path in sorted((ROOT / "results" / "chorales").glob("*.json"))]
    nade, plain = sorted(runs, key=lambda run: score(run, key="nats_per_frame"))
    assert [run["recipe"]["model"]["output"] for run in (nade, plain)] == ["nade", "plain"]
    for run, words in ((nade, "nats a frame on test with it"), (plain, "with independent notes")):
        assert f"{score(run, key='nats_per_frame'):.3f} {words} ({run['epochs']} epochs" in text
    rows = json.loads((ROOT / "results/replications/seed-12/clean.json").read_text())
    cells = {(r["data"], r["model"]): r for r in rows if r["entry"] != "jsb-rnn-28039ba828-seed-12.json"}
    star, rnn = cells["jsb", "dots-star"], cells["jsb", "rnn"]
    assert f"it has {known(star):.3f} on those where the RNN has {known(rnn):.3f}" in text
    assert f"{star['new_melody']:.3f} on the others where the RNN has {rnn['new_melody']:.3f}" in text


def known(row: dict[str, Any]) -> float:
    """The score on songs whose melody the training part has."""
    new = row["new_melody_symbols"]
    return (row["whole"] * row["symbols"] - row["new_melody"] * new) / (row["symbols"] - new)


# ---- reruns


def reruns() -> dict[str, dict[tuple[str, str], Runs]]:
    """Of every rerun that is kept its runs of a cell, which are of the table's sizes."""
    found: dict[str, dict[tuple[str, str], Runs]] = {}
    for path in sorted((ROOT / "results" / "replications").glob("*/runs/*.json")):
        run = json.loads(path.read_text())
        if of_size(run, run["model"]) and not cut(run):
            cells = found.setdefault(path.parents[1].name, defaultdict(list))
            cells[run["data"]["name"], run["model"]].append(run | {"file": path.name})
    return found


def against(new: list[float], old: list[float]) -> float:
    """Two-sided: a single new seed against the spread of the old ones, several by Welch's test."""
    if len(new) > 1:
        return float(stats.ttest_ind(new, old, equal_var=False).pvalue)
    error = np.std(old, ddof=1) * np.sqrt(1 + 1 / len(old))
    return float(2 * stats.t.sf(abs(new[0] - np.mean(old)) / error, len(old) - 1))


def either(values: list[float], places: int) -> str:
    return spread(values, places) if len(values) > 1 else f"{values[0]:.{places}f}"


def tables_of_reruns() -> dict[str, tuple[str, list[list[str]]]]:
    """The sentence and the rows of every rerun's table in the guide."""
    text = (ROOT / "docs/guide/reproduction.md").read_text(encoding="utf-8")
    text = text[text.index("<!-- replications:begin -->") : text.index("<!-- replications:end -->")]
    parts = re.split(r"\*\*(.+?)\*\*: ", text)[1:]
    out = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| ")][1:]
        out[name] = body.splitlines()[0], [[c.strip().replace("−", "-") for c in row] for row in rows]
    return out


def test_reruns_beside_the_published(ledger):
    found, tables = reruns(), tables_of_reruns()
    assert found.keys() == tables.keys()
    for name, (sentence, rows) in tables.items():
        cells, home = found[name], ROOT / "results" / "replications" / name
        clean = {row["entry"]: row for row in json.loads((home / "clean.json").read_text())}
        assert [(TITLES[r[0]], LABELS[r[1]]) for r in rows] == [
            (d, m) for d, row in PAPER.items() for m in row if (d, m) in cells
        ]
        pairs = [([score(r) for r in cells[c]], [score(r) for r in ledger[c]]) for c in
                 ((TITLES[row[0]], LABELS[row[1]]) for row in rows)]  # fmt: skip
        corrected = holm([against(new, old) for new, old in pairs])
        near = 0
        for row, (new, old), p in zip(rows, pairs, corrected, strict=True):
            data, model = TITLES[row[0]], LABELS[row[1]]
            places = 1 if data == "ptb-word" else 3
            near += np.mean(new) <= 1.01 * PAPER[data][model]
            kept = [clean[r["file"]] for r in cells[data, model]]
            assert [k["whole"] for k in kept] == pytest.approx(new, rel=1e-5), (
                "scored again from what was kept"
            )
            gap = f"{np.mean(new) - np.mean(old):+.{places}f}"
            verdict = "agrees" if p >= 0.05 else "differs"
            assert row[3:7] == [spread(old, places), either(new, places), gap, f"{p:.2g}"]
            assert row[7].partition(" (")[0] == verdict
            assert row[8] == either([k["clean"] for k in kept], places)
        count = {word: sum(row[7].startswith(word) for row in rows) for word in ("agrees", "differs")}
        assert sentence.startswith(f"{len(rows)} of 23 cells" if len(rows) < 23 else "all 23 cells")
        assert f"{near} of them within 1 % of the paper's number or better" in sentence
        assert f"{count['agrees']} agree, {count['differs']} differ" in sentence
