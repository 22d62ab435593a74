package loadgen

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A server that serves one request at a time delays the others. Their times count from
// the time at which they were due, although the bound of open requests holds them back.
func TestCoordinatedOmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := config(s)
		c.Requests, c.Rate, c.MaxOpen = 50, 10, 1
		r := measure(t, s, c)
		if s.most != 1 || r.Failed != 0 {
			t.Fatalf("%d at a time, %d failed", s.most, r.Failed)
		}
		// An answer takes 1.4 s, so the last request is sent after 49 of them.
		last := r.Samples[49]
		if want := 49 * 1400.; last.Scheduled+last.Late != want || last.Total != last.Late+1400 || last.First != last.Late+1000 {
			t.Errorf("the last request %+v", last)
		}
		if r.TTFTSent.Max != 1000 || r.TotalSent.Max != 1400 || r.TTFT.Max != r.Late.Max+1000 || r.Late.Max < 50_000 {
			t.Errorf("%+v", r)
		}
		c.MaxOpen = 0
		if r := measure(t, s, c); r.Late.Max != 0 || r.TTFT.Max != 1000 {
			t.Errorf("without a bound: %+v", r)
		}
	})
}

// Each turn repeats the prompts and answers before, and is sent a time of thinking after
// the answer before.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := config(s)
		c.Requests, c.Concurrency, c.Turns, c.TurnWords, c.Think = 7, 1, 3, 4, 10*time.Second
		r := measure(t, s, c)
		var lengths []int
		var first []message
		for n, text := range s.asked {
			var b struct{ Messages []message }
			if err := json.Unmarshal([]byte(text[strings.Index(text, "{"):]), &b); err != nil {
				t.Fatal(err)
			}
			lengths = append(lengths, len(b.Messages))
			if n == 2 {
				first = b.Messages
			}
		}
		if fmt.Sprint(lengths) != "[1 3 5 1 3 5 1]" {
			t.Errorf("messages of the requests: %v", lengths)
		}
		if answer := strings.Repeat("tide", 5); first[1] != (message{"assistant", answer}) || first[3] != first[1] || len(strings.Fields(first[4].Content)) != 4 {
			t.Errorf("third turn %q", first)
		}
		if r.Requests != 7 || r.Skipped != 0 || r.Samples[2].Turn != 2 || r.Samples[2].Conversation != 0 || r.Samples[6].Conversation != 2 {
			t.Errorf("%+v", r)
		}
		if r.Late.Max != 0 || r.Samples[1].Scheduled <= 1400 || r.Seconds < 20 {
			t.Errorf("%+v", r)
		}
	})
}

func TestTurnsEndWithFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(n int) (int, []string) {
			if n == 1 {
				return 503, nil
			}
			return 200, good()
		}}
		c := config(s)
		c.Requests, c.Concurrency, c.Turns, c.TurnWords, c.API = 6, 1, 3, 1, APICompletions
		r := measure(t, s, c)
		if r.Requests != 5 || r.Failed != 1 || r.Skipped != 1 || len(s.asked) != 5 {
			t.Errorf("%+v", r)
		}
		if !strings.Contains(s.asked[3], `tidetidetidetidetide\n`) {
			t.Errorf("second turn of completions %s", s.asked[3])
		}
	})
}

// Interrupted conversations are no failures.
func TestThinkEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := config(s)
		c.Requests, c.Turns, c.TurnWords, c.Think = 4, 2, 1, 1000*time.Hour
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		r, err := Run(ctx, c)
		if err != nil || r.Requests != 2 || r.Failed != 0 || r.Seconds != 3 {
			t.Errorf("%+v, %v", r, err)
		}
		synctest.Wait()
	})
}
