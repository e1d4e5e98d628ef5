"""What a study's runs say: means, Welch's tests with Holm's correction, effect sizes, and where runs are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction import statistics
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.study.jobs import Runs, chosen
from deeprnn.reproduction.study.plan_file import Contender, Study, Trial, member_key, members


@dataclass(frozen=True)
class Score:
    """One contender on one data set."""

    contender: Contender
    data: str
    trial: Trial | None
    """what validation chose; None while the search goes on"""
    entries: tuple[Entry, ...]
    wanted: int

    @property
    def whole(self) -> bool:
        """Whether every seed has been trained."""
        return len(self.entries) == self.wanted

    def values(self, split: str = "test") -> list[float]:
        """Results, in order of seeds."""
        return [entry.value(split) for entry in self.entries]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        known = bool(self.entries)
        return {
            "data": self.data,
            "family": self.contender.family,
            "contender": self.contender.name,
            "tested": self.contender.tested,
            "chosen": None if self.trial is None else dict(self.trial),
            "seeds": [entry.seed for entry in self.entries],
            "wanted": self.wanted,
            "valid": statistics.mean(self.values("valid")) if known else None,
            "test": statistics.mean(self.values()) if known else None,
            "sd": statistics.deviation(self.values()) if known else None,
            "values": self.values(),
        }


@dataclass(frozen=True)
class Answer:
    """Two contenders compared on test: below zero the tested one is better."""

    data: str
    tested: Score
    control: Score
    test: statistics.Comparison
    p: float
    """after Holm's correction over all comparisons of its kind that the plan makes"""
    level: float

    @property
    def verdict(self) -> str:
        """yes, no, or no: worse."""
        if self.p >= self.level:
            return "no"
        return "yes" if self.test.difference < 0 else "no: worse"

    @property
    def percent(self) -> tuple[float, float, float]:
        """Difference and its interval in percent of the control's mean."""
        base, interval = statistics.mean(self.control.values()), self.test.interval
        assert interval is not None
        return tuple(100 * x / base for x in (interval.value, interval.low, interval.high))  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "data": self.data,
            "family": self.tested.contender.family,
            "tested": self.tested.contender.name,
            "control": self.control.contender.name,
            "verdict": self.verdict,
            "p_holm": self.p,
            "percent": self.percent,
            **asdict(self.test),
        }


@dataclass(frozen=True)
class Results:
    """All of a study."""

    study: Study
    scores: tuple[Score, ...]
    answers: tuple[Answer, ...]
    """the question: of each family and data set the best of either side, chosen on validation"""
    pairs: tuple[Answer, ...]
    open: tuple[str, ...]
    """comparisons of the question whose runs are not all there"""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "study": self.study.name,
            "question": self.study.question,
            "scores": [score.to_dict() for score in self.scores],
            "answers": [answer.to_dict() for answer in self.answers],
            "pairs": [answer.to_dict() for answer in self.pairs],
            "open": list(self.open),
        }


def results(study: Study, runs: Runs) -> Results:
    """From the ledger to answers; a comparison is made when all its runs are there."""
    scores = tuple(_score(study, contender, data, runs) for contender, data in study.entrants())
    by = {(s.contender.family, s.contender.name, s.data): s for s in scores}
    asked: list[tuple[Score, Score] | None] = []
    unanswered = []
    for family in study.families:
        for data in family.data:
            here = [s for s in scores if (s.contender.family, s.data) == (family.name, data)]
            if all(score.whole for score in here):
                tested, control = ([s for s in here if s.contender.tested is side] for side in (True, False))
                asked.append((_best(tested), _best(control)))
            else:
                asked.append(None)
                missing = sum(s.wanted - len(s.entries) for s in here)
                unanswered.append(
                    f"{data}, {family.name}: {missing} of {sum(s.wanted for s in here)} runs are missing"
                )
    named = [(a.partition("/"), b.partition("/")) for a, b in study.pairs]
    pairs = []
    for (family, _, tested), (other, _, control) in named:
        sets = next(f.data for f in study.families if f.name == family)
        for data in sets:
            one, two = by.get((family, tested, data)), by.get((other, control, data))
            pairs.append((one, two) if one and two and one.whole and two.whole else None)
    return Results(study, scores, _answers(asked, study), _answers(pairs, study), tuple(unanswered))


def _score(study: Study, contender: Contender, data: str, runs: Runs) -> Score:
    found = chosen(study, contender, data, runs)
    if found is None or (not found[0] and study.family(contender).grid):
        return Score(contender, data, None, (), len(study.seeds))
    seeds = [runs.entries.get(member_key(recipe))
             for recipe, _ in members(study, contender, data, found[0], final=True)]  # fmt: skip
    return Score(contender, data, found[0], tuple(e for e in seeds if e is not None), len(study.seeds))


def _best(scores: Sequence[Score]) -> Score:
    return min(scores, key=lambda score: statistics.mean(score.values("valid")))


def _answers(asked: Sequence[tuple[Score, Score] | None], study: Study) -> tuple[Answer, ...]:
    """Holm's correction counts every comparison of the plan; those that wait count as if they showed nothing."""
    tests = [None if both is None else statistics.welch(both[0].values(), both[1].values()) for both in asked]
    corrected = statistics.holm([1.0 if test is None or test.p is None else test.p for test in tests])
    return tuple(
        Answer(both[0].data, *both, test, p, study.level)
        for both, test, p in zip(asked, tests, corrected, strict=True)
        if both is not None and test is not None and test.interval is not None and p is not None
    )


# ---- words


def text(found: Results) -> str:
    """The study for a person: the answers, the scores behind them, what is missing."""
    study = found.study
    lines = [study.question, ""]
    asked = len(found.answers) + len(found.open)
    lines += [f"  {_told(answer, study)}" for answer in found.answers]
    lines += [f"  not answered: {line}" for line in found.open]
    shown = sum(answer.verdict == "yes" for answer in found.answers)
    lines += [
        "",
        f"Answered yes: {shown} of {asked}. Of each side the contender that is best on validation; test results of "
        f"{len(study.seeds)} new seeds each, Welch's t-test, Holm's correction over {asked}, level {study.level:g}.",
    ]
    if found.pairs:
        lines += ["", "Pairs that the plan names (corrected among themselves):"]
        lines += [f"  {_told(answer, study)}" for answer in found.pairs]
    lines += ["", "Scores on test, mean ± standard deviation over seeds, and what was chosen:"]
    lines += [f"  {_scored(score)}" for score in found.scores]
    return "\n".join(lines)


def _told(answer: Answer, study: Study) -> str:
    value, low, high = answer.percent
    effect = answer.test.effect
    size = "" if effect is None else f", g = {effect.value:.2f} [{effect.low:.2f}, {effect.high:.2f}]"
    words = {"yes": "yes", "no": "no, not shown", "no: worse": f"no, {study.tested} is worse"}[answer.verdict]
    sides = f"{answer.tested.contender.label} against {answer.control.contender.label}"
    return (
        f"{answer.data}: {words}: {sides} {value:+.2f} % [{low:+.2f}, {high:+.2f}], p = {answer.p:.2g}{size}"
    )


def _scored(score: Score) -> str:
    place = f"{score.data} {score.contender.family} {score.contender.label}"
    if score.trial is None:
        return f"{place}: the search is not finished"
    told = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in score.trial.items())
    if not score.entries:
        return f"{place}: no seed yet ({told})"
    values = score.values()
    spread = statistics.deviation(values)
    unit = HEADLINE[score.entries[0].kind].name
    missing = "" if score.whole else f", {score.wanted - len(values)} seeds missing"
    return (
        f"{place}: {statistics.mean(values):.3f}{'' if spread is None else f' ± {spread:.3f}'} {unit}, "
        f"{len(values)} seeds{missing} ({told or 'as the recipe is'})"
    )


def title(data: str) -> str:
    """A data set's name in a figure."""
    from deeprnn.reproduction.tables import TITLES

    return TITLES[data] if data in paper.INPUTS else data
