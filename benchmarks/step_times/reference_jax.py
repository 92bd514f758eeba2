"""The model and training step of `lm/transformer.gin`, written by hand in JAX.

It shares no code with Meshwright, only the maths, the names of the weights and the
shardings (GSPMD Table 1, "2D finalized"); `step_time.py` checks that the losses agree.

Dims: B batch, S sequence, M model, H hidden, N heads, D head size, V vocabulary,
L layers.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WEIGHTS = {
    "embedding": {"table": P("Y", "X")},
    "final_norm": {"scale": P(None)},
    "stack": {
        "attention": {
            "w_q": P(None, "X", "Y", None),
            "w_k": P(None, "X", "Y", None),
            "w_v": P(None, "X", "Y", None),
            "w_o": P(None, "Y", None, "X"),
        },
        "attention_norm": {"scale": P(None, None)},
        "feed_forward": {"w_in": P(None, "X", "Y"), "w_out": P(None, "Y", "X")},
        "feed_forward_norm": {"scale": P(None, None)},
    },
}
"""Weights by name; those of the stack have a leading dim L."""
STREAM = P("X", None, "Y")  # B, S, then M; hidden and vocabulary are split alike.
HEADS = P("X", None, "Y", None)  # B, S, N, D
BATCH = P(None, "X", None)  # steps, B, S

ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-6
BETA1, BETA2, ADAM_EPSILON = 0.9, 0.999, 1e-8


class Layers(enum.Enum):
    """How the layers are written: as a `lax.scan`, or one after another."""

    SCAN = "scan"
    UNROLLED = "unrolled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The training loop of one model on one mesh.

    Args:
      mesh: a mesh with axes X and Y.
      layers: how the layers are written.
      warmup_steps, peak_rate, end_step, end_rate: a line up, then half a cosine down.
      clip: limit of the gradients' global norm.
      activation_dtype: the type of activations, and of weights where they are used;
        norms, rotations, softmaxes and losses are computed in float32.
    """

    mesh: jax.sharding.Mesh
    layers: Layers
    warmup_steps: int
    peak_rate: float
    end_step: int
    end_rate: float
    clip: float
    activation_dtype: jax.typing.DTypeLike = jnp.float32

    def compile(self, state, batches) -> jax.stages.Compiled:
        """The compiled loop: (state, batches) -> (state, metrics); donates the state.

        Args:
          state: step, theta and slots; only shapes and dtypes count.
          batches: the arrays of the batches, each [steps, B, S].
        """
        named = lambda spec: NamedSharding(self.mesh, spec)  # noqa: E731
        slots = jax.tree.map(lambda spec: {"m": spec, "v": spec}, WEIGHTS)
        shardings = jax.tree.map(named, {"step": P(), "theta": WEIGHTS, "slots": slots})
        jitted = jax.jit(
            self.train_loop,
            in_shardings=(shardings, named(BATCH)),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        return jitted.lower(state, batches).compile()

    def split(self, x, spec):
        """`x` with the sharding of `spec`."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def train_loop(self, state, batches):
        if batches["ids"].shape[0] > 1:
            return jax.lax.scan(self.train_step, state, batches)
        state, metrics = self.train_step(state, jax.tree.map(lambda x: x[0], batches))
        return state, jax.tree.map(lambda x: x[None], metrics)

    def train_step(self, state, batch):
        """One step of Adam with clipping: new state, metrics."""
        theta, step = state["theta"], state["step"]
        grad = jax.value_and_grad(self.loss, has_aux=True)
        (loss, sums), grads = grad(theta, batch)
        rate = self.learning_rate(step)
        norm = global_norm(grads)
        factor = self.clip / jnp.maximum(norm, self.clip)
        count = step.astype(jnp.float32) + 1.0
        m_scale = -1.0 / jnp.expm1(count * math.log(BETA1))
        v_scale = -1.0 / jnp.expm1(count * math.log(BETA2))

        def update(weight, grad, slots):
            grad = grad * factor
            m = BETA1 * slots["m"] + (1.0 - BETA1) * grad
            v = BETA2 * slots["v"] + (1.0 - BETA2) * grad * grad
            along = m_scale * m / (jnp.sqrt(v_scale * v) + ADAM_EPSILON)
            return weight - rate * along, {"m": m, "v": v}

        leaves, tree = jax.tree.flatten(theta)
        new = [
            update(*parts)
            for parts in zip(
                leaves,
                jax.tree.leaves(grads),
                tree.flatten_up_to(state["slots"]),
                strict=True,
            )
        ]
        metrics = {
            "loss": loss,
            "sums": sums,
            "learning_rate": rate,
            "grad_norm": norm,
            "weight_norm": global_norm(theta),
        }
        state = {
            "step": step + 1,
            "theta": tree.unflatten(weight for weight, _ in new),
            "slots": tree.unflatten(slots for _, slots in new),
        }
        return state, metrics

    def learning_rate(self, step):
        count = step.astype(jnp.float32)
        fraction = (count - self.warmup_steps) / (self.end_step - self.warmup_steps)
        wave = 0.5 * (1.0 + jnp.cos(math.pi * jnp.clip(fraction, 0.0, 1.0)))
        cosine = self.end_rate + (self.peak_rate - self.end_rate) * wave
        return jnp.minimum(self.peak_rate * (count + 1.0) / self.warmup_steps, cosine)

    def loss(self, theta, batch):
        """Mean nats over tokens of weight 1, and the sums that the mean is made of."""
        theta = jax.tree.map(self.split, theta, WEIGHTS)
        table = theta["embedding"]["table"]
        vocab_size, model_dims = table.shape
        if self.mesh.shape["Y"] > 1:  # A product picks from a split vocabulary.
            ids = jax.nn.one_hot(batch["ids"], vocab_size, dtype=self.activation_dtype)
            x = matmul(ids, table)
        else:
            x = table[batch["ids"]].astype(self.activation_dtype)
        x = self.split(x, STREAM) * model_dims**0.5
        x = self.stack(theta["stack"], x, batch)
        x = rms_norm(x, theta["final_norm"]["scale"])
        logits = self.split(matmul(x, table.T), STREAM).astype(jnp.float32)
        one_hot = jax.nn.one_hot(batch["labels"], vocab_size)
        losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * one_hot, -1)
        nats = jnp.sum(losses * batch["weights"])
        tokens = jnp.sum(batch["weights"])
        return nats / jnp.maximum(tokens, 1.0), {"nats": nats, "tokens": tokens}

    def stack(self, weights, x, batch):
        """The L layers; masks and angles, which all need, are computed once."""
        segments, positions = batch["segment_ids"], batch["segment_positions"]
        index = jnp.arange(x.shape[1])
        visible = (index[:, None] >= index[None, :])[None] & (
            segments[:, :, None] == segments[:, None, :]
        )
        mask = jnp.where(visible, 0.0, -1e30)[:, None]
        half = weights["attention"]["w_q"].shape[-1] // 2
        frequency = jnp.exp(jnp.arange(half) * (-math.log(ROTARY_BASE) / half))
        angle = positions.astype(jnp.float32)[:, :, None, None] * frequency
        turn = (jnp.cos(angle), jnp.sin(angle))

        def layer(x, w):
            return self.layer(w, x, mask, turn), None

        if self.layers is Layers.SCAN:
            return jax.lax.scan(layer, x, weights)[0]
        for i in range(weights["attention"]["w_q"].shape[0]):
            x, _ = layer(x, jax.tree.map(lambda t, i=i: t[i], weights))
        return x

    def layer(self, w, x, mask, turn):
        """x [B, S, M] -> [B, S, M]; mask is [B, 1, S, S], turn is (cos, sin)."""
        h = rms_norm(x, w["attention_norm"]["scale"])
        x = self.split(x + self.attention(w["attention"], h, mask, turn), STREAM)
        h = rms_norm(x, w["feed_forward_norm"]["scale"])
        hidden = self.split(matmul(h, w["feed_forward"]["w_in"]), STREAM)
        out = matmul(jax.nn.relu(hidden), w["feed_forward"]["w_out"])
        return self.split(x + self.split(out, STREAM), STREAM)

    def attention(self, w, x, mask, turn):
        q, k, v = (
            self.split(matmul(x, w[name]), HEADS) for name in ("w_q", "w_k", "w_v")
        )
        q, k = rotate(q, *turn), rotate(k, *turn)
        logits = jnp.einsum("bsnd,btnd->bnst", q * q.shape[-1] ** -0.5, k)
        probs = jax.nn.softmax(logits.astype(jnp.float32) + mask).astype(v.dtype)
        context = self.split(jnp.einsum("bnst,btnd->bsnd", probs, v), HEADS)
        return self.split(matmul(context, w["w_o"], dims=2), STREAM)


def matmul(x, w, dims=1):
    """Contracts the last `dims` dims of `x` with the first of `w`, both flattened."""
    size = math.prod(w.shape[:dims])
    product = x.reshape(-1, size) @ w.astype(x.dtype).reshape(size, -1)
    return product.reshape(*x.shape[:-dims], *w.shape[dims:])


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale).astype(x.dtype)


def rotate(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def global_norm(tensors):
    return jnp.sqrt(sum(jnp.sum(jnp.square(t)) for t in jax.tree.leaves(tensors)))
