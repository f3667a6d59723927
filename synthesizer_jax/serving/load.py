"""Loads and runs the exported model that is in the same directory as this file.

The command ``python load.py "a text"`` prints the text that the model generates. Python programs
can use `Model`.
"""

import hashlib
import importlib
import itertools
import json
import pathlib
import sys

import jax.export
import numpy as np


class Model:
    """An exported model, loaded from a directory of programs and parameters.

    The file ``model.json`` in the directory describes the programs.

    Attributes:
      info: the contents of ``model.json``.
      parameters: the parameters of the model by name, on the default device.
      programs: the programs by name, as Python functions. The first argument of every function is
        `parameters`.
      pieces: the SentencePiece processor, or `None` if there is no SentencePiece model.
      tokenizer: the tokenizer of the library ``tokenizers``, or `None` if the library is not used.
    """

    def __init__(self, directory: pathlib.Path):
        """Loads the model.

        Args:
          directory: the directory of the exported model.

        Raises:
          ValueError: a file is damaged.
        """
        self.info = json.loads((directory / "model.json").read_text("utf-8"))
        self.parameters = {}
        self.programs = {}
        self.pieces = None
        self.tokenizer = None

        for file, checksum in self.info["sha256"].items():
            # The files are memory-mapped instead of read, because the parameters may be large.
            data = np.memmap(directory / file, np.uint8, "r")
            if hashlib.sha256(data.data).hexdigest() != checksum:
                raise ValueError(f"{directory / file} is damaged. Copy it again.")
            if file.endswith(".stablehlo"):
                program = jax.export.deserialize(bytearray(data)).call
                self.programs[file.removesuffix(".stablehlo")] = jax.jit(program)

        data = np.memmap(directory / "parameters.safetensors", np.uint8, "r")
        # A safetensors file begins with the length of its header. The header contains the position
        # of each tensor in the file.
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, tensor in json.loads(data[8:start].tobytes()).items():
            x = data[start:][slice(*tensor["data_offsets"])].view(np.float32)
            self.parameters[name] = jax.device_put(x.reshape(tensor["shape"]))

        if self.info["vocabulary"] == "sentencepiece":
            library = importlib.import_module("sentencepiece")
            self.pieces = library.SentencePieceProcessor(str(directory / "vocabulary.model"))
        if self.info["vocabulary"] == "tokenizers":
            library = importlib.import_module("tokenizers")
            self.tokenizer = library.Tokenizer.from_file(str(directory / "tokenizer.json"))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.tokenizer.encode_special_tokens = self.info["splits_special"]

    def generate(self, texts: list[str]) -> list[str]:
        """Returns the text that the model generates for each input.

        If the model continues texts, the result is the continuation of each input.

        Args:
          texts: a list of inputs.

        Raises:
          ValueError: `texts` is not a list of strings, or the model continues texts and a text is
            too long.
        """
        inputs = self.tokens(texts)
        # The programs need at least one input.
        if not texts:
            return []
        tokens, _ = self.programs["generate"](self.parameters, inputs)
        return [self.text(row) for row in tokens.tolist()]

    def tokens(self, texts: list[str], limit: int | None = None) -> np.ndarray:
        """Converts texts to token ids, padded to the same length.

        Inputs are truncated to the limit, and BOS or EOS is added as in training. If the model
        continues texts, neither BOS nor EOS is added, and inputs are not truncated.

        Args:
          texts: a list of texts.
          limit: the largest number of tokens of an input. `None` means the limit with which the
            programs were exported.

        Returns:
          The ids, ``[texts, n]`` int32. If the programs take any length, n is the smallest power of
          two that is large enough, so that programs are compiled for only a few lengths. If the
          lengths of the programs are fixed, n is the limit.

        Raises:
          ValueError: `texts` is not a list of strings, or the model continues texts and a text is
            longer than the limit.
        """
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError('The texts must be a list of strings, such as ["a text"].')
        limit = limit or self.info["limits"]["inputs_length"]
        # `first` and `last` are the ids before and after every input, such as [] and [EOS].
        first, last = self.info["around_inputs"]
        rows = [[*first, *self._ids(text)] for text in texts]
        longest = max(map(len, rows), default=0)
        if self.info["continues"] and longest > limit:
            raise ValueError(
                f"A text to continue has {longest} tokens, but the programs read at most {limit}. "
                "Shorten the text, or export the model with a larger --inputs-length."
            )
        rows = [[*row[: limit - len(last)], *last] for row in rows]

        if self.info["lengths"] == "fixed":
            n = limit
        else:
            longest = max(map(len, rows), default=1)
            power = 1 << max(longest - 1, 0).bit_length()  # the smallest power of two >= longest
            n = min(limit, power)
        padding = self.info["ids"]["padding"]
        padded = [row + [padding] * (n - len(row)) for row in rows]
        return np.array(padded, np.int32).reshape(len(rows), n)

    def _ids(self, text: str) -> list[int]:
        """Returns the ids of the tokens or bytes of a text. Byte b has the id b + 3."""
        # `str.encode` raises a `ValueError` if the text contains lone surrogates.
        data = text.encode()
        if self.pieces is not None:
            return list(self.pieces.encode(text))
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return [byte + 3 for byte in data]

    def text(self, ids: list[int]) -> str:
        """Returns the text of the ids before the first padding id, EOS or other end token."""
        special = self.info["ids"]
        ends = {special["end"], *special["also_end"], special["padding"]}
        ids = list(itertools.takewhile(lambda i: i not in ends, ids))
        if self.pieces is not None:
            # The model may have more token ids than the SentencePiece model has pieces.
            unknown = self.pieces.unk_id()
            return str(self.pieces.decode([i if i < len(self.pieces) else unknown for i in ids]))
        if self.tokenizer is not None:
            ids = [i for i in ids if i not in self.info["special"]]
            return str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return bytes(i - 3 for i in ids if 2 < i < 259).decode("utf-8", "ignore")


if __name__ == "__main__":
    texts = sys.argv[1:] or sys.exit('Give one or more texts: python load.py "a text"')
    model = Model(pathlib.Path(__file__).parent)
    if "generate" not in model.programs:
        sys.exit("This model only encodes. Import the class Model from this file to use it.")
    try:
        print(*model.generate(texts), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
