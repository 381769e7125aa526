"""What a user says about the training data."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_at_least, flag_of, option
from megatron.core.datasets.bert_config import BertDataConfig
from megatron.core.datasets.masking_config import MaskingConfig
from megatron.core.datasets.split import parse_split
from megatron.core.datasets.t5_config import T5DataConfig
from megatron.core.utils import UserError

LEGACY_SPLIT = "969, 30, 1"
PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


SHORTEST_ENCODER = 4
"""Two tokens of text, and two places that n-grams leave free, as Megatron-core does."""
SHORTEST_FRAMED = 5
"""Two tokens of text, and those that frame them."""
MOST_WORKERS = 1024
"""Reading processes of a rank; more are a slip of the pen."""


class FimConfig(Config):
    """Fill-in-the-middle: some documents of a sample are permuted to prefix, suffix, middle."""

    fim_data: bool = option(False)
    """Permute documents of samples, so that the model learns to fill in the middle."""

    fim_rate: float = option(0.5)
    """Share of documents that are permuted."""

    fim_spm_rate: float = option(0.5)
    """Share of permuted documents whose suffix comes before the prefix."""

    fim_split_sample: str | None = option(None, metavar="TOKEN")
    """Token that parts a document into fragments (a repository into files), which are then permuted
    one by one; --fim-rate says in which share of such documents."""

    fim_fragment_rate: float | None = option(None)
    """Share of fragments that are permuted, under --fim-split-sample."""

    fim_no_prefix: str | None = option(None, metavar="TEXT")
    """Leave documents and fragments that start with this text as they are."""

    fim_prefix_token: str = option("<fim_prefix>", metavar="TOKEN")
    """Token before the prefix."""

    fim_middle_token: str = option("<fim_middle>", metavar="TOKEN")
    """Token before the middle."""

    fim_suffix_token: str = option("<fim_suffix>", metavar="TOKEN")
    """Token before the suffix."""

    fim_pad_token: str = option("<fim_pad>", metavar="TOKEN")
    """Token that fills up a sample that became shorter."""

    fim_eod_token: str = option("<|endoftext|>", metavar="TOKEN")
    """Token at which documents end."""

    def __post_init__(self) -> None:
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{flag_of(FimConfig, name)} ({value}) must be between 0 and 1")
        if self.fim_data and self.fim_split_sample is not None and self.fim_fragment_rate is None:
            raise UserError(
                f"--fim-split-sample {self.fim_split_sample!r} needs --fim-fragment-rate, the "
                "share of fragments to permute"
            )


class DataConfig(Config):
    """Where the samples come from and how they are cut from the corpora."""

    data_path: tuple[str, ...] | None = option(None, metavar="[WEIGHT] PREFIX")
    """Token files, by prefix: ``PREFIX`` for one, ``WEIGHT PREFIX WEIGHT PREFIX ...`` for a blend,
    ``PREFIX PREFIX ...`` for a blend by size. Each is cut into splits by --split."""

    train_data_path: tuple[str, ...] | None = option(None, metavar="[WEIGHT] PREFIX")
    """Token files for training alone, as in --data-path."""

    valid_data_path: tuple[str, ...] | None = option(None, metavar="[WEIGHT] PREFIX")
    """Token files for validation alone."""

    test_data_path: tuple[str, ...] | None = option(None, metavar="[WEIGHT] PREFIX")
    """Token files for testing alone."""

    data_args_path: str | None = option(None)
    """File that holds what would follow --data-path, for lists too long for a command line."""

    per_split_data_args_path: str | None = option(None)
    """JSON file with keys train, valid and test, each a list as in --data-path."""

    split: str | None = option(derived="'969, 30, 1' with --data-path, 1,1,1 with --mock-data")
    """Relative shares of training, validation and testing, such as 90,5,5."""

    data_cache_path: str | None = option(None)
    """Folder of the index files; by default PREFIX/cache beside each corpus."""

    mock_data: bool = option(False)
    """Train on synthetic tokens."""

    seq_length: int = option(aliases=("--encoder-seq-length",))
    """Tokens in a sample; of an encoder-decoder, those that the encoder reads."""

    num_workers: int = option(2)
    """Processes that read samples ahead of the training loop; 0 reads in the loop itself."""

    reset_position_ids: bool = option(False)
    """Count positions from zero again after each end-of-document token."""

    reset_attention_mask: bool = option(False)
    """Keep attention inside each document, split at end-of-document tokens."""

    eod_mask_loss: bool = option(False)
    """Take no loss at end-of-document tokens."""

    dataloader_type: Literal["single", "cyclic", "external"] = option(derived="single")
    """Order of samples: ``single`` walks the shuffled data set once, ``cyclic`` shuffles it again
    for each pass, ``external`` takes microbatches from loaders that the entry point brings."""

    full_validation: bool = option(False)
    """Evaluate on the whole validation set, once through."""

    multiple_validation_sets: bool = option(False)
    """Evaluate on each validation corpus by itself rather than on their blend."""

    num_dataset_builder_threads: int = option(1)
    """Threads that build the indexes of a blend's corpora."""

    mid_level_dataset_surplus: float = option(0.005)
    """Share of samples built beyond what a blend asks of each corpus, against rounding."""

    mmap_bin_files: bool = option(True)
    """Map token files into memory; off, read them with ordinary file reads."""

    ignore_tokenizer_mismatch: bool = option(False)
    """Train although the corpus was made with another tokenizer than the model's."""

    index_build_timeout: int = option(1800)
    """Seconds that a process waits for index files that another process builds."""

    fim: FimConfig

    masking: MaskingConfig

    t5: T5DataConfig

    bert: BertDataConfig

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Choose the order of samples and the split that goes with the source."""
        derived: dict[str, Any] = {"dataloader_type": "single"}
        if values["data_path"] or values["data_args_path"]:
            derived["split"] = LEGACY_SPLIT
        elif values["mock_data"]:
            derived["split"] = "1,1,1"
        # As Megatron-LM's programs have it.
        derived["masking_max_ngram"] = 3 if values["masked_words"] else 10
        return derived

    def __post_init__(self) -> None:
        check_at_least(self, 1, "seq_length", "num_dataset_builder_threads", "index_build_timeout")
        check_at_least(self, 0, "num_workers", "mid_level_dataset_surplus")
        if self.num_workers > MOST_WORKERS:
            raise UserError(f"--num-workers ({self.num_workers}) must be at most {MOST_WORKERS}")
        if self.mock_data and self.fim.fim_data:
            raise UserError("--fim-data permutes text, but --mock-data has none; drop one of them")
        self._check_masked()
        sources = self.sources
        if len(sources) > 1 and set(sources) - set(map(_flag, PER_SPLIT)):
            raise UserError(f"{' and '.join(sources)} each name the data; keep one of them")
        if self.split is not None:
            parse_split(self.split)
            if sources and not self.split_applies:
                raise UserError(
                    f"--split {self.split!r} says how to cut one corpus, but {sources[0]} already "
                    "names the corpora of each split; remove --split"
                )

    def _check_masked(self) -> None:
        """Refuse what samples with masked tokens are not made by."""
        decoder, masked_words = self.t5.decoder_seq_length, self.bert.masked_words
        if decoder is None and not masked_words:
            return
        what = f"--decoder-seq-length ({decoder}) asks for an encoder and a decoder"
        shortest, length = SHORTEST_ENCODER, "--encoder-seq-length"
        if masked_words:
            if decoder is not None:
                raise UserError(
                    f"--masked-words makes samples for an encoder alone, but {what}; drop one of "
                    "them (pretrain_bert.py trains on the first kind)"
                )
            what = "--masked-words asks for an encoder"
            shortest, length = SHORTEST_FRAMED, "--seq-length"
        others = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        given = [_flag(name) for name in others if getattr(self, name)]
        given += ["--fim-data"] * self.fim.fim_data
        if given:
            raise UserError(f"{given[0]} is for a decoder alone, but {what}; drop one of them")
        if self.seq_length < shortest:
            raise UserError(
                f"{length} ({self.seq_length}) leaves no room for a text; give at least {shortest}"
            )

    @property
    def sources(self) -> list[str]:
        """The flags that name data, as given."""
        names = ("data_path", "data_args_path", *PER_SPLIT, "per_split_data_args_path", "mock_data")
        return [_flag(name) for name in names if getattr(self, name)]

    @property
    def uneven_masks(self) -> str:
        """The flag by which samples have different numbers of tokens with a loss; else ""."""
        by = {
            "--masked-words": self.bert.masked_words,
            "--decoder-seq-length": self.t5.decoder_seq_length is not None,
            "--eod-mask-loss": self.eod_mask_loss,
        }
        return next((flag for flag, holds in by.items() if holds), "")

    @property
    def split_applies(self) -> bool:
        """Whether the corpora are cut by --split rather than named for each split."""
        return bool(self.data_path or self.data_args_path or self.mock_data)


def _flag(name: str) -> str:
    return flag_of(DataConfig, name)
