"""A study that has goals as a table: what is known elsewhere, what is to be reached, and the twins side by side.

    print(markdown("beyond", "results/studies"))

A row whose runs are not all there says how far it has come; a goal that is missed stays in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction.layout import markdown_table
from deeprnn.reproduction.statistics import mean, plus_minus
from deeprnn.reproduction.study.analysis import Answer, Results, Score, results
from deeprnn.reproduction.study.dynamic import read_dynamic
from deeprnn.reproduction.study.jobs import Runs
from deeprnn.reproduction.study.plan_file import Contender, Goal, Study, member_key, members, read_study
from deeprnn.reproduction.study.report import label, remarks, title
from deeprnn.reproduction.study.run import check_plan, read_runs

PLAN, STUDIES = "beyond", Path("results/studies")


def markdown(name: str, folder: Path) -> str:
    """The table of a packaged plan, from its runs in a folder of studies."""
    return table(read_study(name), folder / name)


def table(study: Study, ledger: Path) -> str:
    """A row for each goal, and in a sentence how much of the plan has been run."""
    check_plan(study, ledger)
    runs = read_runs(ledger)
    outcome, dynamic = results(study, runs), read_dynamic(ledger)
    headings = ("test", "best known", "goal", f"{study.control} twin", f"{study.tested} twin", "reached",
                f"{study.tested} better?")  # fmt: skip
    lines = [_cells(goal, outcome, runs, dynamic) for goal in study.goals]
    parts = [markdown_table(headings, lines), *remarks(outcome.scores), _state(outcome, runs)]
    return "\n\n".join(parts) + "\n"


def _cells(goal: Goal, outcome: Results, runs: Runs, dynamic: Mapping[str, Any]) -> list[str]:
    scores = [s for s in outcome.scores if (s.contender.family, s.data) == (goal.family, goal.data)]
    sides = [[s for s in scores if s.contender.tested is side] for side in (False, True)]
    twins = [_twin(side, goal, dynamic) for side in sides]
    answer = next((a for a in outcome.answers if _answers(a, goal)), None)
    side_texts = [_side(twin, side, outcome.study, runs) for twin, side in zip(twins, sides, strict=True)]
    targets = ", then ".join(f"≤ {value:g}" for value in goal.goal)
    scored = all(twin or all(s.lost for s in side) for twin, side in zip(twins, sides, strict=True))
    return [
        goal.title or title(goal.data),
        goal.known,
        targets,
        *side_texts,
        _reached(goal, [twin for twin in twins if twin]) if scored else "",
        "" if answer is None or goal.dynamic else f"{answer.verdict} (p = {answer.p:.2g})",
    ]


class Twin(NamedTuple):
    """What stands for one side of a row: of its contenders the best on validation, with what the row is scored by."""

    score: Score
    valid: float
    test: list[float]


def _twin(side: Sequence[Score], goal: Goal, dynamic: Mapping[str, Any]) -> Twin | None:
    """None while runs or scores of a contender are missing, and where all of them are lost."""
    if not all(score.whole for score in side):
        return None
    twins = [_scored(score, goal, dynamic) for score in side if not score.lost]
    if None in twins:
        return None
    return min((twin for twin in twins if twin), key=lambda twin: twin.valid, default=None)


def _scored(score: Score, goal: Goal, dynamic: Mapping[str, Any]) -> Twin | None:
    """A row of dynamic evaluation goes by dynamic scores, on validation too; None where they are not all there."""
    if not goal.dynamic:
        return Twin(score, mean(score.values("valid")), score.values())
    key = HEADLINE[score.entries[0].kind].key
    rows = [dynamic.get(entry.path.name) for entry in score.entries]
    scores = [row for row in rows if row is not None]
    if len(scores) < len(rows):
        return None
    return Twin(score, mean([row["valid"] for row in scores]), [row["test"][key] for row in scores])


def _answers(answer: Answer, goal: Goal) -> bool:
    return (answer.tested.contender.family, answer.data) == (goal.family, goal.data)


def _side(twin: Twin | None, scores: Sequence[Score], study: Study, runs: Runs) -> str:
    if twin is not None:
        places = HEADLINE[twin.score.entries[0].kind].places
        return f"{label(twin.score)} {plus_minus(twin.test, places)}{_other_averages(twin.score)}"
    if all(score.lost for score in scores):
        return "lost"
    if all(score.whole for score in scores):
        return f"{', '.join(s.contender.label for s in scores)}: not scored yet"
    done = sum(trained(study, score.contender, score.data, runs) for score in scores)
    seeds = sum(len(score.entries) for score in scores)
    trials = sum(len(study.family(score.contender).trials) * len(study.search_seeds) for score in scores)
    if not done and not seeds:
        return "not run"
    return f"{done} of {trials} trials, {seeds} of {sum(score.wanted for score in scores)} seeds"


OTHER = {"nats_per_frame_sequence_average": "by song", "nats_per_frame_without_first": "without first frames"}
"""averages that others publish for music"""


def _other_averages(score: Score) -> str:
    tests = [entry.raw["result"]["test"] for entry in score.entries]
    averages = [
        f"{name} {mean([t[key] for t in tests]):.3f}"
        for key, name in OTHER.items()
        if all(key in t for t in tests)
    ]
    return f" ({', '.join(averages)})" if averages else ""


def trained(study: Study, contender: Contender, data: str, runs: Runs) -> int:
    """How many runs of a contender's search have ended."""
    return sum(
        member_key(recipe) in runs.entries or member_key(recipe) in runs.diverged
        for trial in study.family(contender).trials
        for recipe, _ in members(study, contender, data, trial)
    )


def _reached(goal: Goal, twins: Sequence[Twin]) -> str:
    """Which goal the twin that is better on validation reaches by its mean on test: test chooses nothing."""
    if not twins:
        return "no"
    value = mean(min(twins, key=lambda twin: twin.valid).test)
    passed = [target for target in goal.goal if value <= target]
    return f"≤ {passed[-1]:g}" if passed else "no"


def _state(outcome: Results, runs: Runs) -> str:
    """In a sentence, how much of the plan has been run."""
    count, study = len(runs.entries), outcome.study
    if not count:
        return f"Nothing of this plan has been run yet (`deeprnn reproduce --study {study.name} --plan`)."
    rows = len(outcome.answers) + len(outcome.open) + len(outcome.void)
    return f"{len(outcome.answers)} of {rows} rows are whole, by {count} runs." + (
        f" Open: {'; '.join((*outcome.open, *outcome.void))}." if outcome.open or outcome.void else ""
    )
