"""Sampling: reproducible, independent of the batch, and the model's own distribution."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deeprnn.cells.functions import UNITS
from deeprnn.data.music import Grid
from deeprnn.errors import UserError
from deeprnn.generation import generate
from deeprnn.generation.generate import sample_rolls, stream_music, stream_symbols, text_from_run
from deeprnn.generation.one_step import ALONE, FewRows, Product, can_serve, fastest_step
from deeprnn.generation.outputs import Music, Text, numbered, spell
from deeprnn.generation.sampling import BLOCK
from deeprnn.model.models import assemble, build
from deeprnn.model.sequence_model import SequenceModel

KEYS = 12
LETTERS = ["\n", " ", *"abcdefgh"]
WORDS = ["<eos>", "<unk>", "the", "cat", "sat"]


def music_model(**options) -> SequenceModel:
    torch.manual_seed(0)
    spec = assemble(input_size=KEYS, output_size=KEYS, hidden_sizes=(10,), intermediate=8, output_hidden=7,
                    shortcut="last", input_to="all", **options)  # fmt: skip
    model = build(spec, seed=0)
    with torch.no_grad():
        for p in model.parameters():  # livelier than at initialisation, so that tests can fail
            p.add_(0.5 * torch.randn(p.shape))
    return model.eval()


def text_model(size: int) -> SequenceModel:
    torch.manual_seed(0)
    model = build(
        assemble(input_size=size, output_size=size, hidden_sizes=(9, 9), output="categorical"), seed=0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.6 * torch.randn(p.shape))
    return model.eval()


def rolls_of(model: SequenceModel, length: int, **options) -> list[np.ndarray]:
    return sample_rolls(model, length, **options)[0]


def text_of(primer: str = "", **options) -> str:
    return text_from_run(fake_run("char"), primer, keep_primer=False, **options).texts[0]


def fake_run(kind: str) -> SimpleNamespace:
    """What generation needs of a run."""
    vocabulary = {"music": None, "char": LETTERS, "word": WORDS}[kind]
    model = music_model() if kind == "music" else text_model(len(vocabulary or ()))
    return SimpleNamespace(
        kind=kind,
        model=lambda: model,
        spec=model.spec,
        grid=Grid(steps_per_beat=2, low=60, high=71) if kind == "music" else None,
        vocabulary=vocabulary,
        info={"label": "DOT(S)-RNN", "data": {"name": "toy", "kind": kind}},
        name="toy-run",
    )


def test_same_seed_same_music_and_another_seed_another():
    model = music_model()
    a, b, c = (rolls_of(model, 30, seed=s)[0] for s in (1, 1, 2))
    assert a.shape == (30, KEYS)
    assert a.dtype == np.uint8
    assert (a == b).all()
    assert (a != c).any()
    assert a.any()


def test_a_sample_depends_on_seed_and_number_alone():
    model = music_model()
    many = rolls_of(model, 40, count=19, seed=5)
    assert (rolls_of(model, 40, count=1, seed=5)[0] == many[0]).all()
    few = rolls_of(model, 40, count=10, seed=5)
    assert all((a == b).all() for a, b in zip(few, many, strict=False))
    assert (many[0] != many[BLOCK]).any()  # the same row of another block


def test_a_longer_sample_begins_like_a_shorter_one():
    model = music_model()
    assert (rolls_of(model, 300, seed=2)[0][:30] == rolls_of(model, 30, seed=2)[0]).all()


def test_sampling_is_the_models_distribution():
    """Replaying a sample through `forward` gives the very probabilities it was drawn from."""
    model = music_model()
    steps = list(stream_music(model, length=25, seed=3))
    frames = np.stack([f[0] for f, _ in steps])
    with torch.no_grad():
        x = torch.from_numpy(np.concatenate([np.zeros((1, KEYS)), frames[:-1]])).float()
        logits, _ = model(x.unsqueeze(1))
    assert torch.allclose(
        torch.sigmoid(logits[:, 0]), torch.from_numpy(np.stack([p[0] for _, p in steps])), atol=1e-5
    )


def test_notes_come_as_often_as_their_probabilities_say():
    model = music_model()
    frames, p = next(stream_music(model, length=1, count=2000, seed=0))
    spread = np.sqrt(p[0] * (1 - p[0]) / 2000)
    assert (np.abs(frames.mean(axis=0) - p[0]) < 5 * spread + 1e-3).all()


def test_a_primer_sets_the_state_and_is_kept_or_dropped():
    model = music_model()
    primer = rolls_of(model, 20, seed=9)[0]
    whole = rolls_of(model, 15, seed=1, primer=primer)[0]
    tail = rolls_of(model, 15, seed=1, primer=primer, keep_primer=False)[0]
    assert (whole[:20] == primer).all()
    assert (whole[20:] == tail).all()
    with torch.no_grad():
        x = torch.from_numpy(np.concatenate([np.zeros((1, KEYS), np.uint8), primer])).float()
        expected = torch.sigmoid(model(x.unsqueeze(1))[0][-1, 0])
    _, p = next(stream_music(model, length=1, seed=1, primer=primer))
    assert np.allclose(p[0], expected.numpy(), atol=1e-5)


def test_max_notes_keeps_the_likeliest():
    model = music_model()
    free = next(stream_music(model, length=1, count=50, seed=0))
    held = next(stream_music(model, length=1, count=50, seed=0, max_notes=2))
    assert free[0].sum(axis=1).max() > 2
    assert held[0].sum(axis=1).max() == 2
    for f, h, p in zip(free[0], held[0], free[1], strict=True):
        if f.sum() > 2:
            assert p[h > 0].min() >= p[(f > 0) & (h == 0)].max()
        else:
            assert (f == h).all()


def test_temperature_zero_is_the_likeliest_notes_as_many_as_are_expected():
    model = music_model()
    frames, _ = next(stream_music(model, length=1, temperature=0.0, seed=0))
    with torch.no_grad():
        logits = model.step(torch.zeros(1, KEYS))[0][0]
    expected = round(float(torch.sigmoid(logits).sum()))
    assert frames[0].sum() == expected > 0
    assert set(np.flatnonzero(frames[0])) == set(logits.topk(expected).indices.tolist())
    rolls = rolls_of(model, 20, temperature=0.0, seed=1), rolls_of(model, 20, temperature=0.0, seed=2)
    assert (rolls[0][0] == rolls[1][0]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": -1}, "length=-1"),
        ({"length": 0}, "length=0 must be from 1"),
        ({"count": 0}, "count=0"),
        ({"seed": -3}, "seed=-3"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_notes": 0}, "max_notes=0"),
        ({"primer": np.zeros((4, 88))}, r"\(4, 88\)"),
    ],
)
def test_music_options_are_checked(options, words):
    with pytest.raises(UserError, match=words):
        stream_music(music_model(), **{"length": 5, **options})


def test_more_than_memory_holds_is_refused_before_it_is_asked_for():
    with pytest.raises(UserError, match="count=100000000 must be"):
        rolls_of(music_model(), 8, count=100_000_000)
    with pytest.raises(UserError, match="at most 2,000,000"):
        rolls_of(music_model(), 1_000_000, count=9_000)


def test_the_smallest_temperature_is_as_cold_as_none():
    """Dividing by it would leave the range of floats, and what is not a number is no distribution."""
    cold = [text_of(length=12, seed=3, temperature=t) for t in (0.0, 1e-60)]
    assert cold[0] == cold[1]
    rolls = sample_rolls(music_model(), 6, temperature=1e-60)
    assert np.isfinite(rolls[1]).all()


def test_a_long_primer_is_heard_in_parts(monkeypatch):
    model, steps = text_model(5), []
    primer = np.arange(2500) % 5
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x, *rest: steps.append(len(x)) or forward(x, *rest))
    parts = [int(ids[0]) for ids in stream_symbols(model, length=6, seed=1, primer=primer)]
    assert max(steps) <= 1024
    monkeypatch.setattr("deeprnn.generation.sampling.PART", 10_000)
    assert parts == [int(ids[0]) for ids in stream_symbols(model, length=6, seed=1, primer=primer)]


def test_text_streams_and_repeats_with_its_seed():
    pieces: list[str] = []
    text = text_of(length=50, seed=1, show=pieces.append)
    assert len(text) == 50
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert text == text_of(length=50, seed=1)
    assert text != text_of(length=50, seed=2)


def test_text_of_a_sample_is_independent_of_the_count():
    model = text_model(len(LETTERS))
    many = np.stack(list(stream_symbols(model, length=30, count=11, seed=4)), axis=1)
    one = np.stack(list(stream_symbols(model, length=30, count=9, seed=4)), axis=1)
    assert (many[:9] == one).all()


def test_symbols_come_as_often_as_their_probabilities_say():
    model = text_model(len(LETTERS))
    ids = next(stream_symbols(model, length=1, count=4000, seed=0, start=2))
    with torch.no_grad():
        p = torch.softmax(model.step(torch.tensor([2]))[0][0], 0).numpy()
    seen = np.bincount(ids, minlength=len(LETTERS)) / 4000
    assert (np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / 4000) + 1e-3).all()


def test_top_k_and_top_p_leave_the_likeliest():
    model = text_model(len(LETTERS))
    with torch.no_grad():
        p = torch.softmax(model.step(torch.tensor([0]))[0][0], 0)
    order = p.argsort(descending=True)
    ids = next(stream_symbols(model, length=1, count=800, seed=0, top_k=3))
    assert set(ids.tolist()) == set(order[:3].tolist())
    needed = int((p[order].cumsum(0) < 0.5).sum()) + 1
    ids = next(stream_symbols(model, length=1, count=800, seed=0, top_p=0.5))
    assert set(ids.tolist()) == set(order[:needed].tolist())
    ids = next(stream_symbols(model, length=1, count=200, seed=0, top_p=1e-9))
    assert set(ids.tolist()) == {int(order[0])}
    both = next(stream_symbols(model, length=1, count=800, seed=0, top_k=3, top_p=0.5))
    assert set(both.tolist()) == set(order[: min(3, needed)].tolist())


def test_top_p_looks_further_than_the_likeliest_where_it_must(monkeypatch):
    model = text_model(len(LETTERS))
    plain = np.concatenate(list(stream_symbols(model, length=30, count=20, seed=0, top_p=0.9)))
    monkeypatch.setattr("deeprnn.generation.sampling.FEW", 2)
    assert (
        plain == np.concatenate(list(stream_symbols(model, length=30, count=20, seed=0, top_p=0.9)))
    ).all()


def test_avoided_symbols_never_come():
    ids = np.concatenate(list(stream_symbols(text_model(5), length=40, count=20, seed=0, avoid=[1, 3])))
    assert {0, 2, 4} >= set(ids.tolist())


def test_a_text_primer_is_heard():
    model = text_model(len(LETTERS))
    primer = "abc def"
    ids = [LETTERS.index(c) for c in primer]
    with torch.no_grad():
        logits, _ = model(torch.tensor(ids).unsqueeze(1))
    assert text_of(primer, length=1, temperature=0.0) == LETTERS[int(logits[-1, 0].argmax())]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"top_k": 0}, "top_k=0"), ({"top_p": 0.0}, "top_p=0"), ({"top_p": 1.1}, "top_p=1.1"),
     ({"primer": "xyz"}, "x"), ({"avoid": ["?"]}, r"\?")],
)  # fmt: skip
def test_text_options_are_checked(options, words):
    with pytest.raises(UserError, match=words):
        text_of(**options)


def test_models_of_the_other_kind_are_refused():
    with pytest.raises(UserError, match="sample text"):
        stream_music(text_model(5), length=3)
    with pytest.raises(UserError, match="sample music"):
        stream_symbols(music_model(), length=3)


def test_words_are_spelled_with_spaces_and_lines():
    assert "".join(spell([2, 3, 0, 2, 4], WORDS, "word")) == "the cat\nthe sat"
    assert "".join(spell([3, 4], WORDS, "word", after=[2])) == " cat sat"
    assert "".join(spell([2, 3], WORDS, "word", after=[3, 0])) == "the cat"


def test_music_has_no_more_notes_at_once_than_the_data_unless_asked():
    run = fake_run("music")
    free = generate.from_run(run, seed=1, length=40)  # type: ignore[arg-type]
    run.info["data"]["most_notes"] = 2
    held = generate.from_run(run, seed=1, length=40)  # type: ignore[arg-type]
    asked = generate.from_run(run, seed=1, length=40, max_notes=KEYS)  # type: ignore[arg-type]
    assert max(roll.sum(1).max() for roll in held) == 2 < max(roll.sum(1).max() for roll in free)
    assert (free[0] == asked[0]).all()


def test_music_from_a_run_in_one_line_and_its_files(tmp_path: Path):
    music = generate.from_run(fake_run("music"), seed=1, length=16, count=2, tempo=120)  # type: ignore[arg-type]
    assert isinstance(music, Music)
    assert len(music) == 2
    assert music[0].shape == (16, KEYS)
    assert (music.low, music.steps_per_beat) == (60, 2)
    paths = music.save(tmp_path / "deep" / "tune")
    assert [p.name for p in paths] == [f"tune-{n}.{x}" for n in (1, 2) for x in ("mid", "wav", "png")]
    assert all(p.stat().st_size > 100 for p in paths)
    assert music.save(tmp_path / "one", formats=["mid"])[0].name == "one-1.mid"
    with pytest.raises(UserError, match="ogg"):
        music.save(tmp_path / "x", formats=["ogg"])


def test_music_is_of_sixteen_bars_and_ends_where_it_comes_to_rest(monkeypatch):
    cut = generate.from_run(fake_run("music"), ending="cut", count=2)  # type: ignore[arg-type]
    assert [len(piece) for piece in cut] == [64 * 2] * 2

    def at_frame_100(roll, grid, given):
        assert (grid, given) == (Grid(steps_per_beat=2, low=60, high=71), 0)
        return np.concatenate([roll[:101], roll[100:101].repeat(7, 0)]), 100

    monkeypatch.setattr(generate, "end_at_cadence", at_frame_100)
    ended = generate.from_run(fake_run("music"), count=2)  # type: ignore[arg-type]
    for whole, piece, p, q in zip(cut, ended, cut.probabilities, ended.probabilities, strict=True):
        assert (piece[:101] == whole[:101]).all()
        assert (q[:101] == p[:101]).all()
        assert (q[101:] == piece[101:]).all()  # held, not drawn
        assert len(piece) == len(q) == 108
    with pytest.raises(UserError, match="ending='soft' is unknown: use cadence or cut"):
        generate.from_run(fake_run("music"), ending="soft")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_text_from_a_run(kind: str, tmp_path: Path):
    primer = "abc " if kind == "char" else "the cat"
    text = generate.from_run(fake_run(kind), seed=1, length=20, count=2, primer=primer)  # type: ignore[arg-type]
    assert isinstance(text, Text)
    assert text[0].startswith(primer)
    assert len(text.ids[0]) == 20
    assert text[0] != text[1]
    saved = text.save(tmp_path / "poem.txt")
    assert [p.name for p in saved] == ["poem-1.txt", "poem-2.txt"]
    assert saved[1].read_text("utf-8") == text[1]
    dropped = generate.from_run(  # type: ignore[arg-type]
        fake_run(kind), seed=1, length=20, primer=primer, keep_primer=False
    )
    assert text[0] == primer + dropped[0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("music", {"top_k": 3}, "is for text"),
        ("char", {"tempo": 90}, "is for music"),
        ("char", {"lenght": 3}, "unknown"),
    ],
)
def test_options_of_the_other_kind_are_named(kind, options, words):
    with pytest.raises(UserError, match=words):
        generate.from_run(fake_run(kind), **options)


def test_numbered_stems():
    assert numbered("out/a", 1) == [Path("out/a")]
    assert [p.name for p in numbered("out/a", 12)][:2] == ["a-01", "a-02"]
    with pytest.raises(UserError, match="folder"):
        numbered("", 1)


SHAPES = [
    {"hidden_sizes": (10,)},
    {"hidden_sizes": (10,), "unit": "tanh", "bias": False},
    {
        "hidden_sizes": (10,),
        "intermediate": (8, 6),
        "shortcut": "all",
        "input_to": "all",
        "intermediate_unit": "relu",
    },
    {"hidden_sizes": (10,), "intermediate": (8, 6), "input_to": "first"},
    {
        "hidden_sizes": (10,),
        "intermediate": (8, 6),
        "shortcut": "last",
        "input_to": "last",
        "unit": "identity",
    },
    {"hidden_sizes": (10, 7), "intermediate": 5, "shortcut": "last", "input_to": "all", "output_from": "all"},
    {"hidden_sizes": (10,), "output_hidden": (9, 8), "output_shortcut": True, "output_unit": "relu"},
    *({"hidden_sizes": (7,), "output_hidden": 6, "unit": unit, "output_unit": unit} for unit in UNITS),
]


def assert_rounded_alike(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for the order of sums: a processor's libraries choose it, and states of `identity` grow."""
    size = max(1.0, b.abs().max().item())
    assert (a - b).abs().max().item() <= 2e-6 * size


@pytest.mark.parametrize("output", ["bernoulli", "categorical"])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_the_quick_step_equals_the_models(shape: dict, output: str):
    torch.manual_seed(0)
    model = build(assemble(input_size=6, output_size=6, output=output, **shape), seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn(p.shape))
        quick = fastest_step(model)
        assert isinstance(quick, FewRows)
        mine = theirs = model.initial_state(BLOCK)
        for _ in range(5):
            x = torch.randint(0, 6, (BLOCK,)) if output == "categorical" else torch.rand(BLOCK, 6).round()
            a, mine = quick(x, mine)
            b, theirs = model.step(x, theirs)
            assert_rounded_alike(a, b)
        for h, k in zip(mine, theirs, strict=True):
            assert_rounded_alike(h, k)


@pytest.mark.parametrize(
    "shape",
    [{"hidden_sizes": (6,), "unit": "lp:2"}, {"hidden_sizes": (6,), "output_hidden": 5, "output_unit": "maxout:2"},
     {"hidden_sizes": (6,), "input_mlp": 5}, {"hidden_sizes": (6, 6), "input_to_levels": "all"}],
)  # fmt: skip
def test_other_models_take_the_models_own_step(shape: dict):
    model = build(assemble(input_size=KEYS, output_size=KEYS, **shape), seed=0).eval()
    assert not can_serve(model)
    assert fastest_step(model) == model.step
    assert rolls_of(model, 4, seed=0)[0].shape == (4, KEYS)


def test_double_precision_takes_the_models_own_step():
    assert isinstance(fastest_step(music_model()), FewRows)
    double = music_model().double()
    assert fastest_step(double) == double.step


@pytest.mark.parametrize("shape", [(5, 7), (400, 163), (400, 1000), (70_000, 2)])
def test_products_of_few_rows_are_cut_to_what_one_thread_takes(shape: tuple[int, int]):
    rng = np.random.default_rng(0)
    x, W = rng.random((BLOCK, shape[0]), np.float32), rng.random(shape, np.float32)
    product = Product(W)
    assert np.allclose(product(x), x @ W, rtol=1e-5)
    assert all(BLOCK * part.size <= ALONE or part.shape[1] == 1 for part in product.parts)


def test_sampling_leaves_the_model_as_it_was():
    model = music_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    rolls_of(model, 10, seed=0, count=5)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
