"""What scripts share whose tables hold scores of trained models: how to run, to resume and to average.

A script is a dictionary of parts. A part returns Markdown for the section of its name, after it has made
the runs that are missing in `--workdir`; so an interrupted script goes on where it was.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import report

from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.distillation.distill import FINE_TUNED, Distillation, distill
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.registry import replace
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import load_experiment

Records = list[dict[str, Any]]


def write_parts(
    description: str | None,
    parts: Mapping[str, Callable[[argparse.Namespace], str]],
    **numbers: int,
) -> None:
    """Makes the runs and writes the sections of the parts that the command line names.

    Args:
      description: help of the script.
      parts: functions from the parsed command line to Markdown, by the names of their sections.
      numbers: integer options with their defaults.
    """
    parser = report.arguments(description, **numbers)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="directory of all runs")
    parser.add_argument("--vocabulary", type=pathlib.Path, help="a SentencePiece model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    enable_compilation_cache()
    facts = {k: v for k, v in report.machine().items() if "GFLOP" not in k}
    texts: dict[str, str] = {}
    for part in args.parts:
        texts[part] = parts[part](args)
        report.write(part, texts[part], result=texts, options=args, facts=facts)


def trained(experiment: Experiment, directory: pathlib.Path, args: argparse.Namespace) -> Records:
    """Returns the evaluations of an experiment, which is run unless it has been."""
    if args.vocabulary and isinstance(experiment.vocabulary, SentencePiece):
        vocabulary = replace(experiment.vocabulary, path=str(args.vocabulary.resolve()))
        experiment = replace(experiment, vocabulary=vocabulary)
    if not _is_finished(directory, experiment.training):
        print(directory, flush=True)
        run(experiment, directory, data_dir=args.data_dir, visible=False)
    return _records(directory, "eval")


def distilled(
    recipe: Distillation, teacher: pathlib.Path, directory: pathlib.Path, args: argparse.Namespace
) -> tuple[Records, Records]:
    """Returns the evaluations of a distillation, run unless it has been, and of its fine-tuning."""
    last = (directory / FINE_TUNED, recipe.fine_tune) if recipe.fine_tune else None
    if not _is_finished(*(last or (directory, recipe.training))):
        print(directory, flush=True)
        distill(recipe, teacher, directory, data_dir=args.data_dir, visible=False)
    return _records(directory, "eval"), _records(directory / FINE_TUNED, "eval")


def with_steps(training: Training, steps: int, seed: int = 0) -> Training:
    """Returns a training with AdamW and a schedule that ends after another number of steps."""
    assert isinstance(training.optimizer, AdamW)
    schedule = replace(training.optimizer.learning_rate, total_steps=steps)
    optimizer = replace(training.optimizer, learning_rate=schedule)
    changes = {"steps": steps, "seed": seed, "save_every": steps, "keep_best": 0}
    return replace(training, optimizer=optimizer, **changes)


def num_parameters(directory: pathlib.Path) -> int:
    """Returns the number of parameters of a run's model."""
    experiment = load_experiment(directory)
    inputs, targets = experiment.data.lengths["inputs"], experiment.data.lengths["targets"]
    model: Any = experiment.model
    return summarize(model, inputs_length=inputs, targets_length=targets).parameters


def last_logged(directory: pathlib.Path, name: str) -> float:
    """Returns the last value of a metric of a run's steps."""
    return [r[name] for r in _records(directory, "train") if r.get(name) is not None][-1]


def cell(scores: Sequence[float]) -> str | None:
    """Formats the scores of all seeds: their mean, smallest and largest."""
    if len(scores) < 2:
        return f"{scores[0]:.1f}" if scores else None
    return f"{statistics.fmean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})"


def describe_seeds(args: argparse.Namespace) -> str:
    """Says what `cell` shows."""
    if len(args.seeds) == 1:
        return f"seed {args.seeds[0]}"
    return f"mean of {len(args.seeds)} seeds (smallest to largest)"


def _records(directory: pathlib.Path, kind: str) -> Records:
    """Returns the log of a run's steps or evaluations; empty if there is none."""
    path = directory / METRICS_FILE
    return [r for r in read_metrics(path) if r["kind"] == kind] if path.exists() else []


def _is_finished(directory: pathlib.Path, training: Training) -> bool:
    """Whether the last step of a run has been evaluated."""
    return any(record["step"] == training.steps for record in _records(directory, "eval"))
