// Package accesslog writes one line for each request that has ended, in JSON or in the common log
// format. A line never contains text of a prompt or of an answer.
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

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Stderr is the path that means standard error.
const Stderr = "stderr"

// maxText bounds each text of a line that a client chose, in bytes.
const maxText = 256

// Entry describes one request that has ended. Fields without a value are empty.
// docs/reference/access-log.md lists the fields.
type Entry struct {
	Time      time.Time `json:"time"` // when the request arrived
	RequestID string    `json:"request_id"`
	// ClientAddress is the address of the client, without a port: that of the connection, or the one
	// that a trusted proxy names.
	ClientAddress string `json:"client_address,omitempty"`
	// Client is the name of the client's API key; empty without keys.
	Client string `json:"client,omitempty"`
	Method string `json:"method"`
	// Path is the escaped path, without the query, which may hold a secret.
	Path     string `json:"path"`
	Protocol string `json:"protocol"`
	// RequestedModel is the name in the request.
	RequestedModel string `json:"requested_model,omitempty"`
	// Model is the model that served the request, or would have served it.
	Model string `json:"model,omitempty"`
	// Class is the priority class; empty without [[priority_class]].
	Class   string `json:"class,omitempty"`
	Stream  bool   `json:"stream"`
	Flow    string `json:"flow"`
	Policy  string `json:"policy,omitempty"`
	Prefill string `json:"prefill,omitempty"` // name of the engine
	Decode  string `json:"decode,omitempty"`
	Outcome string `json:"outcome"`
	// Status is the HTTP status of the answer; 499 if the client left before it.
	Status int `json:"status"`
	// ErrorCode is the code of an error that the proxy itself answered; empty otherwise.
	ErrorCode string `json:"error_code,omitempty"`
	Legs      int    `json:"legs"`    // all tries included
	Retries   int    `json:"retries"` // legs that were tried again
	// BytesIn and BytesOut are the bytes of the bodies, without heads, as they were sent.
	BytesIn  int64 `json:"bytes_in"`
	BytesOut int64 `json:"bytes_out"`
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
	// Continuations has, for each time that the stream broke off, "continued" or the reason
	// why no engine went on.
	Continuations []string `json:"continuations,omitempty"`
}

const (
	// flushAfter is how long a line may wait for more lines, so that a busy proxy makes few writes.
	flushAfter = 100 * time.Millisecond
	// flushAt is the number of bytes of lines that do not wait longer.
	flushAt = 32 << 10
)

// Log writes entries to a file or to standard error, at the latest after 100 ms. A process that is
// killed loses the lines of this time. Log is safe for concurrent use, also by several processes
// with the same file: each write has whole lines and goes to the end of the file.
type Log struct {
	On atomic.Bool // Write writes entries; only Reopen sets it

	log    *slog.Logger // reports failed writes
	limit  lograte.Limiter[string]
	mu     sync.Mutex
	path   string        // guarded by mu
	common bool          // lines have the common log format; guarded by mu
	out    io.Writer     // guarded by mu; nil: nothing is written
	closer io.Closer     // guarded by mu; nil for standard error
	lines  bytes.Buffer  // guarded by mu; those that wait
	writer *json.Encoder // into lines; guarded by mu
	timer  *time.Timer   // guarded by mu; calls flush while lines wait; nil: no line has waited yet
}

// Open opens the log at path: "" for none, "stderr" for standard error, else a file, which
// is created with mode 0600 or appended to. format is a value of config.Server.AccessLogFormat. log gets errors of later
// writes, at most one in a minute.
func Open(path, format string, log *slog.Logger) (*Log, error) {
	l := &Log{log: log, limit: lograte.Limiter[string]{Every: time.Minute}}
	l.writer = json.NewEncoder(&l.lines)
	l.writer.SetEscapeHTML(false)
	return l, l.Reopen(path, format)
}

// Reopen closes the file and opens path, so that a program such as logrotate may rename
// the old file before. If path cannot be opened, the log continues with the old file and format.
func (l *Log) Reopen(path, format string) error {
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
	l.flush()
	old := l.closer
	l.path, l.common, l.out, l.closer = path, format == config.AccessLogCommon, out, closer
	l.On.Store(out != nil)
	if old != nil {
		_ = old.Close() // each line has been written, or reported
	}
	return nil
}

// Write writes one entry.
func (l *Log) Write(e *Entry) {
	for _, text := range []*string{&e.RequestID, &e.Method, &e.Path, &e.RequestedModel, &e.Model} {
		*text = cut(*text)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out == nil {
		return
	}
	waiting := l.lines.Len()
	if l.common {
		l.lines.Write(e.appendCommon(l.lines.AvailableBuffer()))
	} else if err := l.writer.Encode(e); err != nil {
		l.failed(err)
	}
	switch {
	case l.lines.Len() >= flushAt:
		l.flush()
	case waiting > 0:
	case l.timer == nil:
		l.timer = time.AfterFunc(flushAfter, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.flush()
		})
	default:
		l.timer.Reset(flushAfter)
	}
}

// flush writes the lines that wait; mu is held.
func (l *Log) flush() {
	if l.lines.Len() == 0 {
		return
	}
	if _, err := l.lines.WriteTo(l.out); err != nil {
		l.failed(err)
	}
	l.lines.Reset()
	if l.timer != nil {
		l.timer.Stop()
	}
}

// failed reports that lines are lost; mu is held.
func (l *Log) failed(err error) {
	if l.limit.Allow(l.path) {
		l.log.Warn("the access log lacks lines", "path", l.path, "error", err)
	}
}

// Close closes the file. Later entries are not written.
func (l *Log) Close() error { return l.Reopen("", "") }

// cut returns the beginning of a text that a client chose.
func cut(s string) string { return s[:min(len(s), maxText)] }
