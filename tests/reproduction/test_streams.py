"""Streams of populations that train side by side."""

from __future__ import annotations

import torch

from deeprnn.reproduction import streams


def test_streams_are_lent_and_never_shared(monkeypatch):
    gpu, seen = 0, {0: set(), 1: set()}
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    monkeypatch.setattr(streams, "_IDLE", {})
    for turn in range(100):
        gpu = turn % 2
        with streams.own_stream() as first, streams.own_stream() as second:
            assert first is not second
            seen[gpu] |= {first, second}
    assert len(seen[0]) == len(seen[1]) == 2
    assert not seen[0] & seen[1], "a stream belongs to one GPU"
