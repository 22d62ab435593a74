package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http/httputil"
	"strconv"
)

// message is the head of an HTTP/1.1 request or answer, with the parts that the
// load and the backend need. Both use this own code, so that the core that they
// share never limits the proxy under test.
type message struct {
	first   []byte // request or status line; valid until the next read
	length  int64  // Content-Length, -1 without one
	chunked bool
	close   bool // Connection: close
}

var errBadHead = errors.New("read head: malformed")

// readMessage reads a head, including its empty line, into m.
func readMessage(br *bufio.Reader, m *message) error {
	line, err := br.ReadSlice('\n')
	if err != nil {
		return err
	}
	m.first = append(m.first[:0], bytes.TrimRight(line, "\r\n")...)
	m.length, m.chunked, m.close = -1, false, false
	for {
		line, err = br.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return nil
		}
		if err := m.field(line); err != nil {
			return err
		}
	}
}

func (m *message) field(line []byte) error {
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok {
		return errBadHead
	}
	value = bytes.TrimSpace(value)
	switch {
	case bytes.EqualFold(name, []byte("content-length")):
		n, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil || n < 0 {
			return errBadHead
		}
		m.length = n
	case bytes.EqualFold(name, []byte("transfer-encoding")):
		m.chunked = bytes.EqualFold(value, []byte("chunked"))
	case bytes.EqualFold(name, []byte("connection")):
		m.close = bytes.EqualFold(value, []byte("close"))
	}
	return nil
}

// status gives the status code of an answer's head.
func (m *message) status() (int, error) {
	_, rest, _ := bytes.Cut(m.first, []byte(" "))
	code, _, _ := bytes.Cut(rest, []byte(" "))
	n, err := strconv.Atoi(string(code))
	if err != nil {
		return 0, errBadHead
	}
	return n, nil
}

// target gives the method and the target of a request's head.
func (m *message) target() (method, target []byte) {
	method, rest, _ := bytes.Cut(m.first, []byte(" "))
	target, _, _ = bytes.Cut(rest, []byte(" "))
	return method, target
}

// body returns the message's body, which does not end with the connection.
func (m *message) body(br *bufio.Reader) (io.Reader, error) {
	switch {
	case m.chunked:
		return &chunkedBody{chunks: httputil.NewChunkedReader(br), br: br}, nil
	case m.length >= 0:
		return io.LimitReader(br, m.length), nil
	}
	return nil, fmt.Errorf("%w: a body without length", errBadHead)
}

// chunkedBody reads chunks and the empty trailer after them, which httputil's
// reader does not read.
type chunkedBody struct {
	chunks io.Reader
	br     *bufio.Reader
	err    error // of every further read
}

func (b *chunkedBody) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.chunks.Read(p)
	if err == io.EOF {
		line, lineErr := b.br.ReadSlice('\n')
		if lineErr != nil || len(bytes.TrimRight(line, "\r\n")) > 0 {
			err = errors.New("read chunks: no empty line at the end")
		}
	}
	b.err = err
	return n, err
}
