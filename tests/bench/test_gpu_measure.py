"""The GPU measurements' script, tried on the CPU, and the tables made of what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_kernels  # noqa: E402
import gpu_measure  # noqa: E402
import gpu_stages  # noqa: E402
import kernel_tables  # noqa: E402

from deeprnn.backends import cpu  # noqa: E402
from deeprnn.backends.cuda import nvrtc  # noqa: E402


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "measure.jsonl").read_text().splitlines()]


def test_a_stage_runs_in_its_own_process_and_is_merged(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu_measure.py"), str(tmp_path), "--device", "cpu", "--tiny"]
    subprocess.run([*command, "--only", "curves", "--seconds", "90"], check=True, capture_output=True)
    report = json.loads((tmp_path / "measure.json").read_text())
    assert len(report["curves"]) == len(gpu_stages.points(tiny=True))
    assert all(row["train_us"] > row["forward_us"] > 0 and row["error"] < 1e-5 for row in report["curves"])
    assert [s["ended"] for s in report["stages"]] == ["finished"]


def test_every_stage_has_its_place_in_the_order():
    assert set(gpu_measure.NAMES) == set(gpu_measure.stages())


def test_no_row_begins_after_the_time(tmp_path):
    gpu_measure.child(tmp_path, "curves", "cpu", tiny=True, seconds=0.0)
    *rows, stage = lines(tmp_path)
    assert len(rows) == 1
    assert "stopped" in stage["ended"]


def test_a_stage_that_hangs_is_ended(tmp_path, monkeypatch):
    class Arguments:
        out, device, tiny, commit = tmp_path, "cpu", True, None

    monkeypatch.setattr(gpu_measure, "GRACE", 0.0)
    gpu_measure.run_stage(Arguments(), "curves", 0.05)  # type: ignore[arg-type]
    assert "killed" in lines(tmp_path)[-1]["ended"]


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = cpu.BACKEND.forward
    monkeypatch.setattr(cpu.BACKEND, "forward", lambda *a: [x * 1.001 for x in right(*a)])
    row = gpu_stages.curve_row(gpu_stages.points(tiny=True)[0], "cpu")
    assert "off by" in row["failed"]
    assert "train_us" not in row


def test_every_kernel_that_is_measured_is_compiled_beforehand(monkeypatch):
    compiled = []
    monkeypatch.setattr(nvrtc, "cubin", lambda source, *_: compiled.append(source) or b"")
    keys = gpu_measure.needed()
    wanted = {(p.hidden, p.depth, p.batch, p.members, p.precision) for p in gpu_stages.points()}
    assert wanted <= {key[:5] for key in keys}
    for key, sources in {
        gpu_measure.TRAINING[0]: {"recurrence/cluster.cu", "training/update.cu"},
        (400, 2, 64, 1, "fp32", False, "both"): {"recurrence/tensor_core.cu", "recurrence/max_abs_scan.cu"},
        (800, 2, 16, 1, "fp32", False, "both"): {"recurrence/whole_card.cu"},
        (2000, 2, 16, 1, "fp32", False, "both"): {"recurrence/whole_card_tensor_core.cu"},
        (2000, 2, 1, 5, "fp32", False, "both"): {"stepwise/stepwise.cu"},
    }.items():
        compiled.clear()
        failure, _ = gpu_measure.compile_point(key)
        assert failure == ""
        assert set(compiled) == sources


def test_a_shape_of_every_kernel_can_be_swept(monkeypatch):
    compiled = []
    monkeypatch.setattr(nvrtc, "cubin", lambda source, *_: compiled.append(source) or b"")
    monkeypatch.setattr(gpu_kernels, "WORK", {name: work[:1] for name, work in gpu_kernels.WORK.items()})
    shapes = list(gpu_kernels.shapes(list(gpu_kernels.KERNELS), best=1))
    assert [shape.backward for shape in shapes] == [False, True] * 4
    assert all(gpu_kernels.compile_one(shape) is None for shape in shapes)
    assert [Path(source).stem for source in compiled] == [shape.kernel for shape in shapes]


def measured() -> dict:
    """Two batches of two peers, a population, two epochs and a first call."""
    rows = [
        {"peer": peer, "hidden": 400, "batch": b, "forward_us": us / 2, "train_us": us, "peak_mb": 5.0}
        for peer, times in (("ours", (3.0, 6.0)), ("nn.RNN", (36.0, 30.0)))
        for b, us in zip((1, 16), times, strict=True)
    ]
    base = {"hidden": 400, "depth": 2, "steps": 200, "batch": 1, "precision": "fp32", "path": "cluster"}
    curves = [{**base, "members": m, "train_us": us, "error": 1e-7} for m, us in ((1, 2.0), (15, 3.2))]
    epochs = [{"seeds": 1, "epoch": e, "updates_s": 5.0 / e, "validation_s": 0.1} for e in (1, 2, 5)]
    first = [{"cold_s": 3.0, "cached_s": 1.0, "cached_again_s": 0.001}]
    return {"format": 2, "rows": rows, "curves": curves, "epochs": epochs, "first_call": first}


def test_tables_say_what_was_reached():
    tables = kernel_tables.tables(measured())
    assert "| **deeprnn, CUDA graph** | **3.00** | **6.00** |" in tables["peers-400"]
    assert "36.0 · 12.0× | 30.0 · 5.0×" in tables["peers-400"]
    assert "3.00 **met** | 6.00 missed" in tables["goals"]
    assert "12.0 **met** | 5.0 missed" in tables["goals"]
    assert "1.60 (goal 1.5: missed)" in tables["population"]
    assert "| 1 | 2.50 | 0.10 | 5.0 | 1.5: missed |" in tables["epochs"]


def test_tables_go_between_their_marks_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- goals:begin --><!-- goals:end -->\nb\n<!-- memory:begin -->\nold\n<!-- memory:end -->\nc\n"
    )
    assert kernel_tables.write_into(page, measured()) == ["goals", "memory"]
    once = page.read_text()
    assert "old" not in once
    assert once.startswith("a\n<!-- goals:begin -->\n|")
    assert once.endswith("<!-- memory:end -->\nc\n")
    kernel_tables.write_into(page, measured())
    assert page.read_text() == once


def test_what_was_not_measured_leaves_the_page_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- first-call:begin -->kept<!-- first-call:end -->")
    kernel_tables.write_into(page, {**measured(), "first_call": []})
    assert "kept" in page.read_text()


def test_pictures_are_drawn_from_a_partial_measurement():
    pytest.importorskip("matplotlib")
    import plot_kernels

    for draw in (plot_kernels.batch_figure, plot_kernels.curves_figure, plot_kernels.population_figure):
        assert draw(measured()).startswith(b"\x89PNG")
