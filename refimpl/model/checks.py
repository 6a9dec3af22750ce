"""What the model loader checks after the container (specification: gguf.md 6), in its order.

Exact for architecture llama. For every other known one: architecture, names, bounds, number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from refimpl.errors import GGUFError, ModelError, RefimplError
from refimpl.gguf.header import Header, TensorInfo, ValueType, check_data
from refimpl.gguf.source import Source, open_header
from refimpl.gguf.split import UniqueNames
from refimpl.model.architectures import architecture
from refimpl.model.inventory import Llama, check_layers
from refimpl.model.keys import Keys
from refimpl.types import Dialect

MAP_ALIGNMENT = 32
"""Of the first byte that a buffer over mapped memory takes; the page-aligned mapping adds nothing to it."""


class FileChecks:
    """The checks of each file in turn: the type of the architecture (first file), names, bounds.

    `findings` yields all that is wrong; a call raises the first.
    """

    def __init__(self) -> None:
        self._names = UniqueNames()
        self._first = True

    def __call__(self, shard: Header) -> None:
        for finding in self.findings(shard):
            raise finding

    def findings(self, shard: Header) -> Iterator[ModelError]:
        """What is wrong with one file."""
        if self._first:
            self._first = False
            try:
                Keys(shard.kv).check("general.architecture", ValueType.STR)
            except ModelError as error:
                yield error
        for tensor in shard.tensors:
            try:
                self._names.add(tensor)
            except ModelError as error:
                yield error
            end = tensor.absolute_offset + (tensor.nbytes or 0)
            if end > shard.size:
                text = f"{tensor.name} ends at byte {end}, the file at {shard.size}: incomplete download?"
                yield ModelError(
                    "E_DATA_BOUNDS", text, tensor=tensor.name, offset=tensor.absolute_offset, expected=end,
                    found=shard.size, path=shard.shards[0].path,
                )  # fmt: skip


def open_checked(source: Source, *, dialect: Dialect = "llama.cpp", any_shard: bool = True) -> Header:
    """open_header as the model loader does it, with `FileChecks` and `check_model`. Errors as there."""
    header = open_header(source, dialect=dialect, any_shard=any_shard, each_shard=FileChecks())
    try:
        check_model(header)
    except BaseException:
        header.close()
        raise
    return header


def check_model(header: Header) -> None:
    """Raise the first of `model_findings`."""
    for finding in model_findings(header):
        raise finding


def model_findings(header: Header) -> Iterator[ModelError]:
    """What is wrong with a model whose files are sound: E_ARCH, keys, tensors."""
    keys = Keys(header.kv)
    try:
        name = keys.string("general.architecture")
        if name is None:
            raise ModelError("E_ARCH", "general.architecture is missing", field="general.architecture")
        architecture(name)
        if name == "llama":
            yield from _inventory(header, Llama.read(keys))
        else:
            layers = keys.u32(f"{name}.block_count")
            if layers is not None:
                check_layers(f"{name}.block_count", layers)
    except ModelError as error:
        yield error


def _always(name: str) -> bool:
    return True


def _never(name: str) -> bool:
    return False


def _inventory(header: Header, model: Llama) -> Iterator[ModelError]:
    possible = {name for has in (_always, _never) for name, _, _ in model.tensors(has)}
    there: dict[str, TensorInfo] = {}  # the files may have millions of others
    for tensor in header.tensors:
        if tensor.name in possible:
            there.setdefault(tensor.name, tensor)
    wanted = set()
    for name, shape, required in model.tensors(there.__contains__):
        found = there.get(name)
        wanted.add(name)
        if found is None and required:
            yield ModelError("E_TENSOR_MISSING", f"{name} is missing", tensor=name)
        if found is not None and found.ne != shape + (1,) * (4 - len(shape)):
            text = f"{name} is {_shape(found.shape)}, the keys say {_shape(shape)}"
            yield ModelError("E_TENSOR_SHAPE", text, tensor=name, expected=shape, found=found.shape)
    for tensor in header.tensors:
        if tensor.name not in wanted:
            text = f"{tensor.name} is not asked for by this model"
            yield ModelError("E_TENSOR_EXTRA", text, tensor=tensor.name)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one element"


def alignment_findings(header: Header, in_place: Iterable[TensorInfo] | None = None) -> Iterator[ModelError]:
    """E_DATA_ALIGN for each file whose in-place tensors (default: all) begin where no mapped buffer can begin."""
    starts: dict[int, TensorInfo] = {}
    for tensor in header.tensors if in_place is None else in_place:
        known = starts.get(tensor.shard)
        if known is None or tensor.absolute_offset < known.absolute_offset:
            starts[tensor.shard] = tensor
    for tensor in starts.values():
        if tensor.absolute_offset % MAP_ALIGNMENT:
            text = f"{tensor.name} begins at byte {tensor.absolute_offset}, no multiple of {MAP_ALIGNMENT}: "
            text += "it cannot be used from mapped memory"
            yield ModelError("E_DATA_ALIGN", text, tensor=tensor.name, offset=tensor.absolute_offset)


def check_alignment(header: Header, in_place: Iterable[TensorInfo] | None = None) -> None:
    """Raise the first of `alignment_findings`."""
    for finding in alignment_findings(header, in_place):
        raise finding


def all_findings(
    source: Source, *, dialect: Dialect = "llama.cpp", allow_gaps: bool = False
) -> tuple[Header | None, list[RefimplError]]:
    """Everything that a reader of the container or the model loader has against a model, and its header.

    A broken rule of the container, or of split sets, comes last, since nothing behind it can be read; the header is
    None then. It is the caller's to close otherwise. In ik_llama.cpp's dialect the files are checked, not the model.
    OpenError, MachineError and UsageError are raised.
    """
    checks, found = FileChecks(), list[RefimplError]()

    def each_shard(shard: Header) -> None:
        here = list(checks.findings(shard))
        found.extend(here)
        if all(error.code != "E_DATA_BOUNDS" for error in here):
            try:
                check_data(shard, shard.size)
            except GGUFError as error:
                found.append(error)

    try:
        header = open_header(source, dialect=dialect, allow_gaps=allow_gaps, each_shard=each_shard)
    except (GGUFError, ModelError) as error:
        return None, [*found, error]
    if dialect == "llama.cpp":
        if all(error.fields.get("key") != "general.architecture" for error in found):
            found.extend(model_findings(header))
        found.extend(alignment_findings(header))
    return header, found
