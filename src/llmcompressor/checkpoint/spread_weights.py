# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that is spread: over processes, or over the memory and the disk.

==========================  ======================================  =========================
spread by                   a weight that is not loaded             its values
==========================  ======================================  =========================
FSDP 2 (``fully_shard``)    a ``DTensor``                           a shard in each process
accelerate (``device_map``) on the meta device                      in main memory, in a file
==========================  ======================================  =========================

While such a model is open, its weights are loaded block by block, as those of a checkpoint are:
what is not loaded is on the meta device, and nothing else moves weights. When it is closed it is
spread as before, with the values that its blocks were stored with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import torch
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from accelerate.utils.modeling import named_module_tensors
from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset, offload_weight
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.checkpoint.load import align_hooks
from llmcompressor.errors import ArgumentError, NonFiniteError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.sharded import (
    gather_full,
    has_partitioned_parameters,
    is_dtensor,
    is_fsdp_module,
    local_shard,
    reshard,
    write_sharded,
)
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.runtime.collectives import Ranks

FOLDER = "Give the folder of the model instead: each process reads it block by block."
_Place: TypeAlias = "tuple[Module, str]"
_ALIGNED = 64
"""Bytes that torch aligns to, and that products of single rows depend on."""


# --------------------
# Which models are spread, and how.


def is_spread(model: Any) -> bool:
    """Return True for a model that is sharded by FSDP 2, or dispatched by accelerate."""
    if not isinstance(model, Module):
        return False
    return is_fully_sharded(model) or any(any(align_hooks(one)) for one in model.modules())


def is_fully_sharded(model: Module) -> bool:
    """Return True if FSDP 2, and it alone, has sharded weights of a model."""
    return any(map(is_dtensor, model.parameters())) and not any(_parallel_tensors(model))


def is_offloaded(model: Module) -> bool:
    """Return True if accelerate keeps weights of a model apart from it."""
    return any(hook.offload for one in model.modules() for hook in align_hooks(one))


def refuse_spread(model: Any) -> None:
    """Refuse a model that is spread in a way in which its blocks cannot be loaded one by one.

    Raises:
        ArgumentError: FSDP version 1, DeepSpeed's ZeRO stage 3, tensor, expert or pipeline
            parallel.
    """
    if not isinstance(model, Module):
        return
    settings = getattr(getattr(model, "config", None), "distributed_config", None)
    how = ""
    if has_partitioned_parameters(model):
        how = "in pieces on several processes (DeepSpeed ZeRO stage 3)"
    elif any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
        how = "flattened by FSDP version 1 (FullyShardedDataParallel)"
    elif getattr(settings, "pp_size", 1) > 1:
        how = "stages of a pipeline, of which this process has one"
    elif name := next(_parallel_tensors(model), None):
        how = f"split for tensor or expert parallelism ({name})"
    if how:
        raise ArgumentError(
            f"The weights of the {type(model).__name__} are {how}, which a run cannot load block "
            "by block.",
            f"{FOLDER} Or shard the model by FSDP 2 (fully_shard).",
        )


def _parallel_tensors(model: Module) -> Iterator[str]:
    """Yield the names of weights that are split in another way than by FSDP."""
    managed = {inner for one in model.modules() if is_fsdp_module(one) for inner in one.modules()}
    for name, module in model.named_modules():
        for own, tensor in module._parameters.items():
            if tensor is not None and is_dtensor(tensor):
                placements = tensor.placements
                shards = [one for one in placements if not one.is_replicate()]
                plain = all(type(one).__name__ == "Shard" for one in shards)
                if module not in managed or len(shards) > 1 or not plain:
                    yield f"{name}.{own}" if name else own


def spread_values(model: Module) -> Callable[[Tensor], Tensor]:
    """Return a function from a tensor of a spread model to its values, gathered or loaded.

    Where weights are sharded all processes have to call it for the same tensors.
    """
    homes = {
        id(tensor): _OffloadedWeight(hook, name, tensor)
        for module in model.modules()
        for hook, name, tensor in _offloaded_tensors(module)
    }

    def values(tensor: Tensor) -> Tensor:
        home = homes.get(id(tensor))
        return gather_full(tensor) if home is None else home.fetch(Ranks(), "")

    return values


# --------------------
# Homes: where the values of a weight are while it is not loaded.


class _Home(Protocol):
    """Where the values of a weight are while it is not loaded."""

    def fetch(self, ranks: Ranks, what: str) -> Tensor:
        """Return the whole weight, on the device that its module computes on."""

    def store(self, values: Tensor) -> None:
        """Take other values of the whole weight."""


class _ShardedWeight:
    """A weight of which each process has a shard.

    Args:
        parameter: a ``DTensor``, sharded over at most one dimension of its mesh.
    """

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    def fetch(self, ranks: Ranks, what: str) -> Tensor:
        """Gather the shards of all ranks, which call this alike."""
        mine = local_shard(self.parameter.detach())
        whole = mine.new_empty(self.parameter.shape)
        mesh = self.parameter.device_mesh
        sharded = [
            (axis, one.dim)
            for axis, one in enumerate(self.parameter.placements)
            if not one.is_replicate()
        ]
        if not sharded:
            whole.copy_(mine)
        for axis, dimension in sharded:
            pieces = list(whole.chunk(mesh.size(axis), dimension))
            pieces += [whole.narrow(dimension, 0, 0)] * (mesh.size(axis) - len(pieces))
            own = [pieces[place] for place in _places_on(mesh.mesh, axis)]
            found = ranks.all_gather(mine, [one.shape for one in own], what=what)
            for piece, values in zip(own, found, strict=True):
                piece.copy_(values)
        return whole.to(mesh.device_type)

    def store(self, values: Tensor) -> None:
        """Write this rank's shard of values that all ranks have."""
        write_sharded(self.parameter, values)


def _places_on(mesh: Tensor, axis: int) -> list[int]:
    """Return the position of each rank on a dimension of a mesh, in the order of the ranks."""
    index = torch.arange(mesh.size(axis)).reshape(
        [-1 if one == axis else 1 for one in range(mesh.ndim)]
    )
    positions = index.expand(mesh.shape).flatten()
    return [int(positions[place]) for place in mesh.flatten().argsort()]


class _OffloadedWeight:
    """A weight that accelerate keeps in main memory or on the disk.

    Args:
        hook: has the map of weights.
        name: of the weight in the map.
        parameter: on the meta device.
    """

    def __init__(self, hook: AlignDevicesHook, name: str, parameter: Tensor) -> None:
        self._hook, self._name, self._dtype = hook, name, parameter.dtype

    def fetch(self, ranks: Ranks, what: str) -> Tensor:
        """Return the weight on the device that it is computed on."""
        del ranks, what
        held, device = self._hook.weights_map, self._hook.execution_device
        value: Tensor = held[self._name]
        value = value.detach().to("cpu" if device is None else device, self._dtype)
        return value.clone() if value.data_ptr() % _ALIGNED else value

    def store(self, values: Tensor) -> None:
        """Write the weight to where it was, unless it is unchanged."""
        held: Any = self._hook.weights_map
        new = values.detach().to("cpu")
        with suppress(KeyError):
            known = held[self._name]
            if (known.dtype, known.shape) == (new.dtype, new.shape) and torch.equal(known, new):
                return
        _write_offloaded(held, self._name, new)


def _write_offloaded(held: Any, name: str, value: Tensor) -> None:
    """Write a weight to a map of accelerate: to its file, if it has one, else to memory."""
    while isinstance(held, PrefixedDataset):
        held, name = held.dataset, f"{held.prefix}{name}"
    if not isinstance(held, OffloadedWeightsLoader):
        held[name] = value
        return
    if name in held.index and name not in held.state_dict and held.save_folder is not None:
        offload_weight(value, name, held.save_folder, index=held.index)
    else:
        held.state_dict[name] = value
    if name not in held.all_keys:
        held.all_keys.append(name)


def _offloaded_tensors(module: Module) -> Iterator[tuple[AlignDevicesHook, str, Tensor]]:
    """Yield hook, name and tensor of what accelerate keeps of a module."""
    for hook in align_hooks(module):
        if hook.offload:
            for name, tensor in named_module_tensors(
                module,
                include_buffers=hook.offload_buffers,
                recurse=hook.place_submodules,
                remove_non_persistent=True,
            ):
                yield hook, name, tensor


# --------------------
# A spread model while it is open.


class SpreadWeights:
    """The weights of a spread model, which is open: they are loaded and stored block by block.

    Args:
        model: spread; see :func:`is_spread`.
        ranks: all processes that the model is sharded over. They call every method alike.
        by_block: blocks are loaded one by one; otherwise the model is one part, :data:`REST`.

    Attributes:
        blocks: name → block, in order. What lies outside of them, and what several share, is
            :data:`REST`.

    Raises:
        ArgumentError: the model is sharded over other processes than those of the run.
    """

    def __init__(self, model: Module, ranks: Ranks, *, by_block: bool = True) -> None:
        _check_meshes(model, ranks)
        self.model, self.ranks = model, ranks
        self._loaded: set[str] = set()
        self._stack = ExitStack()
        self._homes: dict[str, list[tuple[_Home, list[_Place], Tensor]]] = {}
        with ExitStack() as opening:
            opening.enter_context(_fsdp_suspended(model))
            found = find_blocks(model) if by_block else {}
            self.blocks = {name: block for block, name in found.items()}
            self._regions = {
                inner: name for block, name in found.items() for inner in block.modules()
            }
            self._homes = {name: [] for name in (*self.blocks, REST)}
            self._add_offloaded(model)
            self._add_sharded(model)
            opening.enter_context(_dispatch_suspended(model))
            for homes in self._homes.values():
                for _, places, empty in homes:
                    _put(places, empty)
            opening.callback(self._put_back)
            self._stack = opening.pop_all()

    def _region(self, places: Sequence[_Place]) -> str:
        own = {self._regions.get(module, REST) for module, _ in places}
        return own.pop() if len(own) == 1 else REST

    def _add_sharded(self, model: Module) -> None:
        places: dict[int, list[_Place]] = {}
        kept: dict[int, Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and is_dtensor(parameter):
                    places.setdefault(id(parameter), []).append((module, name))
                    kept[id(parameter)] = parameter
        for key, own in places.items():
            tensor = kept[key]
            empty = Parameter(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
                requires_grad=tensor.requires_grad,
            )
            self._homes[self._region(own)].append((_ShardedWeight(tensor), own, empty))

    def _add_offloaded(self, model: Module) -> None:
        known: set[_Place] = set()
        for module in model.modules():
            for hook, name, tensor in _offloaded_tensors(module):
                path, _, own = name.rpartition(".")
                place = (module.get_submodule(path), own)
                if place not in known:  # two hooks may hold it
                    known.add(place)
                    home = _OffloadedWeight(hook, name, tensor)
                    self._homes[self._region([place])].append((home, [place], tensor))

    @property
    def is_partial(self) -> bool:
        """True if any block has weights that are not always loaded."""
        return any(self._homes[block] for block in self.blocks)

    def block_of(self, name: str) -> str:
        """Return the name of the block that contains a module or tensor, or :data:`REST`."""
        end = name.find(".")
        while end > 0:
            if name[:end] in self.blocks:
                return name[:end]
            end = name.find(".", end + 1)
        return name if name in self.blocks else REST

    def tensors_of(self, block: str) -> dict[str, Tensor]:
        """Return the tensors of a block by their names in the model; of :data:`REST` all others."""
        if block != REST:
            state = self.blocks[block].state_dict(prefix=f"{block}.")
        else:
            every = self.model.state_dict()
            state = {name: one for name, one in every.items() if self.block_of(name) == REST}
        return {name: one for name, one in state.items() if isinstance(one, Tensor)}

    @torch.no_grad()
    def load(self, block: str) -> None:
        """Gather or load the weights of a block, or of :data:`REST`, unless they are."""
        if block in self._loaded:
            return
        self._loaded.add(block)
        names = self._names_of(block)
        for home, places, empty in self._homes[block]:
            values = home.fetch(self.ranks, f"shards of {names[places[0]]}")
            _put(places, _like(empty, values))
        tie = getattr(self.model, "tie_weights", None)
        is_offloaded = any(isinstance(one, _OffloadedWeight) for one, *_ in self._homes[block])
        if block == REST and callable(tie) and is_offloaded:
            tie()  # modules that share a weight have one name each in the map

    def _names_of(self, block: str) -> dict[_Place, str]:
        root = self.blocks.get(block, self.model)
        wanted = {module for _, places, _ in self._homes[block] for module, _ in places}
        return {
            (module, own): ".".join(filter(None, (block, name, own)))
            for name, module in root.named_modules(remove_duplicate=False)
            if module in wanted
            for own in (*module._parameters, *module._buffers)
        }

    @torch.no_grad()
    def store(self, block: str) -> None:
        """Take the values that a loaded block has now, without freeing it."""
        if block in self._loaded:
            for home, places, _ in self._homes[block]:
                home.store(_get(places[0]))

    def release(self, block: str) -> None:
        """Free the weights of a block; changes that are not stored are lost."""
        self._loaded.discard(block)
        for _, places, empty in self._homes[block]:
            _put(places, empty)

    def refuse_untied(self) -> None:
        """Refuse a model in which weights that FSDP holds as one have become several.

        Raises:
            ArgumentError: names the module.
        """
        names = {module: name for name, module in self.model.named_modules()}
        for homes in self._homes.values():
            for _, places, _ in homes:
                first = _get(places[0])
                for place in places[1:]:
                    if _get(place) is not first:
                        raise ArgumentError(
                            f"The recipe gives {names.get(place[0], 'a module')} a weight of its "
                            f"own, and FSDP shards it as one with {names.get(places[0][0])}.",
                            "Load the model with tie_word_embeddings=False before it is sharded. "
                            + FOLDER,
                        )

    def check_finite(self) -> None:
        """Refuse NaN and infinity in weights that are offloaded.

        Raises:
            NonFiniteError: names the weight.
        """
        for block, homes in self._homes.items():
            names = self._names_of(block)
            for home, places, _ in homes:
                if not isinstance(home, _OffloadedWeight):
                    continue
                values = home.fetch(self.ranks, "")
                if values.is_floating_point() and not is_finite(values):
                    raise NonFiniteError(
                        f"The weight {names[places[0]]} holds NaN or infinity. The checkpoint is "
                        "damaged or was saved in a dtype too narrow for it: get it anew."
                    )

    def close(self) -> None:
        """Spread the model as it was before; what is loaded outside of blocks is stored."""
        self._stack.close()

    def _put_back(self) -> None:
        """Give modules the parameters that they have when the model is closed."""
        self.store(REST)
        for homes in self._homes.values():
            for home, places, empty in homes:
                _put(places, home.parameter if isinstance(home, _ShardedWeight) else empty)


def _check_meshes(model: Module, ranks: Ranks) -> None:
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() != ranks.count:
            raise ArgumentError(
                f"The weight {name} is sharded over {mesh.size()} processes, and the run has "
                f"{ranks.count}.",
                f"Shard it over all processes that call oneshot. {FOLDER}",
            )


def _like(empty: Tensor, values: Tensor) -> Tensor:
    if isinstance(empty, Parameter):
        return Parameter(values, requires_grad=empty.requires_grad)
    return values


def _put(places: Iterable[_Place], tensor: Tensor) -> None:
    for module, name in places:
        held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        held[name] = tensor


def _get(place: _Place) -> Tensor:
    module, name = place
    found = module._buffers[name] if name in module._buffers else module._parameters[name]
    assert found is not None
    return found


# --------------------
# What moves weights by itself is suspended meanwhile.


@contextmanager
def _fsdp_suspended(model: Module) -> Iterator[None]:
    """Make modules of FSDP 2 those that they were before, without its hooks, in the body."""
    wrapped: list[tuple[Any, Any]] = []
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    reshard(model)
    for module in model.modules():
        if is_fsdp_module(module):
            wrapped.append((module, type(module)))
        for held in (module._forward_pre_hooks, module._forward_hooks):
            if any(map(_is_of_fsdp, held.values())):
                hooks.append((held, dict(held)))
    try:
        for held, _ in hooks:
            for key in [key for key, hook in held.items() if _is_of_fsdp(hook)]:
                del held[key]
        for module, kind in wrapped:
            module.__class__ = kind.__mro__[2]  # FSDP's class derives from FSDPModule and from it
        yield
    finally:
        for module, kind in wrapped:
            module.__class__ = kind
        for held, before in hooks:
            still = {key: hook for key, hook in before.items() if key in held or _is_of_fsdp(hook)}
            now = {**still, **held}  # FSDP's come first, as they did
            held.clear()
            held.update(now)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


@contextmanager
def _dispatch_suspended(model: Module) -> Iterator[None]:
    """Keep accelerate from wrapping forwards, and from loading weights, in the body.

    Inputs are moved to the devices of modules by other hooks. At the end parameters that were added
    to offloaded modules are offloaded, too, and a quantized forward is the inner one.
    """
    every: Iterable[Any] = model.modules()
    found = [(one, one._hf_hook, [*align_hooks(one)]) for one in every if any(align_hooks(one))]
    before = [
        (one, one.offload, getattr(one, "original_devices", {})) for *_, own in found for one in own
    ]
    handles = []
    for module, hook, own in found:
        for one in own:
            one.offload = False
        _remove_hook(module)
        handles += _moving_hooks(module, hook)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for one, offload, _ in before:
            one.offload = offload
        for module, hook, _ in found:
            module._hf_hook = hook  # so that its tensors are found
            for one, name, tensor in [*_offloaded_tensors(module)]:
                if not tensor.is_meta:
                    _OffloadedWeight(one, name, tensor).store(tensor)
            del module._hf_hook
            add_hook_to_module(module, hook)
        for one, offload, devices in before:
            if offload:
                one.original_devices = devices


def _remove_hook(module: Any) -> None:
    """Remove accelerate's hook, and leave what else accelerate has put on a module."""
    before = dict(vars(module))
    remove_hook_from_module(module)
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward  # accelerate leaves the class's own there
    gone = before.keys() - vars(module).keys() - {"_hf_hook", "_old_forward", "forward"}
    vars(module).update({name: before[name] for name in gone})


def _moving_hooks(module: Module, hook: ModelHook) -> list[Any]:
    """Move inputs and outputs of a module as a hook of accelerate does."""

    def before(_: Module, args: Any, kwargs: Any) -> Any:
        return hook.pre_forward(module, *args, **kwargs)

    def after(_: Module, args: Any, output: Any) -> Any:
        return hook.post_forward(module, output)

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]
