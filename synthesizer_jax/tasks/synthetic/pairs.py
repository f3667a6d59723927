"""Tasks about two sentences: similarity (STS-B), inference (MNLI), word senses (WiC)."""

from __future__ import annotations

from typing import NamedTuple

from synthesizer_jax.tasks.synthetic.draw import Draw, Example
from synthesizer_jax.tasks.synthetic.lexicon import (
    KINDS,
    PLACES,
    STATES,
    kind_of,
    opposite,
    pair_of,
    sentence,
)

NOUNS = tuple(noun for nouns in KINDS.values() for noun in nouns)
PREPOSITIONS = ("near", "in", "behind")

SAME_KIND = 0.5
"""How alike a dog and a cat are."""


def stsb(draw: Draw) -> Example:
    """What is where, and how: the score grows with the parts that agree.

    ``The dog near the park is wet.`` and ``The cat near the park is wet.`` differ in one of three
    parts, and only by half, both being animals. Held out: pairs of noun and kind of state.
    """
    shared, related = draw.below(4), draw.chance(0.5)
    same_noun, same_place, same_state = draw.some(shared, 3)
    noun, place, state = draw.one(NOUNS), draw.one(PLACES), draw.one(draw.one(STATES))
    others = [n for n in NOUNS if n != noun and (kind_of(n) == kind_of(noun)) == related]
    second = _Scene(
        noun if same_noun else draw.one(others),
        place if same_place else draw.other(PLACES, place),
        state if same_state else draw.one(draw.other(STATES, pair_of(state))),
    )
    score = draw.noisy(shared, 4) + SAME_KIND * (related and not same_noun)
    row = {
        "sentence1": _describe(draw, _Scene(noun, place, state)),
        "sentence2": _describe(draw, second),
        "label": round(min(5 * score / 3, 5.0), 1),
    }
    return Example(row, (noun, pair_of(state)[0]))


class _Scene(NamedTuple):
    noun: str
    place: str
    state: str


def _describe(draw: Draw, scene: _Scene) -> str:
    preposition = draw.one(PREPOSITIONS)
    return sentence(f"the {scene.noun} {preposition} the {scene.place} is {scene.state}")


ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)


def mnli(draw: Draw) -> Example:
    """Hypernyms, opposites and negation; what stands beside the subject makes it neutral.

    ``The dog near the house is not wet.`` entails ``The animal is dry.`` and says nothing of the
    house. Held out: pairs of subject and kind of state.
    """
    label = draw.below(3)
    noun, state = draw.one(NOUNS), draw.one(draw.one(STATES))
    beside = draw.one([n for n in NOUNS if kind_of(n) != kind_of(noun)])
    if label == NEUTRAL:
        subject, claim = beside, draw.one((state, opposite(state)))
    else:
        subject, claim = noun, state if label == ENTAILMENT else opposite(state)
    if draw.chance(0.4):
        subject = kind_of(subject)
    row = {
        "premise": _describe(draw, _Scene(noun, beside, _said(draw, state))),
        "hypothesis": sentence(f"the {subject} is {_said(draw, claim)}"),
        "label": draw.noisy(label, 3),
    }
    return Example(row, (noun, pair_of(state)[0]))


def _said(draw: Draw, state: str) -> str:
    """A state, or now and then the denial of its opposite."""
    return f"not {opposite(state)}" if draw.chance(0.15) else state


WORDS = (
    *("bat", "crane", "bank", "mouse", "seal", "bass", "plant"),
    *("spring", "trunk", "branch", "stream", "horn", "shell", "web"),
)
"""Each has a sense in nature and one in town."""

NATURE = ("river", "forest", "lake", "meadow", "sea", "mountain")
TOWN = ("office", "shop", "factory", "garage", "museum", "hospital")
CONTEXTS = (NATURE, TOWN)
PEOPLE = (
    ("hunter", "fisherman", "shepherd", "farmer"),
    ("clerk", "engineer", "driver", "banker"),
)
ANYBODY = ("girl", "boy", "man", "woman")


def wic(draw: Draw) -> Example:
    """An ambiguous word in two contexts, each in nature or in town: the same sense?

    ``The hunter saw a crane near the lake.`` and ``A crane was by the factory.`` differ. Held out:
    pairs of the word and its first context.
    """
    label, sense = draw.below(2), draw.below(2)
    word = draw.one(WORDS)
    first, context = use_word(draw, word, sense)
    second, _ = use_word(draw, word, sense if label else 1 - sense)
    row = {
        "word": word,
        "sentence1": first,
        "sentence2": second,
        **_offsets(word, first, 1),
        **_offsets(word, second, 2),
        "label": draw.noisy(label, 2),
    }
    return Example(row, (word, context))


def use_word(draw: Draw, word: str, sense: int) -> tuple[str, str]:
    """A sentence with one of `WORDS` in that sense, and the one of `CONTEXTS` that shows it."""
    person = draw.one(PEOPLE[sense] if draw.chance(0.85) else ANYBODY)
    context = draw.one(CONTEXTS[sense])
    form = draw.one(
        (
            "the {person} saw a {word} near the {context}",
            "the {person} found the {word} in the {context}",
            "there was a {word} by the {context}",
        )
    )
    return sentence(form.format(person=person, word=word, context=context)), context


def _offsets(word: str, text: str, number: int) -> dict[str, int]:
    """Where the word starts and ends, in characters."""
    start = text.index(f" {word} ") + 1
    return {f"start{number}": start, f"end{number}": start + len(word)}
