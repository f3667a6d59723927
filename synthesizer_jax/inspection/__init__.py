"""The laboratory: measures what the layers of a model have learned, and writes a page about it.

`run` collects attention weights on examples of the evaluation sets, `measures` computes numbers
from them, `static_attention` fits forms of attention that read no tokens, and `page` writes the
page of `synthesizer-jax inspect`. No layer, model or training run uses this package.
"""
