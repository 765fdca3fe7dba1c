"""The operation table of ``verify_portable.py``: small computations whose raw results must be equal on every CPU.

A probe returns tensors, arrays or numbers; :func:`digest` hashes their dtypes, shapes and bytes. Inputs are made of
random integers (PCG64 is integer arithmetic) by exact steps, so that they are equal everywhere to begin with. NaNs
are hashed as one NaN: where two of them meet, qemu picks the payload by the x87 rule and processors by the SSE rule,
and neither is what is measured here.
"""

from __future__ import annotations

import cmath
import functools
import hashlib
import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WIDE = ("float32", "float64")
COMPLEX = {"complex64": "float32", "complex128": "float64"}

#: Where functions change branch, and where the special values are.
SPECIAL_VALUES = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 8.0, 10.0, 1000.0, math.pi / 2, math.e),
    *(math.inf, -math.inf, math.nan, 1e-40, -1e-40, 5e-324, 1e308),
)

#: Globs over names: the CI case.
SMALL = (
    *("torch/float??/sqrt", "torch/float??/atan", "torch/float64/log", "torch/float32/exp", "torch/float32/pow(0.5)"),
    *("torch/float32/matmul 64x1000x10", "torch/bfloat16/matmul 31x33x29", "torch/float32/linear 32x784x10"),
    *("torch/float32/conv2d batch 4 kernel 3 stride 1 groups 1", "torch/float32/sdpa flash_attention 64 causal"),
    *("torch/float32/layer_norm", "torch/float32/cross_entropy", "torch/float32/optim.AdamW foreach"),
    *("torch/float32/random normal_ 1001", "torch/float32/fft 100", "torch/float32/linalg.cholesky 5"),
    *("torch/float32/linalg.svd 20", "numpy/float64/exp", "numpy/float32/matmul 33", "math/exp", "math/pow"),
    *("train/float32/mlp AdamW",),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """One computation: its name, the group that tables count it in, and the function that returns its results."""

    name: str
    group: str
    run: Callable[[], Any]


#: ``add(group, name, function, *arguments)``
Add = Callable[..., None]
ByDtype = Mapping[str, Callable[[str], Any]]


def all_probes() -> list[Probe]:
    """Return the whole table, in the order in which it runs."""
    probes: dict[str, Probe] = {}

    def add(group: str, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        if name in probes:
            raise ValueError(f"two probes are called {name}")
        probes[name] = Probe(name, group, partial(function, *arguments))

    for section in SECTIONS:
        section(add)
    return list(probes.values())


def _add_by_dtype(add: Add, group: str, dtypes: Iterable[str], functions: ByDtype) -> None:
    for dtype, (name, function) in itertools.product(dtypes, functions.items()):
        add(group, f"torch/{dtype}/{name}", function, dtype)


def digest(results: Any) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over dtypes, shapes and bytes of every array in ``results``."""
    sha = hashlib.sha256()
    for leaf in _leaves(results):
        array = _raw(leaf)
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def _leaves(results: Any) -> Iterator[Any]:
    if isinstance(results, list | tuple):
        for item in results:
            yield from _leaves(item)
    else:
        yield results


def _raw(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, Tensor):
        tensor = leaf.detach().resolve_conj().resolve_neg()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()  # exact, and NumPy has no bfloat16
        leaf = tensor.numpy()
    array = np.array(leaf)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    if array.dtype.kind == "f":
        array[np.isnan(array)] = np.nan
    return array


# ---- Inputs ------------------------------------------------------------------------------------------------------


def unit(shape: tuple[int, ...], dtype: str = "float32", salt: str = "", scale: float = 1.0) -> Tensor:
    """Return odd multiples of 2**-24 in (-1, 1), uniform, times ``scale``."""
    odd = _generator(f"unit{shape}{salt}").integers(-(2**23), 2**23, shape) * 2 + 1
    return torch.from_numpy(np.asarray(odd / 2.0**24 * scale)).to(DTYPES[dtype])


def bit_patterns(dtype: str, n: int, salt: str = "") -> Tensor:
    """Return random bit patterns: both signs, every exponent, subnormals, infinities and NaNs."""
    signed: Any = {"float32": np.int32, "float64": np.int64}.get(dtype, np.int16)
    limits = np.iinfo(signed)
    patterns = _generator(f"bits{dtype}{salt}").integers(limits.min, limits.max, n, dtype=signed, endpoint=True)
    return torch.from_numpy(patterns).view(DTYPES[dtype])


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


def usual(dtype: str, n: int = 4099) -> Tensor:
    """Return values as they occur: in (-1, 1), in (-16, 16), around one, and positive up to a thousand."""
    near_zero, moderate = unit((n,), dtype, "a"), unit((n,), dtype, "b", 16.0)
    return torch.cat([near_zero, moderate, 1 + unit((n,), dtype, "c", 2.0**-6), unit((n,), dtype, "d", 1000.0).abs()])


def everything(dtype: str, n: int = 16411) -> Tensor:
    """Return bit patterns, usual values and special values; the length is a multiple of no vector's width."""
    special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64).to(DTYPES[dtype])
    return torch.cat([bit_patterns(dtype, n), usual(dtype, n // 4), special])


def positive(dtype: str, n: int = 511, salt: str = "", scale: float = 1.0) -> Tensor:
    """Return values in (0, ``scale``)."""
    return unit((n,), dtype, salt, scale).abs()


def complex_unit(shape: tuple[int, ...], dtype: str, salt: str = "", scale: float = 1.0) -> Tensor:
    """Return complex values whose parts are :func:`unit` of the real ``dtype``."""
    return torch.complex(unit(shape, dtype, f"re{salt}", scale), unit(shape, dtype, f"im{salt}", scale))


def with_gradients(function: Callable[..., Any], *inputs: Tensor, parameters: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the outputs of ``function`` and the gradients of inputs and parameters under random output weights."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = [y for y in _leaves(function(*leaves)) if isinstance(y, Tensor) and y.requires_grad]
    weighted = [(y * unit(tuple(y.shape), "float32", "weight").to(y.dtype)).sum() for y in outputs]
    functools.reduce(torch.add, weighted).backward()  # type: ignore[no-untyped-call]
    grads = [x.grad for x in (*leaves, *parameters) if x.grad is not None]
    return [*(y.detach() for y in outputs), *grads]


def seeded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)`` after seeding torch's generator."""
    torch.manual_seed(1234)
    return function(*arguments)


def module(make: Callable[[], nn.Module], dtype: str = "float32") -> nn.Module:
    """Return a module with seeded weights."""
    made: nn.Module = seeded(make).to(DTYPES[dtype])
    return made


# ---- Element-wise functions --------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


UNARY = _words(
    "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad erf erfc erfinv exp exp2 expm1 floor frac log log10 "
    "log1p log2 logit neg reciprocal round rsqrt sigmoid sin sinc sinh sqrt square tan tanh trunc"
)
SLOW_UNARY = _words(
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erfcx gammaln i0 i0e i1 i1e log_ndtr "
    "modified_bessel_i0 modified_bessel_k0 ndtr ndtri spherical_bessel_j0"
)
HALF_SLOW_UNARY = _words("digamma gammaln i0")
ACTIVATIONS = _words(
    "gelu silu mish softplus elu selu celu hardswish hardsigmoid logsigmoid tanhshrink softsign relu6 leaky_relu "
    "softshrink"
)
DIFFERENTIATED = _words("sqrt atan asin acos log2 log10 tan rsqrt log exp sigmoid tanh erf expm1 log1p")
COMPLEX_UNARY = _words(
    "abs angle acos asin atan cos cosh exp log log10 log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh"
)
EXPONENTS = (0.5, -0.5, 2, 3, -1, -2, 1.7, 1 / 3, 0.25)


def elementwise(add: Add) -> None:
    """Functions of one tensor over all bit patterns."""
    group = "element-wise functions"
    for dtype in DTYPES:
        for name in UNARY:
            add(group, f"torch/{dtype}/{name}", _of_everything, getattr(torch, name), dtype)
        for exponent in EXPONENTS:
            add(group, f"torch/{dtype}/pow({exponent:.3g})", _of_everything, partial(_power, exponent), dtype)
        for name in SLOW_UNARY if dtype in WIDE else HALF_SLOW_UNARY:
            add(group, f"torch/{dtype}/special.{name}", _of_everything, getattr(torch.special, name), dtype, 509)
        for name in ACTIVATIONS:
            add(group, f"torch/{dtype}/{name}", _activation, getattr(functional, name), dtype)
        add(group, f"torch/{dtype}/gelu tanh", _activation, partial(functional.gelu, approximate="tanh"), dtype)
        for name in DIFFERENTIATED:
            add(group, f"torch/{dtype}/{name} gradient", _gradient_in_domain, getattr(torch, name), dtype)
    for dtype, name in itertools.product(COMPLEX, COMPLEX_UNARY):
        add(group, f"torch/{dtype}/{name}", _of_complex, getattr(torch, name), COMPLEX[dtype])


def _of_everything(function: Callable[[Tensor], Tensor], dtype: str, n: int = 16411) -> Tensor:
    return function(everything(dtype, n))


def _power(exponent: float, x: Tensor) -> Tensor:
    return torch.pow(x, exponent)


def _activation(function: Callable[[Tensor], Tensor], dtype: str) -> list[Tensor]:
    return with_gradients(function, usual(dtype, 1025))


def _gradient_in_domain(function: Callable[[Tensor], Tensor], dtype: str) -> list[Tensor]:
    return with_gradients(function, positive(dtype, 3001, scale=0.97) + 0.01)


def _of_complex(function: Callable[[Tensor], Tensor], real: str) -> Tensor:
    return function(complex_unit((2051,), real, scale=4.0))


# ---- Functions of several tensors --------------------------------------------------------------------------------

BINARY = _words(
    "atan2 hypot pow fmod remainder logaddexp logaddexp2 xlogy div mul add sub maximum copysign nextafter float_power"
)
SLOW_BINARY = _words("gammainc gammaincc xlog1py zeta")
FOREACH = _words("sqrt log2 log10 asin acos atan tan exp log rsqrt tanh norm")
SEVERAL: ByDtype = {
    "addcmul": lambda d: torch.addcmul(left(d), right(d), left(d).flip(0), value=0.3),
    "addcdiv": lambda d: torch.addcdiv(left(d), right(d), left(d).flip(0), value=0.3),
    "add with alpha": lambda d: torch.add(left(d), right(d), alpha=0.3),
    "lerp": lambda d: torch.lerp(left(d), right(d), 0.3),
    "polygamma": lambda d: torch.polygamma(2, positive(d, scale=8.0)),
    "pow(tensor of 0.5)": lambda d: everything(d) ** torch.full((1,), 0.5, dtype=DTYPES[d]),
    "_foreach_pow": lambda d: torch._foreach_pow(tensor_list(d), 0.5),
}


def left(dtype: str) -> Tensor:
    """Return a first operand."""
    return torch.cat([bit_patterns(dtype, 2053, "left"), usual(dtype, 1025)])


def right(dtype: str) -> Tensor:
    """Return a second operand."""
    return torch.cat([bit_patterns(dtype, 2053, "right"), usual(dtype, 1025).flip(0)])


def tensor_list(dtype: str) -> list[Tensor]:
    """Return the operand of a ``_foreach`` function."""
    return [positive(dtype, 777), unit((31, 5), dtype).abs()]


def several_tensors(add: Add) -> None:
    """Functions of several tensors, and of lists of tensors."""
    group = "functions of several tensors"
    _add_by_dtype(add, group, WIDE, SEVERAL)
    for dtype in WIDE:
        for name in BINARY:
            add(group, f"torch/{dtype}/{name}", _of_two, getattr(torch, name), dtype)
        for name in SLOW_BINARY:
            add(group, f"torch/{dtype}/special.{name}", _of_two_positive, getattr(torch.special, name), dtype)
        for name in FOREACH:
            add(group, f"torch/{dtype}/_foreach_{name}", _of_list, getattr(torch, f"_foreach_{name}"), dtype)


def _of_two(function: Callable[[Tensor, Tensor], Tensor], dtype: str) -> Tensor:
    return function(left(dtype), right(dtype))


def _of_two_positive(function: Callable[[Tensor, Tensor], Tensor], dtype: str) -> Tensor:
    return function(positive(dtype, salt="a", scale=8.0) + 1, positive(dtype, salt="b", scale=8.0))


def _of_list(function: Callable[[list[Tensor]], Any], dtype: str) -> Any:
    return function(tensor_list(dtype))


# ---- Reductions and distances ------------------------------------------------------------------------------------

REDUCTIONS = _words("sum mean var std softmax log_softmax cumsum cumprod logcumsumexp logsumexp prod")
ORDERS = (0.5, 1, 2, 3, math.inf)
_SCATTERED = torch.arange(1031) * 7919 % 50
STATISTICS: ByDtype = {
    "sum of all": lambda d: (matrix(d).sum(), matrix(d).t().sum(), matrix(d)[:, ::3].sum()),
    "moments of all": lambda d: (matrix(d).mean(), matrix(d).var(), matrix(d).std()),
    "median, sort, topk": lambda d: (matrix(d).median(), matrix(d).sort(1)[0], matrix(d).topk(5, 1)[0]),
    "cosine_similarity": lambda d: functional.cosine_similarity(matrix(d), matrix(d).flip(0)),
    "normalize": lambda d: functional.normalize(matrix(d)),
    "softmax gradient": lambda d: with_gradients(lambda x: x.softmax(-1) ** 2, matrix(d)),
    "log_softmax gradient": lambda d: with_gradients(lambda x: x.log_softmax(-1) ** 2, matrix(d)),
    "index_add": lambda d: torch.zeros(50, 37, dtype=DTYPES[d]).index_add(
        0, _SCATTERED, matrix(d).t()
    ),  # e2e: allow DET012 -- probed on one CPU thread
    "scatter_add": lambda d: torch.zeros(50, dtype=DTYPES[d]).scatter_add(
        0, _SCATTERED, matrix(d)[0]
    ),  # e2e: allow DET012 -- probed on one CPU thread
}
DISTANCES: ByDtype = {
    "cdist(2) small": lambda d: torch.cdist(points(d)[:5], points(d)[9:15]),
    "cdist(2) without mm": lambda d: torch.cdist(
        points(d), points(d, "y"), compute_mode="donot_use_mm_for_euclid_dist"
    ),
    "pdist": lambda d: torch.pdist(points(d)),
    "renorm": lambda d: torch.renorm(points(d), 2, 0, 1.0),
    "dist": lambda d: torch.dist(points(d), points(d, "y")),
    "quantile": lambda d: torch.quantile(points(d), 0.3, dim=1),
    "histc": lambda d: torch.histc(points(d), 17),
    "bincount": lambda d: torch.bincount(
        torch.arange(3811) % 13, points(d).flatten()
    ),  # e2e: allow DET012 -- probed on one CPU thread
    "linspace, logspace": lambda d: [f(-1.3, 2.7, 1001, dtype=DTYPES[d]) for f in (torch.linspace, torch.logspace)],
}


def matrix(dtype: str) -> Tensor:
    """Return what is reduced."""
    return unit((37, 1031), dtype)


def points(dtype: str, salt: str = "") -> Tensor:
    """Return what has distances."""
    return unit((37, 103), dtype, salt)


def reductions(add: Add) -> None:
    """Sums and what is made of them."""
    group = "reductions and distances"
    for dtype in DTYPES:
        for name in REDUCTIONS:
            add(group, f"torch/{dtype}/{name}", _reduce, getattr(torch, name), dtype)
        for order in ORDERS:
            add(group, f"torch/{dtype}/vector_norm({order:g})", _norm, order, dtype)
    _add_by_dtype(add, group, DTYPES, STATISTICS)
    _add_by_dtype(add, group, WIDE, DISTANCES)
    for dtype, order in itertools.product(WIDE, ORDERS):
        add(group, f"torch/{dtype}/cdist({order:g})", _distance, order, dtype)


def _reduce(function: Callable[[Tensor, int], Tensor], dtype: str) -> list[Tensor]:
    return [function(matrix(dtype), dim) for dim in (0, 1)]


def _norm(order: float, dtype: str) -> list[Tensor]:
    return [torch.linalg.vector_norm(matrix(dtype), order, dim) for dim in (None, 0, 1)]


def _distance(order: float, dtype: str) -> list[Tensor]:
    return with_gradients(lambda x: torch.cdist(x, unit((41, 103), dtype, "y"), p=order), points(dtype))


# ---- Matrix products ---------------------------------------------------------------------------------------------

SHAPES = (
    *((1, 1, 1), (2, 3, 4), (1, 64, 64), (7, 5, 3), (16, 16, 16), (31, 33, 29), (64, 64, 64), (64, 1000, 10)),
    *((100, 257, 96), (128, 128, 128), (256, 64, 256), (1, 777, 1), (513, 3, 5), (3, 2049, 7)),
)
LINEAR_SHAPES = ((1, 10, 10), (4, 64, 128), (32, 784, 10), (128, 64, 64))
PRODUCTS: ByDtype = {
    "matmul of transposed": lambda d: unit((130, 65), d).t() @ unit((70, 130), d, "b").t(),
    "matmul with transposed": lambda d: unit((65, 130), d) @ unit((70, 130), d, "b").t(),
    "bmm": lambda d: unit((5, 33, 65), d).bmm(unit((5, 65, 17), d, "b")),
    "addmm": lambda d: unit((33, 17), d, "c").addmm(unit((33, 65), d), unit((65, 17), d, "b"), beta=0.7, alpha=0.3),
    "mv": lambda d: unit((65, 130), d) @ unit((130,), d, "b"),
    "dot": lambda d: unit((1001,), d).dot(unit((1001,), d, "b")),
    "outer": lambda d: unit((65,), d).outer(unit((33,), d, "b")),
    "einsum": lambda d: torch.einsum("bij,bjk,lk->bil", unit((3, 8, 9), d), unit((3, 9, 7), d), unit((5, 7), d)),
}
SPARSE: ByDtype = {
    "sparse csr matmul": lambda d: _sparse(d).to_sparse_csr() @ unit((40, 17), d, "b"),
    "sparse coo matmul": lambda d: _sparse(d).to_sparse() @ unit((40, 17), d, "b"),
    "sparse triangular_solve": lambda d: [
        torch.triangular_solve(unit((40, 3), d, "b"), _sparse(d).to_sparse_csr(), upper=False, transpose=transpose)[0]
        for transpose in (False, True)
    ],
}


def matrix_products(add: Add) -> None:
    """Matrix products of many shapes, dense and sparse."""
    group = "matrix products"
    for dtype in DTYPES:
        for shape in SHAPES:
            add(group, f"torch/{dtype}/matmul {'x'.join(map(str, shape))}", _product, dtype, *shape)
        for shape in LINEAR_SHAPES:
            add(group, f"torch/{dtype}/linear {'x'.join(map(str, shape))}", _linear, dtype, *shape)
    _add_by_dtype(add, group, DTYPES, PRODUCTS)
    _add_by_dtype(add, group, WIDE, SPARSE)
    for dtype, real in COMPLEX.items():
        add(group, f"torch/{dtype}/matmul", _complex_product, real)
    add(group, "torch/float32/matmul 300x700x300", _product, "float32", 300, 700, 300)


def _product(dtype: str, m: int, k: int, n: int) -> Tensor:
    return unit((m, k), dtype) @ unit((k, n), dtype, "b")


def _linear(dtype: str, batch: int, width: int, out: int) -> list[Tensor]:
    weight, bias = unit((out, width), dtype, "w"), unit((out,), dtype, "b")
    return with_gradients(functional.linear, unit((batch, width), dtype), weight, bias)


def _complex_product(real: str) -> Tensor:
    return complex_unit((33, 65), real) @ complex_unit((65, 17), real, "b")


def _sparse(dtype: str) -> Tensor:
    kept = unit((40, 40), dtype).tril() * (unit((40, 40), dtype, "mask") > 0.2)
    return kept + 3 * torch.eye(40, dtype=DTYPES[dtype])


# ---- Convolutions ------------------------------------------------------------------------------------------------

#: (kernel, stride, groups); by batch and kernel torch hands them to different libraries.
KERNELS = ((1, 1, 1), (3, 1, 1), (3, 2, 1), (5, 1, 1), (3, 1, 8))
CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (functional.conv1d, (4, 8, 50), (6, 8, 3)),
    "conv2d dilated": (partial(functional.conv2d, dilation=2), (2, 4, 11, 11), (6, 4, 3, 3)),
    "conv3d": (functional.conv3d, (2, 3, 6, 7, 8), (4, 3, 3, 3, 3)),
    "conv_transpose2d": (partial(functional.conv_transpose2d, stride=2), (4, 8, 7, 7), (8, 6, 3, 3)),
}
IMAGES, FILTERS = (16, 3, 16, 16), (8, 3, 3, 3)


def convolutions(add: Add) -> None:
    """Convolutions with their gradients."""
    group = "convolutions"
    for dtype, batch, (kernel, stride, groups) in itertools.product(DTYPES, (1, 4, 16, 32), KERNELS):
        if dtype == "float32" or (batch in (4, 16) and kernel != 5):
            name = f"torch/{dtype}/conv2d batch {batch} kernel {kernel} stride {stride} groups {groups}"
            add(group, name, _conv2d, dtype, batch, kernel, stride, groups)
    for dtype, (name, (function, image, weight)) in itertools.product(DTYPES, CONVOLUTIONS.items()):
        add(group, f"torch/{dtype}/{name}", _convolve, function, dtype, image, weight)
    add(group, "torch/float32/conv2d inference", lambda: functional.conv2d(unit(IMAGES), unit(FILTERS)))
    add(group, "torch/float32/conv2d channels_last", _channels_last)
    add(group, "torch/float32/conv2d without oneDNN", _without_onednn)


def _conv2d(dtype: str, batch: int, kernel: int, stride: int, groups: int) -> list[Tensor]:
    weight, bias = unit((16, 8 // groups, kernel, kernel), dtype, "w"), unit((16,), dtype, "b")
    function = partial(functional.conv2d, stride=stride, padding=kernel // 2, groups=groups)
    return with_gradients(function, unit((batch, 8, 9, 9), dtype), weight, bias)


def _convolve(
    function: Callable[..., Tensor], dtype: str, image: tuple[int, ...], weight: tuple[int, ...]
) -> list[Tensor]:
    return with_gradients(function, unit(image, dtype), unit(weight, dtype, "w"))


def _channels_last() -> list[Tensor]:
    return with_gradients(functional.conv2d, unit(IMAGES).to(memory_format=torch.channels_last), unit(FILTERS))


def _without_onednn() -> list[Tensor]:
    with torch.backends.mkldnn.flags(enabled=False):
        return with_gradients(partial(functional.conv2d, padding=1), unit(IMAGES), unit(FILTERS))


# ---- Attention ---------------------------------------------------------------------------------------------------


def attention(add: Add) -> None:
    """Scaled dot product attention by backend, and the modules made of it."""
    group = "attention"
    cases = ((7, False), (64, True), (130, False), (600, False))
    for dtype, backend, (length, is_causal) in itertools.product(DTYPES, ("math", "flash_attention"), cases):
        if length < 600 or dtype == "float32":
            name = f"torch/{dtype}/sdpa {backend} {length}{' causal' if is_causal else ''}"
            add(group, name, _sdpa, backend, dtype, length, is_causal)
    for dtype in DTYPES:
        add(group, f"torch/{dtype}/sdpa mask", _sdpa, "math", dtype, 33, False, True)
    for make, training in itertools.product((_SelfAttention, _encoder_layer), (True, False)):
        mode = "training" if training else "inference fast path"
        add(group, f"torch/float32/{make.__name__.strip('_')} {mode}", _encode, make, training)


def _sdpa(backend: str, dtype: str, length: int, is_causal: bool, is_masked: bool = False) -> list[Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = unit((length, length), dtype, "m") if is_masked else None
    function = partial(functional.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal)
    with sdpa_kernel(getattr(SDPBackend, backend.upper())):
        return with_gradients(function, *(unit((2, 2, length, 16), dtype, salt) for salt in "qkv"))


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x, need_weights=self.training)[0]
        return mixed


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")


def _encode(make: Callable[[], nn.Module], training: bool) -> Any:
    layer = module(make).train(training)
    tokens = unit((3, 9, 32))
    if training:
        return seeded(partial(with_gradients, parameters=layer.parameters()), layer, tokens)
    with torch.inference_mode():
        return layer(tokens).clone()


# ---- Norms and losses --------------------------------------------------------------------------------------------


def _affine(width: int, dtype: str) -> tuple[Tensor, Tensor]:
    return unit((width,), dtype, "w"), unit((width,), dtype, "b")


def _images(dtype: str) -> Tensor:
    return unit((3, 8, 9, 9), dtype)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.batch_norm(x, x.new_zeros(8), x.new_ones(8), weight, bias, training=True)


NORMS: ByDtype = {
    "layer_norm": lambda d: with_gradients(
        lambda x, w, b: functional.layer_norm(x, (100,), w, b), unit((33, 100), d), *_affine(100, d)
    ),
    "rms_norm": lambda d: with_gradients(lambda x: functional.rms_norm(x, (100,)), unit((33, 100), d)),
    "group_norm": lambda d: with_gradients(
        lambda x, w, b: functional.group_norm(x, 4, w, b), _images(d), *_affine(8, d)
    ),
    "batch_norm": lambda d: with_gradients(_batch_norm, _images(d), *_affine(8, d)),
    "batch_norm inference": lambda d: functional.batch_norm(_images(d), unit((8,), d), positive(d, 8), *_affine(8, d)),
    "instance_norm": lambda d: with_gradients(functional.instance_norm, _images(d)),
}
WIDE_NORMS: ByDtype = {
    "local_response_norm": lambda d: with_gradients(lambda x: functional.local_response_norm(x, 3), _images(d)),
}
PARAMETRIZATIONS = _words("weight_norm spectral_norm orthogonal")
_LABELS = torch.arange(33) * 7 % 17
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, y: functional.cross_entropy(x, _LABELS, label_smoothing=0.1),
    "nll_loss": lambda x, y: functional.nll_loss(x.log_softmax(-1), _LABELS),
    "kl_div": lambda x, y: functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "gaussian_nll_loss": lambda x, y: functional.gaussian_nll_loss(x, y, y.abs() + 0.1),
    "triplet_margin_loss": lambda x, y: functional.triplet_margin_loss(x, y, y.flip(0)),
    "cosine_embedding_loss": lambda x, y: functional.cosine_embedding_loss(x, y, x.new_ones(33)),
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "huber_loss": functional.huber_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "soft_margin_loss": functional.soft_margin_loss,
    "poisson_nll_loss": lambda x, y: functional.poisson_nll_loss(x, y.abs()),
}


def norms_and_losses(add: Add) -> None:
    """Norm layers and losses with their gradients."""
    _add_by_dtype(add, "norms", DTYPES, NORMS)
    _add_by_dtype(add, "norms", WIDE, WIDE_NORMS)
    for name in PARAMETRIZATIONS:
        add("norms", f"torch/float32/{name}", _parametrized, getattr(nn.utils.parametrizations, name))
    for dtype, (name, function) in itertools.product(DTYPES, LOSSES.items()):
        add("losses", f"torch/{dtype}/{name}", _loss, function, dtype)
    for dtype in WIDE:
        add("losses", f"torch/{dtype}/ctc_loss", _ctc_loss, dtype)


def _parametrized(parametrization: Callable[[nn.Module], nn.Module]) -> Any:
    return module(lambda: parametrization(nn.Linear(20, 20)))(unit((5, 20)))


def _loss(function: Callable[[Tensor, Tensor], Tensor], dtype: str) -> list[Tensor]:
    target = unit((33, 17), dtype, "y", 4.0)
    return with_gradients(lambda x: function(x, target), unit((33, 17), dtype, "x", 4.0))


def _ctc_loss(dtype: str) -> list[Tensor]:
    targets, lengths = torch.arange(12).view(3, 4) % 9 + 1, torch.tensor([20, 20, 20])
    logits = unit((20, 3, 11), dtype, "ctc", 3.0)
    return with_gradients(
        lambda x: functional.ctc_loss(x.log_softmax(-1), targets, lengths, torch.tensor([4, 4, 4])), logits
    )


# ---- Optimizers --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"lr": 1e-2, "centered": True},
    "LBFGS": {"lr": 0.1, "line_search_fn": "strong_wolfe"},
    **{name: {"lr": 1e-2} for name in ("Adam", "AdamW", "Adagrad", "Adafactor", "Muon")},
    **{name: {} for name in ("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")},
}
HAVE_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
HAVE_NO_FOREACH = ("LBFGS", "Muon")


def optimizers(add: Add) -> None:
    """Three steps of every optimizer, in each of its implementations."""
    group = "optimizers"
    for name, options in OPTIMIZERS.items():
        modes: list[dict[str, bool]] = [{}] if name in HAVE_NO_FOREACH else [{"foreach": False}, {"foreach": True}]
        if name in HAVE_FUSED:
            modes.append({"fused": True})
        dtypes = WIDE if name in HAVE_NO_FOREACH else (*WIDE, "bfloat16")
        for dtype, mode in itertools.product(dtypes, modes):
            shown = "".join(f" {key}" if value else f" no {key}" for key, value in mode.items())
            add(group, f"torch/{dtype}/optim.{name}{shown}", _optimize, name, dtype, {**options, **mode})
    for dtype in DTYPES:
        add(group, f"torch/{dtype}/clip_grad_norm_", _clip, dtype)
    add(group, "torch/float64/CosineAnnealingLR", _schedule)


def _optimize(name: str, dtype: str, options: dict[str, Any]) -> list[Tensor]:
    parameters = [nn.Parameter(unit((33, 17), dtype, "p"))]
    if name != "Muon":
        parameters.append(nn.Parameter(unit((17,), dtype, "q")))
    optimizer = getattr(torch.optim, name)(parameters, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([((p * 1.5) ** 2).sum() + (p**3).sum() for p in parameters]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [p.detach() for p in parameters]


def _clip(dtype: str) -> list[Tensor]:
    parameters = [nn.Parameter(unit((33, 17), dtype, "p")), nn.Parameter(unit((1701,), dtype, "q"))]
    for parameter in parameters:
        parameter.grad = parameter.detach() * 3
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    return [norm, *(p.grad for p in parameters if p.grad is not None)]


def _schedule() -> list[Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    rates = []
    for _ in range(50):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


# ---- Random numbers ----------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda t: t.uniform_(),
    "normal_ 7": lambda t: t[:7].normal_(),
    "normal_ 1001": lambda t: t.normal_(),
    "normal_ 992": lambda t: t[:992].normal_(),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli of a tensor": lambda t: torch.bernoulli(t.uniform_()),
    "exponential_": lambda t: t.exponential_(),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "geometric_": lambda t: t.geometric_(0.3),
    "dropout": lambda t: functional.dropout(torch.ones_like(t), 0.3),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t),
    "multinomial": lambda t: torch.multinomial(t.uniform_().add_(0.1), 50),
    "multinomial with replacement": lambda t: torch.multinomial(t.uniform_(), 50, replacement=True),
    "gumbel_softmax": lambda t: functional.gumbel_softmax(t.normal_()),
    "randint_like": lambda t: torch.randint_like(t, 100),
}
WIDE_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda z: torch.poisson(z * 20),
    "gamma": lambda z: torch._standard_gamma(z * 3),
    "dirichlet": lambda z: torch._sample_dirichlet(z * 3),
    "binomial": lambda z: torch.binomial(torch.full_like(z, 40), z.clamp(0, 1)),
    "orthogonal_": lambda z: nn.init.orthogonal_(z[:300].view(20, 15)),
    "kaiming_uniform_": lambda z: nn.init.kaiming_uniform_(z[:300].view(20, 15)),
    "xavier_normal_": lambda z: nn.init.xavier_normal_(z[:300].view(20, 15)),
    "randperm": lambda z: torch.randperm(1001),
}
DISTRIBUTIONS = _words("Normal Laplace Gumbel LogNormal Beta Gamma VonMises Kumaraswamy Weibull Cauchy")


def random_numbers(add: Add) -> None:
    """Every way to draw, from torch, NumPy and Python."""
    group = "random numbers"
    for dtype, (name, function) in itertools.product(DTYPES, DRAWS.items()):
        add(
            group,
            f"torch/{dtype}/random {name}",
            lambda f, d: seeded(f, torch.zeros(1001, dtype=d)),
            function,
            DTYPES[dtype],
        )
    for dtype, (name, function) in itertools.product(WIDE, WIDE_DRAWS.items()):
        add(group, f"torch/{dtype}/random {name}", lambda f, d: seeded(f, positive(d, 301) + 0.05), function, dtype)
    for dtype, name in itertools.product(WIDE, DISTRIBUTIONS):
        add(group, f"torch/{dtype}/random {name}", _distribution, name, dtype)
    add(group, "numpy/random RandomState", lambda: _numpy_draws(np.random.RandomState(7)))
    add(group, "numpy/random Generator", lambda: _numpy_draws(np.random.default_rng(7)))
    add(group, "math/random", _python_draws)


def _distribution(name: str, dtype: str) -> list[Tensor]:
    z = positive(dtype, 301) + 0.05
    distribution = getattr(torch.distributions, name)(z * 2, z)
    return [seeded(distribution.sample), distribution.log_prob(z * 0.9)]


def _numpy_draws(generator: Any) -> list[Any]:
    names = ("standard_normal", "standard_exponential", "standard_cauchy")
    return [
        *(getattr(generator, name)(999) for name in names),
        *(generator.gamma(2.0, 1.0, 99), generator.beta(0.5, 0.5, 99), generator.poisson(20.0, 99)),
        *(generator.permutation(99), generator.dirichlet([1, 2, 3], 20)),
        generator.multivariate_normal([0, 0], [[1, 0.3], [0.3, 1]], 20),
    ]


def _python_draws() -> list[float]:
    generator = random.Random(7)  # noqa: S311  # the generator under test
    draws = (generator.random, generator.gauss, generator.normalvariate, partial(generator.expovariate, 1.0))
    return [draw() for draw in draws for _ in range(99)] + [generator.betavariate(0.5, 0.5) for _ in range(99)]


# ---- FFT and linear algebra --------------------------------------------------------------------------------------

TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fft2": lambda x: torch.fft.fft2(x[:240].view(12, 20)),
    "stft": lambda x: torch.stft(x, 64, window=torch.hann_window(64, dtype=x.dtype), return_complex=True),
}
#: Of a square matrix and a positive definite one.
LINALG: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cholesky": lambda a, s: torch.linalg.cholesky(s),
    "qr": lambda a, s: torch.linalg.qr(a),
    "svd": lambda a, s: torch.linalg.svd(a),
    "svdvals": lambda a, s: torch.linalg.svdvals(a),
    "eigh": lambda a, s: torch.linalg.eigh(s),
    "eig": lambda a, s: torch.linalg.eig(a),
    "solve": lambda a, s: torch.linalg.solve(s, a),
    "inv": lambda a, s: torch.linalg.inv(s),
    "det, slogdet": lambda a, s: (torch.linalg.det(a), *torch.linalg.slogdet(a)),
    "lstsq gelsy": lambda a, s: torch.linalg.lstsq(s, a)[0],
    "lstsq gels": lambda a, s: torch.linalg.lstsq(s, a, driver="gels")[0],
    "lstsq gelsd": lambda a, s: torch.linalg.lstsq(s, a, driver="gelsd")[0],
    "matrix_exp": lambda a, s: torch.matrix_exp(a),
    "pinv": lambda a, s: torch.linalg.pinv(a),
    "lu": lambda a, s: torch.linalg.lu(a),
    "ldl": lambda a, s: torch.linalg.ldl_factor(s),
    "solve_triangular": lambda a, s: torch.linalg.solve_triangular(s.tril(), a, upper=False),
    "matrix_norm": lambda a, s: [torch.linalg.matrix_norm(a, order) for order in ("fro", "nuc", 2)],
    "cond": lambda a, s: torch.linalg.cond(s),
    "cholesky_solve": lambda a, s: torch.cholesky_solve(a, torch.linalg.cholesky(s)),
    "cholesky_inverse": lambda a, s: torch.cholesky_inverse(torch.linalg.cholesky(s)),
    "geqrf, ormqr": lambda a, s: torch.ormqr(*torch.geqrf(a), s),
}
BATCHED = _words("cholesky inv svdvals qr eigh")


def fft_and_linear_algebra(add: Add) -> None:
    """Transforms of smooth and prime lengths, and LAPACK's decompositions."""
    for dtype in WIDE:
        for n in (8, 100, 127, 1000, 1024):
            add("FFT", f"torch/{dtype}/fft {n}", _transforms, n, dtype)
        for name, transform in TRANSFORMS.items():
            add("FFT", f"torch/{dtype}/{name}", lambda f, d: f(unit((1000,), d)), transform, dtype)
        for name, n in itertools.product(LINALG, (2, 5, 20, 65)):
            add("linear algebra", f"torch/{dtype}/linalg.{name} {n}", _linalg, LINALG[name], (n, n), dtype)
        for name in BATCHED:
            add("linear algebra", f"torch/{dtype}/linalg.{name} batch", _linalg, LINALG[name], (50, 4, 4), dtype)


def _transforms(n: int, dtype: str) -> list[Tensor]:
    signal, spectrum = unit((3, n), dtype), complex_unit((3, n), dtype)
    return [torch.fft.fft(signal), torch.fft.rfft(signal), torch.fft.irfft(spectrum, n), torch.fft.ifft(spectrum)]


def _linalg(function: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...], dtype: str) -> Any:
    square = unit(shape, dtype)
    return function(square, square @ square.mT + shape[-1] * torch.eye(shape[-1], dtype=DTYPES[dtype]))


# ---- Layers, conversions, narrow integers ------------------------------------------------------------------------

_TOKENS = torch.arange(500) * 7919 % 31
_BAGS = _TOKENS.view(50, 10)
LAYERS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "embedding": (lambda w: functional.embedding(_TOKENS, w), (31, 16)),
    "embedding_bag sum": (lambda w: functional.embedding_bag(_BAGS, w, mode="sum"), (31, 16)),
    "embedding_bag mean": (lambda w: functional.embedding_bag(_BAGS, w, mode="mean"), (31, 16)),
    "embedding_bag max": (lambda w: functional.embedding_bag(_BAGS, w, mode="max"), (31, 16)),
    "interpolate bilinear": (lambda x: functional.interpolate(x, (13, 17), mode="bilinear"), (2, 3, 9, 9)),
    "interpolate bicubic": (lambda x: functional.interpolate(x, (13, 17), mode="bicubic"), (2, 3, 9, 9)),
    "interpolate nearest": (lambda x: functional.interpolate(x, (13, 17), mode="nearest"), (2, 3, 9, 9)),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 2), (2, 3, 13, 13)),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 3, 2), (2, 3, 13, 13)),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, 4), (2, 3, 13, 13)),
    "lp_pool2d": (lambda x: functional.lp_pool2d(x.abs() + 0.1, 2.0, 3), (2, 3, 13, 13)),
    "unfold, fold": (lambda x: functional.fold(functional.unfold(x, 3), (9, 9), 3), (2, 3, 9, 9)),
}
RESAMPLING: ByDtype = {
    "interpolate bilinear antialias": lambda d: functional.interpolate(
        unit((2, 3, 19, 19), d), (7, 8), mode="bilinear", antialias=True
    ),
    "interpolate bicubic antialias": lambda d: functional.interpolate(
        unit((2, 3, 19, 19), d), (7, 8), mode="bicubic", antialias=True
    ),
    "grid_sample": lambda d: with_gradients(
        partial(functional.grid_sample, align_corners=False), unit((2, 3, 9, 9), d), unit((2, 7, 7, 2), d)
    ),
}
NARROW: dict[str, Callable[[], Any]] = {
    "torch/uint8/interpolate": lambda: functional.interpolate(
        (unit((1, 3, 64, 64)) * 255).abs().byte(), (31, 29), mode="bilinear", antialias=True
    ),
    "torch/float8_e4m3fn/conversions": lambda: unit((2001,), scale=300.0).to(torch.float8_e4m3fn).float(),
    "torch/float8_e5m2/conversions": lambda: unit((2001,), scale=300.0).to(torch.float8_e5m2).float(),
    "torch/qint8/dynamic quantized linear": lambda: _quantized_linear(),
    "torch/qint8/quantize_per_tensor": lambda: torch.quantize_per_tensor(
        unit((1001,), scale=4.0), 0.03, 2, torch.qint8
    ).int_repr(),
    "torch/float32/fake_quantize": lambda: torch.fake_quantize_per_tensor_affine(
        unit((1001,), scale=4.0), 0.03, 2, -128, 127
    ),
    "torch/int8/_int_mm": lambda: torch._int_mm((unit((32, 64)) * 127).char(), (unit((64, 16)) * 127).char()),
    "torch/int64/matmul": lambda: torch.arange(2145).view(33, 65) @ torch.arange(1105).view(65, 17),
    "torch/bfloat16/autocast": lambda: _autocast(),
}


def layers(add: Add) -> None:
    """Recurrent layers, embeddings, resampling, pooling, conversions, integer arithmetic, autocast."""
    group = "layers and conversions"
    for dtype in (*WIDE, "bfloat16"):
        for name, training in itertools.product(("LSTM", "GRU", "RNN"), (True, False)):
            mode = "training" if training else "inference"
            add(group, f"torch/{dtype}/{name} {mode}", _recurrent, getattr(nn, name), dtype, training)
        for name, (function, shape) in LAYERS.items():
            add(group, f"torch/{dtype}/{name}", lambda f, s, d: with_gradients(f, unit(s, d)), function, shape, dtype)
    _add_by_dtype(add, group, WIDE, RESAMPLING)
    for source, target in itertools.permutations(DTYPES, 2):
        add(group, f"torch/{source}/to {target}", lambda s, t: everything(s).to(DTYPES[t]), source, target)
    for name, run in NARROW.items():
        add(group, name, run)


def _recurrent(cls: Any, dtype: str, training: bool) -> Any:
    layer = module(lambda: cls(10, 20, num_layers=2, bidirectional=not training), dtype).train(training)
    if training:
        return with_gradients(lambda x: layer(x)[0], unit((3, 7, 10), dtype), parameters=layer.parameters())
    with torch.no_grad():
        return layer(unit((3, 7, 10), dtype))[0]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 10))


def _quantized_linear() -> Any:
    model = module(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, {nn.Linear}, dtype=torch.qint8)(unit((5, 64), scale=3.0))


def _autocast() -> list[Tensor]:
    model = module(_mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return with_gradients(model, unit((16, 64)), parameters=model.parameters())


# ---- NumPy and Python --------------------------------------------------------------------------------------------

NUMPY_UNARY = _words(
    "sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh "
    "arctanh reciprocal square rint floor"
)
NUMPY_BINARY = _words("power arctan2 hypot logaddexp fmod multiply divide add")


def numpy_functions(add: Add) -> None:
    """NumPy's functions, products (OpenBLAS), decompositions and transforms."""
    group = "NumPy"
    for dtype in (*WIDE, "float16"):
        for name in NUMPY_UNARY:
            add(group, f"numpy/{dtype}/{name}", _numpy_unary, getattr(np, name), dtype)
        for name in NUMPY_BINARY:
            add(group, f"numpy/{dtype}/{name}", _numpy_binary, getattr(np, name), dtype)
        add(group, f"numpy/{dtype}/sum, mean, std", lambda d: _numpy_sums(unit((37, 1031), d).numpy()), dtype)
    for dtype in WIDE:
        for n in (2, 7, 33, 100, 257):
            add(group, f"numpy/{dtype}/matmul {n}", lambda n, d: _numpy_products(unit((n, n), d).numpy()), n, dtype)
        for n in (5, 33, 65):
            add(group, f"numpy/{dtype}/linalg {n}", lambda n, d: _numpy_linalg(unit((n, n), d).numpy()), n, dtype)
        for n in (8, 100, 127, 1024):
            add(group, f"numpy/{dtype}/fft {n}", lambda n, d: np.fft.fft(unit((3, n), d).numpy()), n, dtype)
    for name in ("exp", "log", "sin", "arctan"):
        add(group, f"numpy/longdouble/{name}", _long_double, getattr(np, name))


def _numpy_unary(function: Callable[..., Any], dtype: str) -> Any:
    with np.errstate(all="ignore"):
        return function(everything(dtype).numpy())


def _numpy_binary(function: Callable[..., Any], dtype: str) -> Any:
    values = everything(dtype).numpy()
    with np.errstate(all="ignore"):
        return function(values, values[::-1])


def _numpy_sums(a: NDArray[Any]) -> list[Any]:
    return [a.sum(), a.sum(0), a.mean(1), a.std(1), a.var(), np.cumsum(a)]


def _numpy_products(a: NDArray[Any]) -> list[Any]:
    return [a @ a, a @ a.T, a @ a[0], a[0].dot(a[1]), np.einsum("ij,kj->ik", a, a)]


def _numpy_linalg(a: NDArray[Any]) -> list[Any]:
    linalg = np.linalg
    definite = a @ a.T + len(a) * np.eye(len(a), dtype=a.dtype)
    return [
        *(*linalg.svd(a), *linalg.qr(a), *linalg.eigh(definite), *linalg.eig(a), linalg.cholesky(definite)),
        *(linalg.solve(definite, a), linalg.inv(definite), linalg.det(a), linalg.norm(a), linalg.pinv(a)),
        linalg.lstsq(definite, a, rcond=None)[0],
    ]


def _long_double(function: Callable[..., Any]) -> list[str]:
    # A long double has ten bytes of value and six of padding; 21 digits tell all of its values apart.
    values = positive("float64", 200).numpy().astype(np.longdouble)
    return [np.format_float_scientific(value, precision=20, unique=False) for value in function(values)]


MATH_UNARY = _words(
    "sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "erfc gamma lgamma"
)
MATH_BINARY = _words("atan2 hypot fmod pow")


def python_math(add: Add) -> None:
    """Python's ``math`` and ``cmath``: the C library's scalar functions."""
    group = "Python math"
    ordinary = usual("float64", 300).tolist()
    first, second = unit((600,), "float64", "a", 5.0).tolist(), unit((600,), "float64", "b", 5.0).tolist()
    for name in MATH_UNARY:
        add(group, f"math/{name}", _math, getattr(math, name), ordinary)
    for name in MATH_BINARY:
        add(group, f"math/{name}", _math, getattr(math, name), [abs(x) for x in first], second)
    add(group, "math/sums", lambda: [math.fsum(first), sum(first), math.dist(first, second)])
    for name in ("exp", "log", "sqrt", "sin", "tanh", "atan"):
        add(group, f"math/cmath.{name}", _math, getattr(cmath, name), list(map(complex, first, second)))


def _math(function: Callable[..., Any], *arguments: list[Any]) -> list[Any]:
    results = []
    for values in zip(*arguments, strict=True):
        try:
            results.append(function(*values))
        except (ValueError, OverflowError):
            results.append(math.nan)
    return results


# ---- Training steps ----------------------------------------------------------------------------------------------


def training_steps(add: Add) -> None:
    """Whole steps: dropout, loss, gradients, clipping, AdamW."""
    group = "training steps"
    for dtype in DTYPES:
        add(group, f"train/{dtype}/mlp AdamW", _train, _mlp, dtype, (64, 64), False)
    add(group, "train/float32/cnn AdamW fused", _train, _cnn, "float32", (16, 1, 8, 8), True)
    for dtype in ("bfloat16", "float16"):
        add(group, f"train/{dtype}/diffusion transformer, float32 master", _train_mixed, dtype)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)),
    )


def _train(make: Callable[[], nn.Module], dtype: str, shape: tuple[int, ...], is_fused: bool) -> list[Tensor]:
    model = module(make, dtype)
    # The default epsilon is zero in float16, and zero over zero would end the run.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=is_fused)
    labels = torch.arange(shape[0]) % 10
    logged = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(unit(shape, dtype)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logged += [loss.detach(), norm]
    return [*logged, *(p.detach() for p in model.parameters())]


def _train_mixed(dtype: str) -> list[Any]:
    """Return losses, squared gradients, loss scales and weights; in float16 the first steps overflow."""
    from e2e_registry.determinism.attention import patch_flash_kernels, register_native_kernel
    from e2e_registry.recipes.small_dit import ATTENTION_KERNELS

    for kernel in ATTENTION_KERNELS:
        register_native_kernel(kernel.module, kernel.attribute)
    with patch_flash_kernels(()):
        return _mixed_steps(dtype)


def _mixed_steps(dtype: str) -> list[Any]:
    from e2e_registry.recipes.small_dit.model import SmallDiT

    model = module(SmallDiT)
    for index, parameter in enumerate(model.parameters()):  # the last layers start as zero, which hides the others
        parameter.data += unit(tuple(parameter.shape), salt=str(index), scale=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2, enabled=dtype == "float16")
    latents, target, sigma = unit((16, 4, 4, 4)), unit((16, 4, 4, 4), salt="target"), positive("float32", 16)
    logged: list[Any] = []
    for _ in range(8):
        optimizer.zero_grad()
        weights = {name: parameter.to(DTYPES[dtype]) for name, parameter in model.named_parameters()}
        velocity = torch.func.functional_call(model, weights, (latents, sigma, torch.arange(16) % 10))
        loss = (velocity - target).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        logged += [loss.detach(), *squares, scaler.get_scale()]
        scaler.step(optimizer)
        scaler.update()
    return [*logged, *(p.detach() for p in model.parameters())]


SECTIONS: tuple[Callable[[Add], None], ...] = (
    *(elementwise, several_tensors, reductions, matrix_products, convolutions, attention, norms_and_losses),
    *(optimizers, random_numbers, fft_and_linear_algebra, layers, numpy_functions, python_math, training_steps),
)
