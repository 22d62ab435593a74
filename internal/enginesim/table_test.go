package enginesim

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

var update = flag.Bool("update", false, "rewrite the answers in testdata that differ")

// TestTables runs the tables in testdata. README.md there describes their format.
func TestTables(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			raw, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			f := &table{lines: strings.Split(strings.TrimSuffix(string(raw), "\n"), "\n"), fixes: map[int]string{}}
			var starts []int
			for i, line := range f.lines {
				if strings.HasPrefix(line, "== ") {
					starts = append(starts, i)
				}
			}
			starts = append(starts, len(f.lines))
			for i, from := range starts[:len(starts)-1] {
				t.Run(strings.TrimPrefix(f.lines[from], "== "), func(t *testing.T) {
					r := &runner{t: t, f: f, defs: map[string]string{}, procs: map[string][2]int{}, engines: map[string]*Engine{}, answers: map[string]*exchange{}}
					r.subscribers, r.hashes = map[string]<-chan published{}, map[string]string{}
					r.run(0, starts[0])
					r.run(from+1, starts[i+1])
				})
			}
			if *update && len(f.fixes) > 0 {
				f.rewrite(t, name)
			}
		})
	}
}

// table is a file in testdata. fixes are new answers by the line of their request.
type table struct {
	lines []string
	fixes map[int]string
}

// rewrite replaces the answers of all requests that have a fix.
func (f *table) rewrite(t *testing.T, name string) {
	t.Helper()
	var out []string
	for i := 0; i < len(f.lines); i++ {
		answer, wrong := f.fixes[i]
		if !wrong {
			out = append(out, f.lines[i])
			continue
		}
		request, _, _ := strings.Cut(f.lines[i], " => ")
		for i+1 < len(f.lines) && strings.HasPrefix(f.lines[i+1], "< ") {
			i++
		}
		if list := strings.Split(answer, "\n"); len(list) > 1 {
			out = append(out, request, "< "+strings.Join(list, "\n< "))
		} else {
			out = append(out, request+" => "+answer)
		}
	}
	if err := os.WriteFile(name, []byte(strings.Join(out, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// runner runs the lines of one case.
type runner struct {
	t       *testing.T
	f       *table
	at      int // the current line, from 0
	defs    map[string]string
	procs   map[string][2]int // the lines of a proc, without its end
	engines map[string]*Engine
	answers map[string]*exchange
	// KV events, see eventCommand.
	subscribers map[string]<-chan published
	hashes      map[string]string
}

// exchange is a request that was sent, perhaps in the background.
type exchange struct {
	answer
	err   error
	shown string // what a table shows instead of the answer
	took  time.Duration
	done  chan struct{}
	leave context.CancelFunc
}

func (r *runner) fatalf(format string, args ...any) {
	r.t.Helper()
	r.t.Fatalf("line %d: %s: %s", r.at+1, r.f.lines[r.at], fmt.Sprintf(format, args...))
}

func (r *runner) errorf(format string, args ...any) {
	r.t.Helper()
	r.t.Errorf("line %d: %s: %s", r.at+1, r.f.lines[r.at], fmt.Sprintf(format, args...))
}

// run runs the lines from until to.
func (r *runner) run(from, to int) {
	r.t.Helper()
	for i := from; i < to; i++ {
		line := strings.TrimLeft(r.f.lines[i], "\t")
		if line == "" || strings.HasPrefix(line, "#") || isAnswer(line) {
			continue
		}
		r.at = i
		word, rest, _ := strings.Cut(line, " ")
		if word != "def" && word != "for" {
			word, rest, _ = strings.Cut(r.define(line), " ")
		}
		switch word {
		case "for", "proc":
			end := r.end(i, to)
			if word == "for" {
				r.loop(rest, i+1, end)
			} else {
				r.procs[rest] = [2]int{i + 1, end}
			}
			i = end
		case "do":
			lines, ok := r.procs[rest]
			if !ok {
				r.fatalf("there is no proc %q", rest)
			}
			r.run(lines[0], lines[1])
		default:
			r.command(word, rest)
		}
	}
}

// end returns the line that ends the block that begins at from.
func (r *runner) end(from, to int) int {
	r.t.Helper()
	depth := 0
	for i := from; i < to; i++ {
		switch word, _, _ := strings.Cut(strings.TrimLeft(r.f.lines[i], "\t"), " "); word {
		case "for", "proc":
			depth++
		case "end":
			if depth--; depth == 0 {
				return i
			}
		}
	}
	r.fatalf("no end")
	return to
}

// loop runs lines for each value of a variable, "for n = 1 2", or for each row of
// several variables, "for a b" with rows "| A B" after it. The last value of a row may
// have spaces; "-" is an empty value.
func (r *runner) loop(head string, from, end int) {
	r.t.Helper()
	name, values, listed := strings.Cut(head, " = ")
	names, rows := strings.Fields(name), strings.Fields(values)
	for ; !listed && strings.ContainsAny(strings.TrimLeft(r.f.lines[from], "\t")[:1], "|#"); from++ {
		if row, ok := strings.CutPrefix(strings.TrimLeft(r.f.lines[from], "\t"), "| "); ok {
			rows = append(rows, row)
		}
	}
	for _, row := range rows {
		cells := strings.SplitN(row, " ", len(names))
		if len(cells) != len(names) {
			r.fatalf("row %q", row)
		}
		for i, name := range names {
			if r.defs[name] = cells[i]; cells[i] == "-" {
				r.defs[name] = ""
			}
		}
		r.run(from, end)
	}
}

func isAnswer(line string) bool {
	mark, _, _ := strings.Cut(line, " ")
	return mark == "<" || mark == "~" || mark == "!~" || mark == "+" || mark == "H"
}

func (r *runner) command(word, rest string) {
	r.t.Helper()
	first, more, _ := strings.Cut(rest, " ")
	switch word {
	case "def":
		r.defs[first] = more
	case "let":
		r.defs[first] = r.expand(more)
	case "engine":
		r.engines[first] = startAsConfigured(r.t, r.config(strings.Fields(r.expand(more))))
	case "free":
		r.defs[first] = strconv.Itoa(testbed.Ports(r.t, 1))
	case "check":
		if got := r.compare(first, more); got != "" {
			r.errorf("%s", got)
		}
	case "until":
		eventually(r.t, fmt.Sprintf("line %d: %s", r.at+1, rest), func() bool { return r.compare(first, more) == "" })
	case "same", "differ", "begins":
		a, b := r.wait(first).text(r.t), r.wait(more).text(r.t)
		if word == "begins" && !strings.HasPrefix(b, a) || word != "begins" && (a == b) != (word == "same") {
			r.errorf("%q and %q", a, b)
		}
	case "equal":
		if want := r.expand(more); r.expand(first) != want {
			r.errorf("%s, want %s", r.expand(first), want)
		}
	case "wait":
		name, want, _ := strings.Cut(rest, " => ")
		r.expect(r.wait(name), want)
	case "poll":
		eventually(r.t, fmt.Sprintf("line %d: %s", r.at+1, rest), func() bool {
			x, want := r.request(first, more)
			list, wrong := r.problems(x, want)
			return len(list) == 0 && !wrong
		})
	case "leave":
		r.answers[first].leave()
	case "fault":
		r.fault(r.engine(first), more)
	case "kill":
		r.engine(first).Kill()
	case "close":
		r.engine(first).Close()
	case "hangup":
		http.DefaultClient.CloseIdleConnections()
	case "unpin":
		for _, rank := range r.engine(first).Ranks {
			rank.UnpinAll()
		}
	case "died":
		select {
		case <-r.engine(first).Died():
		case <-time.After(20 * time.Second):
			r.errorf("the engine still runs")
		}
	default:
		if r.eventCommand(word, rest) {
			return
		}
		if x, want := r.request(word, rest); x != nil {
			r.expect(x, want)
		}
	}
}

func (r *runner) engine(name string) *Engine {
	r.t.Helper()
	e := r.engines[name]
	if e == nil {
		r.fatalf("there is no engine %q", name)
	}
	return e
}

func (r *runner) fault(e *Engine, words string) {
	r.t.Helper()
	set := map[string]string{}
	for word := range strings.FieldsSeq(words) {
		name, value, _ := strings.Cut(word, "=")
		set[name] = value
	}
	if err := e.SetFault(set["fail"], 0, set["hang"]); err != nil {
		r.fatalf("%v", err)
	}
}
