# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Several nodes: the first one chooses what runs, and tells the others.

The same command is started once on each node, with torchrun's variables: ``NNODES``,
``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. Node 0 listens at that port. A line of JSON
names a piece, which all nodes then start by torchrun at a port of its own, after ``MASTER_PORT``; a
line back tells that its processes have ended. The end of the connection ends the other nodes.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_CONNECT_S = 600


@dataclass(frozen=True)
class Place:
    """Place of this node, from torchrun's variables.

    Args:
        nodes: Number of nodes.
        rank: Of this node.
        address: Host of node 0.
        port: Of node 0.
    """

    nodes: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Self:
        """Read the variables.

        Raises:
            ValueError: Some are missing.
        """
        if int(variables.get("NNODES", "1")) == 1:
            return cls()
        names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"
        if missing := [name for name in names if name not in variables]:
            raise ValueError(
                f"{', '.join(missing)}: expected {', '.join(names)} for several nodes, got NNODES="
                f"{variables['NNODES']}. Start the command once on each node with all of them."
            )
        nodes, rank, address, port = (variables[name] for name in names)
        return cls(int(nodes), int(rank), address, int(port))


class Line:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile()

    def send(self, value: Any) -> None:
        """Send a value; a node that is gone is found by ``receive``."""
        try:
            self._connection.sendall((json.dumps(value) + "\n").encode())
        except OSError:
            self.close()

    def receive(self, seconds: float | None) -> Any:
        """Wait for a value; None if the other side is gone, or silent for so long."""
        try:
            self._connection.settimeout(seconds)
            line = self._reader.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the connection."""
        self._reader.close()
        self._connection.close()


def connect(place: Place, identity: str) -> list[Line]:
    """Connect node 0 with all others: it gets a line to each, they get the line to it.

    Args:
        place: Of this node.
        identity: Of its hardware and software, which must be equal on all nodes.

    Raises:
        RuntimeError: A node did not come, or has other GPUs, versions or another commit.
    """
    if place.nodes == 1:
        return []
    if place.rank > 0:
        line = Line(_reach(place))
        line.send({"rank": place.rank, "identity": identity})
        return [line]
    lines = []
    with socket.create_server(("", place.port)) as server:
        server.settimeout(_CONNECT_S)
        while len(lines) < place.nodes - 1:
            try:
                line = Line(server.accept()[0])
            except TimeoutError as error:
                raise RuntimeError(
                    f"expected {place.nodes} nodes, got {len(lines) + 1} within {_CONNECT_S} s."
                    " Start the command on each of them."
                ) from error
            hello = line.receive(_CONNECT_S)
            if not isinstance(hello, dict) or hello.get("identity") != identity:
                raise RuntimeError(
                    f"{hello}: expected the GPUs, versions and commit of node 0 ({identity}) on"
                    " every node, got others. Use one image and one checkout."
                )
            lines.append(line)
    return lines


def _reach(place: Place) -> socket.socket:
    give_up = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((place.address, place.port), timeout=10)
        except OSError as error:
            if time.monotonic() > give_up:
                raise RuntimeError(
                    f"{place.address}:{place.port}: expected node 0 there, got {error}"
                ) from error
            time.sleep(1)


def without_torchrun() -> dict[str, str]:
    """Return the environment of this process without the variables of torchrun."""
    names = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"}
    names |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in os.environ.items() if name not in names}
