"""Tasks and mixtures of SeqIO's registries, with the vocabulary and the data directory of a run.

A package that registers tasks is imported with ``--import``. Its preprocessors, metrics, splits and
features are used as they are; the registries are only read.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synthesizer_jax.data.task_streams import SIDES
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.files import size_of, storage_path
from synthesizer_jax.import_noise import filter_import_noise
from synthesizer_jax.tasks import stored
from synthesizer_jax.tasks.formats import Written
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.postprocessors import Example
from synthesizer_jax.tasks.task import Answers, Task

if TYPE_CHECKING:
    import seqio

LABEL_WORDS: dict[str, tuple[str, ...]] = {}
"""The allowed answers by name of a task, which SeqIO's tasks do not tell; a package may add its own."""


@dataclasses.dataclass(frozen=True)
class RegisteredTask(Task):
    """A task of SeqIO's registry; `find_registered` makes it."""

    @property
    def original(self) -> seqio.Task:
        """The registered task, with its own vocabulary."""
        import seqio

        return seqio.TaskRegistry.get(self.name)

    @property
    def scores_targets(self) -> bool:
        """Whether one of its metrics takes scores."""
        import seqio

        kinds = {metric.model_output_type for metric in self.original.metric_objs}
        return seqio.metrics.ModelOutputType.SCORE in kinds

    @property
    def is_text(self) -> bool:
        """Whether it has no inputs and no metrics."""
        return not self.has_inputs and not self.original.metric_objs

    def stored_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the splits of its source; a TFDS data set that is not on this machine has none."""
        import seqio

        source = self.original.source
        if not isinstance(source, seqio.TfdsDataSource):
            return {split: source.num_input_examples(split) for split in source.splits}
        directory = _prepared_directory(source, data_dir)
        if directory is None:
            return {}
        found = stored.stored_splits(directory)
        declared = _declared_splits(source) or {split: split for split in found}
        return {split: found.get(part) for split, part in declared.items() if _base(part) in found}

    def source_version(self, split: str, data_dir: pathlib.Path) -> str | None:
        """Returns what changes when the rows of a split are written again; None: nothing tells."""
        import seqio

        source = self.original.source
        if isinstance(source, seqio.TfdsDataSource):
            directory = _prepared_directory(source, data_dir)
            part = _declared_splits(source).get(split, split)
            if directory is None:
                return None
            return f"{part} of {stored.describe_split(self.dataset, directory, _base(part))}"
        if isinstance(source, seqio.FileDataSource):
            return ", ".join(
                f"{path}: {size_of(storage_path(path))} bytes" for path in source.list_shards(split)
            )
        return None

    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the task with another vocabulary; its TFDS data set is looked up in `data_dir`."""
        import seqio

        task = self.original
        source = task.source
        if isinstance(source, seqio.TfdsDataSource):
            directory = _prepared_directory(source, data_dir)
            if directory is not None:
                stored.check_dataset(directory)
            if not source.tfds_dataset.tfds_splits and source.tfds_dataset.data_dir is None:
                source = copy.deepcopy(source)
                source.tfds_dataset.override_data_dir(str(data_dir))
        return task.replace(source=source, output_features=_features(task, vocabulary))

    def is_labeled(self, example: Example) -> bool:
        """True: its metrics are computed over all examples, as SeqIO does."""
        return True

    def postprocess(
        self, answer: str, *, example: Example | None = None, is_target: bool = False
    ) -> Value:
        """Returns what the task's `postprocess_fn` makes of a string."""
        return self.original.postprocess_fn(answer, example=example, is_target=is_target)

    def score(
        self,
        examples: Sequence[Example],
        answers: Answers,
        *,
        vocabulary: Vocabulary | None = None,
    ) -> dict[str, float]:
        """Returns the numbers among its metrics, computed as SeqIO's `Evaluator` does.

        Raises:
          ValueError: a metric needs something that is not computed here, or fails.
        """
        if vocabulary is None:
            raise ValueError(f"the metrics of the task {self.name!r} need the vocabulary; give it")
        if answers.tokens is None:  # label words were ranked
            tokens = [np.asarray(vocabulary.encode(text), np.int32) for text in answers.texts]
            answers = answers._replace(tokens=tokens)
        features = _features(self.original, vocabulary)
        found: dict[str, float] = {}
        for metric in self.original.metric_objs:
            outputs = _outputs_for(metric.model_output_type, answers, self.name)
            try:
                found |= _numbers(_compute_metric(metric, examples, outputs, features))
            except Exception as error:
                raise ValueError(
                    f"a metric of the task {self.name!r} failed: {type(error).__name__}: {error}"
                ) from error
        return found


def find_registered(name: str) -> RegisteredTask:
    """Returns the task of that name in SeqIO's registry."""
    import seqio

    task = seqio.TaskRegistry.get(name)
    source, dataset = task.source, type(task.source).__name__
    if isinstance(source, seqio.TfdsDataSource):
        dataset = source.tfds_dataset.name or dataset
    words = LABEL_WORDS.get(name, ())
    text_format = Written(words, has_inputs="inputs" in task.output_features)
    return RegisteredTask(name, dataset, text_format, metrics=(), splits=())


def task_names() -> list[str]:
    """Returns the names in SeqIO's registry of tasks; none where no imported code uses SeqIO."""
    if "seqio" not in sys.modules:
        return []
    import seqio

    return sorted(seqio.TaskRegistry.names())


def mixture_names() -> list[str]:
    """Returns the names in SeqIO's registry of mixtures; none where no imported code uses SeqIO."""
    if "seqio" not in sys.modules:
        return []
    import seqio

    return sorted(seqio.MixtureRegistry.names())


def member_names(name: str) -> list[str]:
    """Returns the names of the tasks of a mixture, those of its sub-mixtures included."""
    import seqio

    return [task.name for task in seqio.MixtureRegistry.get(name).tasks]


def mixture_rates(name: str, tasks: Iterable[str], data_dir: pathlib.Path) -> dict[str, float]:
    """Returns the rates of tasks of a mixture, whose data sets are in a directory.

    Functions that compute rates are given tasks that read that directory.
    """
    mixture = _adapt_mixture(name, frozenset(tasks), data_dir)
    rates: dict[str, float] = {}
    if mixture is None:
        return rates
    for task in mixture.tasks:
        try:
            rates[task.name] = float(mixture.get_rate(task))
        except Exception as error:  # of a function of the user's
            problem = f"the rate of {task.name!r} in {name!r} cannot be computed ({error})"
            remedy = "give its source num_input_examples, or the mixture a number as its rate"
            raise ValueError(f"{problem}; {remedy}") from error
    return rates


def _adapt_mixture(
    name: str, tasks: frozenset[str], data_dir: pathlib.Path
) -> seqio.Mixture | None:
    """Returns the mixture of some of its tasks; None if it has none of them."""
    import seqio

    vocabulary = Bytes().build()
    members: list[tuple[seqio.Task | seqio.Mixture, Any]] = []
    for member, rate in seqio.MixtureRegistry.get(name).rate_per_task_name.items():
        if member in mixture_names():
            part = _adapt_mixture(member, tasks, data_dir)
            if part is not None:
                members.append((part, rate))
        elif member in tasks:
            members.append((find_registered(member).to_seqio(vocabulary, data_dir), rate))
    return seqio.Mixture(name, members) if members else None


def _features(task: seqio.Task, vocabulary: Vocabulary) -> dict[str, seqio.Feature]:
    """Returns a task's features, inputs and targets with the given vocabulary.

    Raises:
      ValueError: they are not sequences of tokens.
    """
    import seqio

    features = dict(task.output_features)
    for name in SIDES:
        feature = features.get(name)
        if feature is None:
            continue
        if not isinstance(feature, seqio.Feature) or feature.rank != 1:
            raise ValueError(
                f"the feature {name!r} of the task {task.name!r} is no sequence of tokens "
                f"({type(feature).__name__} of rank {feature.rank}); models here read and write tokens"
            )
        features[name] = dataclasses.replace(feature, vocabulary=vocabulary.to_seqio())
    if "targets" not in features:
        raise ValueError(
            f"the task {task.name!r} has the features {', '.join(features)}; 'targets' is missing"
        )
    return features


def _prepared_directory(
    source: seqio.TfdsDataSource, data_dir: pathlib.Path
) -> pathlib.Path | None:
    """Returns the directory of a source's data set; None if it is not on this machine."""
    loader = source.tfds_dataset
    if loader.tfds_splits or loader.name is None:
        return None
    dataset, _, version = loader.name.partition(":")
    versions = stored.prepared_versions(dataset, storage_path(str(loader.data_dir or data_dir)))
    if version:
        return versions.get(version)
    return list(versions.values())[-1] if versions else None


def _declared_splits(source: seqio.TfdsDataSource) -> dict[str, str]:
    """Returns the parts of TFDS's splits that a source's splits stand for; empty: it has all of TFDS's.

    The property `splits` would open the data set in TFDS's default directory.
    """
    return dict(source.tfds_dataset._split_map or {})


def _base(split: str) -> str:
    """Returns the split of which ``train[:90%]`` is a part."""
    return split.partition("[")[0]


def _outputs_for(kind: seqio.metrics.ModelOutputType, answers: Answers, task: str) -> Any:
    """Returns a model's outputs in the form that SeqIO passes to metrics of a kind."""
    import seqio

    kinds = seqio.metrics.ModelOutputType
    if kind == kinds.SCORE:
        return np.asarray(answers.target_scores)
    if kind in (kinds.PREDICTION, kinds.PREDICTION_WITH_AUX) and answers.tokens is not None:
        tokens = _padded(answers.tokens)
        return tokens if kind == kinds.PREDICTION else (tokens, {"scores": answers.scores})
    raise ValueError(
        f"a metric of the task {task!r} needs the output {kind.name}, which is not computed; use "
        "metrics of predictions or scores"
    )


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns token ids as an array ``[n, length]``, padded with 0."""
    padded = zip(*itertools.zip_longest(*rows, fillvalue=0), strict=True)
    return np.array(list(padded), np.int32).reshape(len(rows), -1)


def _compute_metric(
    metric: Any, examples: Sequence[Example], outputs: Any, features: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a metric's values by the protocol of SeqIO's `Evaluator`."""
    import seqio

    instance = metric.from_model_output(examples, outputs, features)
    if isinstance(instance, seqio.metrics.CollectingMetric):
        values, _ = instance.actual_compute(examples, features)
        return values
    return instance.compute()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among metric values; texts, images and histograms are left out."""
    import seqio

    found = {}
    for name, value in values.items():
        if isinstance(value, seqio.metrics.Scalar):
            value = value.value
        if not isinstance(value, seqio.metrics.MetricValue) and np.ndim(value) == 0:
            found[name] = float(value)
    return found


@functools.cache
def import_tensorflow() -> Any:
    """Imports TensorFlow without its messages and without accelerators, whose memory JAX needs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with filter_import_noise():
        import tensorflow as tf

        with contextlib.suppress(RuntimeError):  # already initialized: keep the caller's devices
            tf.config.set_visible_devices([], "GPU")
    return tf
