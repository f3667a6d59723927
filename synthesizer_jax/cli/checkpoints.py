"""`synthesizer-jax convert`, `export` and `average`: a run from a checkpoint, and files from a run."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.base.typing import Count, Length, Number, Range
from synthesizer_jax.cli.options import Imports


def convert(
    source: pathlib.Path,
    directory: pathlib.Path,
    *,
    revision: str | None = None,
    vocabulary: str | None = None,
    extra_ids: Number | None = None,
    encoder: str | None = None,
    decoder: str | None = None,
    max_length: Length | None = None,
    imports: Imports = None,
) -> None:
    """Convert a pretrained T5 to a run: T5, FLAN-T5, mT5, umT5, ByT5, UL2, MADLAD-400, T5Gemma.

    Nothing in a checkpoint is executed. `eval` and `generate` take the run; `train DIR` starts from it.

    With --encoder or --decoder the self-attention becomes a Synthesizer that computes the same before it
    is trained.

    Example: synthesizer-jax convert google/flan-t5-small runs/flan --encoder rv

    Args:
      source: a folder of Hugging Face transformers or of PEFT, its OWNER/NAME on the hub, a checkpoint of
        T5X, or a run.
      directory: the new directory.
      revision: branch, tag or commit of a model of the hub; by default its main branch.
      vocabulary: a SentencePiece file, or bytes; by default the folder's own.
      extra_ids: sentinels after the pieces of --vocabulary; by default T5's.
      encoder: a mixture with the dot product for the encoder, such as rv, which starts as the model.
      decoder: the same for the decoder.
      max_length: positions of the mixtures' tables; by default 512.
    """
    from synthesizer_jax.costs.summary import num_elements
    from synthesizer_jax.pretrained.convert import convert_checkpoint
    from synthesizer_jax.pretrained.huggingface.tokenizer import named_vocabulary
    from synthesizer_jax.runs import code

    if extra_ids is not None and vocabulary is None:
        raise ValueError("--extra-ids belongs to --vocabulary; name one, or leave it out")
    if max_length is not None and not (encoder or decoder):
        raise ValueError("--max-length belongs to --encoder and --decoder; give one, or leave it out")
    code.load_user_code(imports or ())
    named = None if vocabulary is None else named_vocabulary(vocabulary, extra_ids)
    params = convert_checkpoint(
        source,
        directory,
        revision=revision,
        vocabulary=named,
        encoder=encoder,
        decoder=decoder,
        max_length=max_length or 512,
    )
    typer.echo(f"{directory} holds {num_elements(params):,} parameters of {source}")
    typer.echo(f'next: synthesizer-jax generate --workdir {directory} "INPUT"')


def export(
    run: pathlib.Path,
    directory: pathlib.Path,
    *,
    to: str = "huggingface",
    dtype: str = "float32",
    inputs_length: Count | None = None,
    max_length: Count | None = None,
    beams: Count = 1,
    imports: Imports = None,
) -> None:
    """Write a run's model for another library, or as programs that need none.

    Transformers and T5X take T5s only; a Synthesizer is refused with the name of the part that they lack.
    StableHLO takes every model: a directory of programs for CPUs, NVIDIA GPUs and TPUs, with a loader that
    needs only jax and, for SentencePiece vocabularies, sentencepiece. The programs of a model that was
    trained on texts alone continue texts.

    Example: synthesizer-jax export runs/flan flan-finetuned

    Example: synthesizer-jax export runs/rv rv-programs --to stablehlo --max-length 32

    Args:
      run: RUN, or RUN/checkpoints/STEP.
      directory: the new directory.
      to: huggingface, peft (a run's adapters alone), t5x, t5x-scanned or stablehlo.
      dtype: float32 or bfloat16, of the tensors for transformers.
      inputs_length: stablehlo: tokens of an input at most; by default as in training. A text to continue
        and its continuation share the tokens of a training row, by default one half each.
      max_length: stablehlo: tokens of a target at most; by default as in training.
      beams: stablehlo: beams of the decoding loop; 1 is greedy.
    """
    from synthesizer_jax.pretrained.export import export_run
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    export_run(
        run, directory, to=to, dtype=dtype, inputs_length=inputs_length, max_length=max_length, beams=beams
    )
    typer.echo(f"{directory} holds the {'adapters' if to == 'peft' else 'model'} of {run}")


def average(
    run: pathlib.Path,
    directory: pathlib.Path,
    *,
    last: Annotated[int, Range(2)] | None = None,
    imports: Imports = None,
) -> None:
    """Average the newest checkpoints of a run: write a run whose parameters are their mean.

    A run keeps its training.keep_latest newest and training.keep_best best checkpoints; both kinds count.
    The steps that were averaged are printed. `eval`, `generate` and `export` take the new run, and
    `train DIR` starts from it.

    Example: synthesizer-jax average runs/cola runs/cola-mean --last 5

    Args:
      run: directory of the run.
      directory: the new directory.
      last: number of the newest checkpoints; by default all that are kept.
    """
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.checkpoint_average import average_checkpoints

    code.load_user_code(imports or ())
    steps = average_checkpoints(run, directory, last=last)
    typer.echo(f"{directory} holds the mean of the steps {', '.join(map(str, steps))} of {run}")
