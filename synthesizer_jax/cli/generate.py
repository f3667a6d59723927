"""`synthesizer-jax generate`."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import Imports, RunDirectory, Step, open_run, storage_option
from synthesizer_jax.files import in_bucket, write_atomic

if TYPE_CHECKING:
    from synthesizer_jax.evaluation.prediction import Generated

LOGITS_DTYPES = ("float32", "bfloat16")

InputFile = Annotated[
    pathlib.Path | None, storage_option("A file with one input per line.", "--input")
]
OutputFile = Annotated[
    pathlib.Path | None, storage_option("The file to write; by default stdout.", "--output")
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens to decode; by default that of the training's targets, less the "
        "longest text to continue.",
        min=1,
    ),
]
MinLength = Annotated[
    int, typer.Option(help="Minimum number of tokens to decode, end of sequence included.")
]
RelativeLength = Annotated[
    float | None,
    typer.Option(help="Maximum number of tokens to decode, per token of the input."),
]
Beams = Annotated[int, typer.Option(help="Number of beams; 1 is greedy, or samples.")]
Alpha = Annotated[
    float, typer.Option(help="Exponent of beam search's length penalty ((5 + n) / 6)^alpha.")
]
Temperature = Annotated[
    float, typer.Option(help="Sample from softmax(logits / temperature); 0 does not sample.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from this number of most probable tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the fewest most probable tokens of at least this probability."),
]
Samples = Annotated[int, typer.Option(help="Lines per input: samples, or the best of the beams.")]
Seed = Annotated[int, typer.Option(help="Seed of the samples.")]
Scores = Annotated[
    bool,
    typer.Option("--scores", help="Print the log-probability in nats and a tab before each text."),
]
BatchSize = Annotated[int, typer.Option(help="Inputs per batch.", min=1)]
LogitsDtype = Annotated[
    str | None,
    typer.Option(
        help="float32 or bfloat16, of the output projection; by default the model's dtype."
    ),
]


def generate(
    workdir: RunDirectory,
    text: Annotated[
        list[str] | None, typer.Argument(help="Inputs; by default the lines of --input or stdin.")
    ] = None,
    *,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    step: Step = None,
    beams: Beams = 1,
    alpha: Alpha = 0.6,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    samples: Samples = 1,
    seed: Seed = 0,
    min_length: MinLength = 1,
    max_length: MaxLength = None,
    relative_length: RelativeLength = None,
    scores: Scores = False,
    batch_size: BatchSize = 16,
    logits_dtype: LogitsDtype = None,
    imports: Imports = None,
) -> None:
    """Decode inputs with a trained checkpoint, one line of output per line of input.

    Greedy by default, by beam search with --beams, by sampling with --temperature. With --samples n,
    every input gives n lines. A model that was trained on texts alone continues the inputs. The model is
    sharded over all devices of one process. TensorFlow and SeqIO are not needed.

    Example: synthesizer-jax generate --workdir runs/rv "cola sentence: the dog sleep ."
    """
    from synthesizer_jax.evaluation.prediction import Predictor
    from synthesizer_jax.inference.settings import Decoding
    from synthesizer_jax.models import Encoder
    from synthesizer_jax.training.run_directory import open_vocabulary

    if logits_dtype is not None and logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"--logits-dtype is {logits_dtype!r}; use {' or '.join(LOGITS_DTYPES)}")
    if output_file is not None and not (in_bucket(output_file) or output_file.parent.is_dir()):
        raise FileNotFoundError(
            f"--output {output_file}: there is no directory {output_file.parent}; create it"
        )
    lines = _read_lines(text, input_file)
    run = open_run(workdir, imports)
    experiment = run.experiment
    if isinstance(experiment.model, Encoder):
        raise ValueError(
            f"{workdir} holds an Encoder, which generates no text; 'synthesizer-jax predict' predicts the "
            "classes of a classifier"
        )
    decoding = Decoding(
        max_length=max_length or experiment.data.targets_length,
        min_length=min_length,
        relative_length=relative_length,
        beams=beams,
        alpha=alpha,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        samples=samples,
        seed=seed,
        logits_dtype=logits_dtype,
    )
    predictor = Predictor(
        experiment.model,
        run.restore(step)[1],
        open_vocabulary(experiment, workdir),
        inputs_length=experiment.data.inputs_length,
        batch_size=min(batch_size, max(len(lines), 1)),
        decoding=decoding,
        mesh=run.mesh,
    )
    inputs = [predictor.encode(line) for line in lines]
    if max_length is None and not experiment.data.inputs_length:  # the texts belong to the row
        rest = experiment.data.targets_length - max(map(len, inputs), default=0)
        predictor.decoding = dataclasses.replace(decoding, max_length=max(rest, 1))
    answers = predictor.generate_texts(inputs)
    _write_lines(answers, output_file, scores=scores)


def _read_lines(text: list[str] | None, input_file: pathlib.Path | None) -> list[str]:
    """Returns the inputs from the command line, a file or stdin."""
    if text and input_file is not None:
        raise ValueError("give inputs as arguments or with --input, not both")
    if text:
        return text
    if input_file is None:
        lines = [] if sys.stdin.isatty() else sys.stdin.read().splitlines()
        if not lines:
            raise ValueError(
                "there is no input; give texts as arguments, --input FILE, or lines to stdin"
            )
        return lines
    try:
        return input_file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--input {input_file} is not UTF-8 text ({error}); convert it to UTF-8"
        ) from None


def _write_lines(
    answers: list[list[Generated]], output_file: pathlib.Path | None, *, scores: bool
) -> None:
    """Writes one line per text to a file, or to stdout; line breaks become spaces."""
    lines = []
    for text, score in itertools.chain.from_iterable(answers):
        line = " ".join(text.splitlines())
        lines.append(f"{score:.4f}\t{line}\n" if scores else f"{line}\n")
    if output_file is None:
        typer.echo("".join(lines), nl=False)
    else:
        write_atomic(output_file, lines)
