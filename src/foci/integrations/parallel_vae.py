"""Decode an image's or a video's rows on several ranks, exactly: halos, norm statistics and attention are exchanged.

The rows of the latent are sharded. Every layer of the decoder is either local to a row, and runs unchanged, or gets
what it needs from other ranks: a convolution the neighbouring rows, a group norm the mean and variance of the whole,
attention the keys and values of all rows. Nothing is blended or approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.core.errors import Unsupported, a_type
from foci.integrations.overrides import Overrides, require_evaluating, require_sampling
from foci.integrations.undoable import Undoable
from foci.parallel.exchange import Session, all_gather, shift
from foci.parallel.group import Group

__all__ = ["DecodeHandle", "install"]

# Layers that are local to a row, or only call layers of this list and of `_REACHING`.
_LOCAL = {
    "AutoencoderTinyBlock", "Decoder", "DecoderTiny", "Dropout", "DupUp3D", "Identity", "Linear",
    "ModuleList", "ReLU", "ResnetBlock2D", "Sequential", "SiLU", "UNetMidBlock2D", "UpDecoderBlock2D", "Upsample2D",
    "WanDecoder3d", "WanMidBlock", "WanRMS_norm", "WanResample", "WanResidualBlock", "WanResidualUpBlock", "WanUpBlock",
}  # fmt: skip
_REACHING = ("Conv2d", "GroupNorm", "Attention", "Upsample", "WanUpsample", "WanCausalConv3d", "WanAttentionBlock")


@dataclass
class DecodeHandle(Undoable):
    """The handle of `install`: the number of layers that exchange rows, and of decodes split since."""

    layers: int
    rows: _Rows = field(repr=False)
    _overrides: Overrides = field(repr=False)

    def facts(self) -> dict[str, Any]:
        """Figures for a report."""
        return {"ranks": self.rows.group.size, "layers": self.layers, "decodes": self.rows.decodes}

    def restore(self) -> None:
        """Restore the decoder's original objects."""
        self._overrides.restore()


def install(vae: nn.Module, group: Any) -> DecodeHandle:
    """Split the decoder of a Diffusers autoencoder by rows over the ranks of `group`, for sampling.

    Every rank calls `vae.decode(z)` with the same whole latent [..., C, H, W] and gets the same whole result, equal to
    one process to rounding. Rank r holds H // size rows, the first H % size ranks one more. A latent of fewer rows than
    ranks is decoded whole by each. Tiling and slicing go on working: each tile is split.

    Raises Unsupported, naming the layers, for a decoder with a layer that is neither local to a row nor known here;
    ValueError in training mode and where a gradient would be asked for.
    """
    group = Group.of(group)
    decoder = getattr(vae, "decoder", None)
    if not isinstance(decoder, nn.Module):
        raise ValueError(f"install: vae is {a_type(vae)}; expected an autoencoder with a decoder")
    if reasons := _unknown(decoder):
        raise Unsupported(f"install: the decoder of {type(vae).__name__} cannot be split by rows", reasons)
    require_evaluating("parallel_vae.install", decoder)
    rows, overrides = _Rows(group), Overrides()
    layers = 0
    for _, module in decoder.named_modules():
        for target, make in _exchanges(module):
            layers += 1
            _put(overrides, target, partial(make, rows, target))
    whole = overrides.put(decoder, lambda *args, **kwargs: _decode(rows, decoder, whole, args, kwargs))
    return DecodeHandle(layers, rows, overrides)


def _kind(module: nn.Module) -> str:
    """The name of a layer's class; QwenImage's decoder is Wan's, class by class, under its own name."""
    name = type(module).__name__
    return f"Wan{name.removeprefix('QwenImage')}" if name.startswith("QwenImage") else name


def _put(overrides: Overrides, module: nn.Module, run: Callable[..., Any]) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(before, *args, **kwargs)

    before = overrides.put(module, forward)


class _Rows:
    """The sharding of rows in the running decode; outside of one, layers see all rows."""

    def __init__(self, group: Group) -> None:
        self.group, self.decodes = group, 0
        self.counts: list[int] = []
        self.session: Session | None = None

    def cut(self, height: int) -> slice:
        """This rank's rows of `height`."""
        many, more = divmod(height, self.group.size)
        self.counts = [many + (rank < more) for rank in range(self.group.size)]
        start = sum(self.counts[: self.group.rank])
        return slice(start, start + self.counts[self.group.rank])

    def scaled(self, mine: int) -> list[int]:
        """Every rank's number of rows (or tokens) where this one has `mine`: all are scaled by the same factor."""
        each, left = divmod(mine, self.counts[self.group.rank])
        if left:
            raise Unsupported(
                "parallel_vae: the decoder's height is no multiple of the latent's",
                [f"{mine} rows of {self.counts[self.group.rank]} on rank {self.group.rank}"],
            )
        return [count * each for count in self.counts]

    def gathered(self, x: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's tensor."""
        assert self.session is not None
        return all_gather(x.contiguous(), shapes, self.session)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """The rows of x of all ranks, concatenated along `dim`."""
        shapes = [(*x.shape[:dim], many, *x.shape[dim + 1 :]) for many in self.scaled(x.shape[dim])]
        return torch.cat(self.gathered(x, shapes), dim)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows, along `dim`, of a tensor with all rows."""
        each = x.shape[dim] // sum(self.counts)
        start = sum(self.counts[: self.group.rank]) * each
        return x.narrow(dim, start, self.counts[self.group.rank] * each)

    def halo(self, x: Tensor, reach: int, dim: int) -> Tensor:
        """x with `reach` more rows at each end of `dim`: the neighbours' rows, zeros beyond the picture."""
        assert self.session is not None
        group, length = self.group, x.shape[dim]
        fewest = min(self.scaled(length))
        if fewest < reach:
            raise Unsupported(
                "parallel_vae: the halo of a convolution is wider than a rank's rows",
                [f"it reaches {reach} rows, a rank holds {fewest}; use fewer ranks"],
            )
        first, last = (x.narrow(dim, at, reach).contiguous() for at in (0, length - reach))
        down = shift([last], [last.shape], 1, self.session)
        up = shift([first], [first.shape], -1, self.session)
        (above,), (below,) = down.wait(), up.wait()
        zeros = torch.zeros_like(first)
        return torch.cat(
            [zeros if group.rank == 0 else above, x, zeros if group.rank == group.size - 1 else below], dim
        )


def _decode(
    rows: _Rows, decoder: nn.Module, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    z, *rest = args if args else (kwargs.pop("sample"),)
    require_sampling("parallel_vae", decoder, (z, *rest, *kwargs.values()))
    dim = z.dim() - 2
    if rows.session is not None or rows.group.size == 1 or z.shape[dim] < rows.group.size:
        return whole(z, *rest, **kwargs)
    if any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())):
        raise Unsupported("parallel_vae: the decoder was given a second tensor", ["latent_embeds are not split"])
    mine = z[(slice(None),) * dim + (rows.cut(z.shape[dim]),)]
    with Session(rows.group, "parallel_vae") as rows.session:
        try:
            rows.session.agree({"latent": tuple(z.shape), "dtype": z.dtype})
            out = rows.whole(whole(mine, *rest, **kwargs), dim)
        finally:
            rows.session = None
    rows.decodes += 1
    return out


def _exchanges(module: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The layers in `module`, or itself, that need other ranks' rows, with the function that each then runs."""
    kind = _kind(module)
    if kind == "Conv2d" and module.kernel_size[0] > 1:
        return [(module, _conv2d)]
    if kind == "WanCausalConv3d" and module.kernel_size[1] > 1:
        return [(module, _conv3d)]
    if kind == "GroupNorm":
        return [(module, _group_norm)]
    if kind == "WanAttentionBlock":
        return [(module, _video_attention)]
    if kind == "Attention":
        # Queries stay local, keys and values cover all rows: so any processor works unchanged.
        return [(module.to_k, _all_tokens), (module.to_v, _all_tokens)]
    return []


def _conv2d(rows: _Rows, conv: Any, before: Callable[..., Tensor], x: Tensor) -> Tensor:
    if rows.session is None:
        return before(x)
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1) // 2
    x = rows.halo(x, reach, x.dim() - 2)
    return F.conv2d(x, conv.weight, conv.bias, conv.stride, (0, conv.padding[1]), conv.dilation, conv.groups)


def _conv3d(rows: _Rows, conv: Any, before: Callable[..., Tensor], x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    if rows.session is None:
        return before(x, cache_x)
    left, right, _, _, front, back = conv._padding
    if cache_x is not None and front > 0:
        x = torch.cat([cache_x.to(x.device), x], 2)
        front -= cache_x.shape[2]
    x = F.pad(rows.halo(x, (conv.kernel_size[1] - 1) // 2, 3), (left, right, 0, 0, front, back))
    return F.conv3d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)


def _group_norm(rows: _Rows, norm: nn.GroupNorm, before: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Combines the ranks' means and variances by Chan, Golub and LeVeque, without differences of large sums."""
    if rows.session is None:
        return before(x)
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    wide = x.float() if narrow else x
    variance, mean = torch.var_mean(wide.reshape(x.shape[0], norm.num_groups, -1), -1, correction=0)
    many = x[0].numel() // norm.num_groups
    mine = torch.stack([mean, variance * many, torch.full_like(mean, many)])
    means, squares, counts = torch.stack(rows.gathered(mine, [tuple(mine.shape)] * rows.group.size)).unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    each = x.shape[1] // norm.num_groups
    scale = (variance + norm.eps).rsqrt().repeat_interleave(each, 1)
    shift = -mean.repeat_interleave(each, 1) * scale
    if norm.affine:
        scale, shift = scale * norm.weight, shift * norm.weight + norm.bias
    scale, shift = (part.to(wide.dtype).view(*x.shape[:2], *[1] * (x.dim() - 2)) for part in (scale, shift))
    # In place if it is our own copy, as these are the largest tensors of a decode.
    return wide.mul_(scale).add_(shift).to(x.dtype) if narrow else torch.addcmul(shift, wide, scale)


def _all_tokens(rows: _Rows, linear: nn.Module, before: Callable[..., Tensor], x: Tensor) -> Tensor:
    return before(x) if rows.session is None else rows.whole(before(x), 1)


def _video_attention(rows: _Rows, block: nn.Module, before: Callable[..., Tensor], x: Tensor) -> Tensor:
    return before(x) if rows.session is None else rows.own(before(rows.whole(x, 3)), 3)


def _unknown(decoder: nn.Module) -> list[str]:
    return [f"{name or 'the decoder'}: {why}" for name, module in decoder.named_modules() if (why := _reason(module))]


def _reason(module: Any) -> str:
    """Why a layer cannot run on a part of the rows; "" if it can."""
    kind = _kind(module)
    if kind not in _LOCAL and kind not in _REACHING:
        return f"it is {a_type(module)}, of which it is not known what rows it reads"
    if kind in ("Conv2d", "WanCausalConv3d"):
        return _conv_reason(module)
    if kind == "Attention":
        return _attention_reason(module)
    if kind in ("Upsample", "WanUpsample") and not _repeats(module):
        return f"it upsamples by {module.scale_factor}, {module.mode}; expected a whole number, nearest"
    return ""


def _conv_reason(conv: Any) -> str:
    height = conv.kernel_size[-2]
    rows = (conv._padding[2] if hasattr(conv, "_padding") else conv.padding[0]) if height > 1 else 0
    if conv.stride[-2] != 1:
        return f"its stride is {conv.stride[-2]} rows; expected 1"
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return f"its padding is {conv.padding_mode if conv.padding_mode != 'zeros' else conv.padding}; expected zeros"
    if height % 2 == 0 or 2 * rows != conv.dilation[-2] * (height - 1):
        return f"it changes the number of rows: a kernel of {height}, {rows} rows of padding"
    return ""


def _attention_reason(attention: Any) -> str:
    if getattr(attention, "fused_projections", False):
        return "its projections are fused; call unfuse_qkv_projections() first"
    if attention.spatial_norm is not None:
        return "it normalises by the latent (SpatialNorm)"
    if attention.norm_cross is not None or attention.added_kv_proj_dim is not None:
        return "it has added or normalised keys"
    return ""


def _repeats(upsample: Any) -> bool:
    factors = upsample.scale_factor
    factors = factors if isinstance(factors, tuple) else (factors,)
    return upsample.mode in ("nearest", "nearest-exact") and all(f is not None and f == int(f) for f in factors)
