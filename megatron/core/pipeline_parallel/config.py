"""What a user chooses about a pipeline, and what follows from it; plain Python."""

from typing import Literal

from megatron.core.config import Config, check_at_least, check_at_most, option
from megatron.core.pipeline_parallel.layout import parse_layout
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.schedules import Schedule, ScheduleName, make_schedule
from megatron.core.pipeline_parallel.stages import (
    SPLIT,
    Layers,
    Stage,
    chunks_per_rank,
    plan_stages,
    split_layout,
)
from megatron.core.utils import UserError

MOST_RANKS, MOST_STAGES = 256, 1024
"""Of a pipeline; the stages of all ranks together."""
LARGEST_GROUP = 1024
"""Microbatches that a chunk may take before its rank turns to the next: all of them are held."""


class PipelineConfig(Config):
    """How layers are cut into stages, and in which order a rank works on them."""

    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = option(
        "auto"
    )
    """Order of a rank's forwards and backwards; ``auto`` is interleaved where a rank holds several
    stages, else 1f1b."""

    num_layers_per_virtual_pipeline_stage: int | None = option(None)
    """Layers of each of a rank's stages: sets how many stages it holds."""

    num_virtual_stages_per_pipeline_rank: int | None = option(None)
    """Stages that each rank holds."""

    microbatch_group_size_per_vp_stage: int | None = option(
        None, flag="--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Microbatches that pass through a stage before its rank turns to its next one; the number of
    pipeline ranks when absent."""

    decoder_first_pipeline_num_layers: int | None = option(None)
    """Layers on the first rank; the others share the rest."""

    decoder_last_pipeline_num_layers: int | None = option(None)
    """Layers on the last rank; the others share the rest."""

    account_for_embedding_in_pipeline_split: bool = option(False)
    """Give the first stage one layer less."""

    account_for_loss_in_pipeline_split: bool = option(False)
    """Give the last stage one layer less."""

    pipeline_model_parallel_split_rank: int | None = option(None)
    """First rank of an encoder-decoder's decoder; the ranks before it hold the encoder. By default
    layers of both are shared out evenly, and one rank may hold the end of one and the beginning of
    the other."""

    pipeline_model_parallel_layout: str | None = option(None)
    """Every stage written out: E embedding, t layer, m multi-token prediction, L loss, stages
    between bars, such as ``Et*3|(tt|)*2,L``."""

    overlap_p2p_comm: bool = option(
        True,
        flag="--overlap-p2p-communication",
        aliases={"--no-overlap-p2p-communication": False},
    )
    """Let transfers between stages run beside the computation."""

    deallocate_pipeline_outputs: bool = option(True)
    """Free a stage's output once it is sent."""

    overlap_moe_expert_parallel_comm: bool = option(False)
    """Let the forward of a microbatch and the backward of another take turns, so that tokens of one
    travel to experts while the other computes; more microbatches are alive."""

    delay_wgrad_compute: bool = option(False)
    """With --overlap-moe-expert-parallel-comm: compute weight gradients where a backward would wait
    for tokens."""

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_vp_stage",
        )
        check_at_most(self, LARGEST_GROUP, "microbatch_group_size_per_vp_stage")
        if self.pipeline_model_parallel_layout is not None:
            parse_layout(self.pipeline_model_parallel_layout)  # a misspelled one is never passed by

    def placement(
        self, num_layers: int, num_ranks: int, encoder_layers: int | None = None
    ) -> Placement:
        """Return where the stages of a model live; the arguments are those of `stages`.

        One rank holds all layers as one stage, whatever is said of stages.

        Raises:
            UserError: the stages do not divide, or do not go with the schedule.
        """
        if num_ranks == 1:
            return Placement(1)
        if num_ranks > MOST_RANKS:
            raise UserError(
                f"--pipeline-model-parallel-size ({num_ranks}) must be at most {MOST_RANKS}"
            )
        placement = self._placement(num_layers, num_ranks, encoder_layers)
        if placement.num_stages > MOST_STAGES:
            raise UserError(
                f"{placement.num_stages} stages = --pipeline-model-parallel-size ({num_ranks}) x "
                f"{placement.num_chunks} on each rank: there may be at most {MOST_STAGES:,}"
            )
        return placement

    def _placement(self, num_layers: int, num_ranks: int, encoder_layers: int | None) -> Placement:
        """Return where the stages live on several ranks, however many there are."""
        ends = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        chunks = chunks_per_rank(
            _stacks(num_layers, encoder_layers),
            num_ranks,
            counted_ends=sum(ends),
            layers_per_stage=self.num_layers_per_virtual_pipeline_stage,
            stages_per_rank=self.num_virtual_stages_per_pipeline_rank,
            layout=self.pipeline_model_parallel_layout,
        )
        if self.pipeline_schedule == "zb-v":
            counts = (
                self.num_layers_per_virtual_pipeline_stage,
                self.num_virtual_stages_per_pipeline_rank,
                self.pipeline_model_parallel_layout,
            )
            if counts == (None, None, None):
                chunks = 2  # what the schedule is made for
            if chunks == 2:
                return Placement(num_ranks, 2, "v")
        return Placement(num_ranks, chunks)

    def stages(
        self,
        num_layers: int,
        num_ranks: int,
        mtp_num_layers: int = 0,
        encoder_layers: int | None = None,
    ) -> list[Stage]:
        """Return every stage of a model, by position.

        Args:
            num_layers: of the model, without multi-token prediction.
            num_ranks: along the pipeline.
            mtp_num_layers: layers of multi-token prediction.
            encoder_layers: how many of the layers are an encoder's, if there is one with a decoder.

        Raises:
            UserError: the layers cannot be split so, or layers of multi-token prediction stand
                apart from the head, which they need.
        """
        layout = self._split(num_layers, num_ranks, encoder_layers)
        layout = layout or self.pipeline_model_parallel_layout
        stages = plan_stages(
            _stacks(num_layers, encoder_layers),
            self.placement(num_layers, num_ranks, encoder_layers),
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            account_for_embedding=self.account_for_embedding_in_pipeline_split,
            account_for_loss=self.account_for_loss_in_pipeline_split,
            layout=layout if num_ranks > 1 else None,
            mtp_num_layers=mtp_num_layers,
        )
        for number, stage in enumerate(stages):
            if stage.num_mtp_layers and not stage.is_last:
                raise UserError(
                    f"--pipeline-model-parallel-layout {self.pipeline_model_parallel_layout!r}: "
                    f"stage {number} holds m without the head, which every such layer needs; put "
                    f"{'m' * mtp_num_layers}L at the end, in the last stage"
                )
        self._check_ranks(stages, num_layers, num_ranks)
        return stages

    def _split(self, num_layers: int, num_ranks: int, encoder_layers: int | None) -> str | None:
        """Return the layout in which an encoder's ranks come before its decoder's, if it is asked.

        Raises:
            UserError: the rank is not between the two, or other flags say how layers are split.
        """
        rank = self.pipeline_model_parallel_split_rank
        if rank is None:
            return None
        flag = f"{SPLIT} ({rank})"
        if encoder_layers is None:
            raise UserError(
                f"{flag} parts an encoder from its decoder, and there is one stack of layers; drop "
                "it (--decoder-first-pipeline-num-layers gives the first rank fewer layers)"
            )
        if not 0 < rank < num_ranks:
            raise UserError(
                f"{flag} is the first of the decoder's ranks and must be 1 to "
                f"--pipeline-model-parallel-size ({num_ranks}) - 1; "
                + ("change it" if num_ranks > 1 else "drop it, or raise the latter")
            )
        others = (
            self.decoder_first_pipeline_num_layers,
            self.decoder_last_pipeline_num_layers,
            self.account_for_embedding_in_pipeline_split or None,
            self.account_for_loss_in_pipeline_split or None,
            self.pipeline_model_parallel_layout,
        )
        if any(value is not None for value in others):
            raise UserError(
                f"{flag} and other flags (--pipeline-model-parallel-layout, --decoder-first- or "
                "-last-pipeline-num-layers, --account-for-...) each say how layers are split; keep "
                "one"
            )
        placement = self.placement(num_layers, num_ranks, encoder_layers)
        return split_layout(num_layers, placement, encoder_layers, rank)

    def _check_ranks(self, stages: list[Stage], num_layers: int, num_ranks: int) -> None:
        """Refuse a rank that would hold nothing and only pass activations on."""
        placement = self.placement(num_layers, num_ranks)
        for rank in range(num_ranks):
            mine = [stages[at] for at in placement.positions(rank)]
            if not any(stage.layers or stage.is_first or stage.is_last for stage in mine):
                raise UserError(
                    f"--pipeline-model-parallel-layout {self.pipeline_model_parallel_layout!r} "
                    f"gives rank {rank} of the pipeline nothing to hold; give it a layer, or lower "
                    f"--pipeline-model-parallel-size ({num_ranks})"
                )

    def schedule_name(self, placement: Placement) -> ScheduleName:
        """Return which schedule orders the work of a placement."""
        name: ScheduleName
        if self.pipeline_schedule != "auto":
            name = self.pipeline_schedule
        else:
            name = "interleaved" if placement.num_chunks > 1 else "1f1b"
        if placement.num_ranks == 1 and name in ("interleaved", "zb-v"):
            name = "1f1b"  # on one rank every schedule is forward, backward
        return name

    def schedule(self, placement: Placement, num_microbatches: int) -> Schedule:
        """Return the actions of all ranks for an iteration; the same object for equal arguments.

        Raises:
            UserError: the schedule does not go with the placement.
        """
        name = self.schedule_name(placement)
        group = self.microbatch_group_size_per_vp_stage if placement.num_chunks > 1 else None
        return make_schedule(
            name,
            placement.num_ranks,
            num_microbatches,
            placement.num_chunks,
            group,
            combined=self.overlap_moe_expert_parallel_comm,
        )


def _stacks(num_layers: int, encoder_layers: int | None) -> Layers:
    """Return the layers of each stack."""
    return num_layers if encoder_layers is None else (encoder_layers, num_layers - encoder_layers)
