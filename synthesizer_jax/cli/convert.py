"""`synthesizer-jax convert`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.options import storage_option


def convert(
    source: Annotated[
        pathlib.Path,
        typer.Argument(help="A folder of Hugging Face transformers, or a msgpack file of T5X."),
    ],
    workdir: Annotated[pathlib.Path, storage_option("The new directory of the run.")],
    *,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="A SentencePiece file, or bytes; by default the folder's own.", metavar="FILE"
        ),
    ] = None,
    extra_ids: Annotated[
        int, typer.Option(help="Sentinels after the pieces of --vocabulary.", min=0)
    ] = 100,
) -> None:
    """Convert a pretrained T5 to a run: T5, FLAN-T5, mT5, umT5, ByT5, UL2.

    Folders need safetensors; nothing in them is executed. `eval` and `generate` take the run; training
    starts from it with --set init_from=DIRECTORY.

    Example: synthesizer-jax convert flan-t5-small --workdir runs/flan
    """
    from synthesizer_jax.costs.summary import num_elements
    from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
    from synthesizer_jax.pretrained.convert import convert_checkpoint

    named = None
    if vocabulary is not None:
        named = Bytes(extra_ids) if vocabulary == "bytes" else SentencePiece(vocabulary, extra_ids)
    params = convert_checkpoint(source, workdir, vocabulary=named)
    typer.echo(f"{workdir} holds {num_elements(params):,} parameters of {source}")
    typer.echo(f'next: synthesizer-jax generate --workdir {workdir} "INPUT"')
