"""Portable forms of the torch CPU operators whose bits differ between x86-64 CPUs even under ``cpu-portable``.

The profile's pins choose one code path on every CPU, but a few of those paths begin with ``rcpps`` or
``rsqrtps``. These instructions return an approximation of a reciprocal (or reciprocal square root) for which the
architecture only bounds the error: AMD's and Intel's differ in their low bits, and the Newton steps that follow do
not always hide it. Under ``MKL_CBWR=COMPATIBLE`` MKL takes such paths for the functions below. A disassembly of
torch's libraries finds the instructions in no other baseline code but MKL's sparse triangular solvers, and a trace
finds that torch's sparse operators do not run those. What differs for other reasons is in
:data:`UNREMEDIED_OPERATORS`.

:func:`enable_portable_operators` replaces the kernels of these operators for the CPU. The replacement stands below
autograd and below ``torch._foreach_*``, so derivatives, ``out=`` and in-place forms, and optimizers go through it.
It computes with NumPy, whose ``sqrt`` is the correctly rounded instruction and whose other functions are the C
library's once the profile's ``NPY_DISABLE_CPU_FEATURES`` and ``GLIBC_TUNABLES`` hold; without these pins the bits
still depend on the CPU. ``scripts/verify_portable.py`` measures all of it.

The cost, on one thread of an AMD EPYC: about 4 microseconds a call; per element nothing for ``sqrt`` and
``linalg.cholesky``, 2 to 3.5 times as long for the other functions of float64 and 4 to 9 times for float32. A step of
foreach AdamW over 0.8 million parameters took 2 % longer.

Float16 and bfloat16 (computed in float32 by torch's own kernels) and complex tensors keep torch's kernels, which
are portable under the pins. Facts were checked with torch 2.13.0 (MKL 2024.2), NumPy 2.4 and glibc 2.36.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class PortableOperator:
    """An operator that :func:`enable_portable_operators` replaces.

    Attributes:
        name: The operator in ``torch.ops.aten``.
        dtypes: The dtypes of the computation that are replaced; the others keep torch's kernel.
        formulation: How the value is computed.
        error: The stated bound of the rounding error, for people.
        ulp: The bound in units in the last place, a number a dtype; empty where the bound is no such number.
        covers: Operators that reach it other than by its own name.
    """

    name: str
    dtypes: tuple[str, ...]
    formulation: str
    error: str
    ulp: tuple[float, ...] = ()
    covers: str = ""


@dataclass(frozen=True, slots=True)
class UnremediedOperator:
    """An operator whose bits differ between CPUs, or between runs, and that nothing here changes.

    Attributes:
        name: What users call.
        why: Where the difference comes from.
        instead: What to use for equal bits.
        probes: Glob patterns of the probes in ``scripts/verify_portable.py`` that may be unequal for this reason.
    """

    name: str
    why: str
    instead: str
    probes: tuple[str, ...] = ()


#: ULPs of a function that is evaluated in float64 within one ULP and rounded once to float32: 0.5 + 2**-28, rounded up.
_ROUNDED_ONCE = 0.5000001


def _from_libm(name: str, numpy_name: str, ulp: float = 1.0) -> PortableOperator:
    return PortableOperator(
        name,
        _FLOATS,
        f"float64: numpy.{numpy_name}, which is the C library's; float32: the same in float64, rounded once",
        f"float32: {_ROUNDED_ONCE} ULP; float64: {ulp:g} ULP",
        (_ROUNDED_ONCE, ulp),
    )


#: The bounds of float64 are those of the glibc manual, "Known Maximum Errors in Math Functions", for x86-64.
PORTABLE_OPERATORS: tuple[PortableOperator, ...] = (
    PortableOperator(
        *("sqrt", _FLOATS, "numpy.sqrt, the correctly rounded instruction", "0.5 ULP (correctly rounded)", (0.5, 0.5)),
        covers="cdist with p=2; Adam, AdamW, Adagrad, RMSprop, Adadelta, NAdam and Adamax, unless fused",
    ),
    PortableOperator(
        *("pow", _FLOATS, "exponent 0.5: numpy.sqrt; other exponents: torch's kernel", "0.5 ULP for exponent 0.5"),
        (0.5, 0.5),
        covers="x ** 0.5, lp_pool2d",
    ),
    _from_libm("acos", "arccos"),
    _from_libm("asin", "arcsin"),
    _from_libm("atan", "arctan"),
    _from_libm("tan", "tan"),
    _from_libm("log2", "log2"),
    _from_libm("log10", "log10", 2.0),
    PortableOperator(
        *("log", ("float64",), "numpy.log, which is the C library's; float32: torch's kernel", "1 ULP", (1.0,)),
        covers="logsumexp, torch.distributions",
    ),
    PortableOperator(
        *("logit", ("float64",), "numpy.log(x / (1 - x)) after torch's clamp; float32: torch's kernel"),
        "the logarithm: 1 ULP, of a quotient that carries two roundings (as torch's does)",
    ),
    PortableOperator(
        *("linalg_cholesky_ex", ("float32",), "torch's kernel in float64, rounded once; float64: torch's kernel"),
        "that of float64 Cholesky, and 0.5 ULP for each element; a matrix too close to singular for float32 may pass",
        covers="torch.linalg.cholesky, torch.distributions.MultivariateNormal",
    ),
    PortableOperator(
        *("cholesky", ("float32",), "torch's kernel in float64, rounded once; float64: torch's kernel"),
        "as linalg_cholesky_ex",
    ),
)

UNREMEDIED_OPERATORS: tuple[UnremediedOperator, ...] = (
    UnremediedOperator(
        "torch.linalg.lstsq with its default driver, gelsy",
        "torch hands LAPACK uninitialised memory as the list of pinned columns: results differ from call to call, on "
        "one CPU too (pytorch/pytorch#187411)",
        "driver='gels' or 'gelsd'",
        ("torch/*/linalg.lstsq gelsy *",),
    ),
    UnremediedOperator(
        "int8 products and quantized operators (torch.ao.quantization, torch._int_mm)",
        "FBGEMM and oneDNN choose kernels by the CPU, whatever the pins say, and the older kernels saturate where the "
        "newer ones do not; without AVX2 they raise SIGILL",
        "dequantized products",
        ("torch/qint8/*", "torch/int8/_int_mm"),
    ),
    UnremediedOperator(
        "torch.compile",
        "generated code is compiled for the CPU at hand and calls none of these kernels",
        "eager mode",
    ),
    UnremediedOperator(
        "numpy.longdouble, and C's long double functions",
        "x87 transcendental instructions (fpatan, fyl2x, f2xm1) differ between vendors",
        "float64",
        ("numpy/longdouble/*",),
    ),
)


class PortableOperators:
    """The handle of the replaced kernels; a context manager that disables them at its end."""

    def __init__(self) -> None:
        self._library: Any = None
        self._nnpack: bool | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether the replacements are in force."""
        return self._library is not None

    def enable(self) -> None:
        """Put the replacements in force; nothing happens if they are."""
        import torch

        with _LOCK:
            if self._library is not None:
                return
            # NNPACK runs where oneDNN is off and the CPU has AVX2; elsewhere torch's own convolution does.
            self._nnpack = bool(torch.backends.nnpack.set_flags(False)[0])  # type: ignore[no-untyped-call]
            self._library = _register(torch)

    def disable(self) -> None:
        """Give torch its own kernels back; nothing happens if it has them."""
        import torch

        with _LOCK:
            if self._library is None:
                return
            self._library._destroy()
            self._library = None
            torch.backends.nnpack.set_flags(self._nnpack)  # type: ignore[no-untyped-call]

    def __enter__(self) -> PortableOperators:
        """Return the handle; the kernels are replaced already."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Disable the replacements."""
        self.disable()


_LOCK = threading.Lock()
_HANDLE = PortableOperators()


def enable_portable_operators() -> PortableOperators:
    """Replace torch's CPU kernels of :data:`PORTABLE_OPERATORS` in this process, and keep convolutions off NNPACK.

    Idempotent: there is one handle a process. Each process of a run has to call it (Ray actors, ranks, ``DataLoader``
    workers that are spawned rather than forked). NaN, infinities, signed zeros, subnormals and domain errors come
    out as torch's kernels give them, except that the payload of a NaN may differ. ``torch.compile`` does not see it.

    Returns:
        The handle; its ``disable()`` undoes everything.
    """
    _HANDLE.enable()
    return _HANDLE


def portable_operators_are_enabled() -> bool:
    """Whether :func:`enable_portable_operators` is in force in this process; imports nothing."""
    return _HANDLE.is_enabled


Kernel = Callable[..., Any]


def _register(torch: Any) -> Any:
    """Register every replacement for the CPU and return the library object that owns the registrations."""
    library = torch.library.Library("aten", "IMPL")
    with _without_override_warning():
        for operator in PORTABLE_OPERATORS:
            for overload, kernel in _KERNELS.get(operator.name, _unary_kernels)(torch, operator).items():
                library.impl(overload, kernel, "CPU", with_keyset=True)
    return library


@contextmanager
def _without_override_warning() -> Iterator[None]:
    """Silence torch's warning that a kernel is replaced, which is the purpose here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        yield


def _original(torch: Any, overload: str) -> Any:
    return torch.library.get_kernel(f"aten::{overload}", "CPU")


def _overloads(torch: Any, names: tuple[str, str, str], replacement: Callable[..., Tensor | None]) -> dict[str, Kernel]:
    """Return the kernels of an operator's functional, in-place and ``out=`` overloads.

    Args:
        torch: The module.
        names: The three overloads, in that order.
        replacement: Takes the operator's arguments; returns the result as a new tensor, or None to leave the call
            to torch's kernel.
    """
    functional, in_place, out_of_place = (_original(torch, name) for name in names)

    def call(keys: Any, x: Tensor, *args: Any) -> Any:
        result = replacement(x, *args)
        return functional.call_boxed(keys, x, *args) if result is None else result

    def call_in_place(keys: Any, x: Tensor, *args: Any) -> Any:
        # A tensor of integers cannot hold the result: torch's kernel raises.
        result = replacement(x, *args) if x.is_floating_point() else None
        return in_place.call_boxed(keys, x, *args) if result is None else x.copy_(result)

    def call_out(keys: Any, x: Tensor, *args: Any, out: Tensor) -> Any:
        result = replacement(x, *args)
        # Torch's kernel runs first because it alone knows what `out` may be, and resizes it.
        out_of_place.call_boxed(keys, x, *args, out=out)
        return out if result is None else out.copy_(result)

    return dict(zip(names, (call, call_in_place, call_out), strict=True))


def _elementwise(torch: Any, dtypes: tuple[str, ...], function: Kernel) -> Callable[[Tensor], Tensor | None]:
    """Return a replacement that applies ``function(values, out)`` to NumPy views of tensors of ``dtypes``.

    Integers and booleans are taken in the default dtype, as torch's kernels take them.
    """
    import numpy as np

    replaced = frozenset(getattr(torch, name) for name in dtypes)

    def replacement(x: Tensor) -> Tensor | None:
        if not x.is_floating_point() and not x.is_complex():
            x = x.to(torch.get_default_dtype())
        if x.dtype not in replaced:
            return None
        result: Tensor = torch.empty_like(x)
        with np.errstate(all="ignore"):
            function(x.detach().numpy(), result.numpy())
        return result

    return replacement


def _numpy_function(name: str) -> Kernel:
    """Return ``function(values, out)``: correctly rounded ``sqrt``, or a function evaluated in float64."""
    import numpy as np

    ufunc = getattr(np, name)
    if name == "sqrt":
        return lambda values, out: ufunc(values, out=out)
    return lambda values, out: ufunc(values, out=out, dtype=np.float64, casting="same_kind")


_NUMPY_NAMES = {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}


def _unary_kernels(torch: Any, operator: PortableOperator) -> dict[str, Kernel]:
    name = operator.name
    function = _numpy_function(_NUMPY_NAMES.get(name, name))
    return _overloads(torch, (name, f"{name}_", f"{name}.out"), _elementwise(torch, operator.dtypes, function))


def _pow_kernels(torch: Any, operator: PortableOperator) -> dict[str, Kernel]:
    # torch.pow calls the sqrt kernel for this exponent without asking the dispatcher for sqrt.
    square_root = _elementwise(torch, operator.dtypes, _numpy_function("sqrt"))

    def replacement(x: Tensor, exponent: Any) -> Tensor | None:
        return square_root(x) if exponent == 0.5 else None

    return _overloads(torch, ("pow.Tensor_Scalar", "pow_.Scalar", "pow.Tensor_Scalar_out"), replacement)


def _logit_kernels(torch: Any, operator: PortableOperator) -> dict[str, Kernel]:
    logarithm = _elementwise(torch, operator.dtypes, _numpy_function("log"))

    def replacement(x: Tensor, eps: float | None = None) -> Tensor | None:
        if not x.is_floating_point() and not x.is_complex():
            x = x.to(torch.get_default_dtype())
        if x.dtype is not torch.float64:
            return None
        x = x.detach()
        if eps is not None:
            x = x.clamp(eps, 1 - eps)
        return logarithm(x / (1 - x))

    return _overloads(torch, ("logit", "logit_", "logit.out"), replacement)


def _cholesky_ex_kernels(torch: Any, operator: PortableOperator) -> dict[str, Kernel]:
    functional, out_of_place = _original(torch, "linalg_cholesky_ex"), _original(torch, "linalg_cholesky_ex.L")

    def call(keys: Any, x: Tensor, **options: Any) -> Any:
        if x.dtype is not torch.float32:
            return functional.call_boxed(keys, x, **options)
        factor, info = functional.call_boxed(keys, x.detach().double(), **options)
        return factor.float(), info

    def call_out(keys: Any, x: Tensor, *, L: Tensor, info: Tensor, **options: Any) -> Any:  # noqa: N803  # its schema
        if x.dtype is not torch.float32:
            return out_of_place.call_boxed(keys, x, L=L, info=info, **options)
        factor, status = call(keys, x, **options)
        out_of_place.call_boxed(keys, x, L=L, info=info, **{**options, "check_errors": False})
        return L.copy_(factor), info.copy_(status)

    return {"linalg_cholesky_ex": call, "linalg_cholesky_ex.L": call_out}


def _cholesky_kernels(torch: Any, operator: PortableOperator) -> dict[str, Kernel]:
    functional, out_of_place = _original(torch, "cholesky"), _original(torch, "cholesky.out")

    def call(keys: Any, x: Tensor, *args: Any) -> Any:
        if x.dtype is not torch.float32:
            return functional.call_boxed(keys, x, *args)
        return functional.call_boxed(keys, x.detach().double(), *args).float()

    def call_out(keys: Any, x: Tensor, *args: Any, out: Tensor) -> Any:
        if x.dtype is not torch.float32:
            return out_of_place.call_boxed(keys, x, *args, out=out)
        factor = call(keys, x, *args)
        return out.resize_(factor.shape).copy_(factor)

    return {"cholesky": call, "cholesky.out": call_out}


_KERNELS: dict[str, Callable[[Any, PortableOperator], dict[str, Kernel]]] = {
    "pow": _pow_kernels,
    "logit": _logit_kernels,
    "linalg_cholesky_ex": _cholesky_ex_kernels,
    "cholesky": _cholesky_kernels,
}
