package election

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"
)

var began = time.UnixMilli(1_800_000_000_000)

func candidate() *Election {
	return New(Options{Name: "f", Address: "10.0.0.1:7000", Node: "a", TTL: 2 * time.Second, Log: slog.New(slog.DiscardHandler)})
}

// changed reports whether the channel of a Standing is closed.
func changed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestNextRecord(t *testing.T) {
	ms := uint64(began.UnixMilli())
	other := Leader{Address: "10.0.0.2:7000", Node: "b", ID: 7}
	at := func(l Leader, epoch uint64) Leader { l.Epoch = epoch; return l }
	for _, tt := range []struct {
		name   string
		seen   Leader // the leader that the watch reports
		leads  uint64 // epoch in which this process leads already
		before Leader // the leader in the store
		mine   uint64 // epoch of this process's own record in the store
		want   uint64
	}{
		{name: "the first", want: ms},
		{name: "after another", before: at(other, ms-50), want: ms},
		{name: "after a leader whose clock is ahead", before: at(other, ms+50), want: ms + 51},
		{name: "after one that only the watch saw: the store lost its data", seen: at(other, ms+9), want: ms + 10},
		{name: "an answer was lost", mine: ms - 3, want: ms - 3},
		{name: "a store went back", seen: at(other, ms+9), mine: ms - 3, want: ms + 10},
		{name: "no coordinator has led since", leads: ms - 1000, mine: ms - 1000, want: ms - 1000},
		{name: "it leads and the store lost its data", leads: ms - 1000, want: ms - 1000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := candidate()
			own := Leader{Address: "10.0.0.1:7000", Node: "a", ID: e.id}
			if tt.mine != 0 {
				tt.before = at(own, tt.mine)
			}
			if tt.seen.Epoch != 0 {
				e.saw(tt.seen)
			}
			if tt.leads != 0 && !e.lead(at(own, tt.leads)) {
				t.Fatal("the process does not lead with its earlier epoch")
			}
			got := e.next(tt.before, began)
			if got != at(own, tt.want) {
				t.Errorf("got %+v, want epoch %d", got, tt.want)
			}
			if !e.lead(got) {
				t.Error("the process does not lead with its own record")
			}
		})
	}
}

func TestStanding(t *testing.T) {
	e := candidate()
	s, first := e.Standing()
	if s != (Standing{}) {
		t.Fatalf("at first %+v", s)
	}
	own := Leader{Address: "10.0.0.1:7000", Epoch: 100, Node: "a", ID: e.id}
	if !e.lead(own) || !changed(first) {
		t.Error("the process does not lead, or changed is not closed")
	}
	s, now := e.Standing()
	if s != (Standing{Leader: own, Leads: true}) {
		t.Errorf("e.Standing() = %+v", s)
	}
	past := Leader{Address: "x:1", Epoch: 100, ID: 9}
	e.saw(own)
	e.saw(past)
	if !e.lead(own) || changed(now) {
		t.Error("a repeated lead changes the standing")
	}
	next := Leader{Address: "x:1", Epoch: 101, ID: 9}
	e.saw(next)
	if s, _ := e.Standing(); s != (Standing{Leader: next}) || !changed(now) {
		t.Errorf("the process still leads after a higher epoch: %+v", s)
	}
	if e.lead(own) {
		t.Error("the process leads with an earlier epoch")
	}
	own.Epoch = 102
	if !e.lead(own) {
		t.Error("the process does not lead again")
	}
	e.Resign()
	e.Resign()
	if s, _ := e.Standing(); s != (Standing{Leader: own}) {
		t.Errorf("Standing after Resign = %+v", s)
	}
	own.Epoch = 103
	if e.lead(own) {
		t.Error("the process leads after Resign")
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(`{"address":"10.0.0.1:7000","epoch":1800000000000,"node":"a","id":"18446744073709551615"}`)
	f.Add(`{"address":"10.0.0.1:7000"}`)
	f.Add(`{"epoch":-1,"address":"x"}`)
	f.Add(`{"epoch":1e30}`)
	f.Add(`null`)
	f.Add(`[`)
	f.Add(`{"address":"` + strings.Repeat("a", maxRecord) + `","epoch":1}`)
	f.Fuzz(func(t *testing.T, text string) {
		l, err := parse([]byte(text))
		if err != nil {
			if l != (Leader{}) || strings.Contains(err.Error(), "10.0.0.1") {
				t.Fatalf("%+v, %v", l, err)
			}
			return
		}
		again, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := parse(again); len(again) <= maxRecord && (err != nil || back != l) {
			t.Fatalf("%+v is read back as %+v, %v", l, back, err)
		}
	})
}
