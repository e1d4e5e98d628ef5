"""A study's results for a person: sentences, scores and the marks on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction import statistics
from deeprnn.reproduction.study.analysis import Answer, Results, Score
from deeprnn.reproduction.study.plan_file import Study
from deeprnn.runs.summary import MARK


def text(outcome: Results) -> str:
    """The study for a person: the answers, the scores behind them, what is missing."""
    study = outcome.study
    lines = [study.question, ""]
    questions = len(outcome.answers) + len(outcome.open) + len(outcome.void)
    lines += [f"  {_sentence(answer, study)}" for answer in outcome.answers]
    lines += [f"  not answered: {line}" for line in (*outcome.open, *outcome.void)]
    yes = sum(answer.verdict == "yes" for answer in outcome.answers)
    lines += [
        "",
        f"Answered yes: {yes} of {questions}. Of each side the contender that is best on validation; test results of "
        f"{len(study.seeds)} new seeds each, Welch's t-test, Holm's correction over {questions}, level "
        f"{study.level:g}.",
    ]
    if outcome.pairs:
        lines += ["", "Pairs that the plan names (corrected among themselves):"]
        lines += [f"  {_sentence(answer, study)}" for answer in outcome.pairs]
    lines += ["", "Scores on test, mean ± standard deviation over seeds, and what was chosen:"]
    lines += [f"  {_score(score)}" for score in outcome.scores]
    lines += remarks(outcome.scores)
    return "\n".join(lines)


def _sentence(answer: Answer, study: Study) -> str:
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


def _score(score: Score) -> str:
    place = f"{score.data} {score.contender.family} {score.contender.label}"
    if score.hopeless:
        return f"{place}: lost: every trial diverged"
    if score.trial is None:
        return f"{place}: the search is not finished"
    settings = ", ".join(f"{_field(name)} {_shown(value)}" for name, value in score.trial.items())
    choice = f"{settings or 'as the recipe is'}{_margin(score)}"
    diverged = f", {score.diverged} of {score.wanted} seeds diverged" if score.diverged else ""
    if score.lost:
        diverged += f": lost, fewer than {score.least} can have a result"
    if not score.entries:
        return f"{place}: no seed yet{diverged} ({choice})"
    values = score.values()
    unit = HEADLINE[score.entries[0].kind].name
    missing = "" if score.whole else f", {score.missing} seeds missing"
    return (
        f"{place}: {statistics.plus_minus(values, 3)}{MARK * bool(score.marks)} {unit}, "
        f"{len(values)} seeds{missing}{diverged} ({choice})"
    )


def _margin(score: Score) -> str:
    """How sure the choice was: the runner-up's distance on validation, and values at the edge of the grid."""
    margin = "" if score.ahead is None else f"; {score.ahead:.2g} ahead of the runner-up on validation"
    return margin + (
        f"; at the edge of its grid: {', '.join(map(_field, score.edges))}" if score.edges else ""
    )


def _field(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def title(data: str) -> str:
    """A data set's name in a figure."""
    from deeprnn.reproduction.tables import TITLES

    return TITLES[data] if data in paper.INPUTS else data
