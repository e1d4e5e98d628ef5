"""What a study's runs say: means, Welch's tests with Holm's correction, effect sizes, and where runs are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deeprnn.reproduction import statistics
from deeprnn.reproduction.deviations import marks_of
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.study.jobs import Candidate, Runs, chosen, has_diverged, ranking
from deeprnn.reproduction.study.plan_file import Contender, Study, Trial, member_key, members


@dataclass(frozen=True)
class Score:
    """One contender on one data set."""

    contender: Contender
    data: str
    trial: Trial | None
    """what validation chose; None while the search goes on, and where all of it diverged"""
    entries: tuple[Entry, ...]
    wanted: int
    diverged: int = 0
    """seeds that ended without a result, and are left out"""
    least: int = 2
    """seeds without which a contender counts as lost"""
    hopeless: bool = False
    """whether every trial diverged"""
    edges: tuple[str, ...] = ()
    """fields whose chosen value is the largest or smallest of the grid, zero aside: the best may lie beyond"""
    ahead: float | None = None
    """what the runner-up among the trials costs more on validation"""
    search: tuple[Entry, ...] = ()
    """the runs by which validation chose"""

    @property
    def missing(self) -> int:
        """Seeds that are still to be trained."""
        return 0 if self.hopeless else self.wanted - self.diverged - len(self.entries)

    @property
    def whole(self) -> bool:
        """Whether nothing is left to train."""
        return self.missing == 0

    @property
    def lost(self) -> bool:
        """Whether too few seeds have a result, and no run can change that: it cannot win."""
        return self.hopeless or self.wanted - self.diverged < self.least

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know of some of the runs: 1 of 10 code with changes in no commit."""
        return (*marks_of(self.entries), *(f"of the search, {mark}" for mark in marks_of(self.search)))

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
            "diverged": self.diverged,
            "lost": self.lost,
            "at_the_edge": list(self.edges),
            "ahead_of_runner_up": self.ahead,
            "marks": list(self.marks),
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
    void: tuple[str, ...] = ()
    """comparisons of the question that no run can make any more: all of a side is lost"""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "study": self.study.name,
            "question": self.study.question,
            "scores": [score.to_dict() for score in self.scores],
            "answers": [answer.to_dict() for answer in self.answers],
            "pairs": [answer.to_dict() for answer in self.pairs],
            "open": list(self.open),
            "void": list(self.void),
        }


def results(study: Study, runs: Runs) -> Results:
    """From the ledger to answers; a comparison is made when all its runs are there."""
    scores = tuple(_score(study, contender, data, runs) for contender, data in study.entrants())
    by = {(s.contender.family, s.contender.name, s.data): s for s in scores}
    questions: list[tuple[Score, Score] | None] = []
    unanswered, void = [], []
    for family in study.families:
        for data in family.data:
            rivals = [s for s in scores if (s.contender.family, s.data) == (family.name, data)]
            tested, control = (best_of([s for s in rivals if s.contender.tested is t]) for t in (True, False))
            missing = sum(s.missing for s in rivals)
            questions.append((tested, control) if tested and control and not missing else None)
            if missing:
                unanswered.append(
                    f"{data}, {family.name}: {missing} of {sum(s.wanted for s in rivals)} runs are missing"
                )
            elif questions[-1] is None:
                sides = ((study.tested, tested), (study.control, control))
                words = " and every ".join(word for word, best in sides if best is None)
                void.append(f"{data}, {family.name}: every {words} contender is lost")
    named = [(a.partition("/"), b.partition("/")) for a, b in study.pairs]
    pairs = []
    for (family, _, tested), (other, _, control) in named:
        sets = next(f.data for f in study.families if f.name == family)
        for data in sets:
            sides = by.get((family, tested, data)), by.get((other, control, data))
            pairs.append(sides if all(s and s.whole and not s.lost for s in sides) else None)
    return Results(
        study, scores, _answers(questions, study), _answers(pairs, study), tuple(unanswered), tuple(void)
    )


def _score(study: Study, contender: Contender, data: str, runs: Runs) -> Score:
    winner, wanted, least = chosen(study, contender, data, runs), len(study.seeds), study.least_seeds
    if winner is None or winner.hopeless:
        return Score(contender, data, None, (), wanted, least=least, hopeless=winner is not None)
    recipes = members(study, contender, data, winner.trial, final=True)
    seeds = [runs.entries.get(member_key(recipe)) for recipe, _ in recipes]
    return Score(
        contender,
        data,
        winner.trial,
        tuple(e for e in seeds if e is not None),
        wanted,
        diverged=sum(has_diverged(runs, *pair) for pair in recipes),
        least=least,
        edges=_edges(study.family(contender).grid, winner.trial),
        ahead=_ahead(ranking(study, contender, data, runs)),
        search=tuple(_searched(study, contender, data, runs)),
    )


def _searched(study: Study, contender: Contender, data: str, runs: Runs) -> Iterator[Entry]:
    for trial in study.family(contender).trials:
        for recipe, _ in members(study, contender, data, trial):
            if member_key(recipe) in runs.entries:
                yield runs.entries[member_key(recipe)]


def _edges(grid: Mapping[str, Sequence[Any]], trial: Trial) -> tuple[str, ...]:
    """Zero is no edge: nothing lies below it."""
    searched = {name: values for name, values in grid.items() if len(set(values)) > 1}
    return tuple(
        name for name, values in searched.items() if trial[name] in (min(values), max(values)) and trial[name]
    )


def _ahead(trials: Sequence[Candidate]) -> float | None:
    return trials[1].cost - trials[0].cost if len(trials) > 1 else None


def best_of(scores: Sequence[Score]) -> Score | None:
    """Of the contenders of one side the best on validation, once none has anything left to train; None if all lost."""
    if not all(score.whole for score in scores):
        return None
    standing = [score for score in scores if not score.lost]
    return min(standing, key=lambda s: statistics.mean(s.values("valid")), default=None)


def _answers(comparisons: Sequence[tuple[Score, Score] | None], study: Study) -> tuple[Answer, ...]:
    """Holm's correction counts every comparison of the plan; those that wait count as if they showed nothing."""
    tests = [pair and statistics.welch(pair[0].values(), pair[1].values()) for pair in comparisons]
    corrected = statistics.holm([1.0 if test is None or test.p is None else test.p for test in tests])
    return tuple(
        Answer(pair[0].data, *pair, test, p, study.level)
        for pair, test, p in zip(comparisons, tests, corrected, strict=True)
        if pair is not None and test is not None and test.interval is not None and p is not None
    )
