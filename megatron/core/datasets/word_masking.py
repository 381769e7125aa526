"""Word masking: words of a text are hidden, and are what is to be predicted (BERT).

    text       the man went to the store . he bought a gal ##lon of milk
    encoder    the man [M] to the store . he bought a [M] apple of milk
    labels             went                            gal ##lon

Words in random order are each the first of an n-gram of 1 to ``max_ngram`` words, shorter ones more
likely (n with a weight of 1 / n), which is masked if it fits what is left of the share to mask and
meets none before. Of its tokens 80 % become the mask, 10 % a random token and 10 % stay as they are
(Devlin et al. 2019, section 3.1). The draws are Megatron-core's, so the samples are, too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.span_corruption import Tokens, longest_run

MASKED = 0.8
"""Chance that a token to be predicted becomes the mask."""
RANDOM = 0.5
"""Chance that one which does not becomes a random token."""


@dataclass(frozen=True, kw_only=True)
class WordMasking:
    """How much of a text is masked, and by what."""

    mask_prob: float
    max_ngram: int
    """Words that are masked together at most."""
    mask: int
    """The token that hides another."""
    vocab_size: int
    """Ids that a random token may have."""
    apart: tuple[int, ...]
    """Tokens that are never masked, wherever they stand: those that frame a text's parts."""
    continues_word: npt.NDArray[np.bool_] | None
    """By id, whether a token goes on with a word; None where tokens are not parts of words."""

    def hide(
        self, tokens: Tokens, target_length: int, random: np.random.RandomState
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return what the encoder reads, and the places whose tokens are to be predicted.

        Args:
            tokens: the framed text.
            target_length: tokens that its text was to have: a share of them is the most that is
                masked. Of very few that may be less than one, and then nothing is.
            random: draws an order of the words, then of each that is looked at a length, and for
                each of its tokens what becomes of it.
        """
        places, ends = self._words(tokens)
        budget = min(self.mask_prob * target_length, max(1, round(len(tokens) * self.mask_prob)))
        lengths = np.arange(1, self.max_ngram + 1)
        chances = 1.0 / lengths
        chances /= chances.sum()
        chances /= chances.sum()  # once more, as there: a draw goes by the last bit
        order = np.arange(len(ends))
        random.shuffle(order)
        hidden = tokens.copy()
        is_masked = np.zeros(len(places), dtype=bool)
        masked = 0
        for word in order.tolist():
            if masked >= budget:
                break
            ngram = int(random.choice(lengths, p=chances))
            start = int(ends[word - 1]) if word else 0
            end = longest_run(ends, word, ngram, start + budget - masked)
            if end is None or is_masked[start:end].any():
                continue
            for place in places[start:end].tolist():
                hidden[place] = self._instead(int(tokens[place]), random)
            is_masked[start:end] = True
            masked += end - start
        return hidden, places[is_masked]

    def _words(self, tokens: Tokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the places that may be masked, and how many are there by the end of each word.

        A word goes on behind what stands apart.
        """
        places = np.flatnonzero(~np.isin(tokens, self.apart))
        begins = np.ones(len(places), dtype=bool)
        if self.continues_word is not None:
            begins[1:] = ~self.continues_word[tokens[places[1:]]]
        return places, np.append(np.flatnonzero(begins)[1:], len(places))[: len(places)]

    def _instead(self, token: int, random: np.random.RandomState) -> int:
        """Return what the encoder reads in place of a token."""
        if random.random_sample() < MASKED:
            return self.mask
        if random.random_sample() >= RANDOM:
            return int(random.randint(0, self.vocab_size))
        return token
