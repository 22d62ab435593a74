package quicshare

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

func openLane(t *testing.T, dir *privatedir.Dir) *lane {
	t.Helper()
	l, err := takeLane(dir)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *lane) mustClose(t *testing.T) {
	t.Helper()
	if err := l.close(); err != nil {
		t.Error(err)
	}
}

// Lanes are taken from the lowest on and come back; a file that a killed process
// left is in nobody's way, one whose lock was swept away stays its owner's.
func TestTakeLane(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b := openLane(t, dir), openLane(t, dir)
	if a.number != 0 || b.number != 1 {
		t.Fatalf("lanes %d and %d", a.number, b.number)
	}
	a.mustClose(t)
	if a = openLane(t, dir); a.number != 0 {
		t.Fatalf("lane %d, 0 is free", a.number)
	}
	if err := dir.Remove(lockName(0)); err != nil {
		t.Fatal(err)
	}
	c := openLane(t, dir)
	if c.number != 2 {
		t.Fatalf("lane %d, 0 and 1 live", c.number)
	}
	c.inlet.Close() // as a kill would
	c.lock.Close()
	if c = openLane(t, dir); c.number != 2 {
		t.Fatalf("lane %d, 2 is dead", c.number)
	}
	for _, l := range []*lane{a, b, c} {
		l.mustClose(t)
	}
	if left, _ := dir.Names("", ".sock"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestNoFreeLane(t *testing.T) {
	dir := privatedirtest.Open(t)
	for range lanes {
		defer openLane(t, dir).mustClose(t)
	}
	if l, err := takeLane(dir); err == nil {
		t.Errorf("lane %d", l.number)
	}
}

// All lanes of a directory have the same keys, of different directories others.
func TestKeys(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b, c := openLane(t, dir), openLane(t, dir), openLane(t, privatedirtest.Open(t))
	defer a.mustClose(t)
	defer b.mustClose(t)
	defer c.mustClose(t)
	key := func(l *lane, purpose string) []byte {
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
	if _, err := takeLane(dir); err == nil {
		t.Error("taken")
	}
	if err := errors.Join(dir.Remove(secretFile), os.Symlink("/dev/zero", dir.Path(secretFile))); err != nil {
		t.Fatal(err)
	}
	if _, err := takeLane(dir); err == nil {
		t.Error("a link is followed")
	}
	if err := os.RemoveAll(dir.Name()); err != nil {
		t.Fatal(err)
	}
	if _, err := takeLane(dir); err == nil {
		t.Error("taken in no directory")
	}
}

func TestGenerateConnectionID(t *testing.T) {
	l := &lane{number: 7}
	a, err := l.GenerateConnectionID()
	b, err2 := l.GenerateConnectionID()
	if err != nil || err2 != nil || a == b || a.Len() != idLen || a.Len() != l.ConnectionIDLen() || a.Bytes()[0] != 7 || b.Bytes()[0] != 7 {
		t.Errorf("%v, %v, %v, %v", a, b, err, err2)
	}
}

// A lane says whether it takes new clients; one that never was does not.
func TestFindHeirs(t *testing.T) {
	dir := privatedirtest.Open(t)
	a, b, c := openLane(t, dir), openLane(t, dir), openLane(t, dir)
	defer a.mustClose(t)
	defer b.mustClose(t)
	defer c.mustClose(t)
	if err := dir.WriteFile("lane-300.sock", nil); err != nil {
		t.Fatal(err)
	}
	if got := findHeirs(a, nil); len(got) > 0 {
		t.Errorf("heirs of 0: %v, all are starting", got)
	}
	for _, l := range []*lane{a, b, c} {
		if err := l.say(serving); err != nil {
			t.Fatal(err)
		}
	}
	if got := findHeirs(a, nil); !bytes.Equal(got, []byte{1, 2}) {
		t.Errorf("heirs of 0: %v", got)
	}
	if a.port = 443; len(findHeirs(a, nil)) > 0 {
		t.Error("heirs of another port")
	}
	a.port = 0
	if err := b.say(draining); err != nil {
		t.Fatal(err)
	}
	if got := findHeirs(a, nil); !bytes.Equal(got, []byte{2}) {
		t.Errorf("heirs of 0: %v, 1 drains", got)
	}
}

// Each client goes to one heir whatever the order of the list; a heir that goes
// moves its own clients only.
func TestWeight(t *testing.T) {
	choose := func(id []byte, heirs ...byte) (best byte) {
		var most uint64
		for _, n := range heirs {
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
			t.Errorf("lane %d: %d of 3000 clients", n, count)
		}
	}
}
