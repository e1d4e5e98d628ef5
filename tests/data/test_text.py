"""Text: vocabularies from the training part, exact streams, and round trips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeprnn.data.text import build_vocabulary, smallest_integer, text_data, treebank_characters, word_symbols
from deeprnn.errors import UserError


def test_the_vocabulary_comes_from_the_training_part_alone():
    data = text_data("t", "word", {"train": "a a b\n", "valid": "a z\n", "test": "z z\n"})
    assert "z" not in data.vocabulary
    assert data.unknown == {"train": 0, "valid": 1, "test": 2}
    assert data.decode(data.splits["valid"]) == "a <unk>\n"


def test_minimum_count():
    data = text_data("t", "word", {"train": "a a b\na c\n"}, minimum=2)
    assert data.vocabulary == ["a", "<eos>", "<unk>"]
    assert data.unknown["train"] == 2


def test_a_text_that_spells_unk_gets_no_second_one():
    assert build_vocabulary(["<unk>", "a", "a"]) == ["a", "<unk>"]
    assert build_vocabulary(["b", "a"], unknown=False) == ["a", "b"]


def test_symbols_take_the_smallest_integers():
    assert [smallest_integer(n) for n in (2, 256, 257, 32_768, 32_769)] == [
        np.dtype(t) for t in ("uint8", "uint8", "int16", "int16", "int32")
    ]


def test_both_countings_of_a_treebank_line():
    text = " no it was \n but <unk> N \n"
    assert treebank_characters(text) == "no it was \nbut <unk> N \n"
    assert treebank_characters(text, "stripped") == "no it was\nbut <unk> N\n"
    with pytest.raises(UserError, match="counting='odd'"):
        treebank_characters(text, "odd")


@given(st.text(alphabet="ab \n", max_size=60))
def test_characters_round_trip(text):
    data = text_data("t", "char", {"train": "ab \n", "test": text})
    assert data.decode(data.encode(text)) == text
    assert data.decode(data.splits["test"]) == text


@given(st.lists(st.lists(st.sampled_from(["x", "yy", "z."]), max_size=5), max_size=6))
def test_words_round_trip(lines):
    text = "".join(" ".join(line) + "\n" for line in lines)
    data = text_data("t", "word", {"train": "x yy z.\n"})
    assert data.decode(data.encode(text)) == text
    assert word_symbols(text).count("<eos>") == len(lines)


def test_refusals():
    with pytest.raises(UserError, match="no vocabulary"):
        text_data("t", "char", {"train": ""}, unknown=False)
    with pytest.raises(UserError, match="kind='line'"):
        text_data("t", "line", {"train": "a"})
    with pytest.raises(UserError, match=r"\['z'\] are not in the vocabulary"):
        text_data("t", "char", {"train": "ab"}, unknown=False).encode("az")
