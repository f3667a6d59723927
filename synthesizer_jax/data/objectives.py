"""Pre-training objectives, such as span corruption, UL2's mixture and masked language modeling.

An objective is a frozen dataclass. An objective turns segments of documents into inputs and
targets, and uses only NumPy.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import check_types, fields_of, register
from synthesizer_jax.base.typing import Count, NotEmpty, NotNegative, Range, Rate, Share
from synthesizer_jax.data.examples import Example
from synthesizer_jax.data.task_streams import random_bits

GROUP = 128
"""The number of documents that T5 concatenates before it splits them into segments."""

RESERVED = 3
"""The number of ids at the start of a vocabulary that are never drawn as random tokens.

These ids are T5's ids of padding, EOS and unknown text.
"""


class Draws:
    """Draws random numbers that depend only on a seed, counters, and the number of earlier calls.

    The random numbers are the same in every version of NumPy (see `random_bits`).

    Args:
      seed: the seed.
      counters: integers that identify what the numbers are for, such as an epoch and a group.
    """

    def __init__(self, seed: np.random.SeedSequence, *counters: int):
        self._seed, self._counters, self._num_calls = seed, counters, 0

    def uniform(self, count: int) -> np.ndarray:
        """Returns uniform random numbers in [0, 1), float32 ``[count]``.

        Every number is a multiple of 2⁻²⁴.
        """
        return (self._bits(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        """Returns random integers in [low, high), int64 ``[count]``.

        The bias of the distribution is below 2⁻³² if the range has at most 2³² integers.
        """
        return low + (self._bits(count) % np.uint64(high - low)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """Returns the numbers from 0 to ``count - 1`` in random order."""
        return np.argsort(self._bits(count), kind="stable")

    def fork(self, part: int) -> Draws:
        """Returns a new `Draws`. The numbers of every part are independent of all other numbers."""
        return Draws(self._seed, *self._counters, part)

    def _bits(self, count: int) -> np.ndarray:
        """Returns random 64-bit integers ``[count]``, which are different in every call."""
        self._num_calls += 1
        return random_bits(self._seed, *self._counters, self._num_calls - 1, count=count)


class ExampleFormat(NamedTuple):
    """The lengths and the vocabulary that examples must fit.

    Attributes:
      inputs_length: the largest number of input tokens, including EOS.
      targets_length: the largest number of target tokens, including EOS.
      vocab_size: the number of token ids in the vocabulary, including sentinels. The first sentinel
        has the last id. If the vocabulary has other ids after its sentinels, they are not counted.
      ids: the ids of padding and EOS.
    """

    inputs_length: int
    targets_length: int
    vocab_size: int
    ids: SpecialIds = T5_IDS


class Objective(abc.ABC):
    """A self-supervised task on documents of token ids.

    Objectives are frozen dataclasses, so that they can be saved as JSON.

    Attributes:
      makes_inputs: whether the examples have inputs.
      objectives: the objectives of segments. One of these objectives is drawn for every segment.
      rates: the relative rates of these objectives. If `rates` is empty, all rates are equal.
    """

    makes_inputs: ClassVar[bool] = True
    objectives: tuple[SegmentObjective, ...]
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(type(self), fields_of(self))


class SegmentObjective(Objective):
    """An objective that makes one example from every segment. All segments have the same length.

    Attributes:
      documents: the number of consecutive documents that are concatenated before they are split
        into segments. If `documents` is 1, no segment contains tokens of two documents.
      document_eos: whether EOS is appended to every document. If `document_eos` is `True`, no EOS
        is appended to the examples.
    """

    documents: int
    document_eos: bool = False

    @property
    def objectives(self) -> tuple[SegmentObjective, ...]:  # type: ignore[override]
        """A tuple that contains only this objective."""
        return (self,)

    @abc.abstractmethod
    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment. The last segment of a group may be shorter.

        Raises:
          ValueError: if the examples do not fit into the lengths of `form`.
        """

    @abc.abstractmethod
    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns the inputs and the targets of a segment as int32 token ids.

        The inputs and the targets are at most as long as `form` allows.

        Args:
          tokens: the token ids of the segment, ``[length]``. A segment has at least one token.
          draws: the random numbers of this segment.
          form: the lengths and the vocabulary.
        """


@register
@dataclasses.dataclass(frozen=True)
class Denoising(SegmentObjective):
    """Span corruption, T5's objective (Raffel et al. 2020, sections 3.1.4 and 3.3).

    Random spans of tokens are chosen as noise. In the inputs, a sentinel replaces every span of
    noise. In the targets, a sentinel replaces every span of other tokens, so that the targets
    contain the noise tokens. This class computes the same examples as T5's `denoise` with
    `random_spans_noise_mask`, `noise_span_to_unique_sentinel` and
    `nonnoise_span_to_unique_sentinel`.

    The first sentinel is ``<extra_id_0>``, which has the last id of the vocabulary. The id of each
    following sentinel is lower by one. As in T5, a segment with more spans than there are sentinels
    also uses the ids below the sentinels.

    Attributes:
      density: the fraction of tokens that are noise.
      mean_span: the mean length of the spans of noise in tokens. `None` means a single span at the
        end, as in UL2's S-denoising.
      mode: token ids to put before the inputs, such as UL2's mode token.
    """

    density: Rate = 0.15
    mean_span: Annotated[float, Range(1)] | None = 3.0
    documents: Count = GROUP
    mode: tuple[int, ...] = ()

    def lengths(self, inputs_length: int) -> tuple[int, int]:
        """Returns the number of tokens of a segment, and the number of its targets including EOS.

        The segment is the largest one whose inputs, with `mode` and EOS, fit into `inputs_length`.
        If `density` is 0.5 and the targets would be longer than the inputs, the segment is one
        token shorter.

        This method is like T5's `random_spans_helper`, with one difference. T5's function computes
        in float64, but the noise mask is computed in float32 and has at least one span. For some
        lengths, T5's segments are therefore one or two tokens too short. This method computes in
        float32, like the noise mask.

        Args:
          inputs_length: the largest number of input tokens.
        """

        def sizes(tokens: int) -> tuple[int, int]:
            noise, spans = span_counts(tokens, self.density, self.mean_span)
            return tokens - noise + spans + 1, noise + spans + 1

        available = inputs_length - len(self.mode)
        tokens = available - 1
        while sizes(tokens + 1)[0] <= available:
            tokens += 1
        inputs, targets = sizes(tokens)
        if self.density == 0.5 and targets > inputs:
            return tokens - 1, targets - 1
        return tokens, targets

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment (see `lengths`)."""
        _check_length("inputs", form, len(self.mode) + 2, "the mode, a token and EOS")
        tokens, targets = self.lengths(form.inputs_length)
        _check_length("targets", form, targets, f"the noise of inputs_length={form.inputs_length}")
        return tokens

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets with sentinels.

        The noise mask is drawn from ``draws.fork(0)``.
        """
        noise = noise_mask(len(tokens), self.density, self.mean_span, draws.fork(0))
        inputs = replace_spans(tokens, noise, vocab_size=form.vocab_size)
        targets = replace_spans(tokens, ~noise, vocab_size=form.vocab_size)
        inputs = np.concatenate([np.asarray(self.mode, tokens.dtype), inputs])
        eos = form.ids.end
        return (
            _with_eos(inputs, form.inputs_length, eos),
            _with_eos(targets, form.targets_length, eos),
        )


def span_counts(length: int, density: float, mean_span: float | None) -> tuple[int, int]:
    """Returns the number of noise tokens and the number of spans of noise.

    Like T5, this function computes in float32 and rounds half to even. At least one token is noise,
    and at least one token is not noise.

    Args:
      length: the number of tokens, at least 2.
      density: the fraction of tokens that are noise.
      mean_span: the mean length of a span of noise in tokens, or `None` for a single span.
    """
    num_noise = int(np.round(np.float32(length) * np.float32(density)))
    num_noise = min(max(num_noise, 1), length - 1)
    if mean_span is None:
        return num_noise, 1
    num_spans = int(np.round(np.float32(num_noise) / np.float32(mean_span)))
    # Every span of noise must follow at least one token that is not noise.
    return num_noise, min(max(num_spans, 1), length - num_noise)


def noise_mask(length: int, density: float, mean_span: float | None, draws: Draws) -> np.ndarray:
    """Returns a mask of the tokens that are noise, bool ``[length]``.

    The noise tokens and the other tokens are each divided into the same number of spans at random.
    All divisions are equally likely. Spans of noise and spans of other tokens alternate. The first
    span is not noise, and the last span is noise. The function computes T5's
    `random_spans_noise_mask`.
    """
    # A single token cannot be divided into two spans. The mask is therefore computed for at least
    # two tokens and is cut to the length at the end.
    extended = max(length, 2)
    num_noise, num_spans = span_counts(extended, density, mean_span)
    noise = _random_partition(num_noise, num_spans, draws)
    kept = _random_partition(extended - num_noise, num_spans, draws)
    # `spans` [2 · num_spans] holds the lengths of all spans in order, beginning with a span that is
    # not noise.
    spans = np.stack([kept, noise], axis=1).reshape(-1)
    return np.repeat(np.arange(2 * num_spans) % 2 == 1, spans)[:length]


def _random_partition(total: int, parts: int, draws: Draws) -> np.ndarray:
    """Divides `total` items into `parts` non-empty parts, and returns their lengths ``[parts]``.

    All divisions are equally likely.
    """
    # The first item always begins a part. The other parts begin at `parts - 1` of the other items,
    # which are chosen at random.
    is_start = (np.arange(total - 1) < parts - 1)[draws.permutation(total - 1)]
    return np.diff(np.flatnonzero(is_start) + 1, prepend=0, append=total)


def replace_spans(tokens: np.ndarray, marked: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Returns the token ids with a sentinel in place of every span of marked tokens.

    The first sentinel is the last id of the vocabulary. The id of each following sentinel is lower
    by one.

    Args:
      tokens: the token ids.
      marked: a mask of the tokens to replace, bool ``[tokens]``.
      vocab_size: the number of token ids in the vocabulary, including sentinels.

    Returns:
      The token ids ``[n]``, where n is the number of unmarked tokens plus the number of spans.
    """
    starts = marked & ~np.concatenate([[False], marked[:-1]])
    sentinels = (vocab_size - np.cumsum(starts)).astype(tokens.dtype)
    return np.where(starts, sentinels, tokens)[~marked | starts]


@register
@dataclasses.dataclass(frozen=True)
class FullLM(SegmentObjective):
    """Language modeling without inputs (Raffel et al. 2020, section 3.2.3).

    The targets are all tokens of the segment, and the model predicts each of them.

    Attributes:
      document_eos: whether every document ends with EOS and segments do not, as in T5's `full_lm`.
        If `document_eos` is `False`, every segment ends with EOS and documents do not, as in T5's
        ``objectives/lm.gin``.
    """

    makes_inputs: ClassVar[bool] = False
    documents: Count = GROUP
    document_eos: bool = True

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment.

        The length is `targets_length`, or one less if every segment ends with EOS.
        """
        _check_length("targets", form, 2, "FullLM")
        return form.targets_length if self.document_eos else form.targets_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns empty inputs, and the tokens as targets."""
        del draws
        if self.document_eos:
            targets = tokens[: form.targets_length].astype(np.int32)
        else:
            targets = _with_eos(tokens, form.targets_length, form.ids.end)
        return np.zeros(0, np.int32), targets


@register
@dataclasses.dataclass(frozen=True)
class PrefixLM(SegmentObjective):
    """Prefix language modeling, in which a random prefix is the input and the rest is the target.

    The prefix and the rest both have at least one token. All lengths of the prefix are equally
    likely, as in T5's `random_prefix_noise_mask` (Raffel et al. 2020, section 3.2.3).
    """

    documents: Count = 1

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment, which is `inputs_length` minus one for EOS."""
        _check_length("inputs", form, 2, "PrefixLM")
        _check_length("targets", form, 2, "PrefixLM")
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns the prefix as inputs and the rest as targets."""
        most = len(tokens) - 1
        (prefix,) = draws.fork(0).integers(1, low=min(1, most), high=most + 1).tolist()
        return (
            _with_eos(tokens[:prefix], form.inputs_length, form.ids.end),
            _with_eos(tokens[prefix:], form.targets_length, form.ids.end),
        )


@register
@dataclasses.dataclass(frozen=True)
class MaskedLM(SegmentObjective):
    """Masked language modeling for encoders (Devlin et al. 2019, section 3.1 and appendix A.1).

    Of n tokens, ``max(1, round(n · density))`` are chosen at random. The encoder predicts the
    chosen tokens. In the inputs, a chosen token is replaced by the mask token, replaced by a random
    token, or left unchanged. The targets of all other tokens are padding, so these targets do not
    contribute to the loss.

    Attributes:
      density: the fraction of tokens that are chosen.
      mask_share: the probability that a chosen token becomes the mask token. The sum of
        `mask_share` and `random_share` must be at most 1.
      random_share: the probability that a chosen token becomes a random token of the vocabulary.
      mask_id: the id of the mask token. `None` means the last id of the vocabulary,
        ``<extra_id_0>``.
    """

    density: Share = 0.15
    mask_share: Share = 0.8
    random_share: Share = 0.1
    mask_id: int | None = None
    documents: Count = GROUP

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment, which is `inputs_length` minus one for EOS.

        The targets must be as long as the inputs, so `targets_length` must be at least
        `inputs_length`.
        """
        _check_length("inputs", form, 2, "MaskedLM")
        reason = f"MaskedLM with inputs_length={form.inputs_length}"
        _check_length("targets", form, form.inputs_length, reason)
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets of equal length.

        The tokens to predict are drawn from ``draws.fork(0)``, and their replacements from
        ``draws.fork(1)``.
        """
        count = max(1, round(len(tokens) * self.density))
        chosen = draws.fork(0).permutation(len(tokens)) < count

        # A uniform number in [0, 1) decides whether a chosen token becomes the mask token, becomes
        # a random token, or does not change.
        replacements = draws.fork(1)
        uniform = replacements.uniform(len(tokens))
        is_mask = chosen & (uniform < self.mask_share)
        is_random = chosen & ~is_mask & (uniform < self.mask_share + self.random_share)
        random = _random_tokens(replacements, len(tokens), form)
        inputs = np.where(is_random, random.astype(tokens.dtype), tokens)
        mask_id = form.vocab_size - 1 if self.mask_id is None else self.mask_id
        inputs = _with_eos(np.where(is_mask, mask_id, inputs), form.inputs_length, form.ids.end)
        targets = np.where(chosen, tokens, form.ids.padding)[: len(inputs) - 1]
        return inputs, np.append(targets, form.ids.padding).astype(np.int32)


def _random_tokens(draws: Draws, count: int, form: ExampleFormat) -> np.ndarray:
    """Returns random token ids ``[count]``, which are never special ids such as padding."""
    ids = {form.ids.padding, form.ids.start, *form.ids.ends}
    special = sorted(id for id in ids if RESERVED <= id < form.vocab_size)
    tokens = draws.integers(count, low=RESERVED, high=form.vocab_size - len(special))
    # The ids are drawn from a range that is shorter by the number of special ids. Ids that are
    # greater than or equal to a special id are then increased by one, so that special ids are
    # skipped.
    for id in special:
        tokens = tokens + (tokens >= id)
    return tokens


@register
@dataclasses.dataclass(frozen=True)
class ObjectiveMixture(Objective):
    """A mixture, which draws an objective for every segment in proportion to the objective's rate.

    The segment has the length that the drawn objective needs.

    Attributes:
      objectives: the objectives. All objectives must have the same `documents` and `document_eos`.
      rates: the relative rates of the objectives. If `rates` is empty, all rates are equal.
    """

    objectives: Annotated[tuple[SegmentObjective, ...], NotEmpty()]
    rates: tuple[NotNegative, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({(o.documents, o.document_eos) for o in self.objectives}) > 1:
            raise ValueError(
                "The objectives of a mixture must have the same documents and document_eos."
            )
        if self.rates and (len(self.rates) != len(self.objectives) or not sum(self.rates)):
            raise ValueError(
                f"rates is {self.rates}, but it must be empty or contain "
                f"{len(self.objectives)} numbers, at least one of which is positive."
            )

    @property
    def makes_inputs(self) -> bool:  # type: ignore[override]
        """Whether at least one of the objectives makes inputs."""
        return any(objective.makes_inputs for objective in self.objectives)


_UL2 = ((0.15, 3.0), (0.15, 8.0), (0.25, None), (0.5, 3.0), (0.5, 8.0), (0.5, 64.0), (0.15, 64.0))
"""The density and the mean span of UL2's seven denoisers (Tay et al. 2022, table 1).

The mode tokens of UL2 are not included.
"""

OBJECTIVES: dict[str, Objective] = {
    # T5 uses the objective whose spans have a mean length of 3 tokens.
    **{f"span_{n}_15_u_u": Denoising(mean_span=float(n)) for n in (2, 3, 5, 10)},
    "prefix_lm": PrefixLM(),
    "lm": FullLM(document_eos=False),
    "full_lm": FullLM(),
    "masked_lm": MaskedLM(),
    "ul2": ObjectiveMixture(tuple(Denoising(*denoiser) for denoiser in _UL2)),
}
"""The objectives by name. T5's objectives have the names of its files ``objectives/*.gin``.

The names of T5's span corruption have the form ``span_LENGTH_DENSITY_INPUTS_TARGETS``: the mean
span, the density in percent, and how spans are replaced in inputs and in targets. The letter ``u``
means that every span has a unique sentinel.
"""


def _with_eos(tokens: np.ndarray, length: int, eos: int) -> np.ndarray:
    """Returns at most ``length - 1`` tokens followed by EOS, int32.

    SeqIO's `append_eos_after_trim` returns the same tokens.
    """
    return np.append(tokens[: length - 1], eos).astype(np.int32)


def _check_length(side: str, form: ExampleFormat, needed: int, reason: str) -> None:
    """Raises a `ValueError` if the length of the inputs or of the targets is less than `needed`.

    Args:
      side: ``inputs`` or ``targets``.
      form: the lengths of examples.
      needed: the smallest length that is allowed.
      reason: what the needed length is for, such as the name of the objective. It ends the error
        message.
    """
    length = getattr(form, f"{side}_length")
    if length < needed:
        raise ValueError(
            f"{side}_length is {length}, but it must be at least {needed} for {reason}."
        )
