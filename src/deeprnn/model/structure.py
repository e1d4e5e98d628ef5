"""A model taken apart from its spec alone: layers, the matrices that join them, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from deeprnn.cells.cell import Cell
from deeprnn.cells.lookup import label as cell_label
from deeprnn.cells.lookup import on_meta
from deeprnn.model.explain import entering_parameters
from deeprnn.model.operator_specs import CellSpec, Level
from deeprnn.model.specs import ModelSpec


@dataclass(frozen=True)
class Layer:
    """One box of the picture."""

    key: str
    role: str  # input, input_hidden, intermediate, state, output_hidden, output
    letter: str  # x, f, z, h, o, y
    size: int
    unit: str
    level: int = 0  # counted from 1; 0 outside the levels
    index: int = 0  # within several of a role, from 1; 0 where there is one
    bias: str = ""  # the parameter's name, empty where there is none
    others: int = 0  # numbers that a cell learns besides matrices

    @property
    def width(self) -> int:
        """Length of the pre-activation: the size times the unit's pool."""
        pool = self.unit.partition(":")[2]
        return self.size * int(pool if pool.isdigit() else 1)

    @property
    def extra(self) -> int:
        """Numbers learned besides matrices: biases, and an Lp unit's orders and centres."""
        of_unit = self.size + self.width if self.unit.startswith("lp") else self.others
        return of_unit + (self.width if self.bias else 0)


@dataclass(frozen=True)
class Link:
    """One arrow of the picture: a weight matrix (or the columns of one) between two layers."""

    source: str
    target: str
    matrix: str  # the parameter's letter and number: W1, U2, S2, V1, K1, E1
    kind: str  # transition, input, shortcut, skip, output, chain (from notes of the same frame)
    rows: int  # out
    columns: int  # in
    delayed: bool = False  # comes from the step before
    parameter: str = ""  # what a cell calls it
    tied: bool = False  # the matrix of another link, the other way around

    @property
    def weights(self) -> int:
        """Number of entries of its own."""
        return 0 if self.tied else self.rows * self.columns


@dataclass(frozen=True)
class Anatomy:
    """All layers, bottom to top, and all links."""

    layers: tuple[Layer, ...]
    links: tuple[Link, ...]

    @property
    def weights(self) -> int:
        """Entries of all weight matrices: what the paper's Table 1 counts."""
        return sum(link.weights for link in self.links)

    @property
    def parameters(self) -> int:
        """Everything learned, biases included."""
        return self.weights + sum(layer.extra for layer in self.layers)

    def layer(self, key: str) -> Layer:
        """The layer of that key."""
        return next(layer for layer in self.layers if layer.key == key)

    def into(self, key: str) -> tuple[Link, ...]:
        """The links that end in a layer."""
        return tuple(link for link in self.links if link.target == key)


def dissect(spec: ModelSpec) -> Anatomy:
    """Layers and links of a model."""
    layers = [Layer("x", "input", "x", spec.input_size, "identity")]
    links: list[Link] = []
    if (embedding := spec.embedding) is not None:
        size, tied = embedding.size, embedding.tied
        matrix = f"V{len(spec.predict.sizes) + 1}" if tied else "E0"
        layers.append(Layer("e", "input_hidden", "f", size, "identity"))
        links.append(Link("x", "e", matrix, "input", size, embedding.symbols, tied=tied))
    below = layers[-1]
    for number, level in enumerate(spec.levels, 1):
        below = _level(level, number if len(spec.levels) > 1 else 0, below, layers, links)
    _output(spec, layers, links)
    return Anatomy(tuple(layers), tuple(links))


def _level(level: Level, number: int, below: Layer, layers: list[Layer], links: list[Link]) -> Layer:
    """Append one ⊕ and return its state."""
    tag = f"^{number}" if number else ""
    if isinstance(level, CellSpec):
        return _cell_level(level, number, tag, below, layers, links)
    for i, (size, unit) in enumerate(zip(level.input_mlp_sizes, level.input_mlp_units, strict=True), 1):
        index = i if len(level.input_mlp_sizes) > 1 else 0
        layer = Layer(f"e{i}{tag}", "input_hidden", "f", size, unit, number, index, f"e{i}" * level.bias)
        layers.append(layer)
        links.append(Link(below.key, layer.key, f"E{i}", "input", layer.width, below.size))
        below = layer
    state, previous = f"h{tag}", f"h{tag}"
    for n, (size, unit) in enumerate(zip(level.sizes, level.units, strict=True), 1):
        last = n == level.depth
        index = n if level.depth > 2 and not last else 0
        key, role, letter = (state, "state", "h") if last else (f"z{n}{tag}", "intermediate", "z")
        layer = Layer(key, role, letter, size, unit, number, index, f"b{n}" * level.bias)
        layers.append(layer)
        width_below = level.hidden_size if n == 1 else level.sizes[n - 2]
        links.append(Link(previous, key, f"W{n}", "transition", layer.width, width_below, delayed=n == 1))
        if level.inputs[n - 1]:
            links.append(Link(below.key, key, f"U{n}", "input", layer.width, below.size))
            if level.skip_size:
                entry = "e" if any(box.key == "e" for box in layers) else "x"
                links.append(Link(entry, key, f"K{n}", "skip", layer.width, level.skip_size))
        if level.shortcuts[n - 1]:
            size_h = level.hidden_size
            links.append(Link(state, key, f"S{n}", "shortcut", layer.width, size_h, delayed=True))
        previous = key
    return layers[-1]


def _cell_level(
    level: CellSpec, number: int, tag: str, below: Layer, layers: list[Layer], links: list[Link]
) -> Layer:
    """Append a cell: one box, and a link for each of its matrices."""
    cell = cell_on_meta(level)
    if level.symbols:
        entry = Layer(f"e1{tag}", "input_hidden", "f", level.entering, "identity", number)
        layers.append(entry)
        links.append(Link(below.key, entry.key, "E1", "input", entry.size, below.size, parameter="embedding"))
        below = entry
    key, entering = f"h{tag}", entering_parameters(cell)
    matrices = {n: p for n, p in cell.named_parameters() if p.dim() >= 2}
    others = sum(p.numel() for p in cell.parameters()) - sum(p.numel() for p in matrices.values())
    layers.append(Layer(key, "state", "h", level.hidden_size, cell_label(level.cell), number, others=others))
    counts = {"U": 0, "W": 0}
    for name, p in matrices.items():
        letter = "U" if name in entering else "W"
        counts[letter] += 1
        rows, columns = p.shape[0], p.numel() // p.shape[0]
        source, kind = (below.key, "input") if letter == "U" else (key, "transition")
        matrix = f"{letter}{counts[letter]}"
        links.append(Link(source, key, matrix, kind, rows, columns, letter == "W", name))
    return layers[-1]


@lru_cache(maxsize=64)
def cell_on_meta(level: CellSpec) -> Cell:
    """A level's cell without numbers."""
    return on_meta(level.cell, level.entering, level.hidden_size, level.options)


def _output(spec: ModelSpec, layers: list[Layer], links: list[Link]) -> None:
    states = [layer for layer in layers if layer.role == "state"]
    sources = states if spec.output_from == "all" else states[-1:]
    predict = spec.predict
    below = sources
    for n, (size, unit) in enumerate(zip(predict.sizes, predict.units, strict=True), 1):
        index = n if len(predict.sizes) > 1 else 0
        layer = Layer(f"o{n}", "output_hidden", "o", size, unit, 0, index, f"b{n}" * predict.bias)
        layers.append(layer)
        links += [_out(source, layer, f"V{n}", states[-1]) for source in below]
        below = [layer]
    unit = "softmax" if spec.output == "categorical" else "sigmoid"
    last = len(predict.sizes) + 1
    output = Layer("y", "output", "y", predict.output_size, unit, bias=f"b{last}" * predict.bias)
    if predict.nade_size:
        _nade(spec, below, sources, output, layers, links)
        return
    layers.append(output)
    links += [_out(source, output, f"V{last}", states[-1]) for source in below]
    if predict.shortcut:
        links += [Link(s.key, "y", "K", "skip", predict.output_size, s.size) for s in sources]


def _nade(
    spec: ModelSpec,
    below: list[Layer],
    sources: list[Layer],
    output: Layer,
    layers: list[Layer],
    links: list[Link],
) -> None:
    """Append a NADE: its hidden layer, between ▷'s last layer (or the states) and the notes, which it reads itself."""
    predict = spec.predict
    hidden = Layer("g", "output_hidden", "g", predict.nade_size, "sigmoid", bias="c" * predict.bias)
    layers += [hidden, output]
    notes, last = predict.output_size, f"V{len(predict.sizes) + 1}"
    links += [_out(source, hidden, "C", sources[-1]) for source in below]
    links += [Link(source.key, "y", last, "skip", notes, source.size) for source in below]
    links.append(Link("y", "g", "W", "chain", notes, hidden.size))
    links.append(Link("g", "y", "V", "output", notes, hidden.size))
    if predict.shortcut:
        links += [Link(s.key, "y", "K", "skip", notes, s.size) for s in sources]


def _out(source: Layer, target: Layer, matrix: str, top: Layer) -> Link:
    around = source.role == "state" and source.key != top.key
    return Link(source.key, target.key, matrix, "skip" if around else "output", target.width, source.size)
