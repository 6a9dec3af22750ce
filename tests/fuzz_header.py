"""A long search for headers that are neither accepted nor refused with a code, guided by coverage.

    pip install atheris
    python tests/fuzz_header.py -max_total_time=3600 -rss_limit_mb=512 -timeout=2 CORPUS_FOLDER

The folder is filled with the seeds of test_gguf_mutations.py if it is empty. libFuzzer's options apply; what it finds
is written to the current folder as crash-*, oom-* or timeout-*.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import atheris  # not among the test dependencies

with atheris.instrument_imports(include=["refimpl"]):
    from test_gguf_mutations import look, seeds


def main() -> None:
    """Fill the corpus if need be, and hand over to libFuzzer."""
    for folder in (Path(name) for name in sys.argv[1:] if not name.startswith("-")):
        folder.mkdir(exist_ok=True)
        if not any(folder.iterdir()):
            for number, seed in enumerate(seeds()):
                (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, lambda data: look(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
