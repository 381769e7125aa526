"""Initial values of a transformer's weights (Radford et al., 2019, section 2.3).

    weight                         distribution
    embeddings, untied head        normal(embedding_init_method_std)
    matrices into a block          normal(init_method_std)
    matrices back to the residual  normal(init_method_std / sqrt(2 num_layers))
    gains, biases                  one, zero

With ``init_method_xavier_uniform`` matrices are uniform with half width sqrt(6 / (rows + columns))
(Glorot and Bengio, 2010).
"""

import math

from megatron.core.sharding import Init
from megatron.core.transformer.config import TransformerConfig


def embedding_init(config: TransformerConfig) -> Init:
    """Return how embeddings and an untied head start."""
    return Init("normal", config.init.embedding_init_method_std)


def inner_init(config: TransformerConfig, shape: tuple[int, int]) -> Init:
    """Return how a matrix into a block starts."""
    if config.init.init_method_xavier_uniform:
        return Init("uniform", math.sqrt(6.0 / sum(shape)))
    return Init("normal", config.init.init_method_std)


def residual_init(config: TransformerConfig, shape: tuple[int, int]) -> Init:
    """Return how a matrix back to the residual stream starts."""
    if config.init.init_method_xavier_uniform:
        return Init("uniform", math.sqrt(6.0 / sum(shape)))
    return Init("normal", config.init.init_method_std / math.sqrt(2.0 * config.num_layers))
