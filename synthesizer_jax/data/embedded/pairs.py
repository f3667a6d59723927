"""Tasks about two sentences: similarity (STS-B), inference (MNLI), word senses (WiC)."""

from __future__ import annotations

from synthesizer_jax.data.embedded.draw import Draw, Example
from synthesizer_jax.data.embedded.lexicon import (
    KINDS,
    PLACES,
    STATES,
    article,
    kind_of,
    opposite,
    sentence,
)

AGENTS = (
    ("man", "guy"),
    ("woman", "lady"),
    ("boy", "lad"),
    ("child", "kid"),
    ("doctor", "physician"),
)
ACTIONS = (
    ("buying", "purchasing"),
    ("carrying", "holding"),
    ("throwing", "tossing"),
    ("fixing", "repairing"),
    ("cleaning", "washing"),
)
OBJECTS = (
    ("boat", "ship"),
    ("rock", "stone"),
    ("coat", "jacket"),
    ("cup", "mug"),
    ("rug", "carpet"),
)
"""Slots of the STS-B sentences, as pairs of synonyms."""

SCORES = (0.4, 1.8, 3.4, 5.0)
"""By the number of slots that mean the same."""

SYNONYM_COST = 0.4


def stsb(draw: Draw) -> Example:
    """Who does what to what: the score grows with the slots that agree, synonyms cost a little.

    ``A man is fixing a boat.`` and ``A guy is fixing a cup.`` share two of three. Held out: pairs of
    agent and action.
    """
    shared = draw.below(4)
    score, first, second = SCORES[draw.noisy(shared, 4)], [], []
    reworded = False
    for slot, same in zip((AGENTS, ACTIONS, OBJECTS), draw.some(shared, 3), strict=True):
        pair = draw.one(slot)
        first.append(draw.one(pair))
        if same and draw.chance(0.7):
            second.append(first[-1])
        elif same:
            second.append(draw.other(pair, first[-1]))
            reworded = True
        else:
            second.append(draw.one(draw.other(slot, pair)))
    row = {
        "sentence1": _scene(*first),
        "sentence2": _scene(*second),
        "label": score - SYNONYM_COST * reworded if score > 1 else score,
    }
    return Example(row, (first[0], first[1]))


def _scene(agent: str, action: str, thing: str) -> str:
    return sentence(f"{article(agent)} is {action} {article(thing)}")


ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
NOUNS = tuple(noun for nouns in KINDS.values() for noun in nouns)
PREPOSITIONS = ("near", "in", "behind")


def mnli(draw: Draw) -> Example:
    """Hypernyms, opposites and negation; another subject makes it neutral.

    ``The dog near the park is not wet.`` entails ``The animal is dry.`` Held out: pairs of subject
    and state.
    """
    label = draw.below(3)
    noun, state = draw.one(NOUNS), draw.one(draw.one(STATES))
    kind = kind_of(noun)
    if label == NEUTRAL:
        other = draw.other(NOUNS, noun)
        while kind_of(other) == kind:
            other = draw.other(NOUNS, noun)
        subject, claim = other, draw.one((state, opposite(state)))
    else:
        subject, claim = noun, state if label == ENTAILMENT else opposite(state)
    if draw.chance(0.4):
        subject = kind_of(subject)
    place = f"{draw.one(PREPOSITIONS)} the {draw.one(PLACES)}"
    row = {
        "premise": sentence(f"the {noun} {place} is {_said(draw, state)}"),
        "hypothesis": sentence(f"the {subject} is {_said(draw, claim)}"),
        "label": draw.noisy(label, 3),
    }
    return Example(row, (noun, state))


def _said(draw: Draw, state: str) -> str:
    """A state, or now and then the denial of its opposite."""
    return f"not {opposite(state)}" if draw.chance(0.15) else state


WORDS = (
    *("bat", "crane", "bank", "mouse", "seal", "bass", "plant"),
    *("spring", "trunk", "branch", "stream", "horn", "shell", "web"),
)
"""Each has a sense in nature and one in town."""

NATURE = (
    *("river", "forest", "lake", "meadow", "sea"),
    *("mountain", "valley", "cave", "desert", "swamp"),
)
TOWN = (
    *("office", "shop", "factory", "garage", "museum"),
    *("hospital", "theater", "airport", "studio", "bakery"),
)
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
    first, context = _use(draw, word, sense)
    second, _ = _use(draw, word, sense if label else 1 - sense)
    row = {
        "word": word,
        "sentence1": first,
        "sentence2": second,
        **_offsets(word, first, 1),
        **_offsets(word, second, 2),
        "label": draw.noisy(label, 2),
    }
    return Example(row, (word, context))


def _use(draw: Draw, word: str, sense: int) -> tuple[str, str]:
    """A sentence with the word in that sense, and the context that shows it."""
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
