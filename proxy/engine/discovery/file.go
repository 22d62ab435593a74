package discovery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// readFileEvery is the time between two reads of the file. New content is applied
	// when two consecutive reads have found it, so that a partly written file is not.
	readFileEvery = 500 * time.Millisecond
	// maxFile bounds the file, in bytes.
	maxFile = 4 << 20
)

// fileSource is a list of engines in a file. It detects changes by the content.
type fileSource struct {
	path string
	log  *slog.Logger
}

// Name is the source of these engines in the registry.
func (*fileSource) Name() string { return "file" }

// Run reads the file periodically.
func (s *fileSource) Run(ctx context.Context, found func([]config.Engine)) {
	t := trouble{log: s.log, source: s.Name()}
	var seen, settled []byte
	for first := true; ; first = false {
		text, err := ReadFile(s.path)
		t.note(err)
		switch {
		case err != nil:
		case !first && !bytes.Equal(text, seen):
		case settled == nil || !bytes.Equal(text, settled):
			settled = append([]byte{}, text...) // never nil
			if engines, err := config.ParseEngines(text); err != nil {
				s.refuse(err)
			} else {
				s.log.Info("engines read", "path", s.path, "engines", len(engines))
				found(engines)
			}
		}
		seen = text
		if !pause(ctx, readFileEvery) {
			return
		}
	}
}

// ReadFile returns the content of a list of engines: of a regular file of 4 MiB at most.
func ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a named pipe without a writer would block for ever
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, cmp.Or(err, fmt.Errorf("read %s: it is no regular file", path))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("read %s: it has more than %d bytes", path, maxFile)
	}
	return text, err
}

// refuse logs the problems of the file.
func (s *fileSource) refuse(err error) {
	var problems config.Problems
	if !errors.As(err, &problems) {
		problems = config.Problems{{Message: err.Error()}}
	}
	for _, p := range problems {
		place := []any{"path", s.path}
		if p.Line > 0 {
			place = append(place, "line", p.Line)
		}
		s.log.Error("list of engines refused; the known engines stay", append(place, "key", p.Key, "problem", p.Message)...)
	}
}
