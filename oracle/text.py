"""Say what Transformers and mlx-lm make of texts, chats and token sequences.

Standard input is a JSON object: `tokenizers` maps names to checkpoint folders, and `jobs` is a list of objects, each
with a `job`, the name of its `tokenizer`, and what that job needs. Standard output is the list of results, in order; a
job that raises gives {"error": ...}.
"""

import json
import sys
from pathlib import Path

from mlx_lm.tokenizer_utils import load


def describe(tokenizer):
    vocab = tokenizer.get_vocab()
    return {
        "vocab_size": max(vocab.values()) + 1,
        "bos_token": tokenizer.bos_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token,
        "eos_token_id": tokenizer.eos_token_id,
        "special_tokens": tokenizer.special_tokens_map,
        "has_thinking": tokenizer.has_thinking,
        "think_start_tokens": tokenizer.think_start_tokens,
        "think_end_tokens": tokenizer.think_end_tokens,
        "detokenizer": type(tokenizer.detokenizer).__name__,
    }


def encode(tokenizer, text, special):
    return tokenizer.encode(text, add_special_tokens=special)


def encode_prompt(tokenizer, text):
    # The rule of mlx_lm.stream_generate.
    special = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=special)


def decode(tokenizer, tokens, skip):
    return tokenizer.decode(tokens, skip_special_tokens=skip)


def stream(tokenizer, tokens):
    """The segment after each token, and the last one."""
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in tokens:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    return segments


def render(tokenizer, messages, tools, add_generation_prompt, variables):
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
    )


def evaluate(tokenizer, expression, messages):
    return tokenizer.apply_chat_template(messages, chat_template="{{ " + expression + " }}", tokenize=False)


JOBS = {
    "describe": describe,
    "encode": encode,
    "encode_prompt": encode_prompt,
    "decode": decode,
    "stream": stream,
    "render": render,
    "evaluate": evaluate,
}


def main():
    request = json.load(sys.stdin)
    tokenizers = {name: load(Path(folder)) for name, folder in request["tokenizers"].items()}
    results = []
    for job in request["jobs"]:
        run = JOBS[job.pop("job")]
        tokenizer = tokenizers[job.pop("tokenizer")]
        try:
            results.append(run(tokenizer, **job))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
