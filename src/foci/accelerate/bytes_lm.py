"""bytes-lm, the embedded language model: three GatedDeltaNet layers to one of windowed softmax, over bytes."""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from foci.bench.measure import clock
from foci.core.errors import ShapeError, require
from foci.core.shapes import dense
from foci.nn import Attention, Cache, GatedDeltaNet, RMSNorm
from foci.nn.parts import sizes
from foci.ops.arguments import number, plain, short

ASSETS = Path(__file__).parent / "assets" / "bytes_lm"
NEWFILE = 0  # the byte before a file's first: what a model without a prompt begins with
DELTA, SOFTMAX = "linear_attention", "full_attention"  # transformers' words for the kinds of layers
HYBRID: dict[str, Any] = {"layer_types": [DELTA, DELTA, DELTA, SOFTMAX] * 2, "intermediate_size": 256, "window": 256}
# The same depth and width; the wider feed-forward layers make up for the weights that a GatedDeltaNet has more.
TWIN: dict[str, Any] = {"layer_types": [SOFTMAX] * 8, "intermediate_size": 294, "window": None}


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)): one layer; the configuration gives its kind of mixer."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.mixer_norm, self.mlp_norm = RMSNorm(size), RMSNorm(size)
        if config.layer_types[index] == DELTA:
            self.mixer: nn.Module = GatedDeltaNet(size, config.linear_num_heads, layer_index=index)
        else:
            heads = config.num_attention_heads
            self.mixer = Attention(size, heads, window=config.window, qk_norm=True, layer_index=index)
        self.up = nn.Linear(size, 2 * inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Float[Tensor, "B T D"], mask: Tensor | None, cache: Cache | None) -> Float[Tensor, "B T D"]:
        x = x + self.mixer(self.mixer_norm(x), mask=mask, cache=cache)
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class BytesCache(Cache):
    """A foci.nn.Cache with the methods that transformers' generation needs."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: row b becomes row beam_idx[b]."""
        self.reorder(beam_idx)


class ByteModel:
    """Bytes in, logits of the next byte out: what BytesForCausalLM is, but for transformers' own base classes."""

    training: bool
    embed: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def build(self, config: Any) -> None:
        """Make the layers that the configuration asks for."""
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits of the next byte [B,T,256]. attention_mask [B, seen + T]: 0 where a byte is padding, anywhere."""
        outputs = require("transformers.modeling_outputs", extra="transformers")
        memory = past_key_values
        if use_cache is None:
            use_cache = not self.training and labels is None
        if memory is None and use_cache:
            memory = BytesCache()
        mask = real_tokens(attention_mask, input_ids, 0 if memory is None else memory.seen)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask, memory)
        logits = self.head(self.norm(x[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        output = outputs.CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=memory)
        return output.to_tuple() if return_dict is False else output


def config_class() -> Any:
    """BytesConfig, a transformers configuration."""
    return _classes()[0]


def model_class() -> Any:
    """BytesForCausalLM, a transformers PreTrainedModel that generates."""
    return _classes()[1]


@cache
def _classes() -> tuple[Any, Any]:
    # transformers is imported when a model is wanted, so its subclasses are made then.
    library = require("transformers", extra="transformers")

    class BytesConfig(library.PreTrainedConfig):
        """Sizes of a byte-level model. layer_types: of each layer `linear_attention` or `full_attention`."""

        model_type = "foci_bytes"
        vocab_size: int = 256
        hidden_size: int = 128
        intermediate_size: int = HYBRID["intermediate_size"]
        num_attention_heads: int = 2
        linear_num_heads: int = 4
        window: int | None = HYBRID["window"]
        layer_types: list[str] | None = None
        bos_token_id: int | None = NEWFILE
        pad_token_id: int | None = NEWFILE
        eos_token_id: int | None = NEWFILE

        def __post_init__(self, **options: Any) -> None:
            self.layer_types = list(self.layer_types or HYBRID["layer_types"])
            self.num_hidden_layers = len(self.layer_types)
            super().__post_init__(**options)

    class BytesForCausalLM(ByteModel, library.PreTrainedModel, library.GenerationMixin):
        """Bytes in, logits of the next byte out; recurrent and windowed layers have a cache of constant size."""

        config_class = BytesConfig
        base_model_prefix = "model"
        _is_stateful = True  # a recurrent state cannot be taken back: no assisted decoding

        def __init__(self, config: BytesConfig) -> None:
            super().__init__(config)
            self.build(config)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Nothing: every module initialised itself, and `untrained` does the rest."""

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        @classmethod
        def _supports_default_dynamic_cache(cls) -> bool:
            return False  # forward makes a BytesCache

    for cls in (BytesConfig, BytesForCausalLM):
        cls.__qualname__ = cls.__name__
    return BytesConfig, BytesForCausalLM


def real_tokens(attention_mask: Tensor | None, input_ids: Tensor, seen: int = 0) -> Tensor | None:
    """transformers' mask of all tokens so far, or of these, as the boolean one of these; None where none is padding.

    Raises ShapeError where it is neither: ones of another shape would hide nothing, and say nothing of it. ValueError
    for a floating mask, since those that are added to logits are 0 where a byte is real, and on a CPU for values other
    than 0 and 1.
    """
    if attention_mask is None:
        return None
    dense("bytes-lm", "attention_mask", attention_mask)
    rows, T = input_ids.shape[0], input_ids.shape[-1]
    if attention_mask.shape not in ((rows, T), (rows, seen + T)):
        shape = list(attention_mask.shape)
        raise ShapeError(f"bytes-lm: attention_mask has shape {shape}; expected [{rows}, {seen + T}]")
    if attention_mask.dtype.is_floating_point or attention_mask.dtype.is_complex:
        raise ValueError(
            f"bytes-lm: attention_mask is {short(attention_mask.dtype)}; expected bool or integers, 1 where a byte is "
            "real and 0 where it is padding"
        )
    if attention_mask.device.type == "cpu" and plain(attention_mask):
        wrong = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if wrong.numel():
            raise ValueError(f"bytes-lm: attention_mask holds {wrong[0].item()}; expected 1 (real) or 0 (padding)")
    mask = attention_mask[:, attention_mask.shape[1] - T :].bool()
    return None if bool(mask.all()) else mask


def untrained(sizes: dict[str, Any], seed: int = 0) -> Any:
    """A model of these sizes (HYBRID, TWIN) with fresh weights, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # which fork_rng puts back
        model = model_class()(config_class()(**sizes))
        depth = len(model.blocks)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if into_stream else 0.04)
    return model


def load(folder: Path = ASSETS) -> Any:
    """The trained model from the files foci ships, in float32 and evaluation mode; no network."""
    weights = require("safetensors.torch", extra="transformers").load_file(folder / "model.safetensors")
    model = model_class()(config_class().from_pretrained(folder, local_files_only=True))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def library_files(split: Literal["train", "validation"]) -> list[Path]:
    """The modules of Python's standard library as installed here, one in 24 of them held out, by a hash of the path."""
    root = Path(sysconfig.get_path("stdlib"))
    left = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"}
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in left]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in sorted(files) if held_out(path.relative_to(root).as_posix()) == (split == "validation")]


def held_out(name: str) -> bool:
    """Whether the file of that name is of the validation split."""
    return hashlib.sha256(name.encode()).digest()[0] % 24 == 0


def as_bytes(text: str | bytes) -> Int[Tensor, " T"]:
    """Text as the model reads it: UTF-8."""
    return torch.tensor(list(text.encode() if isinstance(text, str) else text), dtype=torch.long, device="cpu")


def _read(prompt: str) -> Int[Tensor, " T"]:
    """The bytes of a prompt, or what is wrong with it."""
    if not isinstance(prompt, str):
        raise TypeError(f"bytes-lm: prompt must be a str, got {prompt!r}")
    try:
        return as_bytes(prompt)
    except UnicodeEncodeError as error:
        wrong = prompt[error.start]
        raise ValueError(f"bytes-lm: prompt has {wrong!r} at {error.start}; expected text, whole characters") from None


def text_of(files: list[Path]) -> Int[Tensor, " T"]:
    """All files end to end, each behind NEWFILE."""
    parts = (bytes([NEWFILE]) + path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def stretches(text: Int[Tensor, " T"], length: int) -> Iterator[Int[Tensor, " L"]]:
    """Pieces of `length` bytes, each with the one after it, to read and to predict."""
    for start in range(0, text.numel() - 1, length):
        yield text[start : start + length + 1].long()


@torch.no_grad()
def bits_per_byte(model: Any, text: Int[Tensor, " T"], length: int = 512, batch: int = 16) -> float:
    """-log2 of the probability of each byte given those before it in its stretch of `length`, on average."""
    pieces = [piece for piece in stretches(text, length) if piece.numel() == length + 1]
    if not pieces:
        raise ValueError(f"bits_per_byte: text has {text.numel()} bytes; expected at least {length + 1}")
    total = 0.0
    for first in range(0, len(pieces), batch):
        rows = torch.stack(pieces[first : first + batch]).to(model.device)
        logits = model(rows[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return total / (len(pieces) * length * math.log(2))


@torch.no_grad()
def write(
    model: Any,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    emit: Callable[[str], None] = lambda text: None,
) -> str:
    """The prompt and what the model writes behind it: at most `tokens` bytes, or until it ends the file.

    temperature: 0 takes the likeliest byte every time; above it the byte is drawn, by `seed`. emit is called with each
    piece as it is written, whole characters only, the prompt first. Raises ValueError for a prompt that is no text
    (of bytes that are no UTF-8), a temperature below 0 or NaN, tokens that are no integer of at least 1 and a seed that
    is none of 64 bits; TypeError for a prompt that is no str and a temperature that is no number.
    """
    given = _read(prompt)
    sizes("bytes-lm", {"tokens": tokens})
    temperature = number("bytes-lm", "temperature", temperature, "number of at least 0", 0, math.inf)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"bytes-lm: seed is {seed!r}; expected an integer from -2^63 to 2^64 - 1")
    emit(prompt)
    generator, memory = torch.Generator().manual_seed(int(seed)), BytesCache()
    decoder, written = codecs.getincrementaldecoder("utf-8")("replace"), [prompt]
    ids = torch.cat([as_bytes(bytes([NEWFILE])), given])[None].to(model.device)
    for place in range(tokens):
        logits = model(ids, past_key_values=memory, logits_to_keep=1).logits[0, -1].double().cpu()
        if temperature:
            heights = (logits - logits.max()) / temperature  # at most 0, so that no small temperature overflows
            byte = int(torch.multinomial(heights.softmax(-1), 1, generator=generator))
        else:
            byte = int(logits.argmax())
        ended = byte == NEWFILE
        text = decoder.decode(b"" if ended else bytes([byte]), final=ended or place == tokens - 1)
        if text:
            written.append(text)
            emit(text)
        if ended:
            break
        ids = torch.tensor([[byte]], device=model.device)
    return "".join(written)


CONTEXTS = (256, 8192)


@torch.no_grad()
def cost(models: dict[str, Any], contexts: tuple[int, ...] = CONTEXTS, rounds: int = 20) -> list[dict[str, Any]]:
    """What one more byte costs each model behind each context: milliseconds (the median) and the bytes of its cache.

    All take turns, byte by byte, so that whatever else runs on the machine touches all alike.
    """
    drawn = torch.randint(1, 128, (1, max(contexts)), generator=torch.Generator().manual_seed(0), device="cpu")
    rows: list[dict[str, Any]] = []
    caches: list[BytesCache] = []
    steps: list[Callable[[], Any]] = []
    for name, model in models.items():
        ids = drawn.to(model.device)
        for context in contexts:
            memory = BytesCache()
            for piece in ids[:, :context].split(512, 1):
                model(piece, past_key_values=memory, logits_to_keep=1)
            rows.append({"model": name, "context": context})
            caches.append(memory)
            steps.append(partial(model, ids[:, :1], past_key_values=memory, logits_to_keep=1))
    times: list[list[float]] = [[] for _ in rows]
    for turn in range(rounds + 2):
        for step, taken in zip(steps, times, strict=True):
            seconds = clock(step)
            if turn > 1:  # the first two warm up
                taken.append(seconds)
    return [
        {**row, "milliseconds": 1e3 * median(taken), "cache": memory.nbytes}
        for row, memory, taken in zip(rows, caches, times, strict=True)
    ]
