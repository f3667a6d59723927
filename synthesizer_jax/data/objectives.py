"""Pre-training objectives on token ids: span corruption, UL2's mixture, masked, prefix and full LM.

An objective is a frozen dataclass that makes inputs and targets of segments of documents, in NumPy alone.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import check_types, fields_of, register
from synthesizer_jax.base.typing import Count, NotEmpty, NotNegative, Range, Rate, Share
from synthesizer_jax.data.task_streams import Example, random_bits

GROUP = 128
"""T5 concatenates this many documents before it splits them into segments."""

RESERVED = 3
"""The first ids, T5's padding, EOS and unknown, are never drawn as random tokens."""


class Draws:
    """Random numbers that depend on a seed, a place in its stream and the number of the call alone.

    They are the same in every version of NumPy (`random_bits`).
    """

    def __init__(self, seed: np.random.SeedSequence, *place: int):
        self._seed, self._place, self._num_calls = seed, place, 0

    def uniform(self, count: int) -> np.ndarray:
        """Returns float32 multiples of 2⁻²⁴ in [0, 1), ``[count]``."""
        return (self._bits(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        """Returns integers in [low, high), ``[count]``; the bias is below 2⁻³² for 32-bit ranges."""
        return low + (self._bits(count) % np.uint64(high - low)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """Returns the numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self._bits(count), kind="stable")

    def fork(self, part: int) -> Draws:
        """Returns the numbers of a part, which are independent of all calls of this object."""
        return Draws(self._seed, *self._place, part)

    def _bits(self, count: int) -> np.ndarray:
        self._num_calls += 1
        return random_bits(self._seed, *self._place, self._num_calls - 1, count=count)


class ExampleFormat(NamedTuple):
    """What examples must fit.

    Attributes:
      inputs_length: largest number of input tokens, including EOS.
      targets_length: largest number of target tokens, including EOS.
      vocab_size: number of ids, including sentinels.
      ids: of padding and EOS.
    """

    inputs_length: int
    targets_length: int
    vocab_size: int
    ids: SpecialIds = T5_IDS


class Objective(abc.ABC):
    """A self-supervised task on documents of tokens: a frozen dataclass, saved as JSON.

    Attributes:
      makes_inputs: whether examples have inputs.
      objectives: those of which segments are, drawn by their rates.
      rates: their relative rates; empty: equal ones.
    """

    makes_inputs: ClassVar[bool] = True
    objectives: tuple[SegmentObjective, ...]
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_types(type(self), fields_of(self))


class SegmentObjective(Objective):
    """An objective that makes one example of every segment, all of the same length.

    Attributes:
      documents: number of consecutive documents that are concatenated before they are split into
        segments; 1 keeps documents apart.
      document_eos: whether every document ends with EOS. The examples then get no EOS of their own.
    """

    documents: int
    document_eos: bool = False

    @property
    def objectives(self) -> tuple[SegmentObjective, ...]:  # type: ignore[override]
        """This one alone."""
        return (self,)

    @abc.abstractmethod
    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment; the last one of a group may be shorter.

        Raises:
          ValueError: the examples do not fit.
        """

    @abc.abstractmethod
    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets of a segment, int32, at most the lengths of `form`.

        Args:
          tokens: ids ``[length]``, at least one.
          draws: random numbers of this segment.
          form: lengths and vocabulary.
        """


@register
@dataclasses.dataclass(frozen=True)
class Denoising(SegmentObjective):
    """Span corruption, T5's objective (Raffel et al. 2020, sections 3.1.4 and 3.3).

    Every span of noise becomes a sentinel in the inputs, and every span between them in the targets, as by
    T5's `denoise` with `random_spans_noise_mask`, `noise_span_to_unique_sentinel` and
    `nonnoise_span_to_unique_sentinel`. Sentinels count down from the last id of the vocabulary,
    ``<extra_id_0>``. As in T5, a segment with more spans than sentinels also uses the ids below them.

    Attributes:
      density: share of the tokens that are noise.
      mean_span: mean length of the spans of noise; None: one span, at the end, as in UL2's S-denoising.
      mode: ids before the inputs, such as those of UL2's mode token.
    """

    density: Rate = 0.15
    mean_span: Annotated[float, Range(1)] | None = 3.0
    documents: Count = GROUP
    mode: tuple[int, ...] = ()

    def lengths(self, inputs_length: int) -> tuple[int, int]:
        """Returns the numbers of tokens of a segment and, with EOS, of its targets.

        It is the largest segment whose inputs, with mode and EOS, fit `inputs_length`; at density 0.5 one
        token less if the targets are longer than the inputs. This is T5's `random_spans_helper`, except
        that it counts as the mask does, in float32 and at least one span: T5's is in float64 and for some
        lengths a token or two short.
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
        """Returns the number of tokens of a segment, see `lengths`."""
        _check_length("inputs", form, len(self.mode) + 2, "a mode, a token and EOS")
        tokens, targets = self.lengths(form.inputs_length)
        _check_length("targets", form, targets, f"noise of inputs_length={form.inputs_length}")
        return tokens

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets with sentinels; part 0 of the draws is for the mask."""
        noise = noise_mask(len(tokens), self.density, self.mean_span, draws.fork(0))
        inputs = replace_spans(tokens, noise, vocab_size=form.vocab_size)
        targets = replace_spans(tokens, ~noise, vocab_size=form.vocab_size)
        inputs = np.concatenate([np.asarray(self.mode, tokens.dtype), inputs])
        eos = form.ids.end
        return _with_eos(inputs, form.inputs_length, eos), _with_eos(targets, form.targets_length, eos)


def span_counts(length: int, density: float, mean_span: float | None) -> tuple[int, int]:
    """Returns the numbers of noise tokens and of noise spans of at least two tokens.

    Like T5 it computes in float32 and rounds half to even. At least one token is noise and one is not.
    """
    num_noise = int(np.round(np.float32(length) * np.float32(density)))
    num_noise = min(max(num_noise, 1), length - 1)
    if mean_span is None:
        return num_noise, 1
    num_spans = int(np.round(np.float32(num_noise) / np.float32(mean_span)))
    return num_noise, min(max(num_spans, 1), length - num_noise)


def noise_mask(length: int, density: float, mean_span: float | None, draws: Draws) -> np.ndarray:
    """Returns which tokens are noise, ``[length]``; T5's `random_spans_noise_mask`.

    Noise and other tokens are partitioned into the same number of spans, all partitions being equally
    likely, and the spans alternate: the first tokens are not noise, the last ones are.
    """
    extended = max(length, 2)
    num_noise, num_spans = span_counts(extended, density, mean_span)
    noise = _random_partition(num_noise, num_spans, draws)
    kept = _random_partition(extended - num_noise, num_spans, draws)
    spans = np.stack([kept, noise], axis=1).reshape(-1)
    return np.repeat(np.arange(2 * num_spans) % 2 == 1, spans)[:length]


def _random_partition(total: int, parts: int, draws: Draws) -> np.ndarray:
    """Returns the lengths of `parts` non-empty parts of `total` items, ``[parts]``."""
    is_start = (np.arange(total - 1) < parts - 1)[draws.permutation(total - 1)]
    return np.diff(np.flatnonzero(is_start) + 1, prepend=0, append=total)


def replace_spans(tokens: np.ndarray, marked: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Returns tokens ``[n]`` with every span of marked ones replaced by a sentinel, the last id first."""
    starts = marked & ~np.concatenate([[False], marked[:-1]])
    sentinels = (vocab_size - np.cumsum(starts)).astype(tokens.dtype)
    return np.where(starts, sentinels, tokens)[~marked | starts]


@register
@dataclasses.dataclass(frozen=True)
class FullLM(SegmentObjective):
    """Targets only: the model predicts every token (Raffel et al. 2020, section 3.2.3).

    Attributes:
      document_eos: whether documents end with EOS and segments do not, as in T5's `full_lm`; False
        is the reverse, as in its ``objectives/lm.gin``.
    """

    makes_inputs: ClassVar[bool] = False
    documents: Count = GROUP
    document_eos: bool = True

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment, which fills the targets."""
        _check_length("targets", form, 2, "FullLM")
        return form.targets_length - (not self.document_eos)

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns no inputs, and the tokens as targets."""
        del draws
        whole = tokens[: form.targets_length].astype(np.int32)
        targets = whole if self.document_eos else _with_eos(tokens, form.targets_length, form.ids.end)
        return np.zeros(0, np.int32), targets


@register
@dataclasses.dataclass(frozen=True)
class PrefixLM(SegmentObjective):
    """A prefix of random length is the inputs, the rest the targets (Raffel et al. 2020, section 3.2.3).

    Prefix and rest have at least one token, and every length of the prefix has the same probability, as by
    T5's `random_prefix_noise_mask`.
    """

    documents: Count = 1

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment."""
        _check_length("inputs", form, 2, "PrefixLM")
        _check_length("targets", form, 2, "PrefixLM")
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns prefix and rest."""
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

    Of n tokens round(n · density), but at least one, are chosen. They become the mask token, a random one,
    or remain; the encoder predicts them. Targets without weight are padding.

    Attributes:
      density: share of the tokens that are chosen.
      mask_share: probability that a chosen token becomes the mask token; together with `random_share` at
        most 1.
      random_share: probability that it becomes a random token of the vocabulary.
      mask_id: id of the mask token; None is the last one of the vocabulary, ``<extra_id_0>``.
    """

    density: Share = 0.15
    mask_share: Share = 0.8
    random_share: Share = 0.1
    mask_id: int | None = None
    documents: Count = GROUP

    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment; inputs and targets need the same length."""
        _check_length("inputs", form, 2, "MaskedLM")
        reason = f"MaskedLM with inputs_length={form.inputs_length}"
        _check_length("targets", form, form.inputs_length, reason)
        return form.inputs_length - 1

    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets of equal length; part 0 of the draws chooses, part 1 replaces."""
        count = max(1, round(len(tokens) * self.density))
        chosen = draws.fork(0).permutation(len(tokens)) < count
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
    """Returns random token ids ``[count]``, none of which stands for padding or another special token."""
    ids = {form.ids.padding, form.ids.start, *form.ids.ends}
    special = sorted(id for id in ids if RESERVED <= id < form.vocab_size)
    tokens = draws.integers(count, low=RESERVED, high=form.vocab_size - len(special))
    for id in special:  # in ascending order, each moves the ids from its own on by one
        tokens = tokens + (tokens >= id)
    return tokens


@register
@dataclasses.dataclass(frozen=True)
class ObjectiveMixture(Objective):
    """Every segment is of an objective drawn by its rate, and as long as that objective needs.

    Attributes:
      objectives: the objectives; all have the same `documents` and `document_eos`.
      rates: their relative rates; empty: equal ones.
    """

    objectives: Annotated[tuple[SegmentObjective, ...], NotEmpty()]
    rates: tuple[NotNegative, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({(o.documents, o.document_eos) for o in self.objectives}) > 1:
            raise ValueError("objectives differ in documents or document_eos; allowed: the same for all")
        if self.rates and (len(self.rates) != len(self.objectives) or not sum(self.rates)):
            raise ValueError(
                f"rates is {self.rates}; allowed: none, or {len(self.objectives)} numbers, one of them "
                "positive"
            )

    @property
    def makes_inputs(self) -> bool:  # type: ignore[override]
        """Whether one of the objectives makes inputs."""
        return any(objective.makes_inputs for objective in self.objectives)


_UL2 = ((0.15, 3.0), (0.15, 8.0), (0.25, None), (0.5, 3.0), (0.5, 8.0), (0.5, 64.0), (0.15, 64.0))
"""Density and mean span of UL2's seven denoisers (Tay et al. 2022, table 1), here without mode tokens."""

OBJECTIVES: dict[str, Objective] = {
    **{f"span_{n}_15_u_u": Denoising(mean_span=float(n)) for n in (2, 3, 5, 10)},  # T5's choice: 3
    "prefix_lm": PrefixLM(),
    "lm": FullLM(document_eos=False),
    "full_lm": FullLM(),
    "masked_lm": MaskedLM(),
    "ul2": ObjectiveMixture(tuple(Denoising(*denoiser) for denoiser in _UL2)),
}
"""T5's objectives with the names of its ``objectives/*.gin``, BERT's and UL2's.

T5's names are ``span_LENGTH_DENSITY_INPUTS_TARGETS``; u is a sentinel of its own for every span.
"""


def _with_eos(tokens: np.ndarray, length: int, eos: int) -> np.ndarray:
    """Returns at most ``length - 1`` tokens and EOS, int32; SeqIO's `append_eos_after_trim`."""
    return np.append(tokens[: length - 1], eos).astype(np.int32)


def _check_length(side: str, form: ExampleFormat, needed: int, reason: str) -> None:
    """Raises a `ValueError` if inputs or targets have too little room."""
    length = getattr(form, f"{side}_length")
    if length < needed:
        raise ValueError(f"{side}_length is {length}; {reason} needs {needed} or more")
