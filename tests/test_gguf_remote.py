"""Headers over HTTP: how much is fetched, and servers that do what they should not. All on 127.0.0.1."""

from __future__ import annotations

import gzip
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_files import STR, arr, gguf, info, pair, small, string
from models import LLAMA, write_split

import refimpl
from refimpl.cli import main
from refimpl.errors import ClosedError, RefimplError
from refimpl.gguf import remote
from refimpl.gguf.source import open_header

pytest.importorskip("httpx", reason="needs httpx (extra: remote)")

TOKENS = 60_000


@cache
def large() -> bytes:
    """A header of 1.2 MiB, and 20 MiB behind it."""
    strings = b"".join(string(b"token %05d" % i) for i in range(TOKENS))
    pairs = [pair(b"general.architecture", STR, string(b"llama")), arr(b"tokens", STR, TOKENS, strings)]
    return gguf(pairs, [info(b"t", (5 << 20,), 0, 0)], bytes(20 << 20))


class Server:
    """Files by path, and what to do instead of serving them well. `sent` counts the bytes of all bodies."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.answer: Callable[[BaseHTTPRequestHandler, bytes], None] = good
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.sent = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests.append((self.path, self.headers.get("range"), self.headers.get("accept-encoding")))
                data = server.files.get(self.path.partition("?")[0])
                if data is None:
                    self.send_error(404)
                    return
                server.answer(self, data)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.handle = self._http.handle_error = lambda *args: None  # type: ignore[assignment]
        threading.Thread(target=partial(self._http.serve_forever, poll_interval=0.01), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def asked(handler: BaseHTTPRequestHandler, data: bytes) -> tuple[int, int]:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["range"])
    assert match
    return int(match[1]), min(int(match[2]) + 1, len(data))


def reply(handler, status, body, headers, server=None, length=None):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if length != "none":
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    try:
        for at in range(0, len(body), 64 << 10):
            handler.wfile.write(body[at : at + (64 << 10)])
            if server:
                server.sent += len(body[at : at + (64 << 10)])
    except OSError:  # the reader has seen enough
        handler.close_connection = True


def good(handler, data, server=None, **headers):
    start, end = asked(handler, data)
    spans = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}", "ETag": '"1"'}
    reply(handler, 206, data[start:end], spans | headers, server)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    server.files = {"/small.gguf": small(), "/large.gguf": large()}
    yield server
    server.close()


def refused(source: str) -> str:
    start = time.monotonic()
    with pytest.raises(RefimplError) as caught:
        open_header(source).close()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5
    return caught.value.code


def test_only_the_header_is_fetched_in_growing_blocks(server: Server) -> None:
    server.answer = partial(good, server=server)
    size = len(server.files["/large.gguf"])
    with refimpl.open(server.url + "/large.gguf") as header:
        assert (header.size, header.architecture, len(header.kv["tokens"])) == (size, "llama", TOKENS)
        start = header.data_start
        assert header.kv["tokens"][TOKENS - 1] == f"token {TOKENS - 1}"
        assert header.kv["tokens"][0] == "token 00000"
        assert [len(header.tensors), header.shards[0].path] == [1, server.url + "/large.gguf"]
    assert start < server.sent < 2 * start + (64 << 10)
    lengths = []
    for _, span, encoding in server.requests:
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        lengths.append(last - first + 1)
        assert encoding == "identity"
    assert lengths == [(64 << 10) << i for i in range(len(lengths))]
    with pytest.raises(ClosedError):
        header.read(len(server.files["/large.gguf"]) - 5, 5)


def test_a_small_file_takes_one_request(server: Server) -> None:
    with refimpl.open(server.url + "/small.gguf") as header:
        assert list(header.kv["tokens"])[1] == "a"
    assert len(server.requests) == 1


def test_a_server_without_ranges_is_not_read_to_the_end(server: Server) -> None:
    def whole(handler, data):
        reply(handler, 200, data, {}, server)

    server.answer = whole
    with refimpl.open(server.url + "/large.gguf") as header:
        assert header.kv["tokens"][TOKENS - 1] == f"token {TOKENS - 1}"
        assert header.size == len(server.files["/large.gguf"])
        start = header.data_start
    assert len(server.requests) == 1
    assert server.sent < start + (8 << 20)  # what the sockets hold


def test_redirects(server: Server) -> None:
    def moved(handler, data):
        if handler.path == "/small.gguf":
            reply(handler, 302, b"", {"Location": "/elsewhere?key=1"})
        else:
            good(handler, data)

    server.files["/elsewhere"] = server.files["/small.gguf"]
    server.answer = moved
    with refimpl.open(server.url + "/small.gguf") as header:
        assert header.architecture == "llama"

    def around(handler, data):
        reply(handler, 302, b"", {"Location": handler.path})

    server.answer = around
    assert refused(server.url + "/small.gguf") == "E_REMOTE"

    def away(handler, data):
        reply(handler, 302, b"", {"Location": "file:///etc/passwd"})

    server.answer = away
    assert refused(server.url + "/small.gguf") == "E_REMOTE"


def status(number):
    return lambda handler, data: reply(handler, number, b"no", {})


def span(text, body=None):
    def answer(handler, data):
        start, end = asked(handler, data)
        reply(handler, 206, data[start:end] if body is None else body, {"Content-Range": text} if text else {})

    return answer


def short(handler, data):
    start, end = asked(handler, data)
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    reply(handler, 206, data[start : end - 7], headers, length=end - start)
    handler.close_connection = True


def short_and_says_so(handler, data):
    start, end = asked(handler, data)
    reply(handler, 206, data[start : end - 7], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


def long(handler, data):
    start, end = asked(handler, data)
    reply(handler, 206, data[start:end] + b"more", {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


def short_whole(handler, data):
    reply(handler, 200, data[:100], {}, length=len(data))
    handler.close_connection = True


def packed(number):
    def answer(handler, data):
        headers = {"Content-Encoding": "gzip", "Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}
        reply(handler, number, gzip.compress(data), headers)

    return answer


def unknown_length(handler, data):
    reply(handler, 200, data, {}, length="none")
    handler.close_connection = True


def nonsense(handler, data):
    handler.wfile.write(b"SSH-2.0-nothing\r\n\r\n")
    handler.close_connection = True


BAD: dict[str, tuple[Callable, str]] = {
    "not found": (status(404), "E_OPEN"),
    "gone": (status(410), "E_OPEN"),
    "who are you": (status(401), "E_PERMISSION"),
    "forbidden": (status(403), "E_PERMISSION"),
    "broken": (status(500), "E_REMOTE"),
    "no such range": (status(416), "E_REMOTE"),
    "no content": (status(204), "E_REMOTE"),
    "no Content-Range": (span(None), "E_REMOTE"),
    "nonsense in it": (span("bytes nonsense"), "E_REMOTE"),
    "another start": (span("bytes 7-400/1000"), "E_REMOTE"),
    "past the end": (span("bytes 0-400/100"), "E_REMOTE"),
    "backwards": (span("bytes 9-0/1000"), "E_REMOTE"),
    "more than was asked for": (span("bytes 0-999999/9999999"), "E_REMOTE"),
    "less, and no block": (span("bytes 0-99/9999999", bytes(100)), "E_REMOTE"),
    "another unit": (span("lines 0-400/500"), "E_REMOTE"),
    "total unknown": (span("bytes 0-399/*"), "E_REMOTE"),
    "short body": (short, "E_REMOTE"),
    "short body, honestly": (short_and_says_so, "E_REMOTE"),
    "long body": (long, "E_REMOTE"),
    "short without ranges": (short_whole, "E_REMOTE"),
    "gzip in parts": (packed(206), "E_REMOTE"),
    "gzip whole": (packed(200), "E_REMOTE"),
    "no length": (unknown_length, "E_REMOTE"),
    "no HTTP": (nonsense, "E_REMOTE"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_one_coded_line(server: Server, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer, code = BAD[name]
    assert refused(server.url + "/small.gguf") == code
    assert main(["inspect", server.url + "/small.gguf"]) == (3 if code == "E_OPEN" else 4)
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.split(":")[1].strip()) == ("", 1, code)


@pytest.mark.parametrize("change", ["ETag", "Last-Modified", "size"])
def test_a_file_that_changes_between_two_requests(server: Server, change: str) -> None:
    def changing(handler, data):
        number = str(len(server.requests))
        if change == "size":
            data += bytes(len(server.requests))
        headers = {} if change == "size" else {change: number}
        start, end = asked(handler, data)
        reply(handler, 206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"} | headers)

    server.answer = changing
    assert refused(server.url + "/large.gguf") == "E_CHANGED"


def test_a_server_that_stops_giving_ranges(server: Server) -> None:
    def fewer(handler, data):
        if len(server.requests) < 3:
            good(handler, data)
        else:
            reply(handler, 200, data, {"ETag": '"1"'}, server)

    server.answer = fewer
    with refimpl.open(server.url + "/large.gguf") as header:
        assert header.kv["tokens"][TOKENS - 1] == f"token {TOKENS - 1}"


def test_timeouts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.6)

    def never(handler, data):
        time.sleep(1.5)

    def slowly(handler, data):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        for byte in data[:30]:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.1)

    for answer in (never, slowly):
        server.answer = answer
        assert refused(server.url + "/small.gguf") == "E_REMOTE"


def test_weights_are_not_loaded_over_the_net(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", server.url + "/small.gguf"]) == 2
    assert capsys.readouterr().err.startswith("refimpl: E_USAGE: ")
    assert server.requests == []


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert refused(f"http://127.0.0.1:{port}/model.gguf") == "E_REMOTE"
    for address in ("http://", "http://[::1", "HTTP://127.0.0.1:99999/x", "http://\ud800/"):
        assert refused(address) == "E_REMOTE"


def test_what_comes_is_judged_as_any_file(server: Server) -> None:
    server.files |= {"/text": b"# nothing\n" * 50, "/empty": b"", "/cut.gguf": small()[:150]}
    assert refused(server.url + "/text") == "E_MAGIC"
    assert refused(server.url + "/cut.gguf") == "E_TRUNCATED"
    assert refused(server.url + "/empty") == "E_REMOTE"


def test_a_header_without_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CACHE_BYTES", 512 << 10)
    assert refused(server.url + "/large.gguf") == "E_REMOTE"
    server.answer = lambda handler, data: reply(handler, 200, data, {})
    assert refused(server.url + "/large.gguf") == "E_REMOTE"


def test_a_split_set(server: Server, tmp_path: Path) -> None:
    names = list(LLAMA)
    write_split(tmp_path, [{name: LLAMA[name] for name in part} for part in (names[:4], names[4:])])
    server.files = {f"/x/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with refimpl.open(server.url + "/x/m-00002-of-00002.gguf?key=1") as header:
        assert [tensor.name for tensor in header.tensors] == names
        assert header.shards[1].read(0, 4) == b"GGUF"
    assert {path.partition("?")[2] for path, _, _ in server.requests} == {"key=1"}
    del server.files["/x/m-00002-of-00002.gguf"]
    assert refused(server.url + "/x/m-00001-of-00002.gguf") == "E_SPLIT_SHARD"


def test_without_httpx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert main(["inspect", "http://127.0.0.1/model.gguf"]) == 4
    err = capsys.readouterr().err
    assert err.startswith("refimpl: E_REMOTE: ")
    assert "pip install 'gguf-refimpl[remote]'" in err


def test_httpx_is_imported_with_the_first_address_only(outside: dict[str, str], tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "m.gguf").write_bytes(small())
    code = "import sys, refimpl; refimpl.open('m.gguf'); sys.exit('httpx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=outside, cwd=tmp_path, check=True)
