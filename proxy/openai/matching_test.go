package openai

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
)

func parsed(t testing.TB, api API, body string) *Request {
	t.Helper()
	var r Request
	if err := ParseRequest(api, []byte(body), &r); err != nil {
		t.Fatalf("%s: ParseRequest(api, []byte(body), &r) = %v, want nil", body, err)
	}
	return &r
}

func TestPromptText(t *testing.T) {
	for _, tt := range []struct {
		api        API
		body, want string
	}{
		{Completions, `{"prompt":"a \"b\" \n"}`, `a \"b\" \n`},
		{Completions, `{"prompt":""}`, ``},
		{Completions, `{"prompt":["one"]}`, `one`},
		{Completions, `{"prompt":["one","two"]}`, "-"},
		{Completions, `{"prompt":[1, 2,3 ]}`, `[1, 2,3`},
		{Completions, `{"prompt":[[1,2]]}`, `[1,2`},
		{Completions, `{"prompt":[[1],[2]]}`, "-"},
		{Completions, `{"prompt_embeds":"AA"}`, "-"},
		{Chat, `{"messages":[{"role":"user"}]}`, `[{"role":"user"}`},
		{Chat, "{\"messages\":[\n  {\"role\":\"user\"}\n]}", "[\n  {\"role\":\"user\"}"},
		{Responses, `{"input":"hi"}`, `hi`},
		{Generate, `{"input_ids":[7]}`, `[7`},
	} {
		got := parsed(t, tt.api, tt.body).PromptText()
		if tt.want == "-" {
			if got != nil {
				t.Errorf("%s: %q, want none", tt.body, got)
			}
		} else if string(got) != tt.want || cap(got) != len(got) {
			t.Errorf("%s: %q, want %q", tt.body, got, tt.want)
		}
	}
}

// The text of each turn is a prefix of the text of the next turn, for each form of lists
// that clients use.
func TestPromptTextGrows(t *testing.T) {
	messages := []string{`{"role":"system","content":"s"}`, `{"role":"user","content":"a"}`, `{"role":"assistant","content":"b"}`, `{"role":"user","content":"c"}`}
	for _, style := range [][3]string{{"[", ",", "]"}, {"[ ", ", ", " ]"}, {"[\n    ", ",\n    ", "\n  ]"}} {
		var before []byte
		for n := range len(messages) {
			got := parsed(t, Chat, `{"messages":`+style[0]+strings.Join(messages[:n+1], style[1])+style[2]+`}`).PromptText()
			if !bytes.HasPrefix(got, before) || len(got) <= len(before) {
				t.Errorf("%q does not go on from %q", got, before)
			}
			before = got
		}
	}
}

func TestWhatKeepsPromptsApart(t *testing.T) {
	for _, tt := range []struct{ members, salt, lora, preamble string }{
		{`"x":1`, "", "", ""},
		{`"cache_salt":"s"`, "s", "", ""},
		{`"extra_key":"k"`, "k", "", ""},
		{`"extra_key":"k","cache_salt":"\u0073"`, "sk", "", ""},
		{`"cache_salt":7,"lora_path":["a"]`, "", "", ""},
		{`"lora_path":"sql"`, "", "sql", ""},
		{`"lora_request":{"lora_name":"sql","lora_int_id":0}`, "", "sql", ""},
		{`"tools":[{"a":1}],"chat_template":null,"temperature":1,"documents":[]`, "", "", `[{"a":1}];[];`},
		{`"system":"be brief","chat_template_kwargs":{"thinking":true}`, "", "", `"be brief";{"thinking":true};`},
	} {
		r := parsed(t, Chat, `{"messages":[{}],`+tt.members+`}`)
		var preamble strings.Builder
		for raw := range r.Preamble {
			preamble.Write(raw)
			preamble.WriteByte(';')
		}
		if r.CacheSalt() != tt.salt || r.LoRA() != tt.lora || preamble.String() != tt.preamble {
			t.Errorf("%s: salt %q, adapter %q, preamble %q", tt.members, r.CacheSalt(), r.LoRA(), preamble.String())
		}
	}
	for range parsed(t, Chat, `{"messages":[{}],"tools":[],"system":""}`).Preamble {
		break
	}
}

func TestAppendTokenIDs(t *testing.T) {
	for _, tt := range []struct {
		api  API
		body string
		want []uint32 // nil: an error is expected
	}{
		{Completions, `{"prompt":[1]}`, []uint32{1}},
		{Completions, `{"prompt":[ 0 ,22,333, 4294967295 ]}`, []uint32{0, 22, 333, 4294967295}},
		{Completions, `{"prompt":[[1,2]]}`, []uint32{1, 2}},
		{Completions, `{"prompt":[1,12,123,1234,12345,123456,1234567,12345678,123456789,1234567890,9,98,987,9876,98765,987654,9876543]}`,
			[]uint32{1, 12, 123, 1234, 12345, 123456, 1234567, 12345678, 123456789, 1234567890, 9, 98, 987, 9876, 98765, 987654, 9876543}},
		{Completions, `{"prompt":[1000000,0,900009,99999999]}`, []uint32{1000000, 0, 900009, 99999999}},
		{Completions, `{"prompt":[1,-1,1,1,1,1,1]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,9.0,1,1,1,1]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,9E2,1,1,1,1]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[[8],1,1,1,1,1,1]}`, nil},
		{Completions, `{"prompt":[4294967296]}`, nil},
		{Completions, `{"prompt":[1,99999999999999999999999999]}`, nil},
		{Completions, `{"prompt":[1,-1]}`, nil},
		{Completions, `{"prompt":[[]]}`, nil},
		{Completions, `{"prompt":[[1],[2]]}`, nil},
		{Completions, `{"prompt":"text"}`, nil},
		{Completions, `{"prompt":["1"]}`, nil},
		{Generate, `{"input_ids":[5,6],"text":"a"}`, []uint32{5, 6}},
		{VLLMGenerate, `{"token_ids":[5,6]}`, []uint32{5, 6}},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,9]}`, []uint32{8, 9}},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,9.0]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,9E2]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[8,"9"]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":[]}`, nil},
		{Chat, `{"messages":[{}],"prompt_token_ids":null}`, nil},
		{Chat, `{"messages":[{}]}`, nil},
	} {
		dst := []uint32{77}
		got, err := parsed(t, tt.api, tt.body).AppendTokenIDs(dst)
		if want := append(dst, tt.want...); !slices.Equal(got, want) || (err == nil) != (tt.want != nil) || err != nil && !errors.Is(err, ErrTokenIDs) {
			t.Errorf("%s: %v, %v; want %v", tt.body, got, err, want)
		}
	}
}

func BenchmarkAppendTokenIDs(b *testing.B) {
	body := tokenBody(256<<10, ", ")
	r := parsed(b, Completions, string(body))
	var ids []uint32
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if ids, err = r.AppendTokenIDs(ids[:0]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(ids)), "ids")
}

// BenchmarkConversation measures the search for the conversation beside the scan. It uses
// a first turn, in which every message must be read, and a later turn.
func BenchmarkConversation(b *testing.B) {
	header := func(string) string { return "" }
	for _, bb := range []struct{ name, messages string }{
		{"first-4K", `{"role":"system","content":"` + strings.Repeat("Be brief. ", 200) + `"},{"role":"user","content":"` + strings.Repeat("Why? ", 400) + `"}`},
		{"later-4K", `{"role":"user","content":"` + strings.Repeat("Why? ", 400) + `"},{"role":"assistant","content":"` + strings.Repeat("So. ", 500) + `"},{"role":"user","content":"And?"}`},
	} {
		b.Run(bb.name, func(b *testing.B) {
			r := parsed(b, Chat, `{"model":"m","messages":[`+bb.messages+`],"stream":true,"max_tokens":100,"temperature":0.5}`)
			b.ReportAllocs()
			for b.Loop() {
				sources.ConversationID(r, header)
				r.HoldsAnswer()
			}
		})
	}
}

func TestMediaAndTools(t *testing.T) {
	for _, tt := range []struct {
		body                 string
		images, audio, tools bool
	}{
		{`{"messages":[{"role":"user","content":"{\"type\":\"image_url\"}"}],"tools":[]}`, false, false, false},
		{`{"messages":[{"content":[{"type":"text"},{"type":"image_url","image_url":{"url":"data:"}}]}],"tools":[ {}]}`, true, false, true},
		{`{"messages":[{"content":[{"type":"input_audio"}]}],"functions":[{}]}`, false, true, true},
	} {
		r := parsed(t, Chat, tt.body)
		if images, audio := r.Media(); images != tt.images || audio != tt.audio || r.Tools() != tt.tools {
			t.Errorf("%s: images %v, audio %v, tools %v", tt.body, images, audio, r.Tools())
		}
	}
}

// TestMediaParts: each medium is visited by what identifies it.
func TestMediaParts(t *testing.T) {
	for _, tt := range []struct {
		api  API
		body string
		want []string
	}{
		{Chat, `{"messages":[{"role":"user","content":"{\"type\":\"image_url\"}"}]}`, nil},
		{Chat, `{"messages":[{"content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"detail":"low","url":"http://a"}},{"image_url":"http://b","type":"image_url"}]}]}`, []string{`"http://a"`, `"http://b"`}},
		{Chat, `{"messages":[{"content":[{"type":"audio_url","audio_url":{"url":"c"}},{"type":"video_url","video_url":{"url":"d"}}]},{"content":[{"type":"input_audio","input_audio":{"format":"wav","data":"e"}}]}]}`, []string{`"c"`, `"d"`, `"e"`}},
		{Chat, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"a"},"uuid":"u"},{"type":"image_url","image_url":null,"uuid":"v"},{"type":"image_url","image_url":null},{"type":"image_url"},{"type":"image_url","image_url":{}}]}]}`, []string{`"u"`, `"v"`}},
		{Chat, `{"messages":[{"tool_calls":[{"type":"image_url","image_url":"a"}],"content":[{"type":"text","text":{"type":"image_url","image_url":"b"}}]}]}`, nil},
		{Responses, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"a"},{"type":"input_image","file_id":"f"}]},{"type":"function_call_output","output":[{"type":"input_image","image_url":"b"}]}]}`, []string{`"a"`, `"f"`, `"b"`}},
		{Messages, `{"messages":[{"content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"a"}},{"type":"tool_result","content":[{"type":"image","source":{"type":"url","url":"b"}}]}]}]}`, []string{`"a"`, `"b"`}},
		{Generate, `{"text":"x","image_data":"a","audio_data":["b",["c"]],"video_data":null}`, []string{`"a"`, `"b"`, `["c"]`}},
	} {
		r := parsed(t, tt.api, tt.body)
		var got []string
		for raw := range r.MediaParts {
			got = append(got, string(raw))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.body, got, tt.want)
		}
		calls := 0
		r.MediaParts(func([]byte) bool { calls++; return false })
		if calls != min(len(tt.want), 1) {
			t.Errorf("%s: %d calls after the end", tt.body, calls)
		}
	}
}
