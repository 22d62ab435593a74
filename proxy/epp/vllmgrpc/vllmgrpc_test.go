package vllmgrpc

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// pb is an encoded message.
type pb []byte

func (m pb) number(n protowire.Number, v uint64) pb {
	return protowire.AppendVarint(protowire.AppendTag(m, n, protowire.VarintType), v)
}

func (m pb) text(n protowire.Number, v string) pb {
	return protowire.AppendString(protowire.AppendTag(m, n, protowire.BytesType), v)
}

func (m pb) inner(n protowire.Number, v pb) pb { return m.text(n, string(v)) }

func (m pb) float(n protowire.Number, v float32) pb {
	return protowire.AppendFixed32(protowire.AppendTag(m, n, protowire.Fixed32Type), math.Float32bits(v))
}

// packed returns the varints of a packed field.
func packed(list ...uint64) string {
	var b []byte
	for _, v := range list {
		b = protowire.AppendVarint(b, v)
	}
	return string(b)
}

// framed returns messages as a body has them.
func framed(list ...pb) (body []byte) {
	for _, m := range list {
		body = append(binary.BigEndian.AppendUint32(append(body, 0), uint32(len(m))), m...)
	}
	return body
}

func TestMethodOf(t *testing.T) {
	for path, want := range map[string]Method{
		"/vllm.grpc.engine.VllmEngine/Generate":     EngineGenerate,
		"/a/b/vllm.grpc.engine.VllmEngine/Embed":    EngineEmbed,
		"/vllm.Inference/Generate":                  Generate,
		"/vllm.Inference/GenerateStream":            GenerateStream,
		"/vllm.Generate/GenerateStream":             GenerateStream,
		"/vllm.grpc.engine.VllmEngine/GetModelInfo": 0,
		"/xvllm.Inference/Generate":                 0,
		"/vllm.Inference/Generate/":                 0,
		"vllm.Inference":                            0,
		"":                                          0,
	} {
		if got := MethodOf(path); got != want {
			t.Errorf("%q: %d, want %d", path, got, want)
		}
	}
	for kind, want := range map[string]bool{"application/grpc": true, "application/grpc+proto": true, "application/grpc;x": true, "application/grpc-web": false, "application/json": false, "": false} {
		if IsGRPC(kind) != want {
			t.Errorf("%q is gRPC: %t", kind, !want)
		}
	}
}

// TestAppendBody: the body of the HTTP API asks for the same as the message.
func TestAppendBody(t *testing.T) {
	sampling := pb(nil).float(2, .9).number(8, 16).text(10, "stop").number(15, 2)
	for _, tt := range []struct {
		name   string
		method Method
		body   []byte
		want   string
		stream bool
	}{
		{"token ids", EngineGenerate, framed(pb(nil).text(1, "id").inner(2, pb(nil).text(1, "hello").text(2, packed(1, 300, 70_000))).inner(4, sampling).number(5, 1)),
			`{"prompt":[1,300,70000],"max_tokens":16,"n":2,"stream":true,"stream_options":{"include_usage":true}}`, true},
		{"ids that are not packed", EngineGenerate, framed(pb(nil).inner(2, pb(nil).number(2, 7).number(2, 8))), `{"prompt":[7,8]}`, false},
		{"ids in two pieces", EngineGenerate, framed(pb(nil).inner(2, pb(nil).text(2, packed(7))).inner(2, pb(nil).number(2, 8))), `{"prompt":[7,8]}`, false},
		{"a text", EngineGenerate, framed(pb(nil).text(3, "say \"hé\"\n")), `{"prompt":"say \"hé\"\n"}`, false},
		{"the last prompt counts", EngineGenerate, framed(pb(nil).inner(2, pb(nil).number(2, 7)).text(3, "x")), `{"prompt":"x"}`, false},
		{"an embedding", EngineEmbed, framed(pb(nil).text(1, "id").inner(2, pb(nil).text(2, packed(1, 2)))), `{"input":[1,2]}`, false},
		{"a model", GenerateStream, framed(pb(nil).text(2, "m").text(3, "x").float(5, 0).inner(6, pb(nil).number(1, 3)).inner(8, pb(nil).number(1, 9)).number(12, 5)),
			`{"model":"m","prompt":"x","max_tokens":9,"n":3,"stream":true,"stream_options":{"include_usage":true}}`, true},
		{"an adapter", Generate, framed(pb(nil).text(2, "m").inner(4, pb(nil).text(1, packed(4, 5))).text(15, "lora")), `{"model":"lora","prompt":[4,5]}`, false},
		{"a salt of the cache", Generate, framed(pb(nil).text(3, "x").inner(10, pb(nil).number(1, 1).text(2, "salt"))), `{"prompt":"x"}`, false},
	} {
		got, stream, err := tt.method.AppendBody([]byte("before"), tt.body, false)
		if err != nil || string(got) != "before"+tt.want || stream != tt.stream {
			t.Errorf("%s: got %s, %t, %v", tt.name, got, stream, err)
		}
		var r openai.Request
		if err := openai.ParseRequest(tt.method.API(), got[len("before"):], &r); err != nil || r.Stream != tt.stream {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestAppendBodyRefuses: bodies that are not one message, and fields that only proxies may set.
func TestAppendBodyRefuses(t *testing.T) {
	text := pb(nil).text(3, "x")
	for _, tt := range []struct {
		name   string
		method Method
		body   []byte
		code   openai.Code
		param  string
	}{
		{"nothing", Generate, nil, openai.CodeInvalidType, ""},
		{"a short head", Generate, []byte{0, 0, 0}, openai.CodeInvalidType, ""},
		{"two messages", Generate, framed(text, text), openai.CodeInvalidType, ""},
		{"a message that is cut", Generate, framed(text)[:6], openai.CodeInvalidType, ""},
		{"compressed", Generate, append([]byte{1}, framed(text)[1:]...), openai.CodeUnsupportedContentEncoding, ""},
		{"no protobuf", Generate, framed(pb("\xff")), openai.CodeInvalidType, ""},
		{"a text that is no UTF-8", EngineGenerate, framed(pb(nil).text(3, "\xff")), openai.CodeInvalidType, ""},
		{"ids that are cut", EngineGenerate, framed(pb(nil).inner(2, pb(nil).text(2, "\x80"))), openai.CodeInvalidType, ""},
		{"no prompt", Generate, framed(pb(nil).text(2, "m")), openai.CodeMissingRequiredParameter, "prompt"},
		{"no ids for an embedding", EngineEmbed, framed(pb(nil).text(1, "id")), openai.CodeMissingRequiredParameter, "prompt"},
		{"transfer parameters", EngineGenerate, framed(append(text, pb(nil).inner(6, nil)...)), openai.CodeFieldNotAllowed, "kv_transfer_params"},
		{"the same as JSON", EngineGenerate, framed(append(text, pb(nil).text(8, "{}")...)), openai.CodeFieldNotAllowed, "kv_transfer_params"},
		{"a rank", EngineGenerate, framed(append(text, pb(nil).number(9, 0)...)), openai.CodeFieldNotAllowed, "data_parallel_rank"},
		{"transfer parameters of Inference", Generate, framed(append(text, pb(nil).inner(10, pb(nil).inner(3, nil))...)), openai.CodeFieldNotAllowed, "kv_transfer_params"},
	} {
		_, _, err := tt.method.AppendBody(nil, tt.body, false)
		var e *openai.Error
		if !errors.As(err, &e) || e.Code != tt.code || e.Param != tt.param {
			t.Errorf("%s: %v", tt.name, err)
		}
		_, _, err = tt.method.AppendBody(nil, tt.body, true)
		if trusted := tt.code == openai.CodeFieldNotAllowed; (err == nil) != trusted {
			t.Errorf("%s, of a trusted client: %v", tt.name, err)
		}
	}
}

// TestAnswer: the tokens of an answer, in any pieces.
func TestAnswer(t *testing.T) {
	chunk := pb(nil).inner(1, pb(nil).text(1, packed(1)).number(2, 7).number(3, 1).number(4, 3))
	complete := pb(nil).inner(2, pb(nil).text(1, packed(1, 2)).text(2, "stop").number(3, 7).number(4, 2).number(5, 3))
	first := pb(nil).inner(1, pb(nil).number(1, 7)).inner(2, pb(nil).text(2, "a").number(3, 1))
	last := pb(nil).inner(2, pb(nil).number(3, 1).inner(8, pb(nil).number(1, 2).number(2, 2)))
	usage := func(completion, rest string) string {
		return `"usage":{"prompt_tokens":7,"completion_tokens":` + completion + rest + `}`
	}
	const cached = `,"prompt_tokens_details":{"cached_tokens":3}`
	for _, tt := range []struct {
		name     string
		method   Method
		stream   bool
		messages []pb
		status   int
		events   int
		want     string // a part of the end
	}{
		{"a stream of VllmEngine", EngineGenerate, true, []pb{chunk, chunk, complete}, 0, 3, usage("2", cached)},
		{"two sequences", EngineGenerate, true, []pb{chunk, complete, complete}, 0, 3, usage("4", cached)},
		{"chunks alone", EngineGenerate, true, []pb{chunk, chunk}, 0, 2, usage("1", cached)},
		{"a whole answer of VllmEngine", EngineGenerate, false, []pb{complete}, 0, 0, usage("2", cached)},
		{"an embedding", EngineEmbed, false, []pb{pb(nil).float(1, 1).number(2, 7).number(3, 1)}, 0, 0, usage("0", "")},
		{"a stream of Inference", GenerateStream, true, []pb{first, last}, 0, 2, usage("2", "")},
		{"a stream that is cut", GenerateStream, true, []pb{first}, 14, 1, `{"error":{"code":503}}`},
		{"a whole answer of Inference", Generate, false, []pb{pb(nil).inner(1, pb(nil).number(1, 7)).inner(2, pb(nil).number(3, 2).inner(8, pb(nil).number(1, 2)))}, 0, 0, usage("2", "")},
		{"a failure", Generate, false, nil, 13, 0, `{"error":{"code":500}}`},
		{"no protobuf", Generate, false, []pb{pb("\xff")}, 0, 0, `"choices"`},
		{"a long message", GenerateStream, true, []pb{first, pb(nil).text(9, strings.Repeat("x", maxMessage)), last}, 0, 3, usage("2", "")},
	} {
		for _, size := range []int{1, 3, 1 << 30} {
			var a Answer
			a.Reset(tt.method, tt.stream)
			var got []byte
			for rest := framed(tt.messages...); len(rest) > 0; {
				n := min(size, len(rest))
				if len(rest) > 10_000 {
					n = min(len(rest), 1000*n)
				}
				got, rest = a.Feed(got, rest[:n]), rest[n:]
			}
			if n := bytes.Count(got, []byte(contentEvent)); n != tt.events || len(got) != n*len(contentEvent) {
				t.Errorf("%s: %d events, want %d: %s", tt.name, n, tt.events, got)
			}
			end := string(a.End(nil, tt.status))
			if !strings.Contains(end, tt.want) || tt.stream != strings.HasSuffix(end, "data: [DONE]\n\n") || !tt.stream && !json.Valid([]byte(end)) {
				t.Errorf("%s: the end is %s", tt.name, end)
			}
			if cap(a.message) > 4*maxMessage {
				t.Errorf("%s: %d bytes are held", tt.name, cap(a.message))
			}
		}
	}
}

func TestStatus(t *testing.T) {
	for http, want := range map[int]codes.Code{400: codes.InvalidArgument, 401: codes.Unauthenticated, 404: codes.NotFound, 408: codes.DeadlineExceeded, 413: codes.ResourceExhausted,
		415: codes.Unimplemented, 429: codes.ResourceExhausted, 500: codes.Internal, 502: codes.Unavailable, 503: codes.Unavailable, 504: codes.DeadlineExceeded, 418: codes.InvalidArgument, 599: codes.Internal} {
		if got := Status(http); got != want {
			t.Errorf("%d: %s, want %s", http, got, want)
		}
	}
	for status, want := range map[codes.Code]int{codes.InvalidArgument: 400, codes.ResourceExhausted: 429, codes.Unavailable: 503, codes.Unknown: 500, codes.DeadlineExceeded: 504, 99: 500} {
		if got := HTTPStatus(int(status)); got != want {
			t.Errorf("%s: %d, want %d", status, got, want)
		}
	}
}

// FuzzAppendBody: whatever the message is, the form is a body that the scanner accepts or refuses with
// a 4xx, and the prompt is at most eight times as long as the message.
func FuzzAppendBody(f *testing.F) {
	f.Add(uint8(EngineGenerate), framed(pb(nil).inner(2, pb(nil).text(2, packed(1, 300))).inner(4, pb(nil).number(8, 16)).number(5, 1)))
	f.Add(uint8(EngineGenerate), framed(pb(nil).text(3, "x\x00\u2028")))
	f.Add(uint8(EngineEmbed), framed(pb(nil).inner(2, pb(nil).number(2, 1<<40))))
	f.Add(uint8(GenerateStream), framed(pb(nil).text(2, "m").text(3, "x").inner(6, pb(nil).number(1, 1<<63)).inner(8, pb(nil).number(1, 9)).text(15, "l")))
	f.Fuzz(func(t *testing.T, method uint8, body []byte) {
		m := Method(method%4) + 1
		form, stream, err := m.AppendBody(nil, body, true)
		var e *openai.Error
		if err != nil {
			if !errors.As(err, &e) || e.Status/100 != 4 {
				t.Errorf("refused with %v", err)
			}
			return
		}
		var r openai.Request
		if err := openai.ParseRequest(m.API(), form, &r); err != nil {
			if !errors.As(err, &e) || e.Status/100 != 4 || e.Code == openai.CodeInvalidJSON {
				t.Errorf("%s: %v", form, err)
			}
		} else if r.Stream != stream || len(r.PromptRaw()) > 8*len(body) {
			t.Errorf("%s of %d bytes", form, len(body))
		}
	})
}

// FuzzAnswer: an answer in pieces has the same events and the same end as in one piece.
func FuzzAnswer(f *testing.F) {
	f.Add(uint8(EngineGenerate), true, 3, framed(pb(nil).inner(1, pb(nil).number(2, 7)), pb(nil).inner(2, pb(nil).number(3, 7).number(4, 1<<63))))
	f.Add(uint8(GenerateStream), true, 6, framed(pb(nil).inner(1, pb(nil).number(1, 7)), pb(nil).inner(2, pb(nil).number(3, 1).inner(8, pb(nil).number(1, 2)))))
	f.Add(uint8(EngineEmbed), false, 1, framed(pb(nil).number(2, 7)))
	f.Add(uint8(Generate), false, 1, []byte{1, 0xff, 0xff, 0xff, 0xff, 0})
	f.Fuzz(func(t *testing.T, method uint8, stream bool, cut int, body []byte) {
		m := Method(method%4) + 1
		cut = min(max(0, cut), len(body))
		var whole, parts Answer
		whole.Reset(m, stream)
		parts.Reset(m, stream)
		a := whole.Feed(nil, body)
		b := parts.Feed(parts.Feed(nil, body[:cut]), body[cut:])
		if end := whole.End(a, 0); !bytes.Equal(end, parts.End(b, 0)) {
			t.Errorf("%q", end)
		} else if u, ok := openai.ParseUsage(end); !stream && ok && (u.Prompt < 0 || u.Completion < 0) {
			t.Errorf("%s", end)
		}
	})
}
