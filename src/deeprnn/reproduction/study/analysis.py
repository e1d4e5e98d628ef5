"""What a study's runs say: means, Welch's tests with Holm's correction, effect sizes, and where runs are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction import statistics
from deeprnn.reproduction.deviations import marks_of
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.study.jobs import Candidate, Runs, chosen, has_diverged, ranking
from deeprnn.reproduction.study.plan_file import Contender, Study, Trial, member_key, members
from deeprnn.runs.summary import MARK


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
    asked: list[tuple[Score, Score] | None] = []
    unanswered, void = [], []
    for family in study.families:
        for data in family.data:
            here = [s for s in scores if (s.contender.family, s.data) == (family.name, data)]
            tested, control = (best_of([s for s in here if s.contender.tested is t]) for t in (True, False))
            missing = sum(s.missing for s in here)
            asked.append((tested, control) if tested and control and not missing else None)
            if missing:
                unanswered.append(
                    f"{data}, {family.name}: {missing} of {sum(s.wanted for s in here)} runs are missing"
                )
            elif asked[-1] is None:
                sides = ((study.tested, tested), (study.control, control))
                words = " and every ".join(word for word, best in sides if best is None)
                void.append(f"{data}, {family.name}: every {words} contender is lost")
    named = [(a.partition("/"), b.partition("/")) for a, b in study.pairs]
    pairs = []
    for (family, _, tested), (other, _, control) in named:
        sets = next(f.data for f in study.families if f.name == family)
        for data in sets:
            one, two = by.get((family, tested, data)), by.get((other, control, data))
            ready = one and two and all(s.whole and not s.lost for s in (one, two))
            pairs.append((one, two) if one and two and ready else None)
    return Results(
        study, scores, _answers(asked, study), _answers(pairs, study), tuple(unanswered), tuple(void)
    )


def _score(study: Study, contender: Contender, data: str, runs: Runs) -> Score:
    winner, wanted, least = chosen(study, contender, data, runs), len(study.seeds), study.least_seeds
    if winner is None or winner.hopeless:
        return Score(contender, data, None, (), wanted, least=least, hopeless=winner is not None)
    both = members(study, contender, data, winner.trial, final=True)
    seeds = [runs.entries.get(member_key(recipe)) for recipe, _ in both]
    return Score(
        contender,
        data,
        winner.trial,
        tuple(e for e in seeds if e is not None),
        wanted,
        diverged=sum(has_diverged(runs, *pair) for pair in both),
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
    several = {name: values for name, values in grid.items() if len(set(values)) > 1}
    return tuple(
        name for name, values in several.items() if trial[name] in (min(values), max(values)) and trial[name]
    )


def _ahead(trials: Sequence[Candidate]) -> float | None:
    return trials[1].cost - trials[0].cost if len(trials) > 1 else None


def best_of(scores: Sequence[Score]) -> Score | None:
    """Of the contenders of one side the best on validation, once none has anything left to train; None if all lost."""
    if not all(score.whole for score in scores):
        return None
    standing = [score for score in scores if not score.lost]
    return min(standing, key=lambda s: statistics.mean(s.values("valid")), default=None)


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


def text(outcome: Results) -> str:
    """The study for a person: the answers, the scores behind them, what is missing."""
    study = outcome.study
    lines = [study.question, ""]
    asked = len(outcome.answers) + len(outcome.open) + len(outcome.void)
    lines += [f"  {_told(answer, study)}" for answer in outcome.answers]
    lines += [f"  not answered: {line}" for line in (*outcome.open, *outcome.void)]
    shown = sum(answer.verdict == "yes" for answer in outcome.answers)
    lines += [
        "",
        f"Answered yes: {shown} of {asked}. Of each side the contender that is best on validation; test results of "
        f"{len(study.seeds)} new seeds each, Welch's t-test, Holm's correction over {asked}, level {study.level:g}.",
    ]
    if outcome.pairs:
        lines += ["", "Pairs that the plan names (corrected among themselves):"]
        lines += [f"  {_told(answer, study)}" for answer in outcome.pairs]
    lines += ["", "Scores on test, mean ± standard deviation over seeds, and what was chosen:"]
    lines += [f"  {_scored(score)}" for score in outcome.scores]
    lines += remarks(outcome.scores)
    return "\n".join(lines)


def _told(answer: Answer, study: Study) -> str:
    value, low, high = answer.percent
    effect = answer.test.effect
    size = "" if effect is None else f", g = {effect.value:.2f} [{effect.low:.2f}, {effect.high:.2f}]"
    words = {"yes": "yes", "no": "no, not shown", "no: worse": f"no, {study.tested} is worse"}[answer.verdict]
    sides = f"{label(answer.tested)} against {label(answer.control)}"
    return (
        f"{answer.data}: {words}: {sides} {value:+.2f} % [{low:+.2f}, {high:+.2f}], p = {answer.p:.2g}{size}"
    )


def label(score: Score) -> str:
    """A contender's name; where seeds diverged, of how many its number is; a mark where `marks` says something."""
    left_out = f" ({score.diverged} of {score.wanted} seeds diverged)" if score.diverged else ""
    return score.contender.label + left_out + MARK * bool(score.marks)


def remarks(scores: Sequence[Score]) -> list[str]:
    """What the mark stands for, contender by contender."""
    return [
        f"{MARK} {s.data}, {s.contender.family}, {s.contender.label}: {'; '.join(s.marks)}"
        for s in scores
        if s.marks
    ]


def _scored(score: Score) -> str:
    place = f"{score.data} {score.contender.family} {score.contender.label}"
    if score.hopeless:
        return f"{place}: lost: every trial diverged"
    if score.trial is None:
        return f"{place}: the search is not finished"
    told = ", ".join(f"{_field(name)} {_shown(value)}" for name, value in score.trial.items())
    told = f"{told or 'as the recipe is'}{_margin(score)}"
    diverged = f", {score.diverged} of {score.wanted} seeds diverged" if score.diverged else ""
    if score.lost:
        diverged += f": lost, fewer than {score.least} can have a result"
    if not score.entries:
        return f"{place}: no seed yet{diverged} ({told})"
    values = score.values()
    unit = HEADLINE[score.entries[0].kind].name
    missing = "" if score.whole else f", {score.missing} seeds missing"
    return (
        f"{place}: {statistics.plus_minus(values, 3)}{MARK * bool(score.marks)} {unit}, "
        f"{len(values)} seeds{missing}{diverged} ({told})"
    )


def _margin(score: Score) -> str:
    """How sure the choice was: the runner-up's distance on validation, and values at the edge of the grid."""
    told = "" if score.ahead is None else f"; {score.ahead:.2g} ahead of the runner-up on validation"
    return told + (f"; at the edge of its grid: {', '.join(map(_field, score.edges))}" if score.edges else "")


def _field(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def title(data: str) -> str:
    """A data set's name in a figure."""
    from deeprnn.reproduction.tables import TITLES

    return TITLES[data] if data in paper.INPUTS else data
