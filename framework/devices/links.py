"""How long collectives along mesh axes take on a topology that is only named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.framework.devices.device_order import order_of
from meshwright.framework.devices.gpu_topology import GpuTopology
from meshwright.framework.devices.network import GpuNetwork, TorusNetwork
from meshwright.framework.devices.topology import topology
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups


class Links:
    """The links of a topology, for the collectives of a mesh that is put on it.

    Args:
      mesh: the device mesh; TPUs are ordered as it says, or best if it does not.
      name: of the topology, such as "v3:8x16" or "h100:8".

    Raises:
      ValueError: there is no such topology, or it has another size than the mesh.
    """

    def __init__(self, mesh: DeviceMesh, name: str):
        self.mesh, self.name = mesh, name
        pod = topology(name)
        if pod.size != mesh.size:
            raise ValueError(
                f"topology {name!r} has {pod.size} devices, but the device mesh "
                f"({mesh}) has {mesh.size}: name one of the mesh's size"
            )
        if isinstance(pod, GpuTopology):
            self._network = GpuNetwork(mesh=mesh, gpus=pod)
        else:
            order = order_of(mesh, pod)
            self._network = TorusNetwork(hardware=pod.kind, mesh=mesh, order=order)

    def seconds(self, kind: str, axes: Sequence[str], result_bytes: int) -> float:
        """Estimated seconds of a collective that has the links to itself.

        Args:
          kind: see `TorusNetwork.collective`. Of a permute each device is taken to send
            to the next along the axes.
          axes: mesh axes, or parts of them.
          result_bytes: bytes of its result on one device.
        """
        size = result_bytes
        if kind == "reduce-scatter":
            size *= math.prod(map(self.mesh.axis_size, axes))
        return sum(
            phase.seconds
            for phase in self._network.collective(
                kind, self._groups(kind, tuple(axes)), tuple(axes), size
            )
        )

    def _groups(self, kind: str, axes: tuple[str, ...]) -> Sequence[Sequence[int]]:
        groups = axis_groups(self.mesh, axes)
        if kind != "collective-permute":
            return groups
        return tuple(
            (source, group[(number + 1) % len(group)])
            for group in groups
            for number, source in enumerate(group)
        )
