"""``Pipe``: a Sequential, cut into stages, that runs a mini-batch as a pipeline of micro-batches."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import PathLike
from typing import Any, NoReturn, get_args

import torch
from torch import nn

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.budget.within import Within
from torchckpt.pipe.microbatch import REDUCTIONS, MicroBatch, gather, scatter
from torchckpt.pipe.partition import (
    ChangedInputs,
    Stage,
    argument_faults,
    balance_by_device,
    described,
    even_balance,
    indexed,
    layers_of,
    partition,
    placement_faults,
)
from torchckpt.pipe.run.pipeline import run_pipeline
from torchckpt.pipe.run.step import Step, Took, one_ahead, timeline_of
from torchckpt.pipe.run.visit import Regions
from torchckpt.planning import Kind, Timeline
from torchckpt.planning.budget import Bytes
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.run.fit_measured import PlannedStep
from torchckpt.regions.core.checkpointing import outside, refuse_transforms
from torchckpt.regions.core.options import Options, check_options
from torchckpt.regions.devices import accelerator_type
from torchckpt.regions.state.ambient import outside_inference
from torchckpt.tensors import runs_when_accumulated
from torchckpt.typing import CheckpointMode, ContextFunction, DeterminismCheck

__all__ = ["Pipe"]

_logger = logging.getLogger(__name__)
_MODES: tuple[str, ...] = get_args(CheckpointMode)


class Pipe(nn.Module):
    """Runs ``module`` in stages, micro-batch by micro-batch, and recomputes activations before their gradient arrives.

    The forward returns what the module would return, and ``loss.backward()`` works as usual: the pipeline is part of
    the autograd graph. The layers are used, not copied: parameters, their names and ``state_dict`` keys stay the same.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> pipe = torchckpt.Pipe(model, balance=[2, 1], chunks=4)
    >>> loss = pipe(torch.randn(16, 8)).sum()
    >>> loss.backward()

    Args:
        module: an ``nn.Sequential``. Its first layer takes the arguments of the call, every other layer the output of
            the layer before it: tensors, other objects, and pytrees of both. Layers may also pass tensors to later
            layers by :mod:`torchckpt.pipe.skip`.
        balance: layers per stage. Default: with ``devices``, one stage for each device, with layers divided as evenly
            as possible; without, one stage for each run of layers on the same device.
        devices: the device of each stage, to which its layers are moved. Default: each stage is where its parameters
            are. A stage without parameters is where :class:`~torchckpt.pipe.WithDevice` says, or else where the stage
            before it is.
        chunks: micro-batches per mini-batch. A mini-batch with fewer rows is split into single rows, and a warning is
            logged once if grad mode is on.
        checkpoint: which micro-batches run as regions: ``"always"`` all; ``"except_last"`` all but the last, whose
            activations would be needed at once; ``"never"`` none. With a budget the plan decides.
        lookahead: how many micro-batches of a stage may hold recomputed activations at the same time. With 1, each is
            recomputed as soon as the one before it is done, while its gradient is on its way. More hides more
            recomputation only if stages take unequal times.
        batch_dim: the dimension of the rows, in every input that is split and every output that is concatenated.
        reduce: how the scalars that the last layer returns for each micro-batch are combined: ``"mean"``, weighted by
            rows, or ``"sum"``. Default: a scalar output is an error.
        split_nested: count the layers of Sequentials inside the Sequential as layers, so that stages may end there.
        budget: bytes that a step may take on each device above what is there before it: a number, a size such as
            ``"60GiB"``, or a share such as ``"50%"`` of what the device that takes most takes in the largest known step
            if everything is kept; or a list with one for each device. On the CPU each stage counts as a device. The
            first step recomputes everything and is counted. When the second begins, the plan is made that is followed
            from then on; so for each shape of the inputs, and for :meth:`step` and ``loss.backward()`` apart.
        deferred_batch_norm: update the running statistics of BatchNorm once per mini-batch. Converts the layers by
            :class:`~torchckpt.pipe.DeferredBatchNorm`.
        preserve_rng_state, generators, determinism_check, context_fn, early_stop: as in :func:`torchckpt.checkpoint`,
            for each region. A region is one stage on one micro-batch; with a budget, one block of it.

    Raises:
        ArgumentError: an argument is wrong, or, in the forward, the mini-batch. The message lists every fault.
        BudgetInfeasible: when the second step begins: the budget is below what a step takes that recomputes everything.
            It says how much that is.

    The pipeline is GPipe's (Huang et al., 2019), in the autograd graph as in torchgpipe (Kim et al., 2020).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        lookahead: int = 1,
        *,
        batch_dim: int = 0,
        reduce: str | None = None,
        budget: Bytes | None = None,
        split_nested: bool = False,
        deferred_batch_norm: bool = False,
        preserve_rng_state: bool = True,
        generators: Sequence[torch.Generator] = (),
        determinism_check: DeterminismCheck = "default",
        context_fn: ContextFunction | None = None,
        early_stop: bool = True,
    ) -> None:
        super().__init__()
        layers = layers_of(module, split_nested) if isinstance(module, nn.Sequential) else []
        faults = [
            *argument_faults(module, layers, balance, devices),
            *_option_faults(chunks, checkpoint, lookahead, batch_dim, reduce, budget),
        ]
        options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop)
        check_options(Pipe, options, faults, "Pipe")
        self._options = options
        self.training = module.training
        self.chunks, self.checkpoint, self.lookahead = chunks, checkpoint, lookahead
        self.batch_dim, self.reduce, self._split_nested = batch_dim, reduce, split_nested
        self.deferred_batch_norm = bool(deferred_batch_norm)
        self.devices = [indexed(torch.device(device)) for device in devices] if devices else None
        by_itself = even_balance(len(layers), len(devices)) if devices else balance_by_device(layers)
        self.balance = list(balance or by_itself)
        self._last_step: Took | None = None
        self._in_place: dict[tuple[int, int], ChangedInputs] = {}
        self._logged: set[int] = set()  # the numbers of micro-batches that were logged
        self._modules.update(module._modules)  # directly: add_module refuses names that are attributes
        stages = self.stages
        with called("Pipe"):
            check(placement_faults(stages, moved=self.devices is not None))
            self._within = None if budget is None else Within.of(budget, stages)
        for stage in stages if self.devices else ():
            for layer in stage.layers:
                layer.module.to(stage.device)
        if deferred_batch_norm:
            DeferredBatchNorm.convert(self)

    @property
    def stages(self) -> list[Stage]:
        """The stages, each with ``number``, ``device`` and ``layers``. A layer has ``name`` and ``module``."""
        layers = layers_of(self, self._split_nested)
        return partition(layers, self.balance, self.devices or [None] * len(self.balance), self._in_place)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch. The arguments are those of the first layer, and may be pytrees. Tensors in them are split
        into micro-batches by rows. All else goes to every micro-batch, and so do tensors in
        :class:`~torchckpt.pipe.NoChunk`.

        Returns:
            The output that the module would return, on the device of the last stage. Layers that compute across rows,
            such as BatchNorm, see one micro-batch at a time. Draws of several devices from one generator have no order.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside(partial(self.forward, *args, **kwargs))
        if torch.is_grad_enabled():
            refuse_transforms()
        with called("Pipe"):
            micro_batches = self._scattered(args, kwargs)
        m, stages = len(micro_batches), self.stages
        # A region on an accelerator would take the draws of a stage on the CPU for its own, in another thread.
        threads = all(stage.device.type == accelerator_type() for stage in stages)
        within = self._within if torch.is_grad_enabled() else None
        with nullcontext() if within is None else within.explained(), self._statistics(), called("Pipe"):
            if within is None:
                checkpointed = {"always": m, "except_last": m - 1, "never": 0}[self.checkpoint]
                regions = Regions(lambda _, i: i < checkpointed, self._options)
            else:
                regions = within.regions(self, stages, micro_batches, self.lookahead, self._options)
            outputs = run_pipeline(stages, micro_batches, regions, self.lookahead, threads)
            output = gather(outputs, [batch.rows for batch in micro_batches], self.batch_dim, self.reduce)
            if within is not None:
                within.returned(output)
            return output

    @called("Pipe.step()")
    def step(
        self,
        *args: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        target: Any = ...,
        reduce: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run forward and backward of a mini-batch in 1F1B order. Gradients are added to those of the parameters.

        A stage keeps only as many micro-batches as there are stages from it to the end. (``loss.backward()`` keeps the
        activations, or the boundary, of all micro-batches until all forwards are done.) Each micro-batch is recomputed
        one ahead of its backward. The last stage holds one micro-batch at a time, and recomputes none.

        >>> loss = pipe.step(x, target, loss_fn=torch.nn.functional.cross_entropy)

        Each micro-batch has a backward of its own in each stage. So hooks of parameters run once per micro-batch, and
        hooks that run when a gradient is accumulated (an optimizer in the backward) are refused. What must run once per
        mini-batch, such as the reduction of gradients in DDP, call yourself after the step. Use a ``GradScaler`` inside
        ``loss_fn``: ``lambda output, target: scaler.scale(f(output, target))``. If the step raises, parameters that had
        no gradient before have none again, and deferred statistics are as before; other gradients keep what was added.

        Args:
            *args, **kwargs: the arguments of the first layer.
            target: split like the arguments. Default: the last of ``args``.
            loss_fn: maps the output and the target of a micro-batch to a scalar.
            reduce: ``"mean"``: the loss is the mean of the micro-batches' losses, weighted by rows. It is the loss of
                the mini-batch if every row counts alike. ``"sum"``: their sum, for a ``loss_fn`` that itself divides
                by a number for the whole mini-batch, such as its tokens. Default: the ``reduce`` of the pipe, or
                ``"mean"``.

        Returns:
            The loss, detached. Inputs get no gradient.

        Raises:
            ArgumentError: there is no target, the loss is no scalar, or a fault as in the forward.
        """
        if target is not ...:
            args = (*args, target)
        reduce = reduce or self.reduce or "mean"
        refuse_transforms()
        check(_step_faults(self, args, kwargs, loss_fn, reduce))
        bare, last_step, within = [p for p in self.parameters() if p.grad is None], self._last_step, self._within
        explained, watched = (within.explained(), within.watched()) if within else (nullcontext(), nullcontext())
        try:
            with explained, outside_inference(), torch.enable_grad(), self._statistics(), watched:
                step = self._step(args, kwargs, loss_fn, reduce)
                loss = step.run()
                self._last_step = step.took
                return loss
        except BaseException:  # of the end of the block, too, which updates statistics
            self._last_step = last_step
            for parameter in bare:
                parameter.grad = None
            raise

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Callable[[Any, Any], torch.Tensor], reduce: str
    ) -> Step:
        micro_batches = self._scattered(args, kwargs)
        rows = sum(batch.rows for batch in micro_batches)
        weights = [batch.rows / rows if reduce == "mean" else 1.0 for batch in micro_batches]
        inputs = [batch._replace(args=batch.args[:-1]) for batch in micro_batches]
        targets = [batch.args[-1] for batch in micro_batches]
        stages = self.stages
        if self._within is not None:
            following = self._within.regions(self, stages, micro_batches, None, self._options)
            return Step(stages, inputs, targets, loss_fn, weights, following.order, following)
        order = one_ahead(len(stages), len(micro_batches), self.checkpoint != "never")
        recomputed = {action.visit for action in order.launched if action.kind is Kind.RECOMPUTE}
        regions = Regions(lambda j, i: (j, i) in recomputed, self._options)
        return Step(stages, inputs, targets, loss_fn, weights, order, regions)

    def timeline(self) -> Timeline:
        """The measured times of the last :meth:`step`, in the same type as a simulated timeline. Times come from the
        clock on the CPU, and from events on accelerators.

        Raises:
            ArgumentError: no step has run yet.
        """
        if self._last_step is None:
            works = "pipe.step(x, target, loss_fn=loss_fn); pipe.timeline()"
            raise_fault(Fault("no step has run yet", "timeline() before step()", works), "Pipe.timeline()")
        return timeline_of(self._last_step)

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan that was followed last; None in the first step, and without a budget. Its ranks are the devices."""
        return None if self._within is None else self._within.plan

    def report(self) -> PlannedStep:
        """Compare the plan with a step of it: seconds, and bytes of each device; ``print()`` shows a table.

        Raises:
            CheckpointError: no step has followed a plan yet and was counted: that is the third step of a shape.
        """
        if self._within is None:
            rule, works = "there is no plan, for the pipe has no budget", 'Pipe(module, balance, budget="60GiB")'
            raise_fault(Fault(rule, "report() or draw()", works), "Pipe.report()")
        return self._within.report()

    def draw(self, path: str | PathLike[str] | None = None) -> str:
        """Draw the plan within the budget as SVG: the step that keeps everything and the planned one, each with the
        memory of each device under its budget. Raises as :meth:`report`."""
        return self.report().plan.draw(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_step": None}  # streams' events cannot be copied

    def _statistics(self) -> AbstractContextManager[None]:
        return DeferredBatchNorm.mini_batch(self) if self.deferred_batch_norm else nullcontext()

    def _scattered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        # The options are public attributes: check them again, since they may have been changed.
        budget = None if self._within is None else self._within.budget
        check(_option_faults(self.chunks, self.checkpoint, self.lookahead, self.batch_dim, self.reduce, budget))
        micro_batches = scatter(args, kwargs, self.chunks, self.batch_dim)
        m = len(micro_batches)
        if m < self.chunks and m not in self._logged and torch.is_grad_enabled():
            self._logged.add(m)
            _logger.warning("Pipe: chunks=%d, but a mini-batch has fewer rows; micro-batches made: %d", self.chunks, m)
        return micro_batches

    # the interface of the Sequential ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(layer for layer in self._modules.values() if layer is not None)

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return list(self._modules.values())[index]
        sequential = nn.Sequential()
        for name, layer in list(self._modules.items())[index]:
            sequential.add_module(name, layer)
        return sequential

    # devices ----------------------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change dtype or memory format. The layers stay on the devices of their stages."""
        where = [*args, *kwargs.values()]
        if any(isinstance(to, (torch.device, str, int, torch.Tensor)) and not isinstance(to, bool) for to in where):
            self._stays(f".to({', '.join(map(repr, where))})")
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # Every way to move a module calls this, also if a module around the pipe is moved.
        for device in dict.fromkeys(stage.device for stage in self.stages):
            moved = fn(torch.empty(0, device=device)).device
            if moved != device:
                self._stays(f"a move from {device} to {moved}")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # in torch

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise an error: the stages of a pipeline have devices of their own."""
        self._stays(".cuda()")

    def cpu(self) -> NoReturn:
        """Raise an error: the stages of a pipeline have devices of their own."""
        self._stays(".cpu()")

    def xpu(self, device: Any = None) -> NoReturn:
        """Raise an error: the stages of a pipeline have devices of their own."""
        self._stays(".xpu()")

    def _stays(self, call: str) -> NoReturn:
        rule = "the layers of a Pipe cannot leave the devices of their stages"
        works = "Pipe(module, balance, devices=['cuda:0', 'cuda:1']); or .to(dtype), .half(), .bfloat16()"
        raise_fault(Fault(rule, call, works), "Pipe")

    def __repr__(self) -> str:
        of = f"checkpoint={self.checkpoint!r}" if self._within is None else f"budget={self._within.budget!r}"
        head = f"chunks={self.chunks}, {of}, lookahead={self.lookahead}"
        return "\n".join([f"Pipe({head}", *(line for stage in self.stages for line in described(stage)), ")"])


def _option_faults(
    chunks: Any, checkpoint: Any, lookahead: Any, batch_dim: Any, reduce: Any, budget: object
) -> Iterator[Fault]:
    for name, value in (("chunks", chunks), ("lookahead", lookahead)):
        if type(value) is not int or value < 1:
            yield Fault(f"{name} is not a positive int", f"{name}={value!r}", f"{name}={8 if name == 'chunks' else 1}")
    if not isinstance(checkpoint, str) or checkpoint not in _MODES:
        yield Fault(f"checkpoint is not one of {_MODES}", f"checkpoint={checkpoint!r}", 'checkpoint="except_last"')
    elif budget is not None and checkpoint != "except_last":
        rule, received = "a budget decides what is recomputed", f"checkpoint={checkpoint!r}, budget={budget!r}"
        yield Fault(f"checkpoint is given, but {rule}", received, "the one or the other")
    if type(batch_dim) is not int or batch_dim < 0:
        yield Fault("batch_dim is not an int from 0", f"batch_dim={batch_dim!r}", "batch_dim=0")
    if reduce is not None and reduce not in REDUCTIONS:
        yield Fault(f"reduce is not one of {REDUCTIONS}, or None", f"reduce={reduce!r}", 'reduce="mean"')


def _step_faults(
    pipe: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Any, reduce: object
) -> Iterator[Fault]:
    if not args or len(args) + len(kwargs) < 2:
        rule = "the arguments of the first layer or the target are missing"
        received = f"{len(args)} positional, {len(kwargs)} by name"
        yield Fault(rule, received, "pipe.step(x, target, loss_fn=loss_fn)")
    if not callable(loss_fn):
        yield Fault("loss_fn is not callable", f"loss_fn={loss_fn!r}", "loss_fn=torch.nn.functional.cross_entropy")
    if reduce not in REDUCTIONS:
        yield Fault(f"reduce is not one of {REDUCTIONS}", f"reduce={reduce!r}", 'reduce="mean"')
    hooked = [name for name, parameter in pipe.named_parameters() if runs_when_accumulated(parameter)]
    if hooked:
        rule = "a hook runs when a gradient is accumulated, which in a step happens for each micro-batch"
        works = "optimizer.step() after pipe.step(); or loss.backward()"
        yield Fault(rule, f"hooks on {', '.join(hooked[:3])}{', ...' if hooked[3:] else ''}", works)
