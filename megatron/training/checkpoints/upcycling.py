"""A dense checkpoint read as one of experts: where --moe-use-upcycling starts.

Every expert is a copy of its layer's dense MLP (Komatsuzaki et al., 2022, 2212.05055) or a slice
of it (He et al., 2024, 2410.07524). With granularity G expert e has slice e mod G, a G-th of the
inner channels, and G experts side by side are one copy. Rows of the router are drawn at random, one
for each copy: the experts of a copy get equal logits, and of equal ones the first are chosen
(`kernels.routing.best`), so that a token visits whole copies in half precision too, where logits of
two copies may be equal. Its K weights sum to f (--moe-router-topk-scaling-factor, or 1), and
those of a copy are equal. Then

    W1_e = slice of W1     b1_e = slice of b1     W2_e = slice of W2 x G / f     b2_e = b2 / f

make  sum over e of weight_e expert_e(x)  =  MLP(x),  whatever the router says. For which routers
that holds is in `upcycling_rules`. Megatron-LM scales W1 as well, by which a gate is not linear.

`Upcycled` is a `Reader`, so that loading is what it always is: any format, any layout, box by box.

Shapes: E experts, p parts of a first matrix (gate and value, or 1), F inner width of an expert, H
hidden. A dense W1 is [p G F, H], a W2 [H, G F].
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm, rng, sharding
from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.format import StoredTensor
from megatron.core.dist_checkpointing.interface import Reader, TensorFacts
from megatron.core.dist_checkpointing.plan import Item, Piece
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box, box_slices
from megatron.core.utils import Say, UserError
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.source import Source

_STORED = r"((?:model|optimizer\.master)\.)"
_DENSE = re.compile(rf"^{_STORED}(.+\.mlp)\.(linear_fc[12]\.(?:weight|bias))$")
_EXPERTS = re.compile(rf"^{_STORED}(.+\.mlp)\.experts\.")
_ROUTER = re.compile(r"^.+\.mlp\.router\.(weight|expert_bias)$")


def applies(config: CheckpointConfig, source: Source | None, say: Say) -> bool:
    """Return whether a run turns the checkpoint it starts from into experts.

    A run that starts from --pretrained-checkpoint goes on from --load once it has saved there.

    Raises:
        UserError: there is nothing to turn, it holds experts, or --save holds checkpoints.
    """
    if not config.moe_use_upcycling:
        return False
    if source is None:
        raise UserError(
            f"--moe-use-upcycling makes experts of a dense checkpoint, and --load ({config.load}) "
            "holds none; give its folder, or drop --moe-use-upcycling"
        )
    folder = source.found.folder
    if any(_EXPERTS.match(key) for key in source.found.index.tensors):
        pretrained = config.pretrained_checkpoint
        if pretrained is not None and Path(pretrained) not in (folder, folder.parent):
            say(f"{folder} holds experts: the run goes on from it, nothing is upcycled")
            return False
        raise UserError(
            f"--moe-use-upcycling makes experts of a dense checkpoint, and {folder} holds experts "
            "already; drop the flag to go on from it"
        )
    if source.found.local:
        raise UserError(
            f"--moe-use-upcycling: {folder} is spread over the machines' own disks; give a dense "
            "checkpoint that is in one folder by --pretrained-checkpoint"
        )
    if config.save is not None and not catalog.scan(Path(config.save)).is_empty:
        raise UserError(
            f"--moe-use-upcycling would start anew, and --save ({config.save}) holds checkpoints; "
            "to go on from those, name that folder by --load and drop --moe-use-upcycling; else "
            "give --save an empty folder"
        )
    return True


def upcycled(run: CheckpointedRun, dense: Reader, wanted: Sequence[Item]) -> "Upcycled":
    """Return a dense checkpoint as one of the run's experts; a collective of the world.

    Raises:
        UserError: what experts should be slices of is not there, or has another width.
    """
    settings = run.facts.config
    granularity = run.config.moe_upcycling_granularity
    sum_of_weights = settings["moe_router_topk_scaling_factor"] or 1.0
    mine = {match[2] for item in wanted if (match := _EXPERTS.match(item.key))}
    layers = set().union(*comm.gather_objects(sorted(mine), run.mesh.world))
    gated = any(settings[name] for name in ("swiglu", "geglu", "quick_geglu"))
    experts = _Experts(
        count=settings["num_experts"],
        width=settings["moe_ffn_hidden_size"],
        parts=2 if gated else 1,
        granularity=granularity,
        matrices=granularity / sum_of_weights,
        biases=1 / sum_of_weights,
    )
    run.say(
        f"each expert of {len(layers)} layer(s) is "
        + (f"one of {granularity} slices of" if granularity > 1 else "a copy of")
        + f" its dense MLP, from {dense.folder}"
    )
    return Upcycled(dense, layers, experts, _routers(run, experts))


def _routers(run: CheckpointedRun, experts: "_Experts") -> dict[str, Tensor]:
    """Return by key what the routers of this rank's layers start with, whole."""
    found = {}
    for parameter in (p for model in run.models for p in model.parameters()):
        record = sharding.of(parameter)
        if _ROUTER.match(record.name):
            drawn = rng.initial_values(record, run.facts.config["seed"])
            copies = drawn[: experts.count // experts.granularity]
            rows = copies.repeat_interleave(experts.granularity, 0)
            found[f"model.{record.name}"] = rows
    return found


@dataclass(frozen=True)
class _Experts:
    """How experts are slices of a dense MLP."""

    count: int
    width: int
    """Inner channels of each."""
    parts: int
    """Of a first matrix."""
    granularity: int
    matrices: float
    """Factor on second matrices."""
    biases: float
    """Factor on the biases after them."""

    def shape(self, tensor: str, dense: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of all experts' parameters, given the dense one's."""
        shape = list(dense)
        if tensor != "linear_fc2.bias":
            dim = 1 if tensor == "linear_fc2.weight" else 0
            shape[dim] //= self.granularity
        return (self.count, *shape)

    def factor(self, tensor: str) -> float:
        """Return what the dense numbers are multiplied by."""
        return {"linear_fc2.weight": self.matrices, "linear_fc2.bias": self.biases}.get(tensor, 1.0)

    def boxes(self, tensor: str, expert: int, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the dense tensor, box within ``box``) for a box of one expert's numbers."""
        slice_, whole = expert % self.granularity, self.width * self.granularity
        inside = tuple((0, stop - start) for start, stop in box)
        if tensor == "linear_fc2.bias":
            yield box, inside
        elif tensor == "linear_fc2.weight":
            rows, (start, stop) = box
            first = slice_ * self.width
            yield (rows, (first + start, first + stop)), inside
        else:
            (start, stop), *columns = box
            for part in range(self.parts):
                low, high = max(start, part * self.width), min(stop, (part + 1) * self.width)
                if low < high:
                    shift = part * whole + slice_ * self.width - part * self.width
                    rows = (low + shift, high + shift)
                    yield (rows, *columns), ((low - start, high - start), *inside[1:])


class Upcycled:
    """A dense checkpoint whose MLPs are experts, as an `interface.Reader`.

    Args:
        dense: the checkpoint.
        layers: channel blocks of all layers with experts, such as ``decoder.layers.0.mlp``.
        experts: how they are slices.
        routers: what routers start with, by key; those of this rank.

    Raises:
        UserError: an MLP is not there, or not as wide as its slices together.
    """

    def __init__(
        self,
        dense: Reader,
        layers: Collection[str],
        experts: _Experts,
        routers: Mapping[str, Tensor],
    ) -> None:
        self._dense, self._experts, self._routers = dense, experts, routers
        self._made: dict[str, tuple[str, str]] = {}
        """Dense key and tensor by the key of experts."""
        self._tensors: dict[str, TensorFacts] = {}
        found = set()
        for key, stored in dense.tensors.items():
            match = _DENSE.match(key)
            if match is None or match[2] not in layers:
                self._tensors[key] = stored
                continue
            prefix, block, tensor = match.groups()
            if tensor == "linear_fc1.weight":
                found.add(block)
                self._check_width(key, stored)
            made = f"{prefix}{block}.experts.{tensor}"
            self._made[made] = key, tensor
            shape = experts.shape(tensor, stored.shape)
            self._tensors[made] = StoredTensor(stored.dtype, shape)
        self._check_layers(sorted(set(layers) - found))
        for key, values in routers.items():
            self._tensors[key] = StoredTensor("float32", tuple(values.shape))

    def _check_width(self, key: str, stored: TensorFacts) -> None:
        experts, rows = self._experts, stored.shape[0]
        if rows != experts.parts * experts.width * experts.granularity:
            parts = "gate and value together, " if experts.parts == 2 else ""
            raise UserError(
                f"--moe-use-upcycling: {key} of {self.folder} has {rows} rows, and experts of "
                f"--moe-ffn-hidden-size {experts.width} times --moe-upcycling-granularity "
                f"{experts.granularity} are slices of {experts.parts * experts.width} x "
                f"{experts.granularity} ({parts}by this run's activation); give a "
                f"--moe-ffn-hidden-size of {rows // experts.parts // experts.granularity}, if the "
                "activation is the checkpoint's"
            )

    def _check_layers(self, missing: Sequence[str]) -> None:
        if missing:
            raise UserError(
                f"--moe-use-upcycling: {self.folder} has no dense MLP for {', '.join(missing)}; "
                "give the checkpoint's --num-layers, or a --moe-layer-freq without them"
            )

    @property
    def folder(self) -> Path:
        """Return where it lies."""
        return self._dense.folder

    @property
    def format(self) -> str:
        """Return the name of its format."""
        return self._dense.format

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what the dense run said about itself."""
        return self._dense.facts

    @property
    def files(self) -> Mapping[str, int]:
        """Return size in bytes by name, of the files that hold tensors."""
        return self._dense.files

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Return the tensors of a model with experts by our keys."""
        return self._tensors

    @property
    def hash(self) -> str:
        """Return what names the dense content."""
        return self._dense.hash

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or one box of it, in the stored dtype."""
        stored = self._tensors[key]
        box = tuple((0, size) for size in stored.shape) if box is None else box
        values = torch.empty([stop - start for start, stop in box], dtype=stored.torch_dtype)
        self.fill(key, Piece(box, values))
        return values

    def fill(self, key: str, piece: Piece) -> None:
        """Read one box of a tensor into a view, converting to its dtype; from any thread."""
        if key in self._routers:
            piece.tensor.copy_(self._routers[key][box_slices(piece.box)])
        elif key not in self._made:
            self._dense.fill(key, piece)
        else:
            self._fill_experts(*self._made[key], piece)

    def _fill_experts(self, key: str, tensor: str, piece: Piece) -> None:
        (first, last), *rest = piece.box
        known: dict[int, Tensor] = {}
        for expert in range(first, last):
            view, slice_ = piece.tensor[expert - first], expert % self._experts.granularity
            if slice_ in known:  # another copy of the same
                view.copy_(known[slice_])
                continue
            for box, inside in self._experts.boxes(tensor, expert, tuple(rest)):
                self._dense.fill(key, Piece(box, view[box_slices(inside)]))
            view.mul_(self._experts.factor(tensor))
            known[slice_] = view

    def damages(self, files: Iterable[str] | None = None, told: Told = untold) -> list[str]:
        """Return what is known not to be as it was written (in ``files``, or in all)."""
        return self._dense.damages(files, told)

    def close(self) -> None:
        """Close the files."""
        self._dense.close()
