package election

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

func alone(path string) *Alone {
	return NewAlone(Options{Address: "unix:/f", Node: "a", Log: slog.New(slog.DiscardHandler)}, path)
}

func TestAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "epoch")
	now := uint64(time.Now().UnixMilli())
	first := alone(path)
	s, changed1 := first.Standing()
	if s != (Standing{}) {
		t.Errorf("before it leads %+v", s)
	}
	first.Succeed()
	s, _ = first.Standing()
	if !s.Leads || s.Leader.Epoch < now || s.Leader.Address != "unix:/f" || !changed(changed1) {
		t.Errorf("it leads as %+v", s)
	}
	// The clock has been set back since.
	ahead := now + 1_000_000_000
	if err := os.WriteFile(path, []byte(strconv.FormatUint(ahead, 10)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	second := alone(path)
	if s, _ := second.Standing(); s != (Standing{Leader: Leader{Address: "unix:/f", Epoch: ahead}}) {
		t.Errorf("it follows %+v", s)
	}
	second.Succeed()
	if s, _ := second.Standing(); !s.Leads || s.Leader.Epoch != ahead+1 {
		t.Errorf("it leads as %+v", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	second.Run(ctx)
	if s, _ := second.Standing(); s.Leads {
		t.Error("it leads after its end")
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("files %v, %v", left, err)
	}
}

func TestAloneWithoutAFile(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "epoch")
	if err := os.WriteFile(bad, []byte("18446744073709551615"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", bad, filepath.Join(t.TempDir(), "none", "epoch")} {
		now := uint64(time.Now().UnixMilli())
		a := alone(path)
		a.Succeed()
		if s, _ := a.Standing(); !s.Leads || s.Leader.Epoch < now || s.Leader.Epoch > now+10_000_000 {
			t.Errorf("%q: %+v", path, s)
		}
	}
}
