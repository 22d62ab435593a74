package journal

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Record has the events of one request. It is the source of the request's explanation,
// its spans and its row of /perf_metrics. Its memory is reused.
type Record struct {
	RequestID string            // set by Open
	Start     time.Time         // when the request arrived; set by Open
	Requested string            // the client's name for the model, if that is a name of [[model]]; else ""
	Model     string            // that serves the request; set by Described
	Stream    bool              // the client requested a stream; set by Described
	DisaggID  uint64            // this and the next two are those of the last placement
	Flow      abi.Flow          //
	Policy    string            //
	FirstByte time.Time         // when the client got the first event or the whole answer; set by AnswerBegins
	Usage     openai.Usage      // the tokens that the engine reports
	Status    int               // that the client gets
	ErrorCode openai.Code       // of the error that the proxy answers instead; CodeNone: the answer is another one
	Outcome   telemetry.Outcome // may be replaced until End

	coordination    string            // the sidecar's policy; "" on a proxy that is no sidecar
	pick            *Pick             // of an ext_proc picker; nil: none was asked
	turn            conversation.Turn // zero: no policy needs conversations
	placed          time.Time         // time of the first placement
	ended           time.Time
	prefill, decode string // engine names of the last placement
	candidates      []candidate
	incomplete      bool      // the candidates are no longer kept
	scored          bool      // the policy gave the candidates scores
	scale           abi.Scale // of the scores
	scorings        []scoring
	scores          []abi.RowScore // of scorings, if they are kept
	units           []abi.Scale    // of the scorers of scorings
	notes           []string       // notes of policies, then notes of filters
	rows            []*Leg         // of the legs; the caller of BeginLeg owns their memory
	fallbacks       []coordinator.Fallback
	seams           []seam // of the stream
}

// seam is a place at which a stream broke off.
type seam struct {
	at              time.Time
	tokens          int           // of the answer before it
	gap             time.Duration // between two events of the client
	prefill, decode string        // engine names of the placement that continues it
	result          string        // as in pdproxy_continuations_total; the three before it are only of resultContinued
}

// resultContinued is the result of a stream that another placement continues.
const resultContinued = "continued"

// candidate is one target that the last placement could choose.
type candidate struct {
	engine string
	facts  abi.Candidate
}

// Pick is the choice of an ext_proc picker.
type Pick struct {
	Result       string // as in pdproxy_picker_requests_total
	Took         time.Duration
	Destinations []string // as the picker names them
	Prefill      []string
	Encoders     []string
	BodyChanged  bool
}

// Leg is the row of one leg. The goroutine that runs the leg owns it until the leg has
// ended; the journal writes it.
type Leg struct {
	Phase abi.Phase // does not change
	Start time.Time // does not change

	id        string // the leg's request id as the engine got it; "" if the protocol has none
	engine    string
	rank      int
	attempt   int
	head      time.Time
	firstByte time.Time
	ended     time.Time
	status    int
	reason    string           // why it failed, a label of metrics; "" for success
	cause     string           // the text of the error; "": reason says all
	failed    bool             // by the engine's or the network's fault
	timing    connector.Timing // the engine's report of the leg's timing
}

// FirstByte returns when the answer of the leg began; zero: it has not.
func (l *Leg) FirstByte() time.Time { return l.firstByte }

// Timing returns the timing of the proxy and of the engines of the last legs, under the
// names that TensorRT-LLM uses.
func (j *Journal) Timing() (all connector.Timing) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var prefill, decode *Leg
	first := time.Time{}
	for _, l := range j.rows {
		if first.IsZero() || l.Start.Before(first) {
			first = l.Start
		}
		if l.Phase == abi.Prefill {
			prefill = l
		} else {
			decode = l
		}
	}
	if !first.IsZero() {
		all.AddDuration("disagg_queue", millis(first.Sub(j.Start)))
	}
	if !j.FirstByte.IsZero() {
		all.AddDuration("disagg_ttft", millis(j.FirstByte.Sub(j.Start)))
	}
	if prefill != nil {
		all.Join("ctx", prefill.timing)
	}
	if decode != nil {
		all.Join("gen", decode.timing)
	}
	return all
}

// Finish returns the facts of a completed request for the finish hook. It combines asked,
// the facts that the coordinator got, with the record.
func (j *Journal) Finish(asked abi.RequestFacts) abi.FinishFacts {
	f := abi.FinishFacts{
		Request: asked, Outcome: abi.Outcome(j.Outcome), Flow: j.Flow, Status: uint32(j.Status),
		ID: j.DisaggID, FirstByte: -1, Total: j.ended.Sub(j.Start).Microseconds(), Attempts: uint32(len(j.rows)),
		PromptTokens: -1, CachedTokens: -1, OutputTokens: -1,
	}
	f.Request.Model, f.Request.Prompt = j.Model, "" // the memory of the body may be freed
	if d := j.last.Decode; !d.IsZero() {
		f.Decode, f.DecodeRank = d.ID, int32(d.Rank)
		f.Placed = j.placed.Sub(j.Start).Microseconds()
	}
	if p := j.last.Prefill; !p.IsZero() {
		f.Prefill, f.PrefillRank = p.ID, int32(p.Rank)
	}
	if !j.FirstByte.IsZero() {
		f.FirstByte = j.FirstByte.Sub(j.Start).Microseconds()
	}
	if j.Usage != (openai.Usage{}) { // all zero: the engine reported none
		f.PromptTokens, f.CachedTokens, f.OutputTokens = j.Usage.Prompt, j.Usage.Cached, j.Usage.Completion
	}
	if f.Outcome != abi.OutcomeOK {
		for _, l := range j.rows {
			if l.reason != "" && l.reason != "cancelled" {
				f.Failed, f.Reason = l.Phase, l.reason
			}
		}
	}
	return f
}
