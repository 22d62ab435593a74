package downstream

import (
	"fmt"
	"net/http"
	"sort"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// fieldText lists header lines in a fixed order.
func fieldText(fields []upstream.Field) string {
	var list []string
	for _, f := range fields {
		list = append(list, fmt.Sprintf("%s=%s", f.Name, f.Value))
	}
	sort.Strings(list)
	return strings.Join(list, " ")
}

func TestAppendFields(t *testing.T) {
	const plain = "Content-Type=application/json"
	tests := []struct {
		name    string
		header  http.Header
		keepKey bool
		trust   bool
		want    string
	}{
		{"nothing", http.Header{}, false, false, plain},
		{"keeps end-to-end lines", http.Header{"X-A": {"1", "2"}, "User-Agent": {"u"}, "Traceparent": {"t"}}, false, false,
			plain + " Traceparent=t User-Agent=u X-A=1 X-A=2"},
		{"drops hop-by-hop lines", http.Header{
			"Connection": {"keep-alive"}, "Keep-Alive": {"timeout=5"}, "Proxy-Connection": {"x"}, "Proxy-Authenticate": {"x"},
			"Proxy-Authorization": {"x"}, "Te": {"trailers"}, "Trailer": {"X"}, "Transfer-Encoding": {"chunked"},
			"Upgrade": {"h2c"}, "Content-Length": {"3"}}, true, true, plain},
		{"drops lines that Connection names", http.Header{"Connection": {"close, x-a ,X-B", "x-c"}, "X-A": {"1"}, "X-B": {"2"}, "X-C": {"3"}, "X-D": {"4"}}, false, false,
			plain + " X-D=4"},
		{"drops lines that the proxy writes", http.Header{"Host": {"h"}, "Expect": {"100-continue"}, "Accept-Encoding": {"gzip"}, "X-Request-Id": {"r"}, "Alt-Used": {"a"}}, true, true, plain},
		{"sets the content type JSON", http.Header{"Content-Type": {"text/plain"}}, true, true, plain},
		{"keeps keys if no key is required", http.Header{"Authorization": {"Bearer k"}, "X-Api-Key": {"k"}}, true, false,
			"Authorization=Bearer k " + plain + " X-Api-Key=k"},
		{"drops keys if a key is required", http.Header{"Authorization": {"Bearer k"}, "X-Api-Key": {"k"}}, false, true, plain},
		{"PD lines end", http.Header{"X-Data-Parallel-Rank": {"1"}, "X-Override-Model": {"m"}, "X-Prefiller-Host-Port": {"h"}, "X-Trtllm-A": {"b"}}, true, false, plain},
		{"drops PD lines in any spelling", http.Header{"X_data_parallel_rank": {"1"}, "X-Override_rid": {"m"}, "Kv_transfer_params": {"{}"}, "X-Bootstrap-Room": {"1"}, "Rid": {"x"}, "X_request_id": {"y"}}, true, false, plain},
		{"drops lines of the connection in any spelling", http.Header{"Transfer_encoding": {"chunked"}, "Content_length": {"3"}, "Content_type": {"x"}}, true, true, plain},
		{"drops keys in any spelling", http.Header{"X_api_key": {"k"}}, false, true, plain},
		{"drops lines of the proxy", http.Header{"X-Pdproxy-Prefill": {"p"}, "X_pdproxy_decode": {"d"}, "X-Pdprox": {"x"}}, true, true, plain + " X-Pdprox=x"},
		{"an underscore stays", http.Header{"X_a": {"1"}}, true, false, plain + " X_a=1"},
		{"drops lines that Connection names in any spelling", http.Header{"Connection": {"x_a"}, "X-A": {"1"}, "X_a": {"2"}}, true, false, plain},
		{"keeps PD lines of a trusted client", http.Header{"X-Data-Parallel-Rank": {"1"}, "X-Override-Model": {"m"}}, true, true,
			plain + " X-Data-Parallel-Rank=1 X-Override-Model=m"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Client{r: &http.Request{Header: tt.header}}
			if got := fieldText(c.AppendFields(nil, "application/json", tt.keepKey, tt.trust)); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestWithout(t *testing.T) {
	fields := []upstream.Field{{Name: "traceparent", Value: "1"}, {Name: "A", Value: "2"}, {Name: "TraceParent", Value: "3"}}
	if got := fieldText(Without(fields, "Traceparent")); got != "A=2" {
		t.Errorf("left over: %s", got)
	}
}

func TestCopyHeader(t *testing.T) {
	resp := &upstream.Response{Header: []upstream.Field{
		{Name: "content-type", Value: "text/event-stream"}, {Name: "X-A", Value: "1"}, {Name: "x-a", Value: "2"},
		{Name: "Connection", Value: "close"}, {Name: "transfer-encoding", Value: "chunked"}, {Name: "Content-Length", Value: "9"},
		{Name: "Keep-Alive", Value: "x"}, {Name: "Date", Value: "today"}, {Name: "X-Request-Id", Value: "theirs"}, {Name: "Alt-Svc", Value: "h3"},
		{Name: "connection", Value: "X-Secret , x_other"}, {Name: "x-secret", Value: "1"}, {Name: "X-Other", Value: "1"},
		{Name: "x-pdproxy-prefill", Value: "forged"}, {Name: "X_Pdproxy_Decode", Value: "forged"}, {Name: "X-Pdproxy-New", Value: "forged"},
	}}
	got := http.Header{"X-Request-Id": {"ours"}}
	CopyHeader(got, resp)
	want := http.Header{"X-Request-Id": {"ours"}, "Content-Type": {"text/event-stream"}, "X-A": {"1", "2"}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestRequestID(t *testing.T) {
	for id, kept := range map[string]bool{
		"": false, "abc-123": true, strings.Repeat("a", 128): true, strings.Repeat("a", 129): false,
		"with space": false, "line\nbreak": false, "umläut": false, "tab\t": false, "~!": true,
	} {
		r := &http.Request{Header: http.Header{}}
		r.Header.Set("X-Request-Id", id)
		got := RequestID(r)
		if (got == id) != kept || !kept && len(got) != 32 {
			t.Errorf("%q became %q", id, got)
		}
	}
}
