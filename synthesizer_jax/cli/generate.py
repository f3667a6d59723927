"""Defines the command `synthesizer-jax generate`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sys
from typing import Annotated, Any

import typer

from synthesizer_jax.base.files import decode_lines, in_bucket, storage_path, write_atomic
from synthesizer_jax.base.typing import Count, Number
from synthesizer_jax.cli.options import Imports, open_run


def generate(
    text: list[str] | None = None,
    *,
    workdir: pathlib.Path | None = None,
    input_file: Annotated[pathlib.Path | None, "--input"] = None,
    output_file: Annotated[pathlib.Path | None, "--output"] = None,
    step: int | None = None,
    beams: int | None = None,
    alpha: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    stop_string: list[str] | None = None,
    samples: int | None = None,
    seed: int | None = None,
    min_length: int | None = None,
    max_length: Count | None = None,
    relative_length: float | None = None,
    extra_length: Number | None = None,
    scores: bool = False,
    batch_size: Count = 16,
    logits_dtype: str | None = None,
    imports: Imports = None,
) -> None:
    """Generate texts with a trained checkpoint, one line of output for each line of input.

    By default, decoding is greedy. --beams chooses beam search, and
    --temperature chooses sampling. With --samples n, each input gives n lines.
    A model that was trained on texts without inputs continues the texts that
    you give.

    The model is sharded over all devices of one process. TensorFlow and SeqIO
    are not needed.

    Example: synthesizer-jax generate --workdir runs/rv "cola sentence: the dog sleep ."

    Args:
      text: the inputs. The default is the lines of --input or of stdin. Inputs are truncated to the
        length of inputs in training, which is data.inputs_length. If --workdir is not given, the
        first argument is the directory of the run.
      workdir: the directory of the run.
      input_file: a file with one input per line.
      output_file: the file to write. The default is stdout.
      step: the step of the checkpoint. The default is the newest checkpoint.
      beams: the number of beams. The default is 1, which means greedy decoding, or sampling if
        --temperature is given.
      alpha: the exponent of the length penalty ((5 + n) / 6)^alpha of beam search. The default is
        the recipe's.
      temperature: sample from softmax(logits / temperature). The default is 0, which turns sampling
        off.
      top_k: sample only from the k most probable tokens, where k is this number.
      top_p: sample only from the smallest set of most probable tokens whose probabilities add up to
        at least this number.
      min_p: sample only from tokens whose probability is at least this fraction of the largest
        probability.
      repetition_penalty: make tokens that the text already contains less likely. The positive
        logits of these tokens are divided by this number, and the negative logits are multiplied by
        it. The default is the recipe's.
      no_repeat_ngram_size: do not repeat any sequence of this many tokens. The default is the
        recipe's.
      stop_string: end a text before this string. The default is the recipe's. Repeatable.
      samples: the number of output lines for each input. The lines are samples, or the best beams.
        The default is 1.
      seed: the seed of the samples. The default is 0.
      min_length: the minimum number of tokens to generate, including EOS. The default is 1.
      max_length: the maximum number of tokens to generate. The default is the length of targets in
        training. If the model continues texts, the length of the longest text is subtracted from
        the default.
      relative_length: the maximum number of tokens to generate for each token of the input. The
        default is the recipe's.
      extra_length: the number of tokens to add to the limit of --relative-length. The default is
        the recipe's.
      scores: before each text, print its log-probability in nats and a tab.
      batch_size: the number of inputs per batch.
      logits_dtype: the dtype of the output projection, float32 or bfloat16. The default is the
        dtype of the model.
    """
    from synthesizer_jax.evaluation.prediction import Predictor
    from synthesizer_jax.models import Encoder
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.runs.saved import is_run, open_vocabulary

    if output_file is not None and not (in_bucket(output_file) or output_file.parent.is_dir()):
        raise FileNotFoundError(
            f"--output {output_file}: There is no directory {output_file.parent}. Create it first."
        )
    if workdir is None:
        # Without --workdir, the first argument is the directory of the run.
        first, *text = text or [""]
        if not (_is_directory(first) and is_run(storage_path(first))):
            raise ValueError(_explain_missing_run(first))
        workdir = storage_path(first)
    lines = _read_lines(text, input_file)

    run = open_run(workdir, imports)
    model, data = run.experiment.model, run.experiment.data
    if isinstance(model, Encoder):
        raise ValueError(
            f"{workdir} holds an Encoder, which cannot generate text. If it is a classifier, "
            "predict its classes with 'synthesizer-jax predict'."
        )

    # If an option is not given, use the recipe's value.
    options = {
        "beams": beams,
        "alpha": alpha,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "stop_strings": tuple(stop_string) if stop_string else None,
        "samples": samples,
        "seed": seed,
        "min_length": min_length,
        "relative_length": relative_length,
        "extra_length": extra_length,
        "logits_dtype": logits_dtype,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    decoding = run.experiment.evaluation.decoding(max_length or data.targets_length, **given)

    with show_phases() as phase:
        advance = phase("reading a checkpoint", 1)
        _, variables = run.restore(step)
        advance(1)

    predictor = Predictor(
        model,
        variables,
        open_vocabulary(run.experiment.vocabulary, workdir, model=model),
        inputs_length=data.inputs_length,
        row_length=data.targets_length,
        batch_size=min(batch_size, max(len(lines), 1)),
        decoding=decoding,
        mesh=run.mesh,
    )
    inputs = [predictor.encode(line) for line in lines]

    # If the model was trained without inputs, a text and its continuation share the positions of a
    # training row.
    if max_length is None and not data.inputs_length:
        rest = data.targets_length - max(map(len, inputs), default=0)
        predictor.decoding = dataclasses.replace(decoding, max_length=max(rest, 1))

    with show_phases() as phase:
        predictor.advance = phase(f"generating texts (inputs: {len(inputs):,})", len(inputs))
        generated = predictor.generate_texts(inputs)

    written = []
    for answer, score in itertools.chain.from_iterable(generated):
        line = " ".join(answer.splitlines())  # print each text in a single line
        written.append(f"{score:.4f}\t{line}\n" if scores else f"{line}\n")
    if output_file is None:
        typer.echo("".join(written), nl=False)
    else:
        write_atomic(output_file, written)


def _explain_missing_run(argument: str) -> str:
    """Returns an error message for a first argument that is not a run."""
    problem = "generate needs a run. Give its directory before the texts, or as --workdir RUN."
    if _is_directory(argument):
        problem += (
            f" {argument} is not a run. If it is a published model, 'synthesizer-jax convert "
            f"{argument} RUN' makes a run from it."
        )
    return problem


def _is_directory(argument: str) -> bool:
    """Returns whether an argument, which may be any text, is a directory or a path in a bucket.

    Methods of `pathlib.Path` raise an `OSError` for texts that are too long for a path.
    """
    return in_bucket(pathlib.Path(argument)) or os.path.isdir(argument)


def _read_lines(text: list[str] | None, input_file: pathlib.Path | None) -> list[str]:
    """Returns the inputs from the command line, from a file or from stdin.

    Raises:
      ValueError: inputs are given in more than one way, or not at all.
    """
    if text and input_file is not None:
        raise ValueError("Give inputs either as arguments or with --input, not both.")
    if text:
        return text
    if input_file is not None:
        return list(decode_lines(input_file.open("rb"), input_file))
    if not sys.stdin.isatty():
        lines = list(decode_lines(sys.stdin.buffer, None))
        if lines:
            return lines
    raise ValueError(
        "There is no input. Give texts as arguments, a file with --input, or lines on stdin."
    )
