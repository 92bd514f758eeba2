"""Importing the library changes nothing in the process of its user."""

import subprocess
import sys

LOOK = """
import logging, os, signal, sys, warnings

sys.modules["keras.src"] = None  # TF takes Keras in, if it can.
import jax
import orbax.checkpoint  # It sets up logging.
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.parallel_for import pfor

del sys.modules["keras.src"]

def look():
    return {
        "environment": dict(os.environ),
        "rules of vectorized_map": dict(pfor._pfor_converter_registry),
        "gradients": set(ops.gradient_registry._registry),
        "configuration of JAX": dict(jax.config.values),
        "log levels": (logging.root.level, logging.getLogger("absl").level),
        "handlers of logs": list(logging.root.handlers),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
        "Keras": "keras" in sys.modules,
    }

before = look()
import meshwright.framework
import meshwright.layers
import meshwright.tasks
import meshwright.trainers.training.loop
after = look()
print(*(name for name in before if before[name] != after[name]), sep=", ", end="")
"""


def test_importing_changes_nothing_in_the_process():
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
