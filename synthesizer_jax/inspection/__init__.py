"""Measures what the layers of a model have learned, and writes a page about the measures.

`run` collects attention weights on examples of the evaluation sets, and `measures` computes numbers
from the attention weights. `static_attention` fits forms of attention that read no tokens, and
`page` writes the page of `synthesizer-jax inspect`. No layer, model or training run uses this
package.
"""
