package link

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// overBoth runs a test over Unix sockets and over TLS.
func overBoth(t *testing.T, test func(t *testing.T, sockets func(testing.TB) (a, b net.Conn))) {
	t.Run("unix", func(t *testing.T) { test(t, sockets) })
	t.Run("tls", func(t *testing.T) { test(t, secured) })
}

// secured returns the two ends of a TLS connection over a Unix connection.
func secured(t testing.TB) (a, b net.Conn) {
	t.Helper()
	x, y := sockets(t)
	return securedOver(t, x, y)
}

func securedOver(t testing.TB, x, y net.Conn) (a, b *TLS) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	var first [1]byte
	a = Client(x, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})
	var shaking sync.WaitGroup
	shaking.Go(func() {
		if err := a.Handshake(); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.ReadFull(y, first[:]); err != nil {
		t.Fatal(err)
	}
	b = Server(y, first[:], &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, SessionTicketsDisabled: true,
	})
	if err := b.Handshake(); err != nil {
		t.Fatal(err)
	}
	shaking.Wait()
	return a, b
}

// tampered is a connection that changes one of the bytes that are read.
type tampered struct {
	net.Conn
	after int // number of bytes before the changed byte
}

func (c *tampered) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.after >= 0 && c.after < n {
		p[c.after] ^= 1
	}
	c.after -= n
	return n, err
}

// TestTampering: a byte that is changed in transit ends the connection. The handler
// gets nothing of the byte's record.
func TestTampering(t *testing.T) {
	x, y := sockets(t)
	near, far := securedOver(t, x, y)
	far.under.Conn = &tampered{Conn: y, after: 30}
	a, b := start(t, near, nil), start(t, far, nil)
	a.conn.Send(1, bytes.Repeat([]byte("x"), 100), true)
	if err := <-b.end; err == nil || errors.Is(err, ErrLeft) {
		t.Errorf("the connection ended with %v", err)
	}
	<-a.end
	if got := b.heard(); len(got) != 0 {
		t.Errorf("the handler got %q", got)
	}
}

// TestCutTLS: if the socket ends between two records, the peer has died. If it ends
// within a record, the cause is uncertain.
func TestCutTLS(t *testing.T) {
	for name, tt := range map[string]struct {
		more []byte
		gone bool
	}{"between": {nil, true}, "within": {[]byte{23, 3, 3, 1, 0, 'x'}, false}} {
		t.Run(name, func(t *testing.T) {
			x, y := sockets(t)
			near, far := securedOver(t, x, y)
			b := start(t, far, nil)
			x.Write(tt.more)
			x.Close()
			if err := <-b.end; errors.Is(err, ErrGone) != tt.gone || !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("the connection ended with %v", err)
			}
			near.Close()
		})
	}
}

// TestSealNeverWaits: frames for a peer that does not read stay in memory. Run ends
// although the socket accepts no bytes.
func TestSealNeverWaits(t *testing.T) {
	x, y := sockets(t)
	near, _ := securedOver(t, x, y)
	near.under.hold()
	for range 64 {
		if sealed, err := near.seal(make([]byte, 1<<20)); err != nil || len(sealed) < 1<<20 {
			t.Fatalf("%d bytes, %v", len(sealed), err)
		}
	}
	near.SetReadDeadline(time.Unix(1, 0))
	if _, err := near.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if _, err := near.seal([]byte("after a read that was too late")); err != nil {
		t.Error(err)
	}
	near.Close()
	if sealed, err := near.seal([]byte("after the end")); err == nil {
		t.Errorf("seal returned %d bytes after the end", len(sealed))
	}
}
