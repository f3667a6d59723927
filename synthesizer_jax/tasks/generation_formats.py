"""Text formats of tasks whose answers are free text; translation's is in `formats`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from synthesizer_jax.tasks import postprocessors
from synthesizer_jax.tasks.formats import Preprocessor, TextFormat, given
from synthesizer_jax.tasks.metrics import SpanTarget
from synthesizer_jax.tasks.postprocessors import Example

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Summarization(TextFormat):
    """``summarize: text`` with the summary as target.

    Attributes:
      features: names of the text and the summary feature.
    """

    features: tuple[str, str]

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.translation`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.translation(dataset, prefix="summarize:", features=self.features)


@dataclasses.dataclass(frozen=True)
class LanguageModeling(TextFormat):
    """The text is the target; there are no inputs.

    Attributes:
      feature: the name of the text feature.
    """

    feature: str = "text"

    @property
    def has_inputs(self) -> bool:
        """False."""
        return False

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns rows with only the string ``targets``."""
        return dataset.map(lambda row: {"targets": row[self.feature]}, num_parallel_calls=1)


@dataclasses.dataclass(frozen=True)
class Dialogue(TextFormat):
    """``dialogue history: … persona: …`` with the reply as target.

    Utterances are separated by `` | ``, the latest one last; the speakers take turns. The persona, some
    sentences about the speaker of the reply, comes last, so that a cut on the right costs no utterance.

    Attributes:
      turns: the number of latest utterances that the inputs have.
    """

    turns: int = 8

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.dialogue`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.dialogue(dataset, turns=self.turns)


@dataclasses.dataclass(frozen=True)
class SQuAD(TextFormat):
    """SQuAD: ``question: … context: …`` with the first answer as target; all answers count.

    Attributes:
      context: whether the inputs have the context.
    """

    context: bool = True

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `question_answering.squad`."""
        from synthesizer_jax.tasks import question_answering

        return question_answering.squad(dataset, context=self.context)

    def parse_target(self, target: str, example: Example | None) -> list[str]:
        """Returns all answers of the row."""
        return [postprocessors.to_text(answer) for answer in given(example)["answers"]]


@dataclasses.dataclass(frozen=True)
class FirstAnswerSQuAD(SQuAD):
    """SQuAD, where only the first answer counts."""

    def parse_target(self, target: str, example: Example | None) -> list[str]:
        """Returns the target as the only answer."""
        return [target]


@dataclasses.dataclass(frozen=True)
class SpanSQuAD(TextFormat):
    """SQuAD, where the target is the position of the first answer, ``start: 3 end: 6``."""

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `question_answering.spans`."""
        from synthesizer_jax.tasks import question_answering

        return question_answering.spans(question_answering.squad(dataset))

    def parse_target(self, target: str, example: Example | None) -> SpanTarget:
        """Returns all answers of the row and its context."""
        row = given(example)
        answers = [postprocessors.to_text(answer) for answer in row["answers"]]
        return {"answers": answers, "context": postprocessors.to_text(row["context"])}


@dataclasses.dataclass(frozen=True)
class TriviaQA(TextFormat):
    """TriviaQA: ``question: … context: …`` for every context and alias that occurs in it."""

    @property
    def token_preprocessors(self) -> tuple[Preprocessor, ...]:
        """A window of the inputs that contains the answer."""
        from synthesizer_jax.tasks import question_answering

        return (question_answering.keep_answer,)

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `question_answering.trivia_qa`."""
        from synthesizer_jax.tasks import question_answering

        return question_answering.trivia_qa(dataset)
