"""Writes the model that the real engines serve: a small Llama whose text
depends on every token of its prompt.

    python make_model.py DIR
    python make_model.py DIR bytes    greedy text has other bytes than ASCII, mostly no valid UTF-8

The weights are random but normally scaled and drawn from one seed, so that
logits are far from constant: an engine that decodes on wrong, missing or freed
KV blocks writes other text. The tokenizer is byte-level (one token a byte), so
a prompt's length in tokens is known without running it. Nothing is written
when DIR already holds the same recipe.
"""

import json
import pathlib
import sys

RECIPE = {
    "seed": 20260,
    "hidden": 256,
    "layers": 8,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 688,
    "positions": 4096,
    "std": 0.08,
    "embed_std": 1.0,
    "format": 4,
}
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if thinking is defined %}{{ '<think>' }}{% if not thinking %}{{ '</think>' }}{% endif %}{% endif %}"
    "{% endif %}"
)


def byte_alphabet():
    """The printable stand-ins that the ByteLevel pre-tokenizer gives each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in, spare = {b: chr(b) for b in keep}, 256
    for b in range(256):
        if b not in stand_in:
            stand_in[b] = chr(spare)
            spare += 1
    return [stand_in[b] for b in range(256)]


def write_tokenizer(folder):
    """tokenizer.json by hand: 256 bytes, then the special tokens; no merges."""
    vocab = {c: i for i, c in enumerate(byte_alphabet())}
    added = [
        {"id": 256 + i, "content": s, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": "think" not in s}
        for i, s in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>",
        "model_max_length": RECIPE["positions"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }, indent=1))


def write_config(folder, vocab):
    r = RECIPE
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": r["hidden"], "intermediate_size": r["intermediate"],
        "num_hidden_layers": r["layers"], "num_attention_heads": r["heads"],
        "num_key_value_heads": r["kv_heads"], "head_dim": r["head_dim"],
        "vocab_size": vocab, "max_position_embeddings": r["positions"],
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 256, "eos_token_id": 257,
    }, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": 256, "eos_token_id": 257}))


def write_weights(folder, vocab, recipe):
    import torch
    from safetensors.torch import save_file

    r = recipe
    gen = torch.Generator().manual_seed(r["seed"])

    def normal(*shape, std=r["std"]):
        return torch.randn(*shape, generator=gen) * std

    h, q, kv = r["hidden"], r["heads"] * r["head_dim"], r["kv_heads"] * r["head_dim"]
    w = {"model.embed_tokens.weight": normal(vocab, h, std=r["embed_std"])}
    for n in range(r["layers"]):
        p = f"model.layers.{n}."
        w[p + "input_layernorm.weight"] = torch.ones(h)
        w[p + "post_attention_layernorm.weight"] = torch.ones(h)
        w[p + "self_attn.q_proj.weight"] = normal(q, h)
        w[p + "self_attn.k_proj.weight"] = normal(kv, h)
        w[p + "self_attn.v_proj.weight"] = normal(kv, h)
        w[p + "self_attn.o_proj.weight"] = normal(h, q)
        w[p + "mlp.gate_proj.weight"] = normal(r["intermediate"], h)
        w[p + "mlp.up_proj.weight"] = normal(r["intermediate"], h)
        w[p + "mlp.down_proj.weight"] = normal(h, r["intermediate"])
    w["model.norm.weight"] = torch.ones(h)
    head = normal(vocab, h)
    # Greedy text never ends early, and is printable ASCII unless all bytes are
    # wanted: then about one in eight is another one.
    head[:32] = 0
    head[127:128] = 0
    head[128:256] *= recipe["high"]
    head[256:] = 0
    w["lm_head.weight"] = head
    save_file(w, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "recipe.json"
    recipe = dict(RECIPE, high=0.75 if sys.argv[2:] == ["bytes"] else 0)
    text = json.dumps(recipe, sort_keys=True)
    if stamp.exists() and stamp.read_text() == text:
        return
    stamp.unlink(missing_ok=True)
    vocab = 256 + len(SPECIAL)  # 264: a multiple of 8
    write_tokenizer(folder)
    write_config(folder, vocab)
    write_weights(folder, vocab, recipe)
    stamp.write_text(text)


if __name__ == "__main__":
    main()
