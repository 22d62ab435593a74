package cmd

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/terminal"
	"github.com/pdproxy/pdproxy/proxy/admin"
)

func (a *app) statusCommand() *cobra.Command {
	var flags adminFlags
	once := false
	c := &cobra.Command{
		Use:   "status",
		Short: "Show engines, pairs, policies, queue and traffic of a running proxy or fleet",
		Long: `Show engines, pairs, policies, queue and traffic of a running proxy or of a whole
fleet, as its page for browsers does. In a terminal the command shows the present state
each second, until q or Ctrl-C. Engines and pairs that need attention come first, with
a ! and in red.

REQS counts the requests that the proxy has sent to an engine, QUEUED the tokens of
prompts that wait there for prefill. RUN and WAIT are the engine's own counts.

With --once or --json, and if the output is no terminal, the command prints one state
and ends. It takes a second, in which it measures the traffic. The exit code is then 1
if no proxy has answered; the state of the engines does not change it.`,
		Example: `  pdproxy status
  pdproxy status --admin 10.0.0.5:9090 --token-file admin.token
  pdproxy status --once
  pdproxy status --json | jq -r '.engines[] | select(.state != "ready") | .name'`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			if _, _, ok := terminal.Size(a.out); ok && !once && !a.json {
				return exit.Failed(a.watchStatus(ctx, flags))
			}
			return exit.Failed(a.printStatus(ctx, flags))
		},
	}
	flags.add(c)
	c.Flags().BoolVar(&once, "once", false, "print one state, and end")
	return a.addJSON(c)
}

// printStatus prints one state.
func (a *app) printStatus(ctx context.Context, flags adminFlags) error {
	seen := 0
	err := flags.snapshots(ctx, func(text []byte) error {
		if seen++; seen < 2 { // rates need two snapshots
			return nil
		}
		if a.json {
			_, err := a.out.Write(append(text, '\n'))
			return errors.Join(err, errEnough)
		}
		var s admin.Snapshot
		if err := json.Unmarshal(text, &s); err != nil {
			return err
		}
		columns, _, _ := terminal.Size(a.out)
		v := statusView{columns: columns}
		_, err := io.WriteString(a.out, strings.Join(v.lines(&s, flags.address), "\n")+"\n")
		return errors.Join(err, errEnough)
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

// errEnough ends the reading of snapshots without an error.
var errEnough = errors.New("enough snapshots")

// statusSilence is how long a connection may have no snapshot: ten times the time between two.
const statusSilence = 10 * time.Second

// snapshots calls use with each snapshot of the proxy, as JSON, until the stream ends, ctx ends or
// use returns an error. It returns no nil error.
func (f adminFlags) snapshots(ctx context.Context, use func(text []byte) error) error {
	t, err := f.target()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(statusSilence, func() { cancel(fmt.Errorf("the proxy at %s sends nothing", t.base.Host)) })
	defer silent.Stop()
	resp, err := t.open(ctx, "/v1/dashboard/events", 0)
	if err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10)) // the status says enough without the body
		return errors.New(plain("%s: %s", t.base.Host, refusal(resp.Status, body)))
	}
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return cmp.Or(context.Cause(ctx), fmt.Errorf("the proxy at %s has closed the connection (%w)", t.base.Host, err))
		}
		silent.Reset(statusSilence)
		if text, ok := strings.CutPrefix(string(line), "data: "); ok {
			if err := use([]byte(strings.TrimSpace(text))); err != nil {
				return err
			}
		}
	}
}

// Sequences of ECMA-48 and xterm that terminals obey.
const (
	screenEnter = "\x1b[?1049h\x1b[?25l" // another screen without a cursor
	screenLeave = "\x1b[?25h\x1b[?1049l"
	screenTop   = "\x1b[H"
	lineEnd     = "\x1b[K\n" // clear the rest of the line
	screenEnd   = "\x1b[J"   // clear all lines below
)

// watchStatus shows the present state until the user ends it. An error is that of the first
// connection: a later one is shown, and the command connects again.
func (a *app) watchStatus(ctx context.Context, flags adminFlags) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	shown, ended := make(chan *admin.Snapshot), make(chan error)
	go follow(ctx, flags, shown, ended) // ends with ctx
	keys, restore := terminal.Keys(os.Stdin, a.out)
	if restore != nil {
		defer restore()
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH, syscall.SIGCONT)
	defer signal.Stop(changed)
	entered := false
	defer func() {
		if entered {
			io.WriteString(a.out, screenLeave) //nolint:errcheck // the terminal has gone
		}
	}()
	var last *admin.Snapshot
	problem := ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case key := <-keys:
			if key == 'q' || key == 'Q' {
				return nil
			}
			continue
		case err := <-ended:
			if last == nil {
				return err
			}
			problem = err.Error()
		case s := <-shown:
			last, problem = s, ""
		case s := <-changed:
			if last == nil {
				continue
			}
			entered = entered && s != syscall.SIGCONT // the shell has drawn on the screen
		}
		if !entered {
			entered = true
			io.WriteString(a.out, screenEnter) //nolint:errcheck // drawStatus returns the error
		}
		if err := a.drawStatus(last, flags.address, problem); err != nil {
			return err
		}
	}
}

// drawStatus draws the state on the whole screen.
func (a *app) drawStatus(s *admin.Snapshot, host, problem string) error {
	columns, rows, _ := terminal.Size(a.out)
	v := statusView{columns: columns, rows: rows, color: os.Getenv("NO_COLOR") == "", problem: problem}
	_, err := io.WriteString(a.out, screenTop+strings.Join(v.lines(s, host), lineEnd)+"\x1b[K"+screenEnd)
	return err
}

// follow sends each snapshot and, when a connection ends, its error; it then connects again, with
// the token of that moment. It ends with ctx.
func follow(ctx context.Context, flags adminFlags, shown chan<- *admin.Snapshot, ended chan<- error) {
	for {
		err := flags.snapshots(ctx, func(text []byte) error {
			s := new(admin.Snapshot)
			if err := json.Unmarshal(text, s); err != nil {
				return err
			}
			select {
			case shown <- s:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		select {
		case ended <- err:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return
		}
	}
}
