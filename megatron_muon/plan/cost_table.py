# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Measured times of Newton-Schulz by shape, in place of one rate for all shapes.

Small matrices reach a fraction of the rate of large ones, so one rate makes them look cheaper than
they are. A file of times, as JSON::

    {"num_ns_steps": 5, "precision": "medium", "segments": [2, 3],
     "shapes": [{"rows": 4096, "cols": 14336, "stack": 1, "milliseconds": 3.7,
                 "backend": "standard"}, ...]}

``stack`` matrices of the shape take ``milliseconds`` in one call of ``backend``.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_muon.newton_schulz.registry import BACKENDS, candidates


@dataclass(frozen=True)
class ShapeTime:
    """Time of one call of Newton-Schulz.

    Args:
        rows: Rows of each matrix.
        cols: Columns of each matrix.
        stack: Matrices of the call.
        milliseconds: Time of the call.
        backend: How it was computed.

    Raises:
        ValueError: A number is not positive, or an unknown backend.
    """

    rows: int
    cols: int
    stack: int
    milliseconds: float
    backend: str = "standard"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.backend not in BACKENDS:
            raise ValueError(
                f"cost table: expected a backend of {sorted(BACKENDS)}, got {self.backend!r}. "
                "Measure this shape again."
            )
        for field in dataclasses.fields(self):
            if field.name == "backend":
                continue
            value = getattr(self, field.name)
            # Users write these files. A share of seconds that is 0 or infinite would upset all
            # owners, and only some ranks would notice.
            allowed = (int, float) if field.name == "milliseconds" else int
            is_number = isinstance(value, allowed) and not isinstance(value, bool)
            # JSON has no infinity, and Python's reader takes one.
            if not is_number or not 0 < value < math.inf:
                raise ValueError(
                    f"cost table: expected a positive number of {field.name}, got {value!r} in "
                    f"{dataclasses.asdict(self)}. Measure this shape again."
                )


@dataclass(frozen=True)
class CostTable:
    """Times by shape.

    Args:
        num_ns_steps: Newton-Schulz steps that were timed.
        precision: ``--muon-fp32-matmul-prec`` that they were timed with.
        shapes: A time for each shape and backend. A matrix and its transpose take as long.
        segments: Steps between restarts of the Gram form; empty where it was not timed.

    Raises:
        ValueError: Newton-Schulz of no steps, or two times of one shape.
    """

    num_ns_steps: int
    precision: str
    shapes: tuple[ShapeTime, ...]
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the number of steps, and that each shape is there once."""
        counts = Counter(map(_key, self.shapes))
        twice = [matrices_text(*key) for key, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"cost table: expected one time of each shape, got several of {', '.join(twice)} "
                "or their transpose. Delete all but one."
            )
        is_int = isinstance(self.num_ns_steps, int) and not isinstance(self.num_ns_steps, bool)
        if not is_int or self.num_ns_steps < 1:
            raise ValueError(
                f"cost table: expected a positive num_ns_steps, got {self.num_ns_steps!r}. Measure "
                "with the number of steps of a run."
            )

    @cached_property
    def _seconds(self) -> dict[tuple[str, int, int], float]:
        """Return the seconds of a step for one matrix, by backend, shorter and longer side."""
        # By step, so that a table serves runs with other numbers of steps. Standard steps cost the
        # same; those of the Gram form differ by their segments, which are checked.
        return {
            _key(time): time.milliseconds * 1e-3 / time.stack / self.num_ns_steps
            for time in self.shapes
        }

    def seconds(self, rows: int, cols: int, num_ns_steps: int, backend: str = "standard") -> float:
        """Return the seconds of one matrix.

        Raises:
            ValueError: The table does not have the shape, computed in this way.
        """
        key = backend, *_sides(rows, cols)
        if key not in self._seconds:
            there = [matrices_text(*known) for known in sorted(self._seconds)]
            raise ValueError(
                f"cost table: expected a time of {matrices_text(backend, rows, cols)}, got times "
                f"of {', '.join(there) or 'none'}. Measure this model: "
                "exchange.cost_model measure:PATH."
            )
        return self._seconds[key] * num_ns_steps

    def missing(
        self, shapes: Iterable[tuple[int, int]], backends: Sequence[str]
    ) -> list[tuple[str, int, int]]:
        """Return backend and shape, shorter side first, of which the table has no time."""
        return [key for key in timed_shapes(shapes, backends) if key not in self._seconds]

    @property
    def backends(self) -> tuple[str, ...]:
        """What was timed, and what is timed as something that was."""
        timed = {time.backend for time in self.shapes}
        return tuple(name for name in BACKENDS if (BACKENDS[name].timed_as or name) in timed)

    def joined(self, other: "CostTable") -> "CostTable":
        """Return a table of the shapes of both; of shapes that both have, the times of the other.

        Raises:
            ValueError: They were measured with different numbers of steps or precisions.
        """
        if (self.num_ns_steps, self.precision) != (other.num_ns_steps, other.precision):
            raise ValueError(
                f"cost table: expected times of {other.num_ns_steps} Newton-Schulz steps in "
                f"{other.precision} precision, got times of {self.num_ns_steps} in "
                f"{self.precision}. Write to another file."
            )
        segments = self.segments or other.segments
        if other.segments not in ((), segments):
            raise ValueError(
                f"cost table: expected times of the Gram form in segments of {other.segments} "
                f"steps, got {self.segments}. Write to another file."
            )
        # The later times count: the machine or its software may have changed since the others.
        new = set(map(_key, other.shapes))
        kept = [time for time in self.shapes if _key(time) not in new]
        return CostTable(self.num_ns_steps, self.precision, (*kept, *other.shapes), segments)

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        """Read a file.

        Raises:
            ValueError: It is missing, or is no such table.
        """
        try:
            stored: Any = json.loads(path.read_text())
            shapes = tuple(ShapeTime(**time) for time in stored["shapes"])
            segments = tuple(int(steps) for steps in stored.get("segments", ()))
            return cls(stored["num_ns_steps"], str(stored["precision"]), shapes, segments)
        # A wrong number has raised an error of its own, which names the entry.
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"cost table {path}: expected JSON with num_ns_steps, precision, and shapes of "
                "rows, cols, stack, milliseconds and backend, got "
                f"{type(error).__name__}: {error}. Write one with exchange.cost_model measure:PATH."
            ) from None

    def write(self, path: Path) -> None:
        """Write a file."""
        stored = {
            "num_ns_steps": self.num_ns_steps,
            "precision": self.precision,
            "segments": self.segments,
            "shapes": [dataclasses.asdict(time) for time in self.shapes],
        }
        path.write_text(json.dumps(stored, indent=1) + "\n")


def _key(time: ShapeTime) -> tuple[str, int, int]:
    return time.backend, *_sides(time.rows, time.cols)


def matrices_text(backend: str, rows: int, cols: int) -> str:
    """Return what a time is of, for an error."""
    text = f"{rows} x {cols} matrices"
    return text if backend == "standard" else f"{text} by {backend}"


def _sides(rows: int, cols: int) -> tuple[int, int]:
    # Newton-Schulz transposes tall matrices, so the products are the same.
    return min(rows, cols), max(rows, cols)


@dataclass(frozen=True)
class CostSource:
    """Where the costs of ``--muon-fsdp-cost-model`` come from.

    Args:
        rates: The part that :meth:`~megatron_muon.plan.cost.CostModel.parse` reads.
        measures: Whether shapes are timed at construction.
        path: Table to read; with ``measures`` the one to write; None for none.
    """

    rates: str
    measures: bool = False
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "CostSource":
        """Read ``name=value,...`` with at most one of ``measure``, ``measure:PATH``, ``file:PATH``.

        A path has no comma.

        Raises:
            ValueError: Two of them, or no path after ``file:``.
        """
        # Sources are no rates: a rate may be given beside one, as for links, which nobody measures.
        entries = [entry for entry in text.split(",") if entry]
        sources = [entry for entry in entries if entry.partition(":")[0] in ("measure", "file")]
        rates = ",".join(entry for entry in entries if entry not in sources)
        if not sources:
            return cls(rates)
        kind, _, path = sources[0].partition(":")
        if len(sources) > 1 or (kind == "file" and not path):
            raise ValueError(
                "cost model: expected one of measure, measure:PATH and file:PATH, got "
                f"{','.join(sources)!r}. Example: file:/data/h200.json,gbps=400."
            )
        return cls(rates, kind == "measure", Path(path) if path else None)


def timed_shapes(
    shapes: Iterable[tuple[int, int]], backends: Sequence[str]
) -> list[tuple[str, int, int]]:
    """Return each backend with each shape that it may run on, shorter side first, ascending."""
    keys = set()
    for n, m in {_sides(*shape) for shape in shapes}:
        keys |= {(name, n, m) for name in candidates(backends, n, m)}
    return sorted(keys)
