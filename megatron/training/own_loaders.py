"""Programs that make data sets, and bring no loaders of their own (`external`)."""

from megatron.core.datasets.config import DataConfig
from megatron.core.utils import UserError


def refuse_external(data: DataConfig, program: str) -> None:
    """Refuse loaders that a program has to bring, and does not.

    A program calls this before it plans or starts anything, and `data.data_sets` does.

    Raises:
        UserError: ``data`` asks for loaders.
    """
    if data.dataloader_type == "external":
        raise UserError(
            f"--dataloader-type external: {program}.py brings no loaders of its own; copy it, "
            "leave out its call of refuse_external, and let build_datasets return loaders, as "
            "megatron/training/external.py says"
        )
