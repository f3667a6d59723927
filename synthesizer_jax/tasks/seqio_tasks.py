"""Makes the tasks and mixtures of SeqIO's registries use a run's vocabulary and data directory."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath, epy

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.data.examples import SIDES
from synthesizer_jax.data.vocabularies import PAD, Bytes, SentencePiece, Vocabulary
from synthesizer_jax.tasks import stored
from synthesizer_jax.tasks.postprocessors import Example
from synthesizer_jax.tasks.task import Answers, Task, errors_of

with epy.lazy_imports():
    import seqio
    import tensorflow as tf

LABEL_WORDS: dict[str, tuple[str, ...]] = {}
"""The allowed answers of SeqIO's tasks, by the name of the task.

SeqIO's tasks do not say which answers they allow. Packages that define SeqIO tasks can add the
allowed answers to this dictionary.
"""


@dataclasses.dataclass(frozen=True)
class RegisteredTask(Task):
    """A task of SeqIO's registry. Use `find_registered` to get one."""

    @property
    def original(self) -> seqio.Task:
        """The task in SeqIO's registry, which has its own vocabulary."""
        return seqio.TaskRegistry.get(self.name)

    @property
    def scores_targets(self) -> bool:
        """Whether a metric of the task needs the log-probabilities of the targets."""
        kinds = {metric.model_output_type for metric in self.original.metric_objs}
        return seqio.metrics.ModelOutputType.SCORE in kinds

    @property
    def is_text(self) -> bool:
        """Whether the task has no inputs and no metrics."""
        return not self.has_inputs and not self.original.metric_objs

    def stored_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the number of rows of each split of the source, or `None` if it is not known.

        The result is empty if the source is a TFDS data set that is not on this machine.
        """
        source = self.original.source
        if not isinstance(source, seqio.TfdsDataSource):
            return {split: source.num_input_examples(split) for split in source.splits}
        directory = _stored_directory(source, data_dir)
        if directory is None:
            return {}
        rows, located = stored.stored_splits(directory), _located(source, data_dir)
        return {
            split: located.num_input_examples(split) if split in rows else None
            for split in located.splits
        }

    def source_version(self, split: str, data_dir: pathlib.Path) -> str | None:
        """Returns a description of a split's rows, which changes if the rows are written again.

        The result is `None` if such changes cannot be detected.
        """
        source = self.original.source
        if isinstance(source, seqio.TfdsDataSource):
            directory = _stored_directory(source, data_dir)
            if directory is None:
                return None
            # A split such as `train[:90%]` may contain only a part of a file.
            parts = _located(source, data_dir).tfds_dataset.files(split)
            rows = [(pathlib.Path(part.filename).name, part.skip, part.take) for part in parts]
            written = (
                stored.describe_split(self.dataset, directory, name)
                for name in stored.stored_splits(directory)
            )
            return f"{rows} of {', '.join(written)}"
        if isinstance(source, seqio.FileDataSource):
            return ", ".join(map(_describe_file, source.list_shards(split)))
        rows = source.num_input_examples(split)
        return None if rows is None else f"{rows} rows"

    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the SeqIO task, changed to use a different vocabulary.

        Args:
          vocabulary: the vocabulary for the inputs and the targets.
          data_dir: the directory that contains the task's TFDS data set.
        """
        task = self.original
        source = task.source
        if isinstance(source, seqio.TfdsDataSource):
            source = _located(source, data_dir)
        return task.replace(source=source, output_features=_features(task, vocabulary))

    def is_labeled(self, example: Example) -> bool:
        """Returns `True`, because SeqIO computes metrics over all examples."""
        return True

    def score(
        self, examples: Sequence[Example], answers: Answers, *, vocabulary: Vocabulary | None = None
    ) -> dict[str, float]:
        """Returns the scores of the task's metrics, computed as in SeqIO's `Evaluator`.

        Only numbers are returned. Values of SeqIO's other types, such as texts and images, are left
        out.

        Args:
          examples: preprocessed rows.
          answers: the answers of a model to these rows.
          vocabulary: the vocabulary of the tokens. SeqIO's tasks require a vocabulary.

        Raises:
          ValueError: if a metric fails, or needs a kind of output that this package does not
            compute.
        """
        assert vocabulary is not None
        # If label words were ranked instead of decoding answers, the answers have no tokens yet.
        if answers.tokens is None:
            tokens = [np.asarray(vocabulary.encode(text), np.int32) for text in answers.texts]
            answers = answers._replace(tokens=tokens)
        features = _features(self.original, vocabulary)
        scores: dict[str, float] = {}
        for metric in self.original.metric_objs:
            outputs = _outputs_for(metric.model_output_type, answers, self.name, vocabulary)
            # SeqIO's metrics call the postprocess_fn themselves, and metrics that are made from
            # functions have no names. The error therefore cannot say which metric failed, or
            # whether the postprocess_fn failed.
            with errors_of("A metric or the postprocess_fn", self.name):
                scores |= _compute_metric(metric, examples, outputs, features)
        return scores


def find_registered(name: str) -> RegisteredTask:
    """Returns the task called `name` in SeqIO's registry."""
    task = seqio.TaskRegistry.get(name)
    source, dataset = task.source, type(task.source).__name__
    if isinstance(source, seqio.TfdsDataSource):
        dataset = source.tfds_dataset.name or dataset
    return RegisteredTask(
        name,
        dataset,
        metrics=(),
        splits=(),
        label_words=LABEL_WORDS.get(name),
        postprocess_fn=task.postprocess_fn,
        has_inputs="inputs" in task.output_features,
    )


def task_names() -> list[str]:
    """Returns the names in SeqIO's registry of tasks.

    The result is empty if no imported code uses SeqIO. The function itself does not import SeqIO.
    """
    return sorted(seqio.TaskRegistry.names()) if "seqio" in sys.modules else []


def mixture_names() -> list[str]:
    """Returns the names in SeqIO's registry of mixtures.

    The result is empty if no imported code uses SeqIO. The function itself does not import SeqIO.
    """
    return sorted(seqio.MixtureRegistry.names()) if "seqio" in sys.modules else []


def member_names(name: str) -> list[str]:
    """Returns the names of the tasks of a mixture, including the tasks of its sub-mixtures."""
    return [task.name for task in seqio.MixtureRegistry.get(name).tasks]


def mixture_rates(name: str, tasks: Iterable[str], data_dir: pathlib.Path) -> dict[str, float]:
    """Returns the rates of some tasks of a mixture.

    A mixture can compute rates with functions of the tasks. The tasks that these functions receive
    read their data from `data_dir`.

    Args:
      name: the name of the mixture.
      tasks: the names of the tasks whose data sets are available. Other tasks of the mixture are
        left out.
      data_dir: the directory of TFDS data sets.
    """
    mixture = _adapt_mixture(name, frozenset(tasks), data_dir)
    if mixture is None:
        return {}
    return {task.name: float(mixture.get_rate(task)) for task in mixture.tasks}


def _adapt_mixture(
    name: str, tasks: frozenset[str], data_dir: pathlib.Path
) -> seqio.Mixture | None:
    """Returns a mixture with only the given tasks, or `None` if it has none of the given tasks."""
    # Rates do not depend on the vocabulary, so use a vocabulary of bytes, which needs no file.
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


def seqio_vocabulary(vocabulary: Vocabulary) -> seqio.Vocabulary:
    """Returns a SeqIO vocabulary that encodes texts to the same token ids."""
    if vocabulary.backend is not None:
        return _python_vocabulary(vocabulary)
    if isinstance(vocabulary, SentencePiece):
        return seqio.SentencePieceVocabulary(str(vocabulary.file), vocabulary.extra_ids)
    assert isinstance(vocabulary, Bytes)
    return seqio.ByteVocabulary(vocabulary.extra_ids)


def _python_vocabulary(vocabulary: Vocabulary) -> seqio.Vocabulary:
    """Returns a SeqIO vocabulary that calls the library ``tokenizers`` from Python.

    TensorFlow has no operation for the tokenizers of this library.
    """
    backend = vocabulary.backend
    assert backend is not None

    def encode(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each text."""
        rows = backend.encode_batch([text.decode("utf-8", "replace") for text in texts])
        ids = np.array(list(itertools.chain(*rows)), np.int32)
        lengths = np.array(list(map(len, rows)), np.int64)
        return ids, lengths

    def decode(ids: np.ndarray) -> np.ndarray:
        """Returns the texts of ids ``[..., length]``."""
        texts = [vocabulary.decode(row).encode() for row in ids.reshape(-1, ids.shape[-1]).tolist()]
        return np.array(texts, object).reshape(ids.shape[:-1])

    class PythonVocabulary(seqio.Vocabulary):
        digest = vocabulary.digest
        bos_id = None
        eos_id = vocabulary.eos_id
        unk_id = None if vocabulary.unk_id < 0 else vocabulary.unk_id
        _base_vocab_size = vocabulary.vocab_size

        @property
        def vocab_size(self) -> int:
            # T5's preprocessors use the last id as the first sentinel. Tokens that were added after
            # the sentinels are therefore not counted.
            return vocabulary.first_sentinel + 1

        def __eq__(self, other: object) -> bool:
            return self.digest == getattr(other, "digest", None)

        def _encode(self, s: str) -> list[int]:
            return vocabulary.encode(s)

        def _decode(self, ids: Sequence[int]) -> str:
            return vocabulary.decode(ids)

        def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
            texts = tf.convert_to_tensor(s)
            found = tf.numpy_function(encode, [tf.reshape(texts, [-1])], [tf.int32, tf.int64])
            rows = tf.RaggedTensor.from_row_lengths(*(tf.ensure_shape(x, [None]) for x in found))
            return rows if texts.shape.rank else rows.values

        def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(decode, [ids], tf.string), ids.shape[:-1])

    return PythonVocabulary()


def _features(task: seqio.Task, vocabulary: Vocabulary) -> dict[str, seqio.Feature]:
    """Returns the features of a task, in which inputs and targets use a different vocabulary.

    Raises:
      ValueError: if the inputs or targets are not sequences of tokens.
    """
    features = dict(task.output_features)
    for name in SIDES:
        feature = features.get(name)
        if feature is None:
            continue
        if not isinstance(feature, seqio.Feature) or feature.rank != 1:
            raise ValueError(
                f"The feature {name!r} of the task {task.name!r} is not a sequence of tokens, but "
                f"a {type(feature).__name__} of rank {feature.rank}. Models of this package can "
                "only read and write tokens."
            )
        features[name] = dataclasses.replace(feature, vocabulary=seqio_vocabulary(vocabulary))
    return features


def _stored_directory(source: seqio.TfdsDataSource, data_dir: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of a source's data set, or `None` if it is not on this machine."""
    loader = source.tfds_dataset
    if loader.tfds_splits or loader.name is None:
        return None
    dataset, _, version = loader.name.partition(":")
    root = storage_path(str(loader.data_dir or data_dir))
    if not version:
        return stored.newest_version(dataset, root)
    directory = root / dataset / version
    return directory if (directory / stored.INFO).is_file() else None


def _located(source: seqio.TfdsDataSource, data_dir: pathlib.Path) -> seqio.TfdsDataSource:
    """Returns a copy of a source that reads the source's data set in a data directory.

    A source that specifies its own data directory is returned unchanged.

    Raises:
      ValueError: if the data set names a class that is not part of TFDS.
    """
    if source.tfds_dataset.tfds_splits or source.tfds_dataset.data_dir is not None:
        return source
    directory = _stored_directory(source, data_dir)
    if directory is not None:
        stored.check_classes(directory)
    # The source in SeqIO's registry must not change, so a copy is made.
    source = copy.deepcopy(source)
    source.tfds_dataset.override_data_dir(str(data_dir))
    return source


def _describe_file(address: str) -> str:
    """Returns a description of a file, which changes if the file is written again."""
    # The modification time of a file on a disk is known in nanoseconds. For other files, `epath`
    # returns the modification time in seconds.
    stat = epath.Path(address).stat()
    time = stat.mtime if "://" in address else os.stat(address).st_mtime_ns
    return f"{address}: {stat.length} bytes, modified at {time}"


def _outputs_for(
    kind: seqio.metrics.ModelOutputType, answers: Answers, task: str, vocabulary: Vocabulary
) -> Any:
    """Returns a model's outputs in the form that SeqIO passes to a metric.

    Args:
      kind: the kind of output that the metric needs.
      answers: the answers of the model.
      task: the name of the task, for messages.
      vocabulary: the vocabulary of the tokens.

    Raises:
      ValueError: if this package does not compute this kind of output.
    """
    kinds = seqio.metrics.ModelOutputType
    if kind == kinds.SCORE:
        return np.asarray(answers.target_scores)
    if kind in (kinds.PREDICTION, kinds.PREDICTION_WITH_AUX) and answers.tokens is not None:
        # SeqIO pads with the id 0. If the id 0 stands for text in this vocabulary, pad with EOS
        # instead, because metrics stop decoding at EOS.
        padding = vocabulary.eos_id if vocabulary.is_text(PAD) else PAD
        padded = zip(*itertools.zip_longest(*answers.tokens, fillvalue=padding), strict=True)
        tokens = np.array(list(padded), np.int32).reshape(len(answers.tokens), -1)
        return tokens if kind == kinds.PREDICTION else (tokens, {"scores": answers.scores})
    raise ValueError(
        f"A metric of the task {task!r} needs the output {kind.name}, which is not computed. Use "
        "metrics of predictions or scores."
    )


def _compute_metric(
    metric: Any, examples: Sequence[Example], outputs: Any, features: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the numeric values of a metric, computed as in SeqIO's `Evaluator`.

    Raises:
      TypeError: if a value is a string.
    """
    instance = metric.from_model_output(examples, outputs, features)
    if isinstance(instance, seqio.metrics.CollectingMetric):
        values, _ = instance.actual_compute(examples, features)
    else:
        values = instance.compute()
    scores = {}
    for name, value in values.items():
        if isinstance(value, seqio.metrics.Scalar):
            value = value.value
        if not isinstance(value, seqio.metrics.MetricValue) and np.ndim(value) == 0:
            if isinstance(value, str | bytes):
                raise TypeError(f"The value {name!r} is {value!r}, which is not a number.")
            scores[name] = float(value)
    return scores
