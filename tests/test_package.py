"""The package as users get it: wheel, editable install, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import refimpl
import refimpl.golden
import refimpl.kernels

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="runs in a checkout only")


def test_kernels_and_golden_are_found_inside_refimpl():
    assert (Path(refimpl.kernels.__file__).parent / "llama_repack.py").is_file()
    assert (Path(refimpl.golden.__file__).parent / "index.json").is_file()


def test_no_top_level_kernels_is_installed(outside, tmp_path):
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else '')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=outside, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    origin = result.stdout.strip()
    assert not origin or Path(origin) != Path(refimpl.kernels.__file__)


def test_import_loads_nothing_heavy(outside, tmp_path):
    code = """
import sys, refimpl
dir(refimpl)
print(sorted({"numba", "numpy", "llvmlite", "rich", "gguf", "psutil"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=outside, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_every_public_name_resolves_whatever_was_imported_first(outside, tmp_path):
    code = """
import importlib, pkgutil, refimpl
for module in pkgutil.walk_packages(refimpl.__path__, "refimpl."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in refimpl.__all__:
    value = getattr(refimpl, name)
    assert callable(value) or isinstance(value, str), name
"""
    subprocess.run([sys.executable, "-c", code], env=outside, cwd=tmp_path, check=True)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = refimpl.nonsense


@CHECKOUT
def test_wheel(tmp_path, outside):
    """Built from a clean source distribution, installed alone, started from another folder."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if not name.startswith(("refimpl/", "gguf_refimpl-"))]
    assert not [name for name in names if name.endswith((".nbi", ".nbc", ".pyc"))]
    for name in (
        "refimpl/kernels/llama_repack.py",
        "refimpl/golden/index.json",
        "refimpl/golden/README.md",
        "refimpl/golden/repack/repack-llama.json",
        "refimpl/golden/schemas/repack.schema.json",
        "refimpl/model/arch/llama.txt",
        "refimpl/py.typed",
    ):
        assert name in names
    packages = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "refimpl").rglob("*.py")}
    assert {re.sub(r"/[^/]*$", "", name) for name in names if name.endswith(".py")} == packages | {
        "refimpl/kernels",
        "refimpl/golden",
    }
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    code = """
import sys, refimpl, refimpl.cli
print(refimpl.__file__)
sys.exit(refimpl.cli.main(["conformance", "--kind", "repack-dispatch"]))
"""
    environment = {**outside, "PYTHONPATH": str(installed), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(str(installed))
    assert result.stdout.rstrip().endswith("2006 passed, 0 failed, 0 skipped")


@CHECKOUT
def test_extras_and_version_agree():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == refimpl.__version__
    assert {"cuda12", "cuda13", "model", "witness", "remote", "plot"} <= set(project["optional-dependencies"])
    assert {re.split(r"[><=]", d)[0] for d in project["dependencies"]} == {"numpy", "numba", "psutil", "gguf", "rich"}
