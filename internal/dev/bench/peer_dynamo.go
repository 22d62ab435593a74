package main

import (
	"encoding/json"
	"os"
	"path/filepath"
)

// dynamoModel writes a model without weights: Dynamo's frontend needs a
// tokenizer. It makes one token of each byte, so it costs more than a real one.
func dynamoModel(dir, name string) (string, error) {
	type object = map[string]any
	vocab := object{}
	spare := rune(256)
	for b := rune(0); b < 256; b++ { // the printable stand-ins of ByteLevel
		letter := b
		if b < 33 || 126 < b && b < 161 || b == 173 {
			letter, spare = spare, spare+1
		}
		vocab[string(letter)] = b
	}
	level := object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
	end := object{"id": 256, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
	const length = 1 << 20
	files := map[string]object{
		"tokenizer.json": {
			"version": "1.0", "added_tokens": []any{end}, "pre_tokenizer": level, "decoder": level,
			"truncation": nil, "padding": nil, "normalizer": nil, "post_processor": nil,
			"model": object{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
				"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []any{}},
		},
		"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": length,
			"clean_up_tokenization_spaces": false, "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"},
		"config.json": {"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
			"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 264,
			"max_position_embeddings": length, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 256},
		"generation_config.json": {"eos_token_id": 256},
	}
	home := filepath.Join(dir, name)
	if err := os.MkdirAll(home, 0o700); err != nil {
		return "", err
	}
	for file, content := range files {
		text, err := json.Marshal(content)
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(home, file), text, 0o600); err != nil {
			return "", err
		}
	}
	return home, nil
}

// startDynamo starts the frontend, and its mocker as one prefill and one decode
// engine. They find each other by files.
func startDynamo(h *shelf, s *scene) ([]program, error) {
	model, err := dynamoModel(s.dir, "model")
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	run := []string{"env", "DYN_FILE_KV=" + filepath.Join(s.dir, "discovery"), "HF_HUB_OFFLINE=1", "DYN_LOG=warn", h.venv("ai-dynamo", "python"), "-m"}
	common := []string{"--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"}
	process := func(name string, engine bool, argv ...string) program {
		return program{name: name, engine: engine, argv: append(append(append([]string{}, run...), argv...), common...)}
	}
	mocker := func(role string, more ...string) []string {
		return append([]string{"dynamo.mocker", "--model-path", model, "--model-name", s.model, "--disaggregation-mode", role, "--speedup-ratio", "1000", "--decode-speedup-ratio", "1000"}, more...)
	}
	front := process("dynamo-frontend", false, "dynamo.frontend", "--http-port", port(s.listen), "--http-host", "127.0.0.1", "--router-mode", "kv")
	front.ready = s.listen
	return []program{front, process("dynamo-decode", true, mocker("decode")...), process("dynamo-prefill", true, mocker("prefill", "--bootstrap-ports", ports[0])...)}, nil
}
