"""Runs the programs beside it; ``python load.py "a text"`` prints what the model generates."""

import hashlib
import importlib
import json
import pathlib
import sys

import jax.export
import numpy as np


class Model:
    """The model in a directory, whose ``model.json`` describes its programs."""

    def __init__(self, directory: pathlib.Path):
        self.info = json.loads((directory / "model.json").read_text("utf-8"))
        self.parameters, self.programs, self.pieces = {}, {}, None
        for file, checksum in self.info["sha256"].items():
            data = np.memmap(directory / file, np.uint8, "r")
            if hashlib.sha256(data.data).hexdigest() != checksum:
                raise ValueError(f"{directory / file} is damaged; copy it again")
            if file.endswith(".stablehlo"):
                program = jax.export.deserialize(bytearray(data)).call
                self.programs[file.removesuffix(".stablehlo")] = jax.jit(program)
        data = np.memmap(directory / "parameters.safetensors", np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, tensor in json.loads(data[8:start].tobytes()).items():
            x = data[start:][slice(*tensor["data_offsets"])].view(np.float32)
            self.parameters[name] = jax.device_put(x.reshape(tensor["shape"]))
        if self.info["vocabulary"] == "sentencepiece":
            library, path = importlib.import_module("sentencepiece"), directory / "vocabulary.model"
            self.pieces = library.SentencePieceProcessor(str(path))

    def tokens(self, texts: list[str], limit: int) -> np.ndarray:
        """Returns ``[texts, n]`` ids, each with EOS, or BOS; n is a power of two, or the limit."""
        encode = self.pieces.encode if self.pieces else lambda text: [x + 3 for x in text.encode()]
        rows = [encode(text)[: limit - 1] for text in texts]
        n = limit if self.info["lengths"] == "fixed" else 1 << max(map(len, rows)).bit_length()
        padding, (first, last) = self.info["ids"]["padding"], self.info["around_inputs"]
        rows = [[*first, *r, *last] + [padding] * (min(limit, n) - len(r) - 1) for r in rows]
        return np.array(rows, np.int32)

    def text(self, ids: list[int]) -> str:
        """Returns the text of the ids before EOS."""
        end = self.info["ids"]["end"]
        ids = ids[: [*ids, end].index(end)]
        if p := self.pieces:
            return str(p.decode([i if i < len(p) else p.unk_id() for i in ids]))
        return bytes(i - 3 for i in ids if 2 < i < 259).decode("utf-8", "ignore")


if __name__ == "__main__":
    texts = sys.argv[1:] or sys.exit('give one or more texts: python load.py "a text"')
    model = Model(pathlib.Path(__file__).parent)
    generate = model.programs.get("generate") or sys.exit("this model encodes only: import Model")
    inputs = model.tokens(texts, model.info["limits"]["inputs_length"])
    print(*map(model.text, generate(model.parameters, inputs)[0].tolist()), sep="\n")
