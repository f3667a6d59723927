"""The mixers of a model's layers with their parameters and the weights that they sow."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments import Alignment, Mixture
from synthesizer_jax.inspection.measures import Rows, Sums, attention_sums
from synthesizer_jax.mixers import Linformer, Mixer
from synthesizer_jax.models import Encoder, EncoderDecoder, LanguageModel, TextToText, stacks_of
from synthesizer_jax.models.token_model import num_real_tokens
from synthesizer_jax.parameters import Variables
from synthesizer_jax.sharding import gather_to_host
from synthesizer_jax.training.step import Batch, teacher_forced
from synthesizer_jax.typing import PyTree

CROSS = "encoder_decoder_attention"


class Place(NamedTuple):
    """A mixer of a layer.

    Attributes:
      stack: ``encoder`` or ``decoder``.
      layer: number of the layer, from 0.
      cross: whether it is cross-attention.
    """

    stack: str
    layer: int
    cross: bool = False

    def __str__(self) -> str:
        """Such as ``decoder 1 cross``, counted from 1."""
        return f"{self.stack} {self.layer + 1}{' cross' * self.cross}"


def mixers_of(model: nn.Module) -> dict[Place, Mixer]:
    """Returns the mixers of all layers of a model."""
    found = {}
    for name, stack in stacks_of(model).items():
        blocks = [run.block for run in stack.runs for _ in range(run.repeats)]
        for i, block in enumerate(blocks):
            found[Place(name, i)] = block.self_mixer
            if block.cross_mixer is not None:
                found[Place(name, i, cross=True)] = block.cross_mixer
    return found


def entries(tree: PyTree) -> Iterator[tuple[Place, PyTree]]:
    """Yields what mixers have in a collection of a model with looped layers; shared layers once."""
    for stack in ("encoder", "decoder"):
        for name, layer in tree.get(stack, {}).items():
            number = name.removeprefix("layers_")
            if number.isdecimal() or name == "shared":
                for mixer in ("attention", "self_attention", CROSS):
                    if mixer in layer:
                        index = int(number) if number.isdecimal() else 0
                        yield Place(stack, index, mixer == CROSS), layer[mixer]


def describe(mixer: nn.Module) -> str:
    """Returns what a mixer is made of, such as ``Attention: Random + DotProduct``."""

    def parts(alignment: Alignment) -> str:
        if (inner := getattr(alignment, "parts", None)) is None:
            return type(alignment).__name__
        return (" + " if isinstance(alignment, Mixture) else " | ").join(map(parts, inner))

    alignment = getattr(mixer, "alignment", None)
    return type(mixer).__name__ + ("" if alignment is None else f": {parts(alignment)}")


def mixture_weights(
    model: nn.Module, variables: Variables
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Returns the parts of every mixture of a model with looped layers, and their α ``[heads, parts]``."""
    mixers, found = mixers_of(model), {}

    def collect(name: str, alignment: Alignment | None, params: PyTree, heads: int) -> None:
        for i, part in enumerate(getattr(alignment, "parts", ())):
            inner = alignment.counts(heads)[i] if hasattr(alignment, "counts") else heads  # type: ignore[union-attr]
            collect(f"{name}, part {i + 1}", part, params.get(f"part_{i}", {}), inner)
        if isinstance(alignment, Mixture) and alignment.weights != "sum":
            alpha = jax.nn.softmax(jnp.asarray(params.get("weights", 0.0)))
            if alignment.weights == "sigmoid":
                gate = jax.nn.sigmoid(params["gate"])
                alpha = jnp.tile(jnp.concatenate([1.0 - gate, gate]), (heads, 1))
            found[name] = tuple(map(describe, alignment.parts)), np.asarray(alpha)

    for place, params in entries(variables["params"]):
        mixer = mixers[place]
        alignment, heads = getattr(mixer, "alignment", None), getattr(mixer, "num_heads", 0)
        collect(str(place), alignment, jax.tree.map(gather_to_host, params.get("align", {})), heads)
    return found


def head_projections(variables: Variables) -> dict[str, dict[str, np.ndarray]]:
    """Returns P_l and P_w ``[from, to]`` of talking heads by layer."""
    names = {"logits_projection": "P_l", "weights_projection": "P_w"}
    found = {
        str(place): {names[n]: gather_to_host(params[n]) for n in names if n in params}
        for place, params in entries(variables["params"])
    }
    return {place: matrices for place, matrices in found.items() if matrices}


def rows_of(model: nn.Module, batch: Mapping[str, jax.Array]) -> dict[tuple[str, bool], Rows]:
    """Returns what queries see in unpacked rows with padding at the end, by stack and ``cross``."""
    inputs = num_real_tokens(batch["encoder_input_tokens"])[:, None]
    targets = (batch["decoder_loss_weights"] > 0).sum(1, keepdims=True)
    of_inputs, of_targets = (
        jnp.arange(batch[f"{side}_input_tokens"].shape[1])[None] for side in ("encoder", "decoder")
    )
    whole = lambda position, n: jnp.broadcast_to(position, (len(n), position.shape[1]))
    if isinstance(model, LanguageModel):
        position = jnp.arange(of_inputs.size + of_targets.size)[None]
        seen = jnp.maximum(position + 1, inputs) if model.prefix else position + 1
        real = position < inputs + targets
        return {("decoder", False): Rows(real, whole(seen, inputs), whole(position, inputs))}
    encoder = Rows(
        of_inputs < inputs,
        jnp.broadcast_to(inputs, (len(inputs), of_inputs.size)),
        whole(of_inputs, inputs),
    )
    if not isinstance(model, EncoderDecoder):
        return {("encoder", False): encoder}
    real, position = of_targets < targets, whole(of_targets, inputs)
    ratio = inputs / jnp.maximum(targets, 1)
    return {
        ("encoder", False): encoder,
        ("decoder", False): Rows(real, position + 1, position),
        ("decoder", True): Rows(real, jnp.broadcast_to(inputs, real.shape), position * ratio),
    }


def sown_by(
    model: nn.Module, variables: Variables, batch: Batch, name: str
) -> dict[Place, jax.Array]:
    """Returns what the mixers sow under a name, such as ``attention_weights``, for a batch."""
    if isinstance(model, TextToText):
        _, sown = teacher_forced(model, variables, batch, collection="intermediates")
    else:
        assert isinstance(model, Encoder)
        _, sown = model.apply(variables, batch["encoder_input_tokens"], mutable=["intermediates"])
    return {
        place._replace(layer=place.layer + i): x
        for place, values in entries(sown.get("intermediates", {}))
        for i, x in enumerate(values.get(name, ()))
    }


@functools.partial(jax.jit, static_argnames="model")
def layer_sums(
    variables: Variables, batch: Batch, centers: dict[tuple[str, bool], float], *, model: nn.Module
) -> dict[Place, Sums]:
    """Returns the sums of the weights of all layers that sow them, see `attention_sums`."""
    rows, found = rows_of(model, batch), {}
    mixers = mixers_of(model)
    for place, weights in sown_by(model, variables, batch, "attention_weights").items():
        key = place.stack, place.cross
        own = rows[key]
        if isinstance(mixers[place], Linformer):  # all of its keys are seen
            own = own._replace(seen=jnp.full_like(own.seen, weights.shape[-1]))
        found[place] = attention_sums(weights, own, center=centers[key])
    return found
