"""meshwright-plan: what a gin file's program does on its mesh, without training it."""

from __future__ import annotations

from absl import app, flags, logging

from meshwright.framework.compiler.explain import explain
from meshwright.framework.compiler.jax_bridge import jax_mesh, set_platform
from meshwright.trainers import mains, replication
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs
from meshwright.trainers.sharding_text import sharding_text

_EXPLAIN = flags.DEFINE_bool(
    "explain",
    False,
    "Compile the training program for virtual cpu devices and print the sharding, "
    "source and collectives of its tensors.",
)


def main(argv: list[str]) -> int | None:
    """Parses flags and calls; returns the exit status."""
    return mains.call("meshwright-plan", argv, _run)


def _run(experiment: Experiment, config_text: str) -> None:
    del config_text
    programs = Programs(experiment)
    print(sharding_text(experiment))
    replicated = replication.replicated_state(programs)
    print("\n".join(replication.report_lines(programs, replicated)))
    if _EXPLAIN.value:
        mesh = experiment.plan.mesh
        set_platform("cpu", mains.DEVICE_COUNT.value or mesh.size)
        jax_mesh(mesh)  # Too large a mesh is told of at once.
        print(f"\n{explain(programs.main)}")


def run() -> None:
    """The console script."""
    flags.mark_flags_as_required(["gin_file"])
    logging.set_verbosity(logging.INFO)
    app.run(main)


if __name__ == "__main__":
    run()
