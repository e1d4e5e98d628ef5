"""How much one request may ask for, and how much is done at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the server's work; every one is answered with a message that names it."""

    connections: int = 512
    """open at once, live curves among them; one more is answered 503"""
    request_seconds: float = 10.0
    """for the head of a request to arrive, from the connection or the answer before it"""
    body_bytes: int = 512_000
    """a JSON request"""
    upload_bytes: int = 8_000_000
    """a MIDI file"""
    body_seconds: float = 20.0
    """for a request's body to arrive"""
    frames: int = 4096
    """a whole piano roll"""
    new_frames: int = 1024
    """sampled by one request"""
    symbols: int = 4000
    """of text read by one request"""
    new_symbols: int = 2000
    """sampled by one request"""
    sound_seconds: float = 600.0
    """rendered to one WAV file"""
    note_seconds: float = 3000.0
    """of all notes of a WAV file together, the work it takes: four voices for ten minutes"""
    job_seconds: float = 120.0
    """from the first to the last byte of one answer"""
    workers: int = 2
    """threads that compute"""
    threads: int = 1
    """CPU threads that one computation uses"""
    jobs: int = 64
    """requests that compute or wait for a thread; one more is sent away with 503"""
    sounds: int = 32
    """WAV files that are rendered, one at a time in a thread of their own, or wait for it, or are being sent"""
    watchers: int = 128
    """open live curves"""
    models: int = 6
    """kept in memory"""
    model_bytes: int = 512_000_000
    """a run's best.safetensors"""
    layers: int = 64
    """of a model that is loaded or drawn"""
    folders: int = 50_000
    """directories looked into when searching for runs"""
    depth: int = 8
    """levels below the given folders"""
