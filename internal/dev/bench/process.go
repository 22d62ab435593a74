package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

const (
	startLimit = 20 * time.Second
	stopLimit  = 10 * time.Second
)

// process is one started program, pinned to one core.
type process struct {
	addr    string
	metrics string // address of the metrics; "" if it has none
	log     string
	cmd     *exec.Cmd
	done    chan struct{} // closed when it has ended
	err     error         // how it ended, once done is closed
}

// launch starts a program on a core. Its output goes to a file in dir with the
// program's name. The end of ctx ends it.
func launch(ctx context.Context, dir, name string, core int, argv ...string) (*process, error) {
	p := &process{log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the program has its own descriptor
	p.cmd = pinned(ctx, core, argv...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// pinned returns a command that runs on one core only. taskset replaces itself
// by the program, so the process id is the program's.
func pinned(ctx context.Context, core int, argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "taskset", append([]string{"-c", strconv.Itoa(core)}, argv...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopLimit
	return cmd
}

// await calls ready until it returns no error.
func (p *process) await(ready func() error) error {
	limit := time.Now().Add(startLimit)
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("ended at its start (%v): %s", p.err, p.tail())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(limit) {
			return fmt.Errorf("not ready after %s: %w; %s", startLimit, err, p.tail())
		}
	}
}

// stop ends the program and waits for it.
func (p *process) stop() {
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopLimit):
		p.cmd.Process.Kill()
		<-p.done
	}
}

// tail returns the last part of the program's output.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text[max(0, len(text)-600):]))
}

// freeAddr returns a loopback address without a listener.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

// accepts reports whether the address has a listener.
func accepts(addr string) error {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return err
	}
	return c.Close()
}
