"""meshwright-plan --topology=h100:8: memory, collectives and roofline of GPUs."""

import json
import types

import pytest

from meshwright.trainers.planning import planning
from tests import needs
from tests.trainers.planning.test_plan_main import call_main

# Wide enough for its buffers to be much larger than what they are aligned to.
WIDE = (
    "NUM_LAYERS = 3",
    "MODEL_DIMS = 256",
    "HIDDEN_DIMS = 1024",
    "HEAD_DIM = 64",
    "SEQUENCE_LENGTH = 128",
    "Experiment.global_batch = 32",
)


def planned(folder, topology):
    """Status, and the `document` and `page` that are written."""
    json_out, html_out = folder / "plan.json", folder / "plan.html"
    status = call_main(
        *WIDE, topology=topology, json_out=str(json_out), html_out=str(html_out)
    )
    return types.SimpleNamespace(
        status=status,
        document=json.loads(json_out.read_text()),
        page=html_out.read_text(),
    )


@pytest.fixture(scope="module")
def on_h100s(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("plan"), "h100:8")


@needs.cuda_plugin
def test_memory_is_what_xla_lays_out(on_h100s):
    document = on_h100s.document
    assert on_h100s.status is None and document["fits"]
    parts = {row["part"]: row["bytes"] for row in document["breakdown"]}
    assert sum(parts.values()) == document["peak_bytes"] == max(document["timeline"])
    assert document["peak_bytes"] == pytest.approx(
        document["allocated_bytes"], rel=0.05
    )
    # XLA puts nothing else into the buffers of donated state.
    assert parts["weights"] == document["weights_bytes"]
    assert parts["slots"] == document["slots_bytes"]
    assert parts["saved activations"] > 0


@needs.cuda_plugin
def test_collectives_are_those_of_the_plan(on_h100s):
    rows = on_h100s.document["collectives"]
    sent = {(row["kind"], row["axis"], row["layer"]) for row in rows}
    assert ("all-gather", "Y", "stack.feed_forward") in sent
    # Those of several layers' weights XLA makes one, which is of no layer.
    assert {("all-gather", "X", ""), ("reduce-scatter", "X", "")} <= sent
    assert all(row["seconds"] > 0 for row in rows)


@needs.cuda_plugin
def test_time_is_a_roofline_and_xlas_estimates(on_h100s):
    document = on_h100s.document
    parts = document["parts"]
    assert document["step_seconds"] == pytest.approx(sum(parts.values()))
    assert 0 < document["roofline_seconds"] < document["step_seconds"]
    assert parts["matrix"] > 0 and parts["memory"] > 0 and parts["vector"] == 0
    assert document["step_error"] is None
    # No product is faster than the published peak.
    least = document["model_flops"] / document["peak_flops"]
    assert parts["matrix"] > least


@needs.cuda_plugin
def test_the_report_has_what_gpus_have(on_h100s, tmp_path, capsys):
    again = planned(tmp_path, "a100:8")
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    words = " ".join(out.split())
    assert out.startswith("Plan of small_lm + finalized + small_adam on a100:8 as X=2")
    assert "of 79.3 GiB a device" in words
    assert "CUDA, NCCL and cuDNN need memory of their own" in words
    assert " by roofline, as no op is faster than its FLOPs or bytes allow" in words
    assert "no device was measured" in words and "\n  by roofline alone " in out
    assert "torus" not in out
    # XLA has no tables for A100s.
    assert again.document["roofline_seconds"] == again.document["step_seconds"]
    for page in (again.page, on_h100s.page):
        assert 'id="time"' in page and 'id="order"' not in page
        assert "as XLA lays them out" in page


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        (
            {"topology": "h100:2x8"},
            "topology 'h100:2x8' has 16 devices, but the device mesh .X=2, Y=4. has 8: "
            ".* or choose a topology of 8 devices, such as 'a100:8', 'h100:8'",
        ),
        ({"topology": "h100:16"}, "hosts have up to 8 GPUs, as in 'h100:8'"),
        (
            {"topology": "h100:8", "search": "true"},
            "orders devices along the links of TPUs, and 'h100:8' has GPUs: name a TPU",
        ),
    ],
)
def test_wrong_input(more_flags, message):
    with pytest.raises(SystemExit, match=message):
        call_main(**more_flags)


@needs.cuda_plugin
def test_what_is_too_large_for_a_gpu_does_not_fit(tmp_path, monkeypatch, capsys):
    """XLA compiles it all the same, so the report has all its parts."""
    monkeypatch.setattr(planning, "_memory_limit", lambda pod, mesh: 2**20)
    plan = planned(tmp_path, "h100:8")
    needed = max(plan.document["peak_bytes"], plan.document["allocated_bytes"])
    assert plan.status == 3 and not plan.document["fits"]
    assert plan.document["over_bytes"] == needed - 2**20
    assert "\n  does not fit: " in capsys.readouterr().out
