"""What a user says about turning text into token files; checked before any byte is read."""

from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError


class PreprocessConfig(Config):
    """Input, policy, output and work split of one preprocessing run."""

    input: tuple[str, ...] = option()
    """Files, folders or globs: JSON lines (.jsonl, .json), plain text (.txt) or Parquet (.parquet),
    the first two also as .gz, .bz2, .xz or .zst."""

    output_prefix: str = option()
    """Path of the output without endings: PREFIX_KEY_document.bin, .idx and .json, and
    PREFIX_report.json."""

    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key", "--jsonl-keys"))
    """Keys (columns of Parquet) that hold text; each gives a pair of files of its own."""

    input_format: Literal["auto", "jsonl", "txt", "parquet"] = option("auto")
    """Format of every input; auto goes by the file's ending, and takes unknown ones for JSON
    lines."""

    txt_documents: Literal["file", "paragraphs", "lines"] = option("file")
    """What is one document in plain text: a file, a paragraph (blank lines separate) or a line."""

    append_eod: bool = option(False)
    """Append the end-of-document token to every document."""

    split_sentences: bool = option(False)
    """Store every sentence as a sequence of its own, in PREFIX_KEY_sentence."""

    keep_newlines: bool = option(False)
    """Keep the white space between sentences with the sentence before it."""

    sentence_splitter: Literal["simple", "nltk"] = option("simple")
    """simple: built in, by punctuation and capitals; nltk: its Punkt model of --lang, which must
    be installed."""

    lang: str = option("english")
    """Language of the nltk sentence splitter."""

    on_error: Literal["stop", "skip"] = option("stop")
    """A record that cannot be used (bad JSON or UTF-8, a missing key, a value that is no string, a
    NUL byte, too long): stop at it, or skip and count it. Empty texts are always skipped."""

    max_record_bytes: int = option(16 * 2**20)
    """Longest record; a longer one is bad, and never held in memory whole. Libraries may take 150
    times a text's bytes while they encode it."""

    workers: int | None = option(derived="the CPU cores this process may use")
    """Processes that encode. The output is the same for any number."""

    partitions: int = option(1)
    """Shares of the input that are encoded one by one, and can be on several machines. The merged
    output is the same for any number."""

    partition_index: int | None = option(None)
    """Encode this share only, counted from 0 (in a Slurm array: $SLURM_ARRAY_TASK_ID)."""

    merge_partitions: bool = option(False)
    """Encode nothing: join the finished shares of earlier runs with --partition-index."""

    launcher: Literal["local", "ray"] = option("local")
    """Where the shares are encoded: on this machine, or each as a task of a Ray cluster."""

    log_interval: int = option(1000)
    """Records between lines of progress, when the output is no terminal."""

    find_optimal_num_workers: bool = option(False)
    """Write nothing: measure the speed with each of --workers-to-check."""

    workers_to_check: tuple[int, ...] = option((16, 32, 64))
    """Numbers of workers that --find-optimal-num-workers tries."""

    max_documents: int = option(100_000)
    """Records that --find-optimal-num-workers encodes with each."""

    def __post_init__(self) -> None:
        check_at_least(
            self, 1, "workers", "partitions", "max_documents", "max_record_bytes", "log_interval"
        )
        if any(count < 1 for count in self.workers_to_check):
            raise UserError(f"--workers-to-check {self.workers_to_check}: each must be at least 1")
        repeated = sorted({key for key in self.json_keys if self.json_keys.count(key) > 1})
        if repeated:
            raise UserError(f"--json-keys names {', '.join(repeated)} twice; give each key once")
        for key in self.json_keys:
            if not key or "/" in key or "\0" in key:
                raise UserError(f"--json-keys {key!r} cannot be part of a file name")
        self._check_partitions()
        if self.keep_newlines and not self.split_sentences:
            raise UserError("--keep-newlines only acts with --split-sentences; give both or none")

    def _check_partitions(self) -> None:
        index = self.partition_index
        if index is not None and not 0 <= index < self.partitions:
            raise UserError(
                f"--partition-index ({index}) must be from 0 to --partitions - 1 "
                f"({self.partitions - 1})"
            )
        if index is not None and self.merge_partitions:
            raise UserError(
                "--partition-index encodes one share and --merge-partitions joins them all; run "
                "the first once per share, then the second once"
            )
        if self.merge_partitions and self.partitions == 1:
            raise UserError(
                "--merge-partitions needs the --partitions that the shares were made with"
            )
        if self.launcher == "ray" and (index is not None or self.merge_partitions):
            raise UserError(
                "--launcher ray encodes all shares and joins them; leave out --partition-index and "
                "--merge-partitions"
            )

    @property
    def level(self) -> str:
        """Last part of the output's name, as in Megatron."""
        return "sentence" if self.split_sentences else "document"
