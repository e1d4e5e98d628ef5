"""Metrics: every convention from one pass, on hand-made numbers and on the published one-gram rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deeprnn.data import load
from deeprnn.data.batching import music_evaluation, text_evaluation
from deeprnn.model import metrics
from deeprnn.model.losses import bernoulli_nats, bernoulli_nll
from tests.helpers import benchmark_data


def test_music_averages_by_hand():
    found = metrics.music_metrics(np.array([4.0, 2.0, 10.0, 1.0, 1.0]), [2, 1, 0, 2])
    assert found["nats_per_frame"] == pytest.approx(18 / 5)
    assert found["nats_per_frame_sequence_average"] == pytest.approx((3 + 10 + 1) / 3)
    assert found["nats_per_frame_without_first"] == pytest.approx((2 + 1) / 2)
    assert (found["frames"], found["sequences"]) == (5, 4)


def test_characters_in_both_countings_by_hand():
    vocabulary = ["a", " ", "\n"]
    ids = np.array([0, 1, 2, 0, 1, 0, 1, 2])  # "a \na a \n": two trailing spaces, one inner
    nats = np.array([99.0, 1, 2, 3, 4, 5, 6, 7])
    found = metrics.char_metrics(nats, ids, vocabulary)
    assert found["bpc"] == pytest.approx(28 / 7 / math.log(2))
    assert found["bpc_stripped"] == pytest.approx((28 - 1 - 6) / 5 / math.log(2))
    assert (found["symbols"], found["symbols_stripped"]) == (8, 6)


def test_words_leave_the_first_token_out():
    found = metrics.word_metrics(np.array([50.0, math.log(3.0), math.log(3.0)]))
    assert found["perplexity"] == pytest.approx(3.0)
    assert found["tokens"] == 3


def test_an_empty_split_has_no_mean():
    assert metrics.mean(4.0, 4) == 1.0
    assert math.isnan(metrics.mean(0.0, 0))


def test_scores_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="scores for 5 frames"):
        metrics.music_metrics(np.zeros(4), [2, 3])
    with pytest.raises(ValueError, match="symbols"):
        metrics.char_metrics(np.zeros(4), np.zeros(5, int), ["a"])
    with pytest.raises(ValueError, match="needs lengths"):
        metrics.summarise("music", np.zeros(3))


def test_overflowing_perplexity_is_infinite():
    assert metrics.perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize(("name", "published"), [("jsb", 11.06), ("nottingham", 10.25), ("musedata", 11.51)])
def test_train_frequencies_score_the_published_one_gram_rows(name, published):
    """A constant Bernoulli per pitch through the whole path: file, batches, loss, metric."""
    benchmark_data()
    data = load(name)
    train = data.splits["train"]
    probability = torch.tensor(train.counts() / train.frames).clamp(1e-9, 1 - 1e-9)
    logits = torch.logit(probability).float()
    plan = music_evaluation(data.splits["test"], chunk=200, width=32)
    scores, total, frames = plan.new_scores(), 0.0, 0
    for i, batch in enumerate(plan):
        constant = logits.expand(*batch.mask.shape, -1)
        plan.record(scores, i, bernoulli_nats(constant, batch.y))
        nats, count = bernoulli_nll(constant, batch.y, batch.mask)
        total, frames = total + nats.item(), frames + int(count)
    found = metrics.music_metrics(plan.collect(scores), data.splits["test"].lengths)
    assert round(found["nats_per_frame"], 2) == published
    assert found["nats_per_frame"] == pytest.approx(total / frames, rel=1e-5)
    assert found["frames"] == data.splits["test"].frames


def test_stripped_treebank_counts_the_symbols_other_papers_count():
    benchmark_data()
    data = load("ptb-char")
    plan = text_evaluation(data.splits["test"])
    assert plan.scored == 446_184 - 1
    found = metrics.char_metrics(np.ones(446_184), data.splits["test"], data.vocabulary)
    assert found["symbols_stripped"] == 442_423
    assert found["bpc"] == pytest.approx(1 / math.log(2))
