"""Finds models of the Hugging Face hub by name, such as ``google/flan-t5-small``."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from synthesizer_jax.base.files import absolute, is_installed
from synthesizer_jax.base.messages import one_line_error
from synthesizer_jax.data import tokenizer_backend
from synthesizer_jax.pretrained.huggingface.config import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    CARD,
    CONFIG,
    GENERATION_CONFIG,
)
from synthesizer_jax.pretrained.huggingface.tokenizer import (
    MERGES,
    SENTENCEPIECE,
    VOCABULARY,
    tokenizer_folder,
)
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS, with_variant

FILES = (
    CARD,
    CONFIG,
    GENERATION_CONFIG,
    SAFETENSORS,
    f"{SAFETENSORS}.index.json",
    "model-*.safetensors",
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    *tokenizer_backend.FILES,
    VOCABULARY,
    MERGES,
    *SENTENCEPIECE,
)
"""Patterns of the files that are downloaded from the repository of a model.

The patterns match all files that can be read from a folder, except PyTorch's pickles. If a file
were left out, a model from the hub could differ from the same model in a folder.
"""

OWNERS = dict.fromkeys(("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"), "google-t5")
"""Maps old names of models, which contain no owner, to the owners of the models.

Adapters from the first years of the hub name their base models without the owners.
"""

_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "requests")
"""The libraries whose exceptions mean that the hub cannot be reached or refuses a model."""


_NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(/(?P<folder>\w[\w.-]*))?")
"""Matches ``OWNER/NAME``, and ``OWNER/NAME/FOLDER`` for a folder inside the repository."""


class Found(NamedTuple):
    """A folder with a model, as found by `locate`.

    Attributes:
      folder: the path of the folder.
      origin: a description for logs. The description is an absolute path, or ``OWNER/NAME@COMMIT``,
        or ``OWNER/NAME@COMMIT/FOLDER``.
    """

    folder: pathlib.Path
    origin: str


def find_folder(source: pathlib.Path, revision: str | None = None) -> pathlib.Path:
    """Returns only the path of the folder that `locate` finds."""
    return locate(source, revision).folder


def locate(
    source: pathlib.Path,
    revision: str | None = None,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
) -> Found:
    """Returns the folder of a model, given an existing path or the name of a model on the hub.

    For a model on the hub, the folder is in the cache of the library ``huggingface_hub``, and its
    name is the commit. Files that are missing from the cache are downloaded. Without a network, or
    with ``HF_HUB_OFFLINE=1``, the files must already be in the cache.

    Args:
      source: a path, ``OWNER/NAME``, ``OWNER/NAME/FOLDER``, or a name in `OWNERS`, such as
        ``t5-small``.
      revision: a branch, tag or commit of the model on the hub. `None` means the main branch.
      subfolder: a folder inside the source, such as ``text_encoder_2`` in a pipeline of diffusers.
        The folder of the pipeline's tokenizer is downloaded too.
      variant: the variant of the weights to download; see `weights.with_variant`.

    Raises:
      FileNotFoundError: if the source is neither a path nor a model on the hub, or if the model has
        no safetensors files.
      ValueError: if a revision is given for a path that exists.
    """
    if source.exists():
        return _locate_path(source, revision, subfolder)

    problem = f"There is no {source}. Give a folder or a checkpoint file."
    name = str(source)
    if name in OWNERS:
        name = f"{OWNERS[name]}/{name}"
    match = _NAME.fullmatch(name)
    if match is None:
        raise FileNotFoundError(problem)
    model = match["model"]
    inside = pathlib.PurePosixPath(match["folder"] or "", subfolder or "")

    # Download the folder of the model and the folder of its tokenizer, which are often the same
    # folder.
    needed = dict.fromkeys((inside, tokenizer_folder(inside)))
    included = "".join(f' "{folder}/*"' for folder in needed if str(folder) != ".")
    if included:
        included = f" --include{included}"
    advice = (
        f"To download a model of the Hugging Face hub, run 'hf download {model}{included} "
        f"--local-dir {model.partition('/')[2]}'."
    )

    patterns = [str(folder / file) for folder in needed for file in _files(variant)]
    commit = _download(model, revision, patterns, problem=f"{problem} {advice}")
    folder = commit / inside
    if not any(folder.glob("*.safetensors")):
        kind = "no safetensors" if variant is None else f"no safetensors of the variant {variant}"
        where = "" if str(inside) == "." else f" in {inside}"
        raise FileNotFoundError(
            f"{model} has {kind}{where} at the commit {commit.name}, and other kinds of weights "
            "are not downloaded by name. Give another revision, variant or subfolder, or the path "
            f"of a folder. {advice}"
        )
    origin = f"{model}@{commit.name}"
    if str(inside) != ".":
        origin += f"/{inside}"
    return Found(folder, origin)


def _locate_path(source: pathlib.Path, revision: str | None, subfolder: str | None) -> Found:
    """Returns the folder of a model on this machine; see `locate`."""
    if revision is not None:
        raise ValueError(
            f"The revision {revision} is only for a model of the hub, but {source} is a path on "
            "this machine. Leave the revision out."
        )
    folder = source / (subfolder or "")
    if not folder.exists():
        raise FileNotFoundError(f"There is no {subfolder} in {source}.{_folders(source)}")
    return Found(folder, str(absolute(folder)))


def _download(
    model: str, revision: str | None, patterns: list[str], *, problem: str
) -> pathlib.Path:
    """Downloads the files of a model that are not in the cache yet.

    Args:
      model: the name of the model, ``OWNER/NAME``.
      revision: a branch, tag or commit. `None` means the main branch.
      patterns: patterns for the paths of the files to download.
      problem: the first sentences of error messages.

    Returns:
      The model's folder in the cache. The folder is named after the commit.

    Raises:
      FileNotFoundError: if ``huggingface_hub`` is not installed, or if the model cannot be
        downloaded.
    """
    if not is_installed("huggingface_hub"):
        raise FileNotFoundError(
            f"{problem} After pip install 'synthesizer-jax[hub]', the name of the model is enough."
        )
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns)
    # The exceptions of the libraries in `_LIBRARIES` have no common base class, so check in which
    # module the class of the exception is defined.
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise FileNotFoundError(
            f"{problem} The hub gave no such model now ({one_line_error(error)})."
        ) from error
    return pathlib.Path(found)


def _files(variant: str | None) -> list[str]:
    """Returns patterns for the names of files to download, with only one variant of the weights."""
    if variant is None:
        return list(FILES)
    others = [name for name in FILES if not name.startswith("model")]
    weights = (SAFETENSORS, f"{SAFETENSORS}.index.json", "model-*.safetensors")
    shards = f"model.{variant}-*.safetensors"
    return [*others, *(with_variant(name, variant) for name in weights), shards]


def _folders(source: pathlib.Path) -> str:
    """Returns a space and a sentence that lists the folders in a source.

    The result is an empty string if the source contains no folders.
    """
    if not source.is_dir():
        return ""
    names = sorted(path.name for path in source.iterdir() if path.is_dir())[:10]
    if not names:
        return ""
    return f" Its folders are {', '.join(names)}."
