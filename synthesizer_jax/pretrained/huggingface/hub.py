"""Models of the Hugging Face hub by name, such as ``google/flan-t5-small``."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from synthesizer_jax.base.files import absolute, is_installed
from synthesizer_jax.base.messages import one_line_error
from synthesizer_jax.pretrained.huggingface.config import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    CONFIG,
    GENERATION_CONFIG,
)
from synthesizer_jax.pretrained.huggingface.tokenizer import (
    ADDED,
    MERGES,
    SENTENCEPIECE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    tokenizer_folder,
)
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS, with_variant

FILES = (
    CONFIG,
    GENERATION_CONFIG,
    SAFETENSORS,
    f"{SAFETENSORS}.index.json",
    "model-*.safetensors",
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    MERGES,
    ADDED,
    *SENTENCEPIECE,
)
"""The files of a model that are downloaded: all that a folder is read from, except PyTorch's pickles.

With any fewer, a model by its name would differ from the same model in a folder.
"""

OWNERS = dict.fromkeys(("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"), "google-t5")
"""The owners of models that had none in the first years of the hub; older adapters name their base so."""

_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "requests")
"""Those whose exceptions say that the hub cannot be reached, or does not give a model."""


_NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(/(?P<folder>\w[\w.-]*))?")
"""``OWNER/NAME``, perhaps with a folder of it: ``OWNER/NAME/FOLDER``."""


class Found(NamedTuple):
    """A folder that `locate` has found.

    Attributes:
      folder: its path.
      origin: what it is, for logs: an absolute path, or ``OWNER/NAME@COMMIT`` and perhaps ``/FOLDER``.
    """

    folder: pathlib.Path
    origin: str


def find_folder(source: pathlib.Path, revision: str | None = None) -> pathlib.Path:
    """Returns the folder that `locate` finds."""
    return locate(source, revision).folder


def locate(
    source: pathlib.Path,
    revision: str | None = None,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
) -> Found:
    """Returns a path that exists, or else the folder of the model of the hub that it names.

    A folder of the hub is in the cache of the library ``huggingface_hub``, by the name of the commit. What
    is not there is downloaded; without a network, or with ``HF_HUB_OFFLINE=1``, the cache must have it.

    Args:
      source: a path, or ``OWNER/NAME``, or ``OWNER/NAME/FOLDER``, or one of the names in `OWNERS`.
      revision: a branch, tag or commit of the hub; None: its main branch.
      subfolder: a folder inside of the source, such as ``text_encoder_2`` of a pipeline of diffusers. The
        folder of its tokenizer is downloaded too.
      variant: which files with weights are downloaded, see `weights.with_variant`.

    Raises:
      FileNotFoundError: there is neither, or the model has no safetensors.
      ValueError: a path that exists is given a revision.
    """
    if source.exists():
        if revision is not None:
            raise ValueError(
                f"the revision {revision} is for a model of the hub, and {source} is here; leave it out"
            )
        folder = source / (subfolder or "")
        if not folder.exists():
            raise FileNotFoundError(f"there is no {subfolder} in {source}{_folders(source)}")
        return Found(folder, str(absolute(folder)))
    problem = f"there is no {source}; give a folder or a checkpoint file"
    name = _NAME.fullmatch(f"{OWNERS[str(source)]}/{source}" if str(source) in OWNERS else str(source))
    if name is None:
        raise FileNotFoundError(problem)
    model = name["model"]
    inside = pathlib.PurePosixPath(name["folder"] or "", subfolder or "")
    needed = dict.fromkeys((inside, tokenizer_folder(inside)))
    included = "".join(f' "{folder}/*"' for folder in needed if str(folder) != ".")
    command = (
        f"'hf download {model}{' --include' + included if included else ''} --local-dir "
        f"{model.partition('/')[2]}' downloads a model of the Hugging Face hub"
    )
    if not is_installed("huggingface_hub"):
        by_name = "its name is enough after pip install 'synthesizer-jax[hub]'"
        raise FileNotFoundError(f"{problem}; {command}, and {by_name}")
    import huggingface_hub

    patterns = [str(folder / file) for folder in needed for file in _files(variant)]
    try:
        found = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns)
    except Exception as error:  # they have no class in common
        if type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise FileNotFoundError(
            f"{problem}; {command}, which gave none now ({one_line_error(error)})"
        ) from error
    commit = pathlib.Path(found)
    folder, origin = commit / inside, f"{model}@{commit.name}"
    if not any(folder.glob("*.safetensors")):
        kind = "no safetensors" if variant is None else f"no safetensors of the variant {variant}"
        where = "" if str(inside) == "." else f" in {inside}"
        raise FileNotFoundError(
            f"{model} has {kind}{where} at {commit.name}, and other files are not downloaded by name; "
            f"give another revision, variant or subfolder, or a folder: {command}"
        )
    return Found(folder, origin if str(inside) == "." else f"{origin}/{inside}")


def _files(variant: str | None) -> list[str]:
    """Returns patterns of the names of files of a model, with the weights of a variant alone."""
    if variant is None:
        return list(FILES)
    others = [name for name in FILES if not name.startswith("model")]
    weights = (SAFETENSORS, f"{SAFETENSORS}.index.json", "model-*.safetensors")
    shards = f"model.{variant}-*.safetensors"
    return [*others, *(with_variant(name, variant) for name in weights), shards]


def _folders(source: pathlib.Path) -> str:
    """Returns the end of a sentence that names the folders of a source, or nothing if it has none."""
    if not source.is_dir():
        return ""
    names = sorted(path.name for path in source.iterdir() if path.is_dir())[:10]
    return f"; it has {', '.join(names)}" if names else ""
