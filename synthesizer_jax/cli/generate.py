"""`synthesizer-jax generate`."""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import Imports, RunDirectory, Step, storage_option
from synthesizer_jax.files import in_bucket, write_atomic

if TYPE_CHECKING:
    from synthesizer_jax.evaluation.prediction import Predictor

METHODS = ("greedy", "beam")
LOGITS_DTYPES = ("float32", "bfloat16")


def generate(
    workdir: RunDirectory,
    text: Annotated[
        list[str] | None, typer.Argument(help="Inputs; by default the lines of --input or stdin.")
    ] = None,
    *,
    input_file: Annotated[
        pathlib.Path | None, storage_option("A file with one input per line.", "--input")
    ] = None,
    output_file: Annotated[
        pathlib.Path | None, storage_option("The file to write; by default stdout.", "--output")
    ] = None,
    step: Step = None,
    method: Annotated[str, typer.Option(help="greedy or beam.")] = "greedy",
    max_length: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to decode.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Inputs per batch.", min=1)] = 16,
    logits_dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16, of the output projection; by default the model's dtype."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Decode inputs with a trained checkpoint, one line of output per line of input.

    The model is sharded over all devices of one process. TensorFlow and SeqIO are not needed.

    Example: synthesizer-jax generate --workdir runs/rv "cola sentence: the dog sleep ."
    """
    from synthesizer_jax.runs import code

    if method not in METHODS:
        raise ValueError(f"--method is {method!r}; use {' or '.join(METHODS)}")
    if logits_dtype is not None and logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"--logits-dtype is {logits_dtype!r}; use {' or '.join(LOGITS_DTYPES)}")
    if output_file is not None and not (in_bucket(output_file) or output_file.parent.is_dir()):
        raise FileNotFoundError(
            f"--output {output_file}: there is no directory {output_file.parent}; create it"
        )
    lines = _read_lines(text, input_file)
    code.load_user_code(imports or ())
    predictor = _load_predictor(
        workdir,
        step,
        method=method,
        max_length=max_length,
        batch_size=min(batch_size, max(len(lines), 1)),
        logits_dtype=logits_dtype,
    )
    answers = predictor.predict([predictor.encode(line) for line in lines])
    _write_lines(answers, output_file)


def _read_lines(text: list[str] | None, input_file: pathlib.Path | None) -> list[str]:
    """Returns the inputs from the command line, a file or stdin."""
    if text and input_file is not None:
        raise ValueError("give inputs as arguments or with --input, not both")
    if text:
        return text
    if input_file is None:
        return sys.stdin.read().splitlines()
    try:
        return input_file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--input {input_file} is not UTF-8 text ({error}); convert it to UTF-8"
        ) from None


def _load_predictor(
    workdir: pathlib.Path,
    step: int | None,
    *,
    method: str,
    max_length: int | None,
    batch_size: int,
    logits_dtype: str | None,
) -> Predictor:
    """Restores a checkpoint, sharded over all devices."""
    from synthesizer_jax.checkpoints.manager import restore_variables
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.evaluation.prediction import Predictor
    from synthesizer_jax.training.run_directory import load_experiment, open_vocabulary

    experiment = load_experiment(workdir)
    vocabulary = open_vocabulary(experiment, workdir)
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    _, variables = restore_variables(workdir / "checkpoints", step=step, layout=layout)
    return Predictor(
        experiment.model,
        variables,
        vocabulary,
        inputs_length=experiment.data.inputs_length,
        targets_length=max_length or experiment.data.targets_length,
        batch_size=batch_size,
        method=method,
        logits_dtype=logits_dtype,
        mesh=mesh,
    )


def _write_lines(answers: list[str], output_file: pathlib.Path | None) -> None:
    """Writes one line per answer to a file, or to stdout; line breaks become spaces."""
    lines = [f"{' '.join(answer.splitlines())}\n" for answer in answers]
    if output_file is None:
        typer.echo("".join(lines), nl=False)
    else:
        write_atomic(output_file, lines)
