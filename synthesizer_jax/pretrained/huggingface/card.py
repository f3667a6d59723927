"""Reads and writes model cards, the pages ``README.md`` of models on the Hugging Face hub.

A card begins with fields in YAML between two lines ``---``, which the hub uses to sort and link
models. The rest of the card is Markdown.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from synthesizer_jax.pretrained.huggingface.config import CARD
from synthesizer_jax.training.source import Source

HUB = "https://huggingface.co"

MODEL_NAME = r"\w[\w.-]*/\w[\w.-]*"
"""Matches the name ``OWNER/NAME`` of a model on the hub."""

LANGUAGE = r"[a-z]{2,3}|code|multilingual"
"""Matches the languages of a card: codes of ISO 639, and two words that the hub knows."""

LICENSE = r"[a-z0-9][a-z0-9.+-]*"
"""Matches the hub's names of licenses, such as ``apache-2.0``."""

_FIELDS = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)(.*)", re.DOTALL)
"""Matches a card. The groups are the YAML of the fields, and the text below them."""

_ORIGIN = re.compile(rf"({MODEL_NAME})@([0-9a-f]+)(/.*)?")
"""Matches the origin ``OWNER/NAME@COMMIT`` of a model on the hub; see `Pretrained.origin`."""

_LONGEST = 1 << 20
"""The largest number of bytes of a card that are read."""


def read_card(folder: pathlib.Path) -> tuple[dict[str, Any], str]:
    """Returns the fields of a folder's model card, and the text below them.

    All scalars are strings, so that the language ``no`` is not read as a boolean. If the folder has
    no card, or if the fields are not valid YAML, the result has no fields. This is not an error,
    because a model can be used without its card.
    """
    path = folder / CARD
    if not path.is_file():
        return {}, ""
    with path.open("rb") as file:
        text = file.read(_LONGEST).decode("utf-8", errors="replace")
    match = _FIELDS.match(text)
    if match is None:
        return {}, text
    fields: Any = None
    # The base loader creates only strings, lists and dictionaries.
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        fields = yaml.load(match[1], Loader=yaml.BaseLoader)
    return (fields if isinstance(fields, dict) else {}), match[2]


def write_card(folder: pathlib.Path, fields: Mapping[str, Any], text: str) -> None:
    """Writes a model card into a folder. Fields whose values are `None` or empty are left out."""
    known = {name: value for name, value in fields.items() if value not in (None, "", [], ())}
    header = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
    (folder / CARD).write_text(f"---\n{header}---\n\n{text.rstrip()}\n", encoding="utf-8")


def read_source_of(folder: pathlib.Path, origin: str) -> Source:
    """Returns what is known about a published model from its origin and its card.

    Args:
      folder: the folder of the model.
      origin: the description of the model by `opening.open_pretrained`.
    """
    # If adapters are added to a base model, the origin names first the adapters and then the base.
    origins = origin.split(", adapters of ")
    named = [match for part in origins if (match := _ORIGIN.fullmatch(part))]
    fields, _ = read_card(folder)
    model, commit = (named[0][1], named[0][2]) if named else (None, None)
    license_link = _link(_text(fields, "license_link"), model)
    license_id = _text(fields, "license")
    if license_id is not None and not re.fullmatch(LICENSE, license_id):
        license_id = None
    return Source(
        model=model,
        commit=commit,
        unchanged=model is not None and len(origins) == 1,
        license=license_id,
        license_name=_text(fields, "license_name") if license_id else None,
        license_link=license_link if license_id else None,
        languages=_languages(fields.get("language")),
    )


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    """Returns a field whose value is a short text, or `None` if it has a different value."""
    value = fields.get(name)
    return value if isinstance(value, str) and 0 < len(value) <= 200 else None


def _link(link: str | None, model: str | None) -> str | None:
    """Returns the address of a license. The link may be a file in the model's own repository."""
    if link is None or link.startswith("https://"):
        return link
    if model is None or ":" in link:
        return None
    return f"{HUB}/{model}/blob/main/{link.lstrip('/')}"


def _languages(value: Any) -> tuple[str, ...]:
    """Returns the languages in a card's field, which is a string or a list of strings."""
    values = value if isinstance(value, list) else [value]
    return tuple(x for x in values if isinstance(x, str) and re.fullmatch(LANGUAGE, x))
