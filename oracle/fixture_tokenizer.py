"""Tiny tokenizers and chat templates that carry the markers of a model family."""

import json
from pathlib import Path

from architectures import VOCAB

TEMPLATES = {
    "qwen": (
        "{% if tools %}<|im_start|>system\n# Tools\n"
        "{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
        "Answer a call as <tool_call>\\n<function=NAME>...<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "minicpm5": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if tools %}<function name=\"f\"><param name=\"p\">v</param></function>{% endif %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if tools %}{% for t in tools %}<|tool>{{ t | tojson }}<tool|>{% endfor %}"
        "{#- calls: <|tool_call>call:NAME{...}<tool_call|> #}{% endif %}"
        "{% if add_generation_prompt %}<|turn>model\n"
        "{% if enable_thinking is defined and not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
    ),
}
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>",
                "<tool_call>", "</tool_call>"]
GEMMA_SPECIAL = ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>",
                 "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"]


def byte_chars():
    """GPT-2 printable stand-ins for the 256 byte values."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, n = {}, 0
    for b in range(256):
        if b in keep:
            out[b] = chr(b)
        else:
            out[b] = chr(256 + n)
            n += 1
    return out


def write_tokenizer(out: Path, family: str):
    if family == "gemma":
        vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", "<bos>", "<unk>"])}
        specials = ["<pad>", "<eos>", "<bos>", "<unk>"] + GEMMA_SPECIAL
        for t in GEMMA_SPECIAL:
            vocab[t] = len(vocab)
        for b in range(256):
            vocab[f"<0x{b:02X}>"] = len(vocab)
        for ch in "▁ abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\n{}[]()":
            vocab.setdefault(ch, len(vocab))
        merges = []
        for a, b in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "a")]:
            vocab.setdefault(a + b, len(vocab))
            merges.append([a, b])
        # Filled to the model's width, so that every id has a text.
        tail = ["<eoi>", "<boi>", "<|image|>"]
        while len(vocab) < VOCAB - len(tail):
            vocab[f"<unused{len(vocab)}>"] = len(vocab)
        for t in tail:
            vocab[t] = len(vocab)
        specials += tail
        tok = dict(
            version="1.0", truncation=None, padding=None,
            added_tokens=[dict(id=vocab[t], content=t, single_word=False, lstrip=False, rstrip=False,
                               normalized=False, special=True) for t in specials],
            normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            pre_tokenizer=None, post_processor=None,
            decoder={"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]},
            model=dict(type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None,
                       end_of_word_suffix=None, fuse_unk=True, byte_fallback=True, ignore_merges=False,
                       vocab=vocab, merges=merges),
        )
        bos, eos, pad, unk = "<bos>", "<eos>", "<pad>", "<unk>"
        extra_eos = [vocab["<eos>"], vocab["<turn|>"]]
    else:
        bc = byte_chars()
        vocab = {bc[b]: b for b in range(256)}
        merges = []
        for a, b in [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("e", "r")]:
            vocab[a + b] = len(vocab)
            merges.append([a, b])
        added = []
        for t in QWEN_SPECIAL:
            added.append(dict(id=len(vocab) + len(added), content=t, single_word=False, lstrip=False,
                              rstrip=False, normalized=False, special=t.startswith("<|")))
        tok = dict(
            version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            post_processor=None,
            decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                       end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, ignore_merges=False,
                       vocab=vocab, merges=merges),
        )
        ids = {a["content"]: a["id"] for a in added}
        bos, eos, pad, unk = None, "<|im_end|>", "<|endoftext|>", None
        extra_eos = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    (out / "tokenizer.json").write_text(json.dumps(tok, ensure_ascii=False, indent=1))
    cfg = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=eos, pad_token=pad,
               model_max_length=4096, clean_up_tokenization_spaces=False, chat_template=TEMPLATES[family])
    if bos:
        cfg["bos_token"] = bos
    if unk:
        cfg["unk_token"] = unk
    (out / "tokenizer_config.json").write_text(json.dumps(cfg, ensure_ascii=False, indent=1))
    (out / "chat_template.jinja").write_text(TEMPLATES[family])
    return extra_eos
