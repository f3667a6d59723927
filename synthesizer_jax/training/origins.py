"""Decides where each parameter of a run that starts from a checkpoint comes from.

`find_origins` applies the rules of the new run to the shapes of the arrays. `resize` makes an array
of a new shape from an array of the checkpoint. Neither function reads a file.
"""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.primitives.parameters import check_patterns_decide
from synthesizer_jax.training.experiment import InitRule, find_rule

Shapes = Mapping[str, tuple[int, ...]]

RESTORED, RESIZED, INITIALIZED = "restored", "resized", "initialized"


class Origin(NamedTuple):
    """The origin of the initial value of a parameter.

    Attributes:
      status: ``restored``, ``resized`` or ``initialized``.
      source: the path of the array in the checkpoint, or an empty string if a rule draws new
        values.
      rule: the rule that applies to the parameter.
      problem: the reason why the checkpoint's array cannot be used. The text is the end of a
        sentence that begins with the path of the parameter. `problem` is `None` if the array fits,
        or if a rule asks for new values.
    """

    status: str
    source: str
    rule: InitRule
    problem: str | None = None

    @property
    def has_new_values(self) -> bool:
        """Whether at least some of the values are drawn at random."""
        return self.status == INITIALIZED or (self.status == RESIZED and self.rule.draws)


def find_origins(old: Shapes, new: Shapes, rules: Sequence[InitRule] = ()) -> dict[str, Origin]:
    """Returns where each parameter of a new run comes from.

    The first rule whose pattern matches a path applies. If no pattern matches, the array with the
    same path and shape is restored. If an array does not fit its parameter, the parameter has an
    `Origin.problem`.

    Args:
      old: shapes of the checkpoint's arrays by ``COLLECTION/PATH``, in the form of looped layers.
      new: shapes of the new run's arrays by ``COLLECTION/PATH``, in the form of looped layers.
      rules: the rules, in order of precedence.

    Raises:
      ValueError: a rule applies to no parameter, or the `source` of a rule refers to a group that
        its pattern does not have.
    """
    paths = {name.split("/", 1)[1] for name in new}
    check_patterns_decide("init_rules", [rule.pattern for rule in rules], paths)
    return {name: _origin(name, shape, old, rules) for name, shape in new.items()}


def _origin(name: str, shape: tuple[int, ...], old: Shapes, rules: Sequence[InitRule]) -> Origin:
    """Returns the origin of one parameter; see `find_origins`."""
    collection, path = name.split("/", 1)
    rule, match = find_rule(rules, path)
    if rule.action == "fresh":
        return Origin(INITIALIZED, "", rule)
    try:
        source = f"{collection}/{path if rule.source is None else match.expand(rule.source)}"
    except (re.error, IndexError) as error:
        raise ValueError(
            f"init_rules: The source {rule.source!r} does not fit the pattern {rule.pattern!r}: "
            f"{error}. Refer only to groups that the pattern has."
        ) from None
    if source not in old:
        problem = "is not in the checkpoint"
        if source != name:
            problem = f"needs {source.split('/', 1)[1]}, which {problem}"
        return Origin(INITIALIZED, source, rule, problem)
    if old[source] == shape:
        return Origin(RESTORED, source, rule)
    # The fill `distance` needs arrays with an axis of queries and an axis of keys.
    lowest_rank = 2 if rule.fill == "distance" else 1
    if rule.action == "resize" and len(old[source]) == len(shape) >= lowest_rank:
        return Origin(RESIZED, source, rule)
    problem = f"has the shape {old[source]} in the checkpoint and {shape} in the new model"
    return Origin(INITIALIZED, source, rule, problem)


def check_problems(source: pathlib.Path, origins: Mapping[str, Origin]) -> None:
    """Raises a `ValueError` if arrays of a checkpoint do not fit the model of the new run."""
    problems = [
        f"{name.split('/', 1)[1]} {origin.problem}"
        for name, origin in origins.items()
        if origin.problem is not None
    ]
    if problems:
        named = "; ".join(problems[:3])
        if len(problems) > 3:
            named += f"; and {len(problems) - 3} more"
        raise ValueError(
            f"{source} is a checkpoint of another model. These parameters do not fit: {named}. Add "
            "init_rules for them, such as InitRule('.*/table', 'resize', fill='distance') for "
            "other lengths, or InitRule('PATH', 'fresh')."
        )


def resize(old: jax.Array, fresh: jax.Array | jax.ShapeDtypeStruct, fill: str) -> jax.Array:
    """Returns an array that is cropped or extended to the shape of another array.

    Args:
      old: the array.
      fresh: an array of the new shape. A `jax.ShapeDtypeStruct` suffices unless `fill` is
        ``fresh``.
      fill: how new entries are filled. ``edge`` repeats the last entry along the axis. ``distance``
        is for tables whose last two axes are queries and keys. A new entry is filled with the
        nearest entry for the same distance between query and key. ``fresh`` takes the entries of
        `fresh`.
    """
    if old.shape == fresh.shape:
        return old.astype(fresh.dtype)
    kept = tuple(slice(min(n, m)) for n, m in zip(old.shape, fresh.shape, strict=True))
    if fill == "fresh":
        assert isinstance(fresh, jax.Array)
        return fresh.at[kept].set(old[kept].astype(fresh.dtype))
    # Each index array has the new size of one axis. Clipping the indices repeats the last entry.
    indices = [
        jnp.clip(jnp.arange(m), 0, n - 1) for n, m in zip(old.shape, fresh.shape, strict=True)
    ]
    grid = list(jnp.meshgrid(*indices, indexing="ij"))
    if fill == "distance":
        q, k = (jnp.arange(m) for m in fresh.shape[-2:])
        last_q, last_k = old.shape[-2] - 1, old.shape[-1] - 1
        # Moving a query and a key back by the same number keeps the distance between them.
        shift = jnp.maximum(jnp.maximum(q[:, None] - last_q, k[None, :] - last_k), 0)
        grid[-2] = jnp.broadcast_to(jnp.clip(q[:, None] - shift, 0, last_q), fresh.shape)
        grid[-1] = jnp.broadcast_to(jnp.clip(k[None, :] - shift, 0, last_k), fresh.shape)
    return old[tuple(grid)].astype(fresh.dtype)


def format_table(origins: Mapping[str, Origin], old: Shapes, new: Shapes) -> str:
    """Returns a table of the origins of all arrays. Equal layers of a stack share one line."""
    used = {origin.source for origin in origins.values() if origin.status != INITIALIZED}
    groups = {
        status: {name: new[name] for name, o in origins.items() if o.status == status}
        for status in (RESTORED, RESIZED, INITIALIZED)
    }
    groups["unused"] = {name: shape for name, shape in old.items() if name not in used}
    lines = []
    for status, shapes in groups.items():
        count = sum(map(math.prod, shapes.values()))
        lines.append(f"  {status:<11} {count:>14,} parameters in {len(shapes)} arrays")
        if status != RESTORED:
            rows = collections.Counter(
                (re.sub(r"layers_\d+", "layers_*", name.split("/", 1)[1]), shape)
                for name, shape in shapes.items()
            )
            lines += [
                f"{'':16}{name} {shape}" + (f", {layers} layers" if layers > 1 else "")
                for (name, shape), layers in rows.items()
            ]
    return "\n".join(lines)
