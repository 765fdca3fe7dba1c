"""Logged scalars as exact JSON of their native dtype.

NumPy and torch are recognised by the names of a value's classes and are never imported: a recipe that uses neither
need not have them, and one that does has imported them already.

An encoder takes one value and returns its group and its JSON text: ``("float32", "0.25")``, ``("int64", "3")``, or
``("bits", '["float32", "7fc00001"]')`` where a JSON number cannot carry the value.
"""

from __future__ import annotations

import enum
import struct
import sys
from collections.abc import Callable
from typing import Any

from e2e_registry.dtypes import (
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT64,
    INT64_MAX,
    INT64_MIN,
    UINT64,
    UINT64_MAX,
    DType,
)
from e2e_registry.errors import RecordingError
from e2e_registry.recording.layout import BITS

Encoder = Callable[[Any], tuple[str, str]]
RawBits = Callable[[Any], int]

_FLOATS = {dtype.name: dtype for dtype in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}
_WIDENED_TO_INT64 = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_LARGEST = sys.float_info.max

_float_repr = float.__repr__
_int_repr = int.__repr__


class Family(enum.Enum):
    """The classes of NumPy and torch that hold values."""

    TENSOR = "torch.Tensor"
    ARRAY = "numpy.ndarray"
    NUMPY_SCALAR = "numpy.generic"


_FAMILIES = {family.value: family for family in Family}


def family_of(kind: type) -> Family | None:
    """Return the family that a class belongs to by inheritance, or None."""
    for base in kind.__mro__:
        family = _FAMILIES.get(f"{base.__module__}.{base.__qualname__}")
        if family is not None:
            return family
    return None


def encoder_for(kind: type) -> Encoder:
    """Return the encoder of a class's values; remembered, so that a value costs one dictionary look-up.

    Raises:
        RecordingError: Values of the class are not numbers.
    """
    encoder = ENCODERS.get(kind)
    if encoder is None:
        encoder = ENCODERS[kind] = _find_encoder(kind)
    return encoder


def _find_encoder(kind: type) -> Encoder:
    family = family_of(kind)
    if family is Family.TENSOR:
        return _tensor_encoder()
    if family is Family.ARRAY:
        return _encode_array
    if family is Family.NUMPY_SCALAR:
        name = sys.modules["numpy"].dtype(kind).name
        return _dtype_encoder(name, _numpy_bits) or _refuse(f"dtype {name} cannot be logged as a number")
    for base in (bool, int, float):
        if issubclass(kind, base):
            return ENCODERS[base]
    return _refuse(f"a value of type {kind.__qualname__} is not a real number")


def _refuse(message: str) -> Encoder:
    def refuse(value: Any) -> tuple[str, str]:
        raise RecordingError(
            message,
            hint="log() takes bool, int, float and 0-d NumPy and torch values; log_digest() records the SHA-256 of "
            "strings, bytes, tensors of any dtype, and mappings and lists of these",
        )

    return refuse


# --- Python numbers ---------------------------------------------------------------------------------------------------


def _encode_bool(value: bool) -> tuple[str, str]:
    return BOOL.name, "true" if value else "false"


def _encode_int(value: int) -> tuple[str, str]:
    if INT64_MIN <= value <= INT64_MAX:
        return INT64.name, _int_repr(value)
    hint = "log_digest() records integers of any size"
    if INT64_MAX < value <= UINT64_MAX:
        hint = "log it as numpy.uint64 or as a torch.uint64 tensor, which keeps its dtype; log_digest() takes any size"
    raise RecordingError("a Python int is recorded as int64, and this one is out of its range", hint=hint)


def _encode_float(value: float) -> tuple[str, str]:
    if value and -_LARGEST <= value <= _LARGEST:
        return FLOAT64.name, _float_repr(value)
    return _encode_bits(FLOAT64, int.from_bytes(struct.pack("<d", value), "little"))


def _encode_bits(dtype: DType, bits: int) -> tuple[str, str]:
    """Encode zeros and what JSON cannot carry from their raw pattern."""
    if bits == 0:
        return dtype.name, "0.0"
    if bits == dtype.sign_bit:
        return dtype.name, "-0.0"
    return BITS, f'["{dtype.name}", "{bits:0{dtype.width // 4}x}"]'


# --- NumPy and torch --------------------------------------------------------------------------------------------------


def _dtype_encoder(name: str, raw_bits: RawBits) -> Encoder | None:
    """Return the encoder of 0-d values of one NumPy or torch dtype, or None if it is outside the closed set."""
    if name in _FLOATS:
        return _float_encoder(_FLOATS[name], raw_bits)
    if name == BOOL.name:
        return lambda value: _encode_bool(value.item())
    if name in _WIDENED_TO_INT64:
        return lambda value: (INT64.name, _int_repr(value.item()))
    if name == UINT64.name:
        return lambda value: (UINT64.name, _int_repr(value.item()))
    return None


def _float_encoder(dtype: DType, raw_bits: RawBits) -> Encoder:
    name = dtype.name

    def encode(value: Any) -> tuple[str, str]:
        number = value.item()
        # Every narrower float is exact in float64, whose repr is the shortest text that reads back as itself.
        # Zeros take the raw pattern: where torch.set_flush_denormal() is on, a subnormal converts to zero.
        if number and -_LARGEST <= number <= _LARGEST:
            return name, _float_repr(number)
        return _encode_bits(dtype, raw_bits(value))

    return encode


def _numpy_bits(value: Any) -> int:
    return int.from_bytes(value.tobytes(), sys.byteorder)


def _encode_array(array: Any) -> tuple[str, str]:
    if array.shape != ():
        raise _not_a_scalar(array.shape)
    scalar = array[()]  # in native byte order, whatever the array's
    if family_of(type(scalar)) is not Family.NUMPY_SCALAR:  # an object array, or a masked value
        return _refuse(f"a {type(array).__name__} of dtype {array.dtype} does not hold a number")(array)
    return encoder_for(type(scalar))(scalar)


def _tensor_encoder() -> Encoder:
    torch = sys.modules["torch"]
    by_dtype: dict[Any, Encoder] = {}
    for name in (*_FLOATS, BOOL.name, *_WIDENED_TO_INT64, UINT64.name):
        dtype = getattr(torch, name, None)  # older releases have no uint16, uint32 and uint64
        encoder = _dtype_encoder(name, _tensor_bits(torch, _FLOATS.get(name)))
        if dtype is not None and encoder is not None:
            by_dtype[dtype] = encoder

    def encode(tensor: Any) -> tuple[str, str]:
        encoder = by_dtype.get(tensor.dtype)
        if encoder is None:
            return _refuse(f"dtype {tensor.dtype} cannot be logged as a number")(tensor)
        if tensor.dim():
            raise _not_a_scalar(tuple(tensor.shape))
        return encoder(tensor)

    return encode


def _tensor_bits(torch: Any, dtype: DType | None) -> RawBits:
    width = 64 if dtype is None else dtype.width
    integer, mask = getattr(torch, f"int{width}"), (1 << width) - 1
    return lambda tensor: int(tensor.detach().view(integer).item()) & mask


def _not_a_scalar(shape: tuple[int, ...]) -> RecordingError:
    elements = 1
    for size in shape:
        elements *= size
    advice = "take its one element (value.item() or value.squeeze())" if elements == 1 else "reduce it to one number"
    return RecordingError(
        f"log() takes one number, of shape (), and this has shape {shape}",
        hint=f"{advice}, or record all of it with log_digest()",
    )


#: From exact class to encoder. Classes of NumPy and torch, and subclasses, join when first seen.
ENCODERS: dict[type, Encoder] = {bool: _encode_bool, int: _encode_int, float: _encode_float}
