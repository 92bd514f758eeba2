"""KerasHub's Llama with seven billion weights, to be planned: there are no examples."""

import keras_hub
import tensorflow as tf


def model():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=32000,
        num_layers=32,
        num_query_heads=32,
        num_key_value_heads=32,
        hidden_dim=4096,
        intermediate_dim=11008,
        dtype="mixed_bfloat16",
    )
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def examples(length=2048):
    ids = tf.TensorSpec([length], tf.int32)
    inputs = {"token_ids": ids, "padding_mask": ids}
    return tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(inputs, ids)
    )
