"""Checks of the terms that `attend` is given."""

from __future__ import annotations

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import Split, Term, stands_alone


def check_terms(terms: object, *, of: str = "terms are", remedy: str = "return") -> None:
    """Raises a `TypeError` or a `ValueError` unless an object, which a message is `of`, is terms."""
    example = f"{remedy} a tuple of terms, such as (static(logits),)"
    if isinstance(terms, Term):
        raise TypeError(f"attend: {of} a bare {type(terms).__name__}; {example}")
    if not isinstance(terms, tuple | list):
        raise TypeError(f"attend: {of} of type {type(terms).__name__}; {example}")
    for term in terms:
        if isinstance(term, type):
            raise TypeError(f"attend: a term is the class {term.__name__}, not an object; {example}")
        if not isinstance(term, Term):
            raise TypeError(f"attend: a term is of type {type(term).__name__}; {example}")
    if not terms:
        raise ValueError("attend: terms are empty; give at least one")
    alone = [term for term in terms if stands_alone(term)]
    if alone and len(terms) > 1:
        raise ValueError(f"attend: a {type(alone[0]).__name__} term stands alone; see terms.add")


def check_term(term: Term, mask: Mask, *, batch: int, heads: int, q_length: int, k_length: int) -> None:
    """Raises a `ValueError` for a term that does not fit batch, heads, queries and keys."""
    name = f"attend: a {type(term).__name__} term"
    if term.num_heads != heads:
        raise ValueError(f"{name} is for {term.num_heads} heads, but the values have {heads}")
    if isinstance(term, Split):
        return  # its groups are checked one by one
    packed = mask.query_segments is not None
    shortest = mask.segment_lengths(q_length, k_length) if packed else (q_length, k_length)
    for own, length, least, positional in zip(
        term.lengths,
        (q_length, k_length),
        shortest,
        term.has_absolute_positions(mask),
        strict=True,
    ):
        if own is not None and own != length and not (packed and positional and own >= least):
            q, k = term.lengths
            raise ValueError(
                f"{name} is for {q} queries and {k} keys, but there are {q_length} queries and "
                f"{k_length} values"
            )
    reached = term.num_keys_reached
    if reached is not None and reached < shortest[1]:
        factors = " · ".join(str(a.x.shape[-1]) for a in term.arrays())
        raise ValueError(
            f"{name} reaches {factors} keys, but there are {k_length} values; make its factors longer"
        )
    for a in term.arrays():
        if a.axes[0] == "b" and a.x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} holds an array of shape {a.x.shape}, but the values have batch {batch}"
            )
