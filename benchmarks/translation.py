"""Trains the recipes of `translate` and `replace_attention` with the same budget, and writes tables.

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    python benchmarks/translation.py --data-dir DATA --vocabulary spm.model --workdir runs/translation \\
        --seeds 0 1 2 --output docs/results.md

Every run is a call of the command line, so the benchmark can be interrupted and continued. Test BLEU is
computed by sacreBLEU with `intl` tokenization, for outputs of the last checkpoint with beam 4. Step times
are medians over rounds, in which all recipes alternate in one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import report
from synthesizer_jax.recipes import replace_attention, translate

from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.training.trainer import Trainer

TASK = "multi30k_en_de"
TEACHER = "vanilla"
STUDENTS = {
    "ALR": "alr",
    "ALRR": "alrr",
    "ELR": "elr",
    "a network per token": "token",
    "Random": "random",
}
TRAINED = {title: recipe.__name__ for title, recipe in translate.RECIPES.items()}


def main() -> None:
    """Runs the missing trainings, measures step times and writes the page."""
    options = parse_arguments()
    for seed in options.seeds:
        for recipe in TRAINED.values():
            train(options, recipe, seed)
        for recipe in STUDENTS.values():
            distill(options, recipe, seed)
    times = step_times(options.rounds) if not options.no_times else {}
    section = format_section(options, times)
    page = options.output.read_text(encoding="utf-8") if options.output.exists() else "# Results\n"
    report.write_file(options.output, report.with_section(page, "translation", section))
    print(section)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--vocabulary", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/results.md"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=translate.STEPS)
    parser.add_argument("--distillation-steps", type=int, default=replace_attention.STEPS)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the step times")
    parser.add_argument("--no-times", action="store_true", help="skip the step times")
    return parser.parse_args()


def run_directory(
    options: argparse.Namespace, recipe: str, seed: int, kind: str = "trained"
) -> pathlib.Path:
    """Returns the directory of a run."""
    return options.workdir / kind / f"{recipe}_seed_{seed}"


def train(options: argparse.Namespace, recipe: str, seed: int) -> None:
    """Trains a recipe and evaluates it on the test split."""
    steps = options.steps
    settings = {
        "vocabulary.path": options.vocabulary.resolve(),
        "training.steps": steps,
        "training.optimizer.learning_rate.total_steps": steps,
        "training.seed": seed,
        "data.seed": seed,
    }
    directory = run_directory(options, recipe, seed)
    run_and_evaluate(options, directory, ["train", f"translate:{recipe}"], settings)


def distill(options: argparse.Namespace, recipe: str, seed: int) -> None:
    """Distills from the dot product of the same seed, and evaluates on the test split."""
    steps = options.distillation_steps
    settings = {
        "training.steps": steps,
        "training.optimizer.learning_rate.total_steps": steps,
        "training.seed": seed,
    }
    teacher = run_directory(options, TEACHER, seed)
    command = ["distill", f"replace_attention:{recipe}", "--teacher", str(teacher)]
    run_and_evaluate(options, run_directory(options, recipe, seed, "distilled"), command, settings)


def run_and_evaluate(
    options: argparse.Namespace,
    directory: pathlib.Path,
    command: list[str],
    settings: dict[str, Any],
) -> None:
    """Runs a command and an evaluation, unless they have been run."""
    if bleu(directory) is not None:
        return
    print(f"{' '.join(command)} -> {directory}", flush=True)
    common_options = [f"--workdir={directory}", f"--data-dir={options.data_dir}"]
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    program = str(pathlib.Path(sys.executable).with_name("synthesizer-jax"))
    subprocess.run([program, *command, *common_options, *sets, "--quiet"], check=True)
    test = ["eval", *common_options, "--split=test", "--method=beam", "--batch-size=125"]
    subprocess.run([program, *test], check=True)


def bleu(directory: pathlib.Path) -> float | None:
    """The test BLEU of a run; None if it has not been evaluated."""
    paths = sorted((directory / "evaluation").glob("*/test/results.json"))
    for path in paths:
        for task in json.loads(path.read_text(encoding="utf-8"))["tasks"]:
            if task["task"] == TASK and task["split"] == "test":
                return task["metrics"]["bleu"]
    return None


def step_times(rounds: int) -> dict[str, float]:
    """Measures the median milliseconds of every recipe's training step on random tokens."""
    trainers = {}
    for title, recipe in TRAINED.items():
        experiment = load_recipe(f"translate:{recipe}")
        trainer = Trainer(experiment)
        batch = trainer.shard_batch(
            random_batch(experiment.data.batch_size, experiment.data.inputs_length)
        )
        state, metrics = trainer.step(trainer.init(), batch)
        jax.block_until_ready(metrics)
        trainers[title] = [trainer, state, batch, []]
    for _ in range(rounds):
        for entry in trainers.values():
            trainer, state, batch, seconds = entry
            start = time.perf_counter()
            entry[1], metrics = trainer.step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
    return {title: 1e3 * statistics.median(entry[3]) for title, entry in trainers.items()}


def random_batch(rows: int, length: int) -> dict[str, np.ndarray]:
    """Random tokens, about half of them padding, as in the corpus."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, translate.VOCAB_SIZE, (rows, length)).astype(np.int32)
    tokens[np.arange(length) >= rng.integers(10, 24, rows)[:, None]] = 0
    return {
        "encoder_input_tokens": tokens,
        "decoder_input_tokens": np.pad(tokens[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": (tokens != 0).astype(np.float32),
    }


def format_section(options: argparse.Namespace, times: dict[str, float]) -> str:
    """Formats the section in Markdown."""
    seeds = ", ".join(map(str, options.seeds))
    lines = [
        "## Translation",
        "",
        "Written by `benchmarks/translation.py`, which says how to run it again. "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {os.cpu_count()} CPU cores, Python "
        f"{platform.python_version()}, jax {jax.__version__}, float32.",
        "",
        f"Multi30k, English to German: {translate.SIZE.layers} + {translate.SIZE.layers} layers, "
        f"d {translate.SIZE.d_model}, joint SentencePiece vocabulary, batches of 64 sentences, "
        f"{options.steps:,} steps for every recipe, seed {seeds}. sacreBLEU on the 1,000 sentences of "
        "test_2016_flickr, beam 4. This is a small budget on a small corpus: it compares recipes, not "
        "papers.",
        "",
        "| recipe | parameters | step, ms | relative | BLEU by seed | mean |",
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    baseline = times.get("Dot product (vanilla)")
    for title, recipe in TRAINED.items():
        scores = [bleu(run_directory(options, recipe, seed)) for seed in options.seeds]
        size = num_parameters(run_directory(options, recipe, options.seeds[0]))
        step = f"{times[title]:.0f}" if title in times else ""
        share = f"{times[title] / baseline:.2f}" if baseline and title in times else ""
        lines.append(f"| {title} | {size:,} | {step} | {share} | {format_scores(scores)} |")
    lines += [
        "",
        "### Attention replaced by distillation",
        "",
        "The dot product's encoder attention is replaced and only the replacement is trained, on the "
        f"teacher's activations, {options.distillation_steps:,} steps. *Unexplained* is the squared error "
        "as a share of the variance of what is imitated.",
        "",
        "| encoder attention replaced by | parameters | unexplained | BLEU by seed | mean |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    scores = [bleu(run_directory(options, TEACHER, seed)) for seed in options.seeds]
    size = num_parameters(run_directory(options, TEACHER, options.seeds[0]))
    lines.append(f"| nothing (the teacher) | {size:,} | | {format_scores(scores)} |")
    for title, recipe in STUDENTS.items():
        directories = [run_directory(options, recipe, seed, "distilled") for seed in options.seeds]
        mean_unexplained = statistics.fmean(unexplained(p) for p in directories)
        size = num_parameters(directories[0])
        scores = format_scores([bleu(p) for p in directories])
        lines.append(f"| {title} | {size:,} | {mean_unexplained:.3f} | {scores} |")
    return "\n".join(lines) + "\n"


def format_scores(scores: list[float | None]) -> str:
    """Formats the scores of all seeds and their mean as two cells."""
    finished = [score for score in scores if score is not None]
    formatted = ", ".join("–" if score is None else f"{score:.1f}" for score in scores)
    return f"{formatted} | {statistics.fmean(finished):.1f}" if finished else f"{formatted} | –"


def num_parameters(directory: pathlib.Path) -> int:
    """The number of parameters of a run's model."""
    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    model: Any = experiment.model
    return summarize(
        model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    ).parameters


def unexplained(directory: pathlib.Path) -> float:
    """The last logged ratio of the error to the variance of the teacher's activations."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line).get("unexplained") for line in lines]
    return [value for value in values if value is not None][-1]


if __name__ == "__main__":
    main()
