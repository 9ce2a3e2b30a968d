"""Partition: divides the layers into stages, and finds the device of each stage."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.regions.devices import accelerator_type
from torchckpt.regions.state.layout import Modules

__all__ = [
    "ChangedInputs", "Layer", "Mode", "Stage", "WithDevice", "argument_faults", "balance_by_device", "described",
    "even_balance", "indexed", "layer_faults", "layers_of", "partition", "placement_faults",
]

M = TypeVar("M", bound=nn.Module)

_DEVICE = "_torchckpt_device"


@called("WithDevice")
def WithDevice(module: M, device: torch.device | str | int) -> M:
    """Set the device on which a :class:`~torchckpt.Pipe` runs ``module``, a layer without parameters.

    >>> Pipe(nn.Sequential(nn.Linear(8, 8).cuda(0), WithDevice(nn.ReLU(), "cuda:1"), nn.Linear(8, 8).cuda(1)))

    Returns:
        ``module`` itself: its class, its names and its computation do not change.

    Raises:
        ArgumentError: another device was set for ``module`` before.
    """
    device = indexed(torch.device(device))
    before = module.__dict__.setdefault(_DEVICE, device)
    if before != device:
        received = f"{type(module).__name__} on {before}, and on {device}"
        works = f"WithDevice({type(module).__name__}(), {str(device)!r}), a layer of its own"
        raise_fault(Fault("the layer has another device already", received, works))
    return module


class Layer(NamedTuple):
    """A layer, and its name in the Sequential."""

    name: str
    module: nn.Module

    def __str__(self) -> str:
        return f"layer {self.name} ({type(self.module).__name__})"


Mode: TypeAlias = tuple[int, ...]

ChangedInputs: TypeAlias = dict[Mode, frozenset[int]]
"""The inputs that a stage changes in place, as indices into the tensors that it gets, by the mode of its first run."""


class Stage:
    """Consecutive layers of a Pipe, on one device. The first takes the arguments, each other the output before it."""

    def __init__(
        self, number: int, first: int, layers: Sequence[Layer], device: torch.device, in_place: ChangedInputs
    ) -> None:
        self.number, self.first, self.layers, self.device = number, first, layers, device
        self.modules = Modules(layer.module for layer in layers)
        self.in_place = in_place
        """The inputs that the layers are known to change in place."""
        self.__qualname__ = f"Pipe stage {number} (layers {first} to {first + len(layers) - 1})"  # its name in errors


def _more_than_layers(sequential: nn.Sequential) -> list[str]:
    """What ``sequential`` has or does besides calling its layers one after the other, in words."""
    forward_hooks = sequential._forward_hooks or sequential._forward_pre_hooks
    has = {
        "a forward": type(sequential).forward is not nn.Sequential.forward or "forward" in sequential.__dict__,
        "parameters": bool(sequential._parameters),
        "buffers": bool(sequential._buffers),
        "hooks": bool(forward_hooks or sequential._backward_hooks or sequential._backward_pre_hooks),
    }
    return [name for name, is_true in has.items() if is_true]


def layers_of(sequential: nn.Module, nested: bool, prefix: str = "") -> list[Layer]:
    """The layers of ``sequential``. With ``nested``, a Sequential inside it is replaced by its own layers."""
    layers = []
    for name, module in sequential._modules.items():
        if module is None:
            continue
        if nested and type(module) is nn.Sequential and not _more_than_layers(module):
            layers += layers_of(module, nested, f"{prefix}{name}.")
        else:
            layers.append(Layer(prefix + name, module))
    return layers


def indexed(device: torch.device) -> torch.device:
    """``device`` with an index: ``cuda`` becomes the current CUDA device."""
    if device.index is not None or device.type != accelerator_type():
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def even_balance(layers: int, stages: int) -> list[int]:
    """Layers per stage, with equal counts as far as possible. The first stages take one more."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def balance_by_device(layers: Sequence[Layer]) -> list[int]:
    """Layers per stage: a new stage begins at each layer on another device than the one before. A layer without
    parameters is on the device of the layer before it, unless :class:`WithDevice` set another."""
    balance: list[int] = []
    before: torch.device | None = None
    for layer in layers:
        device = next(iter(_devices_of([layer])), before)
        if balance and (before is None or device == before):
            balance[-1] += 1
        else:
            balance.append(1)
        before = device
    return balance


def partition(
    layers: Sequence[Layer],
    balance: Sequence[int],
    devices: Sequence[torch.device | None],
    in_place: dict[tuple[int, int], ChangedInputs],
) -> list[Stage]:
    """The stages. If a device is None, the stage is where its parameters are, or else where the stage before it is.
    ``in_place`` stores, by (first layer, end), the inputs that a stage is known to change."""
    stages: list[Stage] = []
    for number, (end, count, device) in enumerate(zip(accumulate(balance), balance, devices)):
        first, inside = end - count, layers[end - count : end]
        if device is None:
            device = next(iter(_devices_of(inside)), stages[-1].device if stages else torch.device("cpu"))
        stages.append(Stage(number, first, inside, device, in_place.setdefault((first, end), {})))
    return stages


def argument_faults(module: object, layers: Sequence[Layer], balance: Any, devices: Any) -> Iterator[Fault]:
    """The faults of the arguments of ``Pipe`` that say where its stages begin, and where they are."""
    yield from layer_faults(module, layers, "Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])")
    if isinstance(module, nn.Sequential) and (besides := _more_than_layers(module)):
        received = f"{type(module).__name__} with {', '.join(besides)} of its own"
        works = "nn.Sequential(*layers, Scale()): a layer that does it"
        yield Fault("the Sequential does more than call its layers", received, works)
    if balance is not None and layers:
        yield from _balance_faults(balance, len(layers))
    if devices is not None:
        stages = len(balance) if isinstance(balance, Sequence) else None
        yield from _device_faults(devices, stages, len(layers))


def layer_faults(module: object, layers: Sequence[Layer], works: str) -> Iterator[Fault]:
    if not layers:
        received = "an empty Sequential" if isinstance(module, nn.Sequential) else type(module).__name__
        yield Fault("the module is not an nn.Sequential of at least one layer", received, works)


def _balance_faults(balance: Any, layers: int) -> Iterator[Fault]:
    works = f"balance={even_balance(layers, min(2, layers))}"
    if not isinstance(balance, Sequence) or not balance or not all(type(n) is int and n > 0 for n in balance):
        yield Fault("balance is not a list of positive layer counts, one per stage", f"balance={balance!r}", works)
    elif sum(balance) != layers:
        rule = f"balance does not add up to the number of layers, {layers}"
        yield Fault(rule, f"balance={list(balance)}, which adds up to {sum(balance)}", works)


def _device_faults(devices: Any, stages: int | None, layers: int) -> Iterator[Fault]:
    """The faults of ``devices``. ``stages`` is the number of stages if a balance was given, else None."""
    works = "devices=['cuda:0', 'cuda:1'], or ['cpu', 'cpu'] on a machine without accelerators"
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        yield Fault("devices is not a list of devices, one per stage", f"devices={devices!r}", works)
        return
    for device in devices:
        if (why := _missing(device)) is not None:
            yield Fault("a device does not exist on this machine", f"{device!r}: {why}", works)
    if stages is not None and len(devices) != stages:
        yield Fault("devices and balance differ in length", f"{len(devices)} devices, {stages} stages", works)
    if stages is None and 0 < layers < len(devices):
        received = f"{len(devices)} devices, {layers} layers"
        yield Fault("there are fewer layers than stages", received, f"at most {layers} devices")


def placement_faults(stages: Iterable[Stage], moved: bool = False) -> list[Fault]:
    """A fault for each stage that is spread over several devices, and each parameter that stages on two devices share.

    Args:
        moved: whether the layers will be moved to the devices of their stages.
    """
    faults: list[Fault] = []
    homes: dict[nn.Parameter, tuple[torch.device, str]] = {}
    for stage in stages:
        named = [layer.module.__dict__[_DEVICE] for layer in stage.layers if _DEVICE in layer.module.__dict__]
        if moved and any(device != stage.device for device in named):
            received = f"{stage.__qualname__} on {stage.device}, with a layer on {', '.join(map(str, named))}"
            works = "devices= without WithDevice(), or the other way round"
            faults.append(Fault("WithDevice() and devices= contradict each other", received, works))
        elif not moved and len(spread := _devices_of(stage.layers)) > 1:
            received = f"{stage.__qualname__} on {', '.join(map(str, spread))}"
            works = "devices=['cuda:0', 'cuda:1'], which moves every layer to the device of its stage"
            faults.append(Fault("the layers of a stage are on several devices", received, works))
        for name, parameter in _parameters_of(stage.layers):
            home, first = homes.setdefault(parameter, (stage.device, stage.__qualname__))
            if home != stage.device:
                received = f"{name}, in {first} on {home} and in {stage.__qualname__} on {stage.device}"
                works = "a balance that puts both layers into one stage, or both stages on one device"
                faults.append(Fault("a parameter is shared by stages on two devices", received, works))
    return faults


def _parameters_of(layers: Iterable[Layer]) -> Iterable[tuple[str, nn.Parameter]]:
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            yield f"{layer.name}.{name}", parameter


def _devices_of(layers: Iterable[Layer]) -> list[torch.device]:
    layers = list(layers)
    named = [layer.module.__dict__[_DEVICE] for layer in layers if _DEVICE in layer.module.__dict__]
    tensors = [parameter.device for _, parameter in _parameters_of(layers)]
    # Buffers decide only if there are no parameters: they may be small tables that are meant to stay on the CPU.
    buffers = [buffer.device for layer in layers for buffer in layer.module.buffers()]
    return list(dict.fromkeys([*tensors, *named] or buffers))


def _missing(device: Any) -> str | None:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device.type == "cpu":
        return None
    if accelerator is None or device.type != accelerator.type:
        return f"this machine has {f'{accelerator.type} devices' if accelerator else 'no accelerator'}"
    count = torch.accelerator.device_count()
    return None if (device.index or 0) < count else f"this machine has {count} {device.type} devices"


def described(stage: Stage) -> Iterator[str]:
    """The lines that say what ``stage`` has."""
    modules = [layer.module for layer in stage.layers]
    tensors = {id(x): x for module in modules for x in (*module.parameters(), *module.buffers())}.values()
    sized = [tensor for tensor in tensors if not is_lazy(tensor)]
    parameters = sum(tensor.numel() for tensor in sized if isinstance(tensor, nn.Parameter))
    size = sum(tensor.nbytes for tensor in sized)
    lazy = f", {len(tensors) - len(sized)} tensors without a shape yet" if len(tensors) > len(sized) else ""
    yield f"  stage {stage.number} on {stage.device}: {parameters:,} parameters, {size / 2**20:.1f} MiB{lazy}"
    for layer in stage.layers:
        text = repr(layer.module).replace("\n", "\n    ")
        yield f"    ({layer.name}): {text}"
