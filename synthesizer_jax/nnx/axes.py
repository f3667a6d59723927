"""Rules that map the logical axis names of parameters to the axes of a user's mesh."""

from __future__ import annotations

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.parameters import ACTIVATION_AXES, LOGICAL_AXES


def axis_rules(
    **axes: str | tuple[str, ...] | None,
) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Returns rules for `nnx.logical_axis_rules` that cover every logical axis of this package.

    ``with nnx.logical_axis_rules(axis_rules(heads="tensor", mlp="tensor", embed="fsdp"))`` makes
    `nnx.get_partition_spec` return the axes of the mesh. Flax leaves names without a rule unchanged, so
    the result has a rule for each name; to use logical names of your own as well, append their rules.

    Args:
      **axes: for names of `LOGICAL_AXES` and `ACTIVATION_AXES`, the mesh axis or axes to shard over, or
        None. Names that are left out are not sharded.

    Raises:
      ValueError: a name is in neither table.
    """
    names = (*LOGICAL_AXES, *ACTIVATION_AXES)
    for name in axes:
        if name not in names:
            raise ValueError(f"axis_rules: unknown axis {name!r}{did_you_mean(name, names)}")
    return tuple((name, axes.get(name)) for name in names)
