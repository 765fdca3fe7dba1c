"""The exact bytes that a digest series digests. Needs the standard library alone."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from e2e_registry.errors import RecordingError
from e2e_registry.recording.scalars import Family, family_of

# NumPy's other floats are long doubles, whose padding bytes are left over from earlier memory.
_UNPADDED_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")


def digest_of(value: object) -> str:
    """Return the SHA-256, in hex, of a value's bytes.

    Which bytes, by the kind of value:

    - ``bytes``, ``bytearray``, ``memoryview``: the bytes themselves, so that a file's digest is what ``sha256sum``
      prints.
    - ``str``: its UTF-8 bytes.
    - torch tensors, NumPy arrays and NumPy scalars: a header line, ``float32 [2,3]`` and a newline (the dtype's name
      without ``torch.``, then the shape as JSON without spaces), followed by the elements in row-major order,
      little-endian, whatever the strides, byte order and device are. So float32 1.0 and bfloat16 1.0 differ, -0.0 and
      0.0 differ, NaN payloads count, and a tensor and an array of the same content agree.
    - ``None``, ``bool``, ``int``, ``float``, and lists and tuples that hold only these and strings: their JSON without
      spaces, non-ASCII characters escaped: ``[3,1,2]``, ``["a","b"]``.
    - other lists and tuples (NumPy scalars among the elements count as arrays): a line for each element, its digest
      in hex and a newline.
    - mappings (a ``state_dict``, also an optimizer's, nested to any depth): a line for each entry, sorted by name: the
      digest in hex of its value, two spaces, the name (``str`` or ``int``) as JSON with non-ASCII characters escaped,
      and a newline.

    Raises:
        RecordingError: The value, or something inside it, is of another kind, or its elements have no fixed bytes
            (object and string arrays, NumPy long doubles, sparse, quantized, meta and distributed tensors).
    """
    if isinstance(value, bytes | bytearray):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, memoryview):
        return hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, str):
        return hashlib.sha256(_utf8(value)).hexdigest()
    family = family_of(type(value))
    if family is Family.TENSOR:
        return _digest_tensor(value)
    if family is not None:
        return _digest_array(value)
    if isinstance(value, Mapping):
        return _digest_mapping(value)
    if _is_plain(value):
        return hashlib.sha256(_json(value).encode()).hexdigest()
    if isinstance(value, list | tuple):
        if all(_is_plain(item) or isinstance(item, str) for item in value):
            return hashlib.sha256(_json(value).encode()).hexdigest()
        return _digest_sequence(value)
    raise RecordingError(
        f"a value of type {type(value).__name__} has no bytes to digest",
        hint="digest bytes, a string, a tensor, or mappings and lists of these",
    )


def _is_plain(value: object) -> bool:
    # NumPy's float64 inherits from float, and would pass for a Python number here but not in its float32 sibling.
    return value is None or (isinstance(value, bool | int | float) and family_of(type(value)) is None)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RecordingError(f"the string {text[:80]!r} has no UTF-8 form: {error.reason}") from error


def _digest_sequence(values: Sequence[object]) -> str:
    whole = hashlib.sha256()
    for value in values:
        whole.update(f"{digest_of(value)}\n".encode())
    return whole.hexdigest()


def _digest_mapping(mapping: Mapping[Any, object]) -> str:
    entries: dict[str, object] = {}
    for name, value in mapping.items():
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise RecordingError(f"mapping key {name!r} is neither a string nor an int")
        if str(name) in entries:
            raise RecordingError(f"mapping keys {name!r} and {str(name)!r} have the same name")
        entries[str(name)] = value
    whole = hashlib.sha256()
    for name in sorted(entries):
        try:
            digest = digest_of(entries[name])
        except RecordingError as error:
            raise RecordingError(f"in {name!r}: {error.message}", hint=error.hint) from None
        whole.update(f"{digest}  {_json(name)}\n".encode())
    return whole.hexdigest()


def _hash_with_header(dtype: str, shape: Sequence[int]) -> Any:
    return hashlib.sha256(f"{dtype} {_json(list(shape))}\n".encode())


def _digest_tensor(tensor: Any) -> str:
    torch = sys.modules["torch"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if sys.byteorder != "little":
        raise RecordingError("tensors can be digested on little-endian machines only", hint="pass value.numpy()")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise RecordingError(
            f"a {dtype} tensor of layout {tensor.layout} on device {tensor.device} has no fixed bytes",
            hint="digest its parts (indices, values, scales), or value.to_dense()",
        )
    local = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = local.numel() * local.element_size()
    address = _address_of(local) if size else 0
    if size and not address:
        raise RecordingError(
            f"a {type(tensor).__name__} holds no elements of its own",
            hint="digest value.to_local() of a distributed tensor, or its parts",
        )
    digest = _hash_with_header(dtype, tensor.shape)
    if size:
        # Through the address, because torch gives bfloat16 and float8 no buffer, and NumPy may be missing. `local`
        # lives until the end of this function, and so does the memory.
        digest.update((ctypes.c_char * size).from_address(address))
    return str(digest.hexdigest())


def _address_of(tensor: Any) -> int:
    """Return where a tensor's elements lie; 0 if a wrapper class keeps them elsewhere."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # "Cannot access data pointer of Tensor that doesn't have storage"
        return 0


def _digest_array(value: Any) -> str:
    numpy = sys.modules["numpy"]
    array = numpy.asarray(value)
    dtype = array.dtype
    # Kind V is a structure, or bfloat16 and the like from ml_dtypes.
    is_numeric = dtype.kind in "biufcV" and dtype.type is not numpy.void
    is_padded = dtype.kind in "fc" and dtype.name not in _UNPADDED_FLOATS
    if not is_numeric or is_padded or isinstance(value, numpy.ma.MaskedArray):
        raise RecordingError(
            f"a {type(value).__name__} of dtype {dtype.name} has no fixed bytes",
            hint="convert it: value.astype(...), value.filled(...), or value.tolist() for strings",
        )
    little = array.astype(dtype.newbyteorder("<"), copy=False)
    digest = _hash_with_header(dtype.name, array.shape)
    digest.update(numpy.ascontiguousarray(little).reshape(-1).view(numpy.uint8))
    return str(digest.hexdigest())
