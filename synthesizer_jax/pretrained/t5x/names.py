"""Names and layouts of a T5's parameters in T5X, as its versions write them."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Collection

from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.tensors import (
    SAME,
    Correspondence,
    Layout,
    correspondences,
)

HEADS_OF_INPUTS = Layout(1)
"""``[d_model, heads · width]`` for ``[d_model, heads, width]``."""

HEADS_OF_OUTPUTS = Layout(2)
"""``[heads · width, d_model]`` for ``[heads, width, d_model]``."""

_INPUTS = ("query", "key", "value")
_LAYER_BIASES = ("relpos_bias", "relative_posemb")


@dataclasses.dataclass(frozen=True)
class Names:
    """What distinguishes T5X's models: the minimal T5 has the defaults, the scalable one need not.

    Attributes:
      scanned: the name of the scanned layers in a stack, where ``{stack}`` is ``encoder`` or
        ``decoder``; None: each layer has parameters of its own.
      split_heads: attention kernels have an axis of heads.
      layer_bias: the name of the relative bias that every layer has; None: one for a stack.
    """

    scanned: str | None = None
    split_heads: bool = False
    layer_bias: str | None = None

    def find(self, model: TokenModel) -> list[Correspondence]:
        """Returns where every parameter of a model, with looped layers, is."""
        found = correspondences(model, self._name)
        if self.scanned is None:
            return found
        numbers = {
            c.path[:2]: int(c.path[1].removeprefix("layers_"))
            for c in found
            if _is_of_layer(c.path)
        }
        counts = collections.Counter(stack for stack, _ in numbers)

        def stacked(c: Correspondence) -> Correspondence:
            stack, layer = c.path[0], c.path[1]
            name = c.name.replace(f"{stack}/{layer}", self.layer(stack, 0), 1)
            return c._replace(name=name, layer=(numbers[stack, layer], counts[stack]))

        return [stacked(c) if _is_of_layer(c.path) else c for c in found]

    def layer(self, stack: str, number: int) -> str:
        """Returns the prefix of a layer's names."""
        name = f"layers_{number}" if self.scanned is None else self.scanned.format(stack=stack)
        return f"{stack}/{name}"

    def _name(self, path: tuple[str, ...]) -> tuple[str, Layout]:
        """Returns the name, with looped layers, and the layout of a parameter of ours."""
        if path == ("embedding",):
            return "token_embedder/embedding", SAME
        if path == ("logits_kernel",):
            return "decoder/logits_dense/kernel", SAME
        if path[1] == "final_norm":
            return f"{path[0]}/{path[0]}_norm/scale", SAME
        if path[-1] == "rel_embedding" and path[1] != "relpos_bias":
            return f"{path[0]}/{path[1]}/{self.layer_bias}/rel_embedding", SAME
        name = "/".join(key for key in path if key not in ("align", "part_0"))
        if path[-1] == "scale":
            return name, SAME
        if path[-2] in _INPUTS:
            return name, SAME if self.split_heads else HEADS_OF_INPUTS
        if path[-2] == "out":
            return name, SAME if self.split_heads else HEADS_OF_OUTPUTS
        return name, SAME


def _is_of_layer(path: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to one layer."""
    return len(path) > 1 and path[1].startswith("layers_")


def detect(names: Collection[str], rank: int) -> Names:
    """Returns how the model whose parameters have these names was built.

    Args:
      names: the names of all parameters.
      rank: the number of axes of the encoder's first query kernel, without that of scanned layers.
    """
    scanned = next(
        (
            pattern
            for pattern in ("{stack}", "layers")
            if any(n.startswith(f"encoder/{pattern.format(stack='encoder')}/") for n in names)
        ),
        None,
    )
    layer = Names(scanned).layer("encoder", 0)
    bias = next((b for b in _LAYER_BIASES if f"{layer}/{b}/rel_embedding" in names), None)
    return Names(scanned, rank == 3, bias)


def count_layers(names: Collection[str], stack: str) -> int:
    """Returns the number of a stack's looped layers."""
    found = (re.match(rf"{stack}/layers_(\d+)/", name) for name in names)
    return len({match.group(1) for match in found if match})
