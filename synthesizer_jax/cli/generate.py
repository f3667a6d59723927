"""`synthesizer-jax generate`."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer

from synthesizer_jax.cli.places import option
from synthesizer_jax.cli.train import Imports


def generate(
    workdir: Annotated[pathlib.Path, option("The run's directory.")],
    text: Annotated[
        list[str] | None, typer.Argument(help="Inputs; lines of --input or stdin if left out.")
    ] = None,
    input_file: Annotated[
        pathlib.Path | None, option("A file with one input per line.", "--input")
    ] = None,
    output_file: Annotated[
        pathlib.Path | None, option("Where to write; stdout if left out.", "--output")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint; the newest if left out.")
    ] = None,
    method: Annotated[str, typer.Option(help="greedy or beam.")] = "greedy",
    max_length: Annotated[int | None, typer.Option(help="Tokens to decode at most.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Inputs per batch.", min=1)] = 16,
    logits_dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16 output projection; the model's dtype if left out."),
    ] = None,
    imports: Imports = None,
) -> None:
    """Decode inputs with a trained checkpoint, one line of output per line of input.

    One process lays the model over all devices that it sees. Neither TensorFlow nor SeqIO is needed.

    Example: synthesizer-jax generate --workdir runs/rv "cola sentence: the dog sleep ."
    """
    from synthesizer_jax.evaluation import Predictor
    from synthesizer_jax.files import in_bucket, write_aside
    from synthesizer_jax.training import code
    from synthesizer_jax.training.checkpoints import restore_variables
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.placement import place
    from synthesizer_jax.training.run import open_vocabulary

    if method not in ("greedy", "beam"):
        raise ValueError(f"--method {method!r}; allowed: greedy, beam")
    if logits_dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--logits-dtype {logits_dtype!r}; allowed: float32, bfloat16")
    if output_file is not None and not (in_bucket(output_file) or output_file.parent.is_dir()):
        raise FileNotFoundError(
            f"--output {output_file}: there is no directory {output_file.parent}"
        )
    lines = read_lines(text, input_file)
    code.load(imports or ())
    experiment = load_experiment(workdir)
    vocabulary = open_vocabulary(experiment, workdir)
    mesh, layout = place(experiment)
    _, variables = restore_variables(workdir / "checkpoints", step=step, layout=layout)
    predictor = Predictor(
        experiment.model,
        variables,
        vocabulary,
        inputs_length=experiment.data.inputs_length,
        targets_length=max_length or experiment.data.targets_length,
        batch_size=min(batch_size, max(len(lines), 1)),
        method=method,
        logits_dtype=logits_dtype,
        mesh=mesh,
    )
    answers = predictor.predict([predictor.encode(line) for line in lines])
    written = [f"{' '.join(answer.splitlines())}\n" for answer in answers]
    if output_file is None:
        typer.echo("".join(written), nl=False)
    else:
        write_aside(output_file, written)


def read_lines(text: list[str] | None, input_file: pathlib.Path | None) -> list[str]:
    """The inputs, from the command line, a file or stdin."""
    if text and input_file is not None:
        raise ValueError("give inputs as arguments or with --input, not both")
    if text:
        return text
    if input_file is None:
        return sys.stdin.read().splitlines()
    try:
        return input_file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--input {input_file} is not UTF-8 text: {error}") from None
