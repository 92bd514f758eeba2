"""Runs meshwright-plan, but for searches, once TensorFlow is imported."""

from __future__ import annotations

import json

from meshwright.framework.compiler.explaining.explain import explain
from meshwright.framework.compiler.xla.jax_mesh import jax_mesh
from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.showing.page import explain_page
from meshwright.trainers import cli
from meshwright.trainers.experiment import replication
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.sharding_text import sharding_text
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.planning.plan_document import document
from meshwright.trainers.planning.plan_text import plan_text
from meshwright.trainers.planning.planning import plan
from meshwright.trainers.startup import compile_cache, files, plan_flags
from meshwright.trainers.startup.messages import told_bar


def _run(experiment: Experiment, config_text: str) -> int | None:
    programs, mesh = StepPrograms(experiment), experiment.plan.mesh
    programs.check_dims_of_plan()
    if plan_flags.TOPOLOGY.value is not None:
        return _plan(experiment, config_text)
    compile_cache.use(cli.COMPILE_CACHE.value)
    set_platform("cpu", cli.DEVICE_COUNT.value or mesh.size)
    jax_mesh(mesh)  # Reports at once a mesh that is too large.
    if plan_flags.EXPLAIN.value:
        _explain(programs, mesh)
        return None
    print(sharding_text(experiment))
    replicated = replication.replicated_state(programs)
    print("\n".join(replication.report_lines(programs, replicated)))
    return None


def _explain(programs: StepPrograms, mesh: DeviceMesh) -> None:
    if axis := plan_flags.EXPLAIN_AXIS.value:
        mesh.part(axis)  # Reports at once an axis that is not there.
    page = files.output_file(plan_flags.EXPLAIN_HTML)
    reasons = plan_flags.EXPLAIN_WHY.value or page is not None
    explanation = explain(programs.main, reasons=reasons)
    print(
        explanation.text(
            match=plan_flags.EXPLAIN_MATCH.value,
            at_least=plan_flags.EXPLAIN_AT_LEAST.value,
            axis=axis,
        )
    )
    if page:
        explain_page(explanation, page)


def _plan(experiment: Experiment, config_text: str) -> int | None:
    if plan_flags.HTML.value or plan_flags.LOG_DIR.value:
        # matplotlib is only installed for planning; fails before anything is compiled.
        from meshwright.trainers.planning import plan_html
        from meshwright.trainers.planning.tensorboard import plan_tensorboard
    json_out, html_out = map(files.output_file, (plan_flags.JSON, plan_flags.HTML))
    program_page = files.output_file(plan_flags.EXPLAIN_HTML)
    topology = plan_flags.TOPOLOGY.value
    with told_bar(1, f"compiling for {topology}") as bar:
        planned = plan(experiment, topology=topology)
        bar.update()
    report = document(
        planned,
        config_text=config_text,
        gin_files=cli.GIN_FILE.value,
    )
    print(plan_text(report), end="", flush=True)
    if json_out:
        json_out.write_text(json.dumps(report, indent=2) + "\n")
    if html_out:
        html_out.write_text(plan_html.page(report))
    if plan_flags.LOG_DIR.value:
        plan_tensorboard.write(report, plan_flags.LOG_DIR.value, planned.traced)
    if program_page:  # Of one that does not fit, too.
        explain_page(planned.traced, program_page)
    return None if report["fits"] else cli.DOES_NOT_FIT


COMMAND = cli.Command(run=_run, errors=(ImportError,))
