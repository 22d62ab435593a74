"""Writes the tokenizers and the expected ids beside this file.

Usage: python golden.py README.md, with the tokenizers package (made with 0.23.3)
and any text to train on. One more argument, a folder, gets the same for many
more random texts; golden_test.go looks there if BPE_GOLDEN names it.
"""

import json
import os
import random
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))

CURATED = [
    "", " ", "  ", "\n", "\r\n", "\t\t x", "hello", "Hello world", " leading", "trailing ", "trailing   ", "a  b   c    d",
    "\n\n\n", " \n \n ", "x\n\n  y\r\n\r\nz   ", "tabs\tand\t\ttabs ", "foo\n", "foo \n", "foo \n bar", "foo\r", "foo \r\n\tbar", "   \n   foo",
    "I'm you're we'll they've he'd she's 'tis DON'T I'M YOU'RE WE'LL", "x'sy x's x'tt x'd1 'LL 'vE 'Re I'\u017f \u212a",
    "numbers 1 12 123 1234 12345678 3.14159 1,000,000 \u00bd \u00b2 \u0663\u0664\u0665",
    "punct!!! ... ??? (a) [b] {c} <d> \"e\" 'f' `g` --- ___ *** -\n\n- !\n\n x //\n/\n /\r\n",
    "def f(x):\n    return x * 2  # comment\n\n\nclass A:\n\tpass\n", "func main() {\n\tfmt.Println(\"hi\")\n}\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';", "https://example.com/a/b?c=d&e=%20f#g", "{\"a\": [1, 2, {\"b\": null}]}", "camelCaseHTTPServer XMLHttpRequest iPhone",
    "\u4e2d\u6587\u6d4b\u8bd5\uff1a\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u5427\u3002", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3067\u3059\u3002", "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e", "\u0e44\u0e17\u0e22\u0e20\u0e32\u0e29\u0e32", "mixed\u4e2d\u6587and English\u6df7\u5728",
    "emoji \U0001f600\U0001f603 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "cafe\u0301 caf\u00e9 e\u0301\u0301 \u212b \ufb01 \u1e9b\u0323 \u0344 \uac00 \u1100\u1161 a\u0300\u0301\u0302b",
    "\u00a0nbsp\u00a0\u2003em\u3000wide\u200bzwsp\u2028ls\u2029ps\u0085nel\x0b\x0c\x1c\x1f end a\u0085b a \u0085 b \u180e x a\u200d b\u00ad c", "\ufeffbom", "\x00nul\x00\x01\x7f",
    "\u01c5 \u01c8 \u02b0 \u00aa \u00ba \u2177 \u24d0 \u3280 \u3007 \U0001d7d8",
    "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|><|endoftext|>", "<|endo", "<|begin_of_text|>x", "<s>hi</s>",
    "<tool_call>{}</tool_call> <think>x</think>  y", "<th\u00e9> <the\u0301> <think", "The quick brown fox jumps over the lazy dog. " * 5,
    "a" * 120, "ab" * 90, " " * 70, "\n" * 60, "=" * 60, "1" * 40, "!?" * 40, "\u4e00" * 40, "A" * 60 + "b",
]
POOLS = ["abcdefghij XYZ", " \n\t\r", "0123456789", "'stremdlv ", ".,;:!?-_/\\\"()[]{}<>|@#$%^&*+=~`", "\u00e4\u00f6\u00fc\u00df\u00e9\u00e8\u00ea\u00f1", "\u4e2d\u6587\u5b57\u7b26\u6d4b\u8bd5",
         "\u3042\u3044\u30a2\u30a4", "\U0001f600\U0001f680\U0001f44d\U0001f3fd\u2764\ufe0f\u200d", "\u0301\u0308\u0323\u0327", "\u0430\u0431\u0432\u0413\u0414", "\u00a0\u2003\u3000\u0085\u200b", "\u0663\u096a\u2167\u00bd", "\u0627\u0628\u062a", "\u1100\u1161\u11a8\uac00"]


def known(c):
    return unicodedata.category(chr(c)) not in ("Cn", "Cs")  # Python 3.11: Unicode 14


def texts(count, seed):
    r = random.Random(seed)
    for i in range(count):
        pools = [r.choice(POOLS) for _ in range(r.randint(1, 5))]
        yield "".join(r.choice(r.choice(pools)) for _ in range(r.randint(1, 25)))
        s = ""
        while r.random() > 0.07:
            c = r.choice([r.randint(0, 0x7F), r.randint(0x80, 0x24FF), r.randint(0, 0xFFFF), r.randint(0x10000, 0x1FFFF)])
            if known(c):
                s += chr(c) + (" " if r.random() < 0.3 else "")
        yield s


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (UPPER + "*" + LOWER + r"+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" + UPPER + "+" + LOWER + r"*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def splits(*patterns, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), behavior, invert) for p in patterns] + [byte_level(False)])


def around(first, last=""):
    def build(t):
        tokens = [x for x in (first, last) if x]
        template = processors.TemplateProcessing(single=f"{first} $A {last}".strip(), special_tokens=[(x, t.token_to_id(x)) for x in tokens])
        return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return build


def make(pre, normalizer=None, post=None, ignore_merges=False, normalized=()):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=560, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    t.train_from_iterator([open(sys.argv[1], encoding="utf-8").read()] + CURATED, trainer)
    t.add_special_tokens([AddedToken(s, normalized=False) for s in ["<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>"]])
    t.add_tokens([AddedToken(s, normalized=s in normalized) for s in ["<tool_call>", "</tool_call>", "<think>", "</think>", "<th\u00e9>"]])
    if post:
        t.post_processor = post(t)
    return t


TOKENIZERS = {
    "gpt2": make(byte_level(True), post=lambda t: processors.ByteLevel(trim_offsets=False)),
    "llama3": make(splits(LLAMA3), post=around("<|begin_of_text|>"), ignore_merges=True),
    "qwen": make(splits(QWEN), normalizers.NFC(), normalized=("<th\u00e9>", "<think>")),
    "o200k": make(splits(O200K, behavior="removed", invert=True), post=around("<|begin_of_text|>", "<|endoftext|>")),
    "deepseek": make(splits(*DEEPSEEK), normalizers.Sequence([])),
    "starcoder": make(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])),
}


def write(folder, name, t, inputs):
    with open(os.path.join(folder, name + ".golden"), "w", encoding="ascii") as f:
        for text in inputs:
            f.write(json.dumps({"text": text, "ids": t.encode(text).ids, "plain": t.encode(text, add_special_tokens=False).ids}, separators=(",", ":")) + "\n")


for name, t in TOKENIZERS.items():
    t.save(os.path.join(HERE, name + ".json"), pretty=False)
    write(HERE, name, t, CURATED + list(texts(40, 1)))
    if len(sys.argv) > 2:
        write(sys.argv[2], name, t, texts(20000, 2))
