"""Pairs of tokens from a tf.data pipeline, as an encoder-decoder's input."""

import tensorflow as tf

# As seqio's EncDecFeatureConverter(pack=False) names them. With pack=True there are
# segment ids and positions of both sides too, which packed rows need.
NAMES = {
    "source_ids": "encoder_input_tokens",
    "target_ids": "decoder_input_tokens",
    "target_labels": "decoder_target_tokens",
    "target_weights": "decoder_loss_weights",
}


def converted(first, count):
    """Rows of 32 tokens, numbers and the same backwards, in place of your own pipeline.

    With seqio it would be

        lengths = {"inputs": 32, "targets": 32}
        task = seqio.get_mixture_or_task("my_task")
        examples = task.get_dataset(lengths, split="train", shuffle=False)
        return seqio.EncDecFeatureConverter(pack=False)(examples, lengths)
    """

    def row(number):
        numbers = number % 900 + 2 + tf.range(20)  # Below 2 are padding and the end.
        inputs, targets = (
            tf.pad(tf.concat([each, [1]], 0), [[0, 11]])
            for each in (numbers, numbers[::-1])
        )
        return {
            "encoder_input_tokens": inputs,
            "decoder_input_tokens": tf.concat([[0], targets[:-1]], 0),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": tf.cast(targets != 0, tf.int32),
        }

    numbers = tf.data.Dataset.range(first, first + count, output_type=tf.int32)
    return numbers.map(row)


def named(example):
    """An example by the names here; seqio does not tell the lengths of its rows."""
    return {n: tf.ensure_shape(example[theirs], [32]) for n, theirs in NAMES.items()}


def train():
    return converted(0, 1000).shuffle(1000).map(named)


def held_out():
    return converted(1000, 100).map(named)
