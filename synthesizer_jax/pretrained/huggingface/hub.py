"""Models of the Hugging Face hub by name, such as ``google/flan-t5-small``."""

from __future__ import annotations

import pathlib
import re

from synthesizer_jax.base.files import is_installed
from synthesizer_jax.base.messages import one_line_error

FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece.model",
    "tokenizer.model",
)
"""What is downloaded of a model; never PyTorch's files, which are pickles."""

_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "requests")
"""Those whose exceptions say that the hub cannot be reached, or does not give a model."""


def find_folder(source: pathlib.Path, revision: str | None = None) -> pathlib.Path:
    """Returns a path that exists, or else the folder of the model of the hub that it names.

    The folder is in the cache of the library ``huggingface_hub``, and its name is the commit. What is not
    there is downloaded; without a network, or with ``HF_HUB_OFFLINE=1``, the cache must have it.

    Args:
      source: a path, or ``OWNER/NAME``.
      revision: a branch, tag or commit of the hub; None: its main branch.

    Raises:
      FileNotFoundError: there is neither, or the model has no safetensors.
      ValueError: a path that exists is given a revision.
    """
    if source.exists():
        if revision is not None:
            raise ValueError(
                f"the revision {revision} is for a model of the hub, and {source} is here; leave it out"
            )
        return source
    problem = f"there is no {source}; give a folder or a checkpoint file"
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        raise FileNotFoundError(problem)
    command = f"'hf download {source} --local-dir {source.name}' downloads a model of the Hugging Face hub"
    if not is_installed("huggingface_hub"):
        by_name = "its name is enough after pip install 'synthesizer-jax[hub]'"
        raise FileNotFoundError(f"{problem}; {command}, and {by_name}")
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            str(source), revision=revision, allow_patterns=list(FILES)
        )
    except Exception as error:  # they have no class in common
        if type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise FileNotFoundError(
            f"{problem}; {command}, which gave none now ({one_line_error(error)})"
        ) from error
    folder = pathlib.Path(found)
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{source} has no safetensors at {folder.name}, and other files are not downloaded by name; "
            f"give another revision, or a folder: {command}"
        )
    return folder
