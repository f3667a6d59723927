"""From the logical axis names of parameters to the axes of a user's mesh."""

from __future__ import annotations

from synthesizer_jax.parameters import ACTIVATION_AXES, LOGICAL_AXES
from synthesizer_jax.suggestions import suggestion


def axis_rules(
    **axes: str | tuple[str, ...] | None,
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Rules for `nnx.logical_axis_rules`: which mesh axes divide our parameters and activations.

    ``with nnx.logical_axis_rules(axis_rules(heads="tensor", mlp="tensor", embed="fsdp"))`` gives
    `nnx.get_partition_spec` the names of the mesh. Flax leaves a name that the rules do not have as it
    is, so these have them all; to use names of your own beside them, add your rules to these.

    Args:
      **axes: a mesh axis, several or None for some of `LOGICAL_AXES` and `ACTIVATION_AXES`; the others
        are not sharded.

    Raises:
      ValueError: another name.
    """
    names = (*LOGICAL_AXES, *ACTIVATION_AXES)
    for name in axes:
        if name not in names:
            raise ValueError(f"axis_rules: unknown axis {name!r}{suggestion(name, names)}")
    return tuple((name, axes.get(name)) for name in names)
