"""Encodes and decodes texts with the library ``tokenizers``, which reads ``tokenizer.json``.

The library is optional. It is imported when a tokenizer is read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.messages import silent_stderr

TOKENIZER = "tokenizer.json"
"""The file of the library, which defines how texts are split into tokens."""
TOKENIZER_CONFIG = "tokenizer_config.json"
"""The file in which transformers names the special tokens, and sets options of the tokenizer."""
SPECIAL_TOKENS = "special_tokens_map.json"
"""A file in which earlier versions of transformers name the special tokens."""
ADDED = "added_tokens.json"
"""A file in which earlier versions of transformers list the ids of added tokens."""

FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED)
"""The files of a tokenizer. Only the first file must exist."""

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The fields with special tokens in the configuration of a tokenizer."""

REMEDY = "Copy the file again, or install a newer version of tokenizers if the file is complete."
"""Tells users in error messages what to do if the library cannot read a tokenizer."""

_SENTINEL = re.compile(r"▁?<extra_id_\d+>")
"""Matches sentinels."""

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Matches the tokens that stand for single bytes."""


class Backend:
    """A tokenizer of the library, with the special tokens of its configuration.

    Token ids are the same as those of `transformers.AutoTokenizer` for the same files. A special
    token in a text is encoded as this token, unless the configuration sets
    ``split_special_tokens``.

    Attributes:
      vocab_size: the number of ids of the model, by default the largest token id plus one.
      required_size: the number of ids that a model needs to process texts. All tokens beyond these
        ids are special tokens, and they are neither EOS nor put before or after texts.
      around: the ids that the post-processor of the tokenizer puts before and after a text.
      unk_id: the id for text that no token covers, or −1 if there is no such id.
      eos_id: the id of the end of a text.
      special: the ids of special tokens, which are not part of a text. Sentinels are not among
        them.
      splits_special: whether special tokens in a text are split like other text.
      added: the tokens that the configuration adds to the ``tokenizer.json``, as the fields of each
        token.
    """

    def __init__(self, path: pathlib.Path, files: Mapping[str, bytes], *, size: int | None = None):
        """Reads a tokenizer.

        Args:
          path: the path of the ``tokenizer.json``, for error messages. The other files are in the
            same folder.
          files: the contents of the `FILES` that exist, by file name.
          size: the number of ids of the model, or `None` if the model has all ids.

        Raises:
          ModuleNotFoundError: if the library is not installed.
          ValueError: if the library cannot read the tokenizer, if the files contradict each other,
            or if the tokenizer has no EOS.
        """
        library = import_library(path)
        with _errors_of_library(path):
            self._tokenizer = library.Tokenizer.from_str(files[TOKENIZER].decode("utf-8"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # If a tokenizer can encode these rare characters, it can encode any character.
            self._tokenizer.encode("\ua66e\U0010fffd")
        with describing(path, REMEDY):
            self._data = json.loads(files[TOKENIZER])
            added_tokens = self._data.get("added_tokens", ())
            self._check_ids({token["id"]: token["content"] for token in added_tokens})
        with describing(path.with_name(TOKENIZER_CONFIG), "Copy the files of the tokenizer again."):
            settings, declared = _read_settings(files)
            self.added = self._add_tokens(library, settings, declared)
            self._check_ids({i: token["content"] for i, token in declared.items()})
        self.splits_special = bool(settings.get("split_special_tokens"))
        self._tokenizer.encode_special_tokens = self.splits_special

        self._ids: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(
            i for i, token in added if token.special and not _SENTINEL.fullmatch(token.content)
        )
        with describing(path, REMEDY):
            self.around = self._read_around()
            self.unk_id = self._read_unknown()
        self.eos_id = self._read_eos(path, settings)

        text_ids = (i for i in self._ids.values() if i not in self.special)
        around = itertools.chain(*self.around)
        self.required_size = 1 + max(self.unk_id, self.eos_id, *around, *text_ids)
        if size is not None:
            self.vocab_size = size

    def _check_ids(self, expected: Mapping[int, str]) -> None:
        """Raises a `ValueError` if a token does not have the id that a file gives it.

        The library ignores the ids of added tokens in its files, and numbers the tokens itself.
        """
        for i, token in expected.items():
            found = self._tokenizer.token_to_id(token)
            if found != i:
                raise ValueError(f"the token {token!r} must have the id {i}, but its id is {found}")

    def _add_tokens(
        self, library: ModuleType, settings: Mapping[str, Any], declared: Mapping[int, Any]
    ) -> list[dict[str, Any]]:
        """Adds the tokens of the configuration that the ``tokenizer.json`` lacks, and returns them.

        Transformers adds the same tokens, in the same order.
        """
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        added = []
        tokens = [declared[i] for i in sorted(declared)]
        for token in (*tokens, *_special_tokens(settings)):
            if token["content"] not in known:
                known.add(token["content"])
                self._tokenizer.add_tokens([library.AddedToken(**token)])
                added.append(token)
        return added

    def _read_around(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the post-processor puts before and after the ids of a text.

        The ids are found by encoding a text with the post-processor and without it.
        """
        encodings = (self._tokenizer.encode(token, add_special_tokens=False) for token in self._ids)
        text = next((encoding for encoding in encodings if encoding.ids), None)
        if text is None:
            raise ValueError("it encodes no text")
        whole = self._tokenizer.post_process(text)
        is_added = whole.special_tokens_mask
        start = sum(1 for _ in itertools.takewhile(bool, is_added))
        end = start + len(text.ids)
        if whole.ids[start:end] != text.ids:
            raise ValueError("its post_processor changes the tokens of a text")
        first, last = whole.ids[:start], whole.ids[end:]
        if not all(0 <= i < self.vocab_size for i in (*first, *last)):
            raise ValueError(
                f"its post_processor adds the ids {[*first, *last]}, but the largest id is "
                f"{self.vocab_size - 1}"
            )
        return first, last

    def _read_unknown(self) -> int:
        """Returns the id for unknown text, or −1."""
        model = self._data["model"]
        if isinstance(model.get("unk_id"), int):
            return int(model["unk_id"])
        return self._ids.get(model.get("unk_token"), -1)

    def _read_eos(self, path: pathlib.Path, settings: Mapping[str, Any]) -> int:
        """Returns the id of EOS.

        EOS is the token ``eos_token`` of the configuration, or else the last token that the
        post-processor adds.
        """
        token = settings.get("eos_token")
        if token is not None:
            return self._ids[_fields_of_token(token)["content"]]
        if self.around[1]:
            return self.around[1][-1]
        raise ValueError(
            f"{path} does not say which token is EOS. Write a {TOKENIZER_CONFIG} with the field "
            "eos_token into the same folder."
        )

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, or `None` if there is no such token."""
        return self._ids.get(token)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without the ids in `around`.

        Raises:
          ValueError: if the text contains a token whose id is not below `vocab_size`.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._check_encoded(ids)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of several texts; see `encode`.

        The library encodes texts in parallel.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [encoding.ids for encoding in encodings]
        for ids in rows:
            self._check_encoded(ids)
        return rows

    def _check_encoded(self, ids: Sequence[int]) -> None:
        """Raises a `ValueError` if the model lacks one of the ids of a text."""
        if max(ids, default=-1) < self.vocab_size:
            return
        missing = max(ids)
        raise ValueError(
            f"A text contains the token {self._tokenizer.id_to_token(missing)!r} with the id "
            f"{missing}, but the model has only the ids 0 to {self.vocab_size - 1}. Remove the "
            "token from the text."
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Special tokens and ids outside the vocabulary are left out."""
        shown = [i for i in ids if 0 <= i < self.vocab_size and i not in self.special]
        text: str = self._tokenizer.decode(shown, skip_special_tokens=False)
        return text

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        """Returns the bytes that each id adds to a text; see `Vocabulary.token_bytes`."""
        names = {i: name for name, i in self._ids.items()}
        steps = _decoder_steps(self._data.get("decoder"))

        # If tokens are decoded one by one, most decoders drop the space before a word. The text of
        # a token after another token is therefore found by decoding both.
        anchor = next(
            (i for i in sorted(names) if i not in self.special and self.decode([i]).isalpha()), None
        )
        before = [] if first or anchor is None else [anchor]
        length = len(self.decode(before).encode())

        def convert(i: int) -> bytes:
            """Returns the bytes of an id."""
            if i not in names or i in self.special:
                return b""
            if "ByteLevel" in steps:
                return spelled_bytes(names[i])
            if "ByteFallback" in steps and _BYTE.fullmatch(names[i]):
                return bytes([int(names[i][3:5], 16)])
            return self.decode([*before, i]).encode()[length:]

        return [convert(i) for i in range(size)]

    def to_json(self) -> str:
        """Returns the content of a ``tokenizer.json`` that includes the tokens of `_add_tokens`."""
        text: str = self._tokenizer.to_str()
        return text


def import_library(path: pathlib.Path) -> ModuleType:
    """Imports the library ``tokenizers``. The error message names `path`, the file to be read.

    Raises:
      ModuleNotFoundError: if the library is not installed.
    """
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"Reading {path} needs the package tokenizers, which is not installed. Install it with "
            "pip install 'synthesizer_jax[tokenizers]'."
        ) from None
    return tokenizers


@contextlib.contextmanager
def _errors_of_library(path: pathlib.Path) -> Iterator[None]:
    """Context manager that turns errors of the library into a `ValueError` with one sentence.

    The library is written in Rust. It raises a plain `Exception` for most errors. If its code
    panics, it prints a traceback and raises an exception that is not an `Exception`.
    """
    try:
        with silent_stderr():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:250].removesuffix(".")
        raise ValueError(
            f"{path} cannot be read by the package tokenizers: {reason}. {REMEDY}"
        ) from error


def _read_settings(files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Returns the configuration of a tokenizer, and the tokens that it adds, by id.

    As in transformers, `SPECIAL_TOKENS` and `ADDED` are read only if `TOKENIZER_CONFIG` does not
    list added tokens.

    Args:
      files: the contents of the files.
    """
    settings: dict[str, Any] = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    if "added_tokens_decoder" in settings:
        decoder = settings["added_tokens_decoder"].items()
        return settings, {int(i): _fields_of_token(token) for i, token in decoder}

    settings |= json.loads(files.get(SPECIAL_TOKENS, b"{}"))
    special = {token["content"] for token in _special_tokens(settings)}
    declared = {}
    for name, i in json.loads(files.get(ADDED, b"{}")).items():
        is_special = name in special
        declared[int(i)] = {"content": name, "special": is_special, "normalized": not is_special}
    return settings, declared


def _fields_of_token(token: Any) -> dict[str, Any]:
    """Returns the arguments with which the library creates an added token.

    In a configuration, a token is a string or an object.
    """
    if not isinstance(token, Mapping):
        return {"content": str(token)}
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: token[name] for name in fields if name in token}


def _special_tokens(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the special tokens that a configuration names, as arguments of the library."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if isinstance(extra, Mapping):
        extra = extra.values()
    named = (settings.get(name) for name in NAMED)
    tokens = (token for token in (*named, *extra) if token is not None)
    return [{**_fields_of_token(token), "special": True} for token in tokens]


def _decoder_steps(decoder: Mapping[str, Any] | None) -> set[str]:
    """Returns the kinds of the steps of a decoder."""
    if decoder is None:
        return set()
    steps = decoder.get("decoders", ())
    return {decoder["type"]}.union(*map(_decoder_steps, steps))


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Returns the byte that each character spells in the tokens of a byte-level BPE, as in GPT-2.

    Printable characters spell their own byte. Other bytes, and the space, are spelled by the
    characters U+0100, U+0101 and so on.
    """
    others = itertools.count(256)
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    return {chr(b if b in printable else next(others)): b for b in range(256)}


def spelled_bytes(token: str) -> bytes:
    """Returns the bytes that a token of a byte-level BPE spells."""
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()
