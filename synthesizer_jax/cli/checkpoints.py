"""Defines the commands `convert`, `export` and `average`, which read checkpoints."""

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
    """Convert a pretrained T5 to a run: T5, FLAN-T5, mT5, umT5, ByT5, UL2, MADLAD-400, T5Gemma (2).

    You can evaluate the new run with `eval`, use it with `generate`, and start
    a training from it with `train DIRECTORY`. No code from a checkpoint is
    executed.

    With --encoder or --decoder, the self-attention is replaced by a
    Synthesizer. Until it is trained, the new model computes the same outputs as
    the old model.

    Example: synthesizer-jax convert google/flan-t5-small runs/flan --encoder rv

    Args:
      source: a folder of Hugging Face transformers or of PEFT, the OWNER/NAME of a model on the
        hub, a T5X checkpoint, or a run.
      directory: the directory of the new run.
      revision: the branch, tag or commit of a model on the hub. The default is the main branch.
      vocabulary: a SentencePiece file, a tokenizer.json, or the word bytes. The default is the
        vocabulary in the model's folder.
      extra_ids: the number of sentinels to add after the pieces of --vocabulary. The default
        depends on the vocabulary, and is 100 for the vocabulary of T5.
      encoder: the new self-attention of the encoder. The new self-attention must be a mixture that
        contains the dot product, such as rv.
      decoder: the new self-attention of the decoder, with the same choices as --encoder.
      max_length: the number of positions in the tables of the new self-attention. The default is
        512.
    """
    from synthesizer_jax.costs.summary import num_elements
    from synthesizer_jax.pretrained.convert import convert_checkpoint
    from synthesizer_jax.pretrained.huggingface.tokenizer import named_vocabulary
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases

    if extra_ids is not None and vocabulary is None:
        raise ValueError(
            "--extra-ids can only be used with --vocabulary. Give both, or leave it out."
        )
    if max_length is not None and not (encoder or decoder):
        raise ValueError(
            "--max-length can only be used with --encoder or --decoder. Give one of them, or leave "
            "it out."
        )
    code.load_user_code(imports or ())
    named = None if vocabulary is None else named_vocabulary(vocabulary, extra_ids)
    with show_phases() as phase:
        params = convert_checkpoint(
            source,
            directory,
            revision=revision,
            vocabulary=named,
            encoder=encoder,
            decoder=decoder,
            max_length=max_length or 512,
            phase=phase,
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
    name: str | None = None,
    license: str | None = None,
    language: str | None = None,
    base_model: str | None = None,
    imports: Imports = None,
) -> None:
    """Export the model of a run for another library, or as programs that run without this package.

    Transformers and T5X support only T5s. If the model is a Synthesizer, the
    command ends with an error that names a part of the model that the other
    library does not have.

    StableHLO supports every model. The command writes a directory with programs
    for CPUs, NVIDIA GPUs and TPUs, and with a loader for the programs. The
    loader needs only jax and the package of the vocabulary, which is
    sentencepiece or tokenizers. If the model was trained only on texts without
    inputs, its programs continue texts.

    Except for T5X, the new directory contains a README.md, which the Hugging
    Face hub shows as the page of the model. The page contains the scores if the
    exported step was evaluated.

    Example: synthesizer-jax export runs/flan flan-finetuned --license apache-2.0

    Example: synthesizer-jax export runs/rv rv-programs --to stablehlo --max-length 32

    Args:
      run: the directory RUN of a run, or one checkpoint, RUN/checkpoints/STEP.
      directory: the new directory.
      to: the format, which is huggingface, peft (only the run's adapters), t5x, t5x-scanned or
        stablehlo.
      dtype: the dtype of the tensors for transformers, float32 or bfloat16.
      inputs_length: for stablehlo, the maximum number of tokens of an input. The default is the
        length in training. If the model continues texts, a text and its continuation share the
        tokens of a training row, and by default each of them gets half of the row.
      max_length: for stablehlo, the maximum number of tokens of a target. The default is the length
        in training.
      beams: for stablehlo, the number of beams. With one beam, decoding is greedy.
      name: for the page, the OWNER/NAME that the model will have on the hub. The default is the
        name of the new directory.
      license: for the page, the hub's name of the license, such as apache-2.0. The default is the
        license on the page of the converted model, if it is known.
      language: for the page, codes of languages, such as en or de,fr. The default is the languages
        on the page of the converted model, or else those of the tasks.
      base_model: for the page, the OWNER/NAME of the model from which the run started. The default
        is known if the model was converted from the hub by its name.
    """
    from synthesizer_jax.pretrained.card_facts import Details
    from synthesizer_jax.pretrained.export import export_run
    from synthesizer_jax.pretrained.huggingface.card import read_card
    from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, CARD
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases

    languages = tuple(language.replace(" ", "").split(",")) if language is not None else ()
    details = Details(name, license, languages, base_model)
    code.load_user_code(imports or ())
    with show_phases() as phase:
        export_run(
            run,
            directory,
            to=to,
            dtype=dtype,
            inputs_length=inputs_length,
            max_length=max_length,
            beams=beams,
            details=details,
            phase=phase,
        )
    typer.echo(f"{directory} holds the {'adapters' if to == 'peft' else 'model'} of {run}")
    fields, _ = read_card(directory)
    if to == "peft" and "base_model" not in fields:
        typer.echo(
            f"{directory / ADAPTER_CONFIG} names no base model. Write the folder of the base, or "
            "its OWNER/NAME on the hub, as base_model_name_or_path. With --base-model OWNER/NAME, "
            "export does this."
        )
    if fields and "license" not in fields:
        typer.echo(
            f"{directory / CARD} names no license, because none is known. Before you upload the "
            "folder, add a line such as 'license: apache-2.0' after the first line of the file."
        )


def average(
    run: pathlib.Path,
    directory: pathlib.Path,
    *,
    last: Annotated[int, Range(2)] | None = None,
    imports: Imports = None,
) -> None:
    """Average the newest checkpoints of a run, and write a run with the mean of their parameters.

    A run keeps its training.keep_latest newest checkpoints and its
    training.keep_best best checkpoints. Checkpoints of both kinds are averaged.
    The command prints the steps whose checkpoints it has averaged.

    You can use the new run with `eval`, `generate` and `export`, and start a
    training from it with `train DIRECTORY`.

    Example: synthesizer-jax average runs/cola runs/cola-mean --last 5

    Args:
      run: the directory of the run.
      directory: the directory of the new run.
      last: the number of newest checkpoints to average. The default is all checkpoints of the run.
    """
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.training.checkpoint_average import average_checkpoints

    code.load_user_code(imports or ())
    with show_phases() as phase:
        steps = average_checkpoints(run, directory, last=last, phase=phase)
    typer.echo(f"{directory} holds the mean of the steps {', '.join(map(str, steps))} of {run}")
