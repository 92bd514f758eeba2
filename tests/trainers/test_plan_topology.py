"""meshwright-plan --topology: what it prints and writes, and wrong input."""

import importlib.util
import json

import pytest

from meshwright.trainers.plan import DOES_NOT_FIT
from meshwright.trainers.planning import refused_bytes
from tests.trainers.test_plan_main import call_main

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
KEYS = {
    "fits": bool,
    "peak_bytes": int,
    "argument_bytes": int,
    "temp_bytes": int,
    "compile_seconds": float,
}


def check_text(out):
    assert all(len(line) <= 80 for line in out.splitlines())


def test_on_the_cpu_mesh(tmp_path, capsys):
    path = tmp_path / "made" / "plan.json"
    assert call_main("NUM_LAYERS = 3", topology="cpu", json_out=str(path)) is None
    out = capsys.readouterr().out
    check_text(out)
    assert out.startswith("cpu: 8 devices as X=2, Y=4, partitioned by shardy\nfits: ")
    found = json.loads(path.read_text())
    assert {key: type(found[key]) for key in KEYS} == KEYS
    assert found["fits"] and found["step_seconds"] is None
    assert found["flops_utilization"] is None
    state = found["weights_bytes"] + found["slots_bytes"]
    assert state < found["argument_bytes"] < found["peak_bytes"]
    by_axis = {(one["kind"], one["axis"]) for one in found["collectives"]}
    assert ("all-gather", "X") in by_axis
    # Each layer gathers: the loop over them counts.
    gathers = [
        one
        for one in found["collectives"]
        if one["kind"] == "all-gather" and one["layer"] == "stack.feed_forward"
    ]
    assert gathers and all(one["count"] % 3 == 0 for one in gathers)


@needs_libtpu
def test_on_a_pod(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert call_main(topology="v3:2x2", json_out=str(path)) is None
    out = capsys.readouterr().out
    check_text(out)
    assert "device order on 2 x 2 chips of 2 cores, no ends linked" in out
    assert "a step, estimated" in out
    found = json.loads(path.read_text())
    assert found["step_seconds"] == pytest.approx(sum(found["parts"].values()))
    assert 0 < found["flops_utilization"] < 1
    assert found["parts"]["matrix"] > 0
    # The two cores of a chip need no link.
    along = {one["axis"]: one["load"] for one in found["device_order"]["axes"]}
    assert along["X"] == 0 < along["Y"]
    for one in found["collectives"]:
        assert (one["seconds"] > 0) == (one["axis"] != "X")


@needs_libtpu
def test_what_does_not_fit_is_told_with_the_bytes_over(capsys):
    too_large = ["VOCAB_SIZE = 4194304", "MODEL_DIMS = 4096"]
    assert call_main(*too_large, topology="v3:2x2") == DOES_NOT_FIT
    out = capsys.readouterr().out
    check_text(out)
    assert " more than the 17 GB of a device" in out
    assert "The compiler: RESOURCE_EXHAUSTED" in out


def test_the_bytes_in_a_refusal():
    early = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
        "HLO temporaries (89.65G) exceeds available HBM (15.48G)."
    )
    late = "RESOURCE_EXHAUSTED: ... Used 16.50G of 15.48G hbm. Exceeded hbm capacity"
    assert refused_bytes(early) == int(89.65 * 2**30)
    assert refused_bytes(late) == int(16.5 * 2**30)
    assert refused_bytes("RESOURCE_EXHAUSTED: something else") is None


@pytest.mark.parametrize(
    ("more_flags", "message"),
    [
        ({"topology": "v9:2x2"}, "topology 'v9:2x2' is of an unknown kind: one of v2"),
        ({"topology": "v3:64x64"}, "v3 pods have 2 dims and go up to 'v3:32x32'"),
        (
            {"topology": "v3:8x8"},
            "has 128 devices, but the device mesh (X=2, Y=4) has 8: set .*"
            "choose a topology of 8 devices, such as 'v2:2x2', 'v3:2x2'",
        ),
        ({"json_out": "plan.json"}, "--json_out needs --topology"),
        ({"topology": "cpu", "explain": "true"}, "give it without --topology"),
    ],
)
def test_wrong_input(more_flags, message):
    with pytest.raises(
        SystemExit, match=message.replace("(", r"\(").replace(")", r"\)")
    ):
        call_main(**more_flags)


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_without_libtpu_it_says_how_to_install_it():
    with pytest.raises(SystemExit, match=r"pip install 'meshwright\[plan\]'"):
        call_main(topology="v3:2x2")
