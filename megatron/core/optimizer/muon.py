"""Muon: momentum, made orthogonal, for whole matrices (Jordan et al., 2024; Liu et al., 2025).

    m = momentum m + (1 - momentum) g
    u = (1 - momentum) g + momentum m with Nesterov's momentum, else m
    p = p (1 - lr wd) - lr scale(M, N) orthogonal(u)            for a matrix [M, N]

Without decoupling ``wd p`` is added to ``g`` instead. A matrix that is several in one (queries,
keys and values; gate and value of a gated unit) is taken apart (`Sharding.fused`): each is made
orthogonal on its own. So is the matrix of each expert.

A rank gets whole matrices of its model-parallel share (`distributed.packing`). One that is cut over
tensor-parallel ranks is treated in one of three ways:

    duplicated    u is gathered, every rank makes all of it orthogonal and keeps its part
    distributed   products over the dim that is cut are summed over the ranks in each iteration
    blockwise     every rank makes its own part orthogonal: another result on every layout

The first two equal the serial update. What each rank holds is learned once, at the start, from the
records of its peers.

Shapes: M rows and N columns of a whole matrix; m, n of this rank's part.
"""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.distributed.pieces import Member
from megatron.core.mesh import Mesh
from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.matrices import Block, Matrix, learn_peers, one_of_experts
from megatron.core.optimizer.newton_schulz import orthogonalise, schedule
from megatron.core.optimizer.update import Ranges, Step, unscale
from megatron.core.sharding import Sharding

QKV = ("query", "key", "value")


class Muon:
    """The update rule of matrices under ``--optimizer muon``."""

    needs_whole = rules.needs_whole("muon")

    def __init__(self, config: OptimizerConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.coefficients = schedule(config.muon_coefficient_type, config.muon_num_ns_steps)
        self._matrices: dict[str, Matrix] = {}

    def prepare(self, members: Iterable[Member]) -> None:
        """Learn what peers hold of the matrices that are updated.

        A collective over ``tp``, and over ``etp`` for experts.
        """
        for member in members:
            record, shape, axis = member.record, member.shape, self.mesh.tp
            if record.expert:  # one for each of the rank's experts, all alike
                record, shape, axis = one_of_experts(record), shape[1:], self.mesh.etp
            matrix = Matrix(record, shape, self._fused(record), self.mesh, axis)
            self._matrices[record.name] = matrix
        if self.config.muon_tp_mode == "duplicated":
            for axis in (self.mesh.tp, self.mesh.etp):
                learn_peers(list(self._matrices.values()), axis)

    def _fused(self, record: Sharding) -> tuple[tuple[str, int], ...]:
        is_qkv = tuple(name for name, _ in record.fused) == QKV
        return () if is_qkv and not self.config.muon_split_qkv else record.fused

    def takes_as_kept(self, ranges: Ranges) -> bool:
        """Return False: ranges of several dtypes are widened; see `UpdateRule`."""
        return False

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update ranges, which hold whole matrices, in place; see `UpdateRule`."""
        for member in ranges.members:
            assert (member.start, member.stop) == (0, math.prod(member.shape)), (
                f"{member.record.name} is not whole"
            )
            p_mn, grad_mn, momentum_mn = (
                kept[member.range][member.place].view(member.shape)
                for kept in (ranges.parameters, ranges.grads, ranges.states["momentum_buffer"])
            )
            self._update_one(self._matrices[member.record.name], p_mn, grad_mn, momentum_mn, step)

    def _update_one(
        self, matrix: Matrix, p_mn: Tensor, grad_mn: Tensor, momentum_mn: Tensor, step: Step
    ) -> None:
        config, lr, decay = self.config, step.settings.lr, step.settings.weight_decay
        grad_mn, keep = unscale(grad_mn, step)
        if not config.decoupled_weight_decay:
            grad_mn = grad_mn.add(p_mn, alpha=decay)
        momentum_mn.lerp_(grad_mn, (1 - config.muon_momentum) * keep)
        update_mn = momentum_mn
        if config.muon_nesterov:
            update_mn = grad_mn.lerp(momentum_mn, config.muon_momentum)
        made_mn = self._each_orthogonal(matrix, update_mn)
        if config.decoupled_weight_decay:
            p_mn.mul_(1 - lr * decay * keep)
        p_mn.sub_(made_mn.mul_(lr * keep))

    def _each_orthogonal(self, matrix: Matrix, update: Tensor) -> Tensor:
        """Return the update of a parameter: one matrix, or one of each expert."""
        if update.dim() == 2:
            return self._orthogonal(matrix, update)
        made_emn = torch.empty_like(update)
        for expert, update_mn in enumerate(update):
            made_emn[expert] = self._orthogonal(matrix, update_mn)
        return made_emn

    def _orthogonal(self, matrix: Matrix, update_mn: Tensor) -> Tensor:
        """Return the orthogonal update of this rank's part of a matrix, scaled."""
        if matrix.is_cut and self.config.muon_tp_mode == "duplicated":
            whole_MN = matrix.gather(update_mn)
            made_MN = torch.empty_like(whole_MN)
            for block in matrix.blocks:
                _write(made_MN, block.rows, self._make(_read(whole_MN, block.rows)))
            return matrix.part_of(made_MN)
        is_summed = matrix.is_cut and self.config.muon_tp_mode == "distributed"
        made_mn = torch.empty_like(update_mn)
        for block in matrix.blocks:
            part = _read(update_mn, block.local_rows)
            made = self._make_cut(part, matrix, block) if is_summed else self._make(part)
            _write(made_mn, block.local_rows, made)
        return made_mn

    def _make(self, x_MN: Tensor) -> Tensor:
        made_MN = orthogonalise(x_MN, self.coefficients, in_half=self._in_half(x_MN))
        return made_MN * scale(self.config, *x_MN.shape)

    def _make_cut(self, x_mn: Tensor, matrix: Matrix, block: Block) -> Tensor:
        made_mn = orthogonalise(
            x_mn,
            self.coefficients,
            in_half=self._in_half(x_mn),
            complete=functools.partial(matrix.sum_parts, block=block),
            cut_rows=matrix.cut_rows,
        )
        return made_mn * scale(self.config, *block.shape)

    def _in_half(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 and self.config.muon_fp32_matmul_prec == "medium"


def _read(x_MN: Tensor, rows: Tensor | None) -> Tensor:
    return x_MN if rows is None else x_MN[rows]


def _write(x_MN: Tensor, rows: Tensor | None, values: Tensor) -> None:
    x_MN[slice(None) if rows is None else rows] = values


def scale(config: OptimizerConfig, rows: int, columns: int) -> float:
    """Return what the orthogonal update of a matrix is multiplied with beside the rate.

    ``spectral`` makes updates of all shapes equally large by root mean square (Liu et al., 2025),
    ``shape_scaling`` is Jordan's, ``unit_rms_norm`` keeps the operator norm between root mean
    squares at 1 (Pethick et al., 2025).
    """
    factors = {
        "spectral": math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }
    return factors[config.muon_scale_mode] * config.muon_extra_scale_factor
