"""Attention backends: the table against the installed libraries, the check of driver and actor, and the patch.

No flash kernel runs on a CPU, so stand-ins with the parameters of the real entry points take their places and note
the ``deterministic`` argument that reaches them. Everything between the recipe and them is the installed diffusers
and transformers.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e2e_registry.determinism import attention
from e2e_registry.determinism.attention import (
    DIFFUSERS_BACKENDS,
    TRANSFORMERS_IMPLEMENTATIONS,
    AttentionClass,
    AttentionError,
    classify,
    effective_backends,
    exposes_deterministic,
    force_deterministic,
    is_forced,
    patch_flash_kernels,
    patched_kernels,
    patching,
    register_native_kernel,
    require_patched,
    validate_attention_args,
)
from e2e_registry.errors import ExitCode, UsageError

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(set(DIFFUSERS_BACKENDS) - {"unset"})
REJECTED = [name for name in NAMES if not classify(name).is_accepted]
PATCHED = [name for name in NAMES if classify(name).needs_patch]
HUB = [name for name in NAMES if classify(name).klass is AttentionClass.PATCH_AFTER_LOAD]
sdpa = torch.nn.functional.scaled_dot_product_attention


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over (batch, length, heads, size)."""
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def stand_in(seen: list[bool], *, exposes: bool = True, varlen: bool = False) -> Callable[..., Any]:
    """A flash entry point that notes the ``deterministic`` argument that it got."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any) -> torch.Tensor:
        if not varlen:
            return attend(q, k, v)
        spans = [(a, b, c, d) for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)]
        return torch.cat([attend(q[None, a:b], k[None, c:d], v[None, c:d])[0] for a, b, c, d in spans])

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        deterministic=False,
        **options,
    ):
        seen.append(deterministic)
        return run(q, k, v, cu_seqlens_q, cu_seqlens_k)

    def without(q, k, v, dropout_p=0.0, cu_seqlens_q=None, cu_seqlens_k=None, **options):
        seen.append(options.get("deterministic", False))
        return run(q, k, v, cu_seqlens_q, cu_seqlens_k)

    return flash_attn_func if exposes else without


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test leaves the process unpatched, and knows no variable nor native kernel of another."""
    monkeypatch.delenv("DIFFUSERS_ATTN_BACKEND", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.setattr(patching, "_NATIVE", {})
    yield
    assert patched_kernels() == ()
    assert patching._PATCHES.holders == 0


@pytest.fixture
def seen() -> list[bool]:
    return []


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch, seen: list[bool]) -> types.ModuleType:
    """The installed dispatch of diffusers with stand-ins for all kernels, hub kernels not loaded yet."""
    import diffusers.models.attention_dispatch as module

    for name in patching.DIFFUSERS_GLOBALS:
        monkeypatch.setattr(module, name, stand_in(seen, varlen="varlen" in name))
    for flag in ("_CAN_USE_FLASH_ATTN", "_CAN_USE_FLASH_ATTN_3"):
        monkeypatch.setattr(module, flag, True)
    install_hub(monkeypatch, module, stand_in(seen), stand_in(seen, varlen=True))
    return module


def install_package(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> types.ModuleType:
    package = types.ModuleType(name)
    package.__dict__.update(attributes)
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)  # find_spec reads it
    monkeypatch.setitem(sys.modules, name, package)
    return package


def install_hub(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, dense: Callable[..., Any], varlen: Callable[..., Any]
) -> list[str]:
    """Make the hub serve these kernels; returns the list that notes what is fetched."""
    fetched: list[str] = []
    interface = types.SimpleNamespace(_flash_attn_forward=None, _flash_attn_backward=None)
    interface.__dict__.update(_flash_attn_varlen_forward=None, _flash_attn_varlen_backward=None)

    def get_kernel(repository: str, **options: Any) -> Any:
        fetched.append(repository)
        return types.SimpleNamespace(
            __name__=repository, flash_attn_func=dense, flash_attn_varlen_func=varlen, flash_attn_interface=interface
        )

    install_package(monkeypatch, "kernels", get_kernel=get_kernel)
    monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    monkeypatch.setattr(module, "is_kernels_version", lambda *_: True)
    monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    for config in module._HUB_KERNELS_REGISTRY.values():
        monkeypatch.setattr(config, "kernel_fn", None)
    return fetched


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, 5, 4, 8, generator=generator, requires_grad=True) for _ in range(3))


def run_dispatch(module: types.ModuleType, **options: Any) -> tuple[torch.Tensor, ...]:
    """One forward and backward through diffusers' dispatch; returns the output and the gradients."""
    tensors = inputs()
    out = module.dispatch_attention_fn(*tensors, **options)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


# The table.


def test_table_has_every_backend_of_the_installed_diffusers(dispatch: types.ModuleType) -> None:
    names = {member.value for member in dispatch.AttentionBackendName}
    assert names - set(DIFFUSERS_BACKENDS) == set(), "read these in attention_dispatch.py and classify them"
    assert {classify(member).name for member in dispatch.AttentionBackendName} == names
    for key, config in dispatch._HUB_KERNELS_REGISTRY.items():
        row = classify(key)
        if row.is_accepted:
            assert row.entry_points == (config.function_attr,)


def test_table_has_every_implementation_of_the_installed_transformers() -> None:
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK, FLASH_ATTN_KERNEL_VERSIONS
    from transformers.modeling_utils import AttentionInterface

    built_in = {"eager", "sdpa", "flex_attention", "paged|eager"} | set(FLASH_ATTN_KERNEL_FALLBACK)
    assert built_in <= set(AttentionInterface._global_mapping) | {"eager"}
    names = built_in | set(FLASH_ATTN_KERNEL_FALLBACK.values()) | set(FLASH_ATTN_KERNEL_VERSIONS)
    assert names - set(TRANSFORMERS_IMPLEMENTATIONS) == set()


def test_classes() -> None:
    by_class = {klass: {name for name in NAMES if classify(name).klass is klass} for klass in AttentionClass}
    assert by_class[AttentionClass.TORCH_FLAG] == {"native", "_native_flash", "_native_efficient"}
    assert by_class[AttentionClass.DETERMINISTIC] == {"_native_math"}
    assert by_class[AttentionClass.PATCH] == {"flash", "flash_varlen", "_flash_varlen_3"}
    dense, varlen = {"flash_hub", "_flash_3_hub", "flash_4_hub"}, {"flash_varlen_hub", "_flash_3_varlen_hub"}
    assert by_class[AttentionClass.PATCH_AFTER_LOAD] == dense | varlen
    families = {name.lstrip("_").partition("_")[0] for name in REJECTED} - {"native"}
    assert families == {"sage", "xformers", "flex", "aiter", "flash"}
    assert {name for name in REJECTED if "native" in name} == {"_native_cudnn", "_native_npu", "_native_xla"}
    assert {name for name in REJECTED if "flash" in name} == {"_flash_3"}
    accepted = {row.name: row.klass for row in TRANSFORMERS_IMPLEMENTATIONS.values() if row.is_accepted}
    assert accepted.pop("sdpa") is accepted.pop("unset") is AttentionClass.TORCH_FLAG
    assert accepted.pop("eager") is AttentionClass.DETERMINISTIC
    assert set(accepted.values()) == {AttentionClass.PATCH_AFTER_LOAD}


def test_context_parallel_backends_are_those_of_diffusers(dispatch: types.ModuleType) -> None:
    supported = dispatch._AttentionBackendRegistry._supports_context_parallel
    for name in NAMES:
        row = classify(name)
        if row.is_accepted and not row.context_parallel:
            assert name in supported
        if "no context-parallel path" in row.context_parallel:
            assert name not in supported


def test_every_rejected_row_says_why_and_what_instead() -> None:
    for table in (DIFFUSERS_BACKENDS, TRANSFORMERS_IMPLEMENTATIONS):
        for row in table.values():
            assert row.reason
            assert bool(row.instead) == (not row.is_accepted)


@given(st.sampled_from(NAMES), st.randoms(use_true_random=False), st.sampled_from(["", " ", "\t", "\n"]))
def test_names_are_read_in_any_case(name: str, random: Any, space: str) -> None:
    spelled = space + "".join(random.choice([c.lower(), c.upper()]) for c in name) + space
    assert classify(spelled) is classify(name)


@given(st.text(min_size=1).filter(lambda text: attention.canonical_name(text) not in {None, *DIFFUSERS_BACKENDS}))
def test_unknown_backends_are_rejected(name: str) -> None:
    row = classify(name)
    assert row.klass is AttentionClass.REJECT
    with pytest.raises(AttentionError):
        validate_attention_args(name)


def test_what_is_not_a_name_is_refused() -> None:
    with pytest.raises(AttentionError, match="int 3"):
        validate_attention_args(3)
    with pytest.raises(UsageError, match="jax"):
        classify("native", library="jax")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="neither named_modules"):
        validate_attention_args(model=object())


# Each row, in driver and actor.


@pytest.mark.parametrize("name", NAMES)
def test_each_row(name: str, dispatch: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    row = classify(name)
    calls: list[bool] = []

    def watched_sdpa(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(torch.backends.cuda.math_sdp_enabled())
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # no CPU has `_native_efficient`
            return sdpa(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched_sdpa)

    if row.klass is AttentionClass.REJECT:
        with pytest.raises(AttentionError) as caught:
            validate_attention_args(name.upper())
        assert caught.value.exit_code is ExitCode.USAGE
        for part in (f"'{name}'", "--attention-backend", row.reason, row.instead):
            assert part in str(caught.value)
        with patch_flash_kernels(("diffusers",)), pytest.raises(AttentionError, match=name):
            run_dispatch(dispatch, backend=name)
        assert seen == []
        assert calls == []
        return

    plan = validate_attention_args(name.upper())
    assert plan.choices[0].backend is row
    assert plan.unverified == ((name,) if name in HUB else ())
    assert plan.needs_patch == row.needs_patch
    with patch_flash_kernels(("diffusers",)), dispatch.attention_backend(name):
        require_patched(validate_attention_args(name))
        first, second = run_dispatch(dispatch), run_dispatch(dispatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.allclose(first[0], attend(*inputs()), atol=1e-6)
    if row.needs_patch:
        assert seen == [True, True]
    else:
        assert seen == []
        # sdpa_kernel restricts SDPA to one backend: `_native_math` leaves the math one, the others take it away.
        assert calls == [name in ("native", "_native_math")] * 2


def test_unset_is_native(dispatch: types.ModuleType) -> None:
    plan = validate_attention_args(None)
    assert [choice.source for choice in plan.choices] == [attention.Source.DEFAULT]
    assert not plan.needs_patch
    assert dispatch._AttentionBackendRegistry.get_active_backend()[0].value == "native"


@pytest.mark.parametrize("name", PATCHED)
def test_flash_without_the_parameter_is_rejected_although_others_have_it(
    name: str, dispatch: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = classify(name)
    lacking = stand_in(seen, exposes=False)
    if name not in HUB:
        monkeypatch.setattr(dispatch, row.entry_points[0], lacking)
        with pytest.raises(AttentionError, match="no `deterministic` parameter") as caught:
            validate_attention_args(name)
        assert f"'{name}'" in str(caught.value)
        with patch_flash_kernels(("diffusers",)) as report:
            assert "no `deterministic` parameter" in report.skipped[f"{dispatch.__name__}.{row.entry_points[0]}"]
            assert len(report.patched) == 3
        return
    install_hub(monkeypatch, dispatch, lacking, lacking)
    assert validate_attention_args(name).unverified == (name,)
    active = dispatch._AttentionBackendRegistry._active_backend
    with patch_flash_kernels(("diffusers",)) as report:
        for _ in range(2):  # also once the kernel is loaded
            with pytest.raises(AttentionError, match="no `deterministic` parameter"), dispatch.attention_backend(name):
                pass
        assert dispatch._AttentionBackendRegistry._active_backend is active
        assert not any(name in patched for patched in report.patched)
        with pytest.raises(AttentionError, match=name):  # the driver's function, in the actor
            validate_attention_args(name)


@pytest.mark.parametrize("name", [name for name in PATCHED if name not in HUB])
def test_flash_that_is_not_installed_is_rejected(
    name: str, dispatch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, classify(name).entry_points[0], None)
    with pytest.raises(AttentionError, match="is not installed here"):
        validate_attention_args(name)
    # A driver without the kernels may name those of its actors.
    validate_attention_args(name, kernels={classify(name).entry_points[0]: stand_in([])})


def test_hub_backend_needs_the_package_that_loads_it(
    dispatch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kernels")
    with pytest.raises(AttentionError, match="nor the `kernels` package"):
        validate_attention_args("flash_hub")


@pytest.mark.parametrize("name", ["sage_hub", "sage_blackwell_hub", "aiter_fa2_hub"])
def test_rejected_hub_kernels_are_not_even_fetched(
    name: str, dispatch: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = install_hub(monkeypatch, dispatch, stand_in(seen), stand_in(seen))
    with patch_flash_kernels(("diffusers",)):
        with pytest.raises(AttentionError, match=name), dispatch.attention_backend(name):
            pass
        assert fetched == []
        with dispatch.attention_backend("flash_hub"):
            assert fetched == ["kernels-community/flash-attn2"]


def test_flash_3_is_rejected_for_reasons_that_still_hold(dispatch: types.ModuleType, seen: list[bool]) -> None:
    operator = dispatch._wrapped_flash_attn_3
    operator.register_kernel("cpu")(operator._init_fn)

    def flash_attn_3_func(q, k, v, deterministic=False, **options):
        seen.append(deterministic)
        return attend(q, k, v).contiguous(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    dispatch.flash_attn_3_func = flash_attn_3_func
    with pytest.raises(RuntimeError, match="no autograd formula"):
        run_dispatch(dispatch, backend="_flash_3")
    assert seen == [False]


@pytest.mark.parametrize("name", [name for name in NAMES if classify(name).is_accepted])
def test_context_parallelism(name: str, dispatch: types.ModuleType) -> None:
    if name in ("native", "_native_flash"):
        validate_attention_args(name, context_parallel=True)
        return
    with pytest.raises(AttentionError, match="context parallel"):
        validate_attention_args(name, context_parallel=True)
    with patch_flash_kernels(("diffusers",)), pytest.raises(AttentionError, match="context parallel"):
        run_dispatch(dispatch, backend=name, parallel_config=object())


# The three places that choose.


@pytest.fixture
def flux(dispatch: types.ModuleType) -> Iterator[Any]:
    """A real, tiny diffusion transformer."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )
    yield model
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def run_flux(model: Any) -> torch.Tensor:
    out = model(
        hidden_states=torch.ones(1, 4, 4),
        encoder_hidden_states=torch.ones(1, 3, 8),
        pooled_projections=torch.ones(1, 8),
        timestep=torch.ones(1),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
    ).sample
    out.sum().backward()
    return out


def test_every_place_that_chooses_is_read_and_named(
    dispatch: types.ModuleType, flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(place: str, *others: str, **options: Any) -> None:
        with pytest.raises(AttentionError) as caught:
            validate_attention_args(**options)
        for part in (place, *others):
            assert part in str(caught.value)

    rejected("--fsdp-attention-backend", "'sage'", backend="Sage", flag="--fsdp-attention-backend")
    rejected("DIFFUSERS_ATTN_BACKEND", "'sage'", environment={"DIFFUSERS_ATTN_BACKEND": "SAGE"})
    # A flag does not hide the variable: modules without a choice of their own still follow it.
    rejected("DIFFUSERS_ATTN_BACKEND", backend="native", environment={"DIFFUSERS_ATTN_BACKEND": " Flex "})
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "xformers")
    rejected("DIFFUSERS_ATTN_BACKEND", "'xformers'")
    monkeypatch.delenv("DIFFUSERS_ATTN_BACKEND")
    with dispatch.attention_backend("flex"):
        rejected("attention_backend() context", "'flex'", backend="native")
    flux.transformer_blocks[0].attn.processor._attention_backend = dispatch.AttentionBackendName.FLEX
    rejected("transformer_blocks.0.attn.processor._attention_backend", "'flex'", backend="native", model=flux)
    flux.single_transformer_blocks[0].attn.processor._attention_backend = "_Fused_NPU"
    rejected("single_transformer_blocks.0.attn.processor", "'flex'", "'_fused_npu'", model=flux)
    pipeline = types.SimpleNamespace(components={"transformer": flux, "scheduler": object()})
    rejected("transformer.transformer_blocks.0.attn.processor", model=pipeline)
    flux.reset_attention_backend()
    flux.set_attention_backend("flash")
    places = [(choice.source.name, choice.backend.name) for choice in effective_backends(flux)]
    assert places == [("CONTEXT", "flash"), ("MODULE", "flash")]
    assert "(and 1 more)" in effective_backends(flux)[1].where


def test_processors_that_bypass_the_dispatch_are_found() -> None:
    from diffusers.models.attention_processor import Attention, XFormersAttnProcessor

    block = torch.nn.Sequential(Attention(query_dim=8, heads=2, dim_head=4))
    validate_attention_args(model=block)
    block[0].processor = XFormersAttnProcessor()
    with pytest.raises(AttentionError, match=r"0\.processor, a XFormersAttnProcessor: .*'xformers'"):
        validate_attention_args(model=block)


def test_without_determinism_nothing_is_rejected() -> None:
    plan = validate_attention_args("sage", deterministic=False, environment={"DIFFUSERS_ATTN_BACKEND": "flex"})
    assert [choice.backend.name for choice in plan.choices] == ["sage", "flex"]
    assert not plan.needs_patch
    require_patched(plan)


def test_variable_is_rewritten_as_diffusers_reads_it() -> None:
    environment = {"DIFFUSERS_ATTN_BACKEND": " _Native_Math ", "OTHER": "1"}
    assert validate_attention_args(environment=environment).environment == {"DIFFUSERS_ATTN_BACKEND": "_native_math"}
    attention.canonicalise_environment(environment)
    assert environment == {"DIFFUSERS_ATTN_BACKEND": "_native_math", "OTHER": "1"}
    empty = {"DIFFUSERS_ATTN_BACKEND": ""}
    attention.canonicalise_environment(empty)
    assert empty == {}


# The patch.


def test_real_model_runs_forced_kernels_and_repeats(dispatch: types.ModuleType, flux: Any, seen: list[bool]) -> None:
    with patch_flash_kernels():
        flux.set_attention_backend("flash")
        plan = validate_attention_args("flash", model=flux)
        assert f"{dispatch.__name__}.flash_attn_func" in require_patched(plan)
        first = run_flux(flux)
        gradient = flux.x_embedder.weight.grad.clone()
        flux.zero_grad()
        assert torch.equal(run_flux(flux), first)
        assert torch.equal(flux.x_embedder.weight.grad, gradient)
    assert len(seen) == 4
    assert all(seen)
    run_flux(flux)
    assert seen[4:] == [False, False]


def test_a_callers_explicit_false_is_overridden(dispatch: types.ModuleType, seen: list[bool]) -> None:
    # diffusers itself passes deterministic=False to this kernel, so a functools.partial would lose.
    with patch_flash_kernels(("diffusers",)):
        with dispatch.attention_backend("_flash_3_hub"):
            run_dispatch(dispatch)
            run_dispatch(dispatch, attention_kwargs={"deterministic": False})
        q, k, v = inputs()
        dispatch.flash_attn_func(q, k, v, deterministic=False)
        dispatch.flash_attn_func(q, k, v, 0.0, None, False, None, None, False)
    assert seen == [True] * 4


@given(
    st.integers(0, 4),
    st.sampled_from(["POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"]),
    st.sampled_from(["absent", "keyword", "position"]),
    st.booleans(),
)
def test_forced_whatever_the_signature_and_the_call(before: int, kind: str, call: str, value: bool) -> None:
    names = [f"p{i}" for i in range(before)]
    star = "*, " if kind == "KEYWORD_ONLY" else ""
    scope: dict[str, Any] = {}
    source = f"def kernel({''.join(f'{n}, ' for n in names)}{star}deterministic=False, scale=1.0): "
    exec(source + f"return (({''.join(f'{n}, ' for n in names)}), deterministic, scale)", scope)
    kernel = scope["kernel"]
    forced = force_deterministic(kernel)
    assert inspect.signature(forced) == inspect.signature(kernel)
    assert force_deterministic(forced) is forced
    assert forced.__wrapped__ is kernel
    args: list[Any] = list(range(before))
    options: dict[str, Any] = {"scale": 2.0}
    if call == "keyword" or (call == "position" and star):
        options["deterministic"] = value
    elif call == "position":
        args.append(value)
    assert forced(*args, **options) == (tuple(range(before)), True, 2.0)


def test_only_a_named_parameter_counts() -> None:
    assert not exposes_deterministic(lambda q, **kwargs: None)
    assert not exposes_deterministic(lambda deterministic, /: None)
    assert not exposes_deterministic(dict.fromkeys)
    assert not exposes_deterministic(None)
    assert exposes_deterministic(functools.partial(lambda q, deterministic: None, deterministic=False))
    with pytest.raises(AttentionError, match="cannot be made deterministic"):
        force_deterministic(len)
    wrapped = force_deterministic(lambda deterministic=False: deterministic)
    others = functools.wraps(wrapped)(lambda deterministic=False: wrapped(deterministic))
    assert is_forced(wrapped)
    assert not is_forced(others)


def test_patch_is_idempotent_and_undone_when_the_last_holder_lets_go(dispatch: types.ModuleType) -> None:
    names = [*patching.DIFFUSERS_GLOBALS, "_maybe_download_kernel_for_backend"]
    before = {name: getattr(dispatch, name) for name in names}
    backends = dict(dispatch._AttentionBackendRegistry._backends)
    first, second = patch_flash_kernels(("diffusers",)), patch_flash_kernels(("diffusers",))
    assert first.patched == second.patched == tuple(f"{dispatch.__name__}.{n}" for n in patching.DIFFUSERS_GLOBALS)
    assert dispatch.flash_attn_func.__wrapped__ is before["flash_attn_func"]
    with dispatch.attention_backend("flash_hub"):
        loaded = dispatch._HUB_KERNELS_REGISTRY["flash_hub"].kernel_fn
    assert is_forced(loaded)
    assert any("flash_hub" in name for name in second.patched)
    assert first.undo() == first.undo() == ()
    assert first.patched == ()
    assert len(second.patched) == 5
    foreign = stand_in([])
    dispatch.flash_attn_varlen_func = foreign
    before["flash_attn_varlen_func"] = foreign
    assert second.undo() == (f"{dispatch.__name__}.flash_attn_varlen_func",)
    assert {name: getattr(dispatch, name) for name in names} == before
    assert dispatch._AttentionBackendRegistry._backends == backends
    assert dispatch._HUB_KERNELS_REGISTRY["flash_hub"].kernel_fn is loaded.__wrapped__


def test_forced_kernels_compile_without_a_graph_break(dispatch: types.ModuleType, seen: list[bool]) -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        return dispatch.dispatch_attention_fn(q, q, q, backend=dispatch.AttentionBackendName.FLASH)

    with patch_flash_kernels(("diffusers",)):
        torch.compile(model, fullgraph=True, backend="eager")(inputs()[0].detach())
    assert seen
    assert all(seen)


def test_other_versions_of_the_libraries_are_refused_rather_than_left_unpatched(
    dispatch: types.ModuleType, flash_utils: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(flash_utils, "_lazy_imports")
    with pytest.raises(AttentionError, match="_lazy_imports does not exist"):
        patch_flash_kernels()
    assert not is_forced(dispatch.flash_attn_func)
    monkeypatch.delattr(dispatch, "_HUB_KERNELS_REGISTRY")
    with pytest.raises(AttentionError, match="has no _HUB_KERNELS_REGISTRY"):
        patch_flash_kernels()
    with pytest.raises(AttentionError, match="has no _HUB_KERNELS_REGISTRY"):
        validate_attention_args("flash")


# Native model packages.


def test_native_kernel_must_be_among_the_patched(
    dispatch: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = types.SimpleNamespace(kernel=stand_in(seen))
    package = install_package(monkeypatch, "ltx_attention", attend=stand_in(seen), backend=inner)
    register_native_kernel(package, "attend")
    register_native_kernel("ltx_attention", "backend.kernel")
    with pytest.raises(AttentionError, match=r"ltx_attention\.attend: not patched(.|\n)*Patched kernels: none"):
        require_patched()
    with patch_flash_kernels():
        assert {"ltx_attention.attend", "ltx_attention.backend.kernel"} <= set(require_patched())
        package.attend(*inputs(), deterministic=False)
        package.backend.kernel(*inputs())
        assert seen == [True, True]
        package.attend = package.attend.__wrapped__  # a reload after the patch
        with pytest.raises(AttentionError, match=r"ltx_attention\.attend: not patched") as caught:
            require_patched()
        assert "diffusers.models.attention_dispatch.flash_attn_func" in str(caught.value)
        assert "ltx_attention.backend.kernel" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "attribute", "reason"),
    [
        ("no_such_package", "attend", "No module named"),
        ("ltx_attention", "absent", "no such attribute"),
        ("ltx_attention", "lacking", "no `deterministic` parameter"),
    ],
)
def test_native_kernel_that_cannot_be_patched(
    module: str, attribute: str, reason: str, dispatch: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(monkeypatch, "ltx_attention", lacking=stand_in([], exposes=False))
    register_native_kernel(module, attribute)
    with patch_flash_kernels(), pytest.raises(AttentionError, match=reason) as caught:
        require_patched()
    assert "Patched kernels: diffusers.models.attention_dispatch.flash_attn_func" in str(caught.value)


def test_plan_fails_where_the_actor_did_not_patch(dispatch: types.ModuleType) -> None:
    with pytest.raises(AttentionError, match=r"'flash' \(chosen by --attention-backend\): not patched"):
        require_patched(validate_attention_args("flash"))
    with patch_flash_kernels(("diffusers",)):
        with pytest.raises(AttentionError, match="not loaded yet"):
            require_patched(validate_attention_args("flash_hub"))
        with dispatch.attention_backend("flash_hub"):
            require_patched(validate_attention_args("flash_hub"))


# transformers.


@pytest.fixture
def flash_utils(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The installed flash loader of transformers, with nothing loaded."""
    import transformers.modeling_flash_attention_utils as module

    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(module, name, None)
    return module


def serve_transformers(monkeypatch: pytest.MonkeyPatch, dense: Any, varlen: Any) -> None:
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    kernel = types.SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    install_package(monkeypatch, "kernels")
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: kernel)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)


def modern_bert() -> Any:
    """A real, tiny ModernBERT: its configuration passes deterministic=False on every call."""
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        attn_implementation="flash_attention_2",
        reference_compile=False,
    )
    return ModernBertModel(config)


def test_transformers_models_run_forced_kernels(
    flash_utils: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_transformers(monkeypatch, stand_in(seen), stand_in(seen, varlen=True))
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    tokens = torch.tensor([[1, 3, 4, 2]])
    modern_bert()(tokens)
    assert seen == [False], "the variable loses against the model's own argument, so the patch is needed"
    seen.clear()
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    with patch_flash_kernels() as report:
        model = modern_bert()
        plan = validate_attention_args("Flash_Attention_2", library="transformers", model=model)
        assert plan.environment == {"FLASH_ATTENTION_DETERMINISTIC": "1"}
        # transformers put the hub's kernel in the place of the package that is not installed.
        assert [c.backend.name for c in plan.choices] == ["flash_attention_2", "kernels-community/flash-attn2"]
        assert plan.choices[1].where == "config._attn_implementation"
        assert any("_flash_varlen_fn" in name for name in require_patched(plan))
        model(tokens)
        model(tokens, attention_mask=torch.tensor([[1, 1, 1, 0]]))
        assert seen == [True, True]
        assert sum("transformers" in name for name in report.patched) == 2
    assert not is_forced(flash_utils._flash_fn)
    assert not is_forced(flash_utils._lazy_imports)


def test_transformers_functions_cached_before_the_patch_are_forced(
    flash_utils: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_transformers(monkeypatch, stand_in(seen), stand_in(seen, varlen=True))
    model = modern_bert()
    with patch_flash_kernels():
        model(torch.tensor([[1, 3, 4, 2]]))
    assert seen == [True]


def test_transformers_function_without_the_parameter_is_an_error(
    flash_utils: types.ModuleType, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_transformers(monkeypatch, stand_in(seen, exposes=False), stand_in(seen, exposes=False))
    name = "kernels-community/flash-attn2"
    with patch_flash_kernels(), pytest.raises(AttentionError, match="cannot be made deterministic"):
        flash_utils.lazy_import_flash_attention(name)
    flash_utils.lazy_import_flash_attention(name)  # unpatched, transformers takes it and drops the argument
    with pytest.raises(AttentionError, match="no `deterministic` parameter"):
        validate_attention_args(name, library="transformers")


@pytest.mark.parametrize(
    "name", ["flex_attention", "paged|eager", "paged|sdpa", "someone/flash-attn", "kernels-community/flash-attn2@main"]
)
def test_transformers_rejects(name: str, flash_utils: types.ModuleType) -> None:
    with pytest.raises(AttentionError) as caught:
        validate_attention_args(name.upper(), library="transformers")
    assert f"'{name}'" in str(caught.value)
    assert "Use `sdpa`" in str(caught.value)
    if "/" in name:
        with patch_flash_kernels(), pytest.raises(AttentionError, match="cannot run deterministically"):
            flash_utils.lazy_import_flash_attention(name)


@pytest.mark.parametrize("name", [None, "sdpa", "Eager"])
def test_transformers_accepts(name: str | None) -> None:
    assert not validate_attention_args(name, library="transformers").needs_patch


def test_transformers_flash_is_checked_in_the_driver(
    flash_utils: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttentionError, match="nor the `kernels` package"):
        validate_attention_args("flash_attention_3", library="transformers")
    functions = {"flash_attn_func": stand_in([]), "flash_attn_varlen_func": stand_in([])}
    package = install_package(monkeypatch, "flash_attn_interface", **functions)
    assert validate_attention_args("flash_attention_3", library="transformers").needs_patch
    package.flash_attn_varlen_func = stand_in([], exposes=False)
    with pytest.raises(AttentionError, match="flash_attn_varlen_func"):
        validate_attention_args("flash_attention_3", library="transformers")
    with pytest.raises(AttentionError, match="SDPA alone"):
        validate_attention_args("eager", library="transformers", context_parallel=True)


# Drivers and actors, as processes.

DRIVER = """
import sys
from e2e_registry.determinism.attention import validate_attention_args
from e2e_registry.errors import RegistryError
try:
    plan = validate_attention_args(sys.argv[1] or None)
except RegistryError as error:
    print(error, file=sys.stderr)
    status = int(error.exit_code)
else:
    import ray  # the recipe would launch its actors from here on
    status = 0
print(*(name for name in ("torch", "diffusers", "transformers", "ray") if name in sys.modules))
sys.exit(status)
"""


def run_driver(backend: str, *, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "DIFFUSERS_ATTN_BACKEND"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    return subprocess.run(
        [sys.executable, "-c", DRIVER, backend], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("flag", "variable"), [("Sage", ""), ("", "SAGE"), ("flash_5", "native"), ("_FLASH_3", "")])
def test_a_name_stops_the_driver_before_anything_is_imported(flag: str, variable: str) -> None:
    done = run_driver(flag, DIFFUSERS_ATTN_BACKEND=variable)
    assert done.returncode == ExitCode.USAGE
    assert done.stdout.split() == []
    assert ("DIFFUSERS_ATTN_BACKEND: " if not flag else "--attention-backend: ") in done.stderr
    assert "Use " in done.stderr


def test_an_installed_flash_without_the_parameter_stops_the_driver_before_ray(tmp_path: Path) -> None:
    """An installed flash-attn, as diffusers finds it, one of whose two functions cannot be made deterministic."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def flash_attn_func(q, k, v, deterministic=False): ...\ndef flash_attn_varlen_func(q, k, v): ...\n"
    )
    (package / "flash_attn_interface.py").write_text(
        "def _wrapped_flash_attn_backward(): ...\ndef _wrapped_flash_attn_forward(): ...\n"
    )
    metadata = tmp_path / "flash_attn-2.8.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (metadata / "top_level.txt").write_text("flash_attn\n")

    done = run_driver("flash_varlen", path=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "own entry point flash_attn_varlen_func" in done.stderr
    assert "ray" not in done.stdout.split()
    # The other one is accepted, and the variable is read in any case, which diffusers alone would not do.
    done = run_driver("", path=tmp_path, DIFFUSERS_ATTN_BACKEND="Flash")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "ray" in done.stdout.split()


def test_importing_the_package_imports_no_library() -> None:
    code = textwrap.dedent("""
        import sys
        from e2e_registry.determinism.attention import *
        print([name for name in ("torch", "diffusers", "transformers", "ray", "numpy") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_ray_actor_patches_or_fails_with_the_list_of_what_it_patched() -> None:
    import ray

    class TrainActor:
        def __init__(self, native: str) -> None:
            import diffusers.models.attention_dispatch as module

            self.seen: list[bool] = []
            module.flash_attn_func = stand_in(self.seen)
            sys.modules["native_model"] = types.SimpleNamespace(attend=stand_in(self.seen))  # type: ignore[assignment]
            register_native_kernel("native_model", native)
            patch_flash_kernels()
            require_patched(validate_attention_args("FLASH"))

        def step(self) -> list[bool]:
            import diffusers.models.attention_dispatch as module

            run_dispatch(module, backend="flash")
            sys.modules["native_model"].attend(*inputs(), deterministic=False)
            return self.seen

    path = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))  # the actor imports this module
    ray.init(address="local", num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        remote = ray.remote(TrainActor)
        actor = remote.remote("attend")
        assert ray.get(actor.step.remote()) == [True, True]
        ray.kill(actor)
        with pytest.raises(ray.exceptions.RayActorError) as caught:
            ray.get(remote.remote("renamed").step.remote())
        assert "native_model.renamed: no such attribute" in str(caught.value)
        assert "Patched kernels: diffusers.models.attention_dispatch.flash_attn_func" in str(caught.value)
    finally:
        ray.shutdown()
