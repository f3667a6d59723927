"""Defines the grammars of the synthetic tasks, which are small parts of English.

Each task has a function with the name of the task's configuration. The function draws a row, and
returns the row together with some of the row's words. The combination of these words decides
whether the row is used for training or held out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from synthesizer_jax.base.registry import JSON

T = TypeVar("T")

Row: TypeAlias = dict[str, JSON]
"""A mapping from the names of features to the features of a row."""
Example: TypeAlias = tuple[Row, tuple[str, ...]]
"""A row, and words of it. These words decide if the row is held out."""


class Draw:
    """Random choices that are the same on every machine.

    The class uses only the method `random.Random.random`, because Python guarantees that its
    sequence of numbers never changes.

    Args:
      seed: the seed.
      noise: the fraction of labels that `noisy` changes.
    """

    def __init__(self, seed: str, *, noise: float):
        self._random = random.Random(seed)
        self._noise = noise

    def chance(self, probability: float) -> bool:
        """Returns `True` with the given probability."""
        return self._random.random() < probability

    def below(self, count: int) -> int:
        """Returns an integer in ``[0, count)``."""
        return int(self._random.random() * count)

    def one(self, options: Sequence[T]) -> T:
        """Returns one of the options."""
        return options[self.below(len(options))]

    def other(self, options: Sequence[T], than: T) -> T:
        """Returns one of the options that is not equal to `than`."""
        return self.one([option for option in options if option != than])

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """Returns two different options."""
        first = self.one(options)
        return first, self.other(options, first)

    def noisy(self, label: int, count: int) -> int:
        """Returns the label, or sometimes a different label, as if an annotator had made a mistake.

        Args:
          label: the label.
          count: the number of labels.
        """
        return self.other(range(count), label) if self.chance(self._noise) else label


def _words(text: str) -> tuple[str, ...]:
    """Returns the words of a text."""
    return tuple(text.split())


WOMEN, MEN = _words("Anna Clara Emma Julia Mary Sarah"), _words("David Jack Paul Peter Simon Tom")
PLACES = _words("garden kitchen market station park library harbor square")
KIND_OF = {
    **dict.fromkeys(_words("dog cat horse bird"), "animal"),
    **dict.fromkeys(_words("car truck bus train"), "vehicle"),
    **dict.fromkeys(_words("house church school hotel"), "building"),
    **dict.fromkeys(_words("guitar piano drum flute"), "instrument"),
}
"""A mapping from every noun to the kind of thing that it names."""
NOUNS = tuple(KIND_OF)
_STATES = (
    "clean/dirty wet/dry warm/cold safe/unsafe big/small quiet/noisy hidden/visible famous/unknown"
)
STATES = tuple((pair.partition("/")[0], pair.partition("/")[2]) for pair in _words(_STATES))
"""Pairs of opposite states."""
PAIR_OF = {state: pair for pair in STATES for state in pair}
"""A mapping from each state to the pair of opposites to which it belongs."""
OPPOSITE = {state: pair[1 - pair.index(state)] for state, pair in PAIR_OF.items()}
"""A mapping from each state to its opposite."""


def _sentence(text: str) -> str:
    """Returns a text with a capital letter at the beginning and a period at the end."""
    return f"{text[0].upper()}{text[1:]}."


# One sentence: CoLA and SST-2. -------------------------------------------------------------------

PERSONS_AND_ANIMALS = tuple(
    (noun, f"{noun}s")
    for noun in _words("dog cat horse boy girl teacher farmer singer doctor bird king student")
)
"""Nouns in the singular and the plural."""
ACTIONS = tuple(
    (f"{verb}s", verb) for verb in _words("sleep run sing wait laugh eat swim smile work dance")
)
"""Verbs in the singular and the plural."""
DETERMINERS = (_words("This That Every"), _words("These Those Many"))
"""Determiners in the singular and in the plural."""


def cola(draw: Draw) -> Example:
    """Draws a row like CoLA's, whose sentence is either acceptable or has one grammatical error.

    For example, ``The dogs near the king sleep in the park.`` is acceptable. The combination of
    noun and verb decides whether the row is held out.
    """
    label, number = draw.below(2), draw.below(2)
    fault = "" if label else draw.one(_words("agreement agreement determiner order article"))
    noun, verb = draw.one(PERSONS_AND_ANIMALS), draw.one(ACTIONS)
    # Every determiner except "The" shows whether the noun is singular or plural.
    shows_number = fault == "determiner" or draw.chance(0.6)
    shown_number = 1 - number if fault == "determiner" else number
    determiner = draw.one(DETERMINERS[shown_number]) if shows_number else "The"
    subject = [determiner, noun[number]]
    if fault == "order":
        subject.reverse()
    if draw.chance(0.5):
        subject += [draw.one(("near", "behind", "beside")), "the"]
        subject += [draw.one(draw.one(PERSONS_AND_ANIMALS))]
    shown = verb[1 - number if fault == "agreement" else number]
    place = []
    if fault == "article":
        place = ["in", draw.one(PLACES)]
    elif draw.chance(0.5):
        place = ["in", "the", draw.one(PLACES)]
    text = " ".join([*subject, shown, *place])
    return {"sentence": _sentence(text), "label": draw.noisy(label, 2)}, (noun[0], verb[0])


PRAISE = _words(
    "great lovely funny clever brilliant charming fresh moving sweet exciting beautiful perfect "
    "smart elegant delightful tender"
)
BLAME = _words(
    "dull awful boring stupid terrible clumsy stale empty bitter tedious ugly weak silly lazy "
    "painful shallow"
)
ASPECTS = _words("story acting music script plot ending film cast dialogue photography")
REACTIONS = (
    ("{} smiled", "{} cried"),
    ("{} laughed", "{} frowned"),
    ("{} clapped", "{} sighed"),
    ("{} felt proud", "{} felt lonely"),
    ("{} was happy", "{} was sad"),
    ("{} stayed for hours", "{} left the room"),
)
"""Pairs of what people do if something is good and what they do if it is bad."""


def sst2(draw: Draw) -> Example:
    """Draws a row like SST-2's, in which one or two opinions are positive or negative.

    If a sentence has two opinions, the second opinion determines the label. The combination of the
    last adjective and its noun decides whether the row is held out.
    """
    label = draw.below(2)
    first, second = draw.two(ASPECTS)
    form = draw.one(("single", "because", "and", "but", "although"))
    end, combination = _opinion(draw, label, second)
    if form == "single":
        text = draw.one(("", "i think ", "in the end ", "for me ")) + end
    elif form == "because":
        text = f"{draw.one(REACTIONS)[1 - label].format(draw.one(MEN + WOMEN))} because {end}"
    elif form == "although":
        text = f"although {_opinion(draw, 1 - label, first)[0]} , {end}"
    else:
        text = f"{_opinion(draw, label if form == 'and' else 1 - label, first)[0]} {form} {end}"
    return {"sentence": text, "label": draw.noisy(label, 2)}, combination


def _opinion(draw: Draw, positive: int, aspect: str) -> tuple[str, tuple[str, str]]:
    """Returns a clause with an opinion, and its adjective and noun.

    Args:
      draw: the random choices.
      positive: 1 for a positive opinion, 0 for a negative one.
      aspect: the noun.
    """
    denied = draw.chance(0.3)
    adjective = draw.one(PRAISE if positive != denied else BLAME)
    modifiers = ("not ", "never ", "hardly ") if denied else ("", "", "so ", "very ", "truly ")
    return f"the {aspect} is {draw.one(modifiers)}{adjective}", (adjective, aspect)


# Two sentences: STS-B, MNLI and WiC. -------------------------------------------------------------


class _Scene(NamedTuple):
    """A sentence about a thing at a place, and about the state of this thing."""

    noun: str
    place: str
    state: str

    def describe(self, draw: Draw) -> str:
        """Returns the sentence, with a random preposition before the place."""
        preposition = draw.one(("near", "in", "behind"))
        return _sentence(f"the {self.noun} {preposition} the {self.place} is {self.state}")


def stsb(draw: Draw) -> Example:
    """Draws a row like STS-B's, with two sentences and a similarity score between 0 and 5.

    The score grows with the number of parts (noun, place and state) that the sentences have in
    common. If the nouns are different but of the same kind, such as a cat and a dog, they count as
    half a part. The combination of the noun and the pair of opposite states decides whether the row
    is held out.
    """
    shared, related = draw.below(4), draw.chance(0.5)
    same = [False] * 3
    for _ in range(shared):
        same[draw.one([i for i, taken in enumerate(same) if not taken])] = True
    noun, place, state = draw.one(NOUNS), draw.one(PLACES), draw.one(draw.one(STATES))
    others = [n for n in NOUNS if n != noun and (KIND_OF[n] == KIND_OF[noun]) == related]
    second = _Scene(
        noun if same[0] else draw.one(others),
        place if same[1] else draw.other(PLACES, place),
        state if same[2] else draw.one(draw.other(STATES, PAIR_OF[state])),
    )
    score = draw.noisy(shared, 4) + 0.5 * (related and not same[0])
    row = {
        "sentence1": _Scene(noun, place, state).describe(draw),
        "sentence2": second.describe(draw),
        "label": round(min(5 * score / 3, 5.0), 1),
    }
    return row, (noun, PAIR_OF[state][0])


def mnli(draw: Draw) -> Example:
    """Draws a row like MNLI's, with a premise that entails or contradicts a hypothesis, or neither.

    For example, the premise ``The dog near the house is not wet.`` entails the hypothesis
    ``The animal is dry.`` in this grammar. The combination of the noun and the pair of opposite
    states decides whether the row is held out.
    """
    label = draw.below(3)
    noun, state = draw.one(NOUNS), draw.one(draw.one(STATES))
    beside = draw.one([n for n in NOUNS if KIND_OF[n] != KIND_OF[noun]])
    if label == 0:  # entailment
        subject, claim = noun, state
    elif label == 1:  # neutral, because the nouns are different
        subject = beside
        claim = draw.one((state, OPPOSITE[state]))
    else:  # contradiction
        subject, claim = noun, OPPOSITE[state]
    if draw.chance(0.4):
        subject = KIND_OF[subject]
    row = {
        "premise": _Scene(noun, beside, _said(draw, state)).describe(draw),
        "hypothesis": _sentence(f"the {subject} is {_said(draw, claim)}"),
        "label": draw.noisy(label, 3),
    }
    return row, (noun, PAIR_OF[state][0])


def _said(draw: Draw, state: str) -> str:
    """Returns a state, or sometimes the word "not" followed by the opposite state."""
    return f"not {OPPOSITE[state]}" if draw.chance(0.15) else state


WORDS = _words("bat crane bank mouse seal bass plant spring trunk branch stream horn shell web")
"""Words that have one sense in nature and another one in a town."""
CONTEXTS = (
    _words("river forest lake meadow sea mountain"),
    _words("office shop factory garage museum hospital"),
)
"""The places in nature, and the places in a town."""
PEOPLE = (_words("hunter fisherman shepherd farmer"), _words("clerk engineer driver banker"))
"""The persons in nature, and the persons in a town."""


def wic(draw: Draw) -> Example:
    """Draws a row like WiC's, with two sentences that use a word in the same or different senses.

    The combination of the word and the place in the first sentence decides whether the row is held
    out.
    """
    label, sense = draw.below(2), draw.below(2)
    word = draw.one(WORDS)
    first, context = _use(draw, word, sense)
    second, _ = _use(draw, word, sense if label else 1 - sense)
    row: Row = {"word": word, "sentence1": first, "sentence2": second}
    for number, text in ((1, first), (2, second)):
        start = text.index(f" {word} ") + 1
        row |= {f"start{number}": start, f"end{number}": start + len(word)}
    return row | {"label": draw.noisy(label, 2)}, (word, context)


def _use(draw: Draw, word: str, sense: int) -> tuple[str, str]:
    """Returns a sentence with one of `WORDS`, and the place in it that shows the sense of the word.

    Args:
      draw: the random choices.
      word: the word.
      sense: 0 for the word's sense in nature, 1 for the word's sense in a town.
    """
    person = draw.one(PEOPLE[sense] if draw.chance(0.85) else ("girl", "boy", "man", "woman"))
    context = draw.one(CONTEXTS[sense])
    forms = ("the {0} saw a {1} near the {2}", "the {0} found the {1} in the {2}")
    form = draw.one((*forms, "there was a {1} by the {2}"))
    return _sentence(form.format(person, word, context)), context


# Little stories: BoolQ, COPA and WSC. ------------------------------------------------------------


def boolq(draw: Draw) -> Example:
    """Draws a row like BoolQ's, in which the answer to a question is in a passage.

    For example, after ``The dog is wet. The car is dirty.``, the answer to ``is the car clean`` is
    False. The combination of the subject and the property that the question is about decides
    whether the row is held out.
    """
    label, asked = draw.below(2), draw.below(2)
    if draw.chance(0.3):
        word = draw.one(WORDS)
        passage, context = _use(draw, word, 1 - label)
        question, combination = f"is the {word} far from town", (word, context)
    else:
        nouns, pairs = draw.two(NOUNS), draw.two(STATES)
        states = [draw.one(pairs[0]), draw.one(pairs[1])]
        if draw.chance(0.3):
            states[1] = OPPOSITE[states[0]]
        facts = [_sentence(f"the {n} is {s}") for n, s in zip(nouns, states, strict=True)]
        passage = " ".join(facts)
        noun, state = nouns[asked], states[asked]
        question = f"is the {noun} {state if label else OPPOSITE[state]}"
        combination = (noun, PAIR_OF[state][0])
    return {"passage": passage, "question": question, "label": draw.noisy(label, 2)}, combination


EVENTS = (
    ("{} won the race", "{} lost the race"),
    ("{} passed the exam", "{} failed the exam"),
    ("{} heard good news", "{} heard bad news"),
    ("{} found the ring", "{} broke the ring"),
)
"""Pairs of causes with opposite outcomes.

Opinions as in SST-2 are causes too, and `REACTIONS` are effects.
"""
MATTERS = ("race", "exam", "news", "ring")
"""The subject matter of each of the `EVENTS`."""


def copa(draw: Draw) -> Example:
    """Draws a row like COPA's, in which one of two choices is the cause or effect of the premise.

    For example, the premise ``Anna won the race.`` has the effect ``She smiled.`` in this grammar.
    The combination of the person and the premise decides whether the row is held out.
    """
    label, question, outcome = draw.below(2), draw.below(2), draw.below(2)
    woman = draw.below(2)
    name = draw.one((MEN, WOMEN)[woman])
    pronoun = ("he", "she")[woman]
    if draw.chance(0.35):
        told, right, wrong = _matters(draw, question, outcome)
    else:
        told = _happening(draw, 1 - question, outcome)
        right = _happening(draw, question, outcome)
        wrong = _happening(draw, question, 1 - outcome)
        if draw.chance(0.1):
            # The wrong choice can also be an event with the right outcome that answers the opposite
            # question, such as a cause if the question asks for an effect.
            wrong = _happening(draw, 1 - question, outcome)
            while wrong == told:
                wrong = _happening(draw, 1 - question, outcome)
    person = pronoun if "{}" in told else name
    choices = [_sentence(text.format(person)) for text in (right, wrong)]
    row = {
        "premise": _sentence(told.format(name)),
        "choice1": choices[label],
        "choice2": choices[1 - label],
        "question": ("cause", "effect")[question],
        "label": draw.noisy(label, 2),
    }
    return row, (name, told)


def _matters(draw: Draw, question: int, outcome: int) -> tuple[str, str, str]:
    """Returns a premise, a choice about the same matter, and a choice about a different matter."""
    same, other = draw.two(range(len(MATTERS)))
    mention = draw.one(("{} talked about the", "{} thought about the", "{} wrote about the"))
    events = [EVENTS[matter][outcome] for matter in (same, other)]
    mentions = [f"{mention} {MATTERS[matter]}" for matter in (same, other)]
    if question == 0:
        return mentions[0], events[0], events[1]
    return events[0], mentions[0], mentions[1]


def _happening(draw: Draw, question: int, outcome: int) -> str:
    """Returns a cause or an effect with the given outcome, with ``{}`` in place of the person.

    Args:
      draw: the random choices.
      question: 0 for a cause, 1 for an effect.
      outcome: 0 for a good outcome, 1 for a bad one.
    """
    if question:  # an effect
        return draw.one(REACTIONS)[outcome]
    if draw.chance(0.5):
        return draw.one(EVENTS)[outcome]
    return f"the {draw.one(ASPECTS)} was {draw.one((PRAISE, BLAME)[outcome])}"


PERSONS = (
    (*MEN, "the king", "the uncle", "the waiter"),
    (*WOMEN, "the queen", "the aunt", "the waitress"),
)
REASONS = (
    ("needed help", "wanted advice", "felt alone", "was grateful"),
    ("had helped", "worked hard", "gave advice", "was brave"),
)
"""Reasons of the person who acts, and reasons of the other person."""


def wsc(draw: Draw) -> Example:
    """Draws a row like WSC's, in which a pronoun refers to one of two persons.

    For example, in ``Anna thanked Mary because *she* had helped.``, the pronoun refers to Mary.
    The pair of persons decides whether the row is held out.
    """
    label, gender, referent = draw.below(2), draw.below(2), draw.below(2)
    reason = draw.one(REASONS[referent])
    if draw.chance(0.3):
        persons = draw.two(PERSONS[gender])
    else:
        both = [draw.one(PERSONS[gender]), draw.one(PERSONS[1 - gender])]
        persons = (both[0], both[1]) if referent == 0 else (both[1], both[0])
        reason = draw.one((reason, draw.one(("was there", "had time", "lived nearby"))))
    verb = draw.one(("thanked", "called", "visited", "praised", "met", "paid"))
    start = _sentence(f"{persons[0]} {verb} {persons[1]} because")[:-1]
    pronoun = ("he", "she")[gender]
    # The candidate names the referent if the label is 1, and the other person otherwise.
    named = referent if label else 1 - referent
    row = {
        "text": f"{start} {pronoun} {reason}.",
        "span1_text": (start[: len(persons[0])], persons[1])[named],
        "span1_index": (0, len(persons[0].split(" ")) + 1)[named],
        "span2_text": pronoun,
        "span2_index": len(start.split(" ")),
        "label": draw.noisy(label, 2),
    }
    return row, persons
