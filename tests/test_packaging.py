"""What is published and installed: pins, hashes, the audit's verdicts."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    pytest.importorskip("packaging")
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_that_is_asked_for_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[<>=\[]", line)[0] for line in asked} - {"deeprnn"}
    lock = script("lock")
    assert {lock.canonicalize_name(name) for name in names} <= lock.pins().keys()


LOCKS = ("requirements.lock", "requirements-cpu.lock", "requirements-cuda.lock")


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_every_release_and_every_file_of_it(name):
    text = (ROOT / name).read_text()
    releases = re.findall(r"^[a-z0-9-]+==", text, re.M)
    blocks = re.findall(r"^\S+==[^\\]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.M)
    assert len(blocks) == len(releases) > 0, "a release without a hash"
    assert "".join(blocks) == "".join(line for line in text.splitlines(True) if not line.startswith("#"))


def test_the_locks_hold_the_releases_of_the_constraints():
    lock = script("lock")
    common, cpu, cuda = (lock.pins(ROOT / name) for name in LOCKS)
    known = lock.pins()
    assert {name: known.get(name) for name in common} == common
    assert known.keys() == common.keys() | {"torch"}
    assert [v.partition("+")[0] for v in (cpu["torch"], cuda["torch"])] == [known["torch"]] * 2
    assert not (cpu.keys() | cuda.keys()) & common.keys()


def test_files_are_known_by_name_and_version():
    lock = script("lock")
    assert lock._version_of("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl") == (
        "torch",
        "2.13.0+cpu",
    )
    assert lock._version_of("ruamel_yaml-1.0.tar.gz") == ("ruamel-yaml", "1.0")
    assert lock._version_of("index.html") is None


def release(name: str, *vulnerabilities: str, **more) -> dict:
    return {
        "name": name,
        "version": "1.0",
        "vulns": [{"id": v, "fix_versions": ["1.1"]} for v in vulnerabilities],
    } | more


def test_the_audit_tells_what_is_known(capsys: pytest.CaptureFixture[str]):
    audit = script("audit")
    assert audit.tell([release("good"), release("bad", "CVE-1")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "bad 1.0: CVE-1, mended in 1.1",
        "2 releases audited, 1 with known vulnerabilities",
    ]
    assert audit.tell([release("good"), {"name": "own", "skip_reason": "not found"}]) == 0
    assert "not in the database: own" in capsys.readouterr().out


@pytest.mark.parametrize("found", [(), [{"name": "own", "skip_reason": "not found"}]])
def test_an_audit_that_cannot_ask_says_so_in_one_sentence(found, capsys: pytest.CaptureFixture[str]):
    audit = script("audit")
    assert audit.tell(found) == 3
    assert capsys.readouterr().out.splitlines() == [audit.UNREACHABLE]


def test_everything_that_is_installed_is_audited():
    audited = {lock.name for lock in script("audit").LOCKS}
    assert audited == set(LOCKS) - {"requirements-cpu.lock"}, "whose torch is the other's release"


def test_an_audit_that_fails_has_asked_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    audit = script("audit")
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert audit.ask([tmp_path / "no.lock"]) == ()


def test_a_wheel_that_lacks_something_is_found(tmp_path: Path):
    import zipfile

    checks = script("check_dist")
    wheel = tmp_path / "deeprnn-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("deeprnn/__init__.py", "")
    missing = checks.missing_from_wheel(wheel)
    for kind in (".cu", ".toml", ".js", "py.typed"):
        assert any(name.endswith(kind) for name in missing), kind
    assert "deeprnn/__init__.py" not in missing
    with pytest.raises(SystemExit, match=r"0 files \*.tar.gz"):
        checks.only(tmp_path, "*.tar.gz")


def test_the_quick_tests_of_a_distribution_exist():
    assert all((ROOT / name).exists() for name in script("check_dist").TESTS)
