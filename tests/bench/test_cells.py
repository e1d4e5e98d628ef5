"""The table of cells: every cell right before it is timed, and the command around it."""

from __future__ import annotations

import json

import torch

from deeprnn import cli
from deeprnn.bench.cells import NAMES, PEERS, CellBench
from deeprnn.bench.measure import measure
from deeprnn.bench.peers import Work

WORK = Work(steps=4, batch=2, hidden=9, depth=2, inputs=5)


def test_every_cell_and_peer_is_right_and_timed():
    rows = measure(WORK, NAMES, repeats=1, make=CellBench)
    assert [row.peer for row in rows] == list(NAMES)
    for row in rows:
        assert row.failed is None, f"{row.peer}: {row.failed}"
        assert row.train_us


def test_a_cell_that_is_wrong_gets_no_speed():
    class Wrong(CellBench):
        def __init__(self, work, seed):
            super().__init__(work, seed)
            with torch.no_grad():  # ours alone: the truth is PyTorch's
                self.modules["GRU"].weight_hh_l0.mul_(1.01)

    ours, theirs = measure(WORK, ["GRU", "nn.GRU"], repeats=1, make=Wrong)
    assert "off by" in str(ours.failed)
    assert ours.train_us is None
    assert theirs.failed is None


def test_the_command_prints_one_table_a_size(capsys):
    small = ["--device", "cpu", "--hidden", "6", "--batch", "1", "2", "--steps", "2", "--repeats", "1"]
    assert cli.main(["bench", "--cells", *small]) == 0
    text = capsys.readouterr().out
    for name in (*PEERS, *PEERS.values(), "B=1", "B=2", "H=6"):
        assert name in text
    assert cli.main(["bench", "--cells", "--json", "--peers", "GRU", *small]) == 0
    assert {row["peer"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"GRU"}
    assert cli.main(["bench", "--cells", "--peers", "GRUU"]) == 2
