"""Streams of populations that train side by side."""

from __future__ import annotations

import torch

from deeprnn.reproduction import streams


def test_streams_are_lent_and_never_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(streams, "_IDLE", [])
    seen = set()
    for _ in range(100):
        with streams.own_stream() as first, streams.own_stream() as second:
            assert first is not second
            seen |= {first, second}
    assert len(seen) == 2
