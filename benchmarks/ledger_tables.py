"""The tables of docs/results.md: which recipes they compare, by which metric, and what the papers say."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a system of a table with a seed."""

    system: str
    recipe: str
    seed: int
    metric: str
    curve: str
    vocabulary: str | None = None
    settings: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    teacher: Run | None = None
    init_from: Run | None = None
    compute: Callable[[Run], float] | None = None

    @property
    def name(self) -> str:
        """The recipe, with the teacher's where it has one."""
        return f"{self.recipe} of {self.teacher.recipe}" if self.teacher else self.recipe

    @property
    def directory(self) -> pathlib.Path:
        """Where it lies in the work directory."""
        return pathlib.Path(
            self.name.replace(" of ", "_of_").replace(":", "/"), f"seed_{self.seed}"
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of systems.

    Attributes:
      title: heading of its section.
      about: what is trained on what, in a sentence or two.
      recipe: the recipe of all systems, which take the place of ``{}``.
      systems: argument of the recipe by the name in the table; the first is what others are compared with.
      metric: key of the metric in the log of a run, or ``test/TASK/METRIC``.
      unit: heading of the metric's column.
      seeds: how many.
      form: how its numbers are written.
      curve: key of what the curves show.
      paper: what the paper reports, by name in the table.
      source: which paper, table and metric these are, and how they are known.
      vocabulary: file of the vocabulary in the work directory.
      test: options of `eval` for the test split; empty: the metric is that of the recipe's split.
      settings: what differs from the recipes.
      decodes: whether `speed` measures decoding too.
      teacher: recipe of the teacher that a distillation needs.
      init_from: recipe of the pre-trained run.
      comparable: whether the systems have learned enough for the paper's order to be looked for.
      compute: returns the metric where nothing is trained.
    """

    title: str
    about: str
    recipe: str
    systems: Mapping[str, str]
    metric: str
    unit: str
    seeds: int = 3
    form: str = ".1f"
    curve: str = "score"
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    vocabulary: str | None = None
    test: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    decodes: bool = False
    teacher: str | None = None
    init_from: str | None = None
    comparable: bool = True
    compute: Callable[[Run], float] | None = None

    def runs(self, seeds: Sequence[int] | None = None) -> Iterator[Run]:
        """Yields the runs of all systems."""
        for seed in range(self.seeds) if seeds is None else seeds:
            for system, argument in self.systems.items():
                yield Run(
                    system,
                    self.recipe.format(argument),
                    seed,
                    metric=self.metric,
                    curve=self.curve,
                    vocabulary=self.vocabulary,
                    test=self.test,
                    settings=self.settings,
                    teacher=find_run(self.teacher, argument, seed),
                    init_from=find_run(self.init_from, argument, seed),
                    compute=self.compute,
                )


def find_run(recipe: str | None, argument: str, seed: int) -> Run | None:
    """Returns the run that another one needs: with the same argument, if it takes one."""
    if recipe is None or recipe == argument:  # a teacher in its students' table
        return None
    name = recipe.format(argument)
    return next(run for table in TABLES.values() for run in table.runs([seed]) if run.name == name)


def count_millions(run: Run) -> float:
    """Returns the number of parameters of a recipe's model, in millions."""
    from synthesizer_jax.cli.recipes import load_recipe
    from synthesizer_jax.costs.summary import num_elements
    from synthesizer_jax.primitives.parameters import abstract_variables

    experiment = load_recipe(run.recipe)
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    return num_elements(shapes["params"]) / 1e6


def fit_bottleneck(run: Run) -> float:
    """Returns how far a head of the size that the system is named after stays from random attention."""
    from ledger_bottleneck import fit_divergence

    return fit_divergence(int(run.system), run.seed)


V, R, FR = {"V": "v"}, {"R": "r"}, {"FR": "fr"}
DENSE = {"D": "d", "FD": "fd"}
MIXTURES = {"R+D": "rd", "R+V": "rv", "D+V": "dv"}
HARD_CODED = {"HC-SA": "hc_sa", "HC-ALL": "hc_all", "SH-X": "sh_x"}
CONVOLUTIONS = {"Lightweight convolution": "light", "Dynamic convolution": "dynamic"}
OTHERS = CONVOLUTIONS | {"V within 3 tokens": "local", "Talking heads": "heads"}


def with_steps(steps: int) -> tuple[str, ...]:
    """Returns the settings of a schedule with another number of steps."""
    schedule = "training.optimizer.learning_rate"
    return (
        f"training.steps={steps}",
        f"training.save_every={steps}",
        f"{schedule}.total_steps={steps}",
        f"{schedule}.warmup_steps={steps // 10}",
    )


LANGUAGE_MODEL = {
    "metric": "wikitext_2_v1_full_lm/perplexity",
    "unit": "perplexity",
    "curve": "wikitext_2_v1_full_lm/perplexity",
    "vocabulary": "wikitext.model",
    "settings": (
        "model.vocab_size=7168",
        "data.mixture=wikitext_2_v1_full_lm",
        "data.split=validation",
        "data.batch_size=8",
        "evaluation.split=test",
        "evaluation.every=200",
        *with_steps(600),
    ),
}
"""WikiText-2's validation split, 217,000 tokens, is what these models are trained on."""

TRANSLATION = {
    "metric": "test/multi30k_en_de/bleu",
    "unit": "BLEU",
    "vocabulary": "multi30k.model",
    "test": ("--split", "test", "--method", "beam"),
}

TABLES = {
    "race": Table(
        "Speed",
        "Nothing is trained here: T5 1.1 with 2 + 2 layers of d 256, 8 rows of 512 + 114 tokens, "
        "1,024 pieces; a training step, and greedy decoding of 114 tokens.",
        "papers.pretraining:race:{}",
        {
            "Dynamic convolution (d/4 kernels)": "dynamic",
            "Dynamic convolution (d kernels)": "dynamic_full",
            "Lightweight convolution": "light",
            **(V | R | FR | DENSE | MIXTURES),
            "HC-SA": "hc_sa",
            "HC-ALL": "hc_all",
            "Talking heads": "heads",
            "Linformer (encoder)": "linformer",
            "Universal Transformer": "universal",
        },
        metric="",
        unit="",
        seeds=0,
        decodes=True,
    ),
    "cotraining": Table(
        "Co-training on eight tasks",
        "A synthetic mixture: single sentences, pairs and similarity in T5's formats over a made-up "
        "grammar, 2 + 1 layers of d 64, 6,000 steps of AdamW; biases and tables of Random forms start "
        "with a standard deviation of 2. *Score*: the mean over tasks of their metrics on held-out "
        "examples.",
        "papers.cotraining:synthetic:{}",
        {**V, "V, scaled dot product": "v:scaled", **R, **FR, **DENSE, **MIXTURES}
        | {"HC-SA": "hc_sa"}
        | OTHERS,
        metric="score",
        unit="score",
        seeds=5,
        settings=("evaluation.every=1500",),
        paper={"V": 83.5, "R": 75.1, "D": 72.0, "D+V": 82.6, "R+V": 84.1},
        source="GLUE's average with T5 base, Tay et al. 2021 (all but V and R+V from memory)",
    ),
    "classification": Table(
        "Classification by encoders",
        "AG News, descriptions alone, 10,000 of them for training: two layers of d 128, 600 steps of 64 "
        "texts; accuracy on the 7,600 test texts.",
        "papers.classification:ag_news:{}",
        V | FR | {"FR+V": "frv", "Linformer": "linformer", "R": "r", "D": "d"},
        metric="ag_descriptions/accuracy",
        unit="accuracy",
        vocabulary="ag.model",
        settings=(
            "data.mixture=ag_descriptions",
            "evaluation.split=validation",
            "evaluation.every=100",
            *with_steps(600),
        ),
        paper={"V": 88.83, "Linformer": 86.50, "FR": 86.53, "FR+V": 89.13},
        source="accuracy on AG News, Tay et al. 2021 (from memory)",
    ),
    "reviews": Table(
        "Film reviews by encoders",
        "The recipe for IMDb on the phrases of SST-2: two layers of d 128, 600 steps of 64 phrases; "
        "accuracy on the 872 sentences of its validation split.",
        "papers.classification:imdb:{}",
        V | FR | {"FR+V": "frv"},
        metric="glue_sst2_v002/accuracy",
        unit="accuracy",
        vocabulary="sst.model",
        settings=(
            "data.mixture=glue_sst2_v002",
            "data.inputs_length=64",
            "data.buckets=((32, 1),)",
            "evaluation.split=validation",
            "evaluation.every=100",
            *with_steps(600),
        ),
        paper={"V": 81.34, "FR": 83.39, "FR+V": 84.61},
        source="accuracy on IMDb, Tay et al. 2021 (from memory)",
    ),
    "language_models": Table(
        "Language models",
        "WikiText-2's validation split as training text, four layers of d 256, 600 steps of 8 rows of 256 "
        "tokens, 7,000 pieces; perplexity per token of the test split in windows of 256 tokens.",
        "papers.language_modeling:wikitext:{}",
        V | R | FR | {"D": "d", "R+V": "rv", "D+V": "dv", "V, T5's dot product": "v:t5"},
        paper={"V": 38.21, "R": 40.60, "FR": 42.40, "D": 40.88, "R+V": 40.05, "D+V": 37.27},
        source="perplexity on LM1B, Tay et al. 2021 (reports of FR and D differ)",
        **LANGUAGE_MODEL,
    ),
    "language_model_positions": Table(
        "Language models with sinusoids",
        "The language models above, with sinusoids in place of the relative bias, as in Tensor2Tensor.",
        "papers.language_modeling:wikitext:{}:scaled:sinusoidal",
        V | {"R+V": "rv"},
        paper={"V": 38.21, "R+V": 40.05},
        source="perplexity on LM1B, Tay et al. 2021",
        **LANGUAGE_MODEL,
    ),
    "bottleneck": Table(
        "The low-rank bottleneck",
        "Queries and keys of one head fitted to random attention between 32 random tokens of 64 "
        "features: KL divergence from the target, in nats per query. By theorem 1 of "
        "Bhojanapalli et al. 2020 a head expresses all attention from a size of 32 on, that of the text.",
        "bottleneck:{}",
        {size: size for size in ("64", "32", "16", "8", "4", "2")},
        metric="divergence",
        compute=fit_bottleneck,
        unit="divergence",
        seeds=10,
        form=".4f",
    ),
    "head_sizes": Table(
        "Heads of a free size",
        "The language model of dot products above, with four heads of other sizes at the same width.",
        "papers.language_modeling:heads:{}",
        {"16": "16", "32": "32", "64 (d/h)": "64", "128": "128"},
        **LANGUAGE_MODEL,
    ),
    "talking_heads": Table(
        "Talking heads",
        "The language model with more and smaller heads at equal width, with and without projections "
        "between the heads.",
        "papers.language_modeling:{}",
        {
            "4 × 64": "heads:64",
            "16 × 16": "heads:16:16",
            "4 × 64, talking": "talking_heads:64:4",
            "16 × 16, talking": "talking_heads:16:16",
        },
        **LANGUAGE_MODEL,
    ),
    "masked": Table(
        "BERT with heads of a free size",
        "Masked language model of the same text, post-norm, four layers of d 256 with four heads; "
        "perplexity of masked tokens.",
        "papers.language_modeling:masked:{}",
        {"16": "16", "64 (d/h)": "64", "128": "128"},
        **LANGUAGE_MODEL
        | {"settings": (*LANGUAGE_MODEL["settings"], "training.optimizer.learning_rate.peak=1e-3")},
    ),
    "wmt": Table(
        "WMT 2014 English-German",
        "The translation model of Multi30k on 10,000 sentences of the training text; BLEU on newstest2013, "
        "both cut at 32 pieces.",
        "papers.translation:multi30k:{}:wmt_sample",
        V | R | {"HC-SA": "hc_sa"},
        metric="wmt_sample/bleu",
        unit="BLEU",
        vocabulary="wmt.model",
        settings=("evaluation.every=1000",),
        paper={"V": 27.67, "R": 27.27},
        source="BLEU on newstest2014, Tay et al. 2021",
        seeds=1,
        comparable=False,
    ),
    "translation": Table(
        "Translation",
        "Multi30k, English to German: 2 + 2 layers of d 128, dropout 0.1, 4,000 steps of 64 sentences. "
        "BLEU (sacreBLEU, T5's `intl`) on the 1,000 sentences of test_2016_flickr, beam 4; curves: BLEU "
        "of the validation split, greedy.",
        "papers.translation:multi30k:{}",
        V | R | {"Fix": "fix"} | FR | DENSE | {"R+V": "rv", "D+V": "dv"} | HARD_CODED | OTHERS,
        **TRANSLATION,
        paper={
            "V": 27.67,
            "R": 27.27,
            "Fix": 23.89,
            "FR": 27.30,
            "D": 27.43,
            "FD": 27.32,
            "D+V": 27.57,
            "R+V": 28.47,
        },
        source="BLEU on WMT 2014 English-German, Tay et al. 2021 (FR, FD and D+V from memory)",
    ),
    "hard_coded": Table(
        "Hard-coded attention",
        "Runs of the table above.",
        "papers.translation:multi30k:{}",
        V | HARD_CODED,
        **TRANSLATION,
        paper={"V": 30.0, "HC-SA": 30.3, "HC-ALL": 21.1, "SH-X": 28.2},
        source="BLEU on IWSLT 2016 English-German, You et al. 2020 (from memory)",
    ),
    "published_settings": Table(
        "Published settings",
        "Post-norm models of You et al. (5 + 5 layers of d 288) and the teacher of Bozic et al. (6 + 6 "
        "layers of d 128) on Multi30k; 200 steps show that they train, no more.",
        "{}",
        {
            "You et al., V": "papers.translation:small:multi30k_en_de:base",
            "You et al., HC-SA": "papers.translation:small:multi30k_en_de:hc_sa",
            "Bozic et al., teacher": "papers.replacement:teacher",
        },
        **TRANSLATION,
        settings=(
            "data.mixture=multi30k_en_de",
            "model.vocab_size=4096",
            "evaluation.every=200",
            *with_steps(200),
        ),
        seeds=1,
    ),
    "head_positions": Table(
        "Places of hard-coded heads",
        "HC-SA of the translation table with other centers of its four heads, relative to the query.",
        "papers.translation:head_positions:{}",
        {
            "-1, 1; decoder -1, 0": "-1,1:-1,0",
            "0": "0:0",
            "-1; decoder -1": "-1:-1",
            "-2, -1, 1, 2; decoder -2, -1": "-2,-1,1,2:-2,-1",
        },
        **TRANSLATION,
        seeds=1,
    ),
    "feed_forward": Table(
        "Without feed-forward layers",
        "V and HC-SA of the translation table without the feed-forward layers of encoder and decoder.",
        "papers.translation:without_feed_forward:{}",
        V | {"HC-SA": "hc_sa"},
        **TRANSLATION,
        seeds=1,
    ),
    "replacement": Table(
        "Attention replaced by feed-forward networks",
        "The V of the translation table is the teacher; only the replacements are trained, 1,500 steps on"
        " its activations. BLEU on the test split, beam 4.",
        "{}",
        {
            "nothing (the teacher)": "papers.translation:multi30k:v",
            "ALR, encoder, XS": "papers.replacement:alr:encoder:xs",
            "ALR, encoder, S": "papers.replacement:alr:encoder:s",
            "ALR, encoder, M": "papers.replacement:alr:encoder:m",
            "ALSR, encoder, XS": "papers.replacement:alsr:encoder:xs",
            "ALRR, encoder, S": "papers.replacement:alrr:s",
            "ALRR, encoder, M": "papers.replacement:alrr:m",
            "ELR, encoder, S": "papers.replacement:elr:s",
            "ELR, encoder, M": "papers.replacement:elr:m",
            "ALR, decoder, S": "papers.replacement:alr:decoder:s",
            "ALR, cross, S": "papers.replacement:alr:cross:s",
            "ALR, everything, S": "papers.replacement:alr:everything:s",
            "a network per token": "papers.replacement:token",
            "Random heads": "papers.replacement:random",
            "ALR, encoder, S, untrained": "papers.replacement:untrained:encoder:s",
        },
        teacher="papers.translation:multi30k:v",
        **TRANSLATION,
    ),
    "pretraining": Table(
        "Span corruption",
        "WikiText-2's validation split in T5's 32,000 pieces, 2 + 2 layers of d 256, 1,000 steps of 32 "
        "rows of 128 tokens; loss per target token of the test split.",
        "papers.pretraining:small:{}",
        V | R | {"D": "d", "R+V": "rv", "D+V": "dv", "HC-SA": "hc_sa"} | OTHERS,
        metric="loss",
        unit="loss",
        form=".3f",
        curve="loss",
        vocabulary="spiece.model",
        settings=(
            "data.mixture=wikitext_2_v1_full_lm",
            "data.split=validation",
            "evaluation.split=test",
        ),
        paper={
            "V": 1.865,
            "R": 1.972,
            "D": 1.965,
            "R+V": 1.849,
            "D+V": 1.832,
            "Lightweight convolution": 1.990,
            "Dynamic convolution": 2.038,
        },
        source="log-perplexity on C4, Tay et al. 2021; the convolutions from table 2 of Narang et al. "
        "2021, whose other values are the same",
        seeds=1,
    ),
    "glue": Table(
        "GLUE and SuperGLUE",
        "The models of the table above, co-trained for 300 steps on all tasks whose original training "
        "files are at hand; the mean over tasks of both benchmarks of their metrics on at most 200 "
        "examples each.",
        "papers.cotraining:laptop:{}",
        V | R | {"R+V": "rv"},
        metric="score",
        unit="score",
        vocabulary="spiece.model",
        init_from="papers.pretraining:small:{}",
        paper={"V": 83.5, "R": 75.1, "R+V": 84.1},
        source="GLUE's average with T5 base, Tay et al. 2021 (R from memory)",
        comparable=False,
    ),
    "summaries": Table(
        "Summaries",
        "The sample of CNN/DailyMail at hand, 2 + 2 layers of d 128, 1,000 steps of 32 articles of 512 "
        "tokens.",
        "papers.generation:cnn_dailymail:{}:small",
        V | R | {"D": "d", "D+V": "dv", "R+V": "rv"},
        metric="cnn_sample/rouge1",
        unit="ROUGE-1",
        vocabulary="cnn.model",
        settings=("data.mixture=cnn_sample",),
        paper={"V": 38.24, "R": 35.47, "D": 36.05, "D+V": 38.57, "R+V": 38.57},
        source="ROUGE-1 on CNN/DailyMail, Tay et al. 2021 (from memory)",
        seeds=1,
        comparable=False,
    ),
    "dialogue": Table(
        "Dialogue",
        "The English part of XPersona, 2 + 2 layers of d 128, 1,000 steps of 32 turns of 256 tokens.",
        "papers.generation:personachat:{}:small",
        V | R | {"D": "d", "D+V": "dv", "R+V": "rv"},
        metric="persona_sample/bleu",
        unit="BLEU",
        vocabulary="persona.model",
        settings=("data.mixture=persona_sample",),
        paper={"V": 3.20, "R": 2.25, "D": 4.02, "D+V": 3.57, "R+V": 2.28},
        source="BLEU-4 on PersonaChat, Tay et al. 2021 (from memory)",
        seeds=1,
        comparable=False,
    ),
    "translation_sizes": Table(
        "Sizes: Tensor2Tensor's base models",
        "Millions of parameters with 32,768 pieces and tables of 256 positions. The paper's vocabulary is "
        "not known: 45,000 pieces would match V, R, Fix, FR and R+V. The published D, FD and R+D have "
        "fewer parameters than the formulas give, D+V more.",
        "papers.translation:base:wmt14_ende_v003:{}",
        V | R | {"Fix": "fix"} | FR | DENSE | MIXTURES | {"FR+V": "frv"},
        metric="millions",
        compute=count_millions,
        unit="millions",
        seeds=1,
        paper={
            "V": 67,
            "R": 67,
            "Fix": 61,
            "FR": 61,
            "D": 62,
            "FD": 61,
            "R+D": 67,
            "D+V": 74,
            "R+V": 73,
        },
        source="Tay et al. 2021 (FR and FD from memory)",
    ),
    "language_model_sizes": Table(
        "Sizes: language models of LM1B",
        "Millions of parameters of six layers of d 512 with 32,128 pieces and tables of 256 positions. The "
        "paper's depths and widths are not known, and its differences do not follow from its formulas.",
        "papers.language_modeling:lm1b:{}",
        V | R | {"Fix": "fix"} | FR | DENSE | MIXTURES,
        metric="millions",
        compute=count_millions,
        unit="millions",
        seeds=1,
        paper={
            "V": 70,
            "R": 53,
            "Fix": 53,
            "FR": 53,
            "D": 53,
            "FD": 53,
            "R+D": 58,
            "D+V": 70,
            "R+V": 70,
        },
        source="Tay et al. 2021 (Fix, FR, FD, R+D and D+V from memory; reports of R and R+V differ)",
    ),
}
