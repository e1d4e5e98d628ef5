"""Imports point one way, the core needs little, and `import deeprnn` needs almost nothing."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import deeprnn

SRC = Path(deeprnn.__file__).parent
ROOT = Path(__file__).parents[1]

# From the inside out. A part imports from rows above its own, and from itself; neighbours in a row do not know each
# other. A part is a folder, or a module that has a row of its own. What is in no row is the outer circle: generation,
# reports, speed.
ROWS = [
    {"errors"},
    {"console", "files", "launcher", "runs.provenance", "runs.reading", "runs.shipped"},
    {"cells"},
    {"model.units", "model.overrides", "model.tracing"},
    {"model.spec_fields", "model.equations", "model.init"},
    {"model.operator_specs"},
    {"model.specs"},
    {"backends"},
    {
        "model.transition",
        "model.cell_loop",
        "model.explain",
        "model.arguments",
        "model.large_softmax",
        "model.nade_segments",
    },
    {"model.nade_loss", "model.direct_call"},
    {"model.operators", "model.sequence_layer"},
    {"model.plus", "model.predict", "model.recurrent_base", "model.cell_level", "model.embedding"},
    {"model.nade", "model.layers", "model.recurrent", "model.drop_in"},
    {"model.sequence_model"},
    {"model.models"},
    {"model.paper", "model.structure", "model.export"},
    {"model.notation"},
    {"data", "model.losses", "model.metrics", "render"},
    {"training.recipe", "runs.checkpoint", "runs.locking", "model.scoring"},
    {"runs.run_files"},
    {"runs.folder"},
    {"runs.ledger", "runs.summary"},
    {"training"},
]
# The same within folders: names are those of modules, or of folders all of whose modules are meant. What is in no row
# comes last.
INSIDE = {
    "cells": [
        {"expressions"},
        {"functions"},
        {"description"},
        {"adjoint", "deep_transition"},
        {"step_graph"},
    ],
    "backends": [
        {"wiring"},
        {"call", "code_cache"},
        {"protocol"},
        {"registry"},
        {"transformations"},
        {"plain", "single_step"},
        {"gradients", "reference", "scan"},
        {"cuda.device", "cuda.driver", "cuda.nvrtc", "cuda.side_stream", "cuda.ctext"},
        {"cuda.recurrence.schedule", "cuda.gemm", "cuda.recording"},
        {"cuda.epilogue"},
        {"cuda.cell_header"},
        {"cuda.recurrence"},
        {"cuda.stepwise", "cuda.time_chunks"},
        {"cuda.input_projection"},
        {"cuda.direct"},
        {"cpu", "cuda"},
        {"choose", "torch_operators"},
        {"autograd"},
        {"layer_autograd"},
        {"unrolling"},
        {"direct"},
    ],
}
LAST = [{"web"}, {"commands"}, {"cli"}, {"__main__"}]
MODELS = {
    f"model.{name}"
    for name in (
        "units",
        "equations",
        "init",
        "operators",
        "plus",
        "predict",
        "layers",
        "sequence_model",
        "models",
        "recurrent",
        "drop_in",
    )
} | {"backends", "cells"}
ABOUT_DATA = {"data", "model.losses", "model.metrics"}
SEES_BOTH = {"runs.folder", "training", "model.scoring"}  # a run folder holds a model and what its data were
CORE = set().union(*ROWS) - {"console", "render", "model.export"}
NEEDED = {"torch", "numpy", "safetensors"}


def module_name(file: Path) -> str:
    parts = file.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(f): f for f in sorted(SRC.rglob("*.py"))}


def part(module: str) -> str:
    """The part of deeprnn that a module belongs to: the longest name that has a row, else its folder."""
    inner = module.removeprefix("deeprnn").removeprefix(".")
    rows = {name for row in (*ROWS, *LAST) for name in row if inner == name or inner.startswith(f"{name}.")}
    return max(rows, key=len) if rows else inner.partition(".")[0]


def imports(tree: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file and whether it is imported inside a function; types do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), late
        yield from imports(
            node, late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        )


@cache
def imported(module: str) -> frozenset[tuple[str, bool]]:
    return frozenset(imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def own(module: str) -> set[str]:
    """The parts of deeprnn that a module imports, now or late, its own aside."""
    names = {name for name, _ in imported(module) if name in MODULES and name != "deeprnn"}
    return {part(name) for name in names} - {part(module)}


def row(name: str) -> int:
    for number, parts in enumerate(ROWS):
        if name in parts:
            return number
    for number, parts in enumerate(LAST):
        if name in parts:
            return len(ROWS) + 1 + number
    return len(ROWS)  # the outer circle


def test_every_row_names_something_that_exists():
    assert set().union(*ROWS, *LAST) <= {part(m) for m in MODULES}


@pytest.mark.parametrize("module", [m for m in MODULES if part(m)])
def test_imports_point_one_way(module):
    mine = row(part(module))
    outer = mine == len(ROWS)  # within the outer circle parts may use each other
    wrong = {other for other in own(module) if row(other) > mine or (row(other) == mine and not outer)}
    assert not wrong, f"{module} imports {sorted(wrong)}, which lie beside or outside it"


def inner(module: str) -> tuple[str, str, int] | None:
    """Folder, part and row of a module in a folder that has rows of its own."""
    _, _, name = module.partition(".")
    folder, _, rest = name.partition(".")
    if folder not in INSIDE:
        return None
    rows = {n: i for i, names in enumerate(INSIDE[folder]) for n in names if f"{rest}.".startswith(f"{n}.")}
    own = max(rows, key=len, default=rest)
    return folder, own, rows.get(own, len(INSIDE[folder]))


def test_every_inner_row_names_something_that_exists():
    known = {known[:2] for known in map(inner, MODULES) if known is not None}
    assert {(folder, name) for folder, rows in INSIDE.items() for row in rows for name in row} <= known


@pytest.mark.parametrize("module", [m for m in MODULES if inner(m)])
def test_imports_inside_a_folder_point_one_way(module):
    folder, mine, number = inner(module) or ("", "", 0)
    last = number == len(INSIDE[folder])
    for name, _ in imported(module):
        other = inner(name) if name in MODULES else None
        if other is not None and other[0] == folder and other[1] != mine:
            assert other[2] < number or (last and other[2] == number), f"{module} imports {name}"


# ---- private names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names(module: str) -> frozenset[str]:
    """Private functions, classes, variables, methods and attributes that a module makes."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(filter(is_private, names))


NAMED_TUPLES = {"_fields", "_replace", "_asdict", "_make"}  # public, in spite of their names
EVERYONES = frozenset().union(*map(private_names, MODULES)) - NAMED_TUPLES


@pytest.mark.parametrize("module", MODULES)
def test_no_module_uses_anothers_private_names(module):
    used = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deeprnn"):
            used |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            used |= {node.attr} & EVERYONES - private_names(module)
    assert not used, f"{module} uses {sorted(used)} of another module: make public what others need"


# ---- the names of backends


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("deeprnn.backends.")])
def test_a_backends_name_is_written_in_the_registry_and_by_itself_alone(module):
    """But for those that are devices' names too; "reference" and "auto" are also a user's words."""
    from deeprnn.backends.registry import MODULES as BACKENDS
    from deeprnn.backends.registry import PREFERENCE

    if module == "deeprnn.backends.registry":
        return
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    own = {name for name, place in BACKENDS.items() if place == module}
    assert not words & set(BACKENDS) - own - set(PREFERENCE)


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) in ABOUT_DATA])
def test_data_knows_no_model(module):
    assert not own(module) & (MODELS | {"model.operator_specs", "model.specs", "model.paper", "training"})


@pytest.mark.parametrize("module", [m for m in MODULES if part(m) in set().union(*ROWS) - SEES_BOTH])
def test_only_training_sees_both(module):
    seen = own(module)
    assert not (seen & ABOUT_DATA and seen & MODELS)


def test_the_core_imports_only_what_it_declares():
    """Followed through everything that is imported at module level, from every core module."""
    start = [m for m in MODULES if part(m) in CORE and not m.startswith("deeprnn.backends.cpu.jit")]
    seen, todo = set(), start
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, late in imported(module):
            if late:
                continue
            if name in MODULES:
                todo.append(name)
            else:
                root = name.split(".")[0]
                assert root in NEEDED | set(sys.stdlib_module_names) | {"deeprnn"}, f"{module} imports {name}"
    assert {"deeprnn.backends.cpu", "deeprnn.backends.cuda", "deeprnn.cells.description"} <= seen


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_deeprnn_is_light():
    code = "import sys, deeprnn; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(ast.literal_eval(python(code)))
    heavy = {"torch", "numpy", "safetensors", "rich", "matplotlib", "tyro", "scipy", "starlette", "numba"}
    assert not loaded & heavy


def test_building_a_model_and_drawing_its_dropout_do_not_import_the_compiler():
    """Importing torch._dynamo takes more than a second: who does not compile should not pay."""
    code = """
import sys, torch, deeprnn
from deeprnn.model.specs import Dropout
from deeprnn.training.noise import _hashed_masks
before = "torch._dynamo" in sys.modules
net = deeprnn.dts_rnn(input_size=3, hidden_size=4, intermediate_size=5, output_size=3, dropout=Dropout(output=0.5))
_hashed_masks(net, 2, 2, torch.tensor([1]), torch.tensor(0))
print(before, "torch._dynamo" in sys.modules)
"""
    assert python(code).split() in (["False", "False"], ["True", "True"])


def test_the_core_runs_where_no_extra_is_installed():
    code = """
import sys

for name in ("tyro", "rich", "matplotlib", "scipy", "symusic", "music21", "starlette", "uvicorn", "onnx",
             "onnxscript", "onnxruntime", "numba", "llvmlite", "tensorboard", "IPython", "optuna", "ray"):
    sys.modules[name] = None  # as if it were not installed
import torch
import deeprnn
net = deeprnn.dots_rnn(input_size=3, hidden_size=4, intermediate_size=5, output_hidden_size=6, output_size=3)
logits, state = net(torch.zeros(4, 2, 3))
logits.sum().backward()
deeprnn.DeepRNN(3, 4, intermediate_sizes=5)(torch.zeros(4, 2, 3))[0].sum().backward()
import deeprnn.training.loop, deeprnn.runs.folder, deeprnn.data.batching
from deeprnn.errors import UserError, need
try:
    need("symusic", extra="midi")
except UserError as error:
    print(error)
"""
    assert "pip install 'deeprnn[midi]'" in python(code)


def test_every_public_name_resolves():
    for name in deeprnn.__all__:
        assert getattr(deeprnn, name) is not None
    assert set(dir(deeprnn)) == set(deeprnn.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        deeprnn.no_such_name


@pytest.mark.parametrize("folder", ["cells", "model", "backends"])
def test_the_layout_names_every_module_of(folder):
    page = (ROOT / "docs" / "architecture.md").read_text()
    layout = page.partition("## The layout")[2].partition("\n## ")[0]
    missing = [f.name for f in (SRC / folder).glob("*.py") if not re.search(rf"\b{f.stem}\b", layout)]
    assert set(missing) <= {"__init__.py"}


def test_where_a_new_thing_goes_names_files_and_what_is_in_them():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Where a new thing goes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        paths = [re.findall(r"`([\w/]+(?:\.py|/))`", cell) for cell in row]
        places = [path for cell in paths for path in cell]
        found = {p: (SRC / p) if (SRC / p).exists() else ROOT / p for p in places}
        assert all(place.exists() for place in found.values()), row[0]
        here = [found[p] for cell in paths[1:3] for p in cell if found[p].is_file()]
        folders = [found[p] / "__init__.py" for cell in paths[1:3] for p in cell if found[p].is_dir()]
        texts = "".join(p.read_text() for p in (*here, *folders) if p.exists())
        names = re.findall(r"`(\w{4,})`", row[2])
        assert all(re.search(rf"\b{name}\b", texts) for name in names), f"{row[0]}: {names}"


def test_every_backend_of_the_registry_is_a_module():
    from deeprnn.backends.protocol import Backend
    from deeprnn.backends.registry import MODULES as BACKENDS
    from deeprnn.backends.registry import PREFERENCE

    assert {name for names in PREFERENCE.values() for name in names} <= set(BACKENDS)
    for name, module in BACKENDS.items():
        backend = importlib.import_module(module).BACKEND
        assert backend.name == name
        assert all(callable(getattr(backend, method)) for method in vars(Backend) if method[0] != "_")
