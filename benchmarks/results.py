"""Trains small models that differ in attention alone, and writes the tables of docs/results.md.

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output de.model --size 4000 --data-dir DATA
    python benchmarks/results.py --parts translation replacement synthesize --vocabulary de.model \\
        --data-dir DATA --workdir runs/results --page docs/results.md

    synthesizer-jax data import wikitext --from WIKITEXT_FILES --data-dir DATA
    synthesizer-jax data import mine --name ag_descriptions --from train=ROWS --from validation=TEST_ROWS \\
        --input '{text}' --target '{label}' --labels World,Sports,Business,Sci/Tech --data-dir DATA
    python benchmarks/results.py --parts language_models classifiers --vocabulary VOCABULARY_OF_8192 \\
        --data-dir DATA --workdir runs/results --page docs/results.md

- translation: the recipes of `translate`, all for the same number of steps; BLEU of the test split.
- replacement: the dot product's encoder attention replaced as in the recipe `replace_attention`.
- synthesize: trained teachers turned into Random Synthesizers from three starts, with the same data,
  optimizer and number of steps, distillation included.
- language_models, classifiers: the recipes of these names.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import report
import runs
from synthesizer_jax.recipes import (
    classify,
    language_model,
    quickstart,
    replace_attention,
    synthesize,
    translate,
)

from synthesizer_jax.alignments import Random
from synthesizer_jax.distillation.replacement import Replacement
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Experiment

VOCABULARY = 8192  # rows of the embedding of language models
WIKITEXT, AG_NEWS = "wikitext_2_v1_full_lm", "ag_descriptions"
STUDENTS = {
    "ALR": replace_attention.alr,
    "ALRR": replace_attention.alrr,
    "ELR": replace_attention.elr,
    "a network per token": replace_attention.token,
    "Random": replace_attention.random,
}
STARTS = ("random", "fitted", "fitted, distilled")
TEACHERS: dict[str, tuple[Callable[[], Experiment], str]] = {
    "quickstart": (quickstart.dot_product, "Mean score of the tasks"),
    "multi30k": (translate.vanilla, "BLEU"),
}
"""Recipes that are turned into Synthesizers, and what their score is."""
LANGUAGE_MODELS = {
    "Dot product (V)": language_model.vanilla,
    "Random (R)": language_model.random,
    "Factorized Random (FR)": language_model.factorized_random,
    "R+V": language_model.random_vanilla,
}
"""The recipes by the names of what they compare."""


def translate_recipe(
    build: Callable[[], Experiment], seed: int, args: argparse.Namespace
) -> tuple[pathlib.Path, float]:
    """Returns the directory and the test BLEU of a recipe of `translate`."""
    recipe, directory = build(), args.workdir / "translation" / f"{build.__name__}_seed_{seed}"
    recipe = replace(
        recipe,
        data=replace(recipe.data, seed=seed),
        training=runs.with_steps(recipe.training, args.translation_steps, seed),
        evaluation=replace(recipe.evaluation, every=0, split="test", method="beam", batch_size=125),
    )
    return directory, runs.trained(recipe, directory, args)[-1]["multi30k_en_de/bleu"]


def translation(args: argparse.Namespace) -> str:
    """Returns the table of translation."""
    rows: list[dict[str, Any]] = []
    for title, build in translate.RECIPES.items():
        found = [translate_recipe(build, seed, args) for seed in args.seeds]
        bleu = runs.cell([score for _, score in found])
        rows.append({"recipe": title, "parameters": runs.num_parameters(found[0][0]), "bleu": bleu})
    columns = {"recipe": "recipe", "parameters": "parameters|,d", "bleu": "BLEU"}
    return (
        f"Multi30k, English to German: {translate.SIZE.layers} + {translate.SIZE.layers} layers, d "
        f"{translate.SIZE.d_model}, joint SentencePiece vocabulary, batches of 64 sentences, "
        f"{args.translation_steps:,} steps for every recipe. sacreBLEU on the 1,000 sentences of "
        f"test_2016_flickr, beam 4, {runs.describe_seeds(args)}.\n\n" + report.table(rows, columns)
    )


def replacement(args: argparse.Namespace) -> str:
    """Returns the table of distilled replacements of a translation model's encoder attention."""
    teachers = [translate_recipe(translate.vanilla, seed, args) for seed in args.seeds]
    rows: list[dict[str, Any]] = [
        {
            "name": "nothing (the teacher)",
            "parameters": runs.num_parameters(teachers[0][0]),
            "bleu": runs.cell([score for _, score in teachers]),
        }
    ]
    for title, build in STUDENTS.items():
        scores, unexplained = [], []
        for seed, (teacher, _) in zip(args.seeds, teachers, strict=True):
            recipe, directory = (
                build(),
                args.workdir / "replacement" / f"{build.__name__}_seed_{seed}",
            )
            training = runs.with_steps(recipe.training, args.replacement_steps, seed)
            last = runs.distilled(replace(recipe, training=training), teacher, directory, args)[0][
                -1
            ]
            scores.append(last["multi30k_en_de/bleu"])
            unexplained.append(runs.last_logged(directory, "unexplained"))
        rows.append(
            {
                "name": title,
                "parameters": runs.num_parameters(directory),
                "unexplained": sum(unexplained) / len(unexplained),
                "bleu": runs.cell(scores),
            }
        )
    columns = {"name": "encoder attention replaced by", "parameters": "parameters|,d"}
    columns |= {"unexplained": "unexplained|.3f", "bleu": "BLEU"}
    return (
        "The dot product's encoder attention is replaced and only the replacement is trained, on the "
        f"teacher's activations, {args.replacement_steps:,} steps. *Unexplained* is the squared error as "
        f"a share of the variance of what is imitated; {runs.describe_seeds(args)}.\n\n"
        + report.table(rows, columns)
    )


def synthesized(args: argparse.Namespace) -> str:
    """Returns a table of students by start and number of steps for every teacher."""
    texts = []
    for name, (build, score) in TEACHERS.items():
        recipe, teacher = build(), args.workdir / "teachers" / name
        last = runs.trained(recipe, teacher, args)[-1]
        rows = []
        for start in STARTS:
            by_step: dict[str, list[float]] = {}
            for seed in args.seeds:
                for step, value in student(recipe, teacher, start, seed, args).items():
                    by_step.setdefault(f"{step:,} steps", []).append(value)
            rows.append({"start": start} | {k: runs.cell(v) for k, v in by_step.items()})
        columns = {"start": "start"} | {k: k for k in rows[0] if k != "start"}
        texts.append(
            f"**{name}** ({recipe.data.mixture}): the teacher has {last['score']:.1f} after "
            f"{last['step']:,} steps. {score} on at most {args.examples:,} validation examples per task, "
            f"{runs.describe_seeds(args)}.\n\n" + report.table(rows, columns)
        )
    return "\n\n".join(texts)


def student(
    experiment: Experiment, teacher: pathlib.Path, start: str, seed: int, args: argparse.Namespace
) -> dict[int, float]:
    """Returns the scores of a student by the number of its steps; 0 is before the first."""
    steps = args.distilled if start == "fitted, distilled" else 0
    recipe = synthesize.random()
    evaluation = replace(experiment.evaluation, every=args.every, max_examples=args.examples)
    recipe = replace(
        recipe,
        replace=(Replacement(Random(max_length=experiment.data.inputs_length)),),
        fit_batches=0 if start == "random" else recipe.fit_batches,
        evaluation=evaluation,
        # The first step of a warm-up has a learning rate of zero: it evaluates the start.
        training=runs.with_steps(recipe.training, max(steps, 1), seed),
        fine_tune=runs.with_steps(recipe.training, args.steps - steps, seed),
    )
    directory = (
        args.workdir / "synthesize" / teacher.name / f"{start.replace(', ', '_')}_seed_{seed}"
    )
    first, later = runs.distilled(recipe, teacher, directory, args)
    return {steps: first[-1]["score"]} | {steps + r["step"]: r["score"] for r in later}


def language_models(args: argparse.Namespace) -> str:
    """Returns the table of language models."""
    rows = []
    for title, build in LANGUAGE_MODELS.items():
        recipe = build()
        recipe = replace(
            recipe,
            model=recipe.model.copy(vocab_size=VOCABULARY),
            data=replace(recipe.data, mixture=WIKITEXT, batch_size=8, split="validation"),
            training=runs.with_steps(recipe.training, args.language_model_steps),
            evaluation=replace(recipe.evaluation, every=0, split="test"),
        )
        last = runs.trained(recipe, args.workdir / "language_models" / build.__name__, args)[-1]
        rows.append({"model": title} | {k.partition("/")[2]: v for k, v in last.items()})
    columns = {
        "model": "self-attention",
        "perplexity": "perplexity per token|.1f",
        "word_perplexity": "per word|.1f",
        "bits_per_byte": "bits per byte|.3f",
    }
    return (
        f"WikiText-2's validation split as training text, {args.language_model_steps:,} steps of 8 rows of "
        f"256 tokens, {VOCABULARY:,} pieces, seed 0; measured on its test split in windows of 256 "
        "tokens.\n\n" + report.table(rows, columns)
    )


def classifiers(args: argparse.Namespace) -> str:
    """Returns the table of text classifiers."""
    rows = []
    for title, build in classify.RECIPES.items():
        scores = []
        for seed in args.seeds:
            recipe = build()
            recipe = replace(
                recipe,
                data=replace(recipe.data, mixture=AG_NEWS, seed=seed),
                training=runs.with_steps(recipe.training, args.classifier_steps, seed),
                evaluation=replace(recipe.evaluation, split="validation"),
            )
            directory = args.workdir / "classifiers" / f"{build.__name__}_seed_{seed}"
            scores.append(runs.trained(recipe, directory, args)[-1][f"{AG_NEWS}/accuracy"])
        rows.append({"model": title, "accuracy": runs.cell(scores)})
    return (
        f"AG News, descriptions alone, {args.classifier_steps:,} steps of 64 texts; accuracy on the "
        f"validation split, {runs.describe_seeds(args)}.\n\n"
        + report.table(rows, {"model": "self-attention", "accuracy": "accuracy"})
    )


if __name__ == "__main__":
    runs.write_parts(
        __doc__,
        {
            "translation": translation,
            "replacement": replacement,
            "synthesize": synthesized,
            "language_models": language_models,
            "classifiers": classifiers,
        },
        translation_steps=translate.STEPS,
        replacement_steps=replace_attention.STEPS,
        steps=400,
        distilled=100,
        every=100,
        examples=1014,
        language_model_steps=600,
        classifier_steps=400,
    )
