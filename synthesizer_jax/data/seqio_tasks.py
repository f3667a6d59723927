"""Tasks and mixtures of SeqIO's registries, with the vocabulary and the data directory of a run.

A package that registers tasks is imported with ``--import``. Its preprocessors, metrics, splits and
features are used as they are; the registries are only read.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synthesizer_jax.data.members import SIDES
from synthesizer_jax.data.postprocessors import Example
from synthesizer_jax.data.stored import (
    cached_until_written,
    check_dataset,
    describe_split,
    prepared_versions,
    stored_splits,
)
from synthesizer_jax.data.task import Answers, Task
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.evaluation.metrics import Value
from synthesizer_jax.registry import JSON

if TYPE_CHECKING:
    import seqio


@dataclasses.dataclass(frozen=True)
class SeqioTask(Task):
    """A task of SeqIO's registry.

    Attributes:
      name: its name there.
    """

    name: str

    @property
    def original(self) -> seqio.Task:
        """The registered task, with its own vocabulary."""
        import seqio

        return seqio.TaskRegistry.get(self.name)

    @property
    def source(self) -> str:
        """The TFDS data set, or the class of another source."""
        import seqio

        source = self.original.source
        if isinstance(source, seqio.TfdsDataSource) and source.tfds_dataset.name:
            return source.tfds_dataset.name
        return type(source).__name__

    @property
    def label_words(self) -> None:
        """None: SeqIO's tasks do not tell which answers they allow."""

    @property
    def scores_targets(self) -> bool:
        """Whether one of its metrics takes scores."""
        import seqio

        kinds = {metric.model_output_type for metric in self.original.metric_objs}
        return seqio.metrics.ModelOutputType.SCORE in kinds

    @property
    def has_inputs(self) -> bool:
        """Whether it has the feature ``inputs``."""
        return "inputs" in self.original.output_features

    @property
    def is_text(self) -> bool:
        """Whether it has no inputs and no metrics."""
        return not self.has_inputs and not self.original.metric_objs

    def prepared_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the splits of its source, or of SeqIO's own cache of it where that has all of them.

        A TFDS data set that is not on this machine has none.
        """
        return {**self._source_splits(data_dir), **self._cached_splits(data_dir)}

    def _cached_splits(self, data_dir: pathlib.Path) -> dict[str, int]:
        """Returns the splits that SeqIO has cached; none if its source has others."""
        from synthesizer_jax.data import seqio_offline

        cached = seqio_offline.cached_splits(self.original)
        return cached if cached.keys() >= self._source_splits(data_dir).keys() else {}

    def _source_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the splits of its source."""
        import seqio

        source = self.original.source
        if not isinstance(source, seqio.TfdsDataSource):
            return {split: source.num_input_examples(split) for split in source.splits}
        directory = _prepared_directory(source, data_dir)
        if directory is None:
            return {}
        stored = stored_splits(directory)
        declared = _declared_splits(source)
        if not declared:
            return dict(stored)
        return {
            split: stored.get(part) for split, part in declared.items() if _base(part) in stored
        }

    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the task with another vocabulary; its TFDS data set is looked up in `data_dir`.

        Where the vocabulary is the task's own, it reads the tokens that SeqIO has cached.

        Raises:
          ValueError: it has to read them, and they are of another vocabulary.
        """
        from synthesizer_jax.data import seqio_offline

        task = self.original
        if self._cached_splits(data_dir) and _has_vocabulary(task, vocabulary):
            return _with_vocabulary(seqio_offline.read_cached(task), vocabulary, data_dir)
        if task.requires_caching or not self._source_splits(data_dir):
            raise ValueError(
                f"the task {self.name!r} can only be read from SeqIO's cache of it, which has to hold all "
                "splits of its source and tokens of the run's vocabulary; give the run the task's own "
                "vocabulary, and add the folder with seqio.add_global_cache_dirs in the imported package"
            )
        return _with_vocabulary(task, vocabulary, data_dir)

    def code_before_cache(self) -> list[Any]:
        """Returns what its rows depend on before its cache point: parts of its source, and steps."""
        import seqio

        task = self.original
        source = task.source
        parts: list[Any] = [source]
        if isinstance(source, seqio.TfdsDataSource):
            parts = [source.tfds_dataset.name, _declared_splits(source)]
        elif type(source) is seqio.FunctionDataSource:
            parts = [source._dataset_fn]
        elif isinstance(source, seqio.FileDataSource):
            parts = [type(source), source._reader, source._split_to_filepattern]
        names = [type(step).__name__ for step in task.preprocessors]
        end = names.index("CacheDatasetPlaceholder") if "CacheDatasetPlaceholder" in names else None
        return [*parts, *task.preprocessors[:end]]

    def stored_rows(self, split: str, data_dir: pathlib.Path) -> JSON:
        """Returns what tells whether the rows of a split were written again; None: nothing does."""
        import seqio

        from synthesizer_jax.data import seqio_offline

        task = self.original
        files: list[str] = []
        if split in self._cached_splits(data_dir):
            files += seqio_offline.OfflineCache(task).list_shards(split)
        if isinstance(task.source, seqio.FileDataSource):
            files += task.source.list_shards(split)
        stored = [seqio_offline.describe_file(path) for path in files]
        if isinstance(task.source, seqio.TfdsDataSource):
            directory = _prepared_directory(task.source, data_dir)
            part = _base(_declared_splits(task.source).get(split, split))
            stored += describe_split(directory, part) if directory else []
        return stored or None

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


def registered_names() -> list[str]:
    """Returns the names in SeqIO's registries; none where no imported code uses SeqIO."""
    if "seqio" not in sys.modules:
        return []
    import seqio

    return sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


def is_mixture(name: str) -> bool:
    """Returns whether SeqIO has a mixture of that name."""
    if "seqio" not in sys.modules:
        return False
    import seqio

    return name in seqio.MixtureRegistry.names()


def member_names(name: str) -> list[str]:
    """Returns the names of the tasks of a mixture, those of its sub-mixtures included."""
    import seqio

    return [task.name for task in seqio.MixtureRegistry.get(name).tasks]


def mixture_rates(name: str, data_dir: pathlib.Path) -> dict[str, float]:
    """Returns the rates of those tasks of a mixture whose data is on this machine."""
    mixture = _adapt_mixture(name, data_dir)
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


def _adapt_mixture(name: str, data_dir: pathlib.Path) -> seqio.Mixture | None:
    """Returns the mixture of those tasks whose data is on this machine; None if that is none of them.

    Functions that compute rates are given tasks that read the data directory.
    """
    import seqio

    vocabulary = Bytes().build()
    members = []
    for member, rate in seqio.MixtureRegistry.get(name).rate_per_task_name.items():
        if is_mixture(member):
            part = _adapt_mixture(member, data_dir)
        elif SeqioTask(member).prepared_splits(data_dir):
            part = SeqioTask(member).to_seqio(vocabulary, data_dir)
        else:
            part = None
        if part is not None:
            members.append((part, rate))
    return seqio.Mixture(name, members) if members else None


@cached_until_written
def _with_vocabulary(
    task: seqio.Task, vocabulary: Vocabulary, data_dir: pathlib.Path
) -> seqio.Task:
    """Returns the task with another vocabulary and, if it names no directory of TFDS, with `data_dir`."""
    import seqio

    source = task.source
    if isinstance(source, seqio.TfdsDataSource):
        directory = _prepared_directory(source, data_dir)
        if directory is not None:
            check_dataset(directory)
        if not source.tfds_dataset.tfds_splits and source.tfds_dataset.data_dir is None:
            source = copy.deepcopy(source)
            source.tfds_dataset.override_data_dir(str(data_dir))
    return task.replace(source=source, output_features=_features(task, vocabulary))


def _has_vocabulary(task: seqio.Task, vocabulary: Vocabulary) -> bool:
    """Returns whether a task's tokens are those of a vocabulary."""
    features = [task.output_features[side] for side in SIDES if side in task.output_features]
    return all(feature.vocabulary == vocabulary.to_seqio() for feature in features)


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
    versions = prepared_versions(dataset, pathlib.Path(loader.data_dir or data_dir))
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
    if kind in (kinds.PREDICTION, kinds.PREDICTION_WITH_AUX):
        assert answers.tokens is not None  # without label words, answers are decoded
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
