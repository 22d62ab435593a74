package election

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

func alone(dir *privatedir.Dir) *Alone {
	return NewAlone(Options{Address: "unix:/f", Node: "a", Log: slog.New(slog.DiscardHandler)}, dir)
}

func TestAlone(t *testing.T) {
	dir := privatedirtest.Open(t)
	now := uint64(time.Now().UnixMilli())
	first := alone(dir)
	s, changed1 := first.Standing()
	if s != (Standing{}) {
		t.Errorf("Standing before Succeed = %+v", s)
	}
	first.Succeed()
	s, _ = first.Standing()
	if !s.Leads || s.Leader.Epoch < now || s.Leader.Address != "unix:/f" || !changed(changed1) {
		t.Errorf("Standing as leader = %+v", s)
	}
	// The clock was set back after the last start.
	ahead := now + 1_000_000_000
	if err := dir.WriteFile(epochFile, []byte(strconv.FormatUint(ahead, 10)+"\n")); err != nil {
		t.Fatal(err)
	}
	second := alone(dir)
	if s, _ := second.Standing(); s != (Standing{Leader: Leader{Address: "unix:/f", Epoch: ahead}}) {
		t.Errorf("Standing of the successor before Succeed = %+v", s)
	}
	second.Succeed()
	if s, _ := second.Standing(); !s.Leads || s.Leader.Epoch != ahead+1 {
		t.Errorf("Standing of the successor = %+v", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	second.Run(ctx)
	if s, _ := second.Standing(); s.Leads {
		t.Error("the process leads after Run has ended")
	}
	left, err := dir.Names("", "")
	if err != nil || len(left) != 1 {
		t.Errorf("files %v, %v", left, err)
	}
}

func TestAloneWithoutAFile(t *testing.T) {
	last, link, removed := privatedirtest.Open(t), privatedirtest.Open(t), privatedirtest.Open(t)
	precious := filepath.Join(t.TempDir(), "precious")
	if err := errors.Join(
		last.WriteFile(epochFile, []byte("18446744073709551615")), os.RemoveAll(removed.Name()),
		os.WriteFile(precious, []byte("18446744073709551614"), 0o600), os.Symlink(precious, link.Path(epochFile)),
	); err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]*privatedir.Dir{"none": nil, "the last epoch": last, "a link": link, "removed": removed} {
		now := uint64(time.Now().UnixMilli())
		a := alone(dir)
		a.Succeed()
		if s, _ := a.Standing(); !s.Leads || s.Leader.Epoch < now || s.Leader.Epoch > now+10_000_000 {
			t.Errorf("%s: a.Standing() = %+v", name, s)
		}
	}
	if text, err := os.ReadFile(precious); string(text) != "18446744073709551614" || err != nil {
		t.Errorf("the target of the link: %q, %v", text, err)
	}
}
