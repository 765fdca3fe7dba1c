"""The closed set of value types that a series may have, and their raw bit patterns.

A value is kept as the bit pattern of its native type, because that is what strict comparison compares: float32
NaNs keep their payload, ``-0.0`` stays apart from ``0.0``, and ``uint64`` counters stay exact. This module needs
the standard library alone, since the recorder runs inside other people's training processes.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from e2e_registry.errors import RecordingError


class Kind(enum.Enum):
    """The arithmetic family of a dtype."""

    FLOAT = "float"
    INTEGER = "integer"
    BOOL = "bool"
    DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class DType:
    """One native value type.

    Attributes:
        name: The name stored in standards and recordings.
        kind: The arithmetic family.
        width: Size of the bit pattern in bits; 0 for digests, whose ``bits`` are always 0.
        mantissa: Explicit mantissa bits of a float; 0 otherwise.
        code: Position in :data:`ALL_DTYPES`, for vectorised comparison.
    """

    name: str
    kind: Kind
    width: int
    mantissa: int
    code: int

    @property
    def is_float(self) -> bool:
        """Whether NaN, infinities and ULPs exist for this type."""
        return self.kind is Kind.FLOAT

    @property
    def is_digest(self) -> bool:
        """Whether the observed value is a digest string rather than a number."""
        return self.kind is Kind.DIGEST

    @property
    def sign_bit(self) -> int:
        """The mask of the sign bit of a float pattern."""
        return 1 << (self.width - 1)

    @property
    def infinity_bits(self) -> int:
        """The pattern of positive infinity; any greater magnitude is a NaN."""
        return (self.sign_bit - 1) & ~((1 << self.mantissa) - 1)


FLOAT64 = DType("float64", Kind.FLOAT, 64, 52, 0)
FLOAT32 = DType("float32", Kind.FLOAT, 32, 23, 1)
FLOAT16 = DType("float16", Kind.FLOAT, 16, 10, 2)
BFLOAT16 = DType("bfloat16", Kind.FLOAT, 16, 7, 3)
INT64 = DType("int64", Kind.INTEGER, 64, 0, 4)
UINT64 = DType("uint64", Kind.INTEGER, 64, 0, 5)
BOOL = DType("bool", Kind.BOOL, 1, 0, 6)
DIGEST = DType("digest", Kind.DIGEST, 0, 0, 7)

ALL_DTYPES: tuple[DType, ...] = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, UINT64, BOOL, DIGEST)
DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in ALL_DTYPES})

INT64_MIN, INT64_MAX, UINT64_MAX = -(1 << 63), (1 << 63) - 1, (1 << 64) - 1

Scalar = float | int | bool


def decode_bits(dtype: DType, bits: int) -> Scalar:
    """Return the Python number that a bit pattern stands for, exactly.

    Source: IEEE 754-2019 for the binary formats; bfloat16 is the upper half of a float32.
    """
    match dtype.name:
        case "float64":
            return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])
        case "float32":
            return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])
        case "float16":
            return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])
        case "bfloat16":
            return float(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])
        case "int64":
            return bits - (1 << 64) if bits >> 63 else bits
        case "uint64":
            return bits
        case "bool":
            return bool(bits)
    raise ValueError(f"dtype {dtype.name} has no numeric value")


def encode_value(dtype: DType, value: Scalar) -> int:
    """Return the bit pattern of ``value`` in ``dtype``.

    Raises:
        RecordingError: The value does not lie in the type exactly (out of range, or it would be rounded).
    """
    try:
        bits = _encode(dtype, value)
    except (struct.error, OverflowError, TypeError) as error:
        raise RecordingError(f"value {value!r} is not a {dtype.name}") from error
    back = decode_bits(dtype, bits)
    if back != value and not (_is_nan(back) and _is_nan(value)):
        raise RecordingError(f"value {value!r} is not exact in {dtype.name} (nearest is {back!r})")
    return bits


def _is_nan(value: Scalar) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _encode(dtype: DType, value: Scalar) -> int:
    match dtype.name:
        case "float64":
            return int.from_bytes(struct.pack("<d", value), "little")
        case "float32":
            return int.from_bytes(struct.pack("<f", value), "little")
        case "float16":
            return int.from_bytes(struct.pack("<e", value), "little")
        case "bfloat16":
            return int.from_bytes(struct.pack("<f", value), "little") >> 16
        case "int64":
            return int.from_bytes(struct.pack("<q", value), "little")
        case "uint64":
            return int.from_bytes(struct.pack("<Q", value), "little")
        case "bool":
            if value in (0, 1):
                return int(value)
            raise OverflowError(value)
    raise TypeError(f"dtype {dtype.name} holds no numbers")
