package plot

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestTicks(t *testing.T) {
	for _, tt := range []struct {
		name   string
		scale  Scale
		n      int
		format func(float64) string
		want   string
	}{
		{"shares", Scale{From: 0, To: 1}, 7, TickPercent, "0 %|20 %|40 %|60 %|80 %|100 %"},
		{"thousands", Scale{From: 15300, To: 18600}, 7, TickCount, "15k|15.5k|16k|16.5k|17k|17.5k|18k|18.5k|19k"},
		{"close thousands", Scale{From: 15301, To: 15309}, 4, TickCount, "15.3k|15.302k|15.304k|15.306k|15.308k|15.31k"},
		{"millions", Scale{From: 1, To: 2e6, Logarithmic: true}, 7, TickCount, "1|10|100|1000|10k|100k|1 M|10 M"},
		{"times", Scale{From: 3, To: 60, Logarithmic: true}, 12, TickTime, "2 ms|5 ms|10 ms|20 ms|50 ms|100 ms"},
		{"long times", Scale{From: 300, To: 4000, Logarithmic: true}, 10, TickTime, "200 ms|500 ms|1 s|2 s|5 s"},
		{"narrow times", Scale{From: 135, To: 145, Logarithmic: true}, 10, TickTime, "135 ms|136 ms|137 ms|138 ms|139 ms|140 ms|141 ms|142 ms|143 ms|144 ms|145 ms"},
		{"narrower times", Scale{From: 140, To: 140.3, Logarithmic: true}, 7, TickTime, "140 ms|140.05 ms|140.1 ms|140.15 ms|140.2 ms|140.25 ms|140.3 ms"},
		{"times about a second", Scale{From: 998, To: 1003, Logarithmic: true}, 5, TickTime, "998 ms|999 ms|1 s|1.001 s|1.002 s|1.003 s"},
		{"few requests", Scale{To: 4, Zero: true}, 7, TickCount, "0|1|2|3|4"},
		{"more requests", Scale{To: 37, Zero: true}, 7, TickCount, "0|1|2|5|10|20|50"},
		{"many requests", Scale{To: 4200, Zero: true}, 7, TickCount, "0|1|10|100|1000|10k"},
		{"no requests", Scale{Zero: true}, 7, TickCount, "0|1|2"},
		{"one value", Scale{From: 7, To: 7}, 5, TickCount, "7|7.2|7.4|7.6|7.8|8"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := strings.Join(texts(tt.scale.ticks(tt.n), tt.format), "|"); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func texts(ticks []float64, format func(float64) string) (all []string) {
	for _, v := range ticks {
		all = append(all, format(v))
	}
	return all
}

// Every scale has at least three labels, which differ and have room, and no value is beyond the first and the last one.
func TestTicksOfAnyScale(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		from := math.Pow(10, random.Float64()*8-1)
		s := Scale{From: from, To: from * (1 + math.Pow(10, random.Float64()*10-5)), end: plotWidth - plotLeft - plotRight}
		format, least := TickCount, 0.0
		switch random.IntN(4) {
		case 0:
			s.From = 0
		case 1:
			s.Logarithmic, format, least = true, TickTime, from
		case 2:
			s.Zero, s.From, s.To = true, 0, math.Ceil(from)
		}
		before, most := s, s.To
		ticks := s.ticks(xTicks)
		texts := texts(ticks, format)
		if distinct := slices.Compact(slices.Clone(texts)); len(distinct) != len(texts) || len(texts) < 3 || len(texts) > xTicks+4 {
			t.Fatalf("%+v: labels %q", before, texts)
		}
		if s.To < most*(1-1e-9) || s.From > max(least, before.From)*(1+1e-9) {
			t.Fatalf("%+v: scale %g to %g, labels %q", before, s.From, s.To, texts)
		}
		for i := 1; i < len(ticks); i++ {
			if gap := s.At(ticks[i]) - s.At(ticks[i-1]); gap < 16 {
				t.Fatalf("%+v: labels %q and %q are %.0f apart", before, texts[i-1], texts[i], gap)
			}
		}
	}
}

// A long name keeps its beginning and its end, and the whole name is the title.
func TestLongNames(t *testing.T) {
	long := "/home/somebody/policies/nearest/with-a-long-name/nearest.wasm"
	text := string(NewRows("rows", []string{"kv_aware", long, strings.Repeat("W", 60)}).HTML())
	for _, want := range []string{">kv_aware</text>", ">/home/someb…earest.wasm<title>" + long + "</title></text>"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	if got := shorten(strings.Repeat("W", 60), rowLeft-rowGap); widthOf(got) > rowLeft-rowGap || !strings.HasPrefix(got, "WWWWW") || !strings.HasSuffix(got, "WWWWW") {
		t.Errorf("shortened to %q", got)
	}
}

// Text on a bar has the contrast of at least 4.5 that WCAG 2.2 requires of text.
func TestTextOnBars(t *testing.T) {
	if got := fmt.Sprintf("%.1f %.2f", contrast("#000000", "#ffffff"), contrast("#777777", "#ffffff")); got != "21.0 4.48" {
		t.Errorf("contrasts %s", got)
	}
	for _, color := range colors {
		if c := contrast(color, inkOn(color)); c < 4.5 {
			t.Errorf("%s on %s: contrast %.2f", inkOn(color), color, c)
		}
	}
}
