package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// scaleRow is one question about scale: what its figures are over the size of something. Its
// figures are lines in the format of Go's benchmarks, CURVE/SIZE with a value for each unit.
type scaleRow struct {
	name  string
	about string // of its plot, for screen readers
	size  string // what the sizes count
	axis  string // what the values of the plot count
	// pkg and bench are a Go benchmark. A row without them is measured by run, on the built program.
	pkg, bench string
	run        func(s *scale, ctx context.Context, out io.Writer) error
	env        []string
	columns    []scaleColumn
}

// scaleColumn is a column of the table for each curve.
type scaleColumn struct {
	unit, head string
	drawn      bool // in the plot too
}

var scaleRows = []scaleRow{
	{
		name: "targets", about: "CPU time of a placement over the number of targets", size: "targets", axis: "µs of CPU for a placement",
		pkg: "./conformance/policies", bench: "^BenchmarkScaleTargets$",
		columns: []scaleColumn{{"cpu-µs/placement", "CPU, µs", true}, {"p99-cpu-µs", "p99, µs", false}},
	}, {
		name: "models", about: "CPU time of a placement over the number of models", size: "models", axis: "µs of CPU for a placement",
		pkg: "./conformance/policies", bench: "^BenchmarkScaleModels$",
		columns: []scaleColumn{{"cpu-µs/placement", "CPU, µs", true}, {"p99-cpu-µs", "p99, µs", false}},
	}, {
		name: "conversations", about: "bytes and time over the number of conversations", size: "conversations", axis: "ns of CPU, or bytes",
		pkg: "./proxy/state/conversation", bench: "^BenchmarkScaleConversations$",
		columns: []scaleColumn{{"cpu-ns/turn", "CPU of a turn, ns", true}, {"B/conversation", "bytes", true}},
	}, {
		name: "index", about: "bytes and time over the number of index entries", size: "entries", axis: "bytes an entry, or µs of CPU",
		pkg: "./proxy/state/kvindex", bench: "^BenchmarkScaleIndex$", env: []string{"GOGC=25", "GOMEMLIMIT=5GiB"},
		columns: []scaleColumn{
			{"B/pair", "bytes an entry", true}, {"cpu-ns/event", "CPU of an event, ns", false},
			{"match-p50-µs", "match p50, µs", true}, {"match-p99-µs", "match p99, µs", true},
		},
	}, {
		name: "streams", about: "memory and CPU time over the number of open streams", size: "open streams", axis: "KB of RSS, or µs of CPU",
		run:     (*scale).streams,
		columns: []scaleColumn{{"kB/stream", "RSS a stream, KB", true}, {"cpu-µs/event", "CPU of an event, µs", true}},
	}, {
		name: "workers", about: "placements over the number of workers", size: "workers", axis: "µs",
		pkg: "./proxy/coordinator/fleet", bench: "^BenchmarkScaleWorkers$",
		columns: []scaleColumn{
			{"placements/s", "placements/s", false}, {"cpu-µs/placement", "CPU of the coordinator, µs", true},
			{"p50-µs", "p50 at 2,000/s, µs", true}, {"p99-µs", "p99 at 2,000/s, µs", true},
		},
	}, {
		name: "mirror", about: "CPU time of the state for the workers over the number of engines", size: "engines", axis: "µs of CPU",
		pkg: "./proxy/engine", bench: "^BenchmarkScaleMirror$",
		columns: []scaleColumn{
			{"loads-kB", "loads, KB", false}, {"members-kB", "members, KB", false}, {"encode-µs", "encode loads, µs", true},
			{"import-µs", "import loads, µs", true}, {"snapshot-µs", "snapshot, µs", true},
		},
	}, {
		name: "events", about: "times of KV events and placements over the number of engines", size: "engines", axis: "µs",
		pkg: "./conformance/policies", bench: "^BenchmarkScaleEngines$",
		columns: []scaleColumn{
			{"cpu-ns/event", "CPU of an event, ns", false}, {"delay-p50-µs", "event to index p50, µs", true},
			{"delay-p99-µs", "event to index p99, µs", true}, {"place-p50-µs", "placement p50, µs", true}, {"place-p99-µs", "placement p99, µs", true},
		},
	}, {
		name: "engines", about: "times of a request over the number of engines", size: "engines", axis: "ms",
		run: (*scale).engines,
		columns: []scaleColumn{
			{"start-s", "start, s", false}, {"start-cpu-s", "CPU of the start, s", false}, {"idle-cpu-ms/s", "CPU without load, ms/s", false}, {"rss-MB", "RSS after 1,000 requests, MB", false},
			{"p50-ms", "request p50, ms", true}, {"p99-ms", "request p99, ms", true}, {"cpu-µs/request", "CPU of a request, µs", false},
		},
	},
}

// scale is one run of the rows.
type scale struct {
	suite
	results string // folder with the figures of each row
}

func scaleCommand(args []string) error {
	fs := flag.NewFlagSet("scale", flag.ContinueOnError)
	binary := fs.String("pdproxy", "bin/pdproxy", "`program` under test")
	only := fs.String("only", "", "`pattern` of rows; empty: all")
	results := fs.String("results", "build/scale", "`folder` for the figures of each row, which also has those of earlier runs")
	page := fs.String("page", "docs/scale.md", "`file` whose tables are replaced; the plots go to images beside it")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &scale{suite: suite{log: os.Stderr, core: 1}, results: *results}
	s.programs = programs{pdproxy: *binary, descriptors: descriptorLimit()}
	if err := s.prepare(); err != nil {
		return err
	}
	defer os.RemoveAll(s.programs.dir)
	for i := range scaleRows {
		if r := &scaleRows[i]; pattern.MatchString(r.name) {
			if err := s.measureRow(ctx, r); err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
		}
	}
	return s.writePage(*page)
}

func (s *scale) prepare() (err error) {
	if s.programs.self, err = os.Executable(); err != nil {
		return err
	}
	if s.programs.dir, err = os.MkdirTemp("", "scale"); err != nil {
		return err
	}
	return os.MkdirAll(s.results, 0o755)
}

// measureRow measures a row and stores its figures.
func (s *scale) measureRow(ctx context.Context, r *scaleRow) error {
	var text strings.Builder
	out := io.MultiWriter(&text, os.Stdout)
	if r.run != nil {
		if err := r.run(s, ctx, out); err != nil {
			return err
		}
	} else {
		cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", r.bench, "-benchtime", "300ms", "-timeout", "15m", r.pkg)
		cmd.Env = append(os.Environ(), r.env...)
		cmd.Stdout, cmd.Stderr = out, os.Stderr
		if err := cmd.Run(); err != nil {
			return err
		}
	}
	return os.WriteFile(s.file(r), []byte(text.String()), 0o644)
}

func (s *scale) file(r *scaleRow) string { return filepath.Join(s.results, r.name+".txt") }

// curves are the figures of a row: by curve and unit, the values by size in ascending order.
type curves struct {
	names  []string
	sizes  []float64
	values map[[2]string][][2]float64
}

var errNoFigures = errors.New("no figures")

func (s *scale) read(r *scaleRow) (*curves, error) {
	text, err := os.ReadFile(s.file(r))
	if err != nil {
		return nil, err
	}
	return parseFigures(string(text))
}

// parseFigures reads lines of Go's benchmarks: Benchmark…/CURVE/SIZE-CPUS, the iterations, then
// pairs of value and unit. Other lines are skipped.
func parseFigures(text string) (*curves, error) {
	f := &curves{values: map[[2]string][][2]float64{}}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		_, name, _ := strings.Cut(fields[0], "/")
		if cut := strings.LastIndexByte(name, '-'); cut > strings.LastIndexByte(name, '/') {
			name = name[:cut]
		}
		curve, last := "", name
		if cut := strings.LastIndexByte(name, '/'); cut >= 0 {
			curve, last = name[:cut], name[cut+1:]
		}
		size, err := strconv.ParseFloat(last, 64)
		if err != nil {
			return nil, fmt.Errorf("size of %s: %w", fields[0], err)
		}
		if !slices.Contains(f.names, curve) {
			f.names = append(f.names, curve)
		}
		if !slices.Contains(f.sizes, size) {
			f.sizes = append(f.sizes, size)
		}
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, fmt.Errorf("value of %s: %w", fields[0], err)
			}
			key := [2]string{curve, fields[i+1]}
			f.values[key] = append(f.values[key], [2]float64{size, v})
		}
	}
	if len(f.sizes) == 0 {
		return nil, errNoFigures
	}
	slices.Sort(f.sizes)
	return f, nil
}

// at returns the value at a size. Between two sizes the value is on the line through both; above
// the largest size it grows as between the last two.
func (f *curves) at(curve, unit string, size float64) (float64, error) {
	points := f.values[[2]string{curve, unit}]
	if len(points) < 2 {
		return 0, fmt.Errorf("%w of %s %s", errNoFigures, curve, unit)
	}
	i := 1
	for i < len(points)-1 && points[i][0] < size {
		i++
	}
	from, to := points[i-1], points[i]
	return from[1] + (to[1]-from[1])*(size-from[0])/(to[0]-from[0]), nil
}
