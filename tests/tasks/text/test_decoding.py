"""Searches against enumeration, on models that are small tables."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.text.decoding import BeamSearch, Sampling, TokenModel, _drawn

B, T, V = 3, 4, 5
START, END = 1, 2


def table(seed: int = 0) -> np.ndarray:
    """Log probabilities [B, T, V (before), V (next)], each row a model of its own."""
    logits = 2 * np.random.default_rng(seed).standard_normal([B, T, V, V])
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits.astype(np.float32)


def decode(decoder, logits, key=None, stops=()):
    """What `decoder` finds in the models of a table; the cache has all tokens so far.

    It stops at each of `stops`, so many tokens, and goes on there. The last token is
    read from the cache: a cache in another order would show.
    """
    K, batch = decoder.beams, len(logits)
    model = tf.constant(logits)

    def step(ids, cache, position):
        here = tf.range(T) == position
        last_ids = tf.reshape(ids, [batch * K, 1])
        seen = tf.where(here, last_ids, cache.seen)
        before = tf.reshape(tf.gather(seen, position, axis=1), [batch, K])
        rows = tf.gather(model, position, axis=1)
        gathered = tf.gather(rows, before, axis=1, batch_dims=1)
        # What came before the last token counts too: a beam is more than its last.
        first = tf.cast(tf.reshape(seen[:, 1], [batch, K, 1]), tf.float32)
        gathered += (
            tf.cast(position > 1, tf.float32) * first * tf.range(V, dtype=tf.float32)
        )
        return gathered, NestedMap(seen=seen)

    @tf.function(jit_compile=True, autograph=False)
    def run():
        ctx = Context() if key is None else Context(key=key)
        cache = NestedMap(seen=tf.zeros([batch * K, T], tf.int32))
        token_model = TokenModel(
            step=step, cache=cache, batch=batch, length=T, start_id=START, end_id=END
        )
        if not stops:
            decoded = decoder.decode(ctx, token_model)
        else:
            state = decoder.begin(ctx, token_model)
            for until in (*stops, T):
                state = decoder.go_on(ctx, token_model, state, until)
            decoded = decoder.result(state)
        return decoded.ids, decoded.scores

    return [t.numpy() for t in run()]


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


def next_log_probs(logits, prefix):
    """Of one model [T, V, V], after the tokens said."""
    before = prefix[-1] if prefix else START
    scores = logits[len(prefix), before].astype(np.float64)
    if len(prefix) > 1:
        scores = scores + prefix[0] * np.arange(V)
    return log_softmax(scores)


def all_sequences(logits, alpha):
    """Every sequence up to its end, or of T tokens, with its score."""
    totals = {}
    for tokens in itertools.product(range(V), repeat=T):
        cut = tokens.index(END) + 1 if END in tokens else T
        ids = tokens[:cut]
        total = sum(next_log_probs(logits, ids[:i])[t] for i, t in enumerate(ids))
        totals[ids] = total / ((5 + cut) / 6) ** alpha
    return totals


def greedy(logits):
    sequence = []
    while len(sequence) < T and END not in sequence:
        sequence.append(int(np.argmax(next_log_probs(logits, sequence))))
    return sequence


def text(ids):
    ids = list(map(int, ids))
    return ids[: ids.index(END) + 1] if END in ids else ids


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_one_beam_and_no_temperature_are_greedy(seed, alpha):
    logits = table(seed)
    expected = [greedy(row) for row in logits]
    for decoder in (Sampling(temperature=0), BeamSearch(beams=1, alpha=alpha)):
        ids, scores = decode(decoder, logits)
        assert [text(row) for row in ids[:, 0]] == expected
        rows = zip(logits, expected, ids[:, 0], scores[:, 0], strict=True)
        for logit_row, sequence, row, score in rows:
            assert not row[len(sequence) :].any()
            penalty = 0.0 if isinstance(decoder, Sampling) else alpha
            wanted = all_sequences(logit_row, penalty)[tuple(sequence)]
            np.testing.assert_allclose(score, wanted, rtol=1e-5)


def by_hand(logits, K, alpha):
    """The same search, in Python."""
    live, ended = [((), 0.0)], []
    for _ in range(T):
        options = [
            ((*prefix, token), score + gain)
            for prefix, score in live
            for token, gain in enumerate(next_log_probs(logits, prefix))
        ]
        options.sort(key=lambda option: -option[1])
        for sequence, score in options[:K]:
            if sequence[-1] == END:
                ended.append((sequence, score / ((5 + len(sequence)) / 6) ** alpha))
        if len(ended) >= K:
            break
        live = [option for option in options if option[0][-1] != END][:K]
    else:
        ended += [(prefix, score / ((5 + T) / 6) ** alpha) for prefix, score in live]
    return sorted(ended, key=lambda option: -option[1])[:K]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("K", [2, 4])
def test_beams_are_those_of_a_search_by_hand(seed, K):
    logits = table(seed)
    ids, scores = decode(BeamSearch(beams=K, alpha=0.6), logits)
    for row, score, logit_row in zip(ids, scores, logits, strict=True):
        expected = by_hand(logit_row, K, 0.6)
        assert [tuple(text(r)) for r in row] == [sequence for sequence, _ in expected]
        np.testing.assert_allclose(score, [s for _, s in expected], rtol=1e-5)


def test_as_many_beams_as_beginnings_find_the_likeliest():
    logits = table(7)
    # Ends are unlikely, so that the search goes on to T.
    logits[..., END] -= 20
    ids, _ = decode(BeamSearch(beams=V**2, alpha=0.0), logits[:1, :, :, :])
    likeliest = max((s, ids) for ids, s in all_sequences(logits[0], 0.0).items())[1]
    assert tuple(text(ids[0, 0])) == likeliest


def test_a_row_does_not_depend_on_the_others():
    logits = table(5)
    together, _ = decode(BeamSearch(beams=3), logits)
    for i in range(B):
        alone, _ = decode(BeamSearch(beams=3), logits[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_draws_have_the_models_distribution():
    many = np.repeat(table(2)[:1], 4000, axis=0)
    ids, scores = decode(Sampling(temperature=1.0), many, key=key_from_seed(3))
    first = np.bincount(ids[:, 0, 0], minlength=V) / len(many)
    wanted = np.exp(next_log_probs(many[0], []))
    np.testing.assert_allclose(first, wanted, atol=0.03)
    sequences = all_sequences(many[0], 0.0)
    for row, score in zip(ids[:20, 0], scores[:20, 0], strict=True):
        np.testing.assert_allclose(score, sequences[tuple(text(row))], rtol=1e-4)
    again, _ = decode(Sampling(temperature=1.0), many, key=key_from_seed(3))
    other, _ = decode(Sampling(temperature=1.0), many, key=key_from_seed(4))
    assert (again == ids).all() and (other != ids).any()


def probabilities(logits):
    exp = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, 0.9), (None, 0.05), (7, 1.0), (1000, 1.0), (20, 0.7), (None, 1e-9)],
)
def test_draws_are_among_the_likeliest(temperature, top_k, top_p):
    logits = 3 * np.random.default_rng(1).standard_normal([6, 200], np.float32)
    logits[0] = -np.abs(logits[0]) - 50  # All of one sign.
    logits[1] = np.abs(logits[1])
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = sampling.allowed(tf.constant(logits)).numpy()
    for row, allowed in zip(logits, got, strict=True):
        order = np.argsort(-row)[:top_k]
        share = np.cumsum(probabilities(row[order] / temperature))
        if top_p < 1:
            order = order[: np.searchsorted(share, top_p) + 1]
        wanted = np.isin(np.arange(200), order)
        np.testing.assert_array_equal(allowed > -1e8, wanted)
        np.testing.assert_allclose(
            allowed[wanted], (row[wanted] - row.max()) / temperature, rtol=1e-6
        )


def test_forbidden_tokens_are_never_drawn():
    logits = np.full([4000, 77], -1e9, np.float32)
    logits[:, [0, 5, 70]] = np.log([0.2, 0.3, 0.5])
    uniform = np.linspace(0, 1, 4000, dtype=np.float32)
    got = _drawn(tf.constant(logits), tf.constant(uniform)).numpy()
    wanted = np.select([uniform < 0.2, uniform < 0.5], [0, 5], 70)
    assert (got != wanted).sum() <= 2  # At the edges.
    assert set(got) == {0, 5, 70}
    assert got[-1] == 70  # Drawn by 1, which no sum is above.


def test_tokens_that_are_alike_are_all_allowed():
    logits = tf.constant([[2.0, 0.0, 1.0, 1.0, -0.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.6)):
        allowed = sampling.allowed(logits).numpy()[0] > -1e8
        np.testing.assert_array_equal(allowed, [True, False, True, True, False])


def test_one_of_the_likeliest_is_greedy():
    logits = table(6)
    logits[:, :, :, 3] = logits[:, :, :, 4]  # The first of equals.
    greedily = decode(Sampling(temperature=0), logits)
    for sampling in (Sampling(top_k=1), Sampling(top_k=1, temperature=3.0)):
        got = decode(sampling, logits, key=key_from_seed(0))
        for ours, theirs in zip(got, greedily, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_very_low_temperature_is_nearly_greedy():
    got, _ = decode(Sampling(temperature=1e-30), table(8), key=key_from_seed(0))
    np.testing.assert_array_equal(got, decode(Sampling(temperature=0), table(8))[0])


@pytest.mark.parametrize("decoder", [Sampling(), Sampling(top_p=0.5), BeamSearch()])
def test_a_search_goes_on_where_it_stopped(decoder):
    logits = table(9)
    logits[..., END] -= 1
    whole = decode(decoder, logits, key=key_from_seed(1))
    parts = decode(decoder, logits, key=key_from_seed(1), stops=(1, 3))
    for ours, theirs in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BeamSearch(beams=0), "BeamSearch.beams is 0"),
        (lambda: BeamSearch(alpha=-1), "BeamSearch.alpha is -1"),
        (lambda: Sampling(temperature=-0.5), "Sampling.temperature is -0.5"),
        (lambda: Sampling(temperature=1e-41), "is 1e-41; it must be 0, .* or at least"),
        (lambda: Sampling(top_k=0), "Sampling.top_k is 0"),
        (lambda: Sampling(top_p=0.0), "Sampling.top_p is 0.0"),
        (lambda: Sampling(top_p=1.5), "Sampling.top_p is 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
