"""Checkpoints of transformers, of T5X and of this package's runs, opened to be loaded or converted."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.typing import Dtype, PyTree
from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.models import EncoderDecoder, unroll
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface.folder import open_folder
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.peft import base_of, is_adapter, with_adapters
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from synthesizer_jax.pretrained.loading import open_run
from synthesizer_jax.pretrained.t5x import is_checkpoint, open_checkpoint
from synthesizer_jax.runs.saved import find_checkpoint, is_run, load_model
from synthesizer_jax.sharding import replicate_to_devices


@contextlib.contextmanager
def open_pretrained(
    source: pathlib.Path,
    *,
    revision: str | None = None,
    vocabulary: Bytes | SentencePiece | None = None,
    compare: bool = True,
    encoder_only: bool = False,
) -> Iterator[Pretrained]:
    """Opens a checkpoint of another library, or a run; parameters are read inside the context.

    That is a folder of Hugging Face transformers, or of PEFT with adapters of one, a checkpoint of T5X, a
    file or a directory, ``RUN`` or ``RUN/checkpoints/STEP``, or a model of the Hugging Face hub by its
    name; for `revision` see `find_folder`, for the options `open_folder`. The tokenizer of a folder is not
    read where a `vocabulary` is given.
    """
    name, source = source, find_folder(source, revision)
    origin = str(absolute(source)) if name == source else f"{name}@{source.name}"
    if is_adapter(source):
        with open_pretrained(
            base_of(source), vocabulary=vocabulary, compare=compare, encoder_only=encoder_only
        ) as pretrained:
            base = pretrained.origin
            yield with_adapters(source, pretrained)._replace(origin=f"{origin}, adapters of {base}")
        return
    if encoder_only and (is_run(source) or source.is_file() or is_checkpoint(source)):
        raise ValueError(
            f"encoder_only=True is for folders of transformers, and {source} is none; leave it out: encode "
            "runs the encoder alone"
        )
    if is_run(source):
        yield _open_run(source)._replace(origin=origin)
        return
    if source.is_file() or is_checkpoint(source):
        yield open_checkpoint(source)._replace(origin=origin)
        return
    with tempfile.TemporaryDirectory() as scratch:
        pretrained = open_folder(source, compare=compare, encoder_only=encoder_only)
        ids, rows = pretrained.model.ids, pretrained.model.vocab_size
        if not all(0 <= i < rows for i in (ids.padding, ids.start, *ids.ends)):
            raise ValueError(f"{source} has {rows} ids, and not all of {ids}; correct its config.json")
        found = vocabulary or read_vocabulary(source, pathlib.Path(scratch), ids=ids, rows=rows)
        yield pretrained._replace(vocabulary=found, origin=origin)


def _open_run(source: pathlib.Path) -> Pretrained:
    """Reads the model of a run; raises a `ValueError` if it cannot be converted."""
    model = load_model(find_checkpoint(source)[0]).model
    if not isinstance(model, EncoderDecoder):
        raise ValueError(
            f"{source} holds a {type(model).__name__}; only EncoderDecoder models can be converted"
        )
    (_, vocabulary), variables = open_run(source)
    if variables.get("constants"):
        raise ValueError(
            f"{source} has tables that are not trained, such as a Fixed Random's; only models of trained "
            "parameters alone are converted"
        )
    params = jax.tree.map(Unread.of, variables["params"])
    return Pretrained(unroll(model), params, vocabulary)


def read_params(pretrained: Pretrained, mesh: Mesh | None = None, dtype: Dtype | None = None) -> PyTree:
    """Reads the parameters of an open checkpoint one by one, to one device or sharded over a mesh.

    `dtype` None is float32.
    """
    if mesh is None:
        return jax.tree.map(lambda x: jnp.asarray(x.read(dtype)), pretrained.params)
    layout = layout_over(pretrained.model, pretrained.model.example(1, 1), mesh)["params"]
    return jax.tree.map(
        lambda x, to: replicate_to_devices(x.read(dtype), to.sharding), pretrained.params, layout
    )
