package quicshare

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

func joinMember(t *testing.T, dir *privatedir.Dir) *member {
	t.Helper()
	l, err := join(dir)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *member) mustClose(t *testing.T) {
	t.Helper()
	if err := l.close(); err != nil {
		t.Error(err)
	}
}

// Member numbers are claimed from the lowest on, and become free again. A socket file
// that a killed process left does not block a claim. A number whose lock file was
// removed by a cleaner stays with its owner.
func TestJoin(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b := joinMember(t, dir), joinMember(t, dir)
	if a.number != 0 || b.number != 1 {
		t.Fatalf("members %d and %d", a.number, b.number)
	}
	a.mustClose(t)
	if a = joinMember(t, dir); a.number != 0 {
		t.Fatalf("member %d, 0 is free", a.number)
	}
	if err := dir.Remove(lockName(0)); err != nil {
		t.Fatal(err)
	}
	c := joinMember(t, dir)
	if c.number != 2 {
		t.Fatalf("member %d, 0 and 1 live", c.number)
	}
	c.forwardSocket.Close() // as if the process were killed
	c.lock.Close()
	if c = joinMember(t, dir); c.number != 2 {
		t.Fatalf("member %d, 2 is dead", c.number)
	}
	for _, l := range []*member{a, b, c} {
		l.mustClose(t)
	}
	if left, _ := dir.Names("", ".sock"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestNoFreeNumber(t *testing.T) {
	dir := privatedirtest.Open(t)
	for range maxMembers {
		defer joinMember(t, dir).mustClose(t)
	}
	if l, err := join(dir); err == nil {
		t.Errorf("member %d", l.number)
	}
}

// All members of a directory derive the same keys. Members of different directories
// derive different keys.
func TestKeys(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b, c := joinMember(t, dir), joinMember(t, dir), joinMember(t, privatedirtest.Open(t))
	defer a.mustClose(t)
	defer b.mustClose(t)
	defer c.mustClose(t)
	key := func(l *member, purpose string) []byte {
		k, err := l.key(purpose)
		if err != nil {
			t.Fatal(err)
		}
		return k[:]
	}
	if !bytes.Equal(key(a, "x"), key(b, "x")) || bytes.Equal(key(a, "x"), key(c, "x")) || bytes.Equal(key(a, "x"), key(a, "y")) {
		t.Error("keys are shared by the wrong ones")
	}
	info, err := os.Stat(dir.Path(secretFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if left, _ := dir.Names(".quic", ""); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestBadSecret(t *testing.T) {
	dir := privatedirtest.Open(t)
	if err := dir.WriteFile(secretFile, []byte("short")); err != nil {
		t.Fatal(err)
	}
	if _, err := join(dir); err == nil {
		t.Error("taken")
	}
	if err := errors.Join(dir.Remove(secretFile), os.Symlink("/dev/zero", dir.Path(secretFile))); err != nil {
		t.Fatal(err)
	}
	if _, err := join(dir); err == nil {
		t.Error("a link is followed")
	}
	if err := os.RemoveAll(dir.Name()); err != nil {
		t.Fatal(err)
	}
	if _, err := join(dir); err == nil {
		t.Error("taken in no directory")
	}
}

func TestGenerateConnectionID(t *testing.T) {
	l := &member{number: 7}
	a, err := l.GenerateConnectionID()
	b, err2 := l.GenerateConnectionID()
	if err != nil || err2 != nil || a == b || a.Len() != idLen || a.Len() != l.ConnectionIDLen() || a.Bytes()[0] != 7 || b.Bytes()[0] != 7 {
		t.Errorf("%v, %v, %v, %v", a, b, err, err2)
	}
}

// A serving member is found as successor. A member that never served is not.
func TestFindSuccessors(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b, c := joinMember(t, dir), joinMember(t, dir), joinMember(t, dir)
	defer a.mustClose(t)
	defer b.mustClose(t)
	defer c.mustClose(t)
	if err := dir.WriteFile("lane-300.sock", nil); err != nil {
		t.Fatal(err)
	}
	if got := findSuccessors(a, nil); len(got) > 0 {
		t.Errorf("successors of 0: %v, all are starting", got)
	}
	for _, l := range []*member{a, b, c} {
		if err := l.setState(serving); err != nil {
			t.Fatal(err)
		}
	}
	if got := findSuccessors(a, nil); !bytes.Equal(got, []byte{1, 2}) {
		t.Errorf("successors of 0: %v", got)
	}
	if a.port = 443; len(findSuccessors(a, nil)) > 0 {
		t.Error("successors of another port")
	}
	a.port = 0
	if err := b.setState(draining); err != nil {
		t.Fatal(err)
	}
	if got := findSuccessors(a, nil); !bytes.Equal(got, []byte{2}) {
		t.Errorf("successors of 0: %v, 1 drains", got)
	}
}

// Each client gets one successor, whatever the order of the list. Removing a successor
// moves only its own clients.
func TestWeight(t *testing.T) {
	choose := func(id []byte, successors ...byte) (best byte) {
		var most uint64
		for _, n := range successors {
			if w := weight(id, n); w >= most {
				best, most = n, w
			}
		}
		return best
	}
	counts := map[byte]int{}
	for i := range 3000 {
		id := []byte{byte(i), byte(i >> 8), 3, 4, 5, 6, 7, 8}
		all := choose(id, 1, 2, 3)
		counts[all]++
		if choose(id, 3, 1, 2) != all || all != 3 && choose(id, 1, 2) != all {
			t.Fatalf("client %d moves", i)
		}
	}
	for n, count := range counts {
		if count < 900 || count > 1100 {
			t.Errorf("member %d: %d of 3000 clients", n, count)
		}
	}
}
