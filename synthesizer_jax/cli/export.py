"""`synthesizer-jax export`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.options import Check, Imports, storage_argument


def export(
    run: Annotated[pathlib.Path, storage_argument("RUN, or RUN/checkpoints/STEP.")],
    directory: Annotated[pathlib.Path, storage_argument("The new directory.", "DIR")],
    *,
    to: Annotated[str, typer.Option(help="huggingface, t5x or t5x-scanned.")] = "huggingface",
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of the tensors for transformers.")
    ] = "float32",
    check: Check = None,
    imports: Imports = None,
) -> None:
    """Write a run's model for another library: a folder of transformers, or a checkpoint of T5X.

    Only T5s can be exported to these; a Synthesizer is refused with the name of the part that they lack.

    Example: synthesizer-jax export runs/flan flan-finetuned
    """
    from synthesizer_jax.pretrained.export import export_run
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    export_run(run, directory, to=to, dtype=dtype, check=check, report=typer.echo)
    typer.echo(f"{directory} holds the model of {run}")
