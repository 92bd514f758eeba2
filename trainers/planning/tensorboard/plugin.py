"""The plugin for TensorBoard: the program, its memory, its pipelines, its experts.

It reads what the trainer and the planner leave below the log folder (see
`program_files.write`), and TensorBoard's own curves.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.compat import tf
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

_WEB = pathlib.Path(__file__).with_name("web")
# Not imported from where they are: TensorBoard would load TensorFlow and JAX.
_TOKENS = pathlib.Path(__file__).parents[3] / "framework/showing/web/tokens.css"
_FOLDER, _PLAN, _PAGE = "meshwright", "plan.json", "program.html"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_DEEP = 4
"""Folders below the log folder in which runs are looked for."""
_CURVES = {
    "health": ("run/*", "loss", "optimizer/grad_norm", "speed/*"),
    "experts": ("*dropped", "*gate_entropy", "*busiest_expert", "*balance_loss"),
}
_LOADS = "*load_per_expert"
_POINTS = 1000
NO_FILES = (
    "These logs have no program of Meshwright: they are of an older version, or no "
    "training has compiled here yet. Train on with the same model_dir, by "
    "meshwright-train --gin_file=FILE --model_dir=FOLDER, or write a plan beside "
    "them: meshwright-plan --gin_file=FILE --topology=cpu --log_dir=FOLDER"
)


class MeshwrightPlugin(base_plugin.TBPlugin):
    """Shows where the tensors of a run's program lie, and how the run fares."""

    plugin_name = "meshwright"

    def __init__(self, context: base_plugin.TBContext):
        super().__init__(context)
        self._logdir = context.logdir or ""
        self._provider: provider.DataProvider = context.data_provider

    def get_plugin_apps(self) -> dict[str, Callable]:
        """The addresses that it serves."""
        return {
            "/index.js": self._script,
            "/style.css": self._style,
            "/runs": self._runs,
            "/plan": self._plan,
            "/page": self._page,
            "/curves": self._curves,
            "/loads": self._loads,
            "/load": self._load,
        }

    def is_active(self) -> bool:
        """True: without files it tells what to run."""
        return True

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Its tab."""
        return base_plugin.FrontendMetadata(
            es_module_path="/index.js", tab_name="Meshwright"
        )

    def data_plugin_names(self) -> tuple[str, ...]:
        """Whose data it reads too."""
        return ("scalars", "images")

    @wrappers.Request.application
    def _script(self, request):
        text = (_WEB / "index.js").read_text()
        return http_util.Respond(request, text, "text/javascript")

    @wrappers.Request.application
    def _style(self, request):
        text = _TOKENS.read_text() + (_WEB / "style.css").read_text()
        return http_util.Respond(request, text, "text/css")

    @wrappers.Request.application
    def _runs(self, request):
        """The runs that have files; a message if there are none."""
        runs = self._folders()
        message = "" if runs else NO_FILES
        return _json(request, {"runs": sorted(runs), "message": message})

    @wrappers.Request.application
    def _plan(self, request):
        return self._file(request, _PLAN, "application/json")

    @wrappers.Request.application
    def _page(self, request):
        return self._file(request, _PAGE, "text/html")

    @wrappers.Request.application
    def _curves(self, request):
        """By group and run the points [step, value] of each curve."""
        context, where = self._experiment(request)
        listed = self._provider.list_scalars(context, plugin_name="scalars", **where)
        curves = {}
        for group, patterns in _CURVES.items():
            curves[group] = read = {}
            tags = {run: _matching(tags, patterns) for run, tags in listed.items()}
            filter_ = provider.RunTagFilter(
                runs=[run for run, of in tags.items() if of],
                tags=sorted({tag for of in tags.values() for tag in of}),
            )
            points = self._provider.read_scalars(
                context,
                plugin_name="scalars",
                downsample=_POINTS,
                run_tag_filter=filter_,
                **where,
            )
            for run, by_tag in points.items():
                read[run] = {
                    tag: [[point.step, float(point.value)] for point in of]
                    for tag, of in by_tag.items()
                }
        return _json(request, curves)

    @wrappers.Request.application
    def _loads(self, request):
        """By run and tag the pictures of experts' loads: step, and key of `_load`."""
        context, where = self._experiment(request)
        listed = self._provider.list_blob_sequences(
            context, plugin_name="images", **where
        )
        tags = {run: _matching(tags, [_LOADS]) for run, tags in listed.items()}
        read = self._provider.read_blob_sequences(
            context,
            plugin_name="images",
            downsample=100,
            run_tag_filter=provider.RunTagFilter(
                runs=[run for run, of in tags.items() if of],
                tags=sorted({tag for of in tags.values() for tag in of}),
            ),
            **where,
        )
        # The first two of each sequence are the width and the height.
        loads = {
            run: {
                tag: [[one.step, one.values[2].blob_key] for one in of]
                for tag, of in by_tag.items()
            }
            for run, by_tag in read.items()
        }
        return _json(request, loads)

    @wrappers.Request.application
    def _load(self, request):
        context, _ = self._experiment(request)
        key = request.args.get("key", "")
        picture = self._provider.read_blob(context, blob_key=key)
        return http_util.Respond(request, picture, "image/png")

    def _experiment(self, request) -> tuple[Any, dict[str, str]]:
        environ = request.environ
        where = {"experiment_id": plugin_util.experiment_id(environ)}
        return plugin_util.context(environ), where

    def _folders(self) -> dict[str, str]:
        """By run, `.` for the log folder itself, the folder of its files."""
        found = {}
        for depth in range(_DEEP):
            pattern = os.path.join(self._logdir, *["*"] * depth, _FOLDER, _PLAN)
            for path in tf.io.gfile.glob(pattern):
                folder = os.path.dirname(path)
                run = os.path.relpath(os.path.dirname(folder), self._logdir)
                found[run] = folder
        return found

    def _file(self, request, name: str, kind: str):
        run = request.args.get("run", "")
        folder = self._folders().get(run)  # A run that was listed, and no other path.
        path = folder and os.path.join(folder, name)
        if not path or not tf.io.gfile.exists(path):
            text = f"run {run!r} has no {name}: a mesh of one device has no page"
            return http_util.Respond(request, text, "text/plain", code=404)
        with tf.io.gfile.GFile(path, "r") as file:
            text = file.read()
        scripts = [
            base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            for script in (_SCRIPT.findall(text) if name == _PAGE else ())
        ]
        return http_util.Respond(request, text, kind, csp_scripts_sha256s=scripts)


def _matching(tags, patterns) -> list[str]:
    return [t for t in tags if any(fnmatch.fnmatch(t, pattern) for pattern in patterns)]


def _json(request, values: Any):
    return http_util.Respond(request, json.dumps(values), "application/json")
