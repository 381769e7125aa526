"""Settings of samples that change nothing in a run, each with the reason."""

from megatron.training.config import RunConfig


def idle_data(config: RunConfig) -> dict[str, str]:
    """Return the settings of masked spans and words that samples of this run do not have."""
    t5, bert = config.data.t5, config.data.bert
    alone = "--masked-words makes samples for an encoder alone"
    if bert.masked_words:
        return dict.fromkeys(("span_corruption", "mean_noise_span_length"), alone)
    why = "no --decoder-seq-length" if t5.decoder_seq_length is None else None
    idle = {"bert_binary_head": "no --masked-words, as pretrain_bert.py has them"}
    if why is not None:
        names = (*config.data.masking.flatten(), *t5.flatten())
        return {**dict.fromkeys(names, why), **idle}
    if t5.span_corruption == "ngrams":
        return {"mean_noise_span_length": "--span-corruption is ngrams", **idle}
    names = ("short_seq_prob", "masking_max_ngram")
    return {**dict.fromkeys(names, "--span-corruption is random_spans"), **idle}
