package extproc

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
)

// FuzzAnswer: no message of a picker makes the proxy panic, or gives it lines, endpoints, a body
// or a status that the rest of the proxy does not expect.
func FuzzAnswer(f *testing.F) {
	withMetadata := headers(set("a", "b"))
	withMetadata.DynamicMetadata = destinationMetadata("10.0.0.1:80,10.0.0.2:80")
	replaced := headers(set(HeaderDestination, "10.0.0.1:80"))
	replaced.GetRequestHeaders().Response.Status = service.CommonResponse_CONTINUE_AND_REPLACE
	for _, messages := range [][]*service.ProcessingResponse{
		{headers(set(HeaderDestination, "10.0.0.1:80", HeaderPrefill, "p:1", HeaderEncoders, "e:1", "x", "y")), bodyPart(`{"model":`, false), bodyPart(`"a"}`, true)},
		{withMetadata, bodyPart(`{"model":"b"}`, true)},
		{immediate(429, "full")},
		{immediate(99, "")},
		{replaced},
		{headers(set(":path", "/", "Host", "h", "x y", "z", "a", "b\r\nc: d")), bodyPart("", true)},
		{bodyPart("", true)},
		{{}},
	} {
		var seed []byte
		for _, m := range messages {
			b, err := proto.Marshal(m)
			if err != nil {
				f.Fatal(err)
			}
			seed = append(binary.AppendUvarint(seed, uint64(len(b))), b...)
		}
		f.Add(seed)
	}
	original := []byte(`{"model":"a"}`)
	f.Fuzz(func(t *testing.T, data []byte) {
		const most = 100
		a := answer{original: bytes.Clone(original), most: most}
		over := false
		for !over && len(data) > 0 {
			n, size := binary.Uvarint(data)
			if size <= 0 || n > uint64(len(data)-size) {
				break
			}
			var m service.ProcessingResponse
			if proto.Unmarshal(data[size:size+int(n)], &m) != nil {
				break
			}
			data = data[size+int(n):]
			var err error
			if over, err = a.take(&m); err != nil {
				break
			}
		}
		if !bytes.Equal(a.original, original) {
			t.Fatal("the body of the client has changed")
		}
		d := &a.decision
		if len(d.Body) > most || d.Changed && !over || !d.Changed && d.Body != nil {
			t.Fatalf("the body %q, changed %t, over %t", d.Body, d.Changed, over)
		}
		for _, list := range [][]string{d.Destinations, d.Prefill, d.Encoders} {
			if len(list) > maxEndpoints {
				t.Fatalf("%d endpoints", len(list))
			}
			for _, one := range list {
				if one == "" || len(one) > maxEndpoint || strings.TrimSpace(one) != one {
					t.Fatalf("endpoint %q", one)
				}
			}
		}
		checkLines(t, &d.Header)
		if r := d.Refusal; r != nil {
			if r.Status < 200 || r.Status > 599 {
				t.Fatalf("status %d", r.Status)
			}
			checkLines(t, &r.Header)
		}
	})
}

// checkLines fails the test if a line could change more than itself.
func checkLines(t *testing.T, m *HeaderMutation) {
	for _, name := range m.Remove {
		checkName(t, name)
	}
	for _, l := range m.Set {
		checkName(t, l.Name)
		if strings.ContainsAny(l.Value, "\r\n\x00") {
			t.Fatalf("value %q", l.Value)
		}
	}
}

func checkName(t *testing.T, name string) {
	if name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, ": \r\n\x00") || name == "host" || name == "content-length" || name == HeaderDestination {
		t.Fatalf("name %q", name)
	}
}
