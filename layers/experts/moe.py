"""Mixtures of experts: einsums over groups of tokens (GShard 2.2, GSPMD 5.4 and 5.5).

Dims: B batch, T sequence, G groups, S tokens of a group, M model, H hidden, E experts,
C slots of an expert for one group.

  logits      GSM,ME    -> GSE
  dispatched  GSEC,GSM  -> EGCM    split along G, then along E: one AllToAll
  hidden      EGCM,EMH  -> EGCH
  out         EGCH,EHM  -> EGCM    split along E, then along G: one AllToAll
  combined    GSEC,EGCM -> GSM

A plan names three dims: `batch`, which is G too; `experts`, of the experts' weights and
activations; `expert_model`, M of the experts' weights. `hidden` and `model` are those
of other layers. While E is split, G is split by the axes of `batch` that are not among
those of `experts`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, instance
from meshwright.framework.modeling.initializers import Normal
from meshwright.framework.modeling.layer import (
    EXPERT_DIM,
    Context,
    Layer,
    WeightSpec,
)
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.sharding import Sharding
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.feed_forward import Activation, FeedForward
from meshwright.layers.basic.linear import BSM, WHOLE, apply_weight
from meshwright.layers.experts.dropless import Dropless
from meshwright.layers.experts.gating import Capacity, Gating, Routed, TokenGating
from meshwright.layers.experts.local_ops import Devices

GECM = ("batch", "gate_experts", "capacity", "model")
"""Logical dims of dispatched tokens on their source devices: groups are split."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFeedForward(Layer):
    """E feed-forward layers like `FeedForward`, each for its own slots.

    Recomputation may save `hidden` and `gate`.

    Args:
      num_experts: E.
      model_dims: M.
      hidden_dims: H of each expert.
      activation: the non-linearity.
      dropout_rate: the dropout rate of hidden activations.

    Raises:
      ValueError: a size below 1, or the rate is out of range.
    """

    num_experts: int = bounded(at_least=1)
    model_dims: int = bounded(at_least=1)
    hidden_dims: int = bounded(at_least=1)
    activation: Activation = Activation.RELU
    dropout_rate: float = bounded(0.0, at_least=0, below=1)

    def weights(self) -> NestedMap:
        E, M, H = self.num_experts, self.model_dims, self.hidden_dims
        w_in = WeightSpec(
            shape=(E, M, H),
            dims=(EXPERT_DIM, "expert_model", "hidden"),
            initializer=Normal(M**-0.5),
        )
        w_out = WeightSpec(
            shape=(E, H, M),
            dims=(EXPERT_DIM, "hidden", "expert_model"),
            initializer=Normal(H**-0.5),
        )
        specs = NestedMap(w_in=w_in, w_out=w_out)
        if self.activation.is_gated:
            specs.w_gate = w_in
        return specs

    def fprop(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Transforms each slot of `x` [E, G, C, M]; same shape, activation dtype.

        Raises:
          ValueError: `x` is not for E experts of M dims; the plan's axes do not divide
            the experts, or split two dims of a tensor alike.
        """
        E, G, C, M = x.shape
        if (self.num_experts, self.model_dims) != (E, M):
            raise ValueError(
                f"layer {ctx.path!r} has {self.num_experts} experts of model dims "
                f"{self.model_dims} but was given [E, G, C, M] = {x.shape}"
            )

        def experts_product(x, weight):
            return tf.einsum("egca,eab->egcb", x, weight)

        def product(x, name, dim):
            y = apply_weight(ctx, experts_product, x, theta[name])
            return split_by_expert(ctx, y, dim)

        return self._layers(ctx, ctx.cast(x), product)

    def fprop_blocks(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        experts: tf.Tensor,
        devices: Devices,
    ) -> tf.Tensor:
        """Transforms each block of `x` [U, C, M]; same shape, activation dtype.

        Args:
          ctx: context.
          theta: weights.
          x: [U, C, M], split among `devices` along U.
          experts: int32 [U], the expert of each block, among those of its device.
          devices: the devices.
        """
        specs = self.weights()

        def product(x, name, dim):
            y = devices.product(ctx, x, theta[name], specs[name], experts)
            return devices.split(y, last=specs[name].dims[-1])

        return self._layers(ctx, x, product)

    def _layers(self, ctx: Context, x: tf.Tensor, product: Callable) -> tf.Tensor:
        """The layers, given `product` (x, weight's name, logical name of its dim)."""
        hidden = save_name(product(x, "w_in", "hidden"), "hidden")
        if self.activation.is_gated:
            gate = save_name(product(x, "w_gate", "hidden"), "gate")
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        with ctx.scope("dropout") as c:
            hidden = Dropout(rate=self.dropout_rate).fprop(
                c,
                NestedMap(),
                hidden,
                read_by_products=True,
                dead_at_zero=self.activation is Activation.RELU,
            )
        return product(hidden, "w_out", "model")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE(Layer):
    """A feed-forward layer of experts, a few of which each token uses.

    A token without a slot gets zeros: only the residual connection carries it. With
    `dropless` there are no slots, and experts take all tokens that chose them.
    Recomputation may save `gate_logits`, `dispatched`, the experts' names,
    `expert_out` and `feed_forward_out`.

    Args:
      gating: decides which experts get a token.
      experts: takes [E, G, C, M].
      dropless: None for slots of the gating's capacity; else that plays no part.
      shared: a feed-forward layer for all tokens, whose output is added (DeepSeekMoE,
        Dai et al. 2024); None for none.
      group_size: S: tokens, in the order of the flattened batch, that compete for
        slots. It divides the sequence, or is a multiple of it. None: each sequence is a
        group.
      balance_weight: the weight of `Routing.balance_loss` in `aux.loss`.
      z_weight: the weight of `Routing.z_loss` in it.

    Raises:
      ValueError: gating, experts and shared layer disagree on a size, or are of other
        types; a number is out of range; without drops, experts that choose tokens or
        have a dropout rate.
    """

    gating: Gating = instance(example="Top2(...)")
    experts: ExpertFeedForward = instance(example="ExpertFeedForward(...)")
    dropless: Dropless | None = instance(None, example="Dropless()")
    shared: FeedForward | None = instance(None, example="FeedForward(...)")
    group_size: int | None = bounded(None, at_least=1)
    balance_weight: float = bounded(0.01, at_least=0)
    z_weight: float = bounded(0.0, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        for field in ("num_experts", "model_dims"):
            gating_size, experts_size = (
                getattr(self.gating, field),
                getattr(self.experts, field),
            )
            if gating_size != experts_size:
                raise ValueError(
                    f"MoE.gating.{field} is {gating_size} but MoE.experts.{field} is "
                    f"{experts_size}: give both the same"
                )
        if self.shared is not None and self.shared.model_dims != self.gating.model_dims:
            raise ValueError(
                f"MoE.gating.model_dims is {self.gating.model_dims} but "
                f"MoE.shared.model_dims is {self.shared.model_dims}: give both the same"
            )
        if self.dropless is not None:
            self._check_dropless()

    def _check_dropless(self) -> None:
        if not isinstance(self.gating, TokenGating):
            raise ValueError(
                f"MoE.dropless lets all tokens have the experts that they choose, but "
                f"by {type(self.gating).__name__} experts choose tokens: set "
                "MoE.dropless = None, or use another gating, such as TopK"
            )
        if self.experts.dropout_rate:
            raise ValueError(
                f"MoE.experts.dropout_rate is {self.experts.dropout_rate} with "
                "MoE.dropless: what is dropped would depend on the number of devices; "
                "set it to 0, and drop from the layer's output or its attention"
            )

    def weights(self) -> NestedMap:
        specs = NestedMap(gating=self.gating.weights(), experts=self.experts.weights())
        if self.shared is not None:
            specs.shared = self.shared.weights()
        return specs

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        paddings: tf.Tensor | None = None,
        segment_ids: tf.Tensor | None = None,
        token_ids: tf.Tensor | None = None,
    ) -> NestedMap:
        """Sends each token of `x` [B, T, M] to its experts and adds up their outputs.

        Args:
          ctx: context.
          theta: weights.
          x: [B, T, M].
          paddings: [B, T], 1 at padding, which no expert gets, 0 elsewhere.
          segment_ids: int32 [B, T], 0 at padding too.
          token_ids: int32 [B, T], for a gating that reads them.

        Returns:
          `x`: [B, T, M] in the activation dtype.
          `aux.loss`: float32 scalar, to be added to the loss.
          `aux.sums`: see `Routing.sums`.

        Raises:
          ValueError: sizes of `x` are not those of the layer; `group_size` does not
            divide the tokens, or the plan's axes do not divide the groups or experts;
            without drops, a pipeline.
        """
        B, T = x.shape[0] or 1, x.shape[1]  # In a batch of any size, groups fill rows.
        size = self._group_size(ctx, B, T)
        self._check_splits(ctx, B * T // size)

        def grouped(t):
            return t if size == T else tf.reshape(t, [-1, size, *t.shape[2:]])

        # No gradient is unreduced here: those of gates are no sums over split dims.
        tokens = ctx.split(ctx.split(ctx.cast(x), BSM), WHOLE)
        tokens = ctx.split(grouped(tokens), WHOLE)
        valid = grouped(_valid(x, paddings, segment_ids))
        ids = None if token_ids is None else grouped(token_ids)
        # An exported model's batch of any size has slots for all.
        run = (
            self._with_slots
            if self.dropless is None or x.shape[0] is None
            else self._dropless
        )
        combined, routed = run(ctx, theta, tokens, valid=valid, token_ids=ids)
        combined = tf.reshape(ctx.split(combined, WHOLE), shape_of(x))
        out = ctx.split(combined, BSM)
        if self.shared is not None:
            with ctx.scope("shared") as c:
                out += self.shared.fprop(c, theta.shared, x)
        out = save_name(out, "feed_forward_out")
        loss = self.balance_weight * routed.balance_loss + self.z_weight * routed.z_loss
        return NestedMap(x=out, aux=NestedMap(loss=loss, sums=routed.sums))

    def step(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        token_ids: tf.Tensor | None = None,
    ) -> NestedMap:
        """`fprop` of some more tokens of each row, `x` [B, S, M].

        Each token is its own group, so that its result depends on no other token, and
        none is dropped: with slots every expert computes one for each.

        Raises:
          ValueError: the gating needs entire groups.
        """
        if self.gating.needs_whole_groups:
            raise ValueError(
                f"layer {ctx.path!r}: {type(self.gating).__name__} lets experts choose "
                "among all tokens of a group, not one after another: decode "
                "with another gating, such as Top2"
            )
        alone = dataclasses.replace(self, group_size=None)
        if token_ids is not None:
            token_ids = tf.reshape(token_ids, [-1, 1])
        tokens = tf.reshape(x, [-1, 1, x.shape[-1]])
        out = alone.fprop(ctx, theta, tokens, token_ids=token_ids)
        return NestedMap(x=tf.reshape(out.x, shape_of(x)), aux=out.aux)

    def extra_flops(self, sequence_length: int) -> float:
        """FLOPs of experts, for slots taken or not, of dispatch and of combine.

        Without drops those of the experts that tokens choose; rows that fill blocks up
        do not count.

        With E experts there are E times as many weights as a slot meets, so this may
        be negative.
        """
        E, M = self.gating.num_experts, self.gating.model_dims
        size = self.group_size or sequence_length
        shared = (
            0.0 if self.shared is None else self.shared.extra_flops(sequence_length)
        )
        weights = 2.0 * sum(spec.size for spec in self.experts.weights().leaves())
        if self.dropless is not None:
            return shared + weights * (self.gating.experts_per_token / E - 1.0)
        slots = E * self.gating.capacity.slots(size, E) / size  # A token's share.
        moved = 2 * 2.0 * E * M * slots * size / E
        return shared + weights * (slots / E - 1.0) + moved

    def _with_slots(self, ctx, theta, tokens, **inputs) -> tuple[tf.Tensor, Routed]:
        """The experts' outputs for `tokens` [G, S, M], combined; same shape."""
        gating = self.gating
        if self.dropless is not None:
            every = Capacity(factor=gating.num_experts)
            gating = dataclasses.replace(gating, capacity=every)
        with ctx.scope("gating") as c:
            routing = gating.fprop(c, theta.gating, tokens, **inputs)
        dispatch, combine = ctx.cast(routing.dispatch), ctx.cast(routing.combine)
        slots = ctx.split(tf.einsum("gsec,gsm->gecm", dispatch, tokens), GECM)
        slots = split_by_expert(ctx, tf.transpose(slots, [1, 0, 2, 3]), "model")
        slots = save_name(slots, "dispatched")
        with ctx.scope("experts") as c:
            out = self.experts.fprop(c, theta.experts, slots)
        out = ctx.split(tf.transpose(out, [1, 0, 2, 3]), GECM, name="expert_out")
        return tf.einsum("gsec,gecm->gsm", combine, out), routing

    def _dropless(self, ctx, theta, tokens, **inputs) -> tuple[tf.Tensor, Routed]:
        """The same, for as many tokens of an expert as want it."""
        if ctx.plan.pipeline_axes is not None:
            raise ValueError(
                f"layer {ctx.path!r}: MoE.dropless is not for pipelines: set "
                "it to None, or use Repeat in place of Pipeline"
            )
        with ctx.scope("gating") as c:
            sending = self.gating.send(c, theta.gating, tokens, **inputs)
        rows = [
            tf.reshape(t, [-1, t.shape[-1]])
            for t in (tokens, sending.experts, sending.weights)
        ]
        with ctx.scope("experts") as c:
            out = self.dropless.fprop(
                c,
                functools.partial(self.experts.fprop_blocks, c),
                theta.experts,
                *rows,
                num_experts=self.gating.num_experts,
            )
        return tf.reshape(out, shape_of(tokens)), sending

    def _group_size(self, ctx: Context, B: int, T: int) -> int:
        size = self.group_size or T
        if (B * T) % size or (T % size and size % T):
            raise ValueError(
                f"layer {ctx.path!r}: groups of {size} tokens do not divide a batch of "
                f"{B} x {T}: set MoE.group_size to a divisor of {T}, or to {T} times "
                f"a divisor of {B}"
            )
        return size

    def _check_splits(self, ctx: Context, groups: int) -> None:
        (by_expert,) = ctx.plan.weight_sharding([EXPERT_DIM]).splits()
        if self.gating.num_experts % by_expert:
            raise ValueError(
                f"layer {ctx.path!r}: {self.gating.num_experts} experts do not divide "
                f"among {by_expert} devices: set num_experts to a multiple of "
                f"{by_expert}, or change ShardingPlan.weights['experts']"
            )
        (by_batch,) = ctx.plan.activation_sharding(["batch"]).splits()
        if groups % by_batch:
            raise ValueError(
                f"layer {ctx.path!r}: {groups} groups do not divide among {by_batch} "
                "devices: make the batch larger or MoE.group_size smaller, or change "
                "ShardingPlan.activations['batch']"
            )


def x_and_aux(out: tf.Tensor | NestedMap) -> tuple[tf.Tensor, NestedMap | None]:
    """A layer's output, and its `aux`, None if it has no mixture of experts."""
    return (out.x, out.aux) if isinstance(out, NestedMap) else (out, None)


def merge_aux(aux: NestedMap) -> NestedMap:
    """The `aux` of a stack of layers, merged from each layer's.

    Args:
      aux: `loss` and `sums`, both with the same leading dims by layer.

    Returns:
      `loss`: float32 scalar, to be added to the loss: the layers' mean, so that its
        weight does not depend on depth.
      `sums`: see `Routing.sums`, with a single leading dim, a row for each mixture.
    """
    layers = aux.loss.shape.rank
    return NestedMap(
        loss=tf.reduce_mean(aux.loss),
        sums=aux.sums.map(lambda t: tf.reshape(t, [-1, *t.shape[layers:]])),
    )


def split_by_expert(ctx: Context, tensor: tf.Tensor, last_dim: str) -> tf.Tensor:
    """`tensor` [E, G, C, F], split as the plan's activations say for experts.

    F is the logical dim `last_dim`; G is split by the batch's axes that E leaves.

    Raises:
      ValueError: an axis splits two dims.
    """
    plan = ctx.plan
    experts, groups, last = (
        plan.activation_sharding([dim]).dims[0]
        for dim in (EXPERT_DIM, "batch", last_dim)
    )
    groups = tuple(axis for axis in groups if axis not in experts)
    try:
        sharding = Sharding(plan.mesh, (experts, groups, (), last))
    except ValueError as error:
        raise ValueError(
            f"layer {ctx.path!r}: [experts, batch, capacity, {last_dim}] of its "
            f"experts' activations: {error}: change ShardingPlan.activations"
        ) from None
    return annotate(tensor, sharding)


def _valid(x, paddings, segment_ids) -> tf.Tensor:
    """float32 [B, T], 0 at padding."""
    valid = tf.ones(shape_of(x)[:2], tf.float32)
    if paddings is not None:
        valid *= 1.0 - tf.cast(paddings, tf.float32)
    if segment_ids is not None:
        valid *= tf.cast(segment_ids != 0, tf.float32)
    return valid
