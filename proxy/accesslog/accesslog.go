// Package accesslog writes one line of JSON for each request that has ended. A line never
// contains text of a prompt or of an answer.
//
// The decisions behind this package are in docs/design/request.md.
package accesslog

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Stderr is the path that means standard error.
const Stderr = "stderr"

// maxText bounds each text of a line that a client chose, in bytes.
const maxText = 256

// Entry describes one request that has ended. Fields without a value are empty.
type Entry struct {
	Time      time.Time `json:"time"` // when the request arrived
	RequestID string    `json:"request_id"`
	// Client is the name of the client's API key; empty without keys.
	Client string `json:"client,omitempty"`
	Model  string `json:"model,omitempty"`
	// RequestedModel is the name in the request, if it is a name of [[model]].
	RequestedModel string `json:"requested_model,omitempty"`
	Stream         bool   `json:"stream"`
	Flow           string `json:"flow"`
	Policy         string `json:"policy,omitempty"`
	Prefill        string `json:"prefill,omitempty"` // name of the engine
	Decode         string `json:"decode,omitempty"`
	Outcome        string `json:"outcome"`
	// Status is the HTTP status of the answer; 0 if the client left before it.
	Status int `json:"status"`
	Legs   int `json:"legs"` // all tries included
	// The numbers of tokens that the engine reports; 0 if the engine reports none.
	PromptTokens int64 `json:"prompt_tokens"`
	CachedTokens int64 `json:"cached_tokens"`
	OutputTokens int64 `json:"output_tokens"`
	// FirstByteMS is the time until the client got the first event or the whole
	// answer, in milliseconds; null if it got none.
	FirstByteMS *float64 `json:"first_byte_ms"`
	DurationMS  float64  `json:"duration_ms"`
	// Fallbacks are the deviations from the configuration, each as "what:reason".
	Fallbacks []string `json:"fallbacks,omitempty"`
}

// Log writes entries to a file or to standard error. It is safe
// for concurrent use, also by several processes with the same file: each line is one
// write at the end of the file.
type Log struct {
	On atomic.Bool // Write writes entries; only Reopen sets it

	log    *slog.Logger // reports failed writes
	limit  lograte.Limiter[string]
	mu     sync.Mutex
	path   string    // guarded by mu
	out    io.Writer // guarded by mu; nil: nothing is written
	closer io.Closer // guarded by mu; nil for standard error
	buffer bytes.Buffer
}

// Open opens the log at path: "" for none, "stderr" for standard error, else a file, which
// is created with mode 0600 or appended to. log gets errors of later writes, at most one
// in a minute.
func Open(path string, log *slog.Logger) (*Log, error) {
	l := &Log{log: log, limit: lograte.Limiter[string]{Every: time.Minute}}
	return l, l.Reopen(path)
}

// Reopen closes the file and opens path, so that a program such as logrotate may rename
// the old file before. If path cannot be opened, the log continues with the old file.
func (l *Log) Reopen(path string) error {
	var out io.Writer
	var closer io.Closer
	switch path {
	case "":
	case Stderr:
		out = os.Stderr
	default:
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		out, closer = file, file
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.closer
	l.path, l.out, l.closer = path, out, closer
	l.On.Store(out != nil)
	if old != nil {
		_ = old.Close() // all lines were written without a buffer
	}
	return nil
}

// Write writes one entry.
func (l *Log) Write(e *Entry) {
	e.RequestID, e.Model = cut(e.RequestID), cut(e.Model)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out == nil {
		return
	}
	l.buffer.Reset()
	encoder := json.NewEncoder(&l.buffer)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(e)
	if err == nil {
		_, err = l.out.Write(l.buffer.Bytes())
	}
	if err != nil && l.limit.Allow(l.path) {
		l.log.Warn("the access log lacks lines", "path", l.path, "error", err)
	}
}

// Close closes the file. Later entries are not written.
func (l *Log) Close() error { return l.Reopen("") }

// cut returns the beginning of a text that a client chose.
func cut(s string) string { return s[:min(len(s), maxText)] }
