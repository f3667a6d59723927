"""Compares our readers of model folders with transformers, using tiny random models.

    python benchmarks/pretrained.py --page docs/finetune.md

The script runs in the environment of `make bench-peers`, or in an environment with version 4 of
transformers. The package PEFT is optional.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import report
import torch
import transformers
from safetensors.numpy import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from synthesizer_jax.models import Encoder
from synthesizer_jax.pretrained import generate, load
from synthesizer_jax.pretrained.huggingface.config import CONFIG
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS
from tests.peers.test_transformers import CLASSES, deviation, load_reference, make_model
from tests.pretrained import gemma, gemma2
from tests.pretrained.folders import FAMILIES, TINY
from tests.pretrained.tokenizers import code_texts, random_texts, real_texts, write_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    **{kind: TINY | config for kind, config in FAMILIES.items() if kind != "efficient"},
    "MADLAD-400": TINY | FAMILIES["T5 1.1, FLAN-T5"] | gemma.MADLAD,
    "CodeT5": TINY | FAMILIES["T5 1.0"] | gemma.CODET5,
    "Pile-T5": TINY | FAMILIES["umT5"] | {"vocab_size": 640, "eos_token_id": 2},
    "T5 with added tokens": TINY | FAMILIES["T5 1.0"] | {"vocab_size": 640},
    **{
        f"T5Gemma, {kind}": config | {"model_type": "t5gemma"}
        for kind, config in gemma.CONFIGS.items()
    },
    "T5Gemma 2": gemma2.CONFIG,
}
"""The configurations of transformers by the kinds of folders."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA of PEFT": {"target_modules": "all-linear"},
    "LoRA of PEFT, patterns": {
        "target_modules": r".*\.(q|o|wo)",
        "rank_pattern": {"q": 2, r"decoder.*\.wo": 5},
        "alpha_pattern": {r"block\.1\..*": 4},
        "use_rslora": True,
    },
    "LoRA of PEFT, embeddings": {"target_modules": ["embed_tokens", "lm_head", "v"]},
    "DoRA of PEFT": {"target_modules": "all-linear", "use_dora": True},
    "tokens of PEFT": {"target_modules": ["v"], "trainable_token_indices": [9, 40]},
    "LoRA of PEFT, T5Gemma 2": {"target_modules": "all-linear"},
    "DoRA and tokens of PEFT, T5Gemma 2": {
        "target_modules": "all-linear",
        "use_dora": True,
        "trainable_token_indices": [9, 40],
    },
}
"""The options of adapters by their kinds. See `base_of_adapters` for the bases."""

TEXTS = ["what is it", "a longer text, of two parts"]
LIBRARY = {"CodeT5": "CodeT5", "Pile-T5": "LLaMA", "T5 with added tokens": "T5"}
"""The tokenizers of the kinds whose tokenizer needs the library ``tokenizers``."""

TOKENIZERS = {
    "LLaMA": "umt5",
    "LLaMA, legacy": "umt5",
    "T5": "t5",
    "CodeT5": "t5",
    "Gemma": "t5gemma",
    "WordPiece": "t5",
}
"""The ``model_type`` of the folder of every kind of tokenizer."""

LENGTH = 12
"""The maximum number of tokens that are generated for a text."""


def make(folder: pathlib.Path, kind: str) -> None:
    """Writes a folder with a random transformers model and its tokenizer."""
    config = KINDS[kind]
    model = make_model(config)
    if "encoder" not in config and not config["tie_word_embeddings"]:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(folder)
    if kind in LIBRARY:
        write_tokenizer(folder, LIBRARY[kind], added=kind != "CodeT5")
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
        # AutoTokenizer of version 5 does not know a umT5's ByT5Tokenizer.
        if theirs.config.model_type == "umt5" and kind not in LIBRARY:
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
        del KINDS["T5Gemma, unbalanced"], KINDS["T5Gemma 2"]
    for kind in KINDS:
        make(scratch / kind, kind)
        yield row(kind, scratch / kind)
    for kind in ("T5 1.1, FLAN-T5", "umT5", "T5Gemma, unbalanced", "T5Gemma 2"):
        if kind not in KINDS:
            continue
        whole = scratch / kind
        folder = whole / "text_encoder"  # as in diffusers' pipelines
        if kind == "T5Gemma 2":
            seq2seq = transformers.AutoModelForSeq2SeqLM.from_pretrained(whole)
            seq2seq.get_encoder().save_pretrained(folder)
        else:
            cls = getattr(transformers, CLASSES[KINDS[kind]["model_type"]] + "EncoderModel")
            config = transformers.AutoConfig.from_pretrained(whole, is_encoder_decoder=False)
            cls.from_pretrained(whole, config=config).save_pretrained(folder)
        (whole / "tokenizer").symlink_to(whole)
        yield row(f"encoder of {kind}", folder)
    if importlib.util.find_spec("peft"):
        for kind in ADAPTERS:
            base = base_of_adapters(kind)
            if base not in KINDS:
                continue
            adapted = adapt(scratch / base, kind)
            adapted.save_pretrained(scratch / kind)
            yield row(kind, scratch / kind, adapted.base_model.model)


def base_of_adapters(kind: str) -> str:
    """Returns the kind of the base model of adapters: a T5Gemma 2 if the name says so, or T5 1.1.

    The argument `kind` is a name in `ADAPTERS`.
    """
    return "T5Gemma 2" if kind.endswith("T5Gemma 2") else "T5 1.1, FLAN-T5"


def adapt(base: pathlib.Path, kind: str) -> Any:
    """Returns a model of PEFT with random adapters of a kind.

    The adapters are the same in every call. Large updates would make the logits of a model very
    sensitive to rounding.

    Args:
      base: the folder of the base model.
      kind: a name in `ADAPTERS`.
    """
    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, init_lora_weights=False, **ADAPTERS[kind])
    adapted = peft.get_peft_model(transformers.AutoModelForSeq2SeqLM.from_pretrained(base), config)
    parameters = dict(adapted.named_parameters())
    for name, parameter in parameters.items():
        # Magnitudes and tokens start with the values of the base, so change them.
        if "magnitude" in name or "tokens_delta" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
        # A folder of transformers has only one embedding, so both stacks need the same updates.
        if ".encoder.embed_tokens" in name:
            parameter.data = parameters[name.replace(".encoder.", ".decoder.")].data.clone()
    return adapted


def tokenizer_rows(scratch: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table of tokenizers, which compares token ids with transformers.

    Args:
      scratch: the directory in which the folders of the tokenizers are made.
    """
    texts = [*random_texts(4000), *code_texts(), *real_texts()]
    for kind, model_type in TOKENIZERS.items():
        folder = scratch / f"tokenizer of {kind}"
        write_tokenizer(folder, kind)
        (folder / CONFIG).write_text(json.dumps({"model_type": model_type}))
        ours = read_vocabulary(folder, scratch)
        assert ours is not None
        back = folder / "back"
        back.mkdir()
        for name, content in ours.files().items():
            (back / name).write_bytes(content)
        (back / CONFIG).write_text(json.dumps({"model_type": model_type}))

        first, last = ours.around_inputs
        ids = [[*first, *ours.encode(text), *last] for text in texts]
        found: dict[str, Any] = {"kind": kind, "texts": len(texts)}
        for column, place in (("in", folder), ("out", back)):
            theirs = transformers.AutoTokenizer.from_pretrained(place)
            same = sum(theirs(text).input_ids == x for text, x in zip(texts, ids, strict=True))
            found[column] = same
        yield found


def main() -> None:
    """Compares all kinds of folders and of tokenizers, and writes the tables."""
    options = report.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(rows(pathlib.Path(directory)))
        tokenizers = list(tokenizer_rows(pathlib.Path(directory)))
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
    columns = {
        "kind": "tokenizer",
        "texts": "texts|,",
        "in": "same ids|,",
        "out": "same ids after exporting|,",
    }
    table = report.table(tokenizers, columns)
    result = {"rows": tokenizers}
    report.write(f"tokenizers {version}", table, result=result, options=options, facts=facts)


if __name__ == "__main__":
    main()
