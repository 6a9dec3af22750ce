"""Damaged headers by the ten thousand: accepted or refused with a code, within 64 MiB and one second each (gguf.md 4).

A longer search, guided by coverage: `python tests/fuzz_header.py` (needs atheris).
"""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import resources

from gguf_files import STR, arr, gguf, info, pair, small, string, u32

from refimpl.conformance.containers import assembled
from refimpl.errors import RefimplError
from refimpl.gguf.header import check_data, parse_header
from refimpl.gguf.values import LazyArray
from refimpl.model.checks import FileChecks, model_findings

MUTATIONS = 30_000
BUDGET_SECONDS = 25.0
MEMORY = 64 << 20
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each value type that has a fixed size."""
EXTREMES = [
    0, 1, 2, 3, 4, 7, 8, 12, 31, 32, 63, 64, 127, 128, 255, 256, 2**15, 2**16, 2**30, 2**30 + 1, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1,
]  # fmt: skip


@cache
def seeds() -> tuple[bytes, ...]:
    """Valid files with everything that a header can have, and the small valid ones of the vectors."""
    pairs = [
        pair(b"general.architecture", STR, string(b"llama")), u32(b"general.alignment", 64),
        *(arr(b"a%d" % kind, kind, 2, bytes(2 * WIDTHS[kind])) for kind in WIDTHS),
        arr(b"strings", STR, 300, b"".join(string(b"s%d" % i) for i in range(300))),
        *(pair(b"k%d" % kind, kind, bytes(width)) for kind, width in WIDTHS.items()),
        pair(b"split.count", 2, struct.pack("<H", 1)),
    ]  # fmt: skip
    infos = [info(b"a", (32, 2), 8, 0), info(b"b", (), 0, 128), info(b"c", (0, 3, 1), 1, 192)]
    root = resources.files("refimpl.golden")
    cases = json.loads(root.joinpath("gguf", "gguf-bad.json").read_bytes())["cases"]
    real = [assembled(case["file"]) for case in cases if "parsed" in case and case["file"]["size"] < 40_000]
    return (small(), gguf(pairs, infos, bytes(192), alignment=64), *real)


def look(data: bytes) -> str:
    """What a reader does with these bytes: everything that a program would ask a header for."""
    try:
        header = parse_header(lambda offset, length: data[offset : offset + length], len(data), dialect=None)
        for pair_ in header.kv.items_raw():
            if isinstance(pair_.value, LazyArray) and len(pair_.value) < 10_000:
                list(pair_.value)
        assert len(list(header.kv)) == len(header.kv)
        assert len(repr(header)) < 1 << 20
        check_data(header, len(data))
        refusals = [*FileChecks().findings(header), *model_findings(header)]
    except RefimplError as error:
        refusals = [error]
    if not refusals:
        return "accepted"
    refusal = refusals[0]
    assert refusal.code.startswith("E_")
    assert "\n" not in str(refusal)
    assert len(refusal.text) < 1000
    return refusal.code


def mutations(draw: random.Random) -> Iterator[bytes]:
    """First every length of the small file, then damage of all sorts."""
    for length in range(len(small())):
        yield small()[:length]
    while True:
        data = bytearray(draw.choice(seeds()))
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            if not data:
                break
            at = draw.randrange(min(len(data), 2000) if draw.random() < 0.9 else len(data))
            kind = draw.randrange(7)
            if kind == 0:
                data[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                data[at] = draw.randrange(256)
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                data[at : at + 8] = struct.pack("<Q", draw.choice(EXTREMES))
            elif kind == 4:
                data[at : at + 4] = struct.pack("<I", draw.choice(EXTREMES) & (2**32 - 1))
            elif kind == 5:
                del data[at : at + draw.randrange(1, 20)]
            else:
                other = draw.choice(seeds())
                start = draw.randrange(max(len(other), 1))
                data[at:at] = other[start : start + draw.randrange(1, 64)]
        yield bytes(data)


def test_accepted_or_refused_with_a_code() -> None:
    draw = random.Random(20261001)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    begin = time.monotonic()
    for data in mutations(draw):
        start = time.process_time()
        outcomes[look(data)] += 1
        slowest = max(slowest, time.process_time() - start)
        if outcomes.total() >= MUTATIONS:
            break
    assert time.monotonic() - begin < BUDGET_SECONDS, f"{outcomes.total()} mutations take too long"
    assert slowest < 1.0
    assert outcomes.total() >= MUTATIONS
    assert len(outcomes) > 25, outcomes
    assert outcomes["accepted"] > 100


def test_memory_of_each() -> None:
    """A tenth of them, and those with extreme numbers at every place of the small file, with memory counted."""
    draw = random.Random(7)
    data = small()
    tries = [
        data[:at] + struct.pack("<Q", value) + data[at + 8 :] for at in range(0, 260, 4) for value in EXTREMES[-12:]
    ]
    tries += [mutated for mutated, _ in zip(mutations(draw), range(1200), strict=False)]
    tracemalloc.start()
    try:
        for mutated in tries:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            look(mutated)
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY // 16
    finally:
        tracemalloc.stop()


def test_the_seeds_are_good() -> None:
    assert len(seeds()) > 20
    for seed in seeds():
        parse_header(lambda offset, length, seed=seed: seed[offset : offset + length], len(seed))
