"""The real page in a real browser: clicked, typed into, dropped on, watched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deeprnn.render import midi_bytes
from deeprnn.runs.run_files import change_run
from deeprnn.web.limits import Limits
from tests.web.browser import Browser, launch
from tests.web.conftest import Server, serve
from tests.web.runs import write_run
from tests.web.test_library import many
from tests.web.test_load import run_id

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
ServeFolder = Callable[[Path], Server]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from launch()


@pytest.fixture
def serve_folder() -> Iterator[ServeFolder]:
    """Serves a test's own folders; stopped after the pages are closed, which would miss their server."""
    running = []

    def start(folder: Path) -> Server:
        running.append(serve(folder, Limits()))
        return next(running[-1])

    yield start
    for server in running:
        next(server, None)


@pytest.fixture
def open_page(browser: Browser, server: Server, serve_folder: ServeFolder) -> Iterator[Open]:
    """Opens addresses of the page; afterwards no error was logged, no other site asked, no slip shown."""
    errors: list[str] = []
    contexts = []

    def open_at(path: str = "", at: Server = server, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options}
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith((at.url, "blob:")) else errors.append(r.url))
        page.goto(f"{at.url}/#/{path}")
        return page

    open_at.errors = errors  # type: ignore[attr-defined]
    yield open_at
    slips = re.compile(r"\b(null|undefined|NaN)\b|\[object")
    for context in contexts:
        errors += [slip[0] for page in context.pages for slip in slips.finditer(page.inner_text("body"))]
        context.close()
    assert errors == []


def bench(open_page: Open, server: Server, name: str, **options: Any) -> Any:
    page = open_page(f"run/{run_id(server, name)}", **options)
    page.wait_for_selector("#continue")
    return page


def frames(page: Any, roll: int = 0) -> int:
    return int(page.locator(".roll").nth(roll).get_attribute("data-frames"))


def shown(page: Any, script: str) -> None:
    """Wait until an expression holds on the page; asked from here, for the page's policy forbids `eval`."""
    for _ in range(300):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never came true: {script}")


def test_the_overview_lists_and_filters(open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector(".run-row")
    assert page.locator(".run-row").count() == 6
    page.get_by_role("button", name="Text", exact=True).click()
    assert page.locator(".run-row").count() == 2
    page.get_by_role("button", name="All", exact=True).click()
    page.get_by_role("searchbox", name="Search runs").fill("dot(s) bach")
    # Live lists are drawn anew now and then: wait for the moment in which the names stand there.
    shown(page, "[...document.querySelectorAll('.run-row b')].map(e => e.innerText).join() === 'bach-deep'")
    assert page.locator(".paper-table td a").count() >= 1
    page.locator(".run-row").click()
    page.wait_for_selector("h1:text('bach-deep')")
    assert page.title() == "bach-deep · deeprnn"
    page.locator(".drawing").scroll_into_view_if_needed()
    shown(page, "document.querySelector('.drawing img').naturalWidth > 100")


def test_music_is_primed_continued_played_and_taken_home(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    shown(page, "document.querySelector('.roll').dataset.frames === '3'")  # from its own data
    page.locator("#start").select_option("Cadence")
    shown(page, "document.querySelector('.roll').dataset.frames === '4'")
    page.get_by_role("button", name="Clear").click()
    shown(page, "document.querySelector('.roll').dataset.frames === '0'")
    canvas = page.locator(".roll-canvas")
    canvas.click(position={"x": 15, "y": 150})
    canvas.click(position={"x": 45, "y": 200})
    shown(page, "document.querySelector('.roll').dataset.notes === '2'")
    canvas.click(position={"x": 45, "y": 200})
    shown(page, "document.querySelector('.roll').dataset.frames === '1'")
    shown(page, "document.querySelector('.roll-next').ariaLabel.includes('%')")  # the heat strip knows

    page.locator("#length").fill("32")
    page.locator("#continue").click()
    page.wait_for_selector("text=/32 frames in/")
    assert frames(page) == 33
    assert page.locator(".roll").get_attribute("data-primer") == "1"

    page.get_by_role("button", name="Play").click()
    shown(page, "Number(document.querySelector('.roll').dataset.playhead) > 1")
    page.get_by_role("button", name="Stop").click()
    shown(page, "document.querySelector('.roll').dataset.playhead === ''")

    for label, suffix, magic in (("Download MIDI", ".mid", b"MThd"), ("Download WAV", ".wav", b"RIFF")):
        with page.expect_download() as download:
            page.get_by_role("button", name=label).click()
        assert download.value.suggested_filename == f"bach{suffix}"
        assert Path(download.value.path()).read_bytes()[:4] == magic

    page.get_by_role("button", name="Start over").click()
    shown(page, "document.querySelector('.roll').dataset.frames === '1'")


def test_the_same_seed_sounds_the_same(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    heard = []
    for seed in ("5", "5", "6"):
        page.get_by_role("button", name="Start over").click()
        page.locator("#seed").fill(seed)
        page.locator("#continue").click()
        page.wait_for_selector("text=/48 frames in/")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download MIDI").click()
        heard.append(Path(download.value.path()).read_bytes())
    assert heard[0] == heard[1] != heard[2]


def test_a_midi_file_is_opened_and_a_bad_one_explained(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    roll = np.zeros((9, 88), np.uint8)
    roll[:, 40] = 1
    page.set_input_files(
        "#midi", {"name": "tune.mid", "mimeType": "audio/midi", "buffer": midi_bytes(roll, steps_per_beat=1)}
    )
    page.wait_for_selector("text=/tune.mid: 9 frames/")
    assert frames(page) == 9
    page.evaluate("""() => {
        const files = new DataTransfer();
        files.items.add(new File([new Uint8Array([1, 2, 3])], 'bad.mid'));
        const drop = new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true});
        document.querySelector('.bench').dispatchEvent(drop);
    }""")
    page.wait_for_selector(".toast:has-text('not a MIDI file')")
    assert frames(page) == 9
    open_page.errors[:] = [e for e in open_page.errors if "422" not in e]  # type: ignore[attr-defined]


def test_the_roll_works_by_keyboard_alone(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    page.get_by_role("button", name="Clear").press("Enter")
    page.locator(".roll-canvas").focus()
    for key in ("Space", "ArrowRight", "ArrowUp", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    shown(page, "document.querySelector('.roll').dataset.notes === '2'")
    assert page.locator(".roll [role=status]").inner_text() == "D4, frame 2, on"
    page.keyboard.press("p")
    shown(page, "document.querySelector('.roll').dataset.playhead !== ''")
    page.keyboard.press("p")
    shown(page, "document.querySelector('.roll').dataset.playhead === ''")


def test_what_has_the_focus_is_seen(open_page: Open, server: Server) -> None:
    """The field that takes files is hidden: the button that stands for it shows the focus."""
    page = bench(open_page, server, "bach")
    page.locator("#start").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "midi"
    assert page.evaluate("getComputedStyle(document.querySelector('label.file')).outlineStyle") == "solid"


def test_notes_are_dragged(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    page.get_by_role("button", name="Clear").click()
    box = page.locator(".roll-canvas").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + 170, box["y"] + 140, steps=12)
    page.mouse.up()
    shown(page, "document.querySelector('.roll').dataset.frames === '7'")
    assert page.locator(".roll").get_attribute("data-notes") == "1"  # one held note, along one key


def test_text_goes_on_and_explains_itself(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "letters/seed-1")
    page.locator("#beginning").fill("the quick ")
    page.locator("#length").fill("40")
    page.locator("#continue").click()
    shown(page, "document.querySelectorAll('.tok').length === 50")
    assert page.locator(".tok.given").count() == 10
    page.locator(".tok").nth(20).hover()
    assert page.locator(".pop .alt").count() == 6
    assert "%" in page.locator(".pop .alt-p").first.inner_text()
    chosen = page.locator(".pop .alt-name").nth(2).inner_text().replace("␣", " ").replace("↵", "\n")
    page.locator(".pop .alt").nth(2).click()
    shown(page, "document.querySelectorAll('.tok').length === 61")  # twenty, the other one, and forty more
    begun = page.locator("#beginning").input_value()
    assert len(begun) == 21
    assert begun.endswith(chosen)


def test_surprise_is_coloured_and_walked_through(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "words")
    page.locator("#beginning").fill("the cat sat on the zebra")
    page.locator("#surprise").click()
    shown(page, "document.querySelectorAll('.tok').length === 6")
    assert page.locator(".tok.unknown").inner_text() == "zebra"
    page.wait_for_selector("text=/perplexity \\d/")
    page.locator(".tok").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".pop-head b").inner_text() == "cat"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.alt')[1]")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.innerText") == "cat"
    page.locator("#beginning").fill("naïve " * 5000)
    page.locator("#surprise").click()
    page.wait_for_selector(".toast:has-text('at most')")
    open_page.errors[:] = [e for e in open_page.errors if "422" not in e]  # type: ignore[attr-defined]


def test_two_runs_are_compared(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    page.get_by_label("Compare with").select_option(label="bach-deep · DOT(S)-RNN 8.100")
    page.wait_for_selector("h1:text('A/B')")
    assert page.locator(".roll").count() == 2
    page.locator("#continue").click()
    page.wait_for_selector("text=/96 frames in/")
    assert [frames(page, 0), frames(page, 1)] == [51, 51]
    assert page.locator(".versus td").all_inner_texts()[:2] == ["DT(S)-RNN", "DOT(S)-RNN"]
    page.get_by_role("button", name="Play B").click()
    shown(page, "document.querySelectorAll('.roll')[1].dataset.playhead !== ''")
    assert page.locator(".chart .line.m1").count() >= 1
    page.get_by_role("button", name="Clear").click()
    page.locator(".roll-canvas").first.click(position={"x": 15, "y": 100})
    shown(page, "document.querySelectorAll('.roll')[1].dataset.notes === '1'")  # one primer for both


@pytest.fixture
def three(tmp_path: Path, serve_folder: ServeFolder) -> Server:
    for number, name in enumerate(("first", "second", "third")):
        write_run(tmp_path / name, seed=number)
    return serve_folder(tmp_path)


def test_three_runs_are_compared_by_ear(open_page: Open, three: Server) -> None:
    """One beginning for all, the same keys shown by all, and while one plays another goes on where that one is."""
    ids = [run_id(three, name) for name in ("first", "second", "third")]
    page = open_page(f"compare/{ids[0]}/{ids[1]}", at=three)
    page.get_by_label("And with").select_option(ids[2])
    page.wait_for_selector("h1:text('A/B/C')")
    assert page.locator(".roll").count() == 3
    page.get_by_role("button", name="Continue all").click()
    page.wait_for_selector("text=/144 frames in/")
    assert page.locator(".chart .line.m2").count() >= 1
    page.get_by_role("button", name="Clear").click()
    page.locator(".roll-canvas").nth(2).click(position={"x": 15, "y": 100})
    rolls = "[...document.querySelectorAll('.roll')].map(e => e.dataset.notes).join()"
    shown(page, f"{rolls} === '1,1,1'")
    page.locator("#continue").click()
    page.wait_for_selector("text=/144 frames in/")
    heads = "[...document.querySelectorAll('.roll')].map(e => e.dataset.playhead)"
    page.get_by_role("button", name="Play A").click()
    shown(page, f"{heads}[0] > 1.5")
    page.get_by_role("button", name="Play C").click()
    shown(page, f"{heads}[0] === '' && {heads}[2] >= 1")
    page.get_by_label("Without B").click()
    page.wait_for_selector("h1:text-is('A/B')")
    assert page.locator(".versus thead a").all_inner_texts() == ["first", "third"]


@pytest.fixture
def two_grids(tmp_path: Path, serve_folder: ServeFolder) -> Server:
    write_run(tmp_path / "quarters")
    write_run(tmp_path / "sixteenths", steps_per_beat=4, data="nottingham", seed=1)
    return serve_folder(tmp_path)


def test_two_grids_have_one_beginning(open_page: Open, two_grids: Server) -> None:
    a, b = run_id(two_grids, "quarters"), run_id(two_grids, "sixteenths")
    page = open_page(f"compare/{a}/{b}", at=two_grids)
    page.wait_for_selector("#continue")
    rolls = "[...document.querySelectorAll('.roll')].map(e => [e.dataset.frames, e.dataset.notes]).join()"
    shown(
        page, f"{rolls} === '3,6,12,6'"
    )  # three frames of a beat each, four times as many on the other grid
    said = page.locator(".caution").inner_text()
    assert "JSB Chorales" in said
    assert "Nottingham" in said
    assert "A has 1 frame to a beat, B has 4 frames" in said
    page.get_by_role("button", name="Clear").click()
    page.locator(".roll-canvas").nth(0).click(position={"x": 15, "y": 100})
    shown(page, f"{rolls} === '1,1,4,1'")
    page.locator("#length").fill("8")
    page.locator("#continue").click()
    page.wait_for_selector("text=/40 frames in/")  # eight beats of each
    lengths = "[...document.querySelectorAll('.roll')].map(e => e.dataset.frames).join()"
    shown(page, f"{lengths} === '9,36'")  # with the next picture
    roll = np.zeros((10, 88), np.uint8)
    roll[:, 40] = roll[1::2, 45] = 1
    page.set_input_files(
        "#midi", {"name": "tune.mid", "mimeType": "audio/midi", "buffer": midi_bytes(roll, steps_per_beat=2)}
    )
    page.wait_for_selector("text=/tune.mid: 6 frames/")
    shown(page, f"{lengths} === '6,20'")
    assert page.locator(".roll").nth(1).get_attribute("data-notes") == "6"  # read on its own, finer grid


def test_text_begins_with_the_runs_own(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "words")
    assert page.locator("#beginning").input_value() == "the cat sat"
    page.locator("#beginning").fill("")
    page.locator("#start").select_option("own 1")
    assert page.locator("#beginning").input_value() == "the cat sat"


def test_a_keyboard_plays_a_beginning(open_page: Open, server: Server) -> None:
    page = open_page()
    page.add_init_script("""
        window.input = {};
        navigator.requestMIDIAccess = async () => ({ inputs: new Map([["1", window.input]]) });""")
    page.goto(f"{server.url}/#/run/{run_id(server, 'bach')}")
    page.reload()
    page.wait_for_selector("#continue")
    page.get_by_role("button", name="Clear").click()
    page.locator("#keyboard").click()
    page.wait_for_selector("text=listening")
    assert page.locator("#keyboard").get_attribute("aria-pressed") == "true"
    send = "(bytes) => window.input.onmidimessage({ data: new Uint8Array(bytes) })"
    for _ in range(2):  # at 100 beats a minute a beat has 0.6 s
        page.evaluate(f"() => {{ const send = {send}; send([0x90, 60, 90]); send([0x91, 64, 80]); }}")
        page.wait_for_timeout(650)
        page.evaluate(f"() => {{ const send = {send}; send([0x80, 60, 0]); send([0x91, 64, 0]); }}")
    shown(page, "document.querySelector('.roll').dataset.frames >= '2'")
    assert page.locator(".roll").get_attribute("data-notes") == "2"  # held on: a roll knows no repetition
    page.evaluate(
        f"() => {{ const send = {send}; send([0x90, 67, 90]); send([0x80, 67, 0]); }}"
    )  # a short one
    shown(page, "document.querySelector('.roll').dataset.notes === '3'")
    page.locator("#keyboard").click()
    assert page.evaluate("window.input.onmidimessage") is None


def test_a_browser_without_midi_shows_no_keyboard(open_page: Open, server: Server) -> None:
    page = open_page()
    page.add_init_script("navigator.requestMIDIAccess = undefined;")
    page.goto(f"{server.url}/#/run/{run_id(server, 'bach')}")
    page.reload()
    page.wait_for_selector("#continue")
    assert page.locator("#keyboard").count() == 0


def test_runs_are_renamed_tagged_and_deleted(
    open_page: Open, tmp_path: Path, serve_folder: ServeFolder
) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name)
    server = serve_folder(tmp_path)
    page = bench(lambda path: open_page(path, at=server), server, "first")
    page.get_by_role("button", name="Tags").click()
    page.get_by_label("Tags", exact=True).last.fill("good, for later, good")
    page.get_by_role("button", name="Save").click()
    page.wait_for_selector("article .tag:text('for later')")
    page.locator(".side .chip.tag", has_text="good").click()
    shown(page, "[...document.querySelectorAll('.run-row b')].map(e => e.innerText).join() === 'first'")
    page.locator(".side .chip.tag", has_text="good").click()

    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("../out")
    page.locator(".ask").get_by_role("button", name="Rename").click()
    page.wait_for_selector(".toast:has-text('no name for a run')")
    page.get_by_label("New name").fill("the best")
    page.locator(".ask").get_by_role("button", name="Rename").click()
    page.wait_for_selector("h1:text('the best')")
    assert {path.name for path in tmp_path.iterdir()} == {"the best", "second"}

    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Cancel").click()
    assert (tmp_path / "the best").is_dir()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete for good").click()
    page.wait_for_selector(".home")
    shown(page, "document.querySelectorAll('.run-row').length === 1")
    assert {path.name for path in tmp_path.iterdir()} == {"second"}
    open_page.errors[:] = [e for e in open_page.errors if "422" not in e]  # type: ignore[attr-defined]


def test_the_paper_stands_only_beside_its_own_data(
    open_page: Open, tmp_path: Path, serve_folder: ServeFolder
) -> None:
    write_run(tmp_path / "mine", data="my songs", paper=False)
    write_run(tmp_path / "also-mine", data="my songs", paper=False, seed=1)
    server = serve_folder(tmp_path)
    page = open_page(at=server)
    page.wait_for_selector(".card")
    assert "paper" not in page.locator("main").inner_text().lower()
    for path in (
        "run/" + run_id(server, "mine"),
        f"compare/{run_id(server, 'mine')}/{run_id(server, 'also-mine')}",
    ):
        page.goto(f"{server.url}/#/{path}")
        page.wait_for_selector("#learning")
        assert "paper" not in page.locator("main").inner_text().lower()


def test_the_recipe_is_shown(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    assert "optimiser" in page.locator(".settings h3").all_inner_texts()
    assert "sgd" in page.locator(".settings dd").all_inner_texts()


def test_a_live_curve_grows(open_page: Open, tmp_path: Path, serve_folder: ServeFolder) -> None:
    run = write_run(tmp_path / "runs" / "now", status="running", epochs=4)
    server = serve_folder(tmp_path / "runs")
    page = bench(lambda path: open_page(path, at=server), server, "now")
    page.wait_for_selector(".news:text('live')")

    def points() -> str:
        return "(document.querySelector('.chart .line.valid').getAttribute('d').match(/[ML]/g) || []).length"

    shown(page, f"{points()} === 4")
    with (run / "metrics.jsonl").open("a") as file:
        for epoch in (5, 6):
            file.write(
                json.dumps({"epoch": epoch, "train": 8.0, "valid": 8.2, "rate": 1.0, "grad_norm": 1.0}) + "\n"
            )
    shown(page, f"{points()} === 6")
    (run / "progress.jsonl").write_text(
        '{"epoch": 6.25, "train": 8.1, "rate": 1.0}\n{"epoch": 6.5, "train": 8.0}\n'
    )
    within = "(document.querySelector('.chart .line.now')?.getAttribute('d').match(/[ML]/g) || []).length"
    shown(page, f"{within} === 3")  # from the last epoch's end
    (run / "progress.jsonl").unlink()
    shown(page, f"{within} === 0")
    shown(page, "document.querySelector('.score').innerText.includes('8.200')")
    change_run(run, status="finished")
    page.wait_for_selector(".status.finished")
    page.wait_for_selector(".news:text('finished')")


def test_a_young_run_and_a_broken_one_are_explained(open_page: Open, server: Server) -> None:
    page = open_page(f"run/{run_id(server, 'young')}")
    page.wait_for_selector("text=/after its first epoch/")
    page.goto(f"{server.url}/#/run/{run_id(server, 'broken')}")
    page.wait_for_selector("text=/run.json cannot be read/")
    page.goto(f"{server.url}/#/run/0000000000000000")
    page.wait_for_selector("text=/There is no such run/")
    open_page.errors[:] = [e for e in open_page.errors if "422" not in e and "404" not in e]  # type: ignore[attr-defined]


def test_an_empty_folder_says_what_to_do(open_page: Open, tmp_path: Path, serve_folder: ServeFolder) -> None:
    server = serve_folder(tmp_path)
    page = open_page("", at=server)
    page.wait_for_selector("text=/deeprnn demo/")
    write_run(tmp_path / "first")
    page.wait_for_selector(".run-row", timeout=15_000)  # appears by itself


def test_a_lost_server_is_told_and_found_again(open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector(".run-row")
    page.route("**/api/runs", lambda route: route.abort())
    look = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(look)
    page.wait_for_selector("text=/Is deeprnn serve still running/")
    assert page.locator(".run-row").count() == 6  # what was known stays
    page.unroute("**/api/runs")
    page.evaluate(look)
    page.wait_for_selector(".lost", state="detached")
    open_page.errors[:] = [e for e in open_page.errors if "ERR_FAILED" not in e]  # type: ignore[attr-defined]


def test_two_hundred_runs(open_page: Open, tmp_path: Path, serve_folder: ServeFolder) -> None:
    many(tmp_path, 200)
    page = open_page("", at=serve_folder(tmp_path))
    page.wait_for_selector(".run-row")
    assert page.locator(".run-row").count() == 200
    page.get_by_role("searchbox").fill("run-17")
    assert page.locator(".run-row").count() == 10


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_nothing_overflows_or_jumps(open_page: Open, server: Server, width: int) -> None:
    for name in ("", f"run/{run_id(server, 'bach')}", f"run/{run_id(server, 'words')}",
                 f"compare/{run_id(server, 'bach')}/{run_id(server, 'bach-deep')}"):  # fmt: skip
        page = open_page(viewport={"width": width, "height": 800})
        page.add_init_script("""
            window.jumps = 0;
            new PerformanceObserver((list) => {
                for (const e of list.getEntries()) if (!e.hadRecentInput) window.jumps += e.value;
            }).observe({type: 'layout-shift', buffered: true});""")
        page.goto(f"{server.url}/#/{name}")
        page.reload()
        page.wait_for_selector("article, .home")
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate("window.jumps") < 0.1, name


def test_light_and_dark(open_page: Open, server: Server) -> None:
    page = open_page(color_scheme="dark")
    page.wait_for_selector(".home")
    paint = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paint)
    toggle = page.locator("#theme")
    toggle.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    light = page.evaluate(paint)
    assert light != dark
    page.reload()
    page.wait_for_selector(".home")
    assert page.evaluate(paint) == light  # remembered
    toggle.click()
    assert page.evaluate(paint) == dark


def test_everything_that_acts_has_a_name(open_page: Open, server: Server) -> None:
    for name in ("bach", "words"):
        page = bench(open_page, server, name)
        nameless = page.evaluate("""() => {
            const named = (el) => el.ariaLabel || el.title || el.innerText?.trim() || el.labels?.length || el.alt;
            const acting = 'button, a, input, select, textarea, canvas[tabindex], main img';
            return [...document.querySelectorAll(acting)]
                .filter((el) => el.offsetParent && !named(el)).map((el) => el.outerHTML.slice(0, 80));
        }""")
        assert nameless == []


def test_stop_stops_though_the_sound_has_not_begun(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "bach")
    page.evaluate("() => { const play = document.querySelector('button.play'); play.click(); play.click(); }")
    page.wait_for_timeout(700)
    assert page.locator("button.play").inner_text() == "▶ Play"
    assert page.locator(".roll").get_attribute("data-playhead") == ""


def test_an_alternative_is_taken_while_the_text_goes_on(open_page: Open, server: Server) -> None:
    page = bench(open_page, server, "letters/seed-1")
    page.locator("#beginning").fill("the ")
    page.locator("#length").fill("2000")
    page.locator("#continue").click()
    shown(page, "document.querySelectorAll('.tok').length > 20")
    page.locator("#length").fill("5")
    page.evaluate("""() => {
        document.querySelectorAll('.tok')[10].dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
        document.querySelector('.pop .alt').click();
    }""")
    shown(page, "document.querySelectorAll('.tok').length === 16")
    assert page.locator("#continue").inner_text() == "Continue"


def test_runs_of_two_kinds_keep_their_units(open_page: Open, server: Server) -> None:
    page = open_page(f"compare/{run_id(server, 'words')}/{run_id(server, 'letters/seed-1')}")
    page.wait_for_selector("text=A learned words, B learned characters")
    numbers = page.locator(".versus td").all_inner_texts()
    assert "119.0 perplexity" in numbers
    assert "1.430 bits per character" in numbers
    assert page.locator("#learning").count() == 0


def test_a_view_that_came_too_late_leaves_nothing_behind(open_page: Open, server: Server) -> None:
    slow, live = run_id(server, "bach"), run_id(server, "young")
    page, held = open_page(), []
    page.wait_for_selector(".home")
    page.route(f"**/api/runs/{slow}", lambda route: held.append(route))
    page.evaluate(f"location.hash = '#/run/{slow}'")
    for _ in range(100):
        if held:
            break
        page.wait_for_timeout(20)
    page.evaluate(f"location.hash = '#/run/{live}'")
    page.wait_for_selector("h1:text('young')")
    for _ in range(100):  # the title is there before the live connection is
        if server.page.watchers.in_use:
            break
        page.wait_for_timeout(20)
    assert server.page.watchers.in_use == 1
    held[0].continue_()
    page.wait_for_timeout(400)
    assert page.locator("h1").inner_text() == "young"
    page.evaluate("location.hash = '#/'")
    page.wait_for_selector(".home")
    for _ in range(100):
        if not server.page.watchers.in_use:
            break
        page.wait_for_timeout(50)
    assert server.page.watchers.in_use == 0


def test_news_leave_the_focus_where_it_is(open_page: Open, tmp_path: Path, serve_folder: ServeFolder) -> None:
    write_run(tmp_path / "a", status="running")
    write_run(tmp_path / "b", seed=1)
    page = open_page(at=serve_folder(tmp_path))
    page.wait_for_selector(".run-row.running")
    for place in (".run-row >> nth=1", ".card >> nth=0"):
        page.locator(place).focus()
        before = page.evaluate("document.activeElement.getAttribute('href')")
        status = "stopped" if place.startswith(".run") else "running"
        change_run(tmp_path / "a", status=status)
        page.wait_for_timeout(1100)  # folders are walked once a second
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_selector(f".run-row.{status}")
        assert page.evaluate("document.activeElement.getAttribute('href')") == before
