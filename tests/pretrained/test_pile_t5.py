"""Tests a model whose tokenizer needs the library ``tokenizers``, from reading to serving.

The model is like Pile-T5, which is a umT5 with the tokenizer of LLaMA. A user has added tokens.
"""

import importlib.util
import json
import shutil

import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.tokenizer_json import Tokenizer
from synthesizer_jax.pretrained import encode, generate, load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.training.run_directory import check_same_run, load_experiment, save_run
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors
from tests.pretrained.tokenizers import write_tokenizer

CONFIG = TINY | FAMILIES["umT5"] | {"vocab_size": 640, "eos_token_id": 2}
TEXTS = ["a naïve <sep> text", "the loss"]


@pytest.fixture(scope="module")
def pile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pile") / "pile"
    make_folder(folder, CONFIG, make_tensors(CONFIG))
    write_tokenizer(folder, "LLaMA")
    (folder / "special_tokens_map.json").write_text('{"eos_token":\n "</s>"}')
    return folder


@pytest.fixture(scope="module")
def run(pile, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "run"
    convert_checkpoint(pile, directory)
    return directory


def test_the_files_of_the_tokenizer_are_kept_unchanged(pile, run, tmp_path):
    export_run(run, tmp_path / "back")
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for folder in (run, tmp_path / "back"):
        assert [(folder / name).read_bytes() for name in names] == [
            (pile / name).read_bytes() for name in names
        ]
    # Version 5 of transformers builds a LlamaTokenizer anew, instead of reading its steps.
    card = (tmp_path / "back" / "README.md").read_text(encoding="utf-8")
    assert "transformers.AutoTokenizer.from_pretrained(name)" in card
    loaded, again = load(pile), load(tmp_path / "back")
    assert generate(loaded, TEXTS, max_length=6) == generate(again, TEXTS, max_length=6)
    assert loaded.vocabulary.digest == load(run).vocabulary.digest


def test_an_encoder_reads_what_the_post_processor_makes(pile, tmp_path):
    """The tokenizer may be in a folder beside the model, as in AuraFlow."""
    shutil.copytree(pile, tmp_path / "text_encoder")
    (tmp_path / "tokenizer").mkdir()
    for file in (tmp_path / "text_encoder").glob("*token*.json"):
        file.rename(tmp_path / "tokenizer" / file.name)
    loaded = load(tmp_path, subfolder="text_encoder", encoder_only=True)
    (states, _) = encode(loaded, TEXTS, pool=False)
    assert len(states) == len(loaded.vocabulary.encode(TEXTS[0])) + 1
    assert loaded.vocabulary.around_inputs == ([], [2])


def test_a_run_keeps_its_tokenizer(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    experiment = replace(load_experiment(copy), vocabulary=Tokenizer(str(copy / "tokenizer.json")))
    check_same_run(experiment, tmp_path / "new")
    write_tokenizer(tmp_path / "other", "LLaMA", added=False)
    other = replace(experiment, vocabulary=Tokenizer(str(tmp_path / "other" / "tokenizer.json")))
    save_run(experiment, tmp_path / "new")
    assert (tmp_path / "new" / "special_tokens_map.json").is_file()
    # The directory holds no checkpoint, so another vocabulary may replace the old one.
    save_run(other, tmp_path / "new")
    assert not (tmp_path / "new" / "special_tokens_map.json").exists()
    saved = load_experiment(tmp_path / "new")
    assert saved.vocabulary == Tokenizer("tokenizer.json")


def test_programs_read_and_write_the_same_texts(run, tmp_path):
    export_run(run, tmp_path / "programs", to="stablehlo", inputs_length=16, max_length=5)
    spec = importlib.util.spec_from_file_location("loader", tmp_path / "programs" / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model(tmp_path / "programs")
    loaded = load(run)
    ids = loaded.vocabulary.encode(TEXTS[0])
    np.testing.assert_array_equal(model.tokens(TEXTS)[0, : len(ids) + 1], [*ids, 2])
    assert model.generate(TEXTS) == generate(loaded, TEXTS, max_length=5, inputs_length=16)


def test_more_ids_than_rows_give_one_sentence(pile, tmp_path):
    folder = tmp_path / "small"
    config = CONFIG | {"vocab_size": 604}
    make_folder(folder, config, make_tensors(config))
    write_tokenizer(folder, "LLaMA")
    for read in (load, lambda folder: convert_checkpoint(folder, tmp_path / "run")):
        with pytest.raises(
            ValueError, match=r"has 605 ids, but the embedding of .* 604 rows. .* resize_token_emb"
        ):
            read(folder)
    assert not (tmp_path / "run").exists()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 1}))
    make_folder(folder, CONFIG | {"eos_token_id": 1}, make_tensors(CONFIG))
    write_tokenizer(folder, "LLaMA")
    with pytest.raises(ValueError, match=rf"EOS id 2, but model\.ids\.end is 1 in {folder}\. Set"):
        load(folder)


def test_prepared_data_is_found_again(pile, run, tmp_path):
    """Data that was prepared with the folder's file is read by runs that hold a copy of it."""
    first = PreparedTasks(tmp_path, Tokenizer(str(pile / "tokenizer.json")))
    assert first.root == PreparedTasks(tmp_path, load(run).vocabulary).root
