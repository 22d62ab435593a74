package loadgen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// The errors of an answer other than a wrong status.
var (
	errInStream = errors.New("error in the stream")
	errCut      = errors.New("stream cut off")
)

// statusError is a status other than 200.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// ask sends a request and reads the answer. It returns the measurements, and the text of
// the answer if the task keeps it.
func (r *run) ask(ctx context.Context, t *task, history []message, scheduled time.Time) (Sample, string) {
	a := answer{began: scheduled, keep: t.keep}
	s := Sample{Run: r.c.Label, Request: t.number, Conversation: t.conversation, Turn: t.turn}
	route, body, err := r.body(t, history)
	sent := time.Now()
	if err == nil {
		s.ID, err = r.exchange(ctx, route, body, t.session, &a)
	}
	s.Failure = reason(err)
	s.Scheduled, s.Late, s.Total = millis(scheduled.Sub(r.began)), millis(sent.Sub(scheduled)), millis(time.Since(scheduled))
	s.First, s.Gaps = millis(a.first), a.gaps
	s.Prompt, s.Cached, s.Output = a.prompt, a.cached, a.completion
	return s, a.text.String()
}

// reason returns a short reason for an error, "" for nil.
func reason(err error) string {
	var status statusError
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return ""
	case errors.Is(err, errInStream), errors.Is(err, errCut), errors.As(err, &status):
		return err.Error()
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "time-out"
	default:
		return "connection failed"
	}
}

// sessionHeader carries the id of a conversation of a trace; pdproxy reads this header.
const sessionHeader = "X-Session-ID"

// exchange sends a body and reads the answer into a. It returns the request id of the
// answer.
func (r *run) exchange(ctx context.Context, route string, body []byte, session string, a *answer) (id string, err error) {
	req, err := r.request(ctx, http.MethodPost, route, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	if session != "" {
		req.Header.Set(sessionHeader, session)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		err = a.read(resp.Body)
	} else {
		err = statusError(resp.StatusCode)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxLine)) // so that the connection can be reused
	return resp.Header.Get("X-Request-Id"), err
}
