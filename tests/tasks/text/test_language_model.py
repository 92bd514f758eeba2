"""The language model: its loss by hand, what padding weighs, its FLOPs."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.initializers import Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.mask_rules import MaskKind, NearMask, PrefixMask
from meshwright.layers.basic.embedding import Softmax, SoftmaxKind, TokenEmbedding
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.experts.gating import Capacity
from meshwright.layers.experts.gatings import Hash
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.transformer import transformer_layer
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.text_input import TextFiles, TextInput
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary, Subwords
from meshwright.trainers.checkpoints.trained_files import write_files

B, S, M, V = 2, 6, 4, 264
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(Layer):
    """Adds a vector to every token; it knows nothing of attention."""

    def weights(self):
        vector = WeightSpec(shape=(M,), dims=("features",), initializer=Normal())
        return NestedMap(vector=vector)

    def fprop(self, ctx, theta, x, **unused):
        return x + theta.vector


def model(body=None, softmax=SoftmaxKind.SHARED, num_layers=3):
    separate = softmax is SoftmaxKind.SEPARATE
    return LanguageModel(
        text=TextInput(sequence_length=S),
        embedding=TokenEmbedding(vocab_size=V, model_dims=M, softmax=softmax),
        stack=Repeat(body=body or Shift(), num_layers=num_layers),
        final_norm=RMSNorm(model_dims=M),
        softmax=Softmax(model_dims=M, vocab_size=V) if separate else None,
    )


def weights_of(task):
    return initialize(task.weights(), key_from_seed(0))


def batch_of(task):
    spec = task.batch_spec(B)
    batch = spec.map(lambda s: RNG.integers(0, V, s.shape).astype(s.dtype.name))
    batch.weights = np.float32(RNG.random([B, S]) < 0.6)
    return batch.map(tf.constant)


@pytest.mark.parametrize("softmax", SoftmaxKind)
def test_loss_by_hand(softmax):
    task = model(softmax=softmax)
    theta, batch = weights_of(task), batch_of(task)
    got = task.loss(Context(), theta, batch)
    w, given = theta.map(lambda t: t.numpy()), batch.map(lambda t: t.numpy())
    shared = softmax is SoftmaxKind.SHARED
    x = w.embedding.table[given.ids] * (M**0.5 if shared else 1)
    x = x + w.stack.vector.sum(0)
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * w.final_norm.scale
    logits = x @ (w.embedding.table.T if shared else w.softmax.kernel)
    nats = 0.0
    for b, s in zip(*np.nonzero(given.weights), strict=True):
        nats += np.log(np.exp(logits[b, s]).sum()) - logits[b, s, given.labels[b, s]]
    count = given.weights.sum()
    np.testing.assert_allclose(got.loss, nats / count, rtol=1e-5)
    np.testing.assert_allclose(got.sums.nats, nats, rtol=1e-5)
    assert got.sums.tokens == count


def test_tokens_without_weight_do_not_count():
    task = model()
    theta, batch = weights_of(task), batch_of(task)
    other = NestedMap(batch)
    other.labels = tf.where(batch.weights > 0, batch.labels, 7)
    assert np.any(other.labels != batch.labels)
    losses = [task.loss(Context(), theta, b).loss for b in (batch, other)]
    assert losses[0] == losses[1]
    batch.weights *= 0.0
    nothing = task.loss(Context(), theta, batch)
    assert nothing.loss == 0 and nothing.sums.tokens == 0


def attending(mask):
    body = transformer_layer(
        model_dims=M, num_heads=2, head_dim=2, hidden_dims=4, mask=mask
    )
    return model(body, num_layers=2)


@pytest.mark.parametrize(
    "mask", [MaskKind.FULL, NearMask(left=3), NearMask(left=3, right=1)]
)
def test_a_mask_that_shows_what_is_to_be_predicted_is_refused(mask):
    message = r"stack\.body\.attention\.mask lets tokens see those after .*right = 0"
    with pytest.raises(ValueError, match=message):
        attending(mask)


def test_what_a_prefix_shows_does_not_count():
    task = attending(PrefixMask(length=3))
    theta, batch = weights_of(task), batch_of(task)
    batch.segment_ids = tf.ones_like(batch.segment_ids)
    batch.segment_positions = tf.tile(tf.range(S)[None], [B, 1])
    # Tokens 1 and 2 are labels of queries 0 and 1, which see them.
    counted = dataclasses.replace(task, stack=attending(MaskKind.CAUSAL).stack)
    behind = np.float32(batch.weights) * (np.arange(S) >= 2)
    got = task.loss(Context(), theta, batch)
    assert 0 < got.sums.tokens == behind.sum() < np.sum(batch.weights)
    seen = NestedMap(batch)
    seen.labels = tf.where(tf.range(S) < 2, 7, batch.labels)
    assert task.loss(Context(), theta, seen).loss == got.loss
    assert counted.loss(Context(), theta, batch).sums.tokens == np.sum(batch.weights)


def test_metrics_are_of_all_tokens_of_all_batches():
    # Batches of 1 and 3 tokens: not the mean of their losses.
    metrics = model().metrics({"nats": 1.0 * 5 + 3.0 * 1, "tokens": 4.0})
    assert metrics == {"loss": 2.0, "bits_per_byte": pytest.approx(2 / math.log(2))}
    assert model().metrics({"nats": 0.0, "tokens": 0.0})["loss"] == 0


def test_bits_per_byte_of_subwords_are_of_the_held_out_bytes(tmp_path):
    pytest.importorskip("sentencepiece")
    for number in range(20):
        (tmp_path / f"{number}.py").write_text(f"x = {number} + some more text\n" * 4)
    text = TextInput(
        files=TextFiles(root=str(tmp_path), held_out_one_in=3),
        vocabulary=SentencePieceVocabulary(vocab_size=320, subwords=Subwords.BPE),
        sequence_length=S,
    )
    embedding = TokenEmbedding(vocab_size=320, model_dims=M, softmax=SoftmaxKind.SHARED)
    task = dataclasses.replace(model(), text=text, embedding=embedding)
    held_out = text.statistics(Split.HELD_OUT)
    assert held_out.tokens < held_out.text_bytes
    # As if each token were one bit: all of them, over all bytes.
    metrics = task.metrics({"nats": math.log(2) * 50, "tokens": 50.0})
    assert metrics["bits_per_byte"] == pytest.approx(
        held_out.tokens / held_out.text_bytes
    )
    assert task.describe_data()["training tokens"] == text.statistics().tokens
    assert task.data_fingerprint()["vocabulary"] == text.trained_vocabulary().sha256


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_the_vocabulary_of_a_training_outlives_its_files(tmp_path, caplog, place):
    pytest.importorskip("sentencepiece")
    source = tmp_path / "source"
    source.mkdir()
    folder = {"disk": f"{tmp_path}/run", "bucket": f"ram://{tmp_path.name}"}[place]
    for number in range(20):
        (source / f"{number}.py").write_text(f"x = {number} + some more text\n" * 4)

    def task(**changes):
        files = TextFiles(root=str(source), held_out_one_in=3, **changes)
        vocabulary = SentencePieceVocabulary(vocab_size=320, subwords=Subwords.BPE)
        text = TextInput(files=files, vocabulary=vocabulary, sequence_length=S)
        embedding = TokenEmbedding(
            vocab_size=320, model_dims=M, softmax=SoftmaxKind.SHARED
        )
        return dataclasses.replace(model(), text=text, embedding=embedding)

    before = task()
    trained, ids = before.data_fingerprint(), before.text.encode("x = some text")
    before.as_trained(folder).check_vocabulary(trained)
    files = before.trained_files()
    for number in range(20):
        (source / f"{number}.py").write_text(f"another = {number} // words\n" * 4)
    changed = task(excluded_dirs=())  # Settings that no cache of this process knows.
    with pytest.raises(ValueError, match="vocabulary is not the one .* set Sentence"):
        changed.as_trained(folder).check_vocabulary(trained)
    write_files(folder, files)
    restored = changed.as_trained(folder)
    restored.check_vocabulary(trained)
    assert restored.text.encode("x = some text") == ids
    assert not model().trained_files()
    assert model().as_trained(folder) == model()
    model().check_vocabulary({})
    assert not caplog.records
    for each, name in ((model(), "TextInput's bytes"), (restored, f"{folder}/vocab")):
        each.check_vocabulary({"the dataset of TokenDataset.train": "40 x ids"})
        assert "trained on ids of a pipeline, of which no vocab" in caplog.text
        assert f"text is read and written by {name}" in caplog.text
    with pytest.raises(ValueError, match="vocabulary is not the one"):
        model().check_vocabulary(trained)


def test_experts_add_to_the_loss_and_show_their_load():
    E = 2
    sizes = {"model_dims": M, "num_heads": 2, "head_dim": 2}
    gating = Hash(model_dims=M, num_experts=E, capacity=Capacity(factor=2.0))
    experts = ExpertFeedForward(model_dims=M, hidden_dims=4, num_experts=E)
    mixture = MoE(gating=gating, experts=experts, z_weight=0.5)
    dense = transformer_layer(hidden_dims=4, **sizes)
    sparse = transformer_layer(feed_forward=mixture, **sizes)
    stack = Repeat(body=Sequential(layers=(dense, sparse)), num_layers=4)
    task = dataclasses.replace(model(), stack=stack)
    theta, batch = weights_of(task), batch_of(task)
    batch.segment_ids = tf.ones_like(batch.segment_ids)
    got = task.loss(Context(), theta, batch)
    z = got.sums.stack.z / got.sums.stack.tokens
    nats = got.sums.nats / got.sums.tokens
    np.testing.assert_allclose(got.loss, nats + 0.5 * np.mean(z), rtol=1e-5)
    sums = {path: t.numpy() for path, t in got.sums.items_by_path()}
    metrics = task.metrics(sums)
    assert metrics["loss"] == pytest.approx(float(nats), rel=1e-6)
    assert metrics["stack/dropped"] == 0
    # The hash decides: the same in both mixtures.
    (load,) = task.heat_maps(sums).values()
    np.testing.assert_array_equal(load[0], load[1])
    assert load.sum() == 2 * B * S


def test_flops_of_a_transformer():
    H, N, D, L = 32, 2, 6, 3
    body = transformer_layer(
        model_dims=M,
        hidden_dims=H,
        num_heads=N,
        head_dim=D,
        activation=Activation.GATED_GELU,
    )
    forward = 2 * (4 * M * N * D + 3 * M * H)  # Products with weights, and
    forward += 2 * 2 * S * N * D  # of queries and keys, probabilities and values.
    forward = L * forward + 2 * M * V
    for softmax in SoftmaxKind:
        task = model(body, softmax, num_layers=L)
        assert task.train_flops(B) == B * S * 3 * forward
    group = Repeat(body=body, num_layers=3)
    nested = model(group, num_layers=2)
    assert nested.train_flops(B) - B * S * 6 * M * V == 2 * (
        model(body, num_layers=3).train_flops(B) - B * S * 6 * M * V
    )


def test_flops_of_a_body_without_attention():
    assert model().train_flops(B) == B * S * 6 * M * V


def test_what_a_resumed_run_compares(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.py").write_text(f"text {number}")
    task = model()
    files = dataclasses.replace(task.text.files, root=str(tmp_path), held_out_one_in=2)

    def fingerprint(**changes):
        text = dataclasses.replace(task.text, files=files, **changes)
        return dataclasses.replace(task, text=text).data_fingerprint()

    before = fingerprint()
    for name, value in (("seed", 5), ("sequence_length", 7)):
        after = fingerprint(**{name: value})
        assert {k for k in before if after[k] != before[k]} == {f"TextInput.{name}"}


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused():
    embedding = TokenEmbedding(vocab_size=V - 1, model_dims=M)
    with pytest.raises(ValueError, match="vocab_size 263 is smaller than .* 264"):
        dataclasses.replace(model(), embedding=embedding)
    # Its loss would be of logits that there are not.
    softmax = Softmax(vocab_size=V - 1, model_dims=M)
    with pytest.raises(ValueError, match="Softmax.vocab_size 263 is smaller than"):
        dataclasses.replace(model(softmax=SoftmaxKind.SEPARATE), softmax=softmax)


@pytest.mark.parametrize("softmax", SoftmaxKind)
def test_a_softmax_that_does_not_fit_the_embedding_is_refused(softmax):
    (other,) = set(SoftmaxKind) - {softmax}
    with pytest.raises(ValueError, match="give a softmax layer, if and only if"):
        dataclasses.replace(
            model(softmax=softmax), softmax=model(softmax=other).softmax
        )
