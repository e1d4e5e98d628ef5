"""Packs on a GPU: members of a population that each have settings of their own."""

from __future__ import annotations

import pytest

from deeprnn.sweeps.engines.local import LocalEngine
from tests.sweeps.toys import spec, sweep

pytestmark = pytest.mark.gpu
OWN = {
    "optimiser.rate": "log:0.1..2",
    "optimiser.clip": [0.5, 1.0],
    "regulariser.weight_noise": "uniform:0..0.1",
    "init.output_std": [0.05, 0.1],
    "schedule.patience": "int:1..3",
}
"""what may differ from member to member of one pack"""


def scores(folder, pack: int, jobs: int, **changes) -> list[float | None]:
    which = spec(OWN, {"stop.epochs": 4, **changes}, trials=8)
    outcome = sweep(which, folder, pack=pack, engine=LocalEngine("cuda", jobs))
    assert [t.state for t in outcome.trials] == ["complete"] * 8
    return [t.value for t in outcome.trials]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.kind": "dts", "model.intermediate": [5], "optimiser.average": "ema"},
        {"model.cell": "gru", "regulariser.dropout_output": 0.3},
        {"regulariser.dropconnect": 0.3},
    ],
    ids=["rnn", "deep, averaged", "gru, dropout", "dropconnect"],
)
def test_packed_trials_score_what_each_does_alone(tmp_path, changes):
    packed = scores(tmp_path / "packed", 8, 1, **changes)
    assert len(set(packed)) == 8
    assert packed == pytest.approx(scores(tmp_path / "alone", 1, 1, **changes), rel=5e-3)


def test_packs_that_share_the_card_score_what_one_at_a_time_does(tmp_path):
    together, apart = (scores(tmp_path / str(jobs), 2, jobs) for jobs in (4, 1))
    assert together == pytest.approx(apart, rel=5e-3)


def test_a_trial_that_goes_nan_leaves_the_others_of_its_pack_alone(tmp_path):
    which = spec({"init.output_std": [0.1, 3e38, 0.2]}, sampler="grid")
    outcome = sweep(which, tmp_path / "s", engine=LocalEngine("cuda", 1))
    assert [t.state for t in outcome.trials] == ["complete", "failed", "complete"]
