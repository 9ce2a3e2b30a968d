"""Plan: a schedule of one training step, with the names of its operations and modules; can be printed and stored."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from typing import Any

from torchckpt.errors import ArgumentError, Fault, called, raise_fault
from torchckpt.planning.draw.units import units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation, repeats
from torchckpt.planning.remat.flow.memory import Memory, lower_bound_bytes, simulate
from torchckpt.planning.remat.plan_svg import draw_plan
from torchckpt.planning.remat.table import Row, page, plan_rows, table

__all__ = ["Plan"]

_FORMAT = 1


@dataclass(frozen=True, repr=False)
class Plan(Drawn):
    """The plan of a traced step: its operations in the order in which they run, and what that takes.

    ``print(plan)`` is a table of modules, ``plan.draw("plan.svg")`` its memory over time; a notebook shows both.

    Args:
        flow: the step as a dataflow.
        schedule: the operations in the order in which they run.
        paths: for each operation, the qualified name of its module.
        names: for each module, the storages that leave it; for each mark, the storages that carry it.
        budget_bytes: the budget of the schedule; None if no budget was given.
        whole: the plan for the gradients of all outputs, if this is what a backward without some of them took of it.
    """

    flow: Dataflow
    schedule: tuple[int, ...]
    paths: tuple[str, ...]
    names: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    budget_bytes: int | None = None
    whole: Plan | None = None

    @cached_property
    def memory(self) -> Memory:
        return simulate(self.flow, self.schedule)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes that the step allocates, above those allocated before the step."""
        return self.memory.peak_bytes

    @cached_property
    def eager_peak_bytes(self) -> int:
        """Peak bytes of the eager step, in which every operation runs once."""
        return simulate(self.flow, self.flow.eager).peak_bytes

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that no schedule of the step can do without."""
        return lower_bound_bytes(self.flow)

    def lowered(self, spare_bytes: int) -> Plan:
        """The plan with ``spare_bytes`` less in each operation, for a compiler that was seen to need less."""
        operations = tuple(_lowered(operation, spare_bytes) for operation in self.flow.operations)
        return replace(self, flow=replace(self.flow, operations=operations))

    @property
    def recompute_flops(self) -> int:
        return sum(self.flow.operations[index].repeat.flops for index in self._repeats)

    @property
    def recompute_share(self) -> float:
        """Seconds of repeats, as a share of the eager step's."""
        seconds = sum(self.flow.operations[index].repeat.seconds for index in self._repeats)
        return seconds / self.flow.seconds if self.flow.seconds else 0.0

    @property
    def saved(self) -> tuple[str, ...]:
        """The operations whose outputs cross from the forward to the backward, in the order of the forward."""
        return tuple(dict.fromkeys(self._name(self.flow.writer[storage]) for storage in self.memory.saved))

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The operations that are repeated, in the order of the repeats."""
        return tuple(map(self._name, self._repeats))

    @property
    def order(self) -> tuple[str, ...]:
        """Every operation, in the order in which they run."""
        return tuple(map(self._name, self.schedule))

    @property
    def boundary(self) -> int:
        """How many of ``order`` are the forward."""
        return self.memory.boundary

    @called("plan.explain()")
    def explain(self, name: str) -> str:
        """Say which outputs of a module, a mark or an operation are saved, and which are recomputed how often.

        Raises:
            ArgumentError: nothing has this name; the message suggests the nearest name.
        """
        inside = [i for i, path in enumerate(self.paths) if name and (path == name or path.startswith(f"{name}."))]
        operations = inside or sorted({self.flow.writer[storage] for storage in self.names.get(name, ())})
        operations = operations or [index for index in self.flow.eager if self._name(index) == name]
        if not operations:
            known = sorted({*filter(None, self.paths), *self.names, *map(self._name, self.flow.eager)})
            near = get_close_matches(name, known, 1, 0.3) or known[:1]
            rule = "the plan has no module, mark or operation of this name"
            raise_fault(Fault(rule, repr(name), f"plan.explain({''.join(near)!r})"))
        return "\n".join([f"{name}:", *map(self._line, operations)])

    def draw(self, path: str | PathLike[str] | None = None, title: str = "Memory of one training step") -> str:
        """The bytes alive over the schedule, as SVG: forward and backward, repeats in a colour of their own, the eager
        step in grey, the budget as a line. Written to ``path``, if one is given.
        """
        text = draw_plan(self.flow, self.schedule, budget_bytes=self.budget_bytes, title=title)
        return self._written(path, text)

    def _repr_html_(self) -> str:
        return page(self.draw(), repr(self).strip("<>"), str(self))

    def to_json(self) -> str:
        """Write the plan as JSON: ``keep=Plan.from_json(text)`` saves the search for a schedule."""
        return json.dumps({"format": _FORMAT, **self._fields()})

    @classmethod
    @called("Plan.from_json()")
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ArgumentError: the text is none that it wrote.
        """
        try:
            stored = json.loads(text)
            return cls._read({_FORMAT: stored}[stored["format"]])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            fault = Fault("the text is no plan that plan.to_json() wrote", f"{text!r:.60} ({error!r})",
                          "Plan.from_json(plan.to_json())")
            raise ArgumentError(str(fault)) from error

    def _fields(self) -> dict[str, Any]:
        flow = asdict(self.flow, dict_factory=_stored) | {name: sorted(getattr(self.flow, name)) for name in _SETS}
        fields = {"schedule": self.schedule, "paths": self.paths, "names": dict(self.names)}
        whole = {"whole": self.whole._fields()} if self.whole else {}
        return {"flow": flow, **fields, "budget_bytes": self.budget_bytes, **whole}

    @classmethod
    def _read(cls, stored: dict[str, Any]) -> Plan:
        operations = tuple(map(_operation, stored["flow"]["operations"]))
        sets = {name: frozenset(stored["flow"][name]) for name in _SETS}
        flow = Dataflow(operations, tuple(stored["flow"]["sizes_bytes"]), stored["flow"]["forward"], **sets)
        names = {name: tuple(storages) for name, storages in stored["names"].items()}
        whole = cls._read(stored["whole"]) if "whole" in stored else None
        plan = cls(flow, tuple(stored["schedule"]), tuple(stored["paths"]), names, stored["budget_bytes"], whole)
        plan.memory  # noqa: B018  # there is one if the schedule is one
        return plan

    @property
    def modules(self) -> list[Row]:
        """What is saved, dropped and recomputed of each module."""
        return plan_rows(self.flow, self.schedule, [path or "(root)" for path in self.paths])

    def __str__(self) -> str:
        budget = {} if self.budget_bytes is None else {"budget": self.budget_bytes}
        amounts = {"eager peak": self.eager_peak_bytes, "lower bound": self.lower_bound}
        return table(self.modules, {"peak": self.peak_bytes, **budget, **amounts}, self.recompute_share)

    def __repr__(self) -> str:
        of_memory, share = units_of_bytes(self.eager_peak_bytes).of_memory, self.recompute_share
        return f"<Plan: {of_memory(self.peak_bytes)} of {of_memory(self.eager_peak_bytes)}, +{share:.1%}>"

    @cached_property
    def _repeats(self) -> tuple[int, ...]:
        return repeats(self.schedule)

    def _name(self, index: int) -> str:
        return self.flow.operations[index].name

    def _line(self, index: int) -> str:
        """What becomes of an operation's outputs."""
        of_memory = units_of_bytes(self.eager_peak_bytes).of_memory
        operation, times, sizes = self.flow.operations[index], self._repeats.count(index), self.flow.sizes_bytes
        bytes_ = sum(sizes[storage] for storage in operation.writes)
        saved = sum(sizes[storage] for storage in operation.writes if storage in self.memory.saved)
        part = "saved" if saved == bytes_ else f"{of_memory(saved)} of it saved, the rest dropped"
        place = "backward" if index >= self.flow.forward else part if saved else "dropped after its last use"
        again = f", recomputed {times}x ({operation.repeat.flops * times:.3g} FLOPs)" if times else ""
        return f"  {operation.name}: {of_memory(bytes_)}, {place}{again}"


_SETS = ("given", "results", "forward_results")


def _stored(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a dataclass as stored plans name them: ``substitute`` is "again"."""
    return {"again" if name == "substitute" else name: value for name, value in fields}


def _operation(stored: dict[str, Any]) -> Operation:
    substitute, reads, writes = (stored.pop(name) for name in ("again", "reads", "writes"))
    return Operation(
        reads=tuple(reads), writes=tuple(writes), substitute=substitute and _operation(substitute), **stored
    )


def _lowered(operation: Operation, spare_bytes: int) -> Operation:
    substitute = None if operation.substitute is None else _lowered(operation.substitute, spare_bytes)
    return replace(operation, workspace_bytes=operation.workspace_bytes - spare_bytes, substitute=substitute)
