"""Another program under test, driven over JSON lines (golden/README.md, "Protocol").

One request, one answer, in turn. Whatever the program does instead of answering fails that one request, and a fresh
copy of it gets the next. A single loop serves all its pipes, so that none of them can block either side.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import time
from typing import IO, Any

from refimpl.conformance.report import one_line
from refimpl.conformance.schema import JsonObject
from refimpl.errors import UsageError

ANSWER_LIMIT = 64 << 20
"""Bytes of one answer line; a longer one is a failure, not a memory problem."""
SILENT_LIMIT = 10
"""A program that never answered anything is not waited for more often than this."""
GRACE_SECONDS = 2.0
"""How long a program may take to end after its stdin or stdout was closed."""
POLL_SECONDS = 0.1
CHUNK = 1 << 18
STDERR_TAIL = 4096


class Misbehaviour(Exception):
    """There is no answer as the protocol wants it; the text is the reason in one line."""


class Program:
    """A program under test, started at the first request. Use it in a `with` block, which ends it in every case.

    Parameters
    ----------
    command : str
        Command line, split like a shell does, run without a shell.
    timeout : float
        Seconds for each answer, from the moment its request is sent.

    Raises
    ------
    UsageError
        E_IMPL: not a command line, or (at the first request) nothing that can be started.
        E_TIMEOUT: not a positive number of seconds.
    """

    def __init__(self, command: str, timeout: float = 30.0) -> None:
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise UsageError("E_IMPL", f"{command!r} is not a command line: {error}") from error
        if not self._arguments:
            raise UsageError("E_IMPL", "the command line of the program is empty")
        if not 0 < timeout < float("inf"):
            raise UsageError("E_TIMEOUT", f"{timeout} is not a positive number of seconds")
        self._timeout = timeout
        self._running: _Process | None = None
        self._started = False
        self._answered = False
        self._timeouts = 0

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._stop(GRACE_SECONDS if kind is None else 0)

    def ask(self, entry_id: str, kind: str, op: str, given: JsonObject) -> JsonObject:
        """The program's answer: an object with `output`, `error` or `unsupported`. Misbehaviour if there is none."""
        if not self._answered and self._timeouts >= SILENT_LIMIT:
            raise Misbehaviour(f"not asked: the program never answered, {self._timeouts} time limits passed")
        request = {"id": entry_id, "kind": kind, "op": op, "input": given}
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        try:
            answer = parse_answer(self._start().exchange(line, self._timeout), entry_id)
        except TimeoutError as error:
            self._timeouts += 1
            self._stop(0)
            raise Misbehaviour(f"no answer within {self._timeout:g} s") from error
        except EOFError as error:
            raise Misbehaviour(f"the program {self._stop(GRACE_SECONDS)}") from error
        except Misbehaviour:
            self._stop(0)
            raise
        self._answered = True
        return answer

    def _start(self) -> _Process:
        if self._running is None:
            try:
                self._running = _Process(self._arguments)
            except (OSError, ValueError) as error:
                text = f"cannot start {self._arguments[0]!r}: {getattr(error, 'strerror', None) or error}"
                if self._started:
                    raise Misbehaviour(one_line(text)) from error
                raise UsageError("E_IMPL", text) from error
            self._started = True
        return self._running

    def _stop(self, grace: float) -> str:
        process, self._running = self._running, None
        return process.stop(grace) if process else "is not running"


class _Process:
    """One copy of the program, with its three pipes."""

    def __init__(self, arguments: list[str]) -> None:
        pipe = subprocess.PIPE
        # A session of its own, so that whatever the program starts can be ended together with it.
        self._process = subprocess.Popen(
            arguments, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        self._selector = selectors.DefaultSelector()
        self._received = bytearray()
        self._stderr = b""
        for name in ("stdin", "stdout", "stderr"):
            os.set_blocking(self._pipe(name).fileno(), False)
        for name in ("stdout", "stderr"):
            self._selector.register(self._pipe(name), selectors.EVENT_READ, name)

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] = getattr(self._process, name)
        return pipe

    def exchange(self, line: bytes, timeout: float) -> bytes:
        """Send a request and return the line that comes back.

        TimeoutError; EOFError: no more output; Misbehaviour: too long, or an answer to a request not yet read.
        """
        deadline = time.monotonic() + timeout
        unsent = memoryview(line)
        self._selector.register(self._pipe("stdin"), selectors.EVENT_WRITE, "stdin")
        searched = 0
        while True:
            end = self._received.find(b"\n", searched)
            searched = len(self._received)
            if (searched if end < 0 else end) > ANSWER_LIMIT:
                raise Misbehaviour(f"an answer of more than {ANSWER_LIMIT >> 20} MiB")
            if end >= 0 and unsent:
                raise Misbehaviour("an answer before the request was read")
            if end >= 0:
                answer = bytes(self._received[:end])
                del self._received[: end + 1]
                return answer
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready = self._ready(min(remaining, POLL_SECONDS))
            if "stdin" in ready:
                unsent = self._write(unsent)
            if "stderr" in ready:
                self._read("stderr")
            if "stdout" in ready:
                at_end = not self._read("stdout")
            else:  # a look at the process itself, since something that it left behind may hold the pipe open
                at_end = not ready and self._exited() and "stdout" not in self._ready(0)
            if at_end:
                raise EOFError

    def stop(self, grace: float) -> str:
        """End the program with all it started, and reap it. How it ended, if it did so by itself within `grace`."""
        if "stdin" in self._watched():
            self._selector.unregister(self._pipe("stdin"))
        self._pipe("stdin").close()
        deadline = time.monotonic() + grace
        while not (by_itself := self._exited()) and time.monotonic() < deadline:
            self._drain(POLL_SECONDS / 10)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        for _ in range(16):  # what is left in the pipes, and no more if someone who escaped keeps writing
            self._drain(0)
        self._selector.close()
        for name in ("stdout", "stderr"):
            self._pipe(name).close()
        said = one_line(self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2])
        ending = _ending(self._process.returncode if by_itself else None)
        return f"{ending}; stderr: {said}" if said else ending

    def _watched(self) -> set[str]:
        return {key.data for key in self._selector.get_map().values()}

    def _ready(self, seconds: float) -> set[str]:
        return {key.data for key, _ in self._selector.select(seconds)} if self._watched() else set()

    def _drain(self, seconds: float) -> None:
        ready = self._ready(seconds)
        for name in ready:
            self._read(name)
        self._received.clear()
        if not ready:
            time.sleep(seconds)

    def _write(self, unsent: memoryview) -> memoryview:
        try:
            rest = unsent[os.write(self._pipe("stdin").fileno(), unsent[:CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:  # it no longer reads; its stdout shows whether it is gone
            rest = unsent[:0]
        if not rest:
            self._selector.unregister(self._pipe("stdin"))
        return rest

    def _read(self, name: str) -> bool:
        """Take what a pipe has. False if it is at its end, and then it is watched no more."""
        chunk = os.read(self._pipe(name).fileno(), CHUNK)
        if not chunk:
            self._selector.unregister(self._pipe(name))
        elif name == "stdout":
            self._received += chunk
        else:
            self._stderr = (self._stderr + chunk)[-STDERR_TAIL:]
        return bool(chunk)

    def _exited(self) -> bool:
        """Without reaping, so that the process id stays ours until its group is ended."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ending(status: int | None) -> str:
    if status is None:
        return "closed its output without an answer"
    if status < 0:
        return f"was ended by signal {-status} ({signal.strsignal(-status)}) without an answer"
    return f"ended with exit status {status} without an answer"


def parse_answer(line: bytes, entry_id: str) -> JsonObject:
    """The answer object in a line. Misbehaviour if the line is anything else."""
    shown = one_line(line[:80].decode("utf-8", "replace"))
    try:
        answer: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Misbehaviour(f"the answer is not JSON: {shown!r}") from error
    if not isinstance(answer, dict):
        raise Misbehaviour(f"the answer is not an object: {shown!r}")
    if answer.get("id") != entry_id:
        raise Misbehaviour(f"an answer with id {one_line(repr(answer.get('id')), 80)} to this request")
    forms = [key for key in _FORMS if key in answer]
    if len(forms) != 1 or not _FORMS[forms[0]](answer[forms[0]]):
        raise Misbehaviour(f"the answer has no output object, error code, or unsupported true: {shown!r}")
    return answer


_FORMS = {
    "output": lambda value: isinstance(value, dict),
    "error": lambda value: isinstance(value, dict) and isinstance(value.get("code"), str),
    "unsupported": lambda value: value is True,
}
