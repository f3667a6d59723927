"""`synthesizer-jax convert`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_tensorflow
from synthesizer_jax.cli.options import Check, Imports, storage_argument
from synthesizer_jax.files import is_installed


def convert(
    source: Annotated[
        pathlib.Path,
        storage_argument(
            "A folder of Hugging Face transformers, a checkpoint of T5X or Mesh-TensorFlow, or a run."
        ),
    ],
    directory: Annotated[pathlib.Path, storage_argument("The new directory of the run.", "DIR")],
    *,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="A SentencePiece file, or bytes; by default the folder's own.", metavar="FILE"
        ),
    ] = None,
    extra_ids: Annotated[
        int | None,
        typer.Option(help="Sentinels after the pieces of --vocabulary; by default T5's.", min=0),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="A mixture with the dot product for the encoder, such as rv, which starts as the model.",
            metavar="VARIANT",
        ),
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="The same for the decoder.", metavar="VARIANT")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Positions of the mixtures' tables; by default 512.", min=1)
    ] = None,
    check: Check = None,
    imports: Imports = None,
) -> None:
    """Convert a pretrained T5 to a run: T5, FLAN-T5, mT5, umT5, ByT5, UL2.

    Nothing in a checkpoint is executed. `eval` and `generate` take the run; `train DIR` starts from it.

    With --encoder or --decoder the self-attention becomes a Synthesizer that computes the same before it
    is trained.

    Example: synthesizer-jax convert flan-t5-small runs/flan --encoder rv
    """
    from synthesizer_jax.costs.summary import num_elements
    from synthesizer_jax.pretrained.convert import Variants, convert_checkpoint
    from synthesizer_jax.pretrained.huggingface.tokenizer import named_vocabulary
    from synthesizer_jax.pretrained.t5x.mesh_tensorflow import find_checkpoint_prefix
    from synthesizer_jax.runs import code

    if extra_ids is not None and vocabulary is None:
        raise ValueError("--extra-ids belongs to --vocabulary; name one, or leave it out")
    if max_length is not None and not (encoder or decoder):
        raise ValueError(
            "--max-length belongs to --encoder and --decoder; give one, or leave it out"
        )
    code.load_user_code(imports or ())
    if find_checkpoint_prefix(source) is not None and is_installed("tensorflow"):
        load_tensorflow()
    named = None if vocabulary is None else named_vocabulary(vocabulary, extra_ids)
    variants = Variants(encoder, decoder, max_length or 512) if encoder or decoder else None
    params = convert_checkpoint(
        source, directory, vocabulary=named, variants=variants, check=check, report=typer.echo
    )
    typer.echo(f"{directory} holds {num_elements(params):,} parameters of {source}")
    typer.echo(f'next: synthesizer-jax generate --workdir {directory} "INPUT"')
