package privatedir

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// findProc finds the folder below /proc. With this path the system uses the open
// descriptor of the folder.
func (d *Dir) findProc() {
	path := fmt.Sprintf("/proc/self/fd/%d", d.folder.Fd())
	own, err := d.folder.Stat()
	if err != nil {
		return
	}
	if there, err := os.Stat(path); err == nil && os.SameFile(own, there) {
		d.proc = path
	}
}

// SocketPath returns a path at which this process can bind or dial a Unix socket of
// the folder. The path is good until Close, and only in this process. On Linux it
// reaches the folder through the open descriptor, and is shorter than the 107 bytes to
// which socket paths are limited. Elsewhere it is the path of the folder, whose parts
// Open has checked.
func (d *Dir) SocketPath(name string) string {
	if d.proc != "" {
		return filepath.Join(d.proc, name)
	}
	return d.Path(name)
}

// ListenUnix opens a socket of the folder, with mode 0600. Closing the listener leaves
// the name.
func (d *Dir) ListenUnix(name string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.SocketPath(name), Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := d.closeToOthers(name); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// ListenUnixgram opens a datagram socket of the folder, with mode 0600. Closing the
// socket leaves the name.
func (d *Dir) ListenUnixgram(name string) (*net.UnixConn, error) {
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: d.SocketPath(name), Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	if err := d.closeToOthers(name); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (d *Dir) closeToOthers(name string) error {
	return d.do("chmod", name, func(fd int) error { return unix.Fchmodat(fd, name, 0o600, 0) })
}

// Dial connects to a socket of the folder: network is "unix" or "unixgram".
func (d *Dir) Dial(ctx context.Context, network, name string) (net.Conn, error) {
	var dialer net.Dialer
	return dialer.DialContext(ctx, network, d.SocketPath(name))
}
