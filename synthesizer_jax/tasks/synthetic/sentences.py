"""Tasks about one sentence: is it English (CoLA), is it praise (SST-2)."""

from __future__ import annotations

from synthesizer_jax.tasks.synthetic.draw import Draw, Example
from synthesizer_jax.tasks.synthetic.lexicon import MEN, PLACES, WOMEN, sentence

NOUNS = (
    ("dog", "dogs"),
    ("cat", "cats"),
    ("horse", "horses"),
    ("boy", "boys"),
    ("girl", "girls"),
    ("teacher", "teachers"),
    ("farmer", "farmers"),
    ("singer", "singers"),
    ("doctor", "doctors"),
    ("bird", "birds"),
    ("king", "kings"),
    ("student", "students"),
)
VERBS = (
    ("sleeps", "sleep"),
    ("runs", "run"),
    ("sings", "sing"),
    ("waits", "wait"),
    ("laughs", "laugh"),
    ("eats", "eat"),
    ("swims", "swim"),
    ("smiles", "smile"),
    ("works", "work"),
    ("dances", "dance"),
)
"""Nouns and verbs as (singular, plural)."""

DETERMINERS = (("This", "That", "Every"), ("These", "Those", "Many"))
PREPOSITIONS = ("near", "behind", "beside")
FAULTS = ("agreement", "agreement", "determiner", "order", "article")


def cola(draw: Draw) -> Example:
    """Agreement over a distance, determiners, word order and missing articles.

    ``The dogs near the king sleep in the park.`` is acceptable, ``The dogs near the king sleeps in
    the park.`` is not. Held out: pairs of noun and verb.
    """
    label, number = draw.below(2), draw.below(2)
    fault = "" if label else draw.one(FAULTS)
    noun, verb = draw.one(NOUNS), draw.one(VERBS)
    marked = fault == "determiner" or draw.chance(0.6)
    agreed = 1 - number if fault == "determiner" else number
    determiner = draw.one(DETERMINERS[agreed]) if marked else "The"
    subject = [determiner, noun[number]]
    if fault == "order":
        subject.reverse()
    if draw.chance(0.5):
        subject += [draw.one(PREPOSITIONS), "the", draw.one(draw.one(NOUNS))]
    shown = verb[1 - number if fault == "agreement" else number]
    place = []
    if fault == "article":
        place = ["in", draw.one(PLACES)]
    elif draw.chance(0.5):
        place = ["in", "the", draw.one(PLACES)]
    text = " ".join([*subject, shown, *place])
    row = {"sentence": sentence(text), "label": draw.noisy(label, 2)}
    return Example(row, (noun[0], verb[0]))


PRAISE = (
    *("great", "lovely", "funny", "clever", "brilliant", "charming", "fresh", "moving"),
    *("sweet", "exciting", "beautiful", "perfect", "smart", "elegant", "delightful", "tender"),
)
BLAME = (
    *("dull", "awful", "boring", "stupid", "terrible", "clumsy", "stale", "empty"),
    *("bitter", "tedious", "ugly", "weak", "silly", "lazy", "painful", "shallow"),
)
ASPECTS = (
    *("story", "acting", "music", "script", "plot"),
    *("ending", "film", "cast", "dialogue", "photography"),
)
OPENERS = ("", "i think ", "in the end ", "for me ")
STRESS = ("", "", "so ", "very ", "truly ")
DENIALS = ("not ", "never ", "hardly ")
REACTIONS = (
    ("{} smiled", "{} cried"),
    ("{} laughed", "{} frowned"),
    ("{} clapped", "{} sighed"),
    ("{} felt proud", "{} felt lonely"),
    ("{} was happy", "{} was sad"),
    ("{} stayed for hours", "{} left the room"),
)
"""What people do when something is good, and what when it is not."""


def sst2(draw: Draw) -> Example:
    """Opinions with negation; after ``but`` and ``although`` the second clause decides.

    ``although the plot is dull , the music is never boring`` is positive, ``Tom sighed because the
    film is boring`` is not. Held out: pairs of the last adjective and what it is said of.
    """
    label = draw.below(2)
    first, second = draw.two(ASPECTS)
    form = draw.one(("single", "because", "and", "but", "although"))
    end, combination = _opinion(draw, label, second)
    if form == "single":
        text = draw.one(OPENERS) + end
    elif form == "because":
        text = f"{draw.one(REACTIONS)[1 - label].format(draw.one(MEN + WOMEN))} because {end}"
    elif form == "although":
        text = f"although {_opinion(draw, 1 - label, first)[0]} , {end}"
    else:
        text = f"{_opinion(draw, label if form == 'and' else 1 - label, first)[0]} {form} {end}"
    return Example({"sentence": text, "label": draw.noisy(label, 2)}, combination)


def _opinion(draw: Draw, positive: int, aspect: str) -> tuple[str, tuple[str, str]]:
    """A clause of that polarity, and its (adjective, aspect)."""
    denied = draw.chance(0.3)
    adjective = draw.one(PRAISE if positive != denied else BLAME)
    modifier = draw.one(DENIALS if denied else STRESS)
    return f"the {aspect} is {modifier}{adjective}", (adjective, aspect)
