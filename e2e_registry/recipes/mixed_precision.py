"""Mixed precision of a whole model: parameters cast by name, and regions that compute in a dtype of their own.

A dtype is a matter of modules in the end: a layer cannot multiply by a matrix of one dtype and add a bias of another.
So what name patterns ask for becomes *regions*: modules that take their inputs in their own dtype and give their
outputs back in the model's. FSDP2 does that for a sharded model (:func:`fsdp_policy`), hooks do it for a whole one
(:func:`convert_at_regions`), and both leave buffers as they are, so that trainer and engine compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from e2e_registry.errors import UsageError
from e2e_registry.recipes.dtype_policy import OVERRIDE_FLAG, DtypePolicy, Precision

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtypes(model: nn.Module, policy: DtypePolicy) -> dict[str, torch.dtype]:
    """Return the dtype in which each parameter computes, by name; one that is tied, by each of its names.

    Raises:
        UsageError: A pattern matches no parameter.
    """
    resolved = policy.compute_dtypes(name for name, _ in model.named_parameters())
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: DTYPES[resolved[first_name[id(parameter)]]] for name, parameter in everything}


def cast_parameters(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast parameters in place, by name; ``Module.to`` would also cast buffers, which FSDP2 does not."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def regions(model: nn.Module, policy: DtypePolicy) -> dict[str, Precision]:
    """Return the largest modules all of whose parameters compute in one dtype that is not the model's, by name.

    Raises:
        UsageError: A pattern matches no parameter, the whole model, a part of a module's own parameters, or one that is
            tied to another module's.
    """
    resolved = policy.compute_dtypes(name for name, _ in model.named_parameters())
    found: dict[str, Precision] = {}
    for prefix, module in model.named_modules():
        is_container = type(module).forward is nn.Module.forward  # nobody calls it, so nothing could be converted
        if is_container or _region_of(prefix, found) is not None:
            continue
        dtypes = {dtype for name, dtype in resolved.items() if not prefix or name.startswith(f"{prefix}.")}
        if len(dtypes) == 1 and dtypes != {policy.forward}:
            found[prefix] = dtypes.pop()
    if "" in found:
        raise UsageError(
            f"the overrides take every parameter to {found['']}", where=OVERRIDE_FLAG, hint="give --forward-dtype"
        )
    for name, dtype in resolved.items():
        if dtype != policy.forward and _region_of(name, found) is None:
            owner = name.rpartition(".")[0] or "the model itself"
            raise UsageError(
                f"{name!r} cannot compute in {dtype} while other parameters of its module, {owner}, do not",
                where=OVERRIDE_FLAG,
                hint=f"give a pattern that matches all parameters of {owner}, or none",
            )
    _refuse_torn_ties(model, found)
    return found


def _refuse_torn_ties(model: nn.Module, found: Mapping[str, Precision]) -> None:
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for first, *others in names_of.values():
        for other in others:
            if _region_of(first, found) != _region_of(other, found):
                raise UsageError(
                    f"{first!r} and {other!r} are one parameter, which cannot compute in two dtypes",
                    where=OVERRIDE_FLAG,
                    hint="leave tied weights in the dtype of the model",
                )


def _region_of(name: str, found: Mapping[str, Precision]) -> str | None:
    return next((region for region in found if name.startswith(f"{region}.")), None)


def fsdp_policy(prefix: str, found: Mapping[str, Precision], policy: DtypePolicy) -> MixedPrecisionPolicy:
    """Return what FSDP2 is to do with a module's parameters, inputs and outputs.

    Outside of regions models cast their own inputs: only they know which of them, such as noise levels, must stay
    exact. A region casts all of its inputs, so one that embeds noise levels rounds them to its dtype.

    Args:
        prefix: The module's name.
        found: What :func:`regions` returned.
        policy: The model's.
    """
    within = prefix if prefix in found else _region_of(prefix, found)
    dtype = policy.forward if within is None else found[within]
    is_region = within == prefix
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[dtype],  # even where it is the master's: without it FSDP2 casts no inputs
        reduce_dtype=None if policy.reduce == dtype else DTYPES[policy.reduce],
        output_dtype=DTYPES[policy.forward] if is_region else None,
        cast_forward_inputs=is_region,
    )


def convert_at_regions(model: nn.Module, policy: DtypePolicy) -> None:
    """Make the regions of a model that is not sharded convert their inputs and outputs, as FSDP2 would.

    Raises:
        UsageError: As :func:`regions`.
    """
    outer = DTYPES[policy.forward]
    for prefix, dtype in regions(model, policy).items():
        region, inner = model.get_submodule(prefix), DTYPES[dtype]
        region.register_forward_pre_hook(
            lambda _, args, kwargs, inner=inner: (_cast(args, inner), _cast(kwargs, inner)), with_kwargs=True
        )
        region.register_forward_hook(lambda _module, _args, output: _cast(output, outer))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested tuples, lists and dictionaries."""
    return tree_map(lambda value: value.to(dtype) if _is_floating(value) else value, values)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
