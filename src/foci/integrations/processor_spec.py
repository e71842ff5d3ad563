"""The Spec of a Diffusers attention processor, which `foci check mypkg:Processor --like processor` runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foci.check.modules import UNMERGED, farther, is_unmerged
from foci.core.errors import require
from foci.core.spec import Candidate, Case, Inputs, Mistake, Outputs, Part, Probes, Spec, WrongReturn
from foci.integrations.processors import CallSite, ProcessorError, check, entry
from foci.integrations.reroute import Rerouter

HEADS, WIDTH = 3, 24  # heads of 8 channels: small, and even, as rotary embeddings need
TOKENS, WORDS = 12, 7


@dataclass(frozen=True)
class Kind:
    """A kind of attention site: how the library constructs it, the keywords it passes, and its cases."""

    name: str
    make: Callable[[frozenset[str]], nn.Module]
    keywords: tuple[str, ...]
    cases: tuple[tuple[str, str], ...]  # name, and features separated by spaces


def spec_for(processor: Any, kind: str | None = None) -> Spec:
    """The Spec of the kind of site that a processor (an object or its class) is written for.

    The kind, unless given, is read from the names its code uses: the projections of a second stream together with
    rotary embeddings make it Flux's, the projections alone SD3's, the embeddings alone HunyuanDiT's, neither a UNet's.
    """
    require("diffusers", extra="diffusers")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"processor: kind is {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    chosen = KINDS[kind or _kind_of(_instance(processor))]
    return Spec(
        name=f"processor ({chosen.name})",
        equation="an attention module with this processor = the same module with the model's own",
        paper="arXiv:1706.03762",
        reference=_reference,
        plain=farther(_reference, "site", 2),
        output_names=("hidden_states", "encoder_hidden_states"),
        differentiable=("hidden_states", "encoder_hidden_states"),
        cases=tuple(_case(chosen, name, frozenset(features.split())) for name, features in chosen.cases),
        mistakes=MISTAKES,
        adapt=partial(_adapt, chosen),
        probes=Probes(sized=partial(_sized, chosen), rows=_rows),
    )


def _adapt(kind: Kind, processor: Any, name: str = "") -> Candidate:
    """A processor as a Candidate, called by a real attention module, with that module's filter of keywords."""
    processor = _instance(processor)
    fault = _fault(kind, processor)

    def call(inputs: Inputs) -> Outputs:
        if not callable(processor):
            raise ProcessorError(fault)
        inputs["site"].processor = processor
        try:
            return _reference(**inputs)
        except WrongReturn:
            raise
        except TypeError as error:
            raise (ProcessorError(fault) if fault else error) from error
        except RuntimeError as error:
            raise (ProcessorError(UNMERGED) if is_unmerged(error) else error) from error

    def refuses(case: Case) -> list[str]:
        if "hooks" in case.features and not isinstance(processor, nn.Module):
            return ["it is no nn.Module and has no hooks"]
        return ["the models' own code needs at least one token"] if "empty" in case.features else []

    return Candidate(name or getattr(processor, "__name__", type(processor).__name__), call, refuses)


def _fault(kind: Kind, processor: Any) -> str:
    """A sentence if a processor's signature does not fit its calls; "" if it does."""
    if not callable(processor) and entry(processor) is not None:
        return (
            "it has only forward, and Diffusers calls the processor itself: name it __call__, or derive from nn.Module"
        )
    try:
        check(processor, f"the attention of {kind.name}", kind.make(frozenset()), [CallSite(kind.keywords, 1)])
    except ProcessorError as error:
        return str(error)
    return ""


def _reference(
    site: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    hooked: bool = False,
) -> Outputs:
    """site(hidden_states [B,T,C], encoder_hidden_states [B,S,C], ...) as its model calls it -> both of them.

    If the text is only attended to, or absent, the second output is empty.
    """
    given: dict[str, Any] = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
    if image_rotary_emb is not None:
        given["image_rotary_emb"] = image_rotary_emb
    fired: list[int] = []
    processor: Any = site.processor
    watched = hooked and isinstance(processor, nn.Module)
    hook = processor.register_forward_hook(lambda *seen: fired.append(1)) if watched else None
    found = site(hidden_states, **given)
    if hook is not None:
        hook.remove()
        if not fired:
            raise WrongReturn(
                "its __call__ hides nn.Module's, so forward hooks never fire: offloading and profiling pass it by; "
                "name it forward, or be no nn.Module"
            )
    return _streams(found, joint=_is_joint(site) and encoder_hidden_states is not None)


def _is_joint(site: nn.Module) -> bool:
    return getattr(site, "add_k_proj", None) is not None


def _streams(found: Any, joint: bool) -> Outputs:
    """A processor's result as two streams; raises WrongReturn if the blocks would unpack it wrongly."""
    if joint:
        if isinstance(found, tuple) and len(found) == 2:
            return found
        raise WrongReturn(
            f"it returns {_described(found)} where the block unpacks hidden_states and encoder_hidden_states: "
            "a batch of two would be taken apart silently"
        )
    if isinstance(found, Tensor):
        return found, found.new_empty(0)
    raise WrongReturn(f"it returns {_described(found)} where the block expects one tensor")


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return "one tensor"
    return f"a {type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__


class _Attending(TorchFunctionMode):
    """Within it torch's fused attention is replaced by a function of (attend, query, key, value, mask)."""

    def __init__(self, instead: Callable[..., Tensor]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = inspect.Signature.bind(_SDPA, *args, **(kwargs or {})).arguments
        return self.instead(func, given["query"], given["key"], given["value"], given.get("attn_mask"))


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    """Only its signature is used: torch's own is written in C."""


_SDPA = inspect.signature(_sdpa)


def _unturned(attend: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[B,H,T,D] rearranged so that merging heads gives the result of a forgotten transpose."""
    out: Tensor = attend(query, key, value, mask)
    B, H, T, D = out.shape
    return out.reshape(B, T, H, D).transpose(1, 2)


def _transpose_forgotten(inputs: Inputs) -> Outputs:
    with _Attending(_unturned):
        return _reference(**inputs)


def _unscaled(inputs: Inputs) -> Outputs:
    with _Attending(lambda attend, q, k, v, mask: attend(q * q.shape[-1] ** 0.5, k, v, mask)):
        return _reference(**inputs)


def _without(argument: str) -> Callable[[Inputs], Outputs | None]:
    def compute(inputs: Inputs) -> Outputs | None:
        return None if inputs.get(argument) is None else _reference(**{**inputs, argument: None})

    return compute


def _swapped(inputs: Inputs) -> Outputs | None:
    first, second = _reference(**inputs)
    return (second, first) if second.shape == first.shape else None


MISTAKES = (
    Mistake(
        "positions lost",
        "image_rotary_emb does not arrive (its __call__ does not name it, hides it behind *args, **kwargs, or has temb "
        "in its place): Diffusers drops it with a log line, and the model loses its positions",
        _without("image_rotary_emb"),
    ),
    Mistake("mask ignored", "attention_mask is ignored: padding is attended to", _without("attention_mask")),
    Mistake("pair swapped", "it returns the text before the image: silent wherever both are equally long", _swapped),
    Mistake(
        "transpose forgotten",
        "heads are merged without moving them behind the tokens first, which mixes tokens with heads silently",
        _transpose_forgotten,
    ),
    Mistake("scale forgotten", "the logits are not divided by sqrt(head_dim)", _unscaled),
)


def _attention(features: frozenset[str]) -> nn.Module:
    attention = require("diffusers.models.attention_processor", extra="diffusers")
    return attention.Attention(query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, bias=True)


def _hunyuan(features: frozenset[str]) -> nn.Module:
    attention = require("diffusers.models.attention_processor", extra="diffusers")
    return attention.Attention(
        query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, bias=True, qk_norm="layer_norm", eps=1e-6,
        processor=attention.HunyuanAttnProcessor2_0(),
    )  # fmt: skip


def _sd3(features: frozenset[str]) -> nn.Module:
    attention = require("diffusers.models.attention_processor", extra="diffusers")
    return attention.Attention(
        query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, added_kv_proj_dim=WIDTH, out_dim=WIDTH, bias=True,
        context_pre_only=False, qk_norm="rms_norm", eps=1e-6, processor=attention.JointAttnProcessor2_0(),
    )  # fmt: skip


def _flux(features: frozenset[str]) -> nn.Module:
    flux = require("diffusers.models.transformers.transformer_flux", extra="diffusers")
    joint: dict[str, Any] = {"added_kv_proj_dim": WIDTH, "context_pre_only": False} if "text" in features else {}
    return flux.FluxAttention(
        query_dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, out_dim=WIDTH, bias=True, eps=1e-6,
        pre_only=not joint, **joint,
    )  # fmt: skip


_PLAIN_CASES = (("self", ""), ("self, padded", "mask"), ("one row", "single"), ("forward hooks", "hooks"))
_JOINT_CASES = (("joint", "text"), ("joint, equal lengths", "text equal"), ("joint, one row", "text single"))
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "a UNet, PixArt, DiT",
            _attention,
            ("encoder_hidden_states", "attention_mask"),
            (*_PLAIN_CASES, ("cross", "text"), ("cross, padded", "text mask")),
        ),
        Kind("HunyuanDiT", _hunyuan, ("image_rotary_emb",), tuple((n, f"{f} rotary") for n, f in _PLAIN_CASES)),
        Kind("SD3", _sd3, ("encoder_hidden_states",), (*_JOINT_CASES, ("forward hooks", "text hooks"))),
        Kind(
            "Flux",
            _flux,
            ("encoder_hidden_states", "image_rotary_emb"),
            (
                *((name, f"{features} rotary") for name, features in _JOINT_CASES),
                ("joint, padded", "text rotary mask"),
                ("single stream", "rotary"),
                ("forward hooks", "text rotary hooks"),
            ),
        ),
    )
}
_SECOND_STREAM = {"add_q_proj", "add_k_proj", "norm_added_q", "to_add_out", "to_added_qkv"}
_ROTARY = {"image_rotary_emb", "apply_rotary_emb"}


def _kind_of(processor: Any) -> str:
    names = set(_names(processor, set()))
    if names & _SECOND_STREAM:
        return "Flux" if names & _ROTARY else "SD3"
    return "HunyuanDiT" if names & _ROTARY else "a UNet, PixArt, DiT"


def _names(thing: Any, seen: set[int]) -> Iterator[str]:
    """The names used by a processor's code, by what it calls, and by the processors it holds."""
    if id(thing) in seen or (isinstance(thing, nn.Module) and entry(thing) is None):
        return
    seen.add(id(thing))
    if isinstance(thing, FunctionType):
        yield from _code_names(thing.__code__)
        for callee in Rerouter({}).callees(thing):
            yield from _names(callee, seen)
        for cell in thing.__closure__ or ():
            yield from _names(cell.cell_contents, seen)
    elif entry(thing) is not None and type(thing).__module__.partition(".")[0] not in ("torch", "builtins"):
        for one in type(thing).__mro__:
            if one is not nn.Module:
                for attribute in vars(one).values():
                    yield from _names(attribute, seen) if isinstance(attribute, FunctionType) else ()
        for held in vars(thing).values() if hasattr(thing, "__dict__") else ():
            yield from _names(held, seen)


def _code_names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_names(constant)


def _instance(processor: Any) -> Any:
    if not isinstance(processor, type):
        return processor
    try:
        return processor()
    except TypeError as error:
        raise ValueError(
            f"processor: {processor.__name__} cannot be made without arguments ({error}); name an object of it instead"
        ) from error


def _case(kind: Kind, name: str, features: frozenset[str], tokens: int = TOKENS) -> Case:
    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)

        def normal(*shape: int) -> Tensor:
            return drawn(*shape).to(device)

        with torch.device("cpu"):
            site = kind.make(features)
        with torch.no_grad():
            for parameter in site.parameters():
                # Large enough that attention is not uniform, so that a lost mask or position has a large effect.
                size = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
                parameter.copy_(drawn(*parameter.shape) * size + (parameter if parameter.dim() == 1 else 0))
        rows = 1 if "single" in features else 2
        words = tokens if "equal" in features else WORDS
        inputs: dict[str, Any] = {"site": site.to(device, dtype).eval(), "hidden_states": normal(rows, tokens, WIDTH)}
        if "text" in features:
            inputs["encoder_hidden_states"] = normal(rows, words, WIDTH)
        joint = _is_joint(site) and "text" in features
        if "rotary" in features:
            inputs["image_rotary_emb"] = _rotary(tokens + (words if joint else 0), device)
        if "mask" in features:
            keys = tokens + words if joint else words if "text" in features else tokens
            inputs["attention_mask"] = _mask(keys, joint, dtype, device)
        return {**inputs, "hooked": True} if "hooks" in features else inputs

    return Case(name, features, make)


def _rotary(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, 8], in float32 whatever the model's dtype, as models make them."""
    angle = torch.arange(length, device="cpu")[:, None] * 10.0 ** -torch.arange(4, device="cpu")
    angle = angle.repeat_interleave(2, 1).to(device, torch.float32)
    return angle.cos(), angle.sin()


def _mask(keys: int, joint: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row 1 may not see the last four keys: boolean [B,1,1,S] for Flux, added [B,1,S] for `Attention`."""
    seen = torch.arange(keys, device=device) < torch.tensor([[keys], [keys - 4]], device=device)
    if joint:
        return seen[:, None, None]
    return torch.zeros(2, 1, keys, dtype=dtype, device=device).masked_fill(~seen[:, None], -10000.0)


def _sized(kind: Kind, n: int) -> Case:
    features = frozenset(kind.cases[0][1].split()) | ({"empty"} if n == 0 else set())
    return _case(kind, f"{n} tokens", features, n)


def _given(inputs: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
    return dict(inputs)


def _rows(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Each row of the batch as a call of its own."""
    parts = []
    for row in (slice(b, b + 1) for b in range(inputs["hidden_states"].shape[0])):
        alone = {name: value[row] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        parts.append(Part(Case(f"{case.name}, row {row.start}", case.features, partial(_given, alone)), (row,)))
    return tuple(parts)
