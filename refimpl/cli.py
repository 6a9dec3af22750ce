"""The command line: arguments in, one call, text or JSON out. No logic of its own, no heavy import before it is due."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from refimpl import __version__
from refimpl.errors import RefimplError, UsageError

USAGE_EXIT, INTERRUPTED_EXIT, MACHINE_EXIT = 2, 130, 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("E_USAGE", f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code: 0 done, 1 the answer is no, 2 usage, 3 bad input, 4 the machine refused."""
    # A program started with a closed stream has None in its place.
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
    options = argparse.Namespace(verdict=0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments, options)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except RefimplError as error:
        return _fail(error.code, error.text, error.exit_code)
    except BrokenPipeError:
        # The reader has gone; a second failure while Python flushes at exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(options.verdict)
    except KeyboardInterrupt:
        return _fail("E_INTERRUPTED", "interrupted", INTERRUPTED_EXIT)
    except MemoryError:
        return _fail("E_MEMORY", "out of memory", MACHINE_EXIT)
    except OSError as error:
        return _fail("E_IO", str(error), MACHINE_EXIT)


def _fail(code: str, text: str, exit_code: int) -> int:
    with suppress(OSError, ValueError):  # nobody may be there to read it
        print(f"refimpl: {code}: {text}", file=sys.stderr, flush=True)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="refimpl", description="How a GGUF model gets into memory, exactly.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"refimpl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="machine-readable output, keys sorted")
        return sub

    inspect = command("inspect", _inspect, "show a header: key-values, bytes per type, what would be repacked")
    _model_argument(inspect)
    _cpu_argument(inspect)
    _dialect_arguments(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor with its place and the reason")
    inspect.add_argument(
        "--recipe", action="store_true", help="print the recipe: all of the header as JSON, no weights"
    )

    sparse = command("make-sparse", _make_sparse, "write a recipe's header with a hole in the place of the weights")
    sparse.add_argument("recipe", metavar="RECIPE", help="a JSON file, as inspect --recipe prints it")
    sparse.add_argument("out", metavar="OUT", help="the file to be written")
    sparse.add_argument("--force", action="store_true", help="replace OUT if it is there")

    load = command("load", _load, "load a model: mapped, repacked for the CPU, source pages given back")
    _model_argument(load)
    _cpu_argument(load)
    load.add_argument("-lm", "--load-mode", default="auto", metavar="MODE", help="auto or mmap (default auto)")
    load.add_argument("-nr", "--no-repack", action="store_true", help="leave every tensor as it is in the file")
    load.add_argument("--reclaim", default="progressive", metavar="WHEN", help="progressive (default), end or never")
    load.add_argument("--prefetch", action="store_true", help="bring the in-place tensors into memory during the load")
    load.add_argument("--load-threads", type=int, metavar="N", help="threads that repack (default: all CPUs)")
    load.add_argument("--check-tensors", action="store_true", help="refuse a model that holds Inf or NaN")
    load.add_argument("--digest", action="store_true", help="print the sha256 of every tensor as it lies in memory")
    load.add_argument("--quiet", action="store_true", help="no progress bar")

    check = command(
        "check", _check, "check a model: container, loader, and with --check-tensors its data; a line per finding"
    )
    _model_argument(check)
    check.add_argument("--check-tensors", action="store_true", help="look for Inf and NaN in every tensor")
    check.add_argument(
        "-vq", "--validate-quants", action="store_true", help="the same by ik_llama.cpp's other function"
    )
    _dialect_arguments(check)
    check.add_argument(
        "--mode", default="oracle", metavar="MODE", help="oracle: as the real function (default); correct: as it should"
    )
    check.add_argument("--load-threads", type=int, metavar="N", help="threads that look (default: all CPUs)")
    check.add_argument("--quiet", action="store_true", help="no progress bar")

    layout = command("layout", _layout, "show a repack layout: fields, offsets, rules")
    layout.add_argument(
        "name", metavar="NAME", help="such as q4_K_8x8 or q4_k_r4; without a name: all of them", nargs="?"
    )
    layout.add_argument("--source", metavar="TYPE", help="the source type, where one name serves two (bf16_r16)")
    layout.add_argument("--find", metavar="BYTE[:BIT]", help="where this byte comes from, and where it goes")
    layout.add_argument("--svg", action="store_true", help="print a picture")

    repack = command("repack", _repack, "offline repack for ik_llama.cpp, as llama-quantize --repack writes it")
    repack.add_argument("source", metavar="IN", help="a GGUF file, or the first of a split set")
    repack.add_argument("out", metavar="OUT")
    repack.add_argument(
        "--repack-pattern", action="append", default=[], metavar="RE[,RE]", help="only tensors that fit one"
    )
    repack.add_argument("--keep-split", action="store_true", help="as many files as IN has")
    repack.add_argument("--override-kv", action="append", default=[], metavar="KEY=TYPE:VALUE", help="set a key-value")
    repack.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, help="repack bf16 and f16 too (default: --cpu says)"
    )
    _cpu_argument(repack)
    repack.add_argument("--force", action="store_true", help="replace an existing OUT")
    repack.add_argument("--no-fsync", action="store_true", help="do not wait for the disk")
    repack.add_argument("--no-check", action="store_true", help="do not refuse NaN and infinity in scales")
    repack.add_argument("--load-threads", type=int, metavar="N", help="threads (default: all CPUs)")
    repack.add_argument("--quiet", action="store_true", help="no progress bar")

    verify = command("verify", _verify, "is OUT a correct offline repack of IN: the first difference")
    verify.add_argument("source", metavar="IN")
    verify.add_argument("out", metavar="OUT")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")

    conformance = command("conformance", _conformance, "run the vectors against refimpl, or against another program")
    conformance.add_argument("--kind", action="append", metavar="K", help="only this kind (repeatable)")
    conformance.add_argument(
        "--vectors", action="append", metavar="FILE", help="this file instead of the delivered ones (repeatable)"
    )
    conformance.add_argument("--impl", metavar='"CMD ARGS"', help="a program that answers over JSON lines")
    conformance.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds per answer (default 30)")
    conformance.add_argument("--dialect", choices=["llama.cpp", "ik_llama.cpp"], help="only this dialect")
    return parser


def _model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional", metavar="MODEL", nargs="?", help="a GGUF file, or a packaged model such as gemma3-270m"
    )
    parser.add_argument("-m", "--model", dest="named", metavar="FILE", help="the same, as the real programs spell it")


def _dialect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dialect", choices=["llama.cpp", "ik_llama.cpp"], help="whose types and rules")
    parser.add_argument("--allow-gaps", action="store_true", help="in ik_llama.cpp's dialect: gaps between tensors")


def _cpu_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu", default="native", metavar="PROFILE", help="native (default) or a profile, such as x86-64-v3"
    )


def _model(options: argparse.Namespace) -> str:
    if (options.positional is None) == (options.named is None):
        raise UsageError("E_USAGE", "name one model, either as MODEL or with -m")
    model: str = options.named if options.positional is None else options.positional
    from refimpl.gguf.packaged import PACKAGED, packaged_model

    if model in PACKAGED:
        from refimpl.render.text import progress_bar

        with progress_bar(f"assembling {model}", getattr(options, "quiet", False)) as progress:
            packaged_model(model, progress)
    return model


def _print(options: argparse.Namespace, data: Any, text: Any) -> None:
    if options.json:
        print(json.dumps(data(), sort_keys=True))
        return
    from refimpl.render.text import show

    show(text())


def _inspect(options: argparse.Namespace) -> int:
    from refimpl.gguf.source import open_header
    from refimpl.placement.devices import resolve_cpu
    from refimpl.render.inspect import inspection, inspection_text

    cpu = resolve_cpu(options.cpu)
    model = _model(options)
    with open_header(model, dialect=options.dialect, allow_gaps=options.allow_gaps, partial=True) as header:
        if options.recipe:
            from refimpl.gguf.recipe import recipe_lines, recipe_of

            sys.stdout.writelines(recipe_lines(recipe_of(header, os.path.basename(model).removesuffix(".gguf"))))
            return 0
        data = inspection(header, model, cpu, options.cpu)
    _print(options, lambda: data, lambda: inspection_text(data, all_tensors=options.tensors))
    return 0


def _load(options: argparse.Namespace) -> int:
    from refimpl.loading.loader import load
    from refimpl.render.load import load_text
    from refimpl.render.text import progress_bar

    model = _model(options)
    with progress_bar("loading", options.quiet) as progress:
        loaded = load(
            model,
            load_mode=options.load_mode,
            repack=not options.no_repack,
            cpu=options.cpu,
            reclaim=options.reclaim,
            prefetch=options.prefetch,
            threads=options.load_threads,
            progress=progress,
            check_tensors=options.check_tensors,
            restart_peak=True,
        )
    with loaded:
        digests = loaded.digests() if options.digest else None
    extra = {} if digests is None else {"digests": digests}
    _print(options, lambda: loaded.report.to_json() | extra, lambda: load_text(loaded.report, digests))
    return 0


def _check(options: argparse.Namespace) -> int:
    from refimpl.gguf.validate import validate_model
    from refimpl.gguf.validate_rules import ROW_DATA, TENSOR
    from refimpl.model.checks import all_findings
    from refimpl.render.check import check_data, check_text
    from refimpl.render.text import progress_bar

    model = _model(options)
    functions = [ROW_DATA] * options.check_tensors + [TENSOR] * options.validate_quants
    dialect: Any = options.dialect or ("ik_llama.cpp" if options.validate_quants else "llama.cpp")
    header, found = all_findings(model, dialect=dialect, allow_gaps=options.allow_gaps)
    results = {}
    # The data can be looked at where they are all there.
    if header is not None and all(error.code != "E_DATA_BOUNDS" for error in found):
        with header, progress_bar("checking", options.quiet) as progress:
            for function in functions:
                results[function] = validate_model(
                    header,
                    dialect=dialect,
                    function=function,
                    mode=options.mode,
                    threads=options.load_threads,
                    progress=progress,
                )
    _print(
        options,
        lambda: check_data(header, model, dialect, found, options.mode, results),
        lambda: check_text(header, dialect, found, options.mode, results),
    )
    return 1 if found or not all(results.values()) else 0


def _make_sparse(options: argparse.Namespace) -> int:
    from pathlib import Path

    from refimpl.gguf.files import coded
    from refimpl.gguf.recipe import make_sparse, read_recipe

    try:
        raw = Path(options.recipe).read_bytes()
    except OSError as error:
        raise coded(error, f"cannot read {options.recipe}") from error
    recipe = read_recipe(raw, options.recipe)
    make_sparse(recipe, options.out, force=options.force)
    if options.json:
        print(json.dumps({"file": options.out, "bytes": recipe["file_size"], "tensors": len(recipe["tensors"])}))
    return 0


def _layout(options: argparse.Namespace) -> int:
    from refimpl.layouts import LAYOUTS, layout_by_name
    from refimpl.render.layout import find_data, find_text, layout_data, layout_text
    from refimpl.render.text import table

    if options.name is None:
        if options.find or options.svg:
            raise UsageError("E_USAGE", "--find and --svg need the NAME of a layout")
        rows = [(x.name, x.dialect, x.source_type.name, x.rows, x.super_block_bytes) for x in LAYOUTS]
        columns = ["layout", "dialect", "source type", ">rows", ">super-block bytes"]
        _print(options, lambda: [layout_data(x) for x in LAYOUTS], lambda: table(None, columns, rows))
        return 0
    layout = layout_by_name(options.name, options.source)
    if options.svg:
        from refimpl.render.layout_svg import layout_svg

        print(layout_svg(layout), end="")
    elif options.find:
        found = find_data(layout, *_byte_and_bit(options.find, max(layout.super_block_bytes, 1)))
        _print(options, lambda: found, lambda: find_text(found))
    else:
        _print(options, lambda: layout_data(layout), lambda: layout_text(layout))
    return 0


def _byte_and_bit(text: str, size: int) -> tuple[int, int | None]:
    """BYTE[:BIT]; UsageError E_USAGE if it is none, or past the super-block."""
    byte, _, bit = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,9}(:[0-7])?", text) or int(byte) >= size:
        raise UsageError("E_USAGE", f"--find takes BYTE below {size}, or BYTE:BIT with a bit from 0 to 7, not {text!r}")
    return int(byte), int(bit) if bit else None


def _repack(options: argparse.Namespace) -> int:
    import signal

    from refimpl.gguf.packaged import PACKAGED, packaged_model
    from refimpl.placement.devices import resolve_cpu
    from refimpl.render.text import facts, progress_bar
    from refimpl.repacking.offline import offline_repack
    from refimpl.units import human

    if options.load_threads is not None and options.load_threads < 1:
        raise UsageError("E_THREADS", f"at least one thread is needed, not {options.load_threads}")
    bf16 = resolve_cpu(options.cpu).avx512_bf16 if options.bf16 is None else options.bf16
    source = packaged_model(options.source) if options.source in PACKAGED else options.source
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no temporary file behind
    with progress_bar("repacking", options.quiet) as progress:
        report = offline_repack(
            source,
            options.out,
            patterns=options.repack_pattern,
            keep_split=options.keep_split,
            overrides=options.override_kv,
            bf16=bf16,
            force=options.force,
            fsync=not options.no_fsync,
            check=not options.no_check,
            threads=options.load_threads,
            progress=progress,
        )
    types = ", ".join(f"{count} x {name}" for name, count in report.types.items())
    lines = [("repacked", f"{report.repacked} of {report.tensors} tensors" + f": {types}" * bool(types))]
    lines += [("wrote", f"{name}") for name in report.files] or [("wrote", "nothing: there is nothing to repack")]
    lines += [("bytes", f"{report.nbytes} ({human(report.nbytes)})")] * bool(report.files)
    _print(options, report.to_json, lambda: facts(lines))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from refimpl.gguf.packaged import PACKAGED, packaged_model
    from refimpl.render.text import facts, progress_bar
    from refimpl.repacking.verify import verify

    source = packaged_model(options.source) if options.source in PACKAGED else options.source
    with progress_bar("comparing", options.quiet) as progress:
        verdict = verify(source, options.out, progress=progress)
    lines = [
        (
            f"{difference.tensor or 'file'}:",
            difference.what + "".join(f", {k} {v}" for k, v in difference.place.items()),
        )
        for difference in verdict.differences
    ]
    options.verdict = 0 if verdict.correct else 1
    lines += [("correct:", f"{verdict.tensors} tensors, {verdict.repacked} repacked")] * verdict.correct
    _print(options, verdict.to_json, lambda: facts(lines))
    return 0 if verdict.correct else 1


def _conformance(options: argparse.Namespace) -> int:
    from refimpl.conformance import run

    report = run(
        kinds=options.kind,
        vectors=options.vectors,
        impl=options.impl,
        timeout=options.timeout,
        dialect=options.dialect,
    )
    options.verdict = report.exit_code  # stands also if nobody reads the report to its end
    print(json.dumps(report.to_json(), sort_keys=True) if options.json else report.to_text())
    return report.exit_code
