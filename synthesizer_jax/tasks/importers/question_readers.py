"""Readers of rows from the files of SQuAD and TriviaQA; see `corpus_readers`."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from synthesizer_jax.tasks.importers.corpus_readers import Rows
from synthesizer_jax.tasks.importers.reading import import_error, parse_value, read_text
from synthesizer_jax.tasks.storage import Row

TRIVIA_ANSWER = {
    "matched_wiki_entity_name": "MatchedWikiEntryName",
    "normalized_matched_wiki_entity_name": "NormalizedMatchedWikiEntryName",
    "normalized_value": "NormalizedValue",
    "type": "Type",
    "value": "Value",
}
"""The texts of TriviaQA's answers, and their fields in its files."""
TRIVIA_PAGES = ("DocSource", "Filename", "Title", "WikiContext")
TRIVIA_RESULTS = ("Description", "Filename", "Rank", "Title", "Url", "SearchContext")
"""The fields of TriviaQA's documents; the last is the text of the file."""


def squad(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields SQuAD 1.1's rows from its JSON."""
    path = paths[0]
    data = parse_value(path, 1, read_text(path))
    try:
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield question["id"], _squad_question(article, paragraph, question)
    except (KeyError, TypeError) as error:
        reason = f"not SQuAD's JSON ({type(error).__name__}: {error})"
        raise import_error(path, "the data", reason) from error


def _squad_question(
    article: Mapping[str, Any], paragraph: Mapping[str, Any], question: Mapping[str, Any]
) -> Row:
    return {
        "id": question["id"],
        "title": article.get("title", ""),
        "context": paragraph["context"],
        "question": question["question"],
        "answers": [
            {"text": answer["text"], "answer_start": answer["answer_start"]}
            for answer in question["answers"]
        ],
    }


def trivia(paths: Sequence[pathlib.Path]) -> Rows:
    """Yields TriviaQA's rows: questions in ``qa/*.json``, their documents in ``evidence`` beside it.

    As in TFDS, documents whose file is not there are left out.
    """
    for path in paths:
        if not (path.parent.parent / "evidence").is_dir():
            reason = "the folder 'evidence' with its documents is not beside its folder"
            raise import_error(path, "the file", reason)
        data = parse_value(path, 1, read_text(path))
        try:
            for question in data["Data"]:
                yield question["QuestionId"], _trivia_question(path, question)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"not TriviaQA's JSON ({type(error).__name__}: {error})"
            raise import_error(path, "the data", reason) from error


def _trivia_question(path: pathlib.Path, question: Mapping[str, Any]) -> Row:
    evidence = path.parent.parent / "evidence"
    pages, results = question.get("EntityPages", ()), question.get("SearchResults", ())
    return {
        "question": question["Question"].strip(),
        "question_id": question["QuestionId"],
        "question_source": question["QuestionSource"].strip(),
        "answer": _trivia_answer(question.get("Answer")),
        "entity_pages": _documents(path, pages, evidence / "wikipedia", TRIVIA_PAGES),
        "search_results": _documents(path, results, evidence / "web", TRIVIA_RESULTS),
    }


def _trivia_answer(answer: Mapping[str, Any] | None) -> Row:
    """Returns an answer with its aliases; None: the answer is hidden."""
    if answer is None:
        texts = dict.fromkeys(TRIVIA_ANSWER, "<unk>") | {"type": ""}
        return texts | {"aliases": [], "normalized_aliases": []}
    lists = {"aliases": answer["Aliases"], "normalized_aliases": answer["NormalizedAliases"]}
    return {
        **{name: answer.get(key, "").strip() for name, key in TRIVIA_ANSWER.items()},
        **{name: [alias.strip() for alias in aliases] for name, aliases in lists.items()},
    }


def _documents(
    path: pathlib.Path,
    entries: Sequence[Mapping[str, Any]],
    folder: pathlib.Path,
    names: Sequence[str],
) -> list[Row]:
    """Returns the fields of documents that are in a folder; the last of the names is that of the text."""
    *fields, context = names
    documents: list[Row] = []
    for entry in entries:
        name = pathlib.PurePosixPath(entry.get("Filename", ""))
        if name.is_absolute() or ".." in name.parts:
            raise import_error(path, "the data", f"the file name {str(name)!r} leaves its folder")
        file = folder / name
        if not name.parts or not file.is_file():
            continue
        values = {snake_case(field): entry[field] for field in fields}
        stripped = {k: v.strip() if isinstance(v, str) else v for k, v in values.items()}
        documents.append(stripped | {snake_case(context): read_text(file).strip()})
    return documents


def snake_case(name: str) -> str:
    """Returns ``doc_source`` for ``DocSource``, as TFDS names features."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
