"""What mlx-lm's backbone and last-token pooling give for a list of tokens, as mlx-optiq's embedder computes it."""

from pathlib import Path

import mlx.core as mx

from reference import parse_tokens, save


def embedding_details(model_dir, out, spec):
    """Save the hidden states and the embedding of `spec["tokens"]`, cut to `spec["dimensions"]` numbers if given."""
    from mlx_lm.utils import load_model
    model, _ = load_model(Path(model_dir))
    tokens = parse_tokens(spec["tokens"])
    hidden = model.model(mx.array([tokens]))
    pooled = hidden[mx.arange(1), mx.array([len(tokens) - 1])].astype(mx.float32)
    if spec["dimensions"] is not None:
        pooled = pooled[:, :spec["dimensions"]]
    embedding = pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    save(out, {"hidden": hidden[0], "embedding": embedding[0]}, spec)
