package cleanup

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// orphanCalls returns the calls that free n blocks of a prefill.
func orphanCalls(t testing.TB, blocks int) (connector.Connector, []connector.Cleanup) {
	t.Helper()
	conn, _ := connector.ByName("vllm-nixl")
	req := new(openai.Request)
	if err := openai.ParseRequest(openai.Completions, []byte(`{"model":"m","prompt":"hi","max_tokens":5,"stream":true}`), req); err != nil {
		t.Fatal(err)
	}
	prefill := targetNamed("p")
	prefill.Host = "p.test"
	a := connector.Attempt{Request: req, ID: abi.MinDisaggID, LegID: strings.Repeat("0", 32), Prefill: prefill, Decode: targetNamed("d"), Flow: abi.FlowPrefillFirst}
	h, err := conn.ReadPrefill(&a, []byte(strings.Replace(nixlAnswer, "[1]", "["+strings.Repeat("123456,", blocks)+"1]", 1)))
	if err != nil {
		t.Fatal(err)
	}
	calls := conn.Cleanup(&a, connector.Orphan{PrefillSent: true, PrefillDone: true, Handoff: &h})
	if len(calls) == 0 {
		t.Fatal("there is nothing to free")
	}
	return conn, calls
}

// orphanJob returns a job that makes those calls.
func orphanJob(t testing.TB, blocks int) *Job {
	t.Helper()
	conn, calls := orphanCalls(t, blocks)
	j := &Job{RequestID: "r", Connector: conn.Name(), Auth: "Bearer x", Since: time.Now(), Limit: time.Second, Prompt: time.Minute}
	j.Add(calls, targetNamed("p"), targetNamed("d"))
	return j
}

// known has the engines p and d.
func known() *engine.Snapshot {
	s := &engine.Snapshot{Instances: []*engine.Instance{targetNamed("p").Instance, targetNamed("d").Instance}}
	for _, i := range s.Instances {
		i.Load = make([]load.Counter, 1)
	}
	return s
}

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}

const nixlAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,` +
	`"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"p.test","remote_port":5600}}`

// TestJobIsReadBack: the reader decodes a whole encoded job, and no part of one.
func TestJobIsReadBack(t *testing.T) {
	known := known()
	job := orphanJob(t, 3)
	job.calls = append(job.calls, call{
		Cleanup: connector.Cleanup{Phase: abi.Prefill, Until: connector.UntilServed, How: "test", Leg: connector.Leg{Path: "/x"}, Hold: 480 * time.Second},
		target:  job.calls[0].holder, holder: job.calls[0].target,
	})
	b := job.Encode()
	got, err := readComplete(b, known)
	if err != nil {
		t.Fatal(err)
	}
	if got.RequestID != "r" || got.Connector != "vllm-nixl" || got.Auth != "Bearer x" || got.Limit != job.Limit || !got.slow || len(got.calls) != len(job.calls) {
		t.Errorf("%+v", got)
	}
	for i, c := range got.calls {
		want := job.calls[i]
		if c.Phase != want.Phase || c.Until != want.Until || c.AnyTarget != want.AnyTarget || c.Cleanup.Hold != want.Cleanup.Hold || c.How != want.How || c.Leg.Path != want.Leg.Path ||
			string(c.Leg.Body) != string(want.Leg.Body) || !slices.Equal(c.Leg.Header, want.Leg.Header) || !slices.Equal(c.Hosts, want.Hosts) ||
			c.target.Name() != want.target.Name() || c.holder.Name() != want.holder.Name() {
			t.Errorf("call %d: %+v, want %+v", i, c, want)
		}
	}
	for name, b := range map[string][]byte{
		"nothing": nil, "a part": b[:len(b)-1], "no calls": (&Job{RequestID: "r"}).Append(nil),
		"a later condition": fleetpb.AppendFast(nil, &fleetpb.Cleanup{Calls: []*fleetpb.CleanupCall{{Until: 99, Target: "p", Holder: "p"}}}),
	} {
		if _, err := readComplete(b, known); err == nil {
			t.Errorf("%s decodes as a clean-up", name)
		}
	}
	later := append(bytes.Clone(b), 0xf8, 0x3f, 1) // the field 1023
	if again, err := readComplete(later, known); err != nil || len(again.calls) != len(got.calls) {
		t.Errorf("a clean-up with an unknown field: %+v, %v", again, err)
	}
	for _, change := range []func(c *call){
		func(c *call) { c.target = targetNamed("gone") },
		func(c *call) { c.holder.Rank = 7 },
	} {
		job := orphanJob(t, 3)
		change(&job.calls[0])
		if _, err := readComplete(job.Encode(), known); err == nil {
			t.Error("a clean-up of an unknown engine decodes")
		}
	}
	if orphanJob(t, MaxEncoded).Encode() != nil {
		t.Error("a clean-up above the maximum length is encoded")
	}
}

func FuzzReadJob(f *testing.F) {
	f.Add(orphanJob(f, 3).Encode())
	f.Add([]byte{0x32, 0xff})
	known := known()
	f.Fuzz(func(t *testing.T, b []byte) {
		job, err := readComplete(b, known)
		if err != nil {
			return
		}
		if again, err := readComplete(job.Encode(), known); err == nil && len(again.calls) != len(job.calls) {
			t.Errorf("%d calls become %d", len(job.calls), len(again.calls))
		}
	})
}

// BenchmarkEncode measures the encoding of a clean-up for the coordinator, which happens
// once for each request.
func BenchmarkEncode(b *testing.B) {
	job := orphanJob(b, 64)
	b.ReportAllocs()
	for b.Loop() {
		if job.Encode() == nil {
			b.Fatal("too long")
		}
	}
}

// TestJobIsRead: a decoded job goes to the ranks that it names. It does not change when
// the memory of the message is used again.
func TestJobIsRead(t *testing.T) {
	known := known()
	known.Instance("p").Load, known.Instance("d").Load = make([]load.Counter, 3), make([]load.Counter, 2)
	job := orphanJob(t, 3)
	want := &job.calls[0]
	want.target.Rank, want.holder.Rank = 1, 2
	body := string(want.Leg.Body)
	message := job.Encode()
	read, err := readComplete(message, known)
	if err != nil {
		t.Fatal(err)
	}
	copy(message, slices.Repeat([]byte{'#'}, len(message)))
	if got := read.calls[0]; got.target.Rank != 1 || got.holder.Rank != 2 || string(got.Leg.Body) != body {
		t.Errorf("ranks %d and %d, body %s", got.target.Rank, got.holder.Rank, got.Leg.Body)
	}
}
