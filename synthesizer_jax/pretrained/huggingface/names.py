"""The names and layouts of a T5's parameters in transformers."""

from __future__ import annotations

from synthesizer_jax.pretrained.tensors import SAME, Layout

TRANSPOSED = Layout(1, transposed=True)
"""The layout of a torch matrix ``[outputs, inputs]``.

In this package, the same parameter is ``[inputs, outputs]`` or ``[d_model, heads, width]``.
"""

HEADS_OF_OUTPUTS = Layout(2, transposed=True)
"""The layout of a torch matrix ``[d_model, heads · width]``.

In this package, the same parameter is ``[heads, width, d_model]``.
"""

_SUBLAYERS = {
    ("encoder", "attention"): "layer.0.SelfAttention",
    ("encoder", "mlp"): "layer.1.DenseReluDense",
    ("encoder", "pre_attention_layer_norm"): "layer.0.layer_norm",
    ("encoder", "pre_mlp_layer_norm"): "layer.1.layer_norm",
    ("decoder", "self_attention"): "layer.0.SelfAttention",
    ("decoder", "encoder_decoder_attention"): "layer.1.EncDecAttention",
    ("decoder", "mlp"): "layer.2.DenseReluDense",
    ("decoder", "pre_self_attention_layer_norm"): "layer.0.layer_norm",
    ("decoder", "pre_cross_attention_layer_norm"): "layer.1.layer_norm",
    ("decoder", "pre_mlp_layer_norm"): "layer.2.layer_norm",
}
"""Maps a stack and the name of a sub-layer here to the sub-layer's name in transformers."""

_LEAVES = {
    "query": ".q",
    "key": ".k",
    "value": ".v",
    "out": ".o",
    "rel_embedding": ".relative_attention_bias",
    "scale": "",
}
"""Maps the name of a parameter here to the end of the parameter's name in transformers."""

EMBEDDINGS = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
"""The names of the embedding. A folder may contain equal copies of it under several names."""

OUTPUT = "lm_head.weight"
"""The name of the output projection."""

UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""The name of an unused tensor, which the first published folders contain."""


def is_in_encoder(name: str) -> bool:
    """Returns whether a tensor belongs to the encoder, or can be the encoder's embedding."""
    return name in EMBEDDINGS or not (name.startswith("decoder.") or name == OUTPUT)


def torch_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and layout that a parameter of this package has in PyTorch.

    The path must be the path of the parameter in a model with looped layers.
    """
    if path == ("embedding",):
        return EMBEDDINGS[0], SAME
    if path == ("logits_kernel",):
        return OUTPUT, TRANSPOSED
    stack, part, *rest = path
    if part == "final_norm":
        return f"{stack}.final_layer_norm.weight", SAME
    if part == "relpos_bias":
        # In transformers, the first layer of a stack holds the relative bias of the whole stack.
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return name, TRANSPOSED

    # Skip the keys for the alignment and for the parts of a mixture, because names in transformers
    # do not contain them.
    leaf = next(key for key in rest[1:] if key != "align" and not key.startswith("part_"))
    name = _LEAVES.get(leaf, f".{leaf}")
    layout = {"out": HEADS_OF_OUTPUTS, "scale": SAME}.get(leaf, TRANSPOSED)
    number = part.removeprefix("layers_")
    # An example of a name is ``encoder.block.0.layer.0.SelfAttention.q.weight``.
    return f"{stack}.block.{number}.{_SUBLAYERS[stack, rest[0]]}{name}.weight", layout
