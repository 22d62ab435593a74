// Package recording writes traces for the replay lab: the times and lengths of requests
// and hashes of their blocks, never text.
//
// The decisions behind this package are in docs/design/request.md.
package recording

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
)

// Recorder writes the requests that arrived as a trace for the replay lab. The hashes
// have a random seed, so that a reader of the trace cannot test whether a given prompt
// is in it. Safe for concurrent use.
type Recorder struct {
	block int // tokens
	seed  kvindex.Hash
	start time.Time

	mu   sync.Mutex
	file *os.File // nil: send takes the lines
	send func(line []byte) bool
	err  error // the first error of writing; guarded by mu
}

// Line is one request of a recording, in the format of Mooncake's traces with the
// conversation added. The zero value is not written.
type Line struct {
	Timestamp    int64    `json:"timestamp"`     // ms since the recording began
	InputLength  int64    `json:"input_length"`  // tokens
	OutputLength int64    `json:"output_length"` // tokens
	HashIDs      []uint64 `json:"hash_ids"`      // one a block, the partial last one included
	Conversation string   `json:"conversation,omitempty"`
}

// New returns a recorder that writes to a new file at path, with blocks of blockTokens
// tokens. An existing recording is renamed: see openFile.
func New(path string, blockTokens int) (*Recorder, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, err
	}
	return &Recorder{block: blockTokens, seed: kvindex.Hash(rand.Uint64()), start: time.Now(), file: f}, nil
}

// NewForwarder returns a recorder that passes each line to send. send must deliver the
// line to Recorder.Add in another process. In this way several processes make one
// recording. send reports whether the line was accepted.
func NewForwarder(blockTokens int, send func(line []byte) bool) *Recorder {
	return &Recorder{block: blockTokens, start: time.UnixMilli(0), send: send}
}

// Add adds a line of a recorder that NewForwarder made. Its hashes get the seed of r.
func (r *Recorder) Add(line []byte) error {
	var l Line
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

// bytesPerToken is the assumed length of a token of text.
const bytesPerToken = 4

// hashes returns the hashes of the blocks of a prompt. ids are the prompt's token ids,
// nil if unknown.
func (r *Recorder) hashes(req *openai.Request, ids []uint32) []uint64 {
	var chain []kvindex.Hash
	seed := r.seed
	if len(ids) == 0 { // no policy has needed them
		ids, _ = req.AppendTokenIDs(nil)
	}
	if len(ids) > 0 {
		chain = kvindex.AppendTokens(nil, seed, ids, r.block)
		if n := len(chain) * r.block; n < len(ids) {
			chain = append(chain, kvindex.AppendTokens(nil, last(chain, seed), ids[n:], len(ids)-n)...)
		}
	} else {
		text, size := req.PromptText(), r.block*bytesPerToken
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

// Note returns the line of a request that arrived at the time start, without the
// lengths. Ids are its token ids, nil where they are unknown; conversation is the
// client's id of the conversation. Note keeps nothing of the request's body.
func (r *Recorder) Note(start time.Time, req *openai.Request, ids []uint32, conversation string) Line {
	l := Line{Timestamp: start.Sub(r.start).Milliseconds(), HashIDs: r.hashes(req, ids)}
	if conversation != "" {
		l.Conversation = fmt.Sprintf("%016x", kvindex.AppendText(nil, r.seed, []byte(conversation), len(conversation))[0])
	}
	return l
}

// Write adds the lengths to a line and writes it. The lengths are those that the engine
// reported. Without a report, the prompt has the estimated length promptTokens, and the
// answer's length is the number of reads of the stream.
func (r *Recorder) Write(l *Line, u openai.Usage, promptTokens, reads int64) {
	if l.HashIDs == nil {
		return
	}
	l.InputLength, l.OutputLength = lengths(u, promptTokens, reads)
	r.add(l)
}

// errUnsent reports that the recording lacks lines.
var errUnsent = errors.New("record request: the recording process is not connected")

// add writes a line.
func (r *Recorder) add(l *Line) {
	text, err := json.Marshal(l)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
	case r.send == nil:
		_, err = r.file.Write(append(text, '\n')) // without a buffer, so that no line is lost if the process is killed
	case !r.send(text):
		err = errUnsent
	}
	if r.err == nil {
		r.err = err
	}
}

// lengths returns the lengths that the engine reported. Without a report the prompt has
// the length prompt, and the answer has one token for each read of the stream.
func lengths(u openai.Usage, prompt, reads int64) (input, output int64) {
	if input = u.Prompt; input <= 0 {
		input = prompt
	}
	if output = u.Completion; output <= 0 {
		output = reads + 1
	}
	return input, output
}

// Close ends the recording. The error is the first error of writing.
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
