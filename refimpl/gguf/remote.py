"""The header of a model on a web server, by range requests: only what the parser asks for, in growing blocks.

A server that has no ranges answers 200 with the whole file; then its answer is read as far as the header goes, and
the connection is closed. httpx (extra `remote`) is imported with the first address.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from refimpl.errors import ClosedError, MachineError, ModelError, OpenError
from refimpl.units import KIB, MIB, human

if TYPE_CHECKING:
    import httpx

BLOCK = 64 * KIB
MOST_BLOCKS = 64
"""One request asks for as many blocks as all before it together, from 1 up to this."""
CACHE_BYTES = 256 * MIB
"""A header that needs more than this is refused; that of a model with 262144 tokens takes 6 MiB."""
TIMEOUT_SECONDS = 10.0
"""For a connection, and between two pieces of an answer."""
ANSWER_SECONDS = 60.0
"""For one whole answer, however small its pieces come."""
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


def is_address(source: str) -> bool:
    """Whether a source is an http(s) address, not a path."""
    return source[:8].lower().startswith(("http://", "https://"))


class RemoteReader:
    """`read(offset, length)` of a file behind an address; `size` is what the server says. Close it after use.

    Raises
    ------
    OpenError
        E_OPEN: the server has no such file, or the address makes no sense.
    MachineError
        E_PERMISSION: the server wants to know who asks. E_REMOTE: anything else that goes wrong on the way, an answer
        that breaks the rules of HTTP included; also if httpx is not installed.
    ModelError
        E_CHANGED: another file than a moment ago.
    """

    def __init__(self, address: str) -> None:
        self.path = address.partition("?")[0]
        self._client, self._errors = _client()
        self._address: Any = address
        self._blocks: dict[int, bytes] = {}
        self._asked = 1
        self._same: tuple[int, str | None, str | None] | None = None
        self._stream: tuple[httpx.Response, Iterator[bytes]] | None = None
        self._left = b""
        self.size = 0
        try:
            self._fetch(0)
        except BaseException:
            self.close()
            raise

    def __call__(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        for number in range(offset // BLOCK, -(-end // BLOCK)):
            if number not in self._blocks:
                self._fetch(number)
        first = offset // BLOCK * BLOCK
        data = b"".join(self._blocks[number] for number in range(offset // BLOCK, -(-end // BLOCK)))
        return data[offset - first : end - first]

    def close(self) -> None:
        """Close the connection; nothing that is not in memory can be read any more."""
        if self._stream is not None:
            self._stream[0].close()
            self._stream = None
        self._client.close()

    def _fetch(self, number: int) -> None:
        """Get block `number` and some behind it; at least one."""
        if self._client.is_closed:
            raise ClosedError("E_CLOSED", "the connection behind this header was closed")
        if (len(self._blocks) + self._asked) * BLOCK > CACHE_BYTES:
            self._fail(f"the header takes more than {human(CACHE_BYTES)}")
        try:
            if self._stream is not None:
                self._read_on(number)
            else:
                self._request(number)
        except self._errors as error:
            self._fail(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, error)

    def _request(self, number: int) -> None:
        start, wanted = number * BLOCK, self._asked * BLOCK
        if self.size:
            wanted = min(wanted, self.size - start)
        # Bytes as they are: a compressed answer has other offsets than the file.
        headers = {"Range": f"bytes={start}-{start + wanted - 1}", "Accept-Encoding": "identity"}
        response = self._client.send(self._client.build_request("GET", self._address, headers=headers), stream=True)
        try:
            self._check_status(response)
            if response.status_code == 206:
                end = self._check_range(response, start, wanted)
                data = b"".join(self._pieces(response, end - start))
                if len(data) != end - start:
                    self._fail(f"{len(data)} bytes came where {end - start} were announced")
                for at in range(0, len(data), BLOCK):
                    self._blocks[number + at // BLOCK] = data[at : at + BLOCK]
                self._asked = min(2 * self._asked, MOST_BLOCKS)
                return
            self._check_same(response, response.headers.get("content-length"))
            self._stream = response, self._pieces(response, self.size)
        finally:
            if self._stream is None:
                response.close()
        self._blocks.clear()
        self._read_on(number)

    def _read_on(self, number: int) -> None:
        """Without ranges: keep what comes until block `number` is there."""
        assert self._stream is not None
        while number not in self._blocks:
            at = len(self._blocks)
            if at * BLOCK > CACHE_BYTES:
                self._fail(f"no ranges, and the header takes more than {human(CACHE_BYTES)}")
            want = min(BLOCK, self.size - at * BLOCK)
            pieces, have = [self._left], len(self._left)
            while have < want:
                piece = next(self._stream[1], None)
                if piece is None:
                    self._fail(f"the answer ended after {at * BLOCK + have} of {self.size} bytes")
                pieces.append(piece)
                have += len(piece)
            data = b"".join(pieces)
            self._blocks[at], self._left = data[:want], data[want:]

    def _pieces(self, response: httpx.Response, most: int) -> Iterator[bytes]:
        """The body as it comes, never much more than `most` bytes of it."""
        until = time.monotonic() + ANSWER_SECONDS
        for piece in response.iter_raw(BLOCK):
            yield piece
            most -= len(piece)
            if most < 0:
                self._fail("more bytes came than were announced")
            if time.monotonic() > until:
                self._fail(f"no whole answer within {ANSWER_SECONDS:g} s")

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in (404, 410):
            raise OpenError("E_OPEN", f"{self.path}: the server has no such file (status {status})")
        if status in (401, 403, 407):
            raise MachineError("E_PERMISSION", f"{self.path}: the server refuses (status {status})")
        if status not in (200, 206):
            self._fail(f"status {status} {response.reason_phrase}")
        coding = response.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            self._fail(f"the answer is encoded ({coding}) although identity was asked for")
        self._address = response.url  # behind redirects, so that they are followed once

    def _check_range(self, response: httpx.Response, start: int, wanted: int) -> int:
        """Where the bytes of a 206 end, which must begin where they were asked for."""
        given = response.headers.get("content-range", "")
        match = _RANGE.fullmatch(given)
        if match is None:
            self._fail(f"status 206 with Content-Range {given!r}")
        first, last, total = match.groups()
        self._check_same(response, None if total == "*" else total)
        end = int(last) + 1
        # Less than was asked for is allowed, but then whole blocks, or up to the end of the file.
        if (
            int(first) != start
            or not start < end <= min(start + wanted, self.size)
            or (end % BLOCK and end < self.size)
        ):
            self._fail(f"asked for bytes {start}-{start + wanted - 1}, got Content-Range {given!r}")
        return end

    def _check_same(self, response: httpx.Response, total: str | None) -> None:
        """The size, which must be known, and the signs of a file that must not change between two requests."""
        if total is None or not total.isdecimal():
            self._fail("the server does not say how long the file is")
        now = int(total), response.headers.get("etag"), response.headers.get("last-modified")
        if self._same is None:
            self._same, self.size = now, now[0]
        if now != self._same:
            raise ModelError("E_CHANGED", f"{self.path} changed between two requests", expected=self._same, found=now)

    def _fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        raise MachineError("E_REMOTE", f"{self.path}: {text}") from cause


def _client() -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import httpx
    except ImportError as error:
        text = "an address needs the package httpx; pip install 'gguf-refimpl[remote]' brings it"
        raise MachineError("E_REMOTE", text) from error
    client = httpx.Client(follow_redirects=True, max_redirects=5, timeout=TIMEOUT_SECONDS)
    return client, (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError)
