"""The interface of all gatings of a mixture of experts.

Dims: G groups, S tokens of a group, M model, E experts, C slots of an expert for the
tokens of one group (its capacity).

Tokens compete for slots only inside their group (GShard 2.2), so groups can be on
different devices. Except for sums, no op here needs more than one group at a time.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import Checked, bounded, instance
from meshwright.framework.modeling.initializers import FanIn
from meshwright.framework.modeling.layer import Context, Layer, Mode, WeightSpec
from meshwright.framework.modeling.shapes import shape_of
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.linear import contract

GSE = ("batch", "sequence", "gate_experts")
"""Logical dims of gates: groups are the batch, divided differently."""
GSEC = (*GSE, "capacity")
GSK = ("batch", "sequence", "choices")


@gin.constants_from_enum
class Rounding(enum.Enum):
    """How a capacity that is no integer becomes one."""

    UP = "up"
    DOWN = "down"


@gin.constants_from_enum
class GateScale(enum.Enum):
    """What the gates of a token's experts are divided by."""

    RAW = "raw"
    """Nothing: they are scores among all experts."""
    CHOSEN = "chosen"
    """Their sum over the experts that the token chose, dropped or not (Algorithm 1)."""
    KEPT = "kept"
    """Their sum over the experts that have a slot for the token."""


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity(Checked):
    """How many tokens of a group an expert takes: C = factor * S / E, rounded.

    Args:
      factor: 1 has a slot for each token. GShard's C of about 2S/E is 2.
      eval_factor: the same in `Mode.EVAL`; None: as in training.
      rounding: how factor * S / E is rounded.
      at_least: the smallest C; C is 1 or more anyway.
      multiple_of: a C above `at_least` is rounded up to a multiple of it.

    Raises:
      ValueError: a factor is not above 0, or a count is out of range.
    """

    factor: float = bounded(2.0, above=0)
    eval_factor: float | None = bounded(None, above=0)
    rounding: Rounding = Rounding.UP
    at_least: int = bounded(0, at_least=0)
    multiple_of: int = bounded(1, at_least=1)

    def slots(self, tokens: int, experts: int, mode: Mode = Mode.TRAIN) -> int:
        """C, for groups of S `tokens` and E `experts`; never more than S."""
        factor = self.factor
        if mode is Mode.EVAL and self.eval_factor is not None:
            factor = self.eval_factor
        share = factor * tokens / experts
        # With a margin for rounding errors, as in 1.1 * 10.
        up = self.rounding is Rounding.UP
        rounded = math.ceil(share - 1e-9) if up else math.floor(share + 1e-9)
        slots = self.at_least
        if max(rounded, 1) > slots:
            slots = -(-max(rounded, 1) // self.multiple_of) * self.multiple_of
        return min(slots, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """The losses and statistics of a gating's choices.

    Args:
      balance_loss: float32 scalar, the auxiliary loss of GShard's Algorithm 1 times
        E^2, so that experts used evenly give 1 whatever their number; 0 for gatings
        that are balanced by construction.
      z_loss: float32 scalar, mean square of the logits' logsumexp (Zoph et al. 2022).
      sums: float32 sums over tokens, so that sums over batches make exact metrics:
        `tokens`, without padding; `dropped`, tokens that no expert took; `load` [E],
        tokens that each expert took; `entropy` of the gates, in nats; `balance` and
        `z`, the losses times `tokens`.
    """

    balance_loss: tf.Tensor
    z_loss: tf.Tensor
    sums: NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing(Routed):
    """The slots that a gating gives the tokens of each group; see also `Routed`.

    Args:
      dispatch: float32 [G, S, E, C], 1 where a token takes a slot, else 0. A slot has
        at most one token; a token has at most one slot of an expert.
      combine: float32 [G, S, E, C], the weight of the expert's output for the token, 0
        where `dispatch` is.
    """

    dispatch: tf.Tensor
    combine: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sending(Routed):
    """The experts that tokens go to if none is ever full; see also `Routed`.

    Args:
      experts: int32 [G, S, k], a token's experts, each once; E where it goes to fewer
        than k, as padding does.
      weights: float32 [G, S, k], the weight of the expert's output, 0 where there is
        none.
    """

    experts: tf.Tensor
    weights: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """The experts that tokens go to; every tensor is float32 [G, S, E].

    Args:
      gates: the weight of an expert's output for a token.
      kept: 1 where the token has a slot, else 0.
      places: the slot's number, read where `kept` is 1.
      first: 1 at each token's first choice, with a slot or not; None: no balance loss.
    """

    gates: tf.Tensor
    kept: tf.Tensor
    places: tf.Tensor
    first: tf.Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gating(Layer):
    """Base of gatings: logits in float32, slots, losses, statistics.

    A subclass gives `choose`, or is a `TokenGating`. Logits, softmax and all that
    follows are float32 whatever the activation dtype (Fedus et al. 2021, 2.4).

    Args:
      model_dims: M.
      num_experts: E.
      capacity: how many slots an expert has.
      jitter: in training, the gating's input is multiplied by random numbers from
        1 - jitter to 1 + jitter (Fedus et al. 2021); 0 for none.

    Raises:
      ValueError: a size below 1, a jitter out of range, or no `Capacity`.
    """

    needs_whole_groups: ClassVar[bool] = False
    """Whether later tokens of a group affect a token, in evaluation as well."""

    model_dims: int = bounded(at_least=1)
    num_experts: int = bounded(at_least=1)
    capacity: Capacity = instance(Capacity(), example="Capacity(factor=2.0)")
    jitter: float = bounded(0.0, at_least=0, below=1)

    def weights(self) -> NestedMap:
        spec = WeightSpec(
            shape=(self.model_dims, self.num_experts),
            dims=("gate_model", "gate_experts"),
            initializer=FanIn(),
        )
        return NestedMap(w=spec)

    def fprop(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        valid: tf.Tensor | None = None,
        token_ids: tf.Tensor | None = None,
    ) -> Routing:
        """Assigns tokens to slots.

        Args:
          ctx: context.
          theta: weights.
          x: [G, S, M].
          valid: float32 [G, S], 0 at padding, which takes no slot and counts nowhere;
            None: all ones.
          token_ids: int32 [G, S], for gatings that read them.

        Raises:
          ValueError: the last dim of `x` is not M.
        """
        if valid is None:
            valid = tf.ones(shape_of(x)[:2], tf.float32)
        slots = self.capacity.slots(x.shape[1], self.num_experts, ctx.mode)
        logits = self.logits(ctx, theta, x)
        choices = self.choose(ctx, theta, logits, valid, token_ids, slots)
        # Without annotations GSPMD splits E by a free axis, and gathers later.
        gates, kept, places = (
            ctx.split(t, GSE) for t in (choices.gates, choices.kept, choices.places)
        )
        dispatch = kept[..., None] * _one_hot(places, slots)
        dispatch = ctx.split(tf.stop_gradient(dispatch), GSEC)
        combine = ctx.split(gates[..., None] * dispatch, GSEC)
        routed = _routed(logits, choices.first, choices.kept, valid)
        return Routing(dispatch=dispatch, combine=combine, **routed)

    def logits(self, ctx: Context, theta: NestedMap, x: tf.Tensor) -> tf.Tensor | None:
        """float32 [G, S, E] from `x` [G, S, M]; None for a gating without weights."""
        ctx = dataclasses.replace(ctx, activation_dtype=tf.float32)
        x = ctx.cast(x)
        if self.jitter and ctx.mode is Mode.TRAIN:
            with ctx.scope("jitter") as c:  # Independent of a gating's own numbers.
                noise = random.uniform(c.random_key(), x.shape)
            x *= 1.0 + self.jitter * (2.0 * noise - 1.0)
        return ctx.split(contract(ctx, x, theta.w), GSE, name="gate_logits")

    def choose(
        self,
        ctx: Context,
        theta: NestedMap,
        logits: tf.Tensor | None,
        valid: tf.Tensor,
        token_ids: tf.Tensor | None,
        slots: int,
    ) -> Choices:
        """The choices of tokens, given the slots of an expert for a group."""
        raise NotImplementedError(f"{type(self).__name__}.choose")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picks:
    """The experts that tokens want, whether or not there is a slot.

    Args:
      choices: in order of priority; float32 [G, S, E], 1 at the expert that a token
        chooses. All zeros at padding.
      scores: float32 [G, S, E], what gates are made of.
      scale: how they are.
      goes: for each choice float32 [G, S, 1], 0 where the token does not go there;
        None: it goes.
      rejected_count: whether such tokens count towards the capacity.
      factor: multiplies all gates.
    """

    choices: Sequence[tf.Tensor]
    scores: tf.Tensor
    scale: GateScale
    goes: Sequence[tf.Tensor | None]
    rejected_count: bool = True
    factor: float = 1.0

    @property
    def queued(self) -> Sequence[tf.Tensor]:
        """The choices that count towards the capacity."""
        return self.choices if self.rejected_count else self.going(self.choices)

    def going(self, kept: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`kept` [G, S, E] of each choice, 0 where the token does not go."""
        pairs = zip(kept, self.goes, strict=True)
        return [kept if goes is None else kept * goes for kept, goes in pairs]

    def gates(self, kept: tf.Tensor) -> tf.Tensor:
        """float32 [G, S, E], to be read where `kept` is 1."""
        scores = self.scores if self.factor == 1 else self.factor * self.scores
        if self.scale is GateScale.RAW:
            return scores
        chosen = kept if self.scale is GateScale.KEPT else tf.add_n(self.choices)
        total = tf.reduce_sum(self.scores * chosen, -1, keepdims=True)
        return tf.math.divide_no_nan(scores * chosen, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGating(Gating):
    """Base of gatings by which tokens choose experts: a subclass gives `pick`.

    What tokens choose does not depend on slots. With slots of a capacity (`fprop`) they
    are served in turn; without (`send`) all are.
    """

    @property
    def experts_per_token(self) -> int:
        """k, the most experts of a token."""
        return 1

    def pick(
        self,
        ctx: Context,
        theta: NestedMap,
        logits: tf.Tensor | None,
        valid: tf.Tensor,
        token_ids: tf.Tensor | None,
    ) -> Picks:
        """The k choices of tokens."""
        raise NotImplementedError(f"{type(self).__name__}.pick")

    def choose(self, ctx, theta, logits, valid, token_ids, slots) -> Choices:
        picks = self.pick(ctx, theta, logits, valid, token_ids)
        turns = in_turn(picks.queued, slots)
        kept = tf.add_n(picks.going([kept for _, kept in turns]))
        pairs = zip(turns, picks.queued, strict=True)
        return Choices(
            gates=picks.gates(kept),
            kept=kept,
            places=tf.add_n([places * chosen for (places, _), chosen in pairs]),
            first=picks.choices[0],
        )

    def send(
        self,
        ctx: Context,
        theta: NestedMap,
        x: tf.Tensor,
        *,
        valid: tf.Tensor,
        token_ids: tf.Tensor | None = None,
    ) -> Sending:
        """The experts of tokens when none is full; for arguments see `fprop`."""
        logits = self.logits(ctx, theta, x)
        picks = self.pick(ctx, theta, logits, valid, token_ids)
        taken = picks.going(picks.choices)
        kept = ctx.split(tf.add_n(taken), GSE)
        gates = ctx.split(picks.gates(kept), GSE)
        experts = [
            tf.where(
                tf.reduce_max(t, -1) > 0,
                tf.argmax(t, -1, output_type=tf.int32),
                self.num_experts,
            )
            for t in taken
        ]
        weights = [tf.reduce_sum(gates * t, -1) for t in taken]
        return Sending(
            experts=ctx.split(tf.stack(experts, -1), GSK),
            weights=ctx.split(tf.stack(weights, -1), GSK),
            **_routed(logits, picks.choices[0], kept, valid),
        )


def probabilities(ctx: Context, logits: tf.Tensor) -> tf.Tensor:
    """float32 [G, S, E], annotated; so is its gradient."""
    return ctx.split(tf.nn.softmax(logits), GSE)


def in_turn(
    choices: Sequence[tf.Tensor], slots: int
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Slots, first come, first served: all first choices, then all second choices, ...

    Args:
      choices: in order of priority; float32 [G, S, E], 1 where a token wants an expert.
      slots: C.

    Returns:
      For each choice, the slot's number, and 1 where that slot exists, else 0.
    """
    count = tf.zeros_like(choices[0][:, :1])
    results = []
    for wanted in choices:
        places = tf.cumsum(wanted, axis=1, exclusive=True) + count
        results.append((places, wanted * tf.cast(places < slots, tf.float32)))
        count += tf.reduce_sum(wanted, axis=1, keepdims=True)
    return results


def _one_hot(places: tf.Tensor, slots: int) -> tf.Tensor:
    """float32 [..., C] of slot numbers; zeros where the slot does not exist."""
    return tf.one_hot(tf.cast(places, tf.int32), slots)


def _routed(logits, first, kept, valid) -> dict[str, Any]:
    """The fields of `Routed`; they read no padding."""
    count = tf.reduce_sum(valid)
    balance = z = entropy = tf.constant(0.0)
    if logits is not None:
        log_probs = tf.nn.log_softmax(logits)
        probs = tf.exp(log_probs)
        entropy = -_sum(probs * log_probs * valid[..., None])
        square = tf.square(tf.reduce_logsumexp(logits, axis=-1))
        z = tf.math.divide_no_nan(_sum(square * valid), count)
        if first is not None:
            balance = _balance_loss(probs, first, valid)
    served = tf.reduce_max(kept, axis=-1)
    sums = NestedMap(
        tokens=count,
        dropped=_sum(valid * (1.0 - served)),
        load=tf.reduce_sum(kept, axis=[0, 1]),
        entropy=entropy,
        balance=balance * count,
        z=z * count,
    )
    sums = sums.map(tf.stop_gradient)
    return {"balance_loss": balance, "z_loss": z, "sums": sums}


def _balance_loss(probs, first, valid) -> tf.Tensor:
    """Mean over groups with tokens of E sum_e (c_e / S) m_e."""
    count = tf.reduce_sum(valid, axis=1)  # [G]: S without padding.
    total = tf.reduce_sum(probs * valid[..., None], axis=1)
    chosen = tf.reduce_sum(first, axis=1)
    products = probs.shape[-1] * tf.reduce_sum(total * chosen, axis=-1)
    losses = tf.math.divide_no_nan(products, tf.square(count))
    groups = tf.reduce_sum(tf.cast(count > 0, tf.float32))
    return tf.math.divide_no_nan(tf.reduce_sum(losses), groups)


def _sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tensor)
