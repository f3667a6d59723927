"""Translation under one budget: trains the recipes of `translate` and `replace_attention`, writes tables.

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    python benchmarks/translation.py --data-dir DATA --vocabulary spm.model --workdir runs/translation \\
        --seeds 0 1 2 --output docs/results.md

Every run is one call of the command line, so it can be interrupted: what is finished is kept. Test BLEU
is sacreBLEU's of `intl` tokens, decoded with beam 4 from the last checkpoint. Step times are measured at
the end, all recipes alternating in one process, medians over rounds.
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
from synthesizer_jax.models import summarize
from synthesizer_jax.training.experiment import load_experiment
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
    """Trains what is missing, measures, writes."""
    options = arguments()
    for seed in options.seeds:
        for recipe in TRAINED.values():
            train(options, recipe, seed)
        for recipe in STUDENTS.values():
            distill(options, recipe, seed)
    times = step_times(options.rounds) if not options.no_times else {}
    section = document(options, times)
    old = options.output.read_text(encoding="utf-8") if options.output.exists() else "# Results\n"
    report.place(options.output, report.with_section(old, "translation", section))
    print(section)


def arguments() -> argparse.Namespace:
    """The command line."""
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
    parser.add_argument("--no-times", action="store_true", help="leave the step times out")
    return parser.parse_args()


def place(
    options: argparse.Namespace, recipe: str, seed: int, kind: str = "trained"
) -> pathlib.Path:
    """The directory of a run."""
    return options.workdir / kind / f"{recipe}_seed_{seed}"


def train(options: argparse.Namespace, recipe: str, seed: int) -> None:
    """One training run and its test BLEU."""
    steps = options.steps
    settings = {
        "vocabulary.path": options.vocabulary.resolve(),
        "training.steps": steps,
        "training.optimizer.learning_rate.total_steps": steps,
        "training.seed": seed,
        "data.seed": seed,
    }
    directory = place(options, recipe, seed)
    call(options, directory, ["train", f"translate:{recipe}"], settings)


def distill(options: argparse.Namespace, recipe: str, seed: int) -> None:
    """One distillation from the dot product of the same seed, and its test BLEU."""
    steps = options.distillation_steps
    settings = {
        "training.steps": steps,
        "training.optimizer.learning_rate.total_steps": steps,
        "training.seed": seed,
    }
    teacher = place(options, TEACHER, seed)
    command = ["distill", f"replace_attention:{recipe}", "--teacher", str(teacher)]
    call(options, place(options, recipe, seed, "distilled"), command, settings)


def call(
    options: argparse.Namespace,
    directory: pathlib.Path,
    command: list[str],
    settings: dict[str, Any],
) -> None:
    """Runs a command into a directory and evaluates it, unless that is done."""
    if bleu(directory) is not None:
        return
    print(f"{' '.join(command)} -> {directory}", flush=True)
    own = [f"--workdir={directory}", f"--data-dir={options.data_dir}"]
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    program = str(pathlib.Path(sys.executable).with_name("synthesizer-jax"))
    subprocess.run([program, *command, *own, *sets, "--quiet"], check=True)
    test = ["eval", *own, "--split=test", "--method=beam", "--batch-size=125"]
    subprocess.run([program, *test], check=True)


def bleu(directory: pathlib.Path) -> float | None:
    """The test BLEU of a finished run; None: it is not finished."""
    found = sorted((directory / "evaluation").glob("step_*.json"))
    for path in found:
        for task in json.loads(path.read_text(encoding="utf-8"))["tasks"]:
            if task["task"] == TASK and task["split"] == "test":
                return task["metrics"]["bleu"]
    return None


def step_times(rounds: int) -> dict[str, float]:
    """Median milliseconds of a training step of every recipe, on rows of random tokens."""
    trainers = {}
    for title, recipe in TRAINED.items():
        experiment = load_recipe(f"translate:{recipe}")
        trainer = Trainer(experiment)
        batch = trainer.put(made_batch(experiment.data.batch_size, experiment.data.inputs_length))
        state, metrics = trainer.step(trainer.init(), batch)
        jax.block_until_ready(metrics)
        trainers[title] = [trainer, state, batch, []]
    for _ in range(rounds):
        for entry in trainers.values():
            trainer, state, batch, seconds = entry
            began = time.perf_counter()
            entry[1], metrics = trainer.step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
    return {title: 1e3 * statistics.median(entry[3]) for title, entry in trainers.items()}


def made_batch(rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of random tokens, about half of them padding, as in the corpus."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, translate.VOCAB_SIZE, (rows, length)).astype(np.int32)
    tokens[np.arange(length) >= rng.integers(10, 24, rows)[:, None]] = 0
    return {
        "encoder_input_tokens": tokens,
        "decoder_input_tokens": np.pad(tokens[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": (tokens != 0).astype(np.float32),
    }


def document(options: argparse.Namespace, times: dict[str, float]) -> str:
    """The section, in Markdown."""
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
        scores = [bleu(place(options, recipe, seed)) for seed in options.seeds]
        size = parameters(place(options, recipe, options.seeds[0]))
        step = f"{times[title]:.0f}" if title in times else ""
        share = f"{times[title] / baseline:.2f}" if baseline and title in times else ""
        lines.append(f"| {title} | {size:,} | {step} | {share} | {shown(scores)} |")
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
    scores = [bleu(place(options, TEACHER, seed)) for seed in options.seeds]
    size = parameters(place(options, TEACHER, options.seeds[0]))
    lines.append(f"| nothing (the teacher) | {size:,} | | {shown(scores)} |")
    for title, recipe in STUDENTS.items():
        places = [place(options, recipe, seed, "distilled") for seed in options.seeds]
        rest = statistics.fmean(unexplained(p) for p in places)
        row = f"| {title} | {parameters(places[0]):,} | {rest:.3f} | {shown([bleu(p) for p in places])} |"
        lines.append(row)
    return "\n".join(lines) + "\n"


def shown(scores: list[float | None]) -> str:
    """BLEU by seed and their mean, as two cells."""
    known = [score for score in scores if score is not None]
    each = ", ".join("–" if score is None else f"{score:.1f}" for score in scores)
    return f"{each} | {statistics.fmean(known):.1f}" if known else f"{each} | –"


def parameters(directory: pathlib.Path) -> int:
    """The number of parameters of a run's model."""
    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    model: Any = experiment.model
    return summarize(
        model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    ).parameters


def unexplained(directory: pathlib.Path) -> float:
    """The last logged share of the variance that a student does not explain."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line).get("unexplained") for line in lines]
    return [value for value in values if value is not None][-1]


if __name__ == "__main__":
    main()
