package proxy

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Recorder writes what arrived as a trace for the replay lab: times, lengths and
// hashes of blocks, never text. The hashes are seeded by chance, so that nobody
// can find out by them whether a prompt was among those recorded. It is safe for
// concurrent use.
type Recorder struct {
	block int // tokens
	seed  kvindex.Hash
	start time.Time

	mu   sync.Mutex
	file *os.File // nil: send takes the lines
	send func(line []byte) bool
	err  error // the first of writing; guarded by mu
}

// RecordedLine is one request of a recording. Its form is that of Mooncake's
// traces, with the conversation beside it.
type RecordedLine struct {
	Timestamp    int64    `json:"timestamp"`     // ms since the recording began
	InputLength  int64    `json:"input_length"`  // tokens
	OutputLength int64    `json:"output_length"` // tokens
	HashIDs      []uint64 `json:"hash_ids"`      // one a block, the partial last one included
	Conversation string   `json:"conversation,omitempty"`
}

// NewRecorder begins the file at path anew, in blocks of so many tokens. One that is
// there is kept under another name: see openRecording.
func NewRecorder(path string, blockTokens int) (*Recorder, error) {
	f, err := openRecording(path)
	if err != nil {
		return nil, err
	}
	return &Recorder{block: blockTokens, seed: kvindex.Hash(rand.Uint64()), start: time.Now(), file: f}, nil
}

// NewForwarder returns a recorder that hands each line to send, for Add of the
// Recorder of another process: what several of them see is one recording. send
// reports whether the line was taken.
func NewForwarder(blockTokens int, send func(line []byte) bool) *Recorder {
	return &Recorder{block: blockTokens, start: time.UnixMilli(0), send: send}
}

// Add adds a line of a NewForwarder.
func (r *Recorder) Add(line []byte) error {
	var l RecordedLine
	if err := json.Unmarshal(line, &l); err != nil {
		return errors.New("record request: it is not a line of a recording")
	}
	l.Timestamp = max(0, l.Timestamp-r.start.UnixMilli())
	var b [8]byte
	for i, id := range l.HashIDs {
		binary.LittleEndian.PutUint64(b[:], id)
		l.HashIDs[i] = uint64(kvindex.AppendText(nil, r.seed, b[:], len(b))[0])
	}
	if id := []byte(l.Conversation); len(id) > 0 {
		l.Conversation = fmt.Sprintf("%016x", kvindex.AppendText(nil, r.seed, id, len(id))[0])
	}
	r.add(&l)
	return nil
}

// bytesPerToken is what a token of text is taken to measure.
const bytesPerToken = 4

// hashes names the blocks of a request's prompt.
func (r *Recorder) hashes(x *exchange) []uint64 {
	var chain []kvindex.Hash
	seed, ids := r.seed, x.prompt.found
	if len(ids) == 0 { // nobody needed them
		ids, _ = x.req.AppendTokenIDs(nil)
	}
	if len(ids) > 0 {
		chain = kvindex.AppendTokens(nil, seed, ids, r.block)
		if n := len(chain) * r.block; n < len(ids) {
			chain = append(chain, kvindex.AppendTokens(nil, last(chain, seed), ids[n:], len(ids)-n)...)
		}
	} else {
		text, size := x.req.PromptText(), r.block*bytesPerToken
		chain = kvindex.AppendText(nil, seed, text, size)
		if rest := text[len(chain)*size:]; len(rest) > 0 {
			chain = append(chain, kvindex.AppendText(nil, last(chain, seed), rest, len(rest))...)
		}
	}
	names := make([]uint64, len(chain))
	for i, h := range chain {
		names[i] = uint64(h)
	}
	return names
}

func last(chain []kvindex.Hash, seed kvindex.Hash) kvindex.Hash {
	if len(chain) == 0 {
		return seed
	}
	return chain[len(chain)-1]
}

// note keeps what of the request is recorded, while its body is there.
func (r *Recorder) note(x *exchange) {
	x.line = RecordedLine{Timestamp: x.rec.Start.Sub(r.start).Milliseconds(), HashIDs: r.hashes(x)}
	if id := x.s.idSources.Load().ConversationID(&x.req, x.r.Header.Get); id != "" {
		x.line.Conversation = fmt.Sprintf("%016x", kvindex.AppendText(nil, r.seed, []byte(id), len(id))[0])
	}
}

// write adds the line of a request that was answered.
func (r *Recorder) write(x *exchange) {
	if x.line.HashIDs == nil || x.outcome != telemetry.OutcomeOK {
		return
	}
	x.line.InputLength, x.line.OutputLength = lengths(x.usage, x.ask.Request.PromptTokens, x.intervals.Count())
	r.add(&x.line)
}

// errUnsent is what is wrong with a recording of which lines were not taken.
var errUnsent = errors.New("record request: there was nobody to send it to")

// add adds a line.
func (r *Recorder) add(l *RecordedLine) {
	text, err := json.Marshal(l)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
	case r.send == nil:
		_, err = r.file.Write(append(text, '\n')) // at once: what is killed has lost none
	case !r.send(text):
		err = errUnsent
	}
	if r.err == nil {
		r.err = err
	}
}

// lengths are those that the engine reported, else the prompt's estimate and as
// many tokens as the stream was read in.
func lengths(u openai.Usage, prompt, reads int64) (input, output int64) {
	if input = u.Prompt; input <= 0 {
		input = prompt
	}
	if output = u.Completion; output <= 0 {
		output = reads + 1
	}
	return input, output
}

// Close ends the recording. The error is the first that there was.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.file == nil {
		return r.err
	}
	if err := r.file.Close(); r.err == nil {
		r.err = err
	}
	return r.err
}
