package load

import (
	"testing"
	"time"
)

var epoch = time.Unix(1_800_000_000, 0)

func TestReport(t *testing.T) {
	type hold struct {
		streams          int
		tokens           int64 // tokens of each stream
		queued, uncached int64 // tokens of one prefill: the whole prompt, and its uncached part
	}
	tests := []struct {
		name        string
		then, since hold // load at the start of the poll, and additional load at the answer
		report      Report
		after       hold // load at a later time
		want        View
	}{
		{
			name: "nothing of ours", report: Report{Running: 3, Waiting: 1, Tokens: 8000, Queued: 500, Usage: 0.25},
			want: View{Requests: 4, Tokens: 8000, Queued: 500, Decode: 7500, Usage: 0.25},
		},
		{
			name: "all ours", then: hold{streams: 4, tokens: 100}, report: Report{Running: 3, Waiting: 1, Tokens: 300, Usage: 0.1},
			want: View{Requests: 4, Tokens: 400, Decode: 400, Usage: 0.1},
		},
		{
			name: "some of ours have not arrived", then: hold{streams: 10, tokens: 100}, report: Report{Running: 3, Tokens: 300},
			want: View{Requests: 10, Tokens: 1000, Decode: 1000},
		},
		{
			name: "half foreign", then: hold{streams: 2, tokens: 100}, report: Report{Running: 4, Tokens: 2000, Usage: 0.5},
			want: View{Requests: 4, Tokens: 1200, Decode: 1200, Usage: 0.5},
		},
		{
			name: "ours came while it was asked", then: hold{streams: 1, tokens: 100}, since: hold{streams: 3, tokens: 100},
			report: Report{Running: 4, Tokens: 400}, want: View{Requests: 4, Tokens: 400, Decode: 400},
		},
		{
			name: "ours that came later are not foreign before", then: hold{streams: 2, tokens: 100},
			report: Report{Running: 3, Tokens: 300}, after: hold{streams: 5, tokens: 10},
			want: View{Requests: 8, Tokens: 350, Decode: 350},
		},
		{
			name: "tokens unknown: as large as this proxy's load", then: hold{streams: 2, tokens: 100}, report: Report{Running: 3, Queued: -1},
			want: View{Requests: 3, Tokens: 300, Decode: 300},
		},
		{
			name: "tokens unknown and none of ours", report: Report{Running: 3, Queued: -1}, want: View{Requests: 3},
		},
		{
			name: "foreign queue", then: hold{queued: 1000, uncached: 400}, report: Report{Running: 1, Waiting: 2, Tokens: 3000, Queued: 900},
			want: View{Requests: 3, Tokens: 3000, Queued: 900, Decode: 1500},
		},
		{
			name: "the queue is ours", then: hold{queued: 1000, uncached: 400}, report: Report{Waiting: 1, Queued: 380},
			want: View{Requests: 1, Tokens: 1000, Queued: 400},
		},
		{
			name: "queue unknown: waiting ones like ours", then: hold{queued: 1600, uncached: 1600}, report: Report{Running: 1, Waiting: 2, Queued: -1},
			want: View{Requests: 3, Tokens: 1600 + 3200, Queued: 1600 + 3200},
		},
		{
			name: "nonsense", report: Report{Running: -5, Waiting: -1, Tokens: -7, Queued: -3}, want: View{},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c Counter
			add := func(h hold) {
				for range h.streams {
					c.Hold(h.tokens)
				}
				if h.queued != 0 {
					c.HoldPrefill(h.queued, h.uncached)
				}
			}
			add(tt.then)
			m := c.Mark()
			add(tt.since)
			tt.report.At, tt.report.Every = epoch, time.Second
			c.Report(tt.report, m)
			add(tt.after)
			if got := c.View(epoch); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if got, ok := c.Reported(); !ok || got != tt.report {
				t.Errorf("reported %+v, %v", got, ok)
			}
		})
	}
}

// TestReportOfOursThatEnded: requests of this proxy that ended during the poll are in the
// report, but are not foreign load.
func TestReportOfOursThatEnded(t *testing.T) {
	var c Counter
	holds := []Hold{c.Hold(10), c.Hold(10), c.Hold(10)}
	m := c.Mark()
	for i := range holds {
		holds[i].Drop()
	}
	c.Report(Report{At: epoch, Every: time.Second, Running: 3, Tokens: 30}, m)
	if v := c.View(epoch); v.Requests != 0 || v.Tokens != 0 {
		t.Errorf("c.View(epoch) = %+v", v)
	}
}

func TestReportFades(t *testing.T) {
	var c Counter
	c.Hold(10)
	c.Report(Report{At: epoch, Every: time.Second, Running: 101, Tokens: 1010, Queued: 400, Usage: 0.5}, c.Mark())
	for _, tt := range []struct {
		after time.Duration
		want  View
	}{
		{-time.Second, View{Requests: 101, Tokens: 1010, Queued: 400, Decode: 610, Usage: 0.5}}, // the clock was set back
		{0, View{Requests: 101, Tokens: 1010, Queued: 400, Decode: 610, Usage: 0.5}},
		{2 * time.Second, View{Requests: 101, Tokens: 1010, Queued: 400, Decode: 610, Usage: 0.5}},
		{3 * time.Second, View{Requests: 76, Tokens: 760, Queued: 300, Decode: 460, Usage: 0.5}},
		{4 * time.Second, View{Requests: 51, Tokens: 510, Queued: 200, Decode: 310, Usage: 0.5}},
		{6 * time.Second, View{Requests: 1, Tokens: 10, Decode: 10}},
		{time.Hour, View{Requests: 1, Tokens: 10, Decode: 10}},
	} {
		if got := c.View(epoch.Add(tt.after)); got != tt.want {
			t.Errorf("view after %s: got  %+v\nwant %+v", tt.after, got, tt.want)
		}
	}
	c.Forget()
	if got := c.View(epoch); got != (View{Requests: 1, Tokens: 10, Decode: 10}) {
		t.Errorf("view after Forget: %+v", got)
	}
	if _, ok := c.Reported(); ok {
		t.Error("Reported after Forget = true")
	}
}

// TestWaiting: requests since the report count as waiting after the room of the engine is full.
func TestWaiting(t *testing.T) {
	base := time.Unix(1000, 0)
	for _, tt := range []struct {
		name           string
		reports        [][2]int32 // running, waiting
		before, after  int        // own requests at the last report, and now
		at             time.Duration
		waiting, space int32
		ok             bool
	}{
		{"no report", nil, 0, 3, 0, 0, 0, false},
		{"as reported", [][2]int32{{4, 2}}, 0, 0, 0, 2, 0, true},
		{"sent since", [][2]int32{{4, 2}}, 3, 5, 0, 4, 0, true},
		{"ended since", [][2]int32{{4, 2}}, 5, 2, 0, 0, 1, true},
		{"as many again", [][2]int32{{4, 0}}, 4, 8, 0, 0, 0, true},
		{"and one more", [][2]int32{{4, 0}}, 4, 9, 0, 1, 0, true},
		{"it ran more before", [][2]int32{{20, 3}, {4, 0}}, 4, 9, 0, 0, 11, true},
		{"idle", [][2]int32{{0, 0}}, 0, 2, 0, 2, 0, true},
		{"old report", [][2]int32{{4, 2}}, 0, 0, 6 * time.Second, 0, 0, false},
		{"nonsense", [][2]int32{{-4, -2}}, 0, 0, 0, 0, 0, true},
	} {
		var c Counter
		for range tt.before {
			c.Hold(1)
		}
		for _, r := range tt.reports {
			c.Report(Report{At: base, Every: time.Second, Running: r[0], Waiting: r[1]}, c.Mark())
		}
		for range tt.after - tt.before {
			c.Hold(1)
		}
		if less := tt.before - tt.after; less > 0 {
			c.requests.Add(int32(-less))
		}
		waiting, space, ok := c.Waiting(base.Add(tt.at))
		if waiting != tt.waiting || space != tt.space || ok != tt.ok {
			t.Errorf("%s: %d wait, room for %d, %t; want %d, %d, %t", tt.name, waiting, space, ok, tt.waiting, tt.space, tt.ok)
		}
	}
}

// TestWaitingFollows: another process learns the estimate, and that an engine does not report.
func TestWaitingFollows(t *testing.T) {
	now := time.Unix(1000, 0)
	var from, to Counter
	from.Hold(1)
	to.Follow(from.Copy(now), now, time.Second)
	if _, _, ok := to.Waiting(now); ok {
		t.Error("an engine without a report has an estimate in the other process")
	}
	from.Report(Report{At: now, Every: time.Second, Running: 3, Waiting: 2, Usage: 0.5}, from.Mark())
	from.Hold(1)
	to.Follow(from.Copy(now), now, time.Second)
	if waiting, room, ok := to.Waiting(now); waiting != 3 || room != 0 || !ok {
		t.Errorf("%d wait, room for %d, %t; want 3, 0, true", waiting, room, ok)
	}
	to.Hold(1) // this process has sent one since
	if waiting, _, _ := to.Waiting(now); waiting != 4 {
		t.Errorf("%d wait, want 4", waiting)
	}
	if v := to.View(now); v.Usage != 0.5 || v.Requests != 7 {
		t.Errorf("the other process sees %+v", v)
	}
}
