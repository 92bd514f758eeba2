"""A process that has TensorFlow and nothing of Meshwright: runs SavedModels.

It reads lines of JSON, [folder, signature, .npz of arguments, .npz for results].
"""

import json
import sys

import numpy as np

sys.modules["jax"] = sys.modules["meshwright"] = None  # Importing them fails.

import tensorflow as tf  # noqa: E402

models = {}
for line in sys.stdin:
    folder, signature, given, output = json.loads(line)
    if folder not in models:
        models[folder] = tf.saved_model.load(folder)
    with np.load(given) as arguments:
        tensors = {name: tf.constant(arguments[name]) for name in arguments.files}
    out = models[folder].signatures[signature](**tensors)
    np.savez(output, **{name: value.numpy() for name, value in out.items()})
    print("done", flush=True)
