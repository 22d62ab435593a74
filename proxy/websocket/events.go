package websocket

import (
	"bytes"
	"errors"
)

// maxEvent bounds one event in bytes.
const maxEvent = 64 << 20

var errLongEvent = errors.New("an event of the engine is too long")

// events splits a stream of events (text/event-stream) that arrives in pieces of any size. Lines
// end in LF or CRLF. The zero value stands at the begin of a stream.
type events struct {
	line []byte // the begin of a line whose end has not arrived
	name []byte // of the event, without its data
	data []byte // of the event; may be a part of the piece that is being fed
	has  bool   // the event has data
	own  []byte // memory for data that a later piece completes
}

// feed reads a piece and calls send with each event that is complete. The arguments of send are
// valid until send returns.
func (e *events) feed(p []byte, send func(name, data []byte) error) error {
	for len(p) > 0 {
		line, rest, ends := bytes.Cut(p, []byte("\n"))
		if p = rest; !ends || len(e.line) > 0 {
			if len(e.line)+len(line) > maxEvent {
				return errLongEvent
			}
			e.line = append(e.line, line...)
			line = e.line
		}
		if !ends {
			break
		}
		if err := e.read(bytes.TrimSuffix(line, []byte("\r")), send); err != nil {
			return err
		}
		e.line = e.line[:0]
	}
	e.keep()
	return nil
}

// keep copies the data of an event that is not complete to own, unless it is there.
func (e *events) keep() {
	if e.has && (len(e.data) == 0 || len(e.own) == 0 || &e.data[0] != &e.own[0]) {
		e.own = append(e.own[:0], e.data...)
		e.data = e.own
	}
}

// read reads a whole line.
func (e *events) read(line []byte, send func(name, data []byte) error) error {
	if len(line) == 0 {
		has, data := e.has, e.data
		e.has, e.data = false, nil
		name := e.name
		e.name = e.name[:0]
		if !has {
			return nil
		}
		return send(name, data)
	}
	field, value, _ := bytes.Cut(line, []byte(":")) // a comment has an empty field
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(field) {
	case "event":
		e.name = append(e.name[:0], value...)
	case "data":
		if len(e.data)+len(value) > maxEvent {
			return errLongEvent
		}
		switch {
		case e.has:
			e.keep()
			e.own = append(append(e.own, '\n'), value...)
			e.data = e.own
		case len(e.line) > 0: // value is in memory that the next line uses
			e.own = append(e.own[:0], value...)
			e.data = e.own
		default:
			e.data = value
		}
		e.has = true
	}
	return nil
}

// finish sends the event at the end of a stream without a blank line.
func (e *events) finish(send func(name, data []byte) error) error {
	if len(e.line) > 0 {
		if err := e.read(bytes.TrimSuffix(e.line, []byte("\r")), send); err != nil {
			return err
		}
	}
	return e.read(nil, send)
}

// memory returns the memory of e in bytes.
func (e *events) memory() int { return cap(e.line) + cap(e.own) + cap(e.name) }
