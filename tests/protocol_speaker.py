"""A program that speaks the protocol of golden/README.md through refimpl itself, and can misbehave once.

    protocol_speaker.py [--at N --do WHAT --count FILE] [--base64] [--stderr BYTES]

FILE keeps the number of requests over restarts, so that a misbehaviour happens at the N-th request and never again;
it gets one line per start and per request. --base64 answers with bytes in place of hashes, --stderr writes that many
bytes to stderr before each answer.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from refimpl.conformance.runners import Unsupported, answer
from refimpl.errors import RefimplError
from refimpl.repacking.tensor import repack, unpack


def speak(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of refimpl's clear version, which compiles nothing."""
    try:
        return {"id": request["id"], "output": answer(request["kind"], request["op"], request["input"], "clear")}
    except Unsupported:
        return {"id": request["id"], "unsupported": True}
    except RefimplError as error:
        return {"id": request["id"], "error": {"code": error.code}}


def in_base64(request: dict[str, Any]) -> dict[str, Any]:
    """An answer to repack or unpack with the bytes themselves."""
    given, function, key = request["input"], repack, "dst_b64"
    if request["op"] == "unpack":
        function, key = unpack, "src_b64"
    data = base64.b64decode(given["data_b64"])
    try:
        out = function(data, given["src_type"], given["layout"], given["ne"], version="clear")
    except RefimplError as error:
        return {"id": request["id"], "error": {"code": error.code}}
    return {"id": request["id"], "output": {key: base64.b64encode(out.tobytes()).decode()}}


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def hang() -> None:
    time.sleep(1000)


def flood() -> None:
    while True:
        sys.stderr.write("noise " * 1000 + "\n")


def die() -> None:
    print("first words", file=sys.stderr)
    print("it cannot go on", file=sys.stderr)
    sys.exit(3)


def wrong(request: dict[str, Any]) -> None:
    output = speak(request)["output"]
    key = next(iter(output))
    say(json.dumps({"id": request["id"], "output": {**output, key: "nonsense"}}) + "\n")


MISBEHAVIOURS = {
    "crash": lambda request: os.abort(),
    "die": lambda request: die(),
    "exit": lambda request: sys.exit(0),
    "hang": lambda request: hang(),
    "flood": lambda request: flood(),
    "garbage": lambda request: say("Segmentation what?\n"),
    "wrong-id": lambda request: say(json.dumps({**speak(request), "id": "another"}) + "\n"),
    "huge": lambda request: say("x" * (65 << 20)),
    "empty": lambda request: say(json.dumps({"id": request["id"], "output": {}}) + "\n"),
    "error": lambda request: say(json.dumps({"id": request["id"], "error": {"code": "E_MINE"}}) + "\n"),
    "unsupported": lambda request: say(json.dumps({"id": request["id"], "unsupported": True}) + "\n"),
    "wrong": wrong,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--do", choices=MISBEHAVIOURS)
    parser.add_argument("--count", type=Path, default=Path(os.devnull))
    parser.add_argument("--base64", action="store_true")
    parser.add_argument("--stderr", type=int, default=0)
    options = parser.parse_args()
    with options.count.open("a") as count:
        count.write("start\n")
        count.flush()
        for line in sys.stdin:
            request = json.loads(line)
            count.write(f"{request['op']} {request['id']}\n")
            count.flush()
            requests = sum(not line.startswith("start") for line in options.count.read_text().splitlines())
            sys.stderr.write("x" * options.stderr)
            if options.do and requests == options.at:
                MISBEHAVIOURS[options.do](request)
            else:
                say(json.dumps(in_base64(request) if options.base64 else speak(request)) + "\n")


if __name__ == "__main__":
    main()
