"""T5's GLUE and SuperGLUE tasks as one table, with T5's names and versions (Raffel et al. 2020)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from synthesizer_jax.data import postprocessors
from synthesizer_jax.data.formats import (
    WNLI,
    WSC,
    Classification,
    MultiRC,
    PronounResolution,
    ReCoRD,
    Similarity,
    TextFormat,
)
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.postprocessors import Example
from synthesizer_jax.data.stored import (
    cached_until_written,
    check_dataset,
    prepared_versions,
    stored_splits,
)
from synthesizer_jax.data.task import Answers, Task
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation import metrics
from synthesizer_jax.evaluation.metrics import Value

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

TRAINED = ("train", "validation", "test")
HELD_OUT = ("validation", "test")


@dataclasses.dataclass(frozen=True)
class TaskDefinition(Task):
    """The definition of a task over a TFDS data set; creating it loads nothing.

    Attributes:
      name: T5's name.
      dataset: TFDS data set and configuration, such as ``glue/cola``.
      format: how its rows are written as text, and answers are read.
      metrics: metric functions.
      splits: the splits of the data set that the task exposes.
      rename: pairs (old, new) of feature names; features are renamed before preprocessing.
      sentinel: whether the task uses T5's sentinel format.
      objective: what makes training examples of its texts, which have no inputs; None: see
        `DataConfig.objective`.
    """

    name: str
    dataset: str
    format: TextFormat
    metrics: tuple[metrics.Metric, ...] = (metrics.accuracy,)
    splits: tuple[str, ...] = TRAINED
    rename: tuple[tuple[str, str], ...] = ()
    sentinel: bool = False
    objective: Objective | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, indexed by the integer label; empty for tasks with free-text answers."""
        return self.format.labels

    @property
    def source(self) -> str:
        """The TFDS data set."""
        return self.dataset

    @property
    def label_words(self) -> tuple[str, ...] | None:
        """The allowed answers; None for free text."""
        return self.format.answers

    @property
    def scores_targets(self) -> bool:
        """False: its metrics compare answers."""
        return False

    @property
    def has_inputs(self) -> bool:
        """Whether its format has inputs."""
        return self.format.has_inputs

    @property
    def is_text(self) -> bool:
        """Whether it has no inputs."""
        return not self.has_inputs

    def prepared_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the numbers of stored rows of the splits whose data is in `data_dir`."""
        versions = prepared_versions(self.dataset, data_dir)
        if not versions:
            return {}
        stored = stored_splits(list(versions.values())[-1])
        return {split: stored[split] for split in self.splits if split in stored}

    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the SeqIO task over the newest version of the data set, which must be prepared."""
        return _seqio_task(self, vocabulary, data_dir)

    def seqio_preprocessors(self, vocabulary: Vocabulary) -> list[Callable[..., tf.data.Dataset]]:
        """Returns the SeqIO preprocessors that turn stored rows into token ids."""
        import seqio

        preprocessing: list[Callable[..., tf.data.Dataset]] = [self.format.preprocess]
        if self.rename:
            from synthesizer_jax.data import preprocessors

            preprocessing.insert(
                0, functools.partial(preprocessors.rename_features, names=dict(self.rename))
            )
        preprocessing += [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
        preprocessing += self.format.token_preprocessors
        if self.sentinel:
            from synthesizer_jax.data import preprocessors

            sentinel_id = vocabulary.vocab_size - 1
            preprocessing.append(
                functools.partial(preprocessors.append_sentinel, sentinel=sentinel_id)
            )
        return [*preprocessing, seqio.preprocessors.append_eos_after_trim]

    def is_labeled(self, example: Example) -> bool:
        """See `postprocessors.is_labeled`."""
        return postprocessors.is_labeled(example)

    def score(
        self, examples: Sequence[Example], answers: Answers, *, vocabulary: Vocabulary | None = None
    ) -> dict[str, float]:
        """Returns the task's metrics in percent; see `Task.score`."""
        del vocabulary
        targets = [postprocessors.to_text(row["targets_pretokenized"]) for row in examples]
        wanted = [
            self.postprocess(target, example=row, is_target=True)
            for target, row in zip(targets, examples, strict=True)
        ]
        found = [
            self.postprocess(text, example=row)
            for text, row in zip(answers.texts, examples, strict=True)
        ]
        result: dict[str, float] = {}
        for metric in (*self.metrics, *EXTRA_METRICS.get(self.name, ())):
            result |= metric(wanted, found)
        return result

    def postprocess(
        self, answer: str, *, example: Example | None = None, is_target: bool = False
    ) -> Value:
        """Converts a decoded answer or a target string; see `Task.postprocess`."""
        if self.sentinel:
            answer = postprocessors.remove_sentinel(answer)
        parse = self.format.parse_target if is_target else self.format.parse
        return parse(answer, example)

    def is_right(self, answer: str, example: Example) -> bool:
        """Returns whether an answer is correct for one row, by the rule of the task's metric.

        Label words and free text must match exactly. STS-B: the answer and the label round to the
        same fifth. WSC and WNLI as coreference: the answer names the candidate if and only if the
        label says that the pronoun refers to it. ReCoRD: SQuAD's exact match with one of the
        answers. MultiRC: the label of this row, not of the whole question.

        Args:
          answer: a decoded string.
          example: the preprocessed row, with its ``targets_pretokenized``.

        Raises:
          ValueError: the row's label is hidden (`postprocessors.is_labeled`).
        """
        if not postprocessors.is_labeled(example):
            raise ValueError(f"{self.name}: no answer is right or wrong for a row without a label")
        target = postprocessors.to_text(example["targets_pretokenized"])
        expected = self.postprocess(target, example=example, is_target=True)
        predicted = self.postprocess(answer, example=example)
        return self.format.is_right(expected, predicted)


@cached_until_written
def _seqio_task(task: TaskDefinition, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
    """Returns the SeqIO task of a definition."""
    import seqio
    import tensorflow_datasets as tfds

    # `pipeline` caches the examples, not TFDS; one reader per task limits the number of threads.
    seqio.set_tfds_read_config_override(
        tfds.ReadConfig(
            try_autocache=False,
            interleave_cycle_length=1,
            num_parallel_calls_for_interleave_files=1,
            num_parallel_calls_for_decode=1,
        )
    )
    version, directory = list(prepared_versions(task.dataset, data_dir).items())[-1]
    check_dataset(directory)
    seqio_vocabulary = vocabulary.to_seqio()
    return seqio.Task(
        task.name,
        source=seqio.TfdsDataSource(
            f"{task.dataset}:{version}",
            tfds_data_dir=str(data_dir),
            splits=list(task.prepared_splits(data_dir)),
        ),
        preprocessors=task.seqio_preprocessors(vocabulary),
        postprocess_fn=functools.partial(_postprocess, task),
        output_features={
            "inputs": seqio.Feature(seqio_vocabulary, add_eos=True, required=False),
            "targets": seqio.Feature(seqio_vocabulary, add_eos=True),
        },
        metric_fns=list(task.metrics),
    )


def _postprocess(
    task: TaskDefinition,
    answer: str,
    *,
    example: Example | None = None,
    is_target: bool = False,
    **_: object,
) -> Value:
    return task.postprocess(answer, example=example, is_target=is_target)


MNLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
BOOLEAN = ("False", "True")
SENTENCES = ("sentence1", "sentence2")
PAIR = ("hypothesis", "premise")


class _Options(TypedDict, total=False):
    metrics: tuple[metrics.Metric, ...]
    splits: tuple[str, ...]
    rename: tuple[tuple[str, str], ...]


def _glue(
    config: str,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    *,
    prefix: str | None = None,
    **options: Unpack[_Options],
) -> TaskDefinition:
    text_format = Classification(prefix or config, features, labels)
    return TaskDefinition(f"glue_{config}_v002", f"glue/{config}", text_format, **options)


def _super(
    config: str,
    features: tuple[str, ...],
    labels: tuple[str, ...],
    *,
    prefix: str | None = None,
    **options: Unpack[_Options],
) -> TaskDefinition:
    text_format = Classification(prefix or config, features, labels)
    name, dataset = f"super_glue_{config}_v102", f"super_glue/{config}"
    return TaskDefinition(name, dataset, text_format, **options)


_F1 = (metrics.f1_with_invalid, metrics.accuracy)
MNLI_SPLITS = (
    "train",
    "validation_matched",
    "validation_mismatched",
    "test_matched",
    "test_mismatched",
)

GLUE = (
    _glue("cola", ("sentence",), ("unacceptable", "acceptable"), metrics=(metrics.matthews,)),
    _glue("sst2", ("sentence",), ("negative", "positive")),
    _glue("mrpc", SENTENCES, ("not_equivalent", "equivalent"), metrics=_F1),
    _glue("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), metrics=_F1),
    TaskDefinition(
        "glue_stsb_v002",
        "glue/stsb",
        Similarity("stsb", SENTENCES),
        metrics=(metrics.pearson, metrics.spearman),
    ),
    _glue("mnli", PAIR, MNLI, splits=MNLI_SPLITS),
    _glue("mnli_matched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("mnli_mismatched", PAIR, MNLI, prefix="mnli", splits=HELD_OUT),
    _glue("qnli", ("question", "sentence"), RTE),
    _glue("rte", SENTENCES, RTE),
    _glue("wnli", SENTENCES, ("not_entailment", "entailment")),
    _glue("ax", PAIR, MNLI, prefix="mnli", splits=("test",), metrics=()),
    TaskDefinition("glue_wnli_v002_simple_eval", "glue/wnli", WNLI(), splits=HELD_OUT),
)
"""In the order of T5's registry; labels in index order."""

SUPER_GLUE = (
    _super("boolq", ("passage", "question"), BOOLEAN),
    _super(
        "cb",
        PAIR,
        ("entailment", "contradiction", "neutral"),
        metrics=(metrics.mean_3class_f1, metrics.accuracy),
    ),
    _super("copa", ("choice1", "choice2", "premise", "question"), ("choice1", "choice2")),
    TaskDefinition(
        "super_glue_multirc_v102",
        "super_glue/multirc",
        MultiRC(BOOLEAN),
        metrics=(metrics.multirc_f1, metrics.multirc_exact_match),
    ),
    TaskDefinition(
        "super_glue_record_v102",
        "super_glue/record",
        ReCoRD(),
        metrics=(metrics.record_squad,),
    ),
    _super("rte", PAIR, RTE),
    _super("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _super(
        "axb",
        PAIR,
        RTE,
        prefix="rte",
        rename=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        splits=("test",),
        metrics=(),
    ),
    _super("axg", PAIR, RTE, prefix="rte", splits=("test",), metrics=()),
    TaskDefinition(
        "super_glue_wsc_v102_simple_train",
        "super_glue/wsc.fixed",
        WSC(positive_only=True),
        splits=("train",),
        metrics=(),
    ),
    TaskDefinition(
        "super_glue_wsc_v102_simple_eval",
        "super_glue/wsc.fixed",
        WSC(),
        splits=HELD_OUT,
    ),
    TaskDefinition(
        "dpr_v001_simple",
        "definite_pronoun_resolution",
        PronounResolution(),
        splits=("train", "test"),
    ),
)


def sentinel_name(name: str) -> str:
    """Returns T5's name of a task's sentinel format.

    ``_1_sentinel`` is inserted before the first of ``_train``, ``_dev``, ``_test``, ``_eval`` and
    ``.``, or else appended.
    """
    positions = [name.find(m) for m in ("_train", "_dev", "_test", "_eval", ".") if m in name]
    position = min(positions, default=len(name))
    return f"{name[:position]}_1_sentinel{name[position:]}"


SENTINEL = tuple(
    dataclasses.replace(d, name=sentinel_name(d.name), sentinel=True) for d in SUPER_GLUE
)

EXTRA_METRICS: Mapping[str, tuple[metrics.Metric, ...]] = types.MappingProxyType(
    {
        "super_glue_axb_v102": (metrics.matthews,),
        "super_glue_axg_v102": (metrics.accuracy, metrics.gender_parity),
    }
)
"""Metrics of AX-b and AX-g, whose rows have labels; T5 computes none. They enter no average."""
