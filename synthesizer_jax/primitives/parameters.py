"""Logical axis names of parameters, which are declared where a parameter is created.

By default, parameters are plain arrays. Inside `logical_axes()`, the same initializers return boxes
that hold the arrays and their axis names. `abstract_variables` collects the axis names of a model.
The sharding of the model and the factoring of its optimizer are derived from the axis names, so no
separate table of parameters is needed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

import flax.linen as nn
import jax
from flax import struct, traverse_util
from flax.typing import Initializer

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.typing import PyTree

LOGICAL_AXES = (
    "vocab",  # rows of the embedding and columns of the output projection
    "embed",  # features of the model, d_model
    "heads",
    "kv_heads",  # heads of keys and values that several queries share
    "kv",  # features of one head
    "mlp",  # features of the feed-forward layer's hidden layer
    "synth_hidden",  # features of a Dense or Factorized Dense alignment's hidden layer
    "query_length",  # query positions of a table of logits
    "key_length",  # key positions of a table of logits
    "rank",  # rank of a Factorized Random table
    "length",  # positions of a table of position embeddings
    "norm",  # scale of a normalization layer
    "relpos_buckets",
    "parts",  # parts of a mixture
    "talk_from",  # input heads of a talking-heads projection
    "talk_to",  # output heads of a talking-heads projection
    "taps",  # taps of a convolution
    "layers",  # stacked layers, added by scan
)
"""The logical axis names of parameters, which `sharding.rules` maps to mesh axes."""

ACTIVATION_AXES = (
    "batch",  # examples
    "sequence",  # positions of a sequence, if every query may attend to every key
)
"""The logical axis names of activations, besides ``heads``; see `primitives.mesh`."""

MOST_ENDINGS = 24
"""The largest number of ends of paths that an error message lists."""

_RETURNS_BOXES = contextvars.ContextVar("logical_axes", default=False)

Axes: TypeAlias = tuple[str | None, ...]
"""A logical axis name, or None, for every dimension of an array."""

Variables: TypeAlias = dict[str, Any]
"""A module's variables: a nested dictionary of arrays for each collection, such as ``params``."""

SAVED = ("params", "constants")
"""The collections that a run saves. All other collections hold values that modules sow."""

P = ParamSpec("P")
R = TypeVar("R")


def apply_method(
    method: Callable[P, R], variables: Variables, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Applies a method of an unbound module, and preserves the method's types for type checkers.

    ``apply_method(model.extend, variables, ...)`` returns the same result as
    ``model.apply(variables, ..., method=model.extend)``. Type checkers do not know the type of the
    result of ``model.apply``.
    """
    module: Any = method.__self__  # type: ignore[attr-defined]
    return module.apply(variables, *args, method=method, **kwargs)


def without_sown(variables: Mapping[str, Any]) -> Variables:
    """Returns the result of a module's `init` without the values that the module sows.

    A module may sow values whenever it is called, for example an addition to the training loss. Its
    `init` then returns a collection of these values in addition to the variables.
    """
    return {name: variables[name] for name in SAVED if name in variables}


def merge_entries(entries: PyTree, tree: PyTree) -> PyTree:
    """Merges two nested dictionaries, where `entries` overrides `tree`.

    `entries` may lack some entries of `tree`, and may contain additional entries.
    """
    flat = traverse_util.flatten_dict(tree) | traverse_util.flatten_dict(entries)
    return traverse_util.unflatten_dict(flat)


def check_path_pattern(field: str, pattern: str) -> None:
    """Raises a `ValueError` if a pattern for paths is not a regular expression.

    Args:
      field: the name of the field that holds the pattern, for the error message.
      pattern: the pattern.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{field}: {pattern!r} is not a valid regular expression: {error}."
        ) from None


def explain_no_match(field: str, pattern: str, noun: str, paths: Collection[str]) -> str:
    """Returns an error message for a pattern that does not match any path.

    Args:
      field: the name of the field that holds the pattern.
      pattern: a regular expression.
      noun: the kind of variables for which the pattern is meant, such as "parameter".
      paths: the paths that the pattern could match, at least one.
    """
    hint = did_you_mean(pattern, paths) or f". One of the paths is {min(paths)!r}."
    endings = sorted({"/".join(path.split("/")[-2:]) for path in paths})
    shown = ", ".join(endings[:MOST_ENDINGS])
    if len(endings) > MOST_ENDINGS:
        shown += ", …"
    return (
        f"{field}: {pattern!r} matches no {noun}{hint} A pattern must match a whole path. The "
        f"paths end in {shown}."
    )


def check_patterns_decide(field: str, patterns: Iterable[str], paths: Collection[str]) -> None:
    """Checks that each pattern is the first pattern that matches some parameter.

    Only the first pattern that matches the whole path of a parameter applies to the parameter. A
    pattern that is never the first match has no effect, and is most likely a misspelling.

    Args:
      field: the name of the field that holds the patterns, for the error message.
      patterns: regular expressions, in the order in which they are tried.
      paths: the paths of all parameters, in the layout with looped layers.

    Raises:
      ValueError: if a pattern is not the first match of any parameter.
    """
    undecided = set(paths)
    for pattern in patterns:
        matched = {path for path in paths if re.fullmatch(pattern, path)}
        if not matched:
            raise ValueError(explain_no_match(field, pattern, "parameter", paths))
        if matched.isdisjoint(undecided):
            raise ValueError(
                f"{field}: {pattern!r} has no effect, because earlier patterns match all of its "
                "parameters. Put it before them, or leave it out."
            )
        undecided -= matched


def is_axes(node: object) -> TypeGuard[Axes]:
    """Returns whether a node of a pytree is a tuple of axis names, for use as ``is_leaf``."""
    # Optax's empty state is a named tuple without fields, which must not count as a tuple of axes.
    if not isinstance(node, tuple) or hasattr(node, "_fields"):
        return False
    return all(isinstance(axis, str | None) for axis in node)


def first_output_axis(axes: Axes) -> int:
    """Returns the index of a kernel's first output axis. The axes before it are inputs.

    If the last axis is ``embed``, all other axes are inputs. If the last axis is not ``embed``,
    only the first axis is an input. The axis of scanned layers is neither an input nor an output.
    """
    return len(axes) - 1 if axes[-1] == "embed" else int(axes[0] == "layers") + 1


@struct.dataclass
class NamedAxes(nn.LogicallyPartitioned):
    """A box that holds a parameter and its axis names, but does not constrain its sharding."""

    def unbox(self, apply_constraint: bool = True) -> PyTree:
        """Returns the parameter without a sharding constraint."""
        del apply_constraint
        return self.value


@contextlib.contextmanager
def logical_axes() -> Iterator[None]:
    """Returns a context in which initializers of `with_axes` box their values with axis names."""
    token = _RETURNS_BOXES.set(True)
    try:
        yield
    finally:
        _RETURNS_BOXES.reset(token)


def with_axes(init: Callable[..., jax.Array], *axes: str | None) -> Initializer:
    """Returns an initializer that boxes its value with axis names inside `logical_axes()`.

    Args:
      init: an initializer ``(key, shape, dtype) -> array``.
      *axes: a name in `LOGICAL_AXES`, or None, for every dimension of the parameter.

    Raises:
      ValueError: if a name is not in `LOGICAL_AXES`.
    """
    unknown = set(axes) - {*LOGICAL_AXES, None}
    if unknown:
        raise ValueError(
            f"There is no logical axis {unknown.pop()!r}. The logical axes are "
            f"{', '.join(LOGICAL_AXES)}."
        )
    if not _RETURNS_BOXES.get():
        return init

    def boxed_init(*args: PyTree, **kwargs: PyTree) -> NamedAxes:
        """Returns the initial value in a box with the axis names."""
        return NamedAxes(init(*args, **kwargs), axes)

    return boxed_init


@functools.lru_cache(maxsize=64)
def _boxed_init(module: nn.Module) -> Callable[..., PyTree]:
    """Returns a function that initializes a module's variables inside `logical_axes()`.

    The function is cached, so that JAX traces equal modules with equal arguments only once.
    """

    def init(*args: PyTree, **kwargs: PyTree) -> PyTree:
        """Initializes the variables of the module as boxes with axis names."""
        with logical_axes():
            return module.init(*args, **kwargs)

    return init


def abstract_variables(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the shapes and logical axes of a module's variables without allocating arrays.

    Values that the module sows are not included; see `without_sown`.

    Args:
      module: an unbound module.
      *args: arguments of the module's `__call__`, either arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of the module's `__call__`.

    Returns:
      A pair of pytrees ``(shapes, axes)`` with the same structure. The leaves of `shapes` are
      `jax.ShapeDtypeStruct`, and the leaves of `axes` are tuples of axis names.
    """
    try:
        init = _boxed_init(module)
    except TypeError:
        # A module is not hashable if one of its fields is not hashable, such as a list.
        init = _boxed_init.__wrapped__(module)
    boxed = without_sown(jax.eval_shape(init, jax.random.key(0), *args, **kwargs))

    def is_box(x: PyTree) -> bool:
        """Returns whether a node of the pytree is a box that contains one variable."""
        return isinstance(x, nn.Partitioned)

    def shape_of(x: PyTree) -> jax.ShapeDtypeStruct:
        """Returns the shape of a variable, without its box."""
        shape: jax.ShapeDtypeStruct = x.value if is_box(x) else x
        return shape

    def axes_of(x: PyTree) -> Axes:
        """Returns the axis names of a variable. The names of a variable without a box are None."""
        return tuple(x.names) if is_box(x) else (None,) * x.ndim

    shapes = jax.tree.map(shape_of, boxed, is_leaf=is_box)
    return shapes, jax.tree.map(axes_of, boxed, is_leaf=is_box)
