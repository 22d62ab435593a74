//go:build linux

package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// network joins hosts by links that the test can cut and slow down. A packet
// goes from one host's TUN device through the test to another's, so neither a
// privileged tool nor a queueing discipline of the kernel is needed. A cut link
// drops packets without a notice, like a pulled cable.
type network struct {
	t     *testing.T
	hosts []*host
	wg    sync.WaitGroup
	ctx   context.Context
}

// host is a network namespace with one address, and a name.
type host struct {
	name string
	ip   string
	tun  *os.File
	do   chan func() // on a thread of this network
	to   []chan packet

	mu    sync.Mutex
	cut   bool
	delay time.Duration // of each packet from and to this host
}

// packet is one packet in transit.
type packet struct {
	due  time.Time
	data []byte
}

const (
	subnet      = "10.77.0."
	maxPacket   = 1500
	maxUnderway = 4096 // packets in transit from one host to another
)

// newNetwork makes hosts of these names, of which the first is the test itself.
func newNetwork(t *testing.T, names ...string) *network {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	n := &network{t: t, ctx: ctx}
	for i, name := range names {
		h := &host{name: name, ip: fmt.Sprint(subnet, i+1), do: make(chan func())}
		for range names {
			h.to = append(h.to, make(chan packet, maxUnderway))
		}
		n.hosts = append(n.hosts, h)
		made := make(chan error)
		n.wg.Go(func() { h.live(ctx, i > 0, made) })
		if err := <-made; err != nil {
			t.Fatalf("make the network of a host: %v", err)
		}
	}
	for _, from := range n.hosts {
		n.wg.Go(func() { n.read(from) })
		for i, to := range n.hosts {
			n.wg.Go(func() { n.carry(from, to, from.to[i]) })
		}
	}
	t.Cleanup(func() {
		cancel()
		for _, h := range n.hosts {
			h.tun.Close()
		}
		n.wg.Wait()
	})
	return n
}

// live runs the thread of a host. Its namespace ends with its last process.
func (h *host) live(ctx context.Context, own bool, made chan<- error) {
	runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
	var err error
	if own {
		if err = unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err == nil {
			err = unix.Sethostname([]byte(h.name))
		}
	}
	if err == nil {
		err = h.configure()
	}
	made <- err
	for {
		select {
		case f := <-h.do:
			f()
		case <-ctx.Done():
			return
		}
	}
}

// configure makes the TUN device and gives it its address.
func (h *host) configure() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/net/tun: %w", err)
	}
	device, err := unix.NewIfreq("link")
	if err != nil {
		return err
	}
	device.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	err = unix.IoctlIfreq(fd, unix.TUNSETIFF, device)
	h.tun = os.NewFile(uintptr(fd), "tun of "+h.name)
	if err != nil {
		return fmt.Errorf("make a TUN device: %w", err)
	}
	set := func(what uint, name string, value func(*unix.Ifreq) error) {
		if err != nil {
			return
		}
		var r *unix.Ifreq
		if r, err = unix.NewIfreq(name); err == nil {
			if err = value(r); err == nil {
				err = unix.IoctlIfreq(s, what, r)
			}
		}
	}
	up := func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING); return nil }
	set(unix.SIOCSIFFLAGS, "lo", up)
	set(unix.SIOCSIFADDR, "link", func(r *unix.Ifreq) error { return r.SetInet4Addr(net.ParseIP(h.ip).To4()) })
	set(unix.SIOCSIFNETMASK, "link", func(r *unix.Ifreq) error { return r.SetInet4Addr(net.IP{255, 255, 255, 0}) })
	set(unix.SIOCSIFFLAGS, "link", up)
	return err
}

// start starts a process on the host.
func (h *host) start(c *exec.Cmd) error {
	started := make(chan error)
	h.do <- func() { started <- c.Start() }
	return <-started
}

// link sets whether the host's link is cut, and its delay.
func (h *host) link() (cut bool, delay time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.cut, h.delay
}

func (h *host) setLink(cut bool, delay time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cut, h.delay = cut, delay
}

// read receives the packets that a host sends.
func (n *network) read(from *host) {
	buf := make([]byte, maxPacket)
	for {
		size, err := from.tun.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil || size < 20 || buf[0]>>4 != 4 {
			continue
		}
		i := int(buf[19]) - 1 // the last byte of the destination address
		if i < 0 || i >= len(n.hosts) {
			continue
		}
		cut, delay := from.link()
		_, more := n.hosts[i].link()
		if cut {
			continue
		}
		select {
		case from.to[i] <- packet{time.Now().Add(delay + more), append([]byte(nil), buf[:size]...)}:
		default: // a full queue drops the packet
		}
	}
}

// carry delivers packets from one host to another, in order.
func (n *network) carry(from, to *host, packets <-chan packet) {
	for {
		select {
		case p := <-packets:
			if wait := time.Until(p.due); wait > 0 {
				select {
				case <-time.After(wait):
				case <-n.ctx.Done():
					return
				}
			}
			here, _ := from.link()
			there, _ := to.link()
			if !here && !there {
				_, _ = to.tun.Write(p.data) // a lost packet is sent again
			}
		case <-n.ctx.Done():
			return
		}
	}
}
