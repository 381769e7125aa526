"""Settings of samples that change nothing in a run, each with the reason."""

from megatron.training.config import RunConfig


def idle_data(config: RunConfig) -> dict[str, str]:
    """Return the settings of masked spans that samples of this run do not have."""
    t5 = config.data.t5
    if t5.decoder_seq_length is None:
        return dict.fromkeys(t5.flatten(), "no --decoder-seq-length")
    if t5.span_corruption == "ngrams":
        return {"mean_noise_span_length": "--span-corruption is ngrams"}
    names = ("short_seq_prob", "masking_max_ngram")
    return dict.fromkeys(names, "--span-corruption is random_spans")
