"""Writes a model for measurements of long prompts: the tokenizer is a byte-level BPE
with 32,768 tokens, trained on the sources and documents of this repository, and the
model has one small layer, so that an engine computes little.

    python make_long_model.py DIR
"""

import json
import pathlib
import sys

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import make_model

# The words of Llama 3's tokenizer.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB = 32768
POSITIONS = 131072


def corpus():
    root = pathlib.Path(__file__).resolve().parents[2]
    for pattern in ("docs/**/*.md", "proxy/**/*.go", "internal/**/*.go"):
        for path in sorted(root.glob(pattern)):
            yield path.read_text(errors="replace")


def write_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=make_model.SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>",
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": make_model.CHAT_TEMPLATE,
    }, indent=1))
    return tokenizer.get_vocab_size()


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "recipe.json"
    make_model.RECIPE.update(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, intermediate=128, positions=POSITIONS)
    text = json.dumps(dict(make_model.RECIPE, tokens=VOCAB, tokenizers=tokenizers.__version__), sort_keys=True)
    if stamp.exists() and stamp.read_text() == text:
        return
    stamp.unlink(missing_ok=True)
    vocab = write_tokenizer(folder)
    make_model.write_config(folder, vocab)
    make_model.write_weights(folder, vocab, dict(make_model.RECIPE, high=1))
    stamp.write_text(text)


if __name__ == "__main__":
    main()
