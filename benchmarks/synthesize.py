"""Turns trained T5s into Random Synthesizers from three starts, and measures scores by steps.

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    synthesizer-jax train translate:vanilla --workdir runs/multi30k --data-dir DATA \\
        --set vocabulary.path=spm.model
    synthesizer-jax train quickstart:dot_product --workdir runs/quickstart --data-dir DATA
    python benchmarks/synthesize.py --data-dir DATA --workdir runs/synthesize \\
        --teachers runs/quickstart runs/multi30k --page docs/results.md

The encoder's self-attention of each teacher is replaced by Random tables, and everything else is the
teacher's. All starts have the same optimizer, data and number of steps, distillation included. Finished
runs are not repeated, so the benchmark can be interrupted and continued.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import report
from synthesizer_jax.recipes import synthesize

from synthesizer_jax.alignments import Random
from synthesizer_jax.distillation.distill import FINE_TUNED, Distillation, distill
from synthesizer_jax.distillation.replacement import Replacement
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.registry import replace
from synthesizer_jax.runs.metrics import METRICS_FILE, read_scores
from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.run_directory import load_experiment

STARTS = ("random", "fitted", "fitted, distilled")
SCORES = {"multi30k_en_de": "BLEU"}
"""Of a mixture's `score`, where it is one metric."""


def main() -> None:
    """Makes the missing runs and writes the table."""
    parser = report.arguments(
        __doc__, steps=400, distilled=100, every=100, fit_batches=50, examples=1014
    )
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--teachers", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    enable_compilation_cache()
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for teacher in args.teachers:
        for start in STARTS:
            by_step = found.setdefault(teacher.name, {}).setdefault(start, {})
            for seed in args.seeds:
                for step, score in student(teacher, start, seed, args).items():
                    by_step.setdefault(step, []).append(score)
    sections = [section(teacher, found[teacher.name], args) for teacher in args.teachers]
    facts = {k: v for k, v in report.machine().items() if "GFLOP" not in k}
    report.write("synthesize", "\n\n".join(sections), result=found, options=args, facts=facts)


def student(teacher: pathlib.Path, start: str, seed: int, args: Any) -> dict[int, float]:
    """Returns the scores of a student by the number of its steps; 0 is before the first."""
    distilled = args.distilled if start == "fitted, distilled" else 0
    directory = args.workdir / teacher.name / f"{start.replace(', ', '_')}_seed_{seed}"
    experiment = load_experiment(teacher)
    recipe = replace(
        synthesize.random(),
        replace=(Replacement(Random(max_length=experiment.data.inputs_length)),),
        fit_batches=0 if start == "random" else args.fit_batches,
        evaluation=replace(experiment.evaluation, every=args.every, max_examples=args.examples),
        # The first step of a warm-up has a learning rate of zero: it evaluates the start.
        training=training(max(distilled, 1), seed),
        fine_tune=training(args.steps - distilled, seed),
    )
    assert isinstance(recipe, Distillation)
    print(f"{teacher.name}, {start}, seed {seed}", flush=True)
    distill(recipe, teacher, directory, data_dir=args.data_dir, visible=False)
    first = read_scores(directory / METRICS_FILE)
    later = read_scores(directory / FINE_TUNED / METRICS_FILE)
    return {distilled: first[max(distilled, 1)]} | {
        distilled + step: score for step, score in later.items()
    }


def training(steps: int, seed: int) -> Training:
    """Returns the training that all students share, but for its length."""
    schedule = Cosine(1e-3, total_steps=steps, warmup_steps=max(steps // 20, 1))
    return Training(
        steps=steps, optimizer=AdamW(learning_rate=schedule), seed=seed, save_every=steps
    )


def section(
    teacher: pathlib.Path, starts: Mapping[str, Mapping[int, list[float]]], args: Any
) -> str:
    """Returns the table of a teacher's students."""
    experiment = load_experiment(teacher)
    mixture = experiment.data.mixture
    reached = read_scores(teacher / METRICS_FILE)
    steps = sorted({step for by_step in starts.values() for step in by_step})
    rows = [
        {"start": start} | {str(step): cell(by_step.get(step, [])) for step in steps}
        for start, by_step in starts.items()
    ]
    columns = {"start": "start"} | {str(step): f"{step:,} steps" for step in steps}
    score = SCORES.get(mixture, "Mean score of the tasks")
    return (
        f"**{teacher.name}** ({mixture}): the teacher has {reached[max(reached)]:.1f} after "
        f"{max(reached):,} steps. {score} on at most {args.examples:,} validation examples per task, "
        f"mean of {len(args.seeds)} seeds (smallest to largest).\n\n" + report.table(rows, columns)
    )


def cell(scores: list[float]) -> str | None:
    """Formats the scores of all seeds."""
    if not scores:
        return None
    return f"{statistics.fmean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})"


if __name__ == "__main__":
    main()
