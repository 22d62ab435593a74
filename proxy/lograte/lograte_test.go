package lograte

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestEachKeyOnceInATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limiter[string]{Every: time.Minute}
		for i, step := range []struct {
			key   string
			after time.Duration
			want  bool
		}{
			{"a", 0, true},
			{"a", 59 * time.Second, false},
			{"b", 0, true},
			{"a", time.Second, true}, // a refused line does not restart the interval
			{"b", 58 * time.Second, false},
		} {
			time.Sleep(step.after)
			if got := l.Allow(step.key); got != step.want {
				t.Errorf("step %d: Allow(%q) = %v", i, step.key, got)
			}
		}
	})
}

func TestKeysAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limiter[int]{Every: time.Minute}
		logged := 0
		for range 3 {
			for key := range 2 * defaultMost {
				if l.Allow(key) {
					logged++
				}
			}
		}
		if logged != defaultMost || len(l.last) != defaultMost {
			t.Errorf("%d logged, %d remembered", logged, len(l.last))
		}
		time.Sleep(time.Minute)
		if !l.Allow(-1) || len(l.last) != 1 {
			t.Errorf("%d remembered after a minute", len(l.last))
		}
	})
}
