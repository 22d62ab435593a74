package openai

import "testing"

func TestReadFirstEvent(t *testing.T) {
	const comment = ": ping\n\n"
	for _, tt := range []struct {
		name, text string
		verdict    Verdict
		data       string
		status     int
		open       int // number of bytes after the end of the verdict
	}{
		{"nothing", "", NeedMore, "", 0, 0},
		{"half an event", "data: {\"a\":1}\n", NeedMore, "", 0, 14},
		{"comment", comment, CommentOnly, "", 0, 0},
		{"comment and half an event", comment + "data: {", CommentOnly, "", 0, 7},
		{"two comments, CRLF", ": a\r\n\r\n: b\r\n\r\n", CommentOnly, "", 0, 0},
		{"event without data", "event: ping\nid: 3\n\n", CommentOnly, "", 0, 0},
		{"data", "data: {\"a\":1}\n\n", DataEvent, `{"a":1}`, 0, 0},
		{"data behind a comment", comment + "data: {\"a\":1}\n\ndata: {\"error\":{}}\n\n", DataEvent, `{"a":1}`, 0, 20},
		{"done at once", "data: [DONE]\n\n", DataEvent, "[DONE]", 0, 0},
		{"data and type", "event: message_start\r\ndata: {\"type\":\"message_start\"}\r\n\r\n", DataEvent, `{"type":"message_start"}`, 0, 0},
		{"two lines of data", "data: {\ndata: }\n\n", DataEvent, "{", 0, 0},
		{"vLLM error", "data: {\"error\": {\"message\":\"x\",\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n",
			ErrorEvent, `{"error": {"message":"x","type":"InternalServerError","code":500}}`, 500, 14},
		{"code in words", "data: {\"error\":{\"code\":\"x\",\"type\":\"rate_limit_error\"}}\n\n", ErrorEvent, `{"error":{"code":"x","type":"rate_limit_error"}}`, 429, 0},
		{"code in quotes", "data: {\"error\":{\"code\":\"404\"}}\n\n", ErrorEvent, `{"error":{"code":"404"}}`, 404, 0},
		{"code that is no status", "data: {\"error\":{\"code\":40003}}\n\n", ErrorEvent, `{"error":{"code":40003}}`, 500, 0},
		{"error as text", "data: {\"error\":\"x\"}\n\n", ErrorEvent, `{"error":"x"}`, 500, 0},
		{"SGLang flat error", "data: {\"object\":\"error\",\"message\":\"x\",\"code\":400}\n\n", ErrorEvent, `{"object":"error","message":"x","code":400}`, 400, 0},
		{"typed error", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"not_found_error\"}}\n\n", ErrorEvent, `{"type":"error","error":{"type":"not_found_error"}}`, 404, 0},
		{"error type alone", "event: error\n\n", ErrorEvent, "", 500, 0},
		{"response.failed", "event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n", ErrorEvent, `{"type":"response.failed"}`, 500, 0},
		{"response announced", "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n",
			CommentOnly, "", 0, 0},
		{"response announced and begun", "event: response.created\ndata: {}\n\nevent: response.output_item.added\ndata: {\"a\":1}\n\n", DataEvent, `{"a":1}`, 0, 0},
		{"response announced and failed", "event: response.created\ndata: {}\n\nevent: response.failed\ndata: {\"a\":1}\n\n", ErrorEvent, `{"a":1}`, 500, 0},
		{"ping of messages", "event: ping\ndata: {\"type\":\"ping\"}\n\n", CommentOnly, "", 0, 0},
		{"abort with a status", "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n",
			ErrorEvent, `{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503}}}`, 503, 0},
		{"abort", "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n", ErrorEvent, `{"choices":[{"finish_reason":"abort"}]}`, 500, 0},
		{"finished at once", "data: {\"choices\":[{\"finish_reason\":{\"type\":\"length\"}}]}\n\n", DataEvent, `{"choices":[{"finish_reason":{"type":"length"}}]}`, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := ReadFirstEvent([]byte(tt.text))
			if f.Verdict != tt.verdict || string(f.Data) != tt.data || f.Status != tt.status || len(tt.text)-f.End != tt.open {
				t.Errorf("verdict %d, data %q, status %d, %d bytes after the verdict", f.Verdict, f.Data, f.Status, len(tt.text)-f.End)
			}
			// No shorter prefix of the text may have a different verdict.
			for n := range f.End {
				if g := ReadFirstEvent([]byte(tt.text[:n])); g.Verdict > CommentOnly || g.End > n {
					t.Fatalf("the first %d bytes: %+v", n, g)
				}
			}
		})
	}
}

func TestErrorStatus(t *testing.T) {
	for kind, want := range map[string]int{
		"BadRequestError": 400, "invalid_request_error": 400, "ValueError": 400,
		"authentication_error": 401, "permission_error": 403, "NotFoundError": 404, "RateLimitError": 429,
		"SERVICE_UNAVAILABLE": 503, "overloaded_error": 503, "InternalServerError": 500, "": 500, "new": 500,
	} {
		if got := errorStatus([]byte(`{"type":"` + kind + `"}`)); got != want {
			t.Errorf("%s: errorStatus = %d, want %d", kind, got, want)
		}
	}
}

// TestFirstStatusCounts: a type without a status does not replace the status that the
// error names, for any order of the two.
func TestFirstStatusCounts(t *testing.T) {
	for name, event := range map[string]string{
		"data, then the type":    "data: {\"error\":{\"code\":429}}\nevent: error\n\n",
		"the type, then data":    "event: error\ndata: {\"error\":{\"code\":429}}\n\n",
		"a second status":        "data: {\"error\":{\"code\":429}}\ndata: {\"error\":{\"code\":503}}\n\n",
		"a second data, a guess": "data: {\"error\":{\"code\":429}}\ndata: {\"error\":{}}\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			if f := ReadFirstEvent([]byte(event)); f.Verdict != ErrorEvent || f.Status != 429 {
				t.Errorf("first event: verdict %d, status %d", f.Verdict, f.Status)
			}
			var s EventScanner
			if s.Feed([]byte(event)); !s.Failed || s.Status != 429 {
				t.Errorf("stream: failed %v, status %d", s.Failed, s.Status)
			}
		})
	}
}

func FuzzFirstEvent(f *testing.F) {
	for _, tt := range streams {
		f.Add([]byte(tt.text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		first := ReadFirstEvent(b)
		if first.End < 0 || first.End > len(b) || (first.Status != 0) != (first.Verdict == ErrorEvent) {
			t.Fatalf("ReadFirstEvent(b) = %+v", first)
		}
		// The scanner of the relay must have the same verdict for the same bytes.
		var s EventScanner
		s.Feed(b[:first.End])
		if bad := s.Failed || s.Aborted; bad && first.Verdict != ErrorEvent || first.Verdict == DataEvent && s.Events == 0 && !s.Done {
			t.Fatalf("%+v, but %+v", first, s)
		}
	})
}

func TestBeforeAbort(t *testing.T) {
	const (
		data  = "data: {\"choices\":[{\"text\":\"finish_reason\",\"finish_reason\":null}]}\n\n"
		abort = "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\r\n\r\n"
		typed = "event: response.completed\ndata: {\"metadata\":{\"finish_reason\":\"abort\"}}\n\n"
	)
	for _, tt := range [][2]string{
		{"", ""}, {data, data}, {abort, ""}, {data + abort + data, data}, {data + data + abort + abort, data + data},
		{": x\n\n" + data + abort, ": x\n\n" + data}, {typed + abort, typed}, {data + "data: {\"finish_reason\":\"abort\"}", data}, {data + "data: {", data + "data: {"},
	} {
		if got := string(BeforeAbort([]byte(tt[0]))); got != tt[1] {
			t.Errorf("%q: got %q, want %q", tt[0], got, tt[1])
		}
	}
}
