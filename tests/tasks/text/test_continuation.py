"""Continued prompts against whole forward passes, token by token, on one device."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.modeling.initializers import Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.layers.attention.learned_terms import Sink
from meshwright.layers.attention.mask_rules import NearMask, PrefixMask
from meshwright.layers.attention.positions import InputPositions, PositionKind
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.basic.embedding import SoftmaxKind, TokenEmbedding
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.experts.gating import Capacity
from meshwright.layers.experts.gatings import Hash, Top2
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.stacks.shared_bias import SharedRelativeBias
from meshwright.layers.transformer import Order, transformer_layer
from meshwright.tasks.text.continuation import Continuation
from meshwright.tasks.text.decoding import BeamSearch, Sampling
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.text_input import TextInput

M, V, E = 16, 264, 4
SIZES = {"model_dims": M, "num_heads": 4, "head_dim": 4}
P, N = 8, 9
PROMPTS = [[1, 70, 80, 90, 100, 110, 120, 130], [1], [1, 200, 7], [50, 60]]
END = TextInput.end_id


def experts(gating):
    """As many slots as tokens: whole passes drop none either."""
    sizes = {"model_dims": M, "num_experts": E}
    return MoE(
        gating=gating(**sizes, capacity=Capacity(factor=E)),
        experts=ExpertFeedForward(hidden_dims=8, **sizes),
    )


MODELS = {
    "rotary": {"num_kv_heads": 2, "qk_norm": True},
    "relative": {"positions": PositionKind.RELATIVE, "mask": NearMask(left=3, right=0)},
    "shared bias": {"positions": PositionKind.SHARED, "block_size": 3},
    "prefix": {"mask": PrefixMask(length=2)},
    "blocks": {"block_size": 3},
    "parallel": {"order": Order.PARALLEL},
    "vectors": {
        "positions": RelativeVectors(max_distance=3),
        "sink": Sink.LEARNED,
        "block_size": 3,
    },
    "sinusoids": {
        "positions": RelativeSinusoids(),
        "mask": NearMask(left=3, right=0, first=2),
        "sink": Sink.ZERO,
    },
    "top-2 experts": {"feed_forward": experts(Top2)},
    "hashed experts": {"feed_forward": experts(Hash), "positions": PositionKind.NONE},
}


def model(name="rotary"):
    kwargs = {"hidden_dims": 32, **MODELS[name]}
    if "feed_forward" in kwargs:
        del kwargs["hidden_dims"]
    layer = transformer_layer(**SIZES, **kwargs)
    is_shared = kwargs.get("positions") is PositionKind.SHARED
    first = {"hidden_dims": 8} | (
        {"positions": kwargs["positions"]} if is_shared else {}
    )
    body = Sequential(layers=(transformer_layer(**SIZES, **first), layer))
    stack = Repeat(body=body, num_layers=4)
    sines = InputPositions.SINUSOIDS if "hash" in name else InputPositions.NONE
    return LanguageModel(
        text=TextInput(sequence_length=P + N),
        embedding=TokenEmbedding(
            vocab_size=V, model_dims=M, softmax=SoftmaxKind.SHARED
        ),
        stack=SharedRelativeBias(stack=stack) if is_shared else stack,
        final_norm=RMSNorm(model_dims=M),
        input_positions=sines,
    )


def with_layers_behind(task):
    """The model with a group's layers once more, behind the stack."""
    layers = (task.stack, *task.stack.body.layers)
    return dataclasses.replace(task, stack=Sequential(layers=layers))


def weights_of(task):
    """Large enough that each token makes a difference."""
    drawn = initialize(task.weights(), key_from_seed(0))
    return drawn.map(lambda w: 2 * w if w.shape.rank > 1 else w)


def continuation(task, search, prompts, plan=None, seed=0, length=N):
    """(weights, batch) -> `ids` and `scores` of so many tokens more; and the batch."""
    rows = np.full([len(prompts), P], 99, np.int32)  # What is there is not read.
    for row, prompt in zip(rows, prompts, strict=True):
        row[-len(prompt) :] = prompt
    lengths = tf.constant([len(prompt) for prompt in prompts])
    batch = NestedMap(ids=tf.constant(rows), lengths=lengths)
    more = Continuation(task=task, search=search, prompt_length=P, length=length)
    ctx = Context(key=key_from_seed(seed), plan=plan or ShardingPlan())

    def run(theta, batch):
        state = more.begin(ctx, theta, batch)
        state = more.go_on(ctx, theta, batch, state, length)
        decoded = more.result(state)
        return decoded.ids, decoded.scores

    return run, batch


def continued(task, theta, search, prompts, seed=0):
    """`ids` and `scores` of continuations of up to N tokens, on one device."""
    run, batch = continuation(task, search, prompts, seed=seed)
    compiled = tf.function(run, jit_compile=True, autograph=False)
    return [t.numpy() for t in compiled(theta, batch)]


def said(ids):
    """New tokens up to the end, without padding."""
    ids = ids.tolist()
    return ids[: ids.index(END) + 1] if END in ids else ids


def log_probs_of_next(task, theta, prompts, rows):
    """For each row the log probabilities [tokens, V] of each new token.

    They are of one pass over all of the texts.
    """
    texts = [[*p, *said(row)] for p, row in zip(prompts, rows, strict=True)]
    ids = np.zeros([len(texts), P + N], np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    batch = NestedMap(
        ids=tf.constant(ids),
        segment_ids=tf.constant((ids > 0).astype(np.int32)),
        segment_positions=tf.broadcast_to(tf.range(P + N), ids.shape),
    )
    logits = task.logits(Context(), theta, batch)
    log_probs = tf.nn.log_softmax(logits).numpy()
    return [
        log_probs[i, len(prompt) - 1 : len(text) - 1]
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def check_greedy(task, theta, prompts, ids, scores):
    """Each token is the likeliest of a whole pass over the text."""
    of_rows = log_probs_of_next(task, theta, prompts, ids)
    for row, score, log_probs in zip(ids, scores, of_rows, strict=True):
        new = said(row)
        assert new == log_probs.argmax(-1).tolist()
        assert len(new) == N or new[-1] == END
        assert not row[len(new) :].any()
        np.testing.assert_allclose(score, log_probs.max(-1).sum(), rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_whole_passes(name):
    task = model(name)
    theta = weights_of(task)
    # A token of a prefix sees all of it: it has to be there.
    prompts = [p for p in PROMPTS if name != "prefix" or len(p) > 1]
    ids, scores = continued(task, theta, Sampling(temperature=0), prompts)
    check_greedy(task, theta, prompts, ids[:, 0], scores[:, 0])
    assert len(np.unique(ids)) > 6  # Not the same token on and on.


def test_layers_behind_a_repeat_decode_too():
    task = with_layers_behind(model())
    theta = weights_of(task)
    ids, scores = continued(task, theta, Sampling(temperature=0), PROMPTS)
    check_greedy(task, theta, PROMPTS, ids[:, 0], scores[:, 0])
    assert len(np.unique(ids)) > 6
    check_beams(task, theta)


def test_a_row_ends_at_the_end_token():
    task = model()
    theta = weights_of(task)
    whole, _ = continued(task, theta, Sampling(temperature=0), PROMPTS)

    class Ending(TextInput):
        end_id = int(whole[2, 0, 3])

    ending = dataclasses.replace(task, text=Ending(sequence_length=P + N))
    ids, _ = continued(ending, theta, Sampling(temperature=0), PROMPTS)
    for row, uncut in zip(ids[:, 0].tolist(), whole[:, 0].tolist(), strict=True):
        if Ending.end_id in uncut:
            uncut = uncut[: uncut.index(Ending.end_id) + 1]
        assert row == uncut + [0] * (N - len(uncut))
    assert ids[2, 0, -1] == 0


def test_draws_differ_by_row_and_seed_alone():
    task = model()
    theta, same = weights_of(task), [PROMPTS[0]] * 3
    sampling = Sampling(temperature=1.0, top_p=0.95)
    ids, _ = continued(task, theta, sampling, same)
    again, _ = continued(task, theta, sampling, same)
    other, _ = continued(task, theta, sampling, same, seed=1)
    np.testing.assert_array_equal(ids, again)
    assert len({tuple(row[0]) for row in [*ids, *other]}) == 6
    one, _ = continued(task, theta, Sampling(top_k=1), PROMPTS)
    likeliest, _ = continued(task, theta, Sampling(temperature=0), PROMPTS)
    np.testing.assert_array_equal(one, likeliest)


def check_beams(task, theta):
    """Three beams have the scores of whole passes; returns the scores."""
    ids, scores = continued(task, theta, BeamSearch(beams=3), PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    beams = ids.reshape([-1, N])
    of_rows = log_probs_of_next(task, theta, prompts, beams)
    for beam, score, log_probs in zip(beams, scores.ravel(), of_rows, strict=True):
        new = said(beam)
        total = sum(log_probs[np.arange(len(new)), new])
        np.testing.assert_allclose(
            score, total / ((5 + len(new)) / 6) ** 0.6, rtol=1e-4
        )
    assert (np.diff(scores) <= 0).all()
    assert len({tuple(beam) for beam in beams}) == len(beams)
    return scores


def test_beams_have_the_scores_of_whole_passes():
    task = model("top-2 experts")
    theta = weights_of(task)
    scores = check_beams(task, theta)
    _, greedy = continued(task, theta, BeamSearch(beams=1), PROMPTS)
    assert (scores[:, 0] >= greedy[:, 0] - 1e-5).all()


def test_four_stages_say_what_one_device_says():
    alone = model("hashed experts")
    stack = dataclasses.replace(alone.stack, num_layers=8)
    alone = dataclasses.replace(alone, stack=stack)
    theta, search = weights_of(alone), BeamSearch(beams=2)
    ids, scores = continued(alone, theta, search, PROMPTS)
    stack = Pipeline(stack=alone.stack, num_stages=4, num_microbatches=1)
    task = dataclasses.replace(alone, stack=stack)
    plan = ShardingPlan(
        mesh_axes=("stage", "data", "expert"),
        mesh_shape=(4, 1, 2),
        weights={"stages": "stage", "experts": "expert"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "experts": "expert",
        },
    )
    theta.stack = theta.stack.map(stack.by_stage)
    specs = task.weights()
    run, batch = continuation(task, search, PROMPTS, plan)
    program = compile_program(
        run,
        tf.nest.map_structure(tf.TensorSpec.from_tensor, [theta, batch]),
        plan.mesh,
        in_shardings=[specs.map(lambda spec: spec.sharding(plan)), None],
        name="continuation",
    )
    args = tf.nest.map_structure(lambda t: t.numpy(), (theta, batch))
    got = program.unshard(program(*args))
    np.testing.assert_array_equal(got[0], ids)
    np.testing.assert_allclose(got[1], scores, rtol=1e-5)


def test_layers_that_cannot_decode_are_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Shift(Layer):
        def weights(self):
            vector = WeightSpec(shape=(M,), dims=("features",), initializer=Normal())
            return NestedMap(vector=vector)

    body = Sequential(layers=(transformer_layer(**SIZES, hidden_dims=8), Shift()))
    repeat = Repeat(body=body, num_layers=2)
    for stack, path in (
        (repeat, "stack.body.layers[1]"),
        (Sequential(layers=(repeat, Shift())), "stack.layers[0].body.layers[1]"),
        (Shift(), "stack"),
    ):
        task = dataclasses.replace(model(), stack=stack)
        message = re.escape(f"LanguageModel.{path} is Shift, which cannot decode")
        with pytest.raises(ValueError, match=message):
            continued(task, weights_of(task), Sampling(temperature=0), PROMPTS)
