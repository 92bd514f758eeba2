"""Rows of tokens that a tf.data pipeline has packed, as a language model's input."""

import tensorflow as tf

# As seqio's DecoderFeatureConverter(pack=True) names them.
NAMES = {
    "ids": "decoder_input_tokens",
    "labels": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "segment_ids": "decoder_segment_ids",
    "segment_positions": "decoder_positions",
}


def packed(first, count):
    """Rows of two texts, 2 3 4 ... and 5 7 9 ..., in place of your own pipeline."""

    def row(number):
        at, start = tf.range(16), number % 50 + 2
        texts = [start + at, start + 3 + 2 * at]  # Below 2 are padding and the end.
        targets = tf.concat([tf.concat([text[:-1], [1]], 0) for text in texts], 0)
        starts = tf.concat([tf.one_hot(0, 16, 0, 1, dtype=tf.int32)] * 2, 0)
        return {
            "decoder_target_tokens": targets,
            "decoder_input_tokens": starts * tf.roll(targets, 1, 0),
            "decoder_loss_weights": tf.ones([32], tf.int32),
            "decoder_segment_ids": tf.repeat([1, 2], 16),
            "decoder_positions": tf.concat([at, at], 0),
        }

    numbers = tf.data.Dataset.range(first, first + count, output_type=tf.int32)
    return numbers.map(row)


def named(example):
    return {name: example[theirs] for name, theirs in NAMES.items()}


def train():
    return packed(0, 1000).shuffle(1000).map(named)


def held_out():
    return packed(1000, 100).map(named)
