"""The `generate` command: the embedded language model writes, byte by byte as it comes."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL = "bytes-lm"


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="bytes-lm")] = MODEL,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "def ",
    max_tokens: Annotated[int, typer.Option(help="At most so many bytes behind the prompt.")] = 400,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte; 1 draws as the model thinks.")] = 0.7,
) -> None:
    """Write text behind a prompt, streamed; the model learned from Python's standard library."""
    from foci.accelerate import bytes_lm

    if model != MODEL:
        raise ValueError(f"generate: unknown model {model!r}; expected {MODEL}")

    def emit(text: str) -> None:
        typer.echo(text, nl=False)

    bytes_lm.write(bytes_lm.load(), prompt, tokens=max_tokens, temperature=temperature, seed=seed, emit=emit)
    typer.echo()
