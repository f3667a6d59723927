"""Opens checkpoints of transformers, of T5X and of this package's runs.

`load` and `convert_checkpoint` both use it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
from jax.sharding import Mesh

from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.typing import Dtype, PyTree
from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.data.tokenizer_json import AnyVocabulary
from synthesizer_jax.models import EncoderDecoder, unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.from_run import open_run
from synthesizer_jax.pretrained.huggingface.config import CONFIG
from synthesizer_jax.pretrained.huggingface.folder import open_folder
from synthesizer_jax.pretrained.huggingface.hub import locate
from synthesizer_jax.pretrained.huggingface.peft import base_of, is_adapter, with_adapters
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS, TORCH
from synthesizer_jax.pretrained.t5x import is_checkpoint, open_checkpoint
from synthesizer_jax.runs.saved import find_checkpoint, is_run, load_model
from synthesizer_jax.sharding import read_to_devices

_T = TypeVar("_T")


@contextlib.contextmanager
def open_pretrained(
    source: pathlib.Path,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    vocabulary: AnyVocabulary | None = None,
    compare: bool = True,
    encoder_only: bool = False,
    phase: Phase = silent_phase,
) -> Iterator[Pretrained]:
    """Opens a checkpoint of another library, or a run.

    The function is a context manager. Parameters can be read only inside the context.

    Args:
      source: the checkpoint. The source may be a folder of Hugging Face transformers, a folder of
        PEFT with adapters, a T5X checkpoint (a file or a directory), ``RUN`` or
        ``RUN/checkpoints/STEP``, or the name of a model on the Hugging Face hub.
      revision: see `locate`.
      subfolder: see `locate`.
      variant: see `open_folder`.
      vocabulary: a vocabulary to use instead of the folder's tokenizer. If `vocabulary` is given,
        the tokenizer is not read.
      compare: see `open_folder`.
      encoder_only: see `open_folder`.
      phase: a function that reports progress. Downloads are not reported, because
        ``huggingface_hub`` shows its own progress bars.

    Raises:
      FileNotFoundError: if there is no checkpoint.
      ValueError: if the checkpoint is not supported, or if an option does not apply to the
        checkpoint.
    """
    source, origin = locate(source, revision, subfolder=subfolder, variant=variant)
    if source.is_file():
        _check_file(source)
    is_of_t5x = source.is_file() or is_checkpoint(source)

    if variant is not None and (is_adapter(source) or is_run(source) or is_of_t5x):
        raise ValueError(
            f"variant={variant!r} is only for models that transformers has saved, but {source} is "
            "not such a model. Leave the variant out."
        )
    if is_adapter(source):
        with open_pretrained(
            base_of(source),
            vocabulary=vocabulary,
            compare=compare,
            encoder_only=encoder_only,
            phase=phase,
        ) as pretrained:
            base = pretrained.origin
            yield with_adapters(source, pretrained)._replace(
                origin=f"{origin}, adapters of {base}", folder=source
            )
        return

    if encoder_only and (is_run(source) or is_of_t5x):
        raise ValueError(
            f"encoder_only=True is only for folders of transformers, and {source} is not such a "
            "folder. Leave it out, because the function encode runs only the encoder anyway."
        )
    advance = phase(f"opening {origin}", 1)
    if is_run(source):
        pretrained = _open_run(source)
        advance(1)
        yield pretrained._replace(origin=origin, folder=source)
        return
    if is_of_t5x:
        pretrained = open_checkpoint(source)
        advance(1)
        yield pretrained._replace(origin=origin, folder=source)
        return

    with tempfile.TemporaryDirectory() as scratch:
        pretrained = open_folder(
            source, compare=compare, encoder_only=encoder_only, variant=variant
        )
        ids = pretrained.model.ids
        rows = pretrained.model.vocab_size
        if not all(0 <= i < rows for i in (ids.padding, ids.start, *ids.ends)):
            raise ValueError(
                f"{source} has the special ids {ids}, but its embedding has only rows for the ids "
                f"0 to {rows - 1}. Correct its config.json."
            )
        found = vocabulary or read_vocabulary(source, pathlib.Path(scratch), ids=ids, rows=rows)
        if found is not None:
            check_size(found, pretrained.model, source=source)
        advance(1)
        yield pretrained._replace(vocabulary=found, origin=origin, folder=source)


def check_size(vocabulary: AnyVocabulary, model: TokenModel, *, source: pathlib.Path) -> None:
    """Raises a `ValueError` if a vocabulary has more ids than the embedding of a model has rows.

    The error message names `source`, the checkpoint of the model.
    """
    size = vocabulary.build().vocab_size
    if size > model.vocab_size:
        raise ValueError(
            f"The vocabulary has {size} ids, but the embedding of {source} has only "
            f"{model.vocab_size} rows. If tokens were added, call resize_token_embeddings in "
            "transformers, and save the model again. Otherwise, give the model's own vocabulary "
            "with --vocabulary. If the model has no sentinels, add --extra-ids 0."
        )


def _check_file(path: pathlib.Path) -> None:
    """Raises a `ValueError` if the content of a file shows that the file is not a T5X checkpoint.

    The text encoders of diffusion models are often single files of tensors. A single file of
    tensors contains neither the configuration nor the tokenizer of the model, so the user must give
    a folder that contains both.
    """
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(b"GGUF"):
        raise ValueError(
            f"{path} is a GGUF file, which cannot be read. Give the folder of the original "
            "model, in the format of transformers."
        )
    if head.lstrip().startswith(b"{"):
        raise ValueError(f"{path} is a JSON file. Give its folder, which is {path.parent}.")

    # The first 8 bytes of a safetensors file are the length of the header, which follows in JSON.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**32:
        name = SAFETENSORS
    elif head.startswith(_TORCH_FILES):
        name = TORCH
    else:
        return
    if (path.parent / CONFIG).is_file():
        raise ValueError(f"{path} contains only tensors. Give its folder, which is {path.parent}.")
    raise ValueError(
        f"{path} contains only tensors. Put it, with the name {name}, into a folder that has the "
        f"{CONFIG} and the tokenizer of the model, such as those of google/t5-v1_1-xxl. Then give "
        "this folder."
    )


_TORCH_FILES = b"PK\x03\x04", b"\x80\x02"
"""The first bytes of PyTorch files, which are zip archives, or pickles before version 1.6."""


def _open_run(source: pathlib.Path) -> Pretrained:
    """Reads the model of a run.

    Raises:
      ValueError: if the model cannot be converted to a model of other libraries.
    """
    model = load_model(find_checkpoint(source)[0]).model
    if not isinstance(model, EncoderDecoder):
        raise ValueError(
            f"{source} contains a model of the type {type(model).__name__}, but only "
            "EncoderDecoder models can be converted."
        )
    (_, vocabulary), variables = open_run(source)
    if variables.get("constants"):
        raise ValueError(
            f"{source} has tables that are not trained, such as those of a Fixed Random. Only "
            "models in which all parameters are trained can be converted."
        )
    params = jax.tree.map(Unread.of, variables["params"])
    return Pretrained(unroll(model), params, vocabulary)


def read_params(
    pretrained: Pretrained, mesh: Mesh | None = None, dtype: Dtype | None = None
) -> PyTree:
    """Reads the parameters of an open checkpoint. Only a few of them are on the host at a time.

    Args:
      pretrained: the open checkpoint.
      mesh: the mesh over which the parameters are sharded. Each process then reads only what its
        own devices hold. `None` uses one device.
      dtype: the dtype of the parameters. `None` means float32.
    """
    unread, treedef = jax.tree.flatten(pretrained.params)
    if mesh is None:
        # The arrays are created in this thread, because JAX's default device may be set for one
        # thread only.
        reads = [functools.partial(x.read, dtype) for x in unread]
        return jax.tree.unflatten(treedef, [jax.device_put(x) for x in _run_ahead(reads)])

    def read_shards(x: Unread, layout: jax.ShapeDtypeStruct) -> jax.Array:
        """Reads what the devices of this process hold of a parameter."""
        return read_to_devices(lambda part: x.read(dtype, part), layout.shape, layout.sharding)

    layouts = layout_over(pretrained.model, pretrained.model.example(1, 1), mesh)["params"]
    pairs = zip(unread, jax.tree.leaves(layouts), strict=True)
    reads = [functools.partial(read_shards, x, layout) for x, layout in pairs]
    return jax.tree.unflatten(treedef, list(_run_ahead(reads)))


_THREADS = min(8, os.cpu_count() or 1)
"""The number of threads that read parameters. NumPy copies arrays without holding Python's lock."""


def _run_ahead(functions: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """Yields the results of functions in order. Threads compute the next few results meanwhile.

    The number of results that wait is limited, so that they do not fill the memory.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS, "parameters") as pool:
        waiting: collections.deque[concurrent.futures.Future[_T]] = collections.deque()
        for function in functions:
            waiting.append(pool.submit(function))
            if len(waiting) > _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
