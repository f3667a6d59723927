"""Compares our readers of model folders with transformers, using tiny random models.

    python benchmarks/pretrained.py --page docs/finetune.md

The script runs in the environment of `make bench-peers`, or in an environment with version 4 of
transformers. The package PEFT is optional.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import report
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from synthesizer_jax.models import Encoder
from synthesizer_jax.pretrained import generate, load
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS
from tests.peers.test_transformers import CLASSES, deviation, load_reference, make_model
from tests.pretrained import gemma
from tests.pretrained.folders import FAMILIES, TINY

KINDS: dict[str, dict[str, Any]] = {
    **{kind: TINY | config for kind, config in FAMILIES.items() if kind != "efficient"},
    "MADLAD-400": TINY | FAMILIES["T5 1.1, FLAN-T5"] | gemma.MADLAD,
    "CodeT5": TINY | FAMILIES["T5 1.0"] | gemma.CODET5,
    **{
        f"T5Gemma, {kind}": config | {"model_type": "t5gemma"}
        for kind, config in gemma.CONFIGS.items()
    },
}
"""The configurations of transformers by the kinds of folders."""

TEXTS = ["what is it", "a longer text, of two parts"]
LENGTH = 12
"""The maximum number of tokens that are generated for a text."""


def write_byte_level(folder: pathlib.Path) -> None:
    """Writes a small tokenizer like CodeT5's, a byte-level BPE with the sentinels at the end."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    trainer = tokenizers.ByteLevelBPETokenizer()
    texts = (gemma.DOCS / "training.md").read_text().splitlines()
    size = gemma.VOCAB_SIZE - 100
    trainer.train_from_iterator(texts, size, special_tokens=special, show_progress=False)
    vocab, merges = trainer.save_model(str(folder))
    sentinels = [
        tokenizers.AddedToken(f"<extra_id_{i}>", lstrip=True) for i in reversed(range(100))
    ]
    # Version 4 of transformers reads the first two arguments. Version 5 reads the other arguments.
    pieces = {"vocab_file": vocab, "merges_file": merges, "vocab": vocab, "merges": merges}
    theirs = transformers.RobertaTokenizer(**pieces, additional_special_tokens=sentinels)
    theirs.save_pretrained(folder)


def make(folder: pathlib.Path, kind: str) -> None:
    """Writes a folder with a random transformers model and its tokenizer."""
    config = KINDS[kind]
    model = make_model(config)
    if "encoder" not in config and not config["tie_word_embeddings"]:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(folder)
    if kind == "CodeT5":
        write_byte_level(folder)
    elif config["vocab_size"] == gemma.VOCAB_SIZE:
        gemma.write_tokenizer(folder, gemma="encoder" in config)
    else:
        transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)


def row(kind: str, folder: pathlib.Path, theirs: Any = None) -> dict[str, Any]:
    """Returns a row of the table.

    Args:
      kind: the kind of the folder.
      folder: the folder of the model. The model is exported to the subfolder ``back``.
      theirs: the model of transformers, by default the model in the folder.
    """
    loaded = load(folder)
    model, variables, _ = loaded
    if theirs is None:
        theirs = load_reference(folder, model)
    back = folder / "back"
    back.mkdir()
    write_folder(back, *loaded)
    found: dict[str, Any] = {
        "kind": kind,
        "in": deviation(theirs, model, variables),
        "out": deviation(load_reference(back, model), model, variables),
    }

    file = folder / SAFETENSORS
    if file.exists():  # PEFT's folders do not have this file
        first, second = load_file(file), load_file(back / SAFETENSORS)
        same_bits = all(np.array_equal(first[name], x) for name, x in second.items())
        found["bits"] = "yes" if same_bits else "no"

    if not isinstance(model, Encoder):
        tokenizer_class = transformers.AutoTokenizer
        if theirs.config.model_type == "umt5":  # AutoTokenizer of version 5 does not know umT5
            tokenizer_class = transformers.ByT5Tokenizer
        tokenizer = tokenizer_class.from_pretrained(back)
        settings = {"max_new_tokens": LENGTH, "do_sample": False, "use_cache": False}
        inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
        ids = [theirs.generate(**x, **settings)[0, 1:].tolist() for x in inputs]
        expected = [loaded.vocabulary.decode(row) for row in ids]
        texts = generate(loaded, TEXTS, max_length=LENGTH)
        found["texts"] = "yes" if texts == expected else "no"
    return found


def rows(scratch: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table, and makes the folders in the directory `scratch`."""
    if transformers.__version__.startswith("4."):
        # In version 4 of transformers, the attention windows of encoders reach one token less in
        # each direction, so configure a longer window. For an unbalanced model, version 4 creates
        # matrices whose shapes do not match, so leave it out.
        encoder = gemma.CONFIGS["balanced"]["encoder"] | {"sliding_window": 64}
        KINDS["T5Gemma, balanced"] = KINDS["T5Gemma, balanced"] | {"encoder": encoder}
        del KINDS["T5Gemma, unbalanced"]
    for kind in KINDS:
        make(scratch / kind, kind)
        yield row(kind, scratch / kind)
    for kind in ("T5 1.1, FLAN-T5", "umT5", "T5Gemma, unbalanced"):
        if kind not in KINDS:
            continue
        whole = scratch / kind
        folder = whole / "text_encoder"  # as in diffusers' pipelines
        cls = getattr(transformers, CLASSES[KINDS[kind]["model_type"]] + "EncoderModel")
        config = transformers.AutoConfig.from_pretrained(whole, is_encoder_decoder=False)
        cls.from_pretrained(whole, config=config).save_pretrained(folder)
        (whole / "tokenizer").symlink_to(whole)
        yield row(f"encoder of {kind}", folder)
    if importlib.util.find_spec("peft"):
        peft = importlib.import_module("peft")
        folder = scratch / "peft"
        base = scratch / "T5 1.1, FLAN-T5"
        lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(
            transformers.AutoModelForSeq2SeqLM.from_pretrained(base), lora
        )
        adapted.save_pretrained(folder)
        yield row("LoRA of PEFT", folder, adapted.base_model.model)


def main() -> None:
    """Compares all kinds of folders, and writes the table."""
    options = report.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(rows(pathlib.Path(directory)))
    columns = {
        "kind": "folder",
        "in": "difference after reading|.0e",
        "out": "difference after exporting|.0e",
        "bits": "same bits",
        "texts": "same greedy texts",
    }
    facts = {"transformers": transformers.__version__, "torch": torch.__version__}
    version = transformers.__version__.partition(".")[0]
    table = report.table(found, columns)
    report.write(f"folders {version}", table, result={"rows": found}, options=options, facts=facts)


if __name__ == "__main__":
    main()
