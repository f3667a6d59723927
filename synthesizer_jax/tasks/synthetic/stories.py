"""Tasks about a little story: questions (BoolQ), causes and effects (COPA), pronouns (WSC)."""

from __future__ import annotations

from synthesizer_jax.tasks.synthetic.draw import Draw, Example
from synthesizer_jax.tasks.synthetic.lexicon import (
    KINDS,
    MEN,
    STATES,
    WOMEN,
    opposite,
    pair_of,
    sentence,
)
from synthesizer_jax.tasks.synthetic.pairs import WORDS, use_word
from synthesizer_jax.tasks.synthetic.sentences import ASPECTS, BLAME, PRAISE, REACTIONS

NOUNS = tuple(noun for nouns in KINDS.values() for noun in nouns)


def boolq(draw: Draw) -> Example:
    """Two facts about two things and a question on one of them, or where something is.

    ``The dog is wet. The car is dirty.``, ``is the car clean`` is false. In three of ten such rows
    both facts are about the same pair of opposites, and only who is asked about decides. ``The hunter
    saw a crane near the lake.``, ``is the crane far from town`` is true. Held out: pairs of subject
    and kind of state, or of what is where and the place.
    """
    label, asked = draw.below(2), draw.below(2)
    if draw.chance(0.3):
        word = draw.one(WORDS)
        passage, context = use_word(draw, word, 1 - label)
        question = f"is the {word} far from town"
        row = {"passage": passage, "question": question, "label": draw.noisy(label, 2)}
        return Example(row, (word, context))
    nouns = draw.two(NOUNS)
    pairs = draw.two(STATES)
    states = [draw.one(pairs[0]), draw.one(pairs[1])]
    if draw.chance(0.3):
        states[1] = opposite(states[0])
    claim = states[asked] if label else opposite(states[asked])
    facts = [sentence(f"the {n} is {s}") for n, s in zip(nouns, states, strict=True)]
    row = {
        "passage": " ".join(facts),
        "question": f"is the {nouns[asked]} {claim}",
        "label": draw.noisy(label, 2),
    }
    return Example(row, (nouns[asked], pair_of(states[asked])[0]))


CAUSE, EFFECT = range(2)
EVENTS = (
    ("{} won the race", "{} lost the race"),
    ("{} passed the exam", "{} failed the exam"),
    ("{} heard good news", "{} heard bad news"),
    ("{} found the ring", "{} broke the ring"),
)
"""Causes as pairs with opposite outcomes; opinions as in SST-2 are causes too, reactions effects."""
MATTERS = ("race", "exam", "news", "ring")
"""What the events are about, in their order."""
MENTIONS = ("{} talked about the", "{} thought about the", "{} wrote about the")


def copa(draw: Draw) -> Example:
    """What was the cause, what the effect: choices differ in outcome, in matter or in direction.

    ``Anna won the race.``: the effect is ``She smiled.`` rather than ``She sighed.``, or ``She talked
    about the race.`` rather than ``She talked about the exam.`` Held out: pairs of person and premise.
    """
    label, question, outcome = draw.below(2), draw.below(2), draw.below(2)
    woman = draw.below(2)
    name, pronoun = draw.one((MEN, WOMEN)[woman]), ("he", "she")[woman]
    if draw.chance(0.35):
        told, right, wrong = _matters(draw, question, outcome)
    else:
        told, right = _happening(draw, 1 - question, outcome), _happening(draw, question, outcome)
        wrong = _happening(draw, question, 1 - outcome)
        if draw.chance(0.1):
            wrong = _happening(draw, 1 - question, outcome)
            while wrong == told:
                wrong = _happening(draw, 1 - question, outcome)
    person = pronoun if "{}" in told else name
    choices = [sentence(text.format(person)) for text in (right, wrong)]
    row = {
        "premise": sentence(told.format(name)),
        "choice1": choices[label],
        "choice2": choices[1 - label],
        "question": ("cause", "effect")[question],
        "label": draw.noisy(label, 2),
    }
    return Example(row, (name, told))


def _matters(draw: Draw, question: int, outcome: int) -> tuple[str, str, str]:
    """A premise, the choice about the same matter, and one about another."""
    same, other = draw.two(range(len(MATTERS)))
    mention = draw.one(MENTIONS)
    events = [EVENTS[matter][outcome] for matter in (same, other)]
    mentions = [f"{mention} {MATTERS[matter]}" for matter in (same, other)]
    choices, told = (events, mentions[0]) if question == CAUSE else (mentions, events[0])
    return told, choices[0], choices[1]


def _happening(draw: Draw, question: int, outcome: int) -> str:
    """A cause or an effect with that outcome, ``{}`` for the person."""
    if question == EFFECT:
        return draw.one(REACTIONS)[outcome]
    if draw.chance(0.5):
        return draw.one(EVENTS)[outcome]
    return f"the {draw.one(ASPECTS)} was {draw.one((PRAISE, BLAME)[outcome])}"


PERSONS = (
    (*MEN, "the king", "the uncle", "the waiter"),
    (*WOMEN, "the queen", "the aunt", "the waitress"),
)
PRONOUNS = ("he", "she")
VERBS = ("thanked", "called", "visited", "praised", "met", "paid")
SUBJECT, OBJECT = range(2)
REASONS = (
    ("needed help", "wanted advice", "felt alone", "was grateful"),
    ("had helped", "worked hard", "gave advice", "was brave"),
)
"""Why somebody thanks or calls somebody: reasons of the one who does it, and of the other."""
NO_HINT = ("was there", "had time", "lived nearby")


def wsc(draw: Draw) -> Example:
    """Whom the pronoun means: gender tells, or the reason where both have the same.

    ``Anna thanked Mary because *she* had helped.`` means Mary. Held out: pairs of persons.
    """
    label, gender, referent = draw.below(2), draw.below(2), draw.below(2)
    reason = draw.one(REASONS[referent])
    if draw.chance(0.3):
        persons = draw.two(PERSONS[gender])
    else:
        both = [draw.one(PERSONS[gender]), draw.one(PERSONS[1 - gender])]
        persons = (both[0], both[1]) if referent == SUBJECT else (both[1], both[0])
        reason = draw.one((reason, draw.one(NO_HINT)))
    start = sentence(f"{persons[0]} {draw.one(VERBS)} {persons[1]} because")[:-1]
    text = f"{start} {PRONOUNS[gender]} {reason}."
    spans = (start[: len(persons[0])], persons[1])
    positions = (0, len(persons[0].split(" ")) + 1)
    named = referent if label else 1 - referent
    row = {
        "text": text,
        "span1_text": spans[named],
        "span1_index": positions[named],
        "span2_text": PRONOUNS[gender],
        "span2_index": len(start.split(" ")),
        "label": draw.noisy(label, 2),
    }
    return Example(row, persons)
