"""`deeprnn demo`: the first thing to try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from deeprnn.console import program

if TYPE_CHECKING:
    from deeprnn.data.music import MusicData

RECIPES = ("quick/bach-rnn", "quick/bach-nade")


@dataclass(frozen=True)
class Demo:
    """Train a conventional RNN, and a DOT(S)-RNN whose notes hear each other, on Bach's chorales; hear a new one.

    Takes at most about four minutes on two cores; needs neither a GPU nor the network.
    """

    out: Path = Path("out")
    """where the chorale goes, as MIDI, sound and picture"""
    runs: Path = Path("runs")
    """where the two runs are kept"""
    seed: int = 1
    """another seed is another training and another chorale"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 1
    """CPU threads; for models this small one is as fast as several"""

    def run(self) -> int:
        """Train both, compare, generate."""
        from deeprnn.commands.train import Train
        from deeprnn.commands.training import set_threads, train_recipe
        from deeprnn.console import console, styled
        from deeprnn.runs.folder import new_folder
        from deeprnn.training.loading import load_data
        from deeprnn.training.recipe import load_recipe, override

        screen = console()
        set_threads(self.threads)
        recipes = [override(load_recipe(name), {"seeds": [self.seed]}) for name in RECIPES]
        task = ": predict each frame's notes from all that came before"
        screen.print(styled(("Bach's four-part chorales", "bold"), task))
        data: Any = load_data(recipes[0].data)
        sizes = ", ".join(f"{len(data.splits[s])} for {s}" for s in ("train", "valid", "test"))
        screen.print(
            f"{sizes}; a frame is an eighth note; less is better: nats per frame on unseen chorales\n"
        )
        folders = []
        for recipe in recipes:
            folder = new_folder(self.runs, f"demo-{recipe.model.kind}")
            options = Train("bach", device=self.device, threads=self.threads)
            status = train_recipe(recipe, folder, data=data, options=options, concluded=False)
            if status:
                return status
            folders.append(folder)
            screen.print()
        best = self.compare(folders, data)
        self.compose(best, data)
        return 0

    def compare(self, folders: list[Path], data: MusicData) -> Path:
        """Both models beside what a model without memory reaches; the better one by validation."""
        from deeprnn.commands.run_results import write_curves
        from deeprnn.console import console, styled, width
        from deeprnn.runs.folder import Run
        from deeprnn.runs.summary import summary
        from deeprnn.training.evaluate import one_gram

        screen = console()
        baseline = one_gram(data, "test")
        rows: list[tuple[str, float]] = [("one-gram (no memory)", baseline)]
        summaries = [summary(Run(folder)) for folder in folders]
        rows += [(row["label"], row["test"]) for row in summaries]
        screen.print(styled(("nats per frame on the test chorales", "bold"), ": shorter is better"))
        longest = max(8, min(36, width() - 42))
        for name, value in rows:
            share = f"−{1 - value / baseline:.0%}" if value != baseline else ""
            bar = f"{'█' * round(longest * value / baseline):<{longest}}"
            screen.print(styled(f"  {name:<22} {value:7.3f}  ", (bar, "cyan"), f"  {share}"))
        for folder, row in zip(folders, summaries, strict=True):
            write_curves(folder)
            if "minutes" in Run(folder).info["reason"]:
                when = f"after {row['epochs']} epoch{'s' if row['epochs'] != 1 else ''}"
                screen.print(f"  ({row['label']} was cut off by time {when}: on an idle machine it goes on)")
        return min(zip(summaries, folders, strict=True), key=lambda pair: pair[0]["valid"])[1]

    def compose(self, folder: Path, data: MusicData) -> None:
        """Let the better model write a chorale, count in it beside Bach's, and say what to try next."""
        from deeprnn.commands.generate import statistics_lines
        from deeprnn.console import console, styled, two_columns
        from deeprnn.generation import generate
        from deeprnn.generation.musical_statistics import compare_with_data
        from deeprnn.runs.folder import load_run

        screen, run = console(), load_run(folder)
        screen.print(styled(("\nA new chorale", "bold"), f" by {run.info['label']}, sixteen bars ..."))
        music: Any = generate.from_run(
            run, seed=self.seed, length=128, temperature=0.9, tempo=80.0, program=19
        )
        for path in music.save(self.out / "chorale", ("mid", "wav", "png")):
            screen.print(f"  {path}", soft_wrap=True)
        screen.print(f"  {folder / 'curves.png'} (how it learned)", soft_wrap=True)
        screen.print("\nBeside Bach's own, of the test chorales", style="bold")
        for line in statistics_lines(*compare_with_data(music.sampled, data), heading="Bach"):
            screen.print(f"  {line}")
        screen.print("\nWhat to try next", style="bold")
        screen.print(two_columns(self.advice(folder)), soft_wrap=True)

    def advice(self, folder: Path) -> list[tuple[str, str]]:
        """Commands that work from here, whatever folders were chosen, and why."""
        command = program()
        runs = "" if self.runs == Path("runs") else f" {quote(str(self.runs))}"
        return [
            (
                f"{command} generate {quote(str(folder))} --primer test:3",
                "continue a chorale it has never seen",
            ),
            (f"{command} serve{runs}", "hear, see and play with both models in the browser"),
            (f"{command} describe dots --png {quote(str(self.out / 'dots.png'))}", "what a DOT(S)-RNN is"),
            (f"{command} train my_midi_folder/", "your own music"),
            (f"{command} train book.txt --level char", "your own text"),
            (f"{command} train jsb --model dots", "a cell of the paper's Table 2"),
        ]
