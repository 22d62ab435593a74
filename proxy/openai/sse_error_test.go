package openai

import "testing"

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
			if h := headOf(Chat, event); h.Verdict != ErrorEvent || h.Status != 429 {
				t.Errorf("first event: verdict %d, status %d", h.Verdict, h.Status)
			}
			var s EventScanner
			if s.Feed([]byte(event)); !s.Failed || s.Status != 429 {
				t.Errorf("stream: failed %v, status %d", s.Failed, s.Status)
			}
		})
	}
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
