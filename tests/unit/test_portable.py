"""Portable operators: every form of them replaced, like torch in what they accept, within the stated error."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from e2e_registry.determinism import portable
from e2e_registry.determinism.portable import (
    PORTABLE_OPERATORS,
    UNREMEDIED_OPERATORS,
    enable_portable_operators,
    portable_operators_are_enabled,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
WIDE = (torch.float32, torch.float64)
UNARY = {o.name: o for o in PORTABLE_OPERATORS if o.ulp and o.name != "pow"}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 8.0, 1e-40, -1e-40, 5e-324, 3e38, 1e308, -7.0, math.inf, -math.inf, math.nan)


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    enable_portable_operators()
    yield
    enable_portable_operators().disable()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def torchs_own(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or what it raises, with torch's kernels in place."""
    enable_portable_operators().disable()
    try:
        return call()
    except RuntimeError as error:
        return str(error)
    finally:
        enable_portable_operators()


# ---- Values


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*UNARY, "logit"])
def test_special_values_come_out_as_torch_gives_them(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    function = getattr(torch, name)
    got, want = function(x), torchs_own(lambda: function(x))
    assert got.dtype == dtype
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    finite = want.isfinite()
    torch.testing.assert_close(got[finite], want[finite], rtol=4 * torch.finfo(dtype).eps, atol=0.0)


def test_logit_clamps_as_torch_does() -> None:
    x = torch.tensor([-1.0, 0.0, 0.05, 0.3, 1.0, 2.0, math.nan], dtype=torch.float64)
    for eps in (None, 0.0, 0.1):
        torch.testing.assert_close(torch.logit(x, eps), torchs_own(lambda eps=eps: torch.logit(x, eps)), equal_nan=True)


def ulps(got: float, exact: Any, dtype: torch.dtype) -> Any:
    """Return the distance of ``got`` from the exact value in units in the last place of ``dtype`` there."""
    digits, smallest = (24, -126) if dtype == torch.float32 else (53, -1022)
    exponent = max(mpmath.frexp(exact)[1] - 1, smallest)
    return abs(mpmath.mpf(got) - exact) / mpmath.ldexp(1, exponent - digits + 1)


@pytest.mark.parametrize("name", UNARY)
@given(data=st.data())
@settings(max_examples=80)
def test_the_error_stays_within_the_stated_bound(name: str, data: st.DataObject) -> None:
    operator, exactly = UNARY[name], getattr(mpmath, name, None) or (lambda x: mpmath.log(x, int(name[3:])))
    limits = {"acos": (-1.0, 1.0), "asin": (-1.0, 1.0), "atan": (None, None), "tan": (None, None)}
    low, high = limits.get(name, (0.0, None))
    for dtype_name, bound in zip(operator.dtypes, operator.ulp, strict=True):
        dtype, width = getattr(torch, dtype_name), int(dtype_name[-2:])
        values = st.floats(low, high, width=width, allow_nan=False, allow_infinity=False, exclude_min=low == 0.0)
        x = data.draw(values)
        got = getattr(torch, name)(torch.tensor([x], dtype=dtype)).item()
        with mpmath.workprec(1300):  # the reduction of the largest float64 by pi takes 1100 bits
            exact = exactly(mpmath.mpf(x))
            assert got == 0 if exact == 0 else ulps(got, exact, dtype) <= bound


def test_square_roots_are_correctly_rounded_and_powers_of_two_have_whole_logarithms() -> None:
    squares = torch.arange(1, 4096, dtype=torch.float32)
    assert torch.equal(torch.sqrt(squares**2), squares)
    exponents = torch.arange(-149, 128)
    assert torch.equal(torch.log2(torch.ldexp(torch.ones(277), exponents)), exponents.float())
    assert torch.equal(torch.log10(10.0 ** torch.arange(0, 11)), torch.arange(0, 11).float())


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
def test_other_dtypes_keep_torchs_kernel(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(0.01, 0.99, 301, dtype=torch.float64).to(dtype)
    assert bits(getattr(torch, name)(x)) == bits(torchs_own(lambda: getattr(torch, name)(x)))


# ---- Routing: with a constant in place of the computation, whoever returns the constant was replaced


@pytest.fixture
def constant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    def use(value: float) -> None:
        enable_portable_operators().disable()
        monkeypatch.setattr(portable, "_numpy_function", lambda name: lambda values, out: out.fill(value))
        enable_portable_operators()

    use(7.0)
    yield use
    enable_portable_operators().disable()


ALIASES = {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}


def forms(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the results of every form of a unary operator."""
    function, in_place = getattr(torch, name), getattr(Tensor, f"{name}_")
    foreach, foreach_in_place = getattr(torch, f"_foreach_{name}", None), getattr(torch, f"_foreach_{name}_", None)
    results = {
        "function": function(x),
        "method": getattr(x, name)(),
        "in place": in_place(x.clone()),
        "in place, strided": in_place(x.repeat(2).clone()[::2]),
        "out": function(x, out=torch.empty_like(x)),
        "out, resized": function(x, out=torch.empty(0, dtype=x.dtype)),
        "out, wider": function(x, out=torch.empty(len(x), dtype=torch.float64)),
        "alias": getattr(torch, ALIASES.get(name, name))(x),
        "under vmap": torch.func.vmap(function)(x),
        "with a gradient": function(x.clone().requires_grad_()),
        "values of a sparse tensor": function(x.to_sparse()).coalesce().values()
        if name in ("sqrt", "tan")
        else x * 0 + 7,
    }
    if foreach is not None:
        operand = [x.clone()]
        foreach_in_place(operand)
        results |= {"foreach": foreach([x])[0], "foreach in place": operand[0]}
    return results


@pytest.mark.parametrize(("name", "dtype"), [(o.name, d) for o in UNARY.values() for d in o.dtypes])
def test_every_form_of_an_operator_is_replaced(name: str, dtype: str, constant: object) -> None:
    x = torch.tensor([0.25, 0.5, 0.75], dtype=getattr(torch, dtype))
    assert {form: got.tolist() for form, got in forms(name, x).items()} == dict.fromkeys(forms(name, x), [7.0] * 3)


def _cdist(x: Tensor) -> Tensor:
    # The other mode takes the square root in a kernel of its own, with the processor's instruction.
    return torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")


@pytest.mark.parametrize("dtype", WIDE)
def test_operators_that_bypass_the_dispatcher_are_replaced(dtype: torch.dtype, constant: object) -> None:
    x = torch.tensor([0.25, 0.5, 0.75], dtype=dtype)
    results = [
        *(x**0.5, x.pow(0.5), x.clone().pow_(0.5), torch.pow(x, 0.5, out=torch.empty_like(x))),
        *(torch.float_power(x, 0.5), *torch._foreach_pow([x], 0.5), _cdist(x[:, None])[0]),
    ]
    if dtype == torch.float64:
        results += [torch.logit(x), x.clone().logit_(), torch.logit(x, 0.1), torch.special.logit(x)]
        results += [torch.logit(x, out=torch.empty_like(x)), torch.logsumexp(x.expand(3, 3), 1) - x.max()]
    assert [got.tolist() for got in results] == [[7.0] * 3] * len(results)
    assert bits(x**2) == bits(torchs_own(lambda: x**2))
    assert bits(x**-0.5) == bits(torchs_own(lambda: x**-0.5))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_go_through_the_replaced_square_root(
    name: str, foreach: bool, constant: Callable[[float], None]
) -> None:
    def step() -> bytes:
        parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
        parameter.grad = torch.tensor([0.5, -0.25])
        getattr(torch.optim, name)([parameter], foreach=foreach).step()
        return bits(parameter)

    seven = step()
    constant(9.0)
    assert step() != seven


def test_integers_are_taken_in_the_default_dtype(constant: object) -> None:
    for default in WIDE:
        torch.set_default_dtype(default)
        try:
            for x in (torch.tensor([1, 4]), torch.tensor([True, False])):
                got = [torch.sqrt(x), x**0.5, torch.sqrt(x, out=torch.empty(2, dtype=torch.float64))]
                assert [g.tolist() for g in got] == [[7.0, 7.0]] * 3
                assert torch.sqrt(x).dtype == default
        finally:
            torch.set_default_dtype(torch.float32)


# ---- Behaviour

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.rand(3, 4),
    "transposed": lambda: torch.rand(3, 4).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": lambda: torch.rand(6, 8)[::2, 1::3],
    "expanded": lambda: torch.rand(3, 1).expand(3, 5),
    "a scalar": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0, 3),
    "long": lambda: torch.rand(100_003),
    "a parameter": lambda: nn.Parameter(torch.rand(3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_strides_are_torchs(layout: str) -> None:
    x = LAYOUTS[layout]()
    for function in (torch.sqrt, torch.atan, lambda t: t**0.5, lambda t: torch.logit(t.double())):
        got, want = function(x), torchs_own(lambda function=function: function(x))
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        torch.testing.assert_close(got, want)


REFUSED: dict[str, Callable[[], Any]] = {
    "integers in place": lambda: torch.tensor([4]).sqrt_(),
    "integer power in place": lambda: torch.tensor([4]).pow_(0.5),
    "float into integers": lambda: torch.sqrt(torch.rand(2), out=torch.empty(2, dtype=torch.int64)),
    "float64 into a leaf that requires grad": lambda: torch.sqrt(torch.rand(2), out=torch.rand(2, requires_grad=True)),
    "in place on an expanded tensor": lambda: torch.rand(1).expand(3).sqrt_(),
    "out that overlaps": lambda: (lambda b: torch.sqrt(b[:3], out=b[1:]))(torch.rand(4)),
    "in place on a leaf": lambda: torch.rand(2, requires_grad=True).sqrt_(),
    "not positive definite": lambda: torch.linalg.cholesky(-torch.eye(3)),
    "not square": lambda: torch.linalg.cholesky(torch.rand(2, 3)),
    "cholesky of integers": lambda: torch.linalg.cholesky(torch.eye(2).long()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        REFUSED[name]()
    assert str(raised.value).splitlines()[0] == torchs_own(REFUSED[name]).splitlines()[0]


@pytest.mark.parametrize("name", [*UNARY, "logit", "pow", "cholesky"])
def test_derivatives_are_right(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(3, 3, dtype=torch.float64, generator=generator) * 0.8 + 0.1).requires_grad_()
    function: Callable[[Tensor], Tensor] = {
        "pow": lambda t: t**0.5,
        "cholesky": lambda t: torch.linalg.cholesky(t @ t.mT + torch.eye(3, dtype=t.dtype)),
    }.get(name, getattr(torch, name))
    assert torch.autograd.gradcheck(function, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize("name", [*UNARY, "cholesky"])
def test_float32_gradients_are_those_of_float64(name: str) -> None:
    grads = []
    for dtype in WIDE:
        x = torch.linspace(0.2, 0.8, 9, dtype=torch.float64).view(3, 3).to(dtype).requires_grad_()
        if name == "cholesky":
            torch.linalg.cholesky(x @ x.mT + torch.eye(3, dtype=dtype)).square().sum().backward()
        else:
            getattr(torch, name)(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_float32_cholesky_is_the_rounded_float64_factor() -> None:
    a = torch.rand(4, 30, 30, generator=torch.Generator().manual_seed(2))
    a = a @ a.mT + torch.eye(30)
    for upper in (False, True):
        want = bits(torchs_own(lambda upper=upper: torch.linalg.cholesky(a.double(), upper=upper)).float())
        factor, info = torch.linalg.cholesky_ex(a, upper=upper, out=(torch.empty(0), torch.empty(0, dtype=torch.int32)))
        assert info.tolist() == [0] * 4
        written = torch.linalg.cholesky(a, upper=upper, out=torch.empty(0))
        assert [bits(f) for f in (torch.linalg.cholesky(a, upper=upper), factor, written)] == [want] * 3
        assert bits(torch.cholesky(a, upper)) == want
        assert bits(torch.cholesky(a, upper, out=torch.empty(0))) == want
    assert torch.linalg.cholesky_ex(torch.diag(torch.tensor([1.0, -1.0])))[1].item() == 2


def test_float32_cholesky_reports_the_status_of_the_float64_factorization() -> None:
    # The last pivot is the rounding error of a square: zero in float32, positive in float64.
    a = next(a for a in torch.linspace(0.3, 0.4, 99) if (a * a).double() > a.double() ** 2)
    nearly_singular = torch.stack([torch.stack([torch.ones(()), a]), torch.stack([a, a * a])])
    out = (torch.empty(0), torch.empty(0, dtype=torch.int32))
    assert torchs_own(lambda: torch.linalg.cholesky_ex(nearly_singular))[1].item() == 2
    assert torch.linalg.cholesky_ex(nearly_singular)[1].item() == 0
    assert torch.linalg.cholesky_ex(nearly_singular, out=out)[1].item() == 0


def test_one_handle_and_everything_is_put_back() -> None:
    handle = enable_portable_operators()
    assert enable_portable_operators() is handle
    replaced = torch._C._dispatch_dump_table("aten::sqrt")
    for _ in range(2):
        handle.disable()
        assert not portable_operators_are_enabled()
        assert torch._C._dispatch_dump_table("aten::sqrt") != replaced
        assert torch.backends.nnpack.set_flags(True) == (True,), "NNPACK is on unless someone turned it off"
    with enable_portable_operators():
        assert portable_operators_are_enabled()
        assert torch.backends.nnpack.set_flags(False) == (False,)
    assert not portable_operators_are_enabled()
    assert "portable.py" not in torch._C._dispatch_dump("aten::sqrt")


def test_import_loads_no_torch_and_enabling_warns_of_nothing() -> None:
    code = (
        "import sys; from e2e_registry.determinism import portable as p\n"
        "assert not p.portable_operators_are_enabled() and 'torch' not in sys.modules\n"
        "import torch, warnings; warnings.simplefilter('error'); p.enable_portable_operators()\n"
        "with torch.inference_mode(): print(torch.rand(3).sqrt_().is_inference())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


# ---- scripts/verify_portable.py


@pytest.fixture(scope="module")
def verify() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("verify_portable", SCRIPTS / "verify_portable.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["verify_portable"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "verify_portable.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})


def test_only_known_differences_are_forgiven(verify: ModuleType) -> None:
    same, other = "0" * 16, "1" * 16
    rows = [
        verify.Row("torch/float32/sqrt", "g", (same, same)),
        verify.Row("torch/float32/exp", "g", (same, other)),
        verify.Row("torch/float32/sin", "g", ("raised ValueError: []",) * 2),
        verify.Row("torch/float32/cos", "g", (same, "died of SIGILL")),
        verify.Row("torch/int8/_int_mm", "g", (same, other)),
    ]
    report = verify.Report(("native", "Haswell"), tuple(rows), {}, (), {"numpy/longdouble/exp": ["f2xm1 x1"]})
    assert report.faults == ["torch/float32/exp", "torch/float32/sin", "torch/float32/cos"]
    text = verify.render(report)
    assert "| g | 5 | 2 of 5 |" in text
    assert "| `torch/float32/cos` | died of SIGILL | **not known** |" in text
    traced = verify.Report(("native",), (), {}, (), {"torch/float32/exp": ["rcpps x4"]})
    assert traced.faults == ["torch/float32/exp"]


def test_every_listed_probe_exists(verify: ModuleType) -> None:
    import portability_probes

    names = [probe.name for probe in portability_probes.all_probes()]
    patterns = [*portability_probes.SMALL, *(p for o in UNREMEDIED_OPERATORS for p in o.probes)]
    for pattern in patterns:
        assert fnmatch.filter(names, pattern), pattern


def test_docs_are_written_between_the_markers(verify: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    verify.write_docs(page, "one\n")
    page.write_text(f"before\n{page.read_text()}after\n")
    verify.write_docs(page, "two\n")
    assert page.read_text() == f"before\n{verify.BEGIN}\ntwo\n{verify.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(verify.UsageError, match="no markers"):
        verify.write_docs(page, "three\n")


def test_a_missing_emulator_is_a_usage_error(tmp_path: Path) -> None:
    done = run_script("--small", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "qemu-x86_64 is not on PATH" in done.stderr
    assert "install it" in done.stderr


needs_qemu = pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")


@needs_qemu
@pytest.mark.parametrize(
    ("option", "says"), [("--models=Nehalm", "no CPU model"), ("--without=FOO", "does not set FOO")]
)
def test_unknown_models_and_pins_are_refused(option: str, says: str) -> None:
    done = run_script("--small", option)
    assert done.returncode == 2
    assert says in done.stderr


@needs_qemu
@pytest.mark.slow
def test_the_small_table_is_equal_with_the_operators_and_not_without() -> None:
    done = run_script("--small", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["unequal"], report["faults"]) == ([], [])
    assert report["computations"] >= 20
    done = run_script("--small", "--json", "--without-operators")
    assert done.returncode == 1
    assert "torch/float32/sqrt" in json.loads(done.stdout)["faults"]
