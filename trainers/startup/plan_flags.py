"""The flags of meshwright-plan, but for those of a search."""

from __future__ import annotations

from absl import flags

EXPLAIN = flags.DEFINE_bool(
    "explain",
    False,
    "Compile the training program for virtual cpu devices and print the sharding, "
    "source and collectives of its tensors.",
)
EXPLAIN_MATCH = flags.DEFINE_string(
    "explain_match",
    "",
    "With --explain: a regular expression; show only, and all of, the tensors in whose "
    "layer, name or source it occurs, such as attention.",
)
EXPLAIN_AT_LEAST = flags.DEFINE_integer(
    "explain_at_least",
    0,
    "With --explain: show only tensors of at least so many bytes.",
    lower_bound=0,
)
EXPLAIN_AXIS = flags.DEFINE_string(
    "explain_axis",
    "",
    "With --explain: a mesh axis; show only, and all of, the tensors that it splits or "
    "that are sent along it.",
)
EXPLAIN_WHY = flags.DEFINE_bool(
    "explain_why",
    False,
    "With --explain: tell for each axis which annotation, argument or result it comes "
    "from, and for each collective what it brings together.",
)
EXPLAIN_HTML = flags.DEFINE_string(
    "explain_html",
    None,
    "With --explain, or with --topology by propagation alone: a page to write on which "
    "the program can be walked through, with the reason of each axis.",
)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Compile the training program for these devices, such as v3:32x32, h100:8 or "
    "cpu, and print its memory and time.",
)
JSON = flags.DEFINE_string("json_out", None, "With --topology: a JSON file to write.")
HTML = flags.DEFINE_string(
    "html_out", None, "With --topology: a page with plots to write."
)
LOG_DIR = flags.DEFINE_string(
    "log_dir",
    None,
    "With --topology: a folder from which TensorBoard shows the plan.",
    allow_override=True,  # absl's flag is for log files, which are not written here.
)
