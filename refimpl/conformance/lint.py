"""The linter of vectors files: `python -m refimpl.conformance.lint [--write-index] [FILE or FOLDER ...]`.

A folder is a golden tree: each of its files and recipes is checked and compared with its index.json; a file, alone.
One line per finding; exit 0 if there is none, else 1 (golden/README.md, "Files" and "Changing a file").
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from refimpl.conformance.questions import check_file
from refimpl.conformance.report import one_line
from refimpl.conformance.schema import ENVELOPE, SCHEMA, JsonObject, Vectors, parse_vectors, unpacked
from refimpl.errors import RecipeError, VectorError
from refimpl.gguf.recipe import read_recipe, recipe_header, recipe_lines, recipe_of

INDEX = "index.json"
SCHEMAS = "schemas"
RECIPES = "models"
NOT_VECTORS = {INDEX, "README.md", "__init__.py"}
FINDINGS_PER_FILE = 20


def canonical(document: JsonObject) -> bytes:
    """The one way in which a document is written: ASCII, no spaces, keys in their order, one final newline."""
    return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")


def entry_counts(file: Vectors) -> dict[str, int]:
    """Container key -> number of entries."""
    return dict(Counter(entry.container for entry in file.entries))


def index_row(root: Path, path: Path) -> JsonObject:
    """What index.json says of a vectors file; sha256 is that of the JSON text, also where the file is packed."""
    raw, name = path.read_bytes(), path.relative_to(root).as_posix()
    file = parse_vectors(raw, name)
    digest = hashlib.sha256(unpacked(raw, name)).hexdigest()
    return {"path": name, "kind": file.kind, "dialect": file.dialect, "entries": entry_counts(file), "sha256": digest}


def vectors_files(root: Path) -> list[Path]:
    """Every file of a golden tree that should be a vectors file, in the order of the index."""
    found = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    inside = [path for path in found if path.relative_to(root).as_posix() not in NOT_VECTORS]
    return sorted(path for path in inside if path.relative_to(root).parts[0] not in (SCHEMAS, RECIPES))


def recipe_files(root: Path) -> list[Path]:
    """Every file of a golden tree that should be a recipe, in the order of the index."""
    return sorted(path for path in (root / RECIPES).rglob("*") if path.is_file())


def recipe_row(root: Path, path: Path) -> JsonObject:
    """What index.json says of a recipe. RecipeError E_RECIPE if it is none."""
    raw, name = path.read_bytes(), path.relative_to(root).as_posix()
    recipe = read_recipe(raw, name)
    digest = hashlib.sha256(raw).hexdigest()
    return {"path": name, "arch": recipe["arch"], "tensors": len(recipe["tensors"]), "sha256": digest}


def write_index(root: Path) -> None:
    """Write index.json from the files that are there. VectorError, RecipeError: one of them is not sound."""
    rows = [index_row(root, path) for path in vectors_files(root)]
    recipes = [recipe_row(root, path) for path in recipe_files(root)]
    (root / INDEX).write_bytes(canonical({"schema": SCHEMA, "kind": "index", "files": rows, "recipes": recipes}))


def lint_tree(root: Path) -> Iterator[str]:
    """Findings of a golden tree."""
    schemas = Schemas(root / SCHEMAS)
    yield from schemas.findings
    try:
        raw = (root / INDEX).read_bytes()
        index = json.loads(raw)
        rows = {row["path"]: row for key in ("files", "recipes") for row in index[key]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{INDEX}: cannot be read ({type(error).__name__}: {error})"
        rows = {}
    else:
        if raw != canonical(index):
            yield f"{INDEX}: not in canonical form"
    for files, lint, row_of in (
        (vectors_files(root), lint_file, index_row),
        (recipe_files(root), lint_recipe, recipe_row),
    ):
        for path in files:
            name = path.relative_to(root).as_posix()
            yield from lint(path, name, schemas)
            row = rows.pop(name, None)
            if row is None:
                yield f"{name}: not listed in {INDEX}"
                continue
            try:
                real = row_of(root, path)
            except (VectorError, RecipeError):
                continue  # found already
            for key, value in real.items():
                if row.get(key) != value:
                    yield f"{name}: {key} is {value}, {INDEX} says {row.get(key)}"
    for name in rows:
        yield f"{name}: listed in {INDEX}, but not there"


def lint_recipe(path: Path, name: str, schemas: Schemas) -> Iterator[str]:
    """Findings of one recipe by itself."""
    try:
        raw = path.read_bytes()
        recipe = read_recipe(raw, name)
    except OSError as error:
        yield f"{name}: {error.strerror}"
        return
    except RecipeError as error:
        yield error.text
        return
    if "".join(recipe_lines(recipe)).encode() != raw:
        yield f"{name}: not in the form in which recipes are written"
    if recipe.get("name") != path.stem:
        yield f"{name}: its name is {recipe.get('name')}"
    for key, value in recipe_of(recipe_header(recipe), path.stem).items():
        if recipe.get(key) != value:
            yield f"{name}: {key} is not what the header made from it says"
    yield from schemas.check_document(name, "recipe.schema.json", recipe)


def lint_file(path: Path, name: str, schemas: Schemas) -> Iterator[str]:
    """Findings of one vectors file by itself."""
    try:
        raw = path.read_bytes()
        file = parse_vectors(raw, name)
    except OSError as error:
        yield f"{name}: {error.strerror}"
        return
    except VectorError as error:
        yield error.text
        return
    if unpacked(raw, name) != canonical(file.document):
        yield f"{name}: not in canonical form"
    if tuple(file.document)[: len(ENVELOPE)] != ENVELOPE:
        yield f"{name}: the first keys are not {', '.join(ENVELOPE)}"
    for entry_id, count in Counter(entry.id for entry in file.entries).items():
        if count > 1:
            yield f"{name}: id {entry_id} occurs {count} times"
    stated = file.document.get("count")
    if stated is not None and stated != len(file.entries):
        yield f"{name}: count is {stated}, entries are {len(file.entries)}"
    yield from schemas.check(name, file)
    try:
        check_file(file)
    except VectorError as error:
        yield error.text


class Schemas:
    """The JSON Schemas in a folder. A kind without a schema of its own is checked against the envelope's."""

    def __init__(self, folder: Path) -> None:
        # Only the linter needs this package, so nothing else of refimpl depends on it.
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012

        self.findings: list[str] = []
        sources: dict[str, Any] = {}
        for path in sorted(folder.glob("*.schema.json")):
            try:
                sources[path.name] = json.loads(path.read_bytes())
                Draft202012Validator.check_schema(sources[path.name])
            except (ValueError, SchemaError) as error:
                sources.pop(path.name, None)
                self.findings.append(f"{SCHEMAS}/{path.name}: {str(error).splitlines()[0]}")
        if "envelope.schema.json" not in sources:
            self.findings.append(f"{SCHEMAS}: no envelope.schema.json that can be used")
            sources.clear()
        pairs = [(name, DRAFT202012.create_resource(source)) for name, source in sources.items()]
        registry: Any = Registry().with_resources(pairs)
        self._validators = {name: Draft202012Validator(source, registry=registry) for name, source in sources.items()}

    def check(self, name: str, file: Vectors) -> Iterator[str]:
        """Findings of a document against the schema of its kind, with the place of each."""
        own = f"{file.kind}.schema.json"
        yield from self.check_document(name, own if own in self._validators else "envelope.schema.json", file.document)

    def check_document(self, name: str, schema: str, document: JsonObject) -> Iterator[str]:
        """Findings of a document against a schema by its name; none if there is no such schema."""
        validator = self._validators.get(schema)
        if validator is None:
            return
        for number, error in enumerate(validator.iter_errors(document)):
            if number == FINDINGS_PER_FILE:
                yield f"{name}: more findings of this sort"
                return
            yield f"{name}: {error.json_path}: {one_line(error.message, 200)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Lint files and golden trees; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m refimpl.conformance.lint", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="vectors files or golden folders (default: the packaged one)"
    )
    parser.add_argument("--write-index", action="store_true", help="first write the index.json of each folder anew")
    options = parser.parse_args(arguments)
    packaged = Path(str(resources.files("refimpl.golden")))
    findings: list[str] = []
    try:
        for path in options.paths or [packaged]:
            if path.is_dir():
                if options.write_index:
                    write_index(path)
                findings += lint_tree(path)
            else:
                findings += lint_file(path, str(path), Schemas(packaged / SCHEMAS))
    except ImportError:
        findings.append("the linter needs the package jsonschema (pip install jsonschema)")
    except (VectorError, RecipeError) as error:
        findings.append(error.text)
    for finding in findings:
        print(one_line(finding, 1000))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
