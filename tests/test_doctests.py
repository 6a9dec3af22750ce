"""The examples in docstrings and in the README do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import refimpl

README = Path(__file__).resolve().parents[1] / "README.md"
NAMES = [module.name for module in pkgutil.walk_packages(refimpl.__path__, "refimpl.")]
MODULES = [name for name in NAMES if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.model
@pytest.mark.skipif(not README.is_file(), reason="the README is in the checkout only")
def test_readme(gemma):
    result = doctest.testfile(str(README), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 5
    assert result.failed == 0
