"""`synthesizer-jax convert`, `export` and `average`: a run from a checkpoint, and files from a run."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.options import Imports, storage_argument

Directory = Annotated[pathlib.Path, storage_argument("The new directory.", "DIR")]


def convert(
    source: Annotated[
        pathlib.Path,
        storage_argument("A folder of Hugging Face transformers, a checkpoint of T5X, or a run."),
    ],
    directory: Directory,
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
    from synthesizer_jax.runs import code

    if extra_ids is not None and vocabulary is None:
        raise ValueError("--extra-ids belongs to --vocabulary; name one, or leave it out")
    if max_length is not None and not (encoder or decoder):
        raise ValueError(
            "--max-length belongs to --encoder and --decoder; give one, or leave it out"
        )
    code.load_user_code(imports or ())
    named = None if vocabulary is None else named_vocabulary(vocabulary, extra_ids)
    variants = Variants(encoder, decoder, max_length or 512) if encoder or decoder else None
    params = convert_checkpoint(source, directory, vocabulary=named, variants=variants)
    typer.echo(f"{directory} holds {num_elements(params):,} parameters of {source}")
    typer.echo(f'next: synthesizer-jax generate --workdir {directory} "INPUT"')


def export(
    run: Annotated[pathlib.Path, storage_argument("RUN, or RUN/checkpoints/STEP.")],
    directory: Directory,
    *,
    to: Annotated[
        str, typer.Option(help="huggingface, t5x, t5x-scanned or stablehlo.")
    ] = "huggingface",
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16, of the tensors for transformers.")
    ] = "float32",
    inputs_length: Annotated[
        int | None,
        typer.Option(
            help="stablehlo: tokens of an input at most; by default as in training.", min=1
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="stablehlo: tokens of a target at most; by default as in training.", min=1
        ),
    ] = None,
    beams: Annotated[
        int, typer.Option(help="stablehlo: beams of the decoding loop; 1 is greedy.", min=1)
    ] = 1,
    imports: Imports = None,
) -> None:
    """Write a run's model for another library, or as programs that need none.

    Transformers and T5X take T5s only; a Synthesizer is refused with the name of the part that they lack.
    StableHLO takes every model: a directory of programs for CPUs, NVIDIA GPUs and TPUs, with a loader that
    needs only jax and, for SentencePiece vocabularies, sentencepiece.

    Example: synthesizer-jax export runs/flan flan-finetuned

    Example: synthesizer-jax export runs/rv rv-programs --to stablehlo --max-length 32
    """
    from synthesizer_jax.pretrained.export import export_run
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    export_run(
        run,
        directory,
        to=to,
        dtype=dtype,
        inputs_length=inputs_length,
        max_length=max_length,
        beams=beams,
    )
    typer.echo(f"{directory} holds the model of {run}")


def average(
    run: Annotated[pathlib.Path, storage_argument("Directory of the run.")],
    directory: Directory,
    *,
    last: Annotated[
        int | None,
        typer.Option(help="Number of the newest checkpoints; by default all that are kept.", min=2),
    ] = None,
    imports: Imports = None,
) -> None:
    """Average the newest checkpoints of a run: write a run whose parameters are their mean.

    A run keeps its training.keep_latest newest and training.keep_best best checkpoints; both kinds count.
    The steps that were averaged are printed. `eval`, `generate` and `export` take the new run, and
    `train DIR` starts from it.

    Example: synthesizer-jax average runs/cola runs/cola-mean --last 5
    """
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.checkpoint_average import average_checkpoints

    code.load_user_code(imports or ())
    steps = average_checkpoints(run, directory, last=last)
    typer.echo(f"{directory} holds the mean of the steps {', '.join(map(str, steps))} of {run}")
