"""Compares every kind of folder that is taken with transformers, on tiny random models.

    python benchmarks/pretrained.py --page docs/finetune.md

It runs in the environment of `make bench-peers`, or one with version 4. PEFT is optional.
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

KINDS: dict[str, dict[str, Any]] = {k: TINY | x for k, x in FAMILIES.items() if k != "efficient"}
KINDS["MADLAD-400"] = KINDS["T5 1.1, FLAN-T5"] | gemma.MADLAD
KINDS["CodeT5"] = KINDS["T5 1.0"] | gemma.CODET5
KINDS |= {f"T5Gemma, {k}": x | {"model_type": "t5gemma"} for k, x in gemma.CONFIGS.items()}
TEXTS, LENGTH = ["what is it", "a longer text, of two parts"], 12


def write_byte_level(folder: pathlib.Path) -> None:
    """Writes a small tokenizer such as CodeT5's: a BPE of bytes, sentinels last."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    trainer = tokenizers.ByteLevelBPETokenizer()
    texts, size = (gemma.DOCS / "training.md").read_text().splitlines(), gemma.VOCAB_SIZE - 100
    trainer.train_from_iterator(texts, size, special_tokens=special, show_progress=False)
    files = dict(zip(("vocab", "merges"), trainer.save_model(str(folder)), strict=True))
    sentinels = [
        tokenizers.AddedToken(f"<extra_id_{i}>", lstrip=True) for i in reversed(range(100))
    ]
    pieces = {
        "vocab_file": files["vocab"],
        "merges_file": files["merges"],
    } | files  # of versions 4 and 5
    theirs = transformers.RobertaTokenizer(**pieces, additional_special_tokens=sentinels)
    theirs.save_pretrained(folder)


def make(folder: pathlib.Path, kind: str) -> None:
    """Writes a model of transformers with its tokenizer."""
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
    """Returns a row of the table; the model is exported to the folder ``back``."""
    loaded, back = load(folder), folder / "back"
    model, variables, _ = loaded
    theirs = load_reference(folder, model) if theirs is None else theirs
    back.mkdir()
    write_folder(back, *loaded)
    found: dict[str, Any] = {"kind": kind, "in": deviation(theirs, model, variables)}
    found["out"] = deviation(load_reference(back, model), model, variables)
    if (file := folder / SAFETENSORS).exists():  # not of PEFT
        first, second = load_file(file), load_file(back / SAFETENSORS)
        found["bits"] = ("no", "yes")[
            all(np.array_equal(first[name], x) for name, x in second.items())
        ]
    if not isinstance(model, Encoder):
        umt5 = (
            theirs.config.model_type == "umt5"
        )  # for which AutoTokenizer of version 5 has no class
        tokenizer = (
            transformers.ByT5Tokenizer if umt5 else transformers.AutoTokenizer
        ).from_pretrained(back)
        settings = {"max_new_tokens": LENGTH, "do_sample": False, "use_cache": False}
        inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
        expected = [theirs.generate(**x, **settings)[0, 1:].tolist() for x in inputs]
        texts = generate(loaded, TEXTS, max_length=LENGTH)
        found["texts"] = ("no", "yes")[texts == list(map(loaded.vocabulary.decode, expected))]
    return found


def rows(scratch: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows; folders are made in the directory `scratch`."""
    if transformers.__version__.startswith("4."):
        # Its windows in encoders reach one token less far, and it multiplies matrices that do not
        # fit.
        KINDS["T5Gemma, balanced"] |= {
            "encoder": gemma.CONFIGS["balanced"]["encoder"] | {"sliding_window": 64}
        }
        del KINDS["T5Gemma, unbalanced"]
    for kind in KINDS:
        make(folder := scratch / kind, kind)
        yield row(kind, folder)
    for kind in filter(KINDS.get, ("T5 1.1, FLAN-T5", "umT5", "T5Gemma, unbalanced")):
        whole, folder = (
            scratch / kind,
            scratch / kind / "text_encoder",
        )  # as pipelines of diffusers have it
        cls = getattr(transformers, CLASSES[KINDS[kind]["model_type"]] + "EncoderModel")
        config = transformers.AutoConfig.from_pretrained(whole, is_encoder_decoder=False)
        cls.from_pretrained(whole, config=config).save_pretrained(folder)
        (whole / "tokenizer").symlink_to(whole)
        yield row(f"encoder of {kind}", folder)
    if importlib.util.find_spec("peft"):
        peft, folder, base = (
            importlib.import_module("peft"),
            scratch / "peft",
            scratch / "T5 1.1, FLAN-T5",
        )
        lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(
            transformers.AutoModelForSeq2SeqLM.from_pretrained(base), lora
        )
        adapted.save_pretrained(folder)
        yield row("LoRA of PEFT", folder, adapted.base_model.model)


if __name__ == "__main__":
    options = report.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(rows(pathlib.Path(directory)))
    columns = {
        "kind": "folder",
        "in": "difference after reading|.0e",
        "out": "difference after exporting|.0e",
    }
    columns |= {"bits": "same bits", "texts": "same greedy texts"}
    facts = {"transformers": transformers.__version__, "torch": torch.__version__}
    name = f"folders {facts['transformers'].partition('.')[0]}"
    report.write(
        name, report.table(found, columns), result={"rows": found}, options=options, facts=facts
    )
