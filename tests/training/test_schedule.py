"""Every schedule against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from deeprnn.training.schedule import Schedule
from tests.training.toys import recipe

CPU = torch.device("cpu")


def make(rates=(1.0,), updates=10, **changes) -> Schedule:
    return Schedule(recipe(**changes), list(rates), updates, CPU)


def rate(schedule: Schedule, tau: int) -> list[float]:
    return schedule.rates(torch.tensor(tau)).tolist()


def test_the_papers_rate_is_constant_until_tau0_and_halves_after_beta_updates():
    s = make(rates=(1.0, 0.5), schedule__beta=100.0)
    assert rate(s, 10_000) == [1.0, 0.5]
    s.members[0].tau0 = 300
    s.push()
    assert rate(s, 300) == [1.0, 0.5]
    assert rate(s, 400) == [0.5, 0.5]  # 1 / (1 + 100/100); the other member has not begun
    assert rate(s, 600)[0] == pytest.approx(0.25)


def test_the_decay_starts_after_patience_and_restores_the_best():
    s = make(schedule__patience=2, stop__epochs=0, stop__patience=3)
    costs = [5.0, 4.0, 4.5, 4.2, 4.1, 4.3, 4.3]
    verdicts = [s.after_epoch(0, e, 10 * e, c) for e, c in enumerate(costs, 1)]
    assert [v.improved for v in verdicts] == [True, True, False, False, False, False, False]
    assert [v.restore for v in verdicts] == [False, False, False, True, False, False, False]
    m = s.members[0]
    assert (m.tau0, m.best, m.best_epoch, m.decay_epoch) == (40, 4.0, 2, 4)
    assert m.finished == "no new best in 3 epochs"  # epochs 5, 6, 7 after the decay's start


def test_a_new_best_after_the_decay_extends_the_run():
    s = make(schedule__patience=1, stop__epochs=0, stop__patience=2)
    for e, c in enumerate([5.0, 6.0, 4.0, 4.5], 1):
        s.after_epoch(0, e, 10 * e, c)
    assert not s.done
    s.after_epoch(0, 5, 50, 4.5)
    assert s.done


def test_halving_wants_an_improvement_by_the_factor_and_stops_at_the_minimum():
    s = make(rates=(1.0,), schedule__name="halving", schedule__factor=1.01, schedule__patience=1,
             schedule__minimum=0.2, stop__epochs=0, stop__patience=0)  # fmt: skip
    assert not s.after_epoch(0, 1, 10, 5.0).restore
    assert not s.after_epoch(0, 2, 20, 4.9).restore  # 4.9 * 1.01 < 5.0
    s.push()
    assert rate(s, 20) == [1.0]
    verdict = s.after_epoch(0, 3, 30, 4.89)  # better, but by less than one percent
    assert verdict.improved
    assert verdict.restore
    s.push()
    assert rate(s, 30) == [0.5]
    s.after_epoch(0, 4, 40, 5.0)
    assert not s.done
    s.after_epoch(0, 5, 50, 5.0)  # 0.125 is below the minimum
    assert s.members[0].finished == "the rate fell below 0.2"
    s.push()
    assert rate(s, 50) == [0.0]


def test_cosine_goes_from_the_rate_to_its_floor():
    s = make(rates=(2.0,), updates=10, schedule__name="cosine", schedule__floor=0.1, stop__epochs=4)
    assert rate(s, 0) == [2.0]
    assert rate(s, 20)[0] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rate(s, 10)[0] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert rate(s, 40)[0] == pytest.approx(0.2)
    assert rate(s, 99)[0] == pytest.approx(0.2)


def test_constant_with_warm_up():
    s = make(rates=(3.0,), schedule__name="constant", schedule__warmup=10, stop__epochs=0)
    assert rate(s, 0)[0] == pytest.approx(0.3)
    assert rate(s, 4)[0] == pytest.approx(1.5)
    assert rate(s, 9) == [3.0]
    assert rate(s, 1000) == [3.0]


def test_a_cosine_over_a_limit_of_time_follows_the_updates_that_fit():
    s = make(rates=(2.0,), schedule__name="cosine", stop__epochs=0, stop__minutes=5.0)
    assert rate(s, 1000) == [2.0]  # nothing is known yet
    s.expect(200.0)
    assert rate(s, 100)[0] == pytest.approx(1.0)
    assert rate(s, 200)[0] == pytest.approx(0.0, abs=1e-12)


def test_the_limit_that_comes_first_counts():
    s = make(rates=(2.0,), updates=10, schedule__name="cosine", stop__epochs=4, stop__minutes=5.0)
    s.expect(1000.0)
    assert rate(s, 40)[0] == pytest.approx(0.0, abs=1e-12)
    s.expect(20.0)
    assert rate(s, 10)[0] == pytest.approx(1.0)


def test_a_warm_up_takes_at_most_a_tenth_of_a_short_run():
    s = make(rates=(3.0,), updates=10, schedule__name="constant", schedule__warmup=100, stop__epochs=5)
    assert rate(s, 0)[0] == pytest.approx(0.6)  # five updates instead of a hundred
    assert rate(s, 4) == [3.0]
    s.expect(20.0)
    assert rate(s, 0)[0] == pytest.approx(1.5)


def test_later_limits_let_members_go_on_but_not_what_ended_for_good():
    s = make(rates=(1.0, 1.0, 1.0), stop__epochs=3, stop__patience=0)
    s.members[1].end("diverged in epoch 2")
    for p in (0, 2):
        s.after_epoch(p, 3, 30, 1.0)
    assert s.done
    longer = make(rates=(1.0, 1.0, 1.0), stop__epochs=5, stop__patience=0)
    longer.load(s.state())
    longer.reopen(3)
    assert [m.finished for m in longer.members] == ["", "diverged in epoch 2", ""]
    assert rate(longer, 30) == [1.0, 0.0, 1.0]
    s.reopen(3)
    assert s.done


def test_epochs_end_a_run_and_a_finished_members_rate_is_zero():
    s = make(rates=(1.0, 1.0), stop__epochs=2)
    for e in (1, 2):
        s.after_epoch(0, e, 10 * e, 1.0 / e)
    s.push()
    assert rate(s, 20) == [0.0, 1.0]
    assert not s.done
    s.finish("time")
    assert [m.finished for m in s.members] == ["all 2 epochs done", "time"]


def test_the_state_survives_a_round_trip():
    a, b = (make(rates=(1.0, 0.5), stop__epochs=0) for _ in range(2))
    for e, c in enumerate([5.0, 6.0, 6.0, 6.0], 1):
        a.after_epoch(1, e, 10 * e, c)
    b.load(a.state())
    assert b.members == a.members
    # The second member's decay began with update 30, two epochs after its best.
    assert rate(b, 77) == [1.0, pytest.approx(0.5 / (1 + (77 - 30) / 20))]
