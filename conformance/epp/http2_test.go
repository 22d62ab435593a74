package epp

import (
	"fmt"
	"testing"
	"time"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	"github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"
)

// others are the tests of h2spec that do not fit a server of gRPC, and why.
var others = map[string]string{
	"generic/2.2":     "wants an answer with a body to GET, which gets 405 without a body",
	"generic/2.3":     "wants an answer with a body to GET, which gets 405 without a body",
	"http2/5.3.1.1":   "RFC 9113, section 5.3.2, ignores priorities",
	"http2/5.3.1.2":   "RFC 9113, section 5.3.2, ignores priorities",
	"http2/6.9.1.3":   "the answer to GET has ended the stream; TestRefusals of grpcserver has the same for a stream of gRPC",
	"http2/8.1.2.6.1": "the answer to GET does not wait for the body, and gRPC has no content-length",
	"http2/8.1.2.6.2": "the answer to GET does not wait for the body, and gRPC has no content-length",
}

// TestHTTP2: h2spec, the conformance tests for HTTP/2, against the picker.
func TestHTTP2(t *testing.T) {
	listen := free(t)
	run(t, "picker", fmt.Sprintf("server.listen = %q\nadmin.listen = %q\n[epp]\nlisten = %q\n[[engine]]\nname = \"e\"\nurl = \"http://127.0.0.1:9\"\nrole = \"both\"\nconnector = \"none\"\n", free(t), free(t), listen))
	c := &config.Config{Host: "127.0.0.1", Port: portOf(listen), Path: "/", Timeout: time.Second, MaxHeaderLen: 4000}
	until(t, "the picker listens", func() bool {
		conn, err := spec.Dial(c)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	ran := 0
	for _, group := range []*spec.TestGroup{generic.Spec(), http2.Spec(), hpack.Spec()} {
		eachCase(group, func(id string, one *spec.TestCase) {
			if others[id] != "" {
				return
			}
			ran++
			t.Run(id, func(t *testing.T) {
				conn, err := spec.Dial(c)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				if err := one.Run(c, conn); err != nil && err != spec.ErrSkipped {
					t.Errorf("%s: %s %v", one.Desc, one.Requirement, err)
				}
			})
		})
	}
	if ran < 130 {
		t.Errorf("h2spec has only %d tests", ran)
	}
}

// eachCase calls do for the tests of a group and of the groups in it.
func eachCase(group *spec.TestGroup, do func(id string, one *spec.TestCase)) {
	for n, one := range group.Tests {
		do(fmt.Sprintf("%s.%d", group.ID(), n+1), one)
	}
	for _, inner := range group.Groups {
		eachCase(inner, do)
	}
}
