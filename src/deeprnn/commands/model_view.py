"""What `deeprnn describe` prints: a model's equations, matrices and counts; the paper's Table 1."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deeprnn.console import console, show_rows

if TYPE_CHECKING:
    from deeprnn.model.specs import ModelSpec


def table1_rows() -> list[dict]:
    """The paper's Table 1 with our counts of weight-matrix entries."""
    from deeprnn.model import paper
    from deeprnn.model.structure import dissect

    return [
        {
            "data": size.data,
            "model": size.model,
            "units": list(size.units),
            "parameters": dissect(paper.spec(size.data, size.model)).weights,
            "paper": size.printed,
        }
        for size in paper.TABLE1
    ]


def show_table1(as_json: bool) -> int:
    """Print Table 1; the exit status tells whether every count agrees."""
    from deeprnn.model.notation import short_count
    from deeprnn.model.paper import LABELS

    rows = table1_rows()
    agree = all(short_count(row["parameters"]) == row["paper"] for row in rows)
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0 if agree else 1
    console().print("Table 1: entries of the weight matrices, biases not counted\n")
    headings = ("data", "model", "units", "weights", "ours", "paper", "equal")
    lines: list[list[str]] = []
    for number, row in enumerate(rows):
        first = not number or row["data"] != rows[number - 1]["data"]
        if first and number:
            lines.append([""] * len(headings))
        ours = short_count(row["parameters"])
        sizes = ", ".join(map(str, row["units"])) + (" ×2" if row["model"] == "srnn" else "")
        equal = "yes" if ours == row["paper"] else "NO"
        name = row["data"] if first else ""
        lines.append([name, LABELS[row["model"]], sizes, f"{row['parameters']:,}", ours, row["paper"], equal])
    show_rows(headings, lines, right=("weights", "ours", "paper"), spare=("weights", "equal"))
    return 0 if agree else 1


def show_model(spec: ModelSpec) -> None:
    """Equations, matrices and counts for a person."""
    from rich.table import Table

    from deeprnn.model.notation import equations, label, short_count, symbol
    from deeprnn.model.structure import dissect

    anatomy, out = dissect(spec), console()
    out.print(f"{label(spec)}\n", style="bold")
    for line in equations(spec):
        out.print(f"  {line}")
    out.print()
    table = Table("matrix", "from", "to", box=None, padding=(0, 2))
    table.add_column("shape", justify="right")
    table.add_column("weights", justify="right")
    for link in anatomy.links:
        target = anatomy.layer(link.target)
        level = f" of level {target.level}" if target.level else ""
        source = symbol(anatomy.layer(link.source), "t-1" if link.delayed else "t")
        shape = f"{link.rows} × {link.columns}"
        name = f" ({link.parameter})" if link.parameter else ""
        table.add_row(link.matrix + level + name, source, symbol(target), shape, f"{link.weights:,}")
    out.print(table)
    weights, rest = anatomy.weights, anatomy.parameters - anatomy.weights
    learned = any(layer.unit.startswith("lp") for layer in anatomy.layers)
    kinds = "biases, orders and centres of Lp units" if learned else "biases"
    kinds = "biases and other vectors" if any(layer.others for layer in anatomy.layers) else kinds
    out.print(
        f"\n  {weights:,} weights ({short_count(weights)}) and {rest:,} {kinds}: {anatomy.parameters:,} in all"
    )


def show_json(spec: ModelSpec) -> None:
    """A model's equations, matrices and counts as one JSON document."""
    from deeprnn.model.notation import equations, label
    from deeprnn.model.structure import dissect

    anatomy = dissect(spec)
    matrices = [
        {
            "name": k.parameter or k.matrix,
            "from": k.source,
            "to": k.target,
            "kind": k.kind,
            "shape": [k.rows, k.columns],
        }
        for k in anatomy.links
    ]
    document = {
        "label": label(spec),
        "weights": anatomy.weights,
        "parameters": anatomy.parameters,
        "equations": equations(spec),
        "matrices": matrices,
        "model": spec.to_dict(),
    }
    print(json.dumps(document, indent=2, ensure_ascii=False))
