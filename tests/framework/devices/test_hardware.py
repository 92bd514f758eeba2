"""The table of hardware: peak arithmetic rates of devices."""

import types

import jax
import pytest

from meshwright.framework.devices import hardware


@pytest.mark.parametrize(
    "kind,peak",
    [
        ("TPU v3", 61.5e12),
        ("TPU v5 lite", 197e12),  # Not v5, whose name is a part of this one.
        ("TPU v5", 459e12),
        ("TPU v5e", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v4", 275e12),  # Both cores of a chip are one device.
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("TPU v99", None),
    ],
)
def test_known_kinds_multiply_and_others_have_none(monkeypatch, kind, peak):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    # Published peaks and the clocks that they follow from are rounded.
    assert hardware.peak_flops(8) == (peak and pytest.approx(8 * peak, rel=0.02))


def test_the_peak_of_a_cpu_is_unknown():
    assert hardware.peak_flops(8) is None
