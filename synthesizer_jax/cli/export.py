"""`synthesizer-jax export`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_tensorflow
from synthesizer_jax.cli.options import Check, Imports, storage_argument


def export(
    run: Annotated[pathlib.Path, storage_argument("RUN, or RUN/checkpoints/STEP.")],
    directory: Annotated[pathlib.Path, storage_argument("The new directory.", "DIR")],
    *,
    to: Annotated[
        str, typer.Option(help="huggingface, t5x, t5x-scanned, stablehlo or savedmodel.")
    ] = "huggingface",
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of the tensors for transformers.")
    ] = "float32",
    check: Check = None,
    inputs_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens of an input (stablehlo and savedmodel only); by default as in "
            "training.",
            min=1,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens of a target (stablehlo and savedmodel only); by default as in "
            "training.",
            min=1,
        ),
    ] = None,
    beams: Annotated[
        int, typer.Option(help="Beams of the decoding loop; 1 is greedy decoding.", min=1)
    ] = 1,
    imports: Imports = None,
) -> None:
    """Write a run's model for another library, or as programs that need none.

    Transformers and T5X take T5s only; a Synthesizer is refused with the name of the part that they lack.
    StableHLO takes every model: a directory of programs for CPUs, NVIDIA GPUs and TPUs, with a loader that
    needs only jax and, for SentencePiece vocabularies, sentencepiece; savedmodel is the same for
    TensorFlow.

    Example: synthesizer-jax export runs/flan flan-finetuned

    Example: synthesizer-jax export runs/rv rv-programs --to stablehlo --max-length 32
    """
    from synthesizer_jax.pretrained.export import SAVED_MODEL, export_run
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    if to == SAVED_MODEL:
        load_tensorflow()
    export_run(
        run,
        directory,
        to=to,
        dtype=dtype,
        check=check,
        inputs_length=inputs_length,
        max_length=max_length,
        beams=beams,
        report=typer.echo,
    )
    typer.echo(f"{directory} holds the model of {run}")
