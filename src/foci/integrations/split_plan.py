"""Split plans of known diffusion models: which tensors are split along tokens, and where they are gathered."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from foci.core.errors import Unsupported

Stream = Literal["image", "text", "front", "back"]
Kind = Literal["self", "front", "back", "cross", "whole"]
KINDS: dict[str, str] = {
    "self": "every token is image",
    "front": "text in front of image, in one sequence",
    "back": "text behind image, in one sequence",
    "cross": "image asks, text answers",
    "whole": "nothing in it is split",
}


_STREAMS = {"text": "text", "front": "text in front of image", "back": "text behind image"}


@dataclass(frozen=True)
class Cut:
    """A tensor that is split: each rank keeps the part of its tokens.

    `module` is a qualified name, "" for the model itself; `*` in it matches any one name between dots. `tensor` is an
    argument of its forward by name, or an output by number; of a list or tuple, every tensor in it. `dim` is the
    dimension of the `stream`'s tokens: image, text, or both in one sequence with the text in front or behind. A tensor
    with another number of dimensions than `rank`, if given, is not per token and not split.
    """

    module: str
    tensor: str | int
    dim: int
    stream: Stream = "image"
    rank: int | None = None

    def __str__(self) -> str:
        what = self.tensor if isinstance(self.tensor, str) else f"output {self.tensor}"
        return f"{self.module or 'the model'}: {what}, dimension {self.dim}"


@dataclass(frozen=True)
class Gather:
    """A module whose output is all-gathered along `dim`, so that every rank has all image tokens again."""

    module: str
    dim: int = 1

    def __str__(self) -> str:
        return f"{self.module}: output, dimension {self.dim}"


@dataclass(frozen=True)
class SplitPlan:
    """How a model is split: plain data, valid for every model of the class.

    `sites` maps attention sites (by pattern) to their kind. `blocks`: modules whose argument `text` gives the number of
    text tokens of joint sites inside them. `refused`: configuration values and arguments for which the plan would be
    wrong, with the reason. `whole_text`: the code needs at least one text token on every rank.
    """

    model: str
    cuts: tuple[Cut, ...]
    gathers: tuple[Gather, ...]
    sites: tuple[tuple[str, Kind], ...]
    blocks: tuple[str, ...] = ()
    text: str = "encoder_hidden_states"
    refused: tuple[tuple[str, Any, str], ...] = ()
    whole_text: bool = False

    def kind(self, site: str) -> Kind | None:
        """The kind of an attention site; None if no pattern matches."""
        return next((kind for pattern, kind in self.sites if fits(pattern, site)), None)

    @property
    def splits_text(self) -> bool:
        """Whether the plan can split the text too."""
        return any(cut.stream == "text" for cut in self.cuts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}:"]
        lines += [
            f"  split   {cut}" + ("" if cut.stream == "image" else f" ({_STREAMS[cut.stream]})") for cut in self.cuts
        ]
        lines += [f"  gather  {gather}" for gather in self.gathers]
        lines += [f"  site    {pattern}: {KINDS[kind]}" for pattern, kind in self.sites]
        return "\n".join(lines)


def fits(pattern: str, name: str) -> bool:
    """Whether a qualified name matches the pattern."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def modules_of(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that match a pattern, in the model's order."""
    return [(name, module) for name, module in model.named_modules() if fits(pattern, name)]


def plan_for(model: nn.Module) -> SplitPlan:
    """The plan of the model's class; raises Unsupported naming the classes that have one."""
    for base in type(model).__mro__:
        if base.__name__ in PLANS:
            return PLANS[base.__name__]
    raise Unsupported(
        f"split: {type(model).__name__} has no plan of how it is split",
        [f"plans are there for {', '.join(PLANS)}"],
        "foci.integrations.split_infer.infer(model, inputs) finds one by running the model, and checks it",
    )


def require_fit(plan: SplitPlan, model: nn.Module, sites: list[str]) -> None:
    """Raise ValueError naming parts of the plan that the model lacks, or an attention site not in the plan."""
    wrong = [*_config(plan, model), *_places(plan, model)]
    for site in sites:
        if plan.kind(site) is None:
            wrong.append(f"it says nothing of the attention site {site}")
    if wrong:
        raise ValueError(f"split: the plan for {plan.model} does not fit this {type(model).__name__}: {wrong[0]}")


def _config(plan: SplitPlan, model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    values = dict(config) if isinstance(config, Mapping) else {}
    for name, value, reason in plan.refused:
        if name in values and value is not None and values[name] == value:
            yield f"its config has {name}={value!r}: {reason}"


def _places(plan: SplitPlan, model: nn.Module) -> Iterator[str]:
    for cut in plan.cuts:
        found = modules_of(model, cut.module)
        if not found:
            yield f"it splits {cut}, and there is no such module"
        for name, module in found:
            if isinstance(cut.tensor, str) and cut.tensor not in inspect.signature(module.forward).parameters:
                yield f"it splits {cut}, and the forward of {name or 'the model'} has no such argument"
    for gather in plan.gathers:
        if not modules_of(model, gather.module):
            yield f"it gathers {gather}, and there is no such module"


_IP_ADAPTER = "an image prompt adds attention calls that the plan does not know"
_FLUX = SplitPlan(
    "FluxTransformer2DModel",
    cuts=(
        Cut("", "hidden_states", -2),
        Cut("", "img_ids", -2),
        Cut("", "encoder_hidden_states", -2, "text"),
        Cut("", "txt_ids", -2, "text"),
        Cut("", "controlnet_block_samples", -2),
        Cut("", "controlnet_single_block_samples", -2),
    ),
    gathers=(Gather("proj_out"),),
    sites=(("transformer_blocks.*.attn", "front"), ("single_transformer_blocks.*.attn", "front")),
    blocks=("transformer_blocks.*", "single_transformer_blocks.*"),
)
PLANS: dict[str, SplitPlan] = {
    plan.model: plan
    for plan in (
        SplitPlan(
            "DiTTransformer2DModel",
            cuts=(Cut("pos_embed", 0, 1),),
            gathers=(Gather("proj_out_2"),),
            sites=(("transformer_blocks.*.attn1", "self"),),
        ),
        _FLUX,
        SplitPlan(
            "SD3Transformer2DModel",
            cuts=(
                Cut("pos_embed", 0, 1),
                Cut("context_embedder", 0, 1, "text"),
                Cut("", "block_controlnet_hidden_states", -2),
            ),
            gathers=(Gather("proj_out"),),
            sites=(("transformer_blocks.*.attn", "back"), ("transformer_blocks.*.attn2", "self")),
            blocks=("transformer_blocks.*",),
        ),
        SplitPlan(
            "PixArtTransformer2DModel",
            cuts=(Cut("pos_embed", 0, 1),),
            gathers=(Gather("proj_out"),),
            sites=(("transformer_blocks.*.attn1", "self"), ("transformer_blocks.*.attn2", "cross")),
            refused=(("attention_mask", None, "the model pads it to the length of its own tokens, which are split"),),
        ),
        SplitPlan(
            "WanTransformer3DModel",
            cuts=(
                Cut("rope", 0, 1),
                Cut("rope", 1, 1),
                Cut("blocks.0", "hidden_states", 1),
                Cut("", "timestep", 1, rank=2),  # Wan 2.2 has a time per token
            ),
            gathers=(Gather("proj_out"),),
            sites=(("blocks.*.attn1", "self"), ("blocks.*.attn2", "cross")),
        ),
        SplitPlan(
            "HunyuanVideoTransformer3DModel",
            cuts=(
                Cut("rope", 0, 0),
                Cut("rope", 1, 0),
                Cut("transformer_blocks.0", "hidden_states", 1),
                Cut("transformer_blocks.0", "encoder_hidden_states", 1, "text"),
            ),
            gathers=(Gather("proj_out"),),
            sites=(
                ("transformer_blocks.*.attn", "back"),
                ("single_transformer_blocks.*.attn", "back"),
                ("context_embedder.token_refiner.refiner_blocks.*.attn", "whole"),
            ),
            blocks=("transformer_blocks.*", "single_transformer_blocks.*"),
            refused=(
                ("image_condition_type", "token_replace", "its blocks count the first tokens they get as first frame"),
            ),
            whole_text=True,  # its code takes the last n tokens as [-n:], which is all of them for n = 0
        ),
    )
}
