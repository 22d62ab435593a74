package abi

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestParseHeaders: a module declares a bounded list of names, none of which carries
// credentials.
func TestParseHeaders(t *testing.T) {
	many := ""
	for i := range MaxHeaders {
		many += fmt.Sprintf("x-%d\n", i)
	}
	for _, tt := range []struct {
		text string
		want []string
		err  string
	}{
		{"", nil, ""},
		{"X-Tier\n\n x-region \r\nx_max_tokens", []string{"x-tier", "x-region", "x_max_tokens"}, ""},
		{strings.Repeat("a", MaxHeaderName), []string{strings.Repeat("a", MaxHeaderName)}, ""},
		{strings.Repeat("a", MaxHeaderName+1), nil, "at most 64 bytes"},
		{many, strings.Fields(many), ""},
		{many + "y", nil, "at most 8 headers"},
		{"x-a\nX-A", nil, `"x-a" is declared twice`},
		{"x a", nil, "is not the name of a header"},
		{":path", nil, "is not the name of a header"},
		{"x-\u00e9", nil, "is not the name of a header"},
		{"Authorization", nil, `"authorization" carries credentials`},
		{"proxy-authorization", nil, "carries credentials"},
		{"x-ok\nCookie", nil, `"cookie" carries credentials`},
		{"set-cookie2", nil, "carries credentials"},
		{"X-Api-Key", nil, "carries credentials"},
		{"x_api_key", nil, "carries credentials"},
		{"api-key", nil, "carries credentials"},
		{"apikey", nil, "carries credentials"},
		{"x-goog-api-key", nil, "carries credentials"},
		{"x-amz-security-token", nil, "carries credentials"},
		{"X_Auth_Token", nil, "carries credentials"},
		{"sec-websocket-protocol", nil, "carries credentials"},
		{"x-goog-iap-jwt-assertion", nil, "carries credentials"},
		{"x-forwarded-client-cert", nil, "carries credentials"},
		{"x-client-secret", nil, "carries credentials"},
		{"Ocp-Apim-Subscription-Key", nil, "carries credentials"},
		{"x-auth-key", nil, "carries credentials"},
		{"helicone-auth", nil, "carries credentials"},
		{"dpop", nil, "carries credentials"},
		{"idempotency-key\nx-routing-key\nx-author", []string{"idempotency-key", "x-routing-key", "x-author"}, ""},
	} {
		got, err := ParseHeaders(tt.text)
		if !slices.Equal(got, tt.want) || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q: got %q, %v, want %q, %s", tt.text, got, err, tt.want, tt.err)
		}
	}
}

func FuzzParseHeaders(f *testing.F) {
	f.Add("x-tier\nX-Region\n")
	f.Add("authorization")
	f.Add("x-a\nx-a")
	f.Fuzz(func(t *testing.T, text string) {
		names, err := ParseHeaders(text)
		if err != nil {
			return
		}
		if again, err := ParseHeaders(strings.Join(names, "\n")); err != nil || !slices.Equal(again, names) || len(names) > MaxHeaders {
			t.Errorf("%q: %q reads as %q, %v", text, names, again, err)
		}
	})
}

// told returns a request with some headers.
func told() RequestFacts {
	r := identified()
	r.Headers = []RequestHeader{{Name: "x-other", Value: "not declared", Present: true}, {Name: "x-b", Value: "gold", Present: true, Cut: true}, {Name: "x-c", Present: true}}
	return r
}

// TestHeaders: the frames of all hooks have the declared headers, in the order of their
// names, with and without the traits. An absent header differs from an empty one. Frames
// without declared headers have the bytes that they have for a request without headers.
func TestHeaders(t *testing.T) {
	want := []RequestHeader{{}, {Value: "gold", Present: true, Cut: true}, {Present: true}}
	var planned PlanFacts
	var placed PlaceFacts
	var left LegFacts
	var finished FinishFacts
	var spare []Candidate
	place := detailed(3)
	place.Pairs, place.Predictions = []Pair{{Decode: 1}}, make([]Prediction, 3)
	for _, tt := range []struct {
		name   string
		append func(h *Header, r RequestFacts) ([]byte, int)
		decode func(b []byte) (*RequestFacts, bool)
	}{
		{"plan", func(h *Header, r RequestFacts) ([]byte, int) {
			f := &PlanFacts{Request: r, BothTargets: 3}
			return AppendPlan(nil, h, f), f.FrameSize(&h.Layout)
		}, func(b []byte) (*RequestFacts, bool) { return &planned.Request, DecodePlan(b, &planned) }},
		{"place", func(h *Header, r RequestFacts) ([]byte, int) {
			place.Request = r
			return AppendPlace(nil, h, place), place.FrameSize(&h.Layout)
		}, func(b []byte) (*RequestFacts, bool) { return &placed.Request, DecodePlace(b, &placed, &spare) }},
		{"leg", func(h *Header, r RequestFacts) ([]byte, int) {
			f := legFacts()
			f.Request = r
			return AppendLeg(nil, h, f), f.FrameSize(&h.Layout)
		}, func(b []byte) (*RequestFacts, bool) { return &left.Request, DecodeLeg(b, &left) }},
		{"finish", func(h *Header, r RequestFacts) ([]byte, int) {
			f := finishFacts()
			f.Request = r
			return AppendFinish(nil, h, f), f.FrameSize(&h.Layout)
		}, func(b []byte) (*RequestFacts, bool) { return &finished.Request, DecodeFinish(b, &finished) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, traits := range []bool{false, true} {
				h := header
				h.Layout = Layout{Extended: true, Traits: traits}
				with, _ := tt.append(&h, told())
				without, _ := tt.append(&h, identified())
				if !bytes.Equal(with, without) {
					t.Error("headers change a frame without them")
				}
				h.Headers = []string{"x-a", "x-b", "x-c"}
				r := told()
				r.Adapter = "sql"
				frame, size := tt.append(&h, r)
				if len(frame) != size {
					t.Errorf("frame of %d bytes, FrameSize = %d", len(frame), size)
				}
				got, ok := tt.decode(frame)
				if !ok || !slices.Equal(got.Headers, want) || (got.Adapter == "sql") != traits || got.Model != r.Model || got.Identity != r.Identity {
					t.Errorf("traits %t: %v, %+v", traits, ok, got)
				}
				if n := testing.AllocsPerRun(10, func() { tt.decode(frame) }); n != 0 {
					t.Errorf("got %v allocations", n)
				}
				if got, ok = tt.decode(without); !ok || len(got.Headers) != 0 {
					t.Errorf("a frame without headers after one with headers: %v, %+v", ok, got.Headers)
				}
				facts := frame[HeaderSize:]
				at := int(get32(frame, offFacts)) - headersSize + headersTable
				for field, value := range map[int]uint32{at: 1 << 31, at + 4: 1 << 31, at + 8: headerRow - 1} {
					old := get32(facts, field)
					put32(facts, field, value)
					if _, ok := tt.decode(frame); ok {
						t.Errorf("a table outside the frame is accepted: %d at %d", value, field)
					}
					put32(facts, field, old)
				}
				row := frame[get32(facts, at):]
				put32(row, headerRow+headerValue, 1<<31)
				if _, ok := tt.decode(frame); ok {
					t.Error("a value outside the frame is accepted")
				}
				if int(get32(facts, at))%8 != 0 {
					t.Error("the table is not at a multiple of 8")
				}
			}
		})
	}
}

// TestHeaderOf: Header distinguishes an absent header from an empty one.
func TestHeaderOf(t *testing.T) {
	r := told()
	type answer struct {
		value string
		ok    bool
	}
	for name, want := range map[string]answer{"x-b": {"gold", true}, "x-c": {"", true}, "x-a": {}} {
		if value, ok := r.Header(name); !reflect.DeepEqual(answer{value, ok}, want) {
			t.Errorf("%s: %q, %v", name, value, ok)
		}
	}
}
