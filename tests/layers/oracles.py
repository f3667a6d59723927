"""Implements the papers' formulas in NumPy with float64, to be readable rather than fast.

Each oracle takes a layer, its parameters, its constants, the tokens ``x [b, n, d]``, and ``seen [b,
q, k]``, which says what queries may see. It returns the output of the sub-layer ``[b, n, d]``.
"""

import math

import numpy as np

import synthesizer_jax as sj
from tests.attention.oracle import masked_softmax


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(layer, p, constants, x, seen):
    """``concat_h(weights · x W_v) W_o``."""
    align = p.get("align", {}) | ({"key": p["value"]} if layer.shared_key_value else {})
    seen = within_window(layer, seen)
    own = layer.alignment, align, constants.get("align", {}), x
    if layer.sinks:  # in these tests, layers with sinks also have a soft cap
        logits = layer.soft_cap * np.tanh(logits_of(*own, layer.num_heads) / layer.soft_cap)
        logits = np.broadcast_to(logits, (len(x), layer.num_heads, *seen.shape[1:]))
        sinks = np.broadcast_to(p["sinks"][:, None, None], (*logits.shape[:-1], 1))
        seen = np.append(seen, np.ones_like(seen[..., :1]), axis=-1)
        weights = masked_softmax(np.append(logits, sinks, axis=-1), seen[:, None])[..., :-1]
    else:
        weights = weights_of(*own, seen, layer.num_heads)
    if layer.project_values:
        values = np.einsum("bkd,dhe->bkhe", x, p["value"]["kernel"])
    else:
        values = np.repeat(x[:, :, None], layer.num_heads, axis=2)
    if layer.use_bias:
        values = values + p["value"]["bias"]
    values = np.repeat(values, layer.num_heads // values.shape[2], axis=2)
    y = np.einsum("bhqk,bkhe,hed->bqd", weights, values, p["out"]["kernel"])
    return y + p["out"]["bias"] if layer.use_bias else y


MEMORY_LENGTHS = (5, 3)
MEMORY = np.random.default_rng(3).normal(size=(2, 5, 10))
"""The outputs of an encoder, for two examples, to which `MergedAttention` attends."""


def merged_attention(layer, p, constants, x, seen):
    """``concat_h(softmax([S; C]) · [x; m] W_v) W_o``, with the keys of both kinds concatenated."""
    logits = logits_of(layer.alignment, p["align"], constants.get("align", {}), x, layer.num_heads)
    if layer.cross_alignment is None:
        align, own = layer.alignment, p["align"]
    else:
        align, own = layer.cross_alignment, p["cross_align"]
    memory_logits = np.zeros((*logits.shape[:3], MEMORY.shape[1]))
    for h, i, j in np.ndindex(*memory_logits.shape[1:]):
        # Shared keys of the memory are not rotated, as if they were at position 0.
        distance = i if layer.cross_alignment is None else i - j
        memory_logits[:, h, i, j] = product(
            align, own, x[:, i], MEMORY[:, j], h, distance, layer.num_heads
        )
    real = np.arange(MEMORY.shape[1]) < np.array(MEMORY_LENGTHS)[:, None]
    memory_seen = seen.any(2)[:, :, None] & real[:, None]
    seen = np.concatenate([within_window(layer, seen), memory_seen], axis=2)
    logits = np.concatenate([logits, memory_logits], axis=3)
    if layer.soft_cap is not None:
        logits = layer.soft_cap * np.tanh(logits / layer.soft_cap)
    if layer.sinks:
        sinks = np.broadcast_to(p["sinks"][:, None, None], (*logits.shape[:-1], 1))
        logits = np.append(logits, sinks, axis=-1)
        seen = np.append(seen, np.ones_like(seen[..., :1]), axis=-1)
    tokens = np.concatenate([x, MEMORY], axis=1)
    weights = masked_softmax(logits, seen[:, None])[..., : tokens.shape[1]]
    values = np.einsum("bkd,dhe->bkhe", tokens, p["value"]["kernel"])
    if layer.use_bias:
        values = values + p["value"]["bias"]
    values = np.repeat(values, layer.num_heads // values.shape[2], axis=2)
    y = np.einsum("bhqk,bkhe,hed->bqd", weights, values, p["out"]["kernel"])
    return y + p["out"]["bias"] if layer.use_bias else y


def within_window(layer, seen):
    """Returns `seen` without the keys that are outside of the window.

    If the window is a number, keys are less than `window` positions away from the query.
    """
    if layer.window is None:
        return seen
    position = np.arange(seen.shape[-1])
    offset = position - position[:, None]
    if isinstance(layer.window, int):
        return seen & (abs(offset) < layer.window)
    before, after = layer.window
    return seen & (offset >= -before) & (offset <= after)


def weights_of(alignment, p, constants, x, seen, heads):
    """Returns attention weights ``[b, h, q, k]``."""
    if isinstance(alignment, sj.Gaussian):
        return gaussian(alignment, x, seen, heads)
    if isinstance(alignment, sj.PerHead):
        parts = []
        for i, count in enumerate(alignment.counts(heads)):
            own = (values.get(f"part_{i}", {}) for values in (p, constants))
            parts.append(weights_of(alignment.parts[i], *own, x, seen, count))
        return np.concatenate(parts, axis=1)
    return masked_softmax(logits_of(alignment, p, constants, x, heads), seen[:, None])


def gaussian(alignment, x, seen, heads):
    """Hard-coded attention (You et al. 2020): the weights are a Gaussian density.

    Keys that are not seen have no influence.
    """
    b, n, _ = x.shape
    out = np.zeros((b, heads, n, n))
    for h, i, j in np.ndindex(heads, n, n):
        center = alignment.ratio * i + alignment.offsets[h % len(alignment.offsets)]
        if alignment.sigma == 0:
            out[:, h, i, j] = -0.5 < j - center <= 0.5
            continue
        z = (j - center) / alignment.sigma
        out[:, h, i, j] = math.exp(-z * z / 2) / (alignment.sigma * math.sqrt(2 * math.pi))
    if alignment.threshold is not None:
        out[out < alignment.threshold] = 0
    out = out * seen[:, None]
    if alignment.normalize:
        total = out.sum(-1, keepdims=True)
        out = np.divide(out, total, out=np.zeros_like(out), where=total > 0)
    return out


def logits_of(alignment, p, constants, x, heads):
    """Returns logits ``[b, h, q, k]``.

    The logits are computed for one head and one pair of positions at a time.
    """
    if isinstance(alignment, sj.Mixture):
        return mixture(alignment, p, constants, x, heads)
    if isinstance(alignment, sj.PerHead):
        parts = [
            logits_of(part, *(v.get(f"part_{i}", {}) for v in (p, constants)), x, count)
            for i, (part, count) in enumerate(
                zip(alignment.parts, alignment.counts(heads), strict=True)
            )
        ]
        return np.concatenate([np.broadcast_to(s, (len(x), *s.shape[1:])) for s in parts], axis=1)
    b, n, _ = x.shape
    s = np.zeros((b, heads, n, n))
    for h, i, j in np.ndindex(heads, n, n):
        s[:, h, i, j] = one_logit(alignment, p, constants, x, h, i, j, heads)
    return s


def mixture(alignment, p, constants, x, heads):
    count = len(alignment.parts)
    if alignment.weights == "softmax":
        alpha = softmax(p["weights"])
    elif alignment.weights == "sigmoid":
        gate = 1 / (1 + np.exp(-p["gate"][0]))
        alpha = np.tile([1 - gate, gate], (heads, 1))
    else:
        alpha = np.ones((heads, count))
    total = 0.0
    for i, part in enumerate(alignment.parts):
        own = dict(p.get(f"part_{i}", {}))
        if alignment.share_query:
            own["query"] = own["hidden"] = p["query"]
        part_logits = logits_of(part, own, constants.get(f"part_{i}", {}), x, heads)
        total = total + alpha[None, :, i, None, None] * part_logits
    return total


def rotary_turns(alignment, width):
    """Returns the rotation in radians per position for every pair of features, and a factor.

    Queries and keys are both multiplied by the factor.
    """
    base, scaling = alignment.rotary_base, alignment.rotary_scaling
    turns = base ** (-np.arange(0, width, 2) / width)
    magnitude = 1.0
    if isinstance(scaling, sj.LinearScaling):
        turns /= scaling.factor
    elif isinstance(scaling, sj.YaRN):  # Peng et al. 2023, with the ramp of their code

        def pair(count):
            """Returns the pair of features that makes `count` turns within the original length."""
            return width / 2 * math.log(scaling.original_length / (2 * np.pi * count), base)

        low = max(math.floor(pair(scaling.fast)), 0)
        high = math.ceil(pair(scaling.slow))
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
        turns = [
            (1 - r) * turn + r * turn / scaling.factor for r, turn in zip(ramp, turns, strict=True)
        ]
        magnitude = 0.1 * math.log(scaling.factor) + 1
    return np.array(turns), magnitude


def one_logit(alignment, p, constants, x, h, i, j, heads):
    match alignment:
        case sj.DotProduct():
            return product(alignment, p, x[:, i], x[:, j], h, i - j, heads)
        case sj.Bilinear():
            return (project(p["query"], x[:, i], h) * x[:, j]).sum(-1)
        case sj.Dense():
            hidden = np.maximum(project(p["hidden"], x[:, i], h), 0)
            return hidden @ p["table"][0 if alignment.share_heads else h, j]
        case sj.Random():
            return (p if alignment.trainable else constants)["table"][h, i, j]
        case sj.FactorizedRandom():
            return p["query_factor"][h, i] @ p["key_factor"][h, j]
        case sj.FactorizedDense():
            hidden = np.maximum(project(p["hidden"], x[:, i], h), 0)
            a, b = hidden @ p["first"][h], hidden @ p["second"][h]
            return a[:, j // b.shape[-1]] * b[:, j % b.shape[-1]]
        case sj.ALiBi():
            return -(2.0 ** (-8 * (h + 1) / heads)) * abs(j - i)
        case sj.RelativeBias():
            return p["rel_embedding"][h, bucket(j - i, alignment)]
        case sj.GaussianBias():
            if alignment.trainable:
                return -0.5 * p["precision"][h] * (j - i - p["offset"][h]) ** 2
            offset = alignment.offsets[h % len(alignment.offsets)]
            return -0.5 * ((j - i - offset) / alignment.sigma) ** 2
    raise TypeError(alignment)


def product(alignment, p, query, key, h, distance, heads):
    """Returns the logit of a `DotProduct` for two tokens ``[b, d]``.

    `distance` is the position of the query minus the position of the key.
    """
    q = project(p["query"], query, h)
    k = project(p["key"], key, h * p["key"]["kernel"].shape[1] // heads)
    width = q.shape[-1]
    if norm := alignment.normalize_qk:
        offset, epsilon = (0.0, 1e-6) if norm is True else (norm.offset, norm.epsilon)
        q, k = (
            y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon) * (offset + p[name]["scale"])
            for y, name in ((q, "query_norm"), (k, "key_norm"))
        )
    if alignment.rotary_base is not None:  # pairs of features are complex numbers
        w = int(width * alignment.rotary_share)
        q, k = ((y[:, : w // 2] + 1j * y[:, w // 2 : w], y[:, w:]) for y in (q, k))
        turn, magnitude = rotary_turns(alignment, w)
        q = np.concatenate([q[0] * np.exp(1j * distance * turn) * magnitude**2, q[1]], axis=-1)
        k = np.concatenate(k, axis=-1)
    return (q * k.conj()).sum(-1).real * (alignment.scale or 1 / math.sqrt(width))


def project(p, x, h):
    y = x @ p["kernel"][:, h]
    return y + p["bias"][h] if "bias" in p else y


def bucket(distance, alignment):
    """Returns T5's bucket for a single distance (Raffel et al. 2020)."""
    result = 0
    n = -distance
    buckets = alignment.num_buckets
    if alignment.bidirectional:
        buckets //= 2
        result = buckets if n < 0 else 0
        n = abs(n)
    n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return result + n
    log = math.log(n / exact) / math.log(alignment.max_distance / exact) * (buckets - exact)
    return result + min(exact + int(log + 1e-5), buckets - 1)


def talking_heads(layer, p, constants, x, seen):
    """Shazeer et al. 2020."""
    own = p.get("align", {}), constants.get("align", {})
    logits = logits_of(layer.alignment, *own, x, layer.num_heads)
    logits = talk(layer, p, x, logits, "logits", layer.bias_heads)
    weights = masked_softmax(logits, within_window(layer, seen)[:, None])
    weights = talk(layer, p, x, weights, "weights", layer.num_value_heads)
    values = np.einsum("bkd,dhe->bkhe", x, p["value"]["kernel"])
    return np.einsum("bhqk,bkhe,hed->bqd", weights, values, p["out"]["kernel"])


def talk(layer, p, x, heads, what, to):
    """Mixes heads of ``[b, h, q, k]`` with a separate matrix for every pair of positions."""
    matrix = np.zeros((*x.shape[:2], x.shape[1], heads.shape[1], to))
    matrix += p[f"{what}_projection"] if getattr(layer, f"project_{what}") else np.eye(to)
    for source, axis in (("x2", 2), ("m2", 1)):
        if source + what[0] in layer.dynamic:
            kernel = p[source + what[0]]["kernel"]
            matrix += np.expand_dims(np.einsum("bnd,dhg->bnhg", x, kernel), axis)
    return np.einsum("bhqk,bqkhg->bgqk", heads, matrix)


def convolution(layer, p, constants, x, seen):
    """Wu et al. 2019."""
    _, n, d = x.shape
    u = x @ p["input"]["kernel"]
    if layer.glu:
        u = u / (1 + np.exp(-(x @ p["gate"]["kernel"])))
    groups = layer.groups or d
    causal = not seen[:, 0, 1:].any()
    first = 1 - layer.width if causal else -(layer.width // 2)
    out = np.zeros_like(u)
    for i, c in np.ndindex(n, d):
        g = c // (d // groups)
        if type(layer).__name__ == "DynamicConvolution":
            kernel = softmax(np.einsum("bd,dt->bt", u[:, i], p["taps"]["kernel"][:, g]))
        else:
            kernel = softmax(p["taps"][g])[None]
        for t in range(layer.width):
            j = i + first + t
            if 0 <= j < n:
                out[:, i, c] += kernel[:, t] * u[:, j, c] * seen[:, i, j]
    if layer.pointwise:
        out = out @ p["pointwise"]["kernel"] + p["pointwise"]["bias"]
    return np.einsum("bnd,de->bne", out, p["out"]["kernel"][0])


def linformer(layer, p, constants, x, seen):
    """Wang et al. 2020, equation 7."""
    n = x.shape[1]
    real = seen.any(axis=1)
    q, k, v = (
        np.einsum("bnd,dhe->bhne", x, p[name]["kernel"]) for name in ("query", "key", "value")
    )
    e = p["key_length_projection"][:, :n]
    f = e if layer.shared else p["value_length_projection"][:, :n]
    k, v = k * real[:, None, :, None], v * real[:, None, :, None]
    k, v = np.einsum("pn,bhne->bhpe", e, k), np.einsum("pn,bhne->bhpe", f, v)
    weights = softmax(np.einsum("bhqe,bhpe->bhqp", q, k) / math.sqrt(layer.head_dim))
    y = np.einsum("bhqp,bhpe,hed->bqd", weights, v, p["out"]["kernel"])
    return y * real[:, :, None]


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def sentence_network(p, flat, net):
    """Bozic et al.

    2023: the network of the released code, applied to one flattened and padded sentence.
    """
    x = layer_norm(flat, p["scale_0"][net].reshape(-1), p["shift_0"][net].reshape(-1))
    hidden = p["kernel_0"].shape[-1]
    x = x @ p["kernel_0"][net].reshape(-1, hidden) + p["bias_0"][net]
    x = np.where(x > 0, x, 0.01 * x)
    x = layer_norm(x, p["scale_1"][net], p["shift_1"][net])
    return np.einsum("f,mfv->mv", x, p["kernel_1"][net]) + p["bias_1"][net]


def sentence_feed_forward(layer, p, constants, x, seen):
    b, n, d = x.shape
    real = seen.any(axis=1)
    tokens = np.zeros((b, layer.max_length, d))
    tokens[:, :n] = x * real[:, :, None]

    def run(row, net):
        """Applies one network to a flattened sentence."""
        return sentence_network(p["network"], row.reshape(-1), net)

    heads = []
    for net in range(layer.num_heads if layer.separate_heads else 1):
        if layer.causal:  # position i reads the first i + 1 positions
            until = np.tri(n, layer.max_length)[:, :, None]
            heads.append([[run(row * read, net)[0] for read in until] for row in tokens])
        else:
            heads.append([run(row, net)[:n] for row in tokens])
    y = np.concatenate(heads, axis=-1) * real[:, :, None]
    if layer.num_heads is None:
        return y
    y = y.reshape(b, n, layer.num_heads, layer.head_dim)
    return np.einsum("bnhe,hed->bnd", y, p["out"]["kernel"])


def token_feed_forward(layer, p, constants, x, seen):
    b, n, _ = x.shape
    real = seen.any(axis=1)
    y = np.stack(
        [[sentence_network(p["network"], x[i, j], 0)[0] for j in range(n)] for i in range(b)]
    )
    y = (y * real[:, :, None]).reshape(b, n, layer.num_heads, layer.head_dim)
    return np.einsum("bnhe,hed->bnd", y, p["out"]["kernel"])
