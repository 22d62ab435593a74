package takeover

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
)

// send writes one message with the descriptors of its sockets.
func send(c *net.UnixConn, m message, sockets []Socket) error {
	m.Version = version
	for _, s := range sockets {
		m.Sockets = append(m.Sockets, s.Name)
	}
	body, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write %s: %w", m.Say, err)
	}
	b := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	b = append(b, body...)
	var rights []byte
	if len(sockets) > 0 {
		if rights, err = pack(sockets); err != nil {
			return err
		}
	}
	n, _, err := c.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) { // the descriptors were sent with the first part
		_, err = c.Write(b[n:])
	}
	runtime.KeepAlive(sockets) // keep the sockets open until here
	if err != nil {
		return fmt.Errorf("write %s: %w", m.Say, err)
	}
	return nil
}

// pack builds the control message. It does not use a File's Fd method, which could make
// the socket blocking for every process that has it.
func pack(sockets []Socket) ([]byte, error) {
	fds := make([]int, len(sockets))
	for i, s := range sockets {
		raw, err := s.File.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { fds[i] = int(fd) })
		}
		if err != nil {
			return nil, fmt.Errorf("socket %s: %w", s.Name, err)
		}
	}
	return syscall.UnixRights(fds...), nil
}

// receive reads one message and its sockets. The caller closes them. After an error
// there are none.
func receive(c *net.UnixConn) (message, []Socket, error) {
	r := &rightsReader{c: c}
	m, err := decode(r)
	if err == nil && len(r.files) != len(m.Sockets) {
		err = fmt.Errorf("%d sockets with %d names", len(r.files), len(m.Sockets))
	}
	if err == nil {
		err = r.err
	}
	if err != nil {
		for _, f := range r.files {
			f.Close()
		}
		return message{}, nil, fmt.Errorf("read from the other process: %w", err)
	}
	sockets := make([]Socket, len(r.files))
	for i, f := range r.files {
		sockets[i] = Socket{Name: m.Sockets[i], File: f}
	}
	return m, sockets, nil
}

// decode reads one message and no byte beyond it, so that descriptors stay with their
// message.
func decode(r io.Reader) (message, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return message{}, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxMessage {
		return message{}, fmt.Errorf("a message of %d bytes", n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return message{}, err
	}
	var m message
	if err := json.Unmarshal(body, &m); err != nil {
		return message{}, errors.New("not a message")
	}
	if m.Version != version {
		return message{}, fmt.Errorf("it uses version %d of the handover, this process uses version %d", m.Version, version)
	}
	if len(m.Sockets) > maxSockets {
		return message{}, fmt.Errorf("%d sockets", len(m.Sockets))
	}
	seen := map[string]bool{}
	for _, name := range m.Sockets {
		if name == "" || len(name) > maxName || seen[name] {
			return message{}, fmt.Errorf("a socket named %.*q", maxName, name)
		}
		seen[name] = true
	}
	return m, nil
}

// rightsReader reads from a connection and keeps the received descriptors.
type rightsReader struct {
	c     *net.UnixConn
	files []*os.File
	err   error // too many descriptors, or damaged ones
}

// Read implements io.Reader.
func (r *rightsReader) Read(p []byte) (int, error) {
	oob := make([]byte, syscall.CmsgSpace(4*maxSockets))
	n, oobn, flags, _, err := r.c.ReadMsgUnix(p, oob)
	if oobn > 0 {
		r.take(oob[:oobn])
	}
	if flags&syscall.MSG_CTRUNC != 0 {
		r.err = errors.New("too many descriptors")
	}
	if err == nil && n == 0 && len(p) > 0 {
		err = io.EOF
	}
	return n, err
}

func (r *rightsReader) take(oob []byte) {
	controls, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		r.err = err
		return
	}
	for _, control := range controls {
		fds, err := syscall.ParseUnixRights(&control)
		if err != nil {
			r.err = err
			continue
		}
		for _, fd := range fds {
			syscall.CloseOnExec(fd) // Linux has done so
			r.files = append(r.files, os.NewFile(uintptr(fd), "handover"))
		}
	}
	if len(r.files) > maxSockets {
		r.err = errors.New("too many descriptors")
	}
}
