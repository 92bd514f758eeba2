"""Measured beam searches with a cache for each beam, and with one for all, in turns.

    python benchmarks/step_times/beam_caches.py [--rows=8] [--beams=4] [--prompt=16]
      [--tokens=48] [--rounds=5] [--mesh="(4, 2)"] [--bindings="MODEL_DIMS = 256"]

Both continue the same prompts by the model of `lm/stdlib_tiny.gin`, with the weights
that a training begins with, on eight virtual CPU devices. They take turns in one
process, so that other load of the machine meets them alike; times are medians, and must
be of the same hypotheses. All devices share the machine's cores and memory. Bytes are
counted from shapes: of keys and values of all layers on all devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from meshwright.framework.compiler.xla import platforms
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.tasks.text.decoding import BeamSearch
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.generation import Generator

_SEED = 0


def generators(programs: StepPrograms, search: dict) -> dict[BeamCaches, Generator]:
    """One with each kind of caches."""
    theta = TrainState.initial(programs).weights()
    given = flags.FLAGS
    return {
        caches: Generator(
            programs,
            theta,
            BeamSearch(caches=caches, **search),
            cache_length=given.prompt + given.tokens,
            max_tokens=given.tokens,
        )
        for caches in BeamCaches
    }


def check_same(results: Sequence[list]) -> None:
    """Refuses to compare searches that find different things.

    Raises:
      ValueError: they do.
    """
    first, other = results
    for row, others in zip(first, other, strict=True):
        for a, b in zip(row, others, strict=True):
            if a.ids != b.ids or not np.isclose(a.score, b.score, rtol=1e-4):
                raise ValueError(f"hypotheses differ: {a} and {b}")


def cache_bytes(
    task: LanguageModel,
    search: BeamSearch,
    *,
    rows: int,
    beams: int,
    prompt: int,
    tokens: int,
) -> int:
    """Bytes of keys and values, in float32."""
    hypotheses = search.hypotheses(
        stack=task.stack, path="", steps=tokens, before=prompt - 1
    )
    copies = beams if search.caches is BeamCaches.REORDERED else 1
    attention = task.stack.body.attention
    values = 2 * attention.kv_heads * attention.head_dim * task.stack.num_layers
    return 4 * values * rows * copies * hypotheses.length


def define_flags() -> None:
    """Called only by this program."""
    flags.DEFINE_integer("rows", 8, "Prompts.", lower_bound=1)
    flags.DEFINE_integer("beams", 4, "Hypotheses of each.", lower_bound=1)
    flags.DEFINE_integer("prompt", 16, "Tokens of a prompt.", lower_bound=1)
    flags.DEFINE_integer("tokens", 48, "New tokens.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Searches of each kind.", lower_bound=1)
    flags.DEFINE_string("mesh", "(4, 2)", "Devices along data and model.")
    flags.DEFINE_multi_string("bindings", [], "More gin bindings.")


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    given = flags.FLAGS
    platforms.set_platform("cpu", 8)
    bindings = [f"MESH_SHAPE = {given.mesh}", *given.bindings]
    programs = StepPrograms(build_experiment(["lm/stdlib_tiny.gin"], bindings)[0])
    kinds = generators(programs, {"beams": given.beams})
    rng = np.random.default_rng(_SEED)
    size = next(iter(kinds.values())).task.text.vocab_size
    prompts = rng.integers(3, size, [given.rows, given.prompt]).tolist()
    check_same([each.all(prompts) for each in kinds.values()])
    seconds: dict[BeamCaches, list[float]] = {caches: [] for caches in kinds}
    for number in range(given.rounds):
        order = list(kinds.items())
        for caches, generator in reversed(order) if number % 2 else order:
            start = time.perf_counter()
            generator.all(prompts)
            seconds[caches].append(time.perf_counter() - start)
    first = seconds[BeamCaches.REORDERED]
    names = ("rows", "beams", "prompt", "tokens")
    sizes = {name: getattr(given, name) for name in names}
    print("caches       s a token   over REORDERED   bytes of cache   moved a token")
    for caches, generator in kinds.items():
        held = cache_bytes(generator.task, generator.search, **sizes)
        own = seconds[caches]
        token = statistics.median(own) / given.tokens
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        moved = held if caches is BeamCaches.REORDERED else 0
        print(f"{caches.name:10} {token:11.5f} {ratio:16.3f} {held:16,} {moved:15,}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
