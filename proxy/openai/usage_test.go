package openai

import "testing"

func TestParseUsage(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       Usage
		ok         bool
	}{
		{"vLLM", `{"id":"x","choices":[{"usage":{"prompt_tokens":99}}],"usage":{"prompt_tokens":110,"total_tokens":115,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":96}}}`, Usage{110, 5, 96}, true},
		{"no details", `{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}`, Usage{1, 2, -1}, true},
		{"embeddings", `{"usage":{"prompt_tokens":7,"total_tokens":7}}`, Usage{7, -1, -1}, true},
		{"responses", `{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":3}}`, Usage{9, 3, 4}, true},
		{"messages", `{"usage":{"input_tokens":9,"cache_read_input_tokens":2,"output_tokens":3}}`, Usage{9, 3, 2}, true},
		{"SGLang native", `{"text":"usage","meta_info":{"id":"r","prompt_tokens":6,"completion_tokens":8,"cached_tokens":0,"finish_reason":{"type":"length"}}}`, Usage{6, 8, 0}, true},
		{"SGLang native batch", ` [{"meta_info":{"prompt_tokens":6,"completion_tokens":8}},{"meta_info":{"prompt_tokens":1,"completion_tokens":2,"cached_tokens":5}}]`, Usage{7, 10, 5}, true},
		{"null", `{"usage":null}`, noUsage, false},
		{"none", `{"id":"x"}`, noUsage, false},
		{"odd numbers", `{"usage":{"prompt_tokens":-4,"completion_tokens":1.5,"total_tokens":"x"}}`, noUsage, false},
		{"not an object", `{"usage":[1]}`, noUsage, false},
		{"meta_info of another kind", `{"meta_info":"x"}`, noUsage, false},
		{"no JSON", `usage`, noUsage, false},
		{"nothing", ``, noUsage, false},
		{"NaN elsewhere", `{"logprobs":[NaN],"usage":{"prompt_tokens":1,"completion_tokens":2}}`, Usage{1, 2, -1}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, ok := ParseUsage([]byte(tt.body)); got != tt.want || ok != tt.ok {
				t.Errorf("ParseUsage([]byte(tt.body)) = %+v, %v; want %+v", got, ok, tt.want)
			}
		})
	}
}
