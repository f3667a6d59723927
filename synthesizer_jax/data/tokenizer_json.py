"""A vocabulary in the files of the library ``tokenizers``, such as ``tokenizer.json``."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Self, TypeAlias

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length
from synthesizer_jax.data.tokenizer_backend import FILES, TOKENIZER, Backend
from synthesizer_jax.data.vocabularies import Bytes, FileVocabulary, SentencePiece, until, utf8


@register
@dataclasses.dataclass(frozen=True)
class Tokenizer(FileVocabulary):
    """A vocabulary in a ``tokenizer.json``, the file of Hugging Face's library ``tokenizers``.

    The library is optional (``pip install 'synthesizer_jax[tokenizers]'``). Token ids are the same
    as those of `transformers.AutoTokenizer`. The post-processor in the file decides which special
    tokens are put before and after an input. Targets end with EOS, the ``eos_token`` in
    ``tokenizer_config.json``. If this field is missing, EOS is the last token that the
    post-processor adds.

    Decoding leaves special tokens out, except for sentinels.

    Attributes:
      path: the path of the ``tokenizer.json``, on a disk or in a bucket (``gs://…``). The files
        ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json`` in the same
        folder are read too, if they exist.
      size: the number of ids that the model has, or None if the model has all ids. A text with a
        token whose id is not below `size` is refused. For example, tokenizers of models that also
        read images have a special token for images, which a model of texts may lack.
    """

    path: str
    size: Length | None = None
    saved_names = FILES

    @functools.cached_property
    def _files(self) -> dict[str, bytes]:
        """The contents of the files, by file name."""
        remedy = f"Give the path of a {TOKENIZER} as --vocabulary or vocabulary.path."
        file = self.find_file("tokenizer", remedy)
        paths = {name: file.with_name(name) for name in FILES[1:]}
        found = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        return {TOKENIZER: file.read_bytes(), **found}

    def files(self) -> dict[str, bytes]:
        return dict(self._files)

    @functools.cached_property
    def backend(self) -> Backend:
        """The tokenizer of the library; see `Backend` for errors."""
        return _load_backend(self.file, tuple(self._files.items()), self.size)

    def build(self) -> Self:
        """Reads the files, and returns the vocabulary; see `Backend` for errors."""
        _ = self.backend
        return self

    def __getstate__(self) -> dict[str, object]:
        """Returns only the fields, so that other processes read the files again."""
        return {"path": self.path, "size": self.size}

    def for_rows(self, rows: int) -> Tokenizer:
        """Returns the vocabulary for a model whose embedding has `rows` rows.

        If all tokens without a row are special tokens that texts do not need, the result refuses
        texts with these tokens. If another token has no row, the vocabulary is returned unchanged.
        """
        if self.vocab_size <= rows or self.backend.required_size > rows:
            return self
        return dataclasses.replace(self, size=rows)

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    @property
    def unk_id(self) -> int:  # type: ignore[override]
        return self.backend.unk_id

    @property
    def eos_id(self) -> int:  # type: ignore[override]
        return self.backend.eos_id

    @property
    def around_inputs(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after the ids of an input."""
        return self.backend.around

    @property
    def first_sentinel(self) -> int:
        """The id of ``<extra_id_0>``, or the last id if there are no sentinels.

        Raises:
          ValueError: if the id of ``<extra_id_1>`` is not the id below it, as in T5.
        """
        first, second = map(self.backend.id_of, ("<extra_id_0>", "<extra_id_1>"))
        if first is None:
            return self.vocab_size - 1
        if second not in (None, first - 1):
            raise ValueError(
                f"In {self.path}, <extra_id_0> has the id {first} and <extra_id_1> has the id "
                f"{second}. Tasks and objectives with sentinels need descending ids, as in T5. Use "
                "another vocabulary, or an objective without sentinels."
            )
        return first

    def is_text(self, id: int) -> bool:
        return id not in self.backend.special

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without the ids in `around_inputs`.

        Raises:
          ValueError: if the model lacks a token in the text; see also `utf8`.
        """
        utf8(text)
        return self.backend.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids before the first EOS, without special tokens."""
        return self.backend.decode(until(ids, self.eos_id))

    def token_bytes(self, size: int, *, first: bool) -> list[bytes]:
        return self.backend.token_bytes(size, first=first)

    def contents(self) -> bytes:
        """Returns bytes that identify how the vocabulary encodes and decodes texts.

        Settings that do not change the ids or the texts, such as ``model_max_length``, are not
        included.
        """
        first, last = self.around_inputs
        settings: list[object] = [
            first,
            last,
            self.eos_id,
            self.backend.splits_special,
            self.backend.added,
        ]
        if self.size is not None:
            settings.append(self.size)
        return self._files[TOKENIZER] + json.dumps(settings).encode()


AnyVocabulary: TypeAlias = Bytes | SentencePiece | Tokenizer
"""A vocabulary that a run can have."""


def is_tokenizer(name: str) -> bool:
    """Returns whether a vocabulary's name is the path of a JSON file."""
    return storage_path(name).suffix == ".json"


@functools.lru_cache(maxsize=8)
def _load_backend(
    path: pathlib.Path, files: Sequence[tuple[str, bytes]], size: int | None
) -> Backend:
    """Reads a tokenizer; see `Backend` for the arguments. Equal files are read only once."""
    return Backend(path, dict(files), size=size)
