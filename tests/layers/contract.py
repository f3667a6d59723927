"""What every alignment and every mixer must keep, as functions of a case.

A new variant needs one entry in `tests.layers.cases` (and a formula in `oracles`) to get all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from synthesizer_jax import Attention, Block, FeedForward, Mask, Run, Stack
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import unstack_layers
from synthesizer_jax.parameters import apply_method
from synthesizer_jax.registry import fields_of, from_json, to_json
from tests.environment import FAST_COMPILE as FAST
from tests.layers import oracles

BATCH, LENGTH, D, HEADS, WIDTH, ROOM = 2, 11, 10, 4, 3, 24
LENGTHS = (LENGTH, 6)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and its formula.

    Attributes:
      layer: the mixer.
      oracle: its formula, see `oracles`.
      packs: it takes packed rows, where its properties do not tell.
    """

    layer: Mixer
    oracle: Callable[..., np.ndarray]
    packs: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        """``full`` and ``causal``, the masks that the layer takes."""
        supported = {
            "full": self.layer.supports_bidirectional,
            "causal": self.layer.supports_causal,
        }
        return tuple(mode for mode, is_supported in supported.items() if is_supported)

    @property
    def packed(self) -> bool:
        """Whether the layer takes packed rows."""
        return self.packs and self.layer.supports_packing

    @classmethod
    def of(cls, alignment: Any, **options: Any) -> Case:
        """The case of an alignment in an `Attention`."""
        return cls(Attention(HEADS, WIDTH, alignment=alignment), oracles.attention, **options)


class Subject:
    """A case with parameters, tokens and compiled passes, in float64.

    Args:
      case: the case.
    """

    def __init__(self, case: Case):
        self.case, self.layer = case, case.layer
        with jax.enable_x64(True):
            self.x = tokens(0)
            first = self.layer.init(jax.random.key(1), self.x, mask=self.mask(case.modes[0]))
            self.variables = jax.tree.map(jittered, first)

    def mask(self, mode: str, lengths: tuple[int, ...] = LENGTHS) -> Mask:
        return Mask(causal=mode == "causal", key_lengths=jnp.array(lengths))

    def apply(self, x: jax.Array, mode: str, **fields: Any) -> jax.Array:
        """The pass under a mode's mask, compiled once for every shape and dtype."""
        return self.compiled(mode, **fields)(self.variables_as(x.dtype), x)

    @functools.cache  # noqa: B019 (lives as long as its fixture)
    def compiled(self, mode: str, **fields: Any) -> Callable[..., jax.Array]:
        layer = self.layer.copy(**fields) if fields else self.layer
        return jax.jit(
            lambda variables, x: layer.apply(variables, x, mask=self.mask(mode)),
            compiler_options=FAST,
        )

    def variables_as(self, dtype: Any) -> Any:
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        return jax.tree.map(lambda p: p.astype(wide), self.variables)


def tokens(seed: int, length: int = LENGTH, dtype: Any = np.float64) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, length, D)), dtype)


def jittered(p: jax.Array) -> jax.Array:
    """Parameters in general position: no zeros and ones that would hide a mistake."""
    noise = np.random.default_rng(p.size).normal(size=p.shape)
    return jnp.asarray(np.asarray(p, np.float64) + 0.3 * noise)


def seen_pairs(mode: str, lengths: tuple[int, ...] = LENGTHS, n: int = LENGTH) -> np.ndarray:
    """``[b, q, k]``."""
    real = np.arange(n) < np.array(lengths)[:, None]
    seen = real[:, :, None] & real[:, None, :]
    return seen & np.tri(n, dtype=bool) if mode == "causal" else seen


def real_rows(y: Any) -> list[np.ndarray]:
    return [np.asarray(row)[:length] for row, length in zip(y, LENGTHS, strict=True)]


def close(found: Any, expected: Any, bound: float) -> None:
    for one, other in zip(real_rows(found), real_rows(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * np.abs(other).max())


def needs_causal(s: Subject) -> None:
    if "causal" not in s.case.modes:
        pytest.skip("the layer's definition excludes causal masks")


def equals_the_oracle(s: Subject) -> None:
    numpy = jax.tree.map(np.asarray, s.variables)
    for mode in s.case.modes:
        with jax.enable_x64(True):
            found = s.apply(s.x, mode)
        assert found.dtype == np.float64
        expected = s.case.oracle(
            s.layer,
            numpy.get("params", {}),
            numpy.get("constants", {}),
            np.asarray(s.x),
            seen_pairs(mode),
        )
        close(found, expected, 1e-8)


def gradients_are_finite_differences(s: Subject) -> None:
    """Along random directions of the tokens and of each parameter."""
    params = s.variables.get("params", {})
    rest = {k: v for k, v in s.variables.items() if k != "params"}
    target = np.random.default_rng(7).normal(size=s.x.shape)
    mode = s.case.modes[-1]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = s.layer.apply({"params": params, **rest}, x, mask=s.mask(mode))
        return jnp.sum(jnp.where(jnp.asarray(seen_pairs(mode).any(2))[..., None], y * target, 0))

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=FAST)(params, s.x)
        loss = jax.jit(loss, compiler_options=FAST)
        leaves, tree = jax.tree.flatten((params, s.x))
        for i, gradient in enumerate(jax.tree.leaves(found)):
            direction = np.random.default_rng(i).normal(size=gradient.shape)
            moved = [
                loss(*tree.unflatten([*leaves[:i], leaves[i] + h * direction, *leaves[i + 1 :]]))
                for h in (1e-5, -1e-5)
            ]
            slope = (moved[0] - moved[1]) / 2e-5
            assert np.any(np.asarray(gradient) != 0)
            np.testing.assert_allclose(np.vdot(gradient, direction), slope, rtol=2e-5, atol=1e-7)


def nothing_leaks(s: Subject) -> None:
    """Masked and later tokens, and other examples, change no bit."""
    with jax.enable_x64(True):
        for mode in s.case.modes:
            y = real_rows(s.apply(s.x, mode))
            changed = s.x.at[1, LENGTHS[1] :].set(1e3)
            for one, other in zip(y, real_rows(s.apply(changed, mode)), strict=True):
                np.testing.assert_array_equal(one, other, "a padded token has influence")
            other = s.apply(s.x.at[1].multiply(-2.0), mode)
            np.testing.assert_array_equal(y[0], other[0], "another example has influence")
        if "causal" in s.case.modes:
            y = s.apply(s.x, "causal")
            later = s.apply(s.x.at[:, 5:].add(100.0), "causal")
            np.testing.assert_array_equal(y[:, :5], later[:, :5], "a later token has influence")


def steps_are_the_full_pass(s: Subject) -> None:
    needs_causal(s)
    with jax.enable_x64(True):

        @functools.partial(jax.jit, compiler_options=FAST)
        def first(x: jax.Array) -> Any:
            causal = Mask(causal=True)
            whole = s.layer.apply(s.variables, x, mask=causal)
            cache = apply_method(s.layer.init_cache, s.variables, x, max_length=ROOM)
            return whole, apply_method(s.layer.extend, s.variables, x[:, :3], cache)

        @functools.partial(jax.jit, compiler_options=FAST)
        def step(x: jax.Array, cache: Any, at: jax.Array) -> Any:
            return apply_method(s.layer.extend, s.variables, x, cache, position=at)

        whole, (y, cache) = first(s.x)

        parts = [y]
        for at in range(3, LENGTH):
            y, cache = step(s.x[:, at : at + 1], cache, jnp.asarray(at))
            parts.append(y)
        np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=0, atol=1e-9)


def ragged_prompts_decode_as_each_alone(s: Subject) -> None:
    """Prompts of five and three tokens, padded on either side; nobody says where the steps stand."""
    needs_causal(s)
    counts = jnp.array([5, 3])

    def decoded(x: jax.Array, prompt: jax.Array, mask: Mask) -> list[jax.Array]:
        cache = apply_method(s.layer.init_cache, s.variables, prompt, max_length=ROOM)
        y, cache = apply_method(s.layer.extend, s.variables, prompt, cache, mask=mask)
        parts = [y]
        for i in range(2):
            new = jnp.take_along_axis(x, counts[:, None, None] + i, axis=1)
            y, cache = apply_method(s.layer.extend, s.variables, new, cache)
            parts.append(y)
        return parts

    @functools.partial(jax.jit, compiler_options=FAST)
    def passes(x: jax.Array) -> Any:
        whole = s.layer.apply(s.variables, x, mask=Mask(causal=True))
        right = x[:, :5].at[1, 3:].set(9.0)
        left = right.at[1].set(jnp.roll(right[1], 2, axis=0))
        valid = jnp.arange(5) >= jnp.array([[0], [2]])
        return (
            whole,
            decoded(x, right, Mask(key_lengths=counts)),
            decoded(x, left, Mask(key_valid=valid)),
        )

    with jax.enable_x64(True):
        whole, right, left = passes(s.x)
    for parts, real in ((right, slice(0, 3)), (left, slice(2, 5))):
        prompt, *steps = parts
        np.testing.assert_allclose(prompt[0], whole[0, :5], rtol=0, atol=1e-9)
        np.testing.assert_allclose(prompt[1, real], whole[1, :3], rtol=0, atol=1e-9)
        for i, step in enumerate(steps):
            expected = jnp.stack([whole[0, 5 + i : 6 + i], whole[1, 3 + i : 4 + i]])
            np.testing.assert_allclose(step, expected, rtol=0, atol=1e-9)


def cross_attention_steps_are_the_full_pass(s: Subject) -> None:
    """And attending to oneself is self-attention."""
    if not isinstance(s.layer, AttentionBase):
        pytest.skip("the layer has no cross-attention with the parameters of its self-attention")
    lengths = jnp.array(LENGTHS)
    seen = Mask(key_lengths=jnp.array([9, 4]))

    @functools.partial(jax.jit, compiler_options=FAST)
    def passes(x: jax.Array, kv: jax.Array) -> Any:
        itself = Mask(key_lengths=lengths, query_lengths=lengths)
        same = s.layer.apply(s.variables, x, x, mask=itself)
        whole = s.layer.apply(s.variables, x, kv, mask=seen)
        extend = functools.partial(apply_method, s.layer.extend, s.variables, mask=seen)
        cache = apply_method(s.layer.init_cache, s.variables, x, kv, max_length=LENGTH, mask=seen)
        first, cache = extend(x[:, :4], cache)
        last, _ = extend(x[:, 4:], cache)
        return same, whole, jnp.concatenate([first, last], axis=1)

    with jax.enable_x64(True):
        same, whole, stepped = passes(s.x, tokens(5, length=9))
        np.testing.assert_allclose(stepped, whole, rtol=0, atol=1e-9)
        close(same, s.apply(s.x, "full"), 1e-9)


def longer_padding_changes_nothing(s: Subject) -> None:
    with jax.enable_x64(True):
        more = jnp.pad(s.x, ((0, 0), (0, 5), (0, 0)), constant_values=9.0)
        for mode in s.case.modes:
            close(s.apply(more, mode), s.apply(s.x, mode), 1e-9)


def packed_is_separate(s: Subject) -> None:
    if not s.case.packed:
        pytest.skip("the layer's definition excludes packed rows")
    segments = np.repeat([1, 2, 0], [5, LENGTH - 6, 1])[None].repeat(BATCH, 0)
    parts = (slice(0, 5), slice(5, LENGTH - 1))

    @functools.partial(jax.jit, static_argnums=1, compiler_options=FAST)
    def passes(x: jax.Array, mode: str) -> Any:
        packed = Mask(causal=mode == "causal", key_segments=jnp.asarray(segments), segments=2)
        alone = Mask(causal=mode == "causal")
        together = s.layer.apply(s.variables, x, mask=packed)
        return together, [s.layer.apply(s.variables, x[:, p], mask=alone) for p in parts]

    for mode in s.case.modes:
        with jax.enable_x64(True):
            together, separate = passes(s.x, mode)
        for part, expected in zip(parts, separate, strict=True):
            np.testing.assert_allclose(together[:, part], expected, rtol=0, atol=1e-9)


def unsupported_masks_are_refused(s: Subject) -> None:
    layer = s.layer
    refused = {
        "causal": not layer.supports_causal,
        "full": not layer.supports_bidirectional,
        "packed": not layer.supports_packing,
    }
    if not any(refused.values()):
        pytest.skip("the layer supports all masks")
    segments = jnp.ones((BATCH, LENGTH), jnp.int32)
    masks = {
        "causal": Mask(causal=True),
        "full": Mask(),
        "packed": Mask(causal=not layer.supports_bidirectional, key_segments=segments),
    }
    for name, is_refused in refused.items():
        if is_refused:
            with pytest.raises(ValueError, match=r"causal|encoders|packing"):
                layer.apply(s.variables, s.x, mask=masks[name])
    if not layer.supports_causal:
        with pytest.raises(ValueError, match="use it in encoders"):
            apply_method(layer.init_cache, s.variables, s.x, max_length=ROOM)


def compiled_is_eager(s: Subject) -> None:
    mode = s.case.modes[-1]
    with jax.enable_x64(True):
        eager = s.layer.apply(s.variables, s.x, mask=s.mask(mode))
        close(s.apply(s.x, mode), eager, 1e-9)


def bfloat16_is_near(s: Subject) -> None:
    for mode in s.case.modes:
        exact = s.apply(s.x.astype(jnp.float32), mode)
        rounded = s.apply(s.x.astype(jnp.bfloat16), mode)
        assert exact.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
        close(rounded.astype(jnp.float32), exact, 0.05)


def ranks_and_dtypes_are_not_promoted(s: Subject) -> None:
    """Gradients under all kinds of masks, and decoding steps, as JAX's strictest settings demand."""
    length, width = LENGTH, s.x.shape[-1]
    segments = jnp.asarray(np.repeat([1, 2, 0], [5, LENGTH - 6, 1])[None].repeat(BATCH, 0))
    lengths = jnp.array(LENGTHS)
    valid = np.arange(length) < np.array(LENGTHS)[:, None]
    cross = isinstance(s.layer, AttentionBase)

    def loss(variables: Any, x: jax.Array, mask: Mask, kv: jax.Array | None = None) -> jax.Array:
        y = s.layer.apply(variables, x, kv, mask=mask)
        return (y.astype(jnp.float32) ** 2).sum()

    def decoded(variables: Any, x: jax.Array) -> jax.Array:
        cache = apply_method(s.layer.init_cache, variables, x, max_length=ROOM)
        prompt = Mask(key_lengths=jnp.array([3, 2]))
        _, cache = apply_method(s.layer.extend, variables, x[:, :3], cache, mask=prompt)
        return apply_method(s.layer.extend, variables, x[:, 3:4], cache)[0]

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.bfloat16):
            x = jax.ShapeDtypeStruct((BATCH, length, width), dtype)
            variables = s.variables_as(dtype)
            for mode in s.case.modes:
                causal = mode == "causal"
                masks = [Mask.padded(lengths, causal=causal), Mask.padded(valid, causal=causal)]
                if s.case.packed:
                    masks += [Mask.packed(segments, causal=causal, segments=n) for n in (None, 2)]
                if cross:
                    prefix = Mask(causal=causal, prefix_lengths=lengths)
                    allowed = Mask(causal=causal, window=3, allowed=valid[:, None, None])
                    masks += [prefix, allowed]
                for mask in masks:
                    jax.eval_shape(jax.grad(loss), variables, x, mask)
            if "causal" in s.case.modes:
                jax.eval_shape(decoded, variables, x)
            if cross:
                jax.eval_shape(jax.grad(loss), variables, x, Mask(key_lengths=lengths), x)


def nothing_is_infinite(s: Subject) -> None:
    """Nor anything that is not a number, in any operation; one example has no tokens."""
    mode = s.case.modes[-1]
    variables, x = s.variables_as(jnp.float32), s.x.astype(jnp.float32)
    with jax.debug_nans(True), jax.debug_infs(True):
        y, back = jax.vjp(lambda x: s.layer.apply(variables, x, mask=s.mask(mode, (LENGTH, 0))), x)
        back(y)


def json_round_trip(s: Subject) -> None:
    again = from_json(json.loads(json.dumps(to_json(s.layer))))
    assert again == s.layer and hash(again) == hash(s.layer)
    assert "implementation" not in fields_of(s.layer) or again.implementation == "auto"


def scanned_is_looped(s: Subject) -> None:
    mode = s.case.modes[-1]
    block = Block(s.layer, FeedForward(8))
    scanned = Stack((Run(block, 2),), scan=True)
    mask = s.mask(mode)

    @functools.partial(jax.jit, compiler_options=FAST)
    def passes(x: jax.Array) -> Any:
        found, variables = scanned.init_with_output(jax.random.key(2), x, mask=mask)
        loop = {k: unstack_layers(scanned, v) for k, v in variables.items()}
        return found, scanned.copy(scan=False).apply(loop, x, mask=mask)

    close(*passes(s.x.astype(jnp.float32)), 1e-5)


def sharded_is_single(s: Subject) -> None:
    """Two ways over the examples and two over the heads, forward and gradient."""
    mesh = jax.make_mesh(
        (2, 2), ("replicas", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    mode = s.case.modes[-1]

    def run(variables: Any, x: jax.Array) -> Any:
        function = lambda v: (s.layer.apply(v, x, mask=s.mask(mode)) ** 2).sum()
        return jax.value_and_grad(function)(variables)

    rules = [("batch", "replicas"), ("heads", "model")]
    with jax.enable_x64(True):
        single = jax.jit(run, compiler_options=FAST)(s.variables, s.x)
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            spread = jax.jit(run, compiler_options=FAST)(s.variables, s.x)
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


CONTRACT = {
    check.__name__: check
    for check in (
        equals_the_oracle,
        gradients_are_finite_differences,
        nothing_leaks,
        steps_are_the_full_pass,
        ragged_prompts_decode_as_each_alone,
        cross_attention_steps_are_the_full_pass,
        longer_padding_changes_nothing,
        packed_is_separate,
        unsupported_masks_are_refused,
        compiled_is_eager,
        bfloat16_is_near,
        ranks_and_dtypes_are_not_promoted,
        nothing_is_infinite,
        json_round_trip,
        scanned_is_looped,
        sharded_is_single,
    )
}
