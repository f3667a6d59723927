"""Pre-trains and fine-tunes small models on a laptop's scale, and writes tables.

    synthesizer-jax data import mine --name news --from train=TEXT --from validation=HELD_OUT_TEXT \\
        --target '{text}' --data-dir DATA
    synthesizer-jax data vocabulary news --output spm.model --examples 100000 --data-dir DATA
    synthesizer-jax data import glue --from GLUE_FILES --data-dir DATA
    synthesizer-jax data import mine --name boolq_divided --from train=ROWS --from validation=OTHER_ROWS \\
        --input 'boolq passage: {passage} question: {question}' --target '{label}' \\
        --labels false=False,true=True --data-dir DATA
    synthesizer-jax data import wikitext --from WIKITEXT_FILES --data-dir DATA
    synthesizer-jax data import mine --name ag_descriptions --from train=ROWS --from validation=TEST_ROWS \\
        --input '{text}' --target '{label}' --labels World,Sports,Business,Sci/Tech --data-dir DATA
    python benchmarks/pretraining.py --data-dir DATA --vocabulary spm.model --workdir runs/pretraining \\
        --page docs/results.md

`pretrain:laptop` is trained by span corruption, and fine-tuned on four tasks, as is the same model from
scratch. The recipes of `language_model` are trained on WikiText-2, and those of `classify` on AG News.
`--parts` chooses. Finished runs are not repeated, so the benchmark can be interrupted and continued.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import report
from synthesizer_jax.recipes import classify, language_model, pretrain

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import t5
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant
from synthesizer_jax.registry import replace
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.run import run

VOCABULARY = 8192  # rows of the embedding
TASKS = {
    "CoLA, Matthews": ("glue_cola_v002", "matthews_corrcoef"),
    "RTE, accuracy": ("glue_rte_v002", "accuracy"),
    "MRPC, F1": ("glue_mrpc_v002", "f1"),
    "BoolQ, accuracy": ("boolq_divided", "accuracy"),
}
"""The fine-tuning tasks and the metric of each."""
WIKITEXT, AG_NEWS = "wikitext_2_v1_full_lm", "ag_descriptions"
STARTS = ("from scratch", "pre-trained")
LANGUAGE_MODELS = {
    "Dot product (V)": language_model.vanilla,
    "Random (R)": language_model.random,
    "Factorized Random (FR)": language_model.factorized_random,
    "R+V": language_model.random_vanilla,
}
"""The recipes by the names of what they compare."""


def main() -> None:
    """Makes the missing runs and writes the tables."""
    parser = report.arguments(
        __doc__, pretraining=7000, fine_tuning=400, language_model=600, classification=400
    )
    parser.add_argument("--data-dir", type=pathlib.Path, required=True)
    parser.add_argument("--vocabulary", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    enable_compilation_cache()
    found = {part: PARTS[part](args) for part in args.parts}
    facts = {k: v for k, v in report.machine().items() if "GFLOP" not in k}
    for part, text in found.items():
        report.write(part, text, result=found, options=args, facts=facts)


def fine_tuning(args: Any) -> str:
    """Returns the table of fine-tuning, after the runs that are missing."""
    source, last = pretrained(args)
    rows = [
        {"start": start}
        | {
            title: cell(
                [
                    fine_tuned(task, seed, source if start == STARTS[1] else None, args)[
                        f"{task}/{metric}"
                    ]
                    for seed in args.seeds
                ]
            )
            for title, (task, metric) in TASKS.items()
        }
        for start in STARTS
    ]
    columns = {"start": "start"} | {title: title for title in TASKS}
    return (
        f"`pretrain:laptop`, {VOCABULARY:,} pieces, {args.pretraining:,} steps of span corruption: "
        f"perplexity of the corrupted spans of held-out text {last['news/perplexity']:.1f}. Then "
        f"{args.fine_tuning:,} steps of 32 examples on each task; validation scores, mean of "
        f"{len(args.seeds)} seeds (smallest to largest).\n\n" + report.table(rows, columns)
    )


def pretrained(args: Any) -> tuple[pathlib.Path, Mapping[str, Any]]:
    """Returns the pre-trained run and its last evaluation."""
    recipe = pretrain.laptop()
    steps = args.pretraining
    recipe = replace(
        recipe,
        model=t5(pretrain.LAPTOP, vocab_size=VOCABULARY),
        data=replace(recipe.data, mixture="news"),
        training=replace(recipe.training, steps=steps, save_every=500),
        evaluation=replace(recipe.evaluation, every=1000, max_examples=500),
    )
    directory = args.workdir / "pretrained"
    return directory, finished(recipe, directory, args)


def fine_tuned(task: str, seed: int, source: pathlib.Path | None, args: Any) -> Mapping[str, Any]:
    """Returns the last evaluation of a model that was fine-tuned on a task, from parameters or none."""
    data = DataConfig(
        task,
        inputs_length=256,
        targets_length=8,
        batch_size=32,
        shards=1,
        buckets=((64, 8), (128, 8)),
        seed=seed,
    )
    recipe = Experiment(
        model=t5(pretrain.LAPTOP, vocab_size=VOCABULARY, dropout_rate=0.1),
        data=data,
        training=Training(
            steps=args.fine_tuning,
            optimizer=Adafactor(learning_rate=Constant(1e-3)),
            seed=seed,
            save_every=args.fine_tuning,
            keep_best=0,
        ),
        init_from=None if source is None else str(source),
    )
    kind = "scratch" if source is None else "transfer"
    return finished(recipe, args.workdir / kind / f"{task}_seed_{seed}", args)


def language_models(args: Any) -> str:
    """Returns the table of language models, after the runs that are missing."""
    rows = []
    for title, build in LANGUAGE_MODELS.items():
        recipe = build()
        recipe = replace(
            recipe,
            model=recipe.model.copy(vocab_size=VOCABULARY),
            data=replace(recipe.data, mixture=WIKITEXT, batch_size=8, split="validation"),
            training=shortened(recipe.training, args.language_model),
            evaluation=replace(recipe.evaluation, every=0, split="test"),
        )
        last = finished(recipe, args.workdir / "language_models" / build.__name__, args)
        named = {name.partition("/")[2]: value for name, value in last.items()}
        rows.append({"model": title, **named})
    columns = {
        "model": "self-attention",
        "perplexity": "perplexity per token|.1f",
        "word_perplexity": "per word|.1f",
        "bits_per_byte": "bits per byte|.3f",
    }
    return (
        f"WikiText-2's validation split as training text, {args.language_model:,} steps of 8 rows of 256 "
        f"tokens, {VOCABULARY:,} pieces, seed 0; measured on its test split in windows of 256 tokens.\n\n"
        + report.table(rows, columns)
    )


def classifiers(args: Any) -> str:
    """Returns the table of text classifiers, after the runs that are missing."""
    rows = []
    for title, build in classify.RECIPES.items():
        scores = []
        for seed in args.seeds:
            recipe = build()
            recipe = replace(
                recipe,
                data=replace(recipe.data, mixture=AG_NEWS, seed=seed),
                training=replace(shortened(recipe.training, args.classification), seed=seed),
                evaluation=replace(recipe.evaluation, split="validation"),
            )
            directory = args.workdir / "classifiers" / f"{build.__name__}_seed_{seed}"
            scores.append(finished(recipe, directory, args)[f"{AG_NEWS}/accuracy"])
        rows.append({"model": title, "accuracy": cell(scores)})
    return (
        f"AG News, descriptions alone, {args.classification:,} steps of 64 texts; accuracy on the "
        f"validation split, mean of {len(args.seeds)} seeds (smallest to largest).\n\n"
        + report.table(rows, {"model": "self-attention", "accuracy": "accuracy"})
    )


def finished(recipe: Experiment, directory: pathlib.Path, args: Any) -> Mapping[str, Any]:
    """Returns the last evaluation of an experiment, which is run unless it has been."""
    recipe = replace(recipe, vocabulary=SentencePiece(str(args.vocabulary.resolve())))
    print(directory, flush=True)
    run(recipe, directory, data_dir=args.data_dir, visible=False)
    records = [r for r in read_metrics(directory / METRICS_FILE) if r["kind"] == "eval"]
    return records[-1]


def shortened(training: Training, steps: int) -> Training:
    """Returns a recipe's training with another number of steps."""
    assert isinstance(training.optimizer, AdamW)
    schedule = replace(training.optimizer.learning_rate, total_steps=steps)
    optimizer = replace(training.optimizer, learning_rate=schedule)
    return replace(training, steps=steps, optimizer=optimizer, save_every=steps, keep_best=0)


def cell(scores: Sequence[float]) -> str:
    """Formats the scores of all seeds."""
    return f"{statistics.fmean(scores):.1f} ({min(scores):.1f} to {max(scores):.1f})"


PARTS: Mapping[str, Callable[[Any], str]] = {
    "fine_tuning": fine_tuning,
    "language_models": language_models,
    "classifiers": classifiers,
}
"""Sections of the page by the names that `--parts` takes."""


if __name__ == "__main__":
    main()
