"""The torture itself: it finds what is broken on purpose, and lets pass what is not."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deeprnn.errors import UserError
from tests.torture import child, damage, disk, driver, mutated_files, nasty, workers
from tests.torture.attack import Arena, Attack
from tests.torture.kills import Explorer
from tests.torture.stories import STORIES, Story, difference, outcome, timeless


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    (tmp_path / "arena").mkdir()
    return Arena("toy", tmp_path / "arena", 1, time.monotonic() + 60, tmp_path / "kept")


# ---- cases and findings


def test_a_case_turns_what_fails_into_findings_that_are_told_by_kind(arena: Arena):
    for number in range(3):
        with arena.case(f"case {number}"):
            assert number == 7, f"number is {number}"
    with arena.case("raises"):
        raise ValueError("what")
    with arena.case("good"):
        pass
    assert (arena.cases, arena.failed) == (5, 4)
    assert [(f.count, f.text[:16]) for f in arena.findings.values()] == [
        (3, "case 0: number i"),
        (1, "raises: ValueErr"),
    ]


def test_the_order_follows_from_the_seed_and_the_attack_s_name(arena: Arena, tmp_path: Path):
    again, other = (Arena("toy", tmp_path, seed, arena.deadline) for seed in (1, 2))
    first, same, another = (list(a.each(range(20))) for a in (arena, again, other))
    assert first == same != another
    assert sorted(another) == list(range(20))
    assert arena.finished


def test_when_time_is_over_all_but_the_first_case_is_left_out(arena: Arena):
    arena.deadline = time.monotonic() - 1
    assert len(list(arena.each(range(5)))) == 1
    assert not arena.finished


# ---- bounded processes


def test_a_child_s_end_is_told():
    good = child.forked(lambda: print("out") or print("err", file=sys.stderr))
    assert (good.status, good.out, good.err, good.hung) == (0, "out\n", "err\n", False)
    assert child.forked(lambda: 3).status == 3
    assert child.forked(lambda: sys.exit(2)).status == 2
    assert child.forked(lambda: print("x" * 3_000_000)).status == 0, "a long output does not hold it up"


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        (lambda: time.sleep(30), "still going"),
        (lambda: [0] * 10**10, "traceback: MemoryError"),
        (lambda: {}["missing"], r"traceback: KeyError: 'missing' \(test_torture.py:"),
        (lambda: os.kill(os.getpid(), 9), "died of SIGKILL"),
        (lambda: 2, "without a word"),
        (lambda: print("bad") or 5, "exit status 5"),
    ],
)
def test_impolite_ends_are_found(work, fault):
    with pytest.raises(AssertionError, match=fault):
        child.check_polite(child.forked(work, seconds=0.5, megabytes=500))


def test_what_cannot_be_printed_is_noticed():
    full = child.forked(lambda: print("lost"), stdout="/dev/full")
    assert full.status == 120
    assert "No space left" in full.err


# ---- the disk


def test_every_change_of_the_disk_is_announced(tmp_path: Path):
    steps: list[disk.Step] = []
    with disk.watched(tmp_path, steps.append):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a").write_bytes(b"four")
        with open(tmp_path / "b", "a+") as file:
            file.write("text")
            file.flush()
            os.fsync(file.fileno())
            file.truncate(2)
        handle = os.open(tmp_path / "c", os.O_WRONLY | os.O_CREAT)
        assert os.write(handle, b"12345") == 5
        os.close(handle)
        os.replace(tmp_path / "c", tmp_path / "d")
        (tmp_path / "d").unlink()
        (tmp_path / "folder" / "a").read_bytes()
        (tmp_path.parent / "elsewhere").write_text("not ours")
    halves = ["open", "write", "rest"]
    assert [s.kind for s in steps if s.path == "folder/a"] == halves
    assert [s.kind for s in steps if s.path == "b"] == [*halves, "sync", "truncate"]
    assert [s.kind for s in steps if s.path == "c"] == halves
    assert [s.kind for s in steps if s.path == "d"] == ["rename", "remove"]
    assert not [s for s in steps if "elsewhere" in s.path]
    assert (tmp_path / "folder" / "a").read_bytes() == b"four"
    assert (tmp_path / "b").read_text() == "te"


def test_two_folders_are_the_same_if_their_files_are(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text("same")
        (tmp_path / name / f".file.{name * 8}.tmp").write_text(name)
    a, b = tmp_path / "a", tmp_path / "b"
    assert disk.digest(a) != disk.digest(b)
    assert disk.digest(a, temporaries=False) == disk.digest(b, temporaries=False)
    disk.copy(a, b)
    assert disk.digest(a) == disk.digest(b)


# ---- kills


def counting(write) -> Story:
    """Counts to four in a file, beginning with what stands there."""

    def live(folder: Path) -> int:
        folder.mkdir(exist_ok=True)
        path = folder / "count"
        done = int(path.read_text() or 1 / 0) if path.exists() else 0
        for number in range(done + 1, 5):
            write(path, f"{number:02}")
        return 0

    return Story("counting", lambda folder: None, live, lambda folder: (folder / "count").read_text())


def atomically(path: Path, text: str) -> None:
    temporary = path.with_name(".count.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def through_another(path: Path, text: str) -> None:
    """Loses everything if it is killed twice: the second time while the only good copy has another name."""
    spare = path.with_name("spare")
    if path.exists():
        os.replace(path, spare)
    atomically(path, text)


def explore(arena: Arena, story: Story, expected: str = "04") -> None:
    (arena.folder / "place").mkdir()
    Explorer(arena, story, arena.folder / "place", expected).explore()


def test_a_writer_that_replaces_its_file_whole_survives_all_kills(arena: Arena):
    explore(arena, counting(atomically))
    assert not arena.findings
    assert arena.finished
    assert arena.figures["kill points"] > 8
    assert "pairs of kill points" not in arena.figures, "two kills leave nothing that one does not"


def test_a_writer_in_place_is_found_out(arena: Arena):
    explore(arena, counting(in_place))
    assert any("ZeroDivisionError" in f.text for f in arena.findings.values()), "emptied, then killed"


def test_a_harm_that_takes_two_kills_is_found(arena: Arena):
    """Recovers from one kill by its spare copy, and loses it if the next kill comes before the copy is good again."""
    story = counting(through_another)

    def live(folder: Path) -> int:
        folder.mkdir(exist_ok=True)
        marks = folder / "killed"
        if (folder / "spare").exists() and not (folder / "count").exists():
            assert not marks.exists(), "the second kill in the same place"
            marks.touch()
            os.replace(folder / "spare", folder / "count")
        return story.live(folder)

    explore(arena, Story("spare", lambda folder: None, live, story.outcome))
    broken = [f.text for f in arena.findings.values()]
    assert broken
    assert all("then at" in text for text in broken), "one kill alone does no harm"


def test_outcomes_are_compared_in_full(tmp_path: Path):
    assert timeless({"seconds": 1, "a": [{"updated": 2, "b": 3}]}) == {"a": [{"b": 3}]}
    assert difference({"a": [1, {"b": b"x"}]}, {"a": [1, {"b": b"y"}]}) == "a/1/b is b'y', not b'x'"
    assert difference({"a": 1}, {}) == "has [], lacks ['a']"
    assert difference({"a": 1}, {"a": 1}) == ""
    assert outcome(tmp_path) == {}
    assert {story.name for story in STORIES} == {
        "a run",
        "a population",
        "a pretraining run",
        "reproduce",
        "a grid of rates",
        "a tracked run",
        "a search",
        "a study",
    }


# ---- inputs


def target(read, **more) -> workers.Target:
    return workers.Target("toy", lambda chance: nasty.mutated(b"abc", chance), read, more)


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda data: {}[data], "KeyError"),
        (lambda data: os.system("true"), "code of the input ran"),
        (lambda data: ctypes.CDLL("libc.so.6"), "code of the input ran"),
        (lambda data: Path(workers.CANARY).touch(), "code of the input ran"),
        (lambda data: bytearray(300_000_000), "took 2.. MB, more than"),
        (lambda data: os._exit(9), "died with status 9"),
    ],
)
def test_harmful_readers_are_found(arena: Arena, read, fault):
    workers.try_inputs(arena, target(read), ["1"])
    (finding,) = arena.findings.values()
    assert re.search(fault, finding.text)
    assert len(list((arena.kept / "toy").iterdir())) == 1


def test_a_reader_that_hangs_is_found(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "HANGS", 1.0)
    workers.try_inputs(arena, target(lambda data: time.sleep(30)), ["1"])
    assert "hung" in next(iter(arena.findings.values())).text


def refusing(data: bytes) -> None:
    if len(data) % 2:
        raise UserError("an odd number of bytes: give an even one")


def test_a_look_into_the_process_itself_is_no_code_of_the_input(arena: Arena):
    workers.try_inputs(arena, target(lambda data: ctypes.CDLL(None)), ["1"])
    assert not arena.findings


def test_data_and_refusals_are_fine(arena: Arena):
    workers.try_inputs(arena, target(refusing, empty=lambda: b""), ["empty", *(str(n) for n in range(50))])
    assert not arena.findings
    assert arena.figures == {"toy inputs": 51}


def test_mutations_follow_from_the_chance_alone():
    makers = [
        lambda c: nasty.mutated(b"some bytes", c, [b"other"]),
        lambda c: nasty.mutated_tree({"a": [1, {}]}, c),
    ]
    for make in makers:
        assert repr([make(random.Random(n)) for n in range(50)]) == repr(
            [make(random.Random(n)) for n in range(50)]
        )
        assert len({repr(make(random.Random(n))) for n in range(50)}) > 25


def test_mutated_trees_are_trees_and_leave_the_values_alone():
    before = repr(nasty.VALUES)
    for n in range(4000):
        nasty.as_json(nasty.mutated_tree([[[1]], {"a": [2]}], random.Random(n)))
    assert repr(nasty.VALUES) == before


def test_mutated_trees_stay_short_where_repetitions_multiply(monkeypatch):
    tree = [[[["a"]]]]
    lengths = lambda: [len(nasty.as_json(nasty.mutated_tree(tree, random.Random(n)))) for n in range(1500)]  # noqa: E731
    assert max(lengths()) > 100_000
    monkeypatch.setattr(nasty, "LONGEST", 100_000)
    assert 10_000 < max(lengths()) <= 100_000


def test_a_trees_length_is_that_of_its_json():
    many = [["é", 12]] * 1000
    for tree in ([], {}, 10**400, "a", [1.5, None, True], {"a": {"b": []}}, [many] * 20):
        assert len(nasty.as_json(tree)) <= nasty.length(tree, {}) <= 6 * len(nasty.as_json(tree)) + 8


def test_a_name_is_not_blamed_for_what_an_earlier_command_left(arena: Arena):
    from tests.torture import arguments

    arena.folder.mkdir(exist_ok=True)
    (arena.folder / "place").mkdir()
    (arena.folder / "book-rnn-1").mkdir()
    with pytest.raises(AssertionError, match="book-rnn-1 was written outside"):
        arguments._check_inside(arena.folder)
    (arena.folder / "book-rnn-1").mkdir()
    arguments._try(arena, ("runs", "--name"))
    assert not [found for found in arena.findings.values() if "outside" in found.text]


def test_recipes_are_mutated_line_by_line():
    made = [
        mutated_files.mutated_recipe(b"seeds = [1]\n[data]\nlanes = 2\n")(random.Random(n)) for n in range(30)
    ]
    assert len(set(made)) > 20
    assert any(b"lanes =" in text and b"lanes = 2" not in text for text in made)


@pytest.mark.parametrize("harm", damage.HARMS)
def test_every_harm_harms(tmp_path: Path, harm):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    harm(path, random.Random(1))
    assert not path.is_file() or path.is_symlink() or path.read_bytes() != bytes(range(200))


# ---- the driver


def test_every_file_of_attacks_is_registered_and_described():
    names = [attack.name for attack in driver.attacks()]
    assert len(names) == len(set(names)) >= 15
    assert all(attack.run.__doc__ for attack in driver.attacks())
    here = Path(__file__).parent
    holding = {path.stem for path in here.glob("*.py") if re.search(r"^ *@attack\(", path.read_text(), re.M)}
    assert holding - {"__init__"} == set(driver.ATTACKS)


def test_an_attack_that_breaks_is_a_finding(tmp_path: Path):
    def broken(arena: Arena) -> None:
        raise RuntimeError("the attack is wrong")

    def dies(arena: Arena) -> None:
        os._exit(3)

    runner = driver.Runner(tmp_path, 1, tmp_path / "kept")
    chosen = [Attack(name, run, 1, 9, False) for name, run in (("broken", broken), ("dies", dies))]
    found = {
        one["name"]: one["findings"][0]["text"] for one in runner.run(chosen, time.monotonic() + 5, jobs=2)
    }
    assert "the attack is wrong" in found["broken"]
    assert "status" in found["dies"]


def test_a_few_real_kills(tmp_path: Path):
    """Everything put together, in a process that forks, as `make torture` does it."""
    words = ["--minutes", "0.05", "--seed", "1", "--jobs", "1", "--only", "kills at random"]
    command = [sys.executable, "-m", "tests.torture", *words, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--seed 1" in done.stdout
    assert "0 findings" in done.stdout
    assert (tmp_path / "found.json").exists()
