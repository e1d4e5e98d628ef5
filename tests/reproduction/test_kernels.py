"""Which kernels a reproduction will ask for, told without a GPU; what compiles them ahead."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deeprnn.backends import code_cache
from deeprnn.backends.cuda import nvrtc
from deeprnn.training.recipe import override
from tests.reproduction.toys import small_songs
from tests.training import toys

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import kernels_ahead  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_ahead, "load_data", lambda part: small_songs())


def sources(recipe) -> set[str]:
    return {Path(request.source).name for request in kernels_ahead.requests_of(recipe)}


def test_every_kernel_of_a_run_is_asked_for():
    recipe = toys.recipe(data__name="jsb", data__chunk=8, model__hidden=[40])
    found = sources(recipe)
    assert {"cluster.cu", "update.cu"} <= found
    assert "nade.cu" not in found
    directions = [
        dict(r.macros) for r in kernels_ahead.requests_of(recipe) if r.source.endswith("cluster.cu")
    ]
    assert len(directions) >= 2, "forward and backward"
    assert "nade.cu" in sources(override(recipe, {"model.output": "nade", "model.nade_size": 16}))


def test_a_kernel_is_compiled_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    made: list[str] = []

    def compiled(text: str, name: str, headers: dict[str, str], arch: str) -> bytes:
        made.append(name)
        if "max_abs" in name:
            raise nvrtc.CompileError("made to fail")
        return text.encode()

    monkeypatch.setattr(nvrtc, "compile_source", compiled)
    monkeypatch.setattr(nvrtc, "identity", lambda: "a compiler")
    recipe = toys.recipe(data__name="jsb", data__chunk=8, model__hidden=[40])
    several = [recipe, override(recipe, {"optimiser.rate": 0.5}), override(recipe, {"model.hidden": [48]})]
    with ThreadPoolExecutor(1) as pool:  # in the place of processes, which would not see what is patched here
        told = kernels_ahead.compile_all(pool, several, 60)  # type: ignore[arg-type]
    assert told["kernels"] == len(made), "the second recipe asks for nothing new"
    assert len(list(code_cache.cache_folder().glob("*.cubin"))) == len(made) - len(told["failures"])
    assert all("made to fail" in line for line in told["failures"])
    kept = set(code_cache.cache_folder().iterdir())
    with ThreadPoolExecutor(1) as pool:
        again = kernels_ahead.compile_all(pool, several[:1], 60)  # type: ignore[arg-type]
    assert 0 < again["kernels"] < told["kernels"]
    assert set(code_cache.cache_folder().iterdir()) == kept


def test_what_is_not_compiled_in_time_is_left_to_the_runs():
    with ThreadPoolExecutor(1) as pool:
        told = kernels_ahead.compile_all(pool, [toys.recipe(data__name="jsb")], 0.0)  # type: ignore[arg-type]
    assert "not all compiled in 0 s" in told["failures"][0]
