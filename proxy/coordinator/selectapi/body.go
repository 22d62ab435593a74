package selectapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/abi"
)

// encoding is the encoding of a body.
type encoding uint8

const (
	inJSON encoding = iota
	inMsgpack
)

// The media types of bodies.
const (
	typeJSON    = "application/json"
	typeMsgpack = "application/msgpack"
)

// spoken returns the encoding of a request's body. It uses headerMsgpack and the
// Content-Type, otherwise the first byte of the body. No JSON text begins with a byte of
// 0x80 or above; a MessagePack map does.
func spoken(r *http.Request, body []byte) encoding {
	media := r.Header.Get("Content-Type")
	switch {
	case r.Header.Get(headerMsgpack) == "1", strings.Contains(media, "msgpack"):
		return inMsgpack
	case strings.Contains(media, "json"), len(body) == 0, body[0] < 0x80:
		return inJSON
	}
	return inMsgpack
}

// wanted returns the encoding for the answer to a request without a body. It uses the
// Accept header. TensorRT-LLM's worker accepts any type but reads only MessagePack.
// wanted recognizes the worker by aiohttp in its User-Agent.
func wanted(r *http.Request) encoding {
	accept := r.Header.Get("Accept")
	switch {
	case strings.Contains(accept, "msgpack"):
		return inMsgpack
	case strings.Contains(accept, "json"):
		return inJSON
	case strings.Contains(r.Header.Get("User-Agent"), "aiohttp"):
		return inMsgpack
	}
	return inJSON
}

// answer sends v, a value for encoding/json, in the encoding e.
func answer(w http.ResponseWriter, e encoding, status int, v any) {
	var text bytes.Buffer
	j := json.NewEncoder(&text)
	j.SetEscapeHTML(false)
	if err := j.Encode(v); err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	body, media := bytes.TrimSuffix(text.Bytes(), []byte("\n")), typeJSON
	if e == inMsgpack {
		packed, err := appendMsgpack(nil, body)
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		body, media = packed, typeMsgpack
	}
	w.Header().Set("Content-Type", media)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the caller has hung up
}

// refuse answers with an error in the form of TensorRT-LLM's coordinator.
func refuse(w http.ResponseWriter, e encoding, status int, text string) {
	answer(w, e, status, map[string]string{"error": text})
}

// fields has the members of a request's body as MessagePack values. Nil: the member is
// missing.
type fields struct {
	role, key, reqID, handle, exclude, success []byte
}

var (
	errJSON    = errors.New("invalid JSON body")
	errMsgpack = errors.New("invalid MessagePack body")
)

// parse reads the body in m. It converts JSON to MessagePack first, so that one reader handles
// both. The fields are valid until m is released.
func parse(m *held, e encoding) (f fields, err error) {
	body, bad := m.bytes(), errMsgpack
	if e == inJSON {
		bad = errJSON
		ok := false
		if body, ok, err = m.pack(); err != nil {
			return f, err
		} else if !ok {
			return f, bad
		}
	}
	if msgp.NextType(body) != msgp.MapType {
		if rest, err := msgp.Skip(body); err != nil || len(rest) > 0 {
			return f, bad
		}
		return f, nil // the callers report the missing fields
	}
	n, rest, err := msgp.ReadMapHeaderBytes(body)
	for ; err == nil && n > 0; n-- {
		rest, err = f.member(rest)
	}
	if err != nil || len(rest) > 0 {
		return fields{}, bad
	}
	return f, nil
}

// member reads one member of the map.
func (f *fields) member(b []byte) (rest []byte, err error) {
	name, value, err := msgp.ReadStringZC(b)
	if err != nil {
		if value, err = msgp.Skip(b); err != nil { // an unknown key
			return nil, err
		}
		name = nil
	}
	if rest, err = msgp.Skip(value); err != nil {
		return nil, err
	}
	value = value[:len(value)-len(rest)]
	switch string(name) {
	case "role":
		f.role = value
	case "routing_key":
		f.key = value
	case "req_id":
		f.reqID = value
	case "handle":
		f.handle = value
	case "exclude_server":
		f.exclude = value
	case "success":
		f.success = value
	}
	return rest, nil
}

// selection is the body of /select.
type selection struct {
	id      reservationID
	live    uint64 // the id as a disagg id; 0: it cannot be one
	echo    string // the id as decimal text for the answer; "": the body had none
	key     []byte // the routing key
	exclude string
}

var (
	errID      = errors.New("req_id must be an integer")
	errHandle  = errors.New("handle must be a string of 1024 bytes at most")
	errExclude = errors.New("exclude_server must be a string of 1024 bytes at most")
	errSuccess = errors.New("success must be a boolean")
)

// selection reads the body of /select. A JSON body may omit req_id; then the answer has a
// handle. A MessagePack body must have a req_id.
func (f *fields) selection(e encoding) (q selection, err error) {
	if f.role == nil || f.key == nil || f.reqID == nil && e == inMsgpack {
		return q, errors.New("body must include 'role', 'routing_key', and 'req_id'")
	}
	if q.id.phase, err = phaseOf(f.role); err != nil {
		return q, err
	}
	if q.id.handle = f.reqID == nil; !q.id.handle {
		if q.id.text, q.live, err = integer(f.reqID); err != nil {
			return q, err
		}
		q.echo = q.id.text
	}
	if f.exclude != nil && !msgp.IsNil(f.exclude) {
		if q.exclude, err = shortText(f.exclude, errExclude); err != nil {
			return q, err
		}
	}
	q.key = f.key
	return q, nil
}

// finished reads the body of /finish. The older form is JSON with a handle. Without a
// role it means generation.
func (f *fields) finished(e encoding) (id reservationID, success bool, err error) {
	if f.role == nil && e == inJSON && f.handle != nil {
		f.role = msgp.AppendString(nil, "gen")
	}
	if id, err = f.renewed(e); err != nil {
		return id, false, err
	}
	success = true
	if f.success != nil {
		if success, _, err = msgp.ReadBoolBytes(f.success); err != nil {
			return id, false, errSuccess
		}
	}
	return id, success, nil
}

// renewed reads the body of /renew and returns its reservation.
func (f *fields) renewed(e encoding) (id reservationID, err error) {
	id.handle = f.reqID == nil && f.handle != nil && e == inJSON
	if f.role == nil || f.reqID == nil && !id.handle {
		return id, errors.New("body must include 'role' and 'req_id'")
	}
	if id.phase, err = phaseOf(f.role); err != nil {
		return id, err
	}
	if !id.handle {
		id.text, _, err = integer(f.reqID)
		return id, err
	}
	id.text, err = shortText(f.handle, errHandle)
	return id, err
}

// shortText reads a string of 1024 bytes at most. wrong is the error for another value.
func shortText(raw []byte, wrong error) (string, error) {
	text, _, err := msgp.ReadStringZC(raw)
	if err != nil || len(text) > 1024 {
		return "", wrong
	}
	return string(text), nil
}

// phaseOf reads a role.
func phaseOf(raw []byte) (abi.Phase, error) {
	role, _, err := msgp.ReadStringZC(raw)
	switch string(role) {
	case "context", "ctx":
		return abi.Prefill, nil
	case "generation", "gen":
		return abi.Decode, nil
	}
	if err != nil {
		return 0, errors.New("invalid role")
	}
	return 0, errors.New("invalid role: " + strconv.QuoteToASCII(string(role[:min(len(role), 40)])))
}

// integer reads an id as exact decimal text. A float or a boolean is an error. live is
// the number if it can be a disagg id, otherwise 0.
func integer(raw []byte) (text string, live uint64, err error) {
	switch msgp.NextType(raw) {
	case msgp.IntType:
		n, _, err := msgp.ReadInt64Bytes(raw)
		if err != nil {
			return "", 0, errID
		}
		return strconv.FormatInt(n, 10), uint64(max(0, n)), nil
	case msgp.UintType:
		n, _, err := msgp.ReadUint64Bytes(raw)
		if err != nil {
			return "", 0, errID
		}
		if live = n; n > abi.MaxDisaggID {
			live = 0
		}
		return strconv.FormatUint(n, 10), live, nil
	}
	return "", 0, errID
}
