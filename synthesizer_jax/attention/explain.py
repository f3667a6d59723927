"""Which implementation runs, and why not another."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

_log = logging.getLogger("synthesizer_jax.attention")

_explanations: contextvars.ContextVar[list[Explanation] | None] = contextvars.ContextVar(
    "explanations", default=None
)

_retraced = jax.make_user_context(default_value=None)
"""Compiled functions that have run already are traced again where its value is new."""

_calls = itertools.count()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How one call of `attend` is computed.

    Attributes:
      route: ``static``, ``fused``, ``banded``, ``cudnn`` or ``reference``, see `attend`; ``flax`` where
        `attention_fn` leaves the computation to Flax's function.
      kernel: what runs it on the platform.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      shape: batch, queries, keys and heads, on all devices.
      unpacked: the examples of packed rows become rows of their own first.
      divided: the mesh axes that divide batch, heads and sequence.
      kept_bytes: what the backward pass keeps, on all devices; None where it was not asked for.
      obstacles: why other routes and kernels do not run, by name.
    """

    route: str
    kernel: str
    platform: str
    shape: tuple[int, int, int, int]
    unpacked: bool
    divided: dict[str, tuple[str, ...]]
    kept_bytes: int | None
    obstacles: dict[str, str]

    def __str__(self) -> str:
        batch, queries, keys, heads = self.shape
        over = ", ".join(f"{name} over {'+'.join(axes)}" for name, axes in self.divided.items())
        kept = "" if self.kept_bytes is None else f"; keeps {self.kept_bytes / 2**20:.1f} MiB"
        lines = [
            f"{self.route} route on {self.platform}, {self.kernel}: batch {batch}, {heads} heads, "
            f"{queries} queries, {keys} keys"
            + (", unpacked" if self.unpacked else "")
            + (f"; {over}" if over else "")
            + kept
        ]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.obstacles.items()])


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Explanation, ...]:
    """How every attention inside a function would be computed; nothing is.

    Args:
      function: is traced with the other arguments, such as ``layer.apply`` of a Linen layer, an NNX layer
        or `attend`. An NNX layer that it closes over, not being one, must have no dropout.
      *args: arrays or `jax.ShapeDtypeStruct`, and whatever else the function takes.
      **kwargs: likewise.

    Returns:
      One explanation for each call of `attend`, in their order; a scanned layer counts once.
    """
    with _collecting() as found, _retraced(next(_calls)):
        tree: Any
        leaves, tree = jax.tree.flatten((function, args, kwargs))  # an NNX layer is a tree, too
        shaped = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]

        def call(arrays: list[jax.Array]) -> Any:
            rest = iter(arrays)
            mixed = [next(rest) if s else x for x, s in zip(leaves, shaped, strict=True)]
            function, args, kwargs = tree.unflatten(mixed)
            out = function(*args, **kwargs)
            return jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, out)

        jax.eval_shape(call, [x for x, s in zip(leaves, shaped, strict=True) if s])
    return tuple(found)


def note_other(route: str, kernel: str, function: Callable[..., Any], *args: Any) -> None:
    """Notes a call of another library's attention, ``function(query, key, value, ...)``."""
    query, key, value, *rest = args
    batch, queries, heads, _ = query.shape
    explain_call(
        lambda: Explanation(
            route=route,
            kernel=kernel,
            platform=jax.default_backend(),
            shape=(batch, queries, key.shape[1], heads),
            unpacked=False,
            divided={},
            kept_bytes=None,
            obstacles={
                "engine": "it has no dropout of single weights, no precision and no other einsums"
            },
        ),
        lambda: jax.vjp(lambda *x: function(*x, *rest), query, key, value)[1],
    )


def explain_call(make: Callable[[], Explanation], kept: Callable[[], Any]) -> None:
    """Notes how a call is computed: a line in the log, and what `explain` returns.

    Args:
      make: the explanation, without `Explanation.kept_bytes`.
      kept: what the backward pass keeps, a tree of arrays.
    """
    found = _explanations.get()
    if found is None and not _log.isEnabledFor(logging.DEBUG):
        return
    explanation = make()
    _log.debug("attend: %s", str(explanation).partition("\n")[0])
    if found is not None:
        leaves = jax.tree.leaves(jax.eval_shape(kept))
        size = sum(x.size * x.dtype.itemsize for x in leaves)
        found.append(dataclasses.replace(explanation, kept_bytes=size))


@contextlib.contextmanager
def _collecting() -> Iterator[list[Explanation]]:
    token = _explanations.set([])
    try:
        found = _explanations.get()
        assert found is not None
        yield found
    finally:
        _explanations.reset(token)
