"""Made by `python -m synthesizer_jax.nnx.stubs`; do not edit."""

from typing import Any

import jax
from flax import nnx

from synthesizer_jax.alignments import Alignment, DotProduct
from synthesizer_jax.attention import Cache, Mask, Terms
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.mixers import NewCache
from synthesizer_jax.mixers.feed_forward import Sums
from synthesizer_jax.nnx.forms import Layer

class Attention(Layer):
    """Multi-head attention whose logits come from any alignment.

    ``y = concat_h(softmax(Σ terms) · x W_v) W_o``.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head; ``num_heads · head_dim`` need not be d_model.
      alignment: who looks at whom.
      dropout_rate: probability of dropping an attention weight; T5's form, one draw per example,
        head and key, active when the random stream ``dropout`` is given.
      shared_key_value: one projection serves as keys and values (Mesh-TensorFlow's shared ``kv``).
      project_values: False takes the tokens themselves as every head's values; with the alignment
        `Bilinear` this is general bilinear attention (Shazeer et al. 2020, section 3.3).
      use_bias: biases in the value and output projections, as in BERT; an alignment has its own.
      implementation: route of the engine: ``auto``, or a name of `attention.attend.ROUTES`.
      value_init: initialiser of the value kernel ``[d_model, heads, head_dim]``.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    num_heads: int
    head_dim: int
    alignment: Alignment
    dropout_rate: float
    shared_key_value: bool
    project_values: bool
    use_bias: bool
    implementation: str
    value_init: Initializer
    out_init: Initializer
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        alignment: Alignment = DotProduct(),
        dropout_rate: float = 0.0,
        shared_key_value: bool = False,
        project_values: bool = True,
        use_bias: bool = False,
        implementation: str = "auto",
        value_init: Initializer = FanIn(scale=1.0),
        out_init: Initializer = FanIn(scale=1.0),
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Mixes tokens.

        Args:
          x: ``[batch, q, d_model]``; its dtype is the dtype of the computation.
          kv: ``[batch, k, d_model]`` tokens to attend to; None means `x` (self-attention).
          mask: which keys may be seen and which queries are real; in self-attention without a
            cache the queries are real where the keys are. With a cache its `query_offset` is taken
            to be `position`.
          bias: terms added to the alignment's, outside a mixture's weights (T5's relative bias).
          cache: keys and values of earlier positions, or `NewCache`. `x` then holds the tokens from
            `position` on; a zero-length `kv` adds nothing (cross-attention after its first step).
          position: in-sequence position of the first token of `x`.

        Returns:
          ``[batch, q, d_model]``, and with a cache the pair of that and the extended cache.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class LightweightConvolution(Layer):
    """A depthwise convolution whose kernel is a softmax over its taps, between two projections.

    ``y = W_o · conv(W_1 x ∘ σ(W_2 x))``, ``conv(u)_i = Σ_t softmax(w)_t u_{i + t}`` (Wu et al. 2019).
    Under a causal mask the taps are the last `width` positions, otherwise they lie around the
    position. Padding counts as zero; nothing is renormalised.

    Attributes:
      width: number of taps.
      groups: channels that share a kernel form a group; None: every channel has its own kernel, as
        in the released Mesh-TensorFlow code (Wu et al.: 16 groups).
      glu: the gate on the way in; False is one plain projection.
      pointwise: another dense layer with bias before the output projection, as in the released
        Mesh-TensorFlow code.
      dropout_rate: probability of dropping a tap, one draw per example, position and group.
      tap_init: initialiser of the kernel's logits ``[groups, width]``.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    width: int
    groups: int | None
    glu: bool
    pointwise: bool
    dropout_rate: float
    tap_init: Initializer
    kernel_init: Initializer
    def __init__(
        self,
        width: int = 9,
        groups: int | None = None,
        glu: bool = True,
        pointwise: bool = False,
        dropout_rate: float = 0.0,
        tap_init: Initializer = Normal(stddev=0.1),
        kernel_init: Initializer = FanIn(scale=1.0),
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Mixes tokens; arguments and results as in `Attention`, without cross-attention and bias.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class DynamicConvolution(LightweightConvolution):
    """As `LightweightConvolution`, but every position's token computes its own kernel.

    ``w_i = W u_i`` (Wu et al. 2019, section 4).

    Attributes:
      groups: None is every channel, whose kernels then are d_model · width wide.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    width: int
    groups: int | None
    glu: bool
    pointwise: bool
    dropout_rate: float
    tap_init: Initializer
    kernel_init: Initializer
    def __init__(
        self,
        width: int = 9,
        groups: int | None = None,
        glu: bool = True,
        pointwise: bool = False,
        dropout_rate: float = 0.0,
        tap_init: Initializer = Normal(stddev=0.1),
        kernel_init: Initializer = FanIn(scale=1.0),
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Mixes tokens; arguments and results as in `Attention`, without cross-attention and bias.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class Linformer(Layer):
    """Attention to k learned mixtures of the positions instead of the positions themselves.

    ``softmax(Q (E K)ᵀ / √d_k) (F V)`` with E, F of ``[k, max_length]`` (Wang et al. 2020, equation
    7): cost linear in the length. Encoders only, because a projection along the length mixes later
    positions in. Padding is zero before it is projected.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head.
      max_length: number of positions that E and F address.
      projected_length: the paper's k.
      shared: E = F, the paper's "key-value sharing"; both are always shared by the heads.
      dropout_rate: probability of dropping an attention weight.
      length_init: initialiser of E and F; None: standard deviation 1/√projected_length, the paper's
        Johnson-Lindenstrauss projection.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    num_heads: int
    head_dim: int
    max_length: int
    projected_length: int
    shared: bool
    dropout_rate: float
    query_init: Initializer
    kernel_init: Initializer
    length_init: Initializer | None
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int,
        projected_length: int = 256,
        shared: bool = True,
        dropout_rate: float = 0.0,
        query_init: Initializer = FanIn(scale=1.0),
        kernel_init: Initializer = FanIn(scale=1.0),
        length_init: Initializer | None = None,
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Any = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Mixes tokens; arguments and results as in `Attention`, for encoders' self-attention.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class SentenceFeedForward(Layer):
    """A feed-forward network over the whole sentence in the place of attention.

    Bozic et al. 2023: ALR with the defaults (the network makes the concatenated heads, the output
    projection stays), ALSR with `separate_heads`, ALRR and ELR without `num_heads` in a `Block` whose
    `self_residual` is off (ELR: and which has no feed-forward layer). In decoders `causal`: position
    i is what the network makes of the first i tokens. As a `cross_mixer` it reads the encoder's
    output and the first i decoder states; the released code trained that one on all decoder states
    and used it on prefixes, here both are prefixes, so that training and decoding agree.

    Attributes:
      max_length: number of tokens that the network addresses, the paper's 50.
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection; None: none, the network's output is the
        mixer's.
      head_dim: width of one head.
      separate_heads: one network per head.
      causal: for decoders' self-attention.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    max_length: int
    hidden_dim: int
    num_heads: int | None
    head_dim: int
    separate_heads: bool
    causal: bool
    out_init: Initializer
    def __init__(
        self,
        max_length: int,
        hidden_dim: int,
        num_heads: int | None = None,
        head_dim: int = 0,
        separate_heads: bool = False,
        causal: bool = False,
        out_init: Initializer = FanIn(scale=1.0),
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Sums | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Mixes tokens; arguments and results as in `Attention`, but without a position bias.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class TalkingHeads(Attention):
    """Attention whose heads exchange logits before the softmax and weights after it.

    ``J = alignment``, ``L = J P_l + bias``, ``W = softmax(L)``, ``U = W P_w``, ``y = concat(U V) W_o``
    (Shazeer et al. 2020, section 3). Works over any alignment made of logits. All logits are held in
    memory: heads cannot be computed one by one.

    Attributes:
      num_heads: heads of the alignment, the paper's h_k.
      softmax_heads: the paper's h, of the softmax and of a position bias; None: as many.
      value_heads: the paper's h_v; None: as many as `softmax_heads`.
      project_logits: False leaves P_l out; then ``num_heads = softmax_heads``.
      project_weights: False leaves P_w out; then ``softmax_heads = value_heads``.
      dynamic: any of ``x2l``, ``m2l``, ``x2w``, ``m2w``: a linear function of the query's token (x)
        or of the key's (m) is added to P_l or P_w (section 6).
      talk_init: initialiser of P_l ``[h_k, h]`` and P_w ``[h, h_v]``.
      dynamic_scale: variance of a dynamic projection's entries at unit tokens, times the number of
        heads that it sums over.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    num_heads: int
    head_dim: int
    alignment: Alignment
    dropout_rate: float
    shared_key_value: bool
    project_values: bool
    use_bias: bool
    implementation: str
    value_init: Initializer
    out_init: Initializer
    softmax_heads: int | None
    value_heads: int | None
    project_logits: bool
    project_weights: bool
    dynamic: tuple[str, ...]
    talk_init: Initializer
    dynamic_scale: float
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        alignment: Alignment = DotProduct(),
        dropout_rate: float = 0.0,
        shared_key_value: bool = False,
        project_values: bool = True,
        use_bias: bool = False,
        implementation: str = "auto",
        value_init: Initializer = FanIn(scale=1.0),
        out_init: Initializer = FanIn(scale=1.0),
        softmax_heads: int | None = None,
        value_heads: int | None = None,
        project_logits: bool = True,
        project_weights: bool = True,
        dynamic: tuple[str, ...] = (),
        talk_init: Initializer = FanIn(scale=1.0),
        dynamic_scale: float = 0.01,
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: Cache | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Mixes tokens.

        Args:
          x: ``[batch, q, d_model]``; its dtype is the dtype of the computation.
          kv: ``[batch, k, d_model]`` tokens to attend to; None means `x` (self-attention).
          mask: which keys may be seen and which queries are real; in self-attention without a
            cache the queries are real where the keys are. With a cache its `query_offset` is taken
            to be `position`.
          bias: terms added to the alignment's, outside a mixture's weights (T5's relative bias).
          cache: keys and values of earlier positions, or `NewCache`. `x` then holds the tokens from
            `position` on; a zero-length `kv` adds nothing (cross-attention after its first step).
          position: in-sequence position of the first token of `x`.

        Returns:
          ``[batch, q, d_model]``, and with a cache the pair of that and the extended cache.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class TokenFeedForward(Layer):
    """The same network on every token by itself: no mixing at all, the baseline of the others.

    Attributes:
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection.
      head_dim: width of one head.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    hidden_dim: int
    num_heads: int
    head_dim: int
    out_init: Initializer
    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        head_dim: int,
        out_init: Initializer = FanIn(scale=1.0),
        *,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        cache: tuple[()] | NewCache | None = None,
        position: int | jax.Array = 0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """As in `Attention`, for self-attention; nothing is kept while decoding.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
