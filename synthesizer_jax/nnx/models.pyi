"""Made by `python -m synthesizer_jax.nnx.stubs`; do not edit."""

from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.models import Encoded, Memory, RMSNorm, Run
from synthesizer_jax.nnx.forms import Layer, Model, Residual

class FeedForward(Layer):
    """T5's position-wise layer, ``(act₀(x W₀) ∘ act₁(x W₁) …) W_o``.

    Attributes:
      hidden_dim: width of the hidden layer.
      activations: one name of `ACTIVATIONS` per input matrix: ``("relu",)`` is T5 1.0,
        ``("gelu", "linear")`` the gated GELU of T5 1.1 (Shazeer 2020).
      dropout_rate: dropout of hidden features, broadcast over the length.
      use_bias: biases in all matrices, as in BERT; T5 has none.

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
    activations: tuple[str, ...]
    dropout_rate: float
    use_bias: bool
    kernel_init: Initializer
    def __init__(
        self,
        hidden_dim: int,
        activations: tuple[str, ...] = ("gelu", "linear"),
        dropout_rate: float = 0.0,
        use_bias: bool = False,
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
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, length, d_model]`` in and out.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class Block(Residual):
    """Residual sub-layers: self-attention, cross-attention if any, feed-forward.

    A field holds a sub-layer's configuration; the sub-layer made from it carries T5X's name
    (``self_attention``, ``encoder_decoder_attention``, ``mlp``; ``attention`` in encoders).

    For distillation a block leaves in the collection `SITES` the inputs ``self_input`` and
    ``cross_input``, the mixers' outputs ``self_mixed`` and ``cross_mixed``, ``self_output`` (after the
    residual) and ``output``; given the collection ``forced`` it takes those inputs from there.

    Attributes:
      self_mixer: the token mixer, such as `Attention`.
      feed_forward: the position-wise layer; None leaves it out.
      cross_mixer: the mixer over the encoder's output; None in encoders and language models, and in
        a decoder's layer that does not look at the encoder.
      dropout_rate: dropout of each sub-layer's output.
      norm: the normalisation.
      post_norm: normalise after the residual, ``norm(x + f(x))`` (Vaswani et al. 2017, BERT), not
        before the sub-layer, ``x + f(norm(x))`` (T5).
      self_residual: False: the mixer stands for its norm and residual too (ALRR, and ELR where
        `feed_forward` is None; Bozic et al. 2023).

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    self_mixer: nn.Module
    feed_forward: nn.Module | None
    cross_mixer: nn.Module | None
    dropout_rate: float
    norm: nn.Module
    post_norm: bool
    self_residual: bool
    def __init__(
        self,
        self_mixer: nn.Module,
        feed_forward: nn.Module | None,
        cross_mixer: nn.Module | None = None,
        dropout_rate: float = 0.0,
        norm: nn.Module = RMSNorm(),
        post_norm: bool = False,
        self_residual: bool = True,
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
        mask: Mask | None = None,
        bias: Terms = (),
        memory: Memory | None = None,
        cache: tuple[Any, ...] | None = None,
        position: int | jax.Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """One layer.

        Args:
          x: ``[batch, q, d_model]``.
          mask: the self-attention's mask.
          bias: the stack's position bias, for a self-attention that has logits.
          memory: the encoder's side, in decoders.
          cache: one cache per mixer, in their order; see `Attention`.
          position: position of the first token of `x` when decoding; see `Attention`.

        Returns:
          The pair of ``[batch, q, d_model]`` and the new caches (None without a cache), which is
          also the form of a scan's body.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class Stack(Residual):
    """Embedded tokens in, normalised hidden states out.

    Attributes:
      runs: the layers. One run is the usual case; several make different layers.
      bias: one position bias for all layers whose self-attention has logits, such as
        `RelativeBias`.
      positions: a module ``(positions, d_model) -> vectors`` that is added to the embeddings, such
        as `LearnedPositions`.
      input_norm: a normalisation of the embeddings (BERT).
      norm: the normalisation of the output; None in post-norm models, whose last layer ends in one.
      dropout_rate: dropout of the embeddings and, unless `drop_output` is False, of the output.
      scan: each run of several layers is one `nn.scan` with stacked parameters: compile time does
        not grow with the depth.
      remat: None, or a name of `REMAT_POLICIES`: recompute layers in the backward pass.
      drop_output: False: no dropout of the output (You et al. 2020).

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    runs: tuple[Run, ...]
    bias: nn.Module | None
    positions: nn.Module | None
    input_norm: nn.Module | None
    norm: nn.Module | None
    dropout_rate: float
    scan: bool
    remat: str | None
    drop_output: bool
    def __init__(
        self,
        runs: tuple[Run, ...],
        bias: nn.Module | None = None,
        positions: nn.Module | None = None,
        input_norm: nn.Module | None = None,
        norm: nn.Module | None = RMSNorm(),
        dropout_rate: float = 0.0,
        scan: bool = False,
        remat: str | None = None,
        drop_output: bool = True,
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
        *,
        mask: Mask | None = None,
        memory: Memory | None = None,
        positions: jax.Array | None = None,
        caches: tuple[Any, ...] | None = None,
        position: int | jax.Array | None = None,
        length: int | None = None,
        counted: jax.Array | None = None,
        shared_positions: nn.Module | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Runs all layers.

        Args:
          x: ``[batch, q, d_model]`` embeddings.
          mask: the self-attention's mask.
          memory: the encoder's side, for decoders.
          positions: ``[batch or 1, q]`` in-sequence positions; None: in packed rows those inside the
            segments, otherwise `position` onwards.
          caches: one entry per layer when decoding, see `Block`; needs `scan=False`. Prompts of
            different lengths are given as to `Attention`.
          position: position of the first token of `x` when decoding, for all or ``[batch]``; None:
            where the caches end.
          length: number of key positions, past ones included; None means q.
          counted: ``[batch, q]`` bool, the positions that count in what modules add to a training
            loss; None: those that are real by the mask.
          shared_positions: a bound module like `positions`, which several stacks share.

        Returns:
          ``[batch, q, d_model]`` and the new caches.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class UniversalStack(Stack):
    """A stack whose layers share their parameters (Dehghani et al. 2019).

    Before every step the signals of position and step are added. With a `halting_threshold` every
    position halts by itself (adaptive computation time, Graves 2016). As in Tensor2Tensor and
    Mesh-TensorFlow the output is ``a_T`` of ``a_t = w_t s_t + (1 − w_t) a_{t−1}``, ``a_0 = 0``, with s
    the states and w the halting probabilities (the last one the remainder, zero afterwards); Graves'
    own average is ``Σ_t w_t s_t``. The mean number of steps costs `ponder_cost`.

    Attributes:
      runs: one `Run`, its repeats are the steps.
      halting_threshold: a position halts once its probabilities add up to more than this; None runs
        all steps.
      ponder_cost: factor of the mean number of steps and remainders in the training loss.
      signals: add the sinusoids of position and step.

    As an NNX module also:
      in_features: width of the tokens.
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      cross: the layer attends to other tokens than its own; only a layer whose parameters depend
        on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    runs: tuple[Run, ...]
    bias: nn.Module | None
    positions: nn.Module | None
    input_norm: nn.Module | None
    norm: nn.Module | None
    dropout_rate: float
    scan: bool
    remat: str | None
    drop_output: bool
    halting_threshold: float | None
    ponder_cost: float
    signals: bool
    def __init__(
        self,
        runs: tuple[Run, ...],
        bias: nn.Module | None = None,
        positions: nn.Module | None = None,
        input_norm: nn.Module | None = None,
        norm: nn.Module | None = RMSNorm(),
        dropout_rate: float = 0.0,
        scan: bool = False,
        remat: str | None = None,
        drop_output: bool = True,
        halting_threshold: float | None = None,
        ponder_cost: float = 0.01,
        signals: bool = True,
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
        *,
        mask: Mask | None = None,
        memory: Memory | None = None,
        positions: jax.Array | None = None,
        caches: tuple[Any, ...] | None = None,
        position: int | jax.Array | None = None,
        length: int | None = None,
        counted: jax.Array | None = None,
        shared_positions: nn.Module | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Runs all layers.

        Args:
          x: ``[batch, q, d_model]`` embeddings.
          mask: the self-attention's mask.
          memory: the encoder's side, for decoders.
          positions: ``[batch or 1, q]`` in-sequence positions; None: in packed rows those inside the
            segments, otherwise `position` onwards.
          caches: one entry per layer when decoding, see `Block`; needs `scan=False`. Prompts of
            different lengths are given as to `Attention`.
          position: position of the first token of `x` when decoding, for all or ``[batch]``; None:
            where the caches end.
          length: number of key positions, past ones included; None means q.
          counted: ``[batch, q]`` bool, the positions that count in what modules add to a training
            loss; None: those that are real by the mask.
          shared_positions: a bound module like `positions`, which several stacks share.

        Returns:
          ``[batch, q, d_model]`` and the new caches.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class Encoder(Model):
    """One stack that reads a whole text; see `TokenModel` for more fields.

    Attributes:
      encoder: the stack.
      pooling: ``"mean"`` over the real tokens, or the ``"first"`` real one ([CLS]).
      pooler: a dense layer with tanh after the pooling, as in BERT.
      outputs: classes of a classifier or numbers of a regressor; None: no such head.
      masked_lm: BERT's head over the tokens: dense, GELU, normalisation, the embedding (`tied`) or a
        projection, and a bias.
      token_types: number of segment embeddings (BERT: 2); 0: none.
      head_init: initialiser of the heads' kernels.

    As an NNX module also:
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    vocab_size: int
    d_model: int
    tied: bool
    embedding_scale: float
    logits_scale: float | None
    dtype: str
    embedding_init: Initializer
    logits_init: Initializer
    pooling: str
    pooler: bool
    outputs: int | None
    masked_lm: bool
    token_types: int
    head_init: Initializer
    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        tied: bool = True,
        embedding_scale: float = 1.0,
        logits_scale: float | None = None,
        dtype: str = "float32",
        embedding_init: Initializer = Normal(stddev=1.0),
        logits_init: Initializer = FanIn(scale=1.0),
        encoder: Stack,
        pooling: str = "mean",
        pooler: bool = False,
        outputs: int | None = None,
        masked_lm: bool = False,
        token_types: int = 0,
        head_init: Initializer = Normal(stddev=0.02),
        rngs: nnx.Rngs,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        tokens: jax.Array,
        *,
        token_types: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Encoded:
        """Reads a batch.

        Args:
          tokens: ``[batch, length]`` integers; 0 is padding, on either side.
          token_types: ``[batch, length]`` numbers of the segments; None: all 0.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def embed(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, length]`` tokens to ``[batch, length, d_model]`` in the computation's dtype.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def logits(
        self,
        hidden: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, q, d_model]`` to ``[batch, q, vocab]``.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def pool(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """One vector a text, ``[batch, d_model]``.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class EncoderDecoder(Model):
    """Two stacks over one vocabulary (Raffel et al. 2020); see `TokenModel` for more fields.

    Attributes:
      encoder: the encoder's stack.
      decoder: the decoder's stack; its blocks have a `cross_mixer`.
      positions: added to the embeddings of both stacks, so that they share its parameters
        (Mesh-TensorFlow), while each stack's own `positions` have their own.

    As an NNX module also:
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    vocab_size: int
    d_model: int
    tied: bool
    embedding_scale: float
    logits_scale: float | None
    dtype: str
    embedding_init: Initializer
    logits_init: Initializer
    positions: nn.Module | None
    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        tied: bool = False,
        embedding_scale: float = 1.0,
        logits_scale: float | None = None,
        dtype: str = "float32",
        embedding_init: Initializer = Normal(stddev=1.0),
        logits_init: Initializer = FanIn(scale=1.0),
        encoder: Stack,
        decoder: Stack,
        positions: nn.Module | None = None,
        rngs: nnx.Rngs,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: tuple[jax.Array, jax.Array] | None = None,
        positions: tuple[jax.Array, jax.Array] | None = None,
        max_segments: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Logits of every next token.

        Args:
          encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
          segments: for packed rows the encoder's and the decoder's segment ids, 0 is padding.
          positions: for packed rows the positions inside the segments.
          max_segments: no packed row has more segments; lets terms of absolute positions run on
            unpacked rows.

        Returns:
          ``[batch, q, vocab]`` in the dtype of the computation.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def embed(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, length]`` tokens to ``[batch, length, d_model]`` in the computation's dtype.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def logits(
        self,
        hidden: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, q, d_model]`` to ``[batch, q, vocab]``.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: tuple[jax.Array, jax.Array] | None = None,
        positions: tuple[jax.Array, jax.Array] | None = None,
        max_segments: int | None = None,
        counted: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """The decoder's output before the projection to the vocabulary, ``[batch, q, d_model]``.

        Arguments are those of `__call__`, and `counted` as in `decode`.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def remember(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Memory:
        """What `decode` attends to, from ``[batch, k]`` encoder tokens.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def decode(
        self,
        tokens: jax.Array,
        memory: Memory,
        *,
        mask: Mask | None = None,
        positions: jax.Array | None = None,
        counted: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """The decoder's teacher-forced pass.

        Args:
          tokens: ``[batch · n, q]`` the targets shifted right by one, n rows for each row of memory.
          memory: the encoder's output and the cross-attention's mask, ``batch`` rows.
          mask: the self-attention's mask; None is causal.
          positions: ``[batch, q]`` for packed rows.
          counted: ``[batch · n, q]`` bool, the positions with a target, over which modules average
            what they add to a training loss (`LOSSES`); None: up to the last non-zero token.

        Returns:
          ``[batch, q, d_model]``, for `logits`.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def start(
        self,
        encoder_tokens: jax.Array,
        first: jax.Array,
        *,
        max_length: int,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Encodes, decodes the first token and makes the caches.

        Args:
          encoder_tokens: ``[batch, k]``.
          first: ``[batch, 1]`` the decoder's first input (T5: 0).
          max_length: number of decoder positions to make room for.

        Returns:
          ``[batch, 1, d_model]`` hidden states for `logits`, and one cache entry per layer.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def step(
        self,
        tokens: jax.Array,
        encoder_lengths: jax.Array,
        *,
        caches: tuple[Any, ...],
        position: jax.Array,
        max_length: int,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, Any]:
        """One decoding step.

        Args:
          tokens: ``[batch · n, 1]`` the tokens at `position`, n rows for each example.
          encoder_lengths: ``[batch]`` number of real encoder tokens.
          caches: from `start` or the step before; the self-attention's have batch · n rows, the
            cross-attention's batch rows, but batch · n where they change from step to step
            (`Stack.changing_cross_caches`).
          position: where the tokens stand; a traced scalar.
          max_length: the same as in `start`.

        Returns:
          ``[batch · n, 1, d_model]`` and the new caches.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def encode(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        max_segments: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, k]`` tokens to ``[batch, k, d_model]``, the real ones first.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """

class LanguageModel(Model):
    """One stack over one row of text; see `TokenModel` for more fields.

    It answers to the same calls as `EncoderDecoder`, so that the same tasks train it and the same
    decoding uses it: inputs and targets follow one another in a row, the targets directly after the
    last real input token.

    Attributes:
      decoder: the stack; its blocks have no `cross_mixer`.
      prefix: inputs see all inputs (prefix language model, Raffel et al. 2020, figure 4); False is
        causal throughout.

    As an NNX module also:
      rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
        A stream that is missing is the default one.
      deterministic: dropout is off; None: every call has to say.
      keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
    """

    vocab_size: int
    d_model: int
    tied: bool
    embedding_scale: float
    logits_scale: float | None
    dtype: str
    embedding_init: Initializer
    logits_init: Initializer
    prefix: bool
    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        tied: bool = False,
        embedding_scale: float = 1.0,
        logits_scale: float | None = None,
        dtype: str = "float32",
        embedding_init: Initializer = Normal(stddev=1.0),
        logits_init: Initializer = FanIn(scale=1.0),
        decoder: Stack,
        prefix: bool = False,
        rngs: nnx.Rngs,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
    ) -> None: ...
    def __call__(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
        **packing: Any,
    ) -> jax.Array:
        """Logits of every next token of the targets.

        Args:
          encoder_tokens: ``[batch, k]`` inputs; 0 is padding, on either side; k may be 0.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one.
          **packing: as in `EncoderDecoder`; packed rows are not supported here.

        Returns:
          ``[batch, q, vocab]`` in the dtype of the computation.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def embed(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, length]`` tokens to ``[batch, length, d_model]`` in the computation's dtype.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def logits(
        self,
        hidden: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """``[batch, q, d_model]`` to ``[batch, q, vocab]``.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def hidden(
        self,
        encoder_tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: Any = None,
        positions: Any = None,
        max_segments: int | None = None,
        counted: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """The targets' states before the projection to the vocabulary, ``[batch, q, d_model]``.

        Arguments are those of `__call__`, and `counted` as in `EncoderDecoder.decode`.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def remember(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """What `decode` attends to: the inputs themselves.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def decode(
        self,
        tokens: jax.Array,
        memory: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """The teacher-forced states of the targets ``[batch · n, q]`` after the inputs `memory`.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def start(
        self,
        encoder_tokens: jax.Array,
        first: jax.Array,
        *,
        max_length: int,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Reads the inputs and the first token of the targets, and makes the caches.

        Args:
          encoder_tokens: ``[batch, k]``.
          first: ``[batch, 1]`` the targets' first input (T5: 0).
          max_length: number of positions to make room for, see `room`.

        Returns:
          ``[batch, 1, d_model]`` hidden states for `logits`, and one cache entry per layer.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
    def step(
        self,
        tokens: jax.Array,
        encoder_lengths: jax.Array,
        *,
        caches: tuple[Any, ...],
        position: jax.Array,
        max_length: int,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> tuple[jax.Array, Any]:
        """One decoding step; every example stands at a position of its own.

        Args:
          tokens: ``[batch · n, 1]`` the targets' tokens at `position`, n rows for each example.
          encoder_lengths: ``[batch]`` number of real input tokens.
          caches: from `start` or the step before.
          position: where the tokens stand in the targets; a traced scalar.
          max_length: the same as in `start`.

        Returns:
          ``[batch · n, 1, d_model]`` and the new caches.

        As an NNX module also:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
