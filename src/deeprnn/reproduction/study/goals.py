"""A study that has goals as a table: what is known elsewhere, what is to be reached, and the twins side by side.

    print(markdown("beyond", "results/studies"))

A row whose runs are not all there says how far it has come; a goal that is missed stays in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction.statistics import mean, plus_minus
from deeprnn.reproduction.study.analysis import Answer, Results, Score, results, title
from deeprnn.reproduction.study.dynamic import read_dynamic
from deeprnn.reproduction.study.jobs import Runs
from deeprnn.reproduction.study.plan_file import Contender, Goal, Study, member_key, members, read_study
from deeprnn.reproduction.study.run import check_plan, read_runs

PLAN, STUDIES = "beyond", Path("results/studies")


def markdown(name: str, folder: Path) -> str:
    """The table of a packaged plan, from its runs in a folder of studies."""
    return table(read_study(name), folder / name)


def table(study: Study, ledger: Path) -> str:
    """A row for each goal, and in a sentence how much of the plan has been run."""
    check_plan(study, ledger)
    runs = read_runs(ledger)
    found, dynamic = results(study, runs), read_dynamic(ledger)
    lines = [
        f"| test | best known | goal | {study.control} twin | {study.tested} twin | reached | {study.tested} better? |",
        "|---|---|---|---|---|---|---|",
    ]
    for goal in study.goals:
        lines.append("| " + " | ".join(_cells(goal, found, runs, dynamic)) + " |")
    return "\n".join(lines) + f"\n\n{_state(found, runs)}\n"


def _cells(goal: Goal, found: Results, runs: Runs, dynamic: Mapping[str, Any]) -> list[str]:
    here = [s for s in found.scores if (s.contender.family, s.data) == (goal.family, goal.data)]
    sides = [[s for s in here if s.contender.tested is side] for side in (False, True)]
    best = [_best(side) for side in sides]
    answer = next((a for a in found.answers if _answers(a, goal)), None)
    numbers = [_values(score, goal, dynamic) for score in best]
    told = [
        _side(score, values, side, found.study, runs)
        for score, values, side in zip(best, numbers, sides, strict=True)
    ]
    targets = ", then ".join(f"≤ {value:g}" for value in goal.goal)
    return [
        goal.title or title(goal.data),
        goal.known,
        targets,
        *told,
        _reached(goal, [values for values in numbers if values]),
        "" if answer is None or goal.dynamic else f"{answer.verdict} (p = {answer.p:.2g})",
    ]


def _values(score: Score | None, goal: Goal, dynamic: Mapping[str, Any]) -> list[float]:
    """Test results of a row; none where they are not all there."""
    if score is None:
        return []
    if not goal.dynamic:
        return score.values()
    key = HEADLINE[score.entries[0].kind].key
    rows = [dynamic.get(entry.path.name) for entry in score.entries]
    return [] if None in rows else [row["test"][key] for row in rows if row is not None]


def _answers(answer: Answer, goal: Goal) -> bool:
    return (answer.tested.contender.family, answer.data) == (goal.family, goal.data)


def _best(scores: Sequence[Score]) -> Score | None:
    """Of the contenders of one side the best on validation, once all have their seeds."""
    if not all(score.whole for score in scores):
        return None
    return min(scores, key=lambda score: mean(score.values("valid")))


def _side(
    best: Score | None, values: Sequence[float], scores: Sequence[Score], study: Study, runs: Runs
) -> str:
    if best is not None and values:
        places = 1 if paper.KINDS.get(best.data) == "word" else 3
        return f"{best.contender.label} {plus_minus(values, places)}{_other_averages(best)}"
    if best is not None:
        return f"{best.contender.label}: not scored yet"
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
    told = [
        f"{name} {mean([t[key] for t in tests]):.3f}"
        for key, name in OTHER.items()
        if all(key in t for t in tests)
    ]
    return f" ({', '.join(told)})" if told else ""


def trained(study: Study, contender: Contender, data: str, runs: Runs) -> int:
    """How many runs of a contender's search have ended."""
    return sum(
        member_key(recipe) in runs.entries or member_key(recipe) in runs.diverged
        for trial in study.family(contender).trials
        for recipe, _ in members(study, contender, data, trial)
    )


def _reached(goal: Goal, numbers: Sequence[Sequence[float]]) -> str:
    """By the better twin's mean on test: which goal."""
    if not numbers:
        return ""
    value = min(map(mean, numbers))
    passed = [target for target in goal.goal if value <= target]
    return f"≤ {passed[-1]:g}" if passed else "no"


def _state(found: Results, runs: Runs) -> str:
    """In a sentence, how much of the plan has been run."""
    count, study = len(runs.entries), found.study
    if not count:
        return f"Nothing of this plan has been run yet (`deeprnn reproduce --study {study.name} --plan`)."
    asked = len(found.answers) + len(found.open)
    return f"{len(found.answers)} of {asked} rows are whole, by {count} runs." + (
        f" Open: {'; '.join(found.open)}." if found.open else ""
    )
