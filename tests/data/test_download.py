"""Downloads, against a server on this machine that cuts connections and serves wrong bytes."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deeprnn.data import download, sources
from deeprnn.errors import UserError

CONTENT = bytes(range(256)) * 2000  # 512 kB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Behaviour:
    """What the server does with each request in turn; beyond the list it serves properly."""

    script: list[str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)  # the Range header of each request
    paths: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    resume: bool = True


@pytest.fixture
def server():
    behaviour = Behaviour()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            behaviour.ranges.append(self.headers.get("Range"))
            behaviour.paths.append(self.path)
            act = behaviour.script.pop(0) if behaviour.script else "serve"
            if act.isdigit():
                self.send_error(int(act))
                return
            content = behaviour.files.get(self.path, CONTENT)
            if act == "wrong":
                content = b"x" + content[1:]
            self.reply(content, cut=act == "cut")

        def reply(self, content: bytes, cut: bool):
            start = 0
            wanted = self.headers.get("Range")
            if wanted and behaviour.resume:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start:]
            self.wfile.write(rest[: len(rest) // 3] if cut else rest)

        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    behaviour.url = f"http://127.0.0.1:{httpd.server_port}/file"
    behaviour.base = f"http://127.0.0.1:{httpd.server_port}"
    yield behaviour
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.001)
    monkeypatch.delenv("DEEPRNN_DATA", raising=False)


def fetch(server, place, **options):
    download.fetch(server.url, place, DIGEST, **options)


def test_a_plain_download(server, tmp_path):
    seen = []
    fetch(server, tmp_path / "deep" / "file", progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]


def test_a_cut_connection_goes_on_where_it_broke(server, tmp_path):
    server.script = ["cut", "cut"]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    first = len(CONTENT) // 3
    second = first + (len(CONTENT) - first) // 3
    assert server.ranges == [None, f"bytes={first}-", f"bytes={second}-"]


def test_a_server_that_cannot_resume_sends_all_again(server, tmp_path):
    server.script, server.resume = ["cut"], False
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_an_interrupted_download_goes_on_in_the_next_call(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "RETRIES", 0)
    server.script = ["cut"]
    with pytest.raises(UserError, match=r"ended after 170,666 of 512,000 bytes"):
        fetch(server, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges[1] == "bytes=170666-"


def test_a_part_that_is_already_whole_is_put_in_place(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_bytes_never_take_the_files_place(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "RETRIES", 2)
    server.script = ["wrong"] * 3
    with pytest.raises(UserError, match="sha256") as caught:
        fetch(server, tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_once_are_fetched_again(server, tmp_path):
    server.script = ["wrong"]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_bad_part_from_another_file_is_thrown_away(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"something else")
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_busy_server_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.script = ["503", "429"]
    fetch(server, tmp_path / "file")
    assert len(server.ranges) == 3
    server.script = ["404"]
    with pytest.raises(UserError, match="404"):
        fetch(server, tmp_path / "other")
    assert len(server.ranges) == 4


def test_without_a_network_it_says_what_it_does_and_gives_up_soon(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(download.time, "sleep", lambda seconds: done.append(seconds))
    with pytest.raises(UserError, match=r"2 attempts: no connection was made .* put the file at"):
        download.fetch("http://127.0.0.1:9/file", tmp_path / "file", DIGEST, tell=done.append)
    assert done[0] == "fetching http://127.0.0.1:9/file"
    assert done[1].startswith("no connection was made")
    assert done[2:] == [download.PAUSE], "one short wait, told before it begins"


def test_only_web_addresses_are_fetched(tmp_path):
    with pytest.raises(UserError, match="only http and https"):
        download.fetch("file:///etc/hostname", tmp_path / "file", DIGEST)
    with pytest.raises(UserError, match="only http and https"):
        download.fetch("http://[", tmp_path / "file", DIGEST)


def test_more_bytes_than_the_limit_are_not_taken(server, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "100000")
    with pytest.raises(UserError, match="limit of 100,000"):
        fetch(server, tmp_path / "file")


def test_get_puts_a_set_where_it_is_looked_for(server, tmp_path, monkeypatch):
    file = sources.RemoteFile("music/Some.mat", "https://example.invalid/Some.mat", DIGEST)
    monkeypatch.setitem(sources.SOURCES, "jsb", sources.Source("jsb", "music", (file,), ""))
    monkeypatch.setenv("DEEPRNN_MIRROR", server.base)
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    assert download.get("jsb") == [(tmp_path / "music" / "Some.mat", True)]
    assert server.paths == ["/music/Some.mat"]
    assert download.get("jsb") == [(tmp_path / "music" / "Some.mat", False)]
    assert len(server.paths) == 1
    assert sources.find("jsb") == (tmp_path / "music" / "Some.mat",)


def test_a_damaged_file_is_replaced_in_the_cache_and_named_elsewhere(server, tmp_path, monkeypatch):
    file = sources.RemoteFile("music/Some.mat", "https://example.invalid/Some.mat", DIGEST)
    monkeypatch.setitem(sources.SOURCES, "jsb", sources.Source("jsb", "music", (file,), ""))
    monkeypatch.setenv("DEEPRNN_MIRROR", server.base)
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DEEPRNN_DATA", str(tmp_path / "given"))
    for folder in ("cache", "given"):
        (tmp_path / folder / "music").mkdir(parents=True)
    (tmp_path / "cache" / "music" / "Some.mat").write_bytes(b"damaged")
    download.get("jsb")
    assert (tmp_path / "cache" / "music" / "Some.mat").read_bytes() == CONTENT
    hiding = tmp_path / "given" / "music" / "Some.mat"
    hiding.write_bytes(b"damaged")
    with pytest.raises(UserError, match="hides") as caught:
        download.get("jsb")
    assert str(hiding) in str(caught.value)


def test_every_address_is_public_and_every_file_has_its_hash():
    for source in sources.SOURCES.values():
        for file in source.files:
            assert file.url.startswith("https://")
            assert file.url.endswith(file.name)
            assert len(file.sha256) == 64
